#!/usr/bin/env bash
# Qwen2.5-7B-Instruct on GSM8K, engines over two ranks. NOT RUN: only its shape on one H200 (48 s).
# Hardware by arithmetic: 8 GPUs of 80 GB; fp32 weights, gradients, Adam: 7.6 G x 16 B / 8 = 15 GB.
# Time and reward: unknown; eval/reward must rise from its first value.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch.sh python -m pip install datasets
bash launch.sh python -c 'import datasets
datasets.load_dataset("openai/gsm8k", "main", split="test").to_json("gsm8k_test.jsonl")'
bash launch.sh grpo.py --name qwen2.5-7b_gsm8k --model Qwen/Qwen2.5-7B-Instruct \
  --data openai/gsm8k:main --eval-data gsm8k_test.jsonl --eval-every 50 \
  --data.max-prompt-tokens 384 --rollout.max-response-tokens 1024 \
  --data.system-prompt 'Reason step by step. Put the final answer in \boxed{}.' \
  --prompts-per-step 128 --num-minibatches 2 --num-steps 200 --save-every 50 \
  --rollout.tensor-parallel-size 2 --model.activation-checkpointing --model.reduce-every-row "$@"
