#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K; evaluated on its test split at first, every 50 steps, at last.
# NOT RUN: hardware, time and reward below are expectations. Hardware: one GPU of 80 GB.
# Time: unknown; a 1.5 B shape with as many samples of 512 tokens took 16 s a step on one H200.
# Reward: unknown; eval/reward must rise, and response_length/clip_ratio should stay low.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch.sh python -m pip install datasets
bash launch.sh python -c 'import datasets
datasets.load_dataset("openai/gsm8k", "main", split="test").to_json("gsm8k_test.jsonl")'
bash launch.sh grpo.py --name qwen2.5-0.5b_gsm8k --data openai/gsm8k:main \
  --model Qwen/Qwen2.5-0.5B-Instruct \
  --eval-data gsm8k_test.jsonl --eval-every 50 --data.max-prompt-tokens 384 \
  --data.system-prompt 'Reason step by step. Put the final answer in \boxed{}.' \
  --rollout.max-response-tokens 512 --num-minibatches 2 --num-steps 300 --save-every 50 "$@"
