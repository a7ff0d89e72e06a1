#!/usr/bin/env bash
# Qwen2.5-7B-Instruct on GSM8K by adapters of rank 32, with a KL term. NOT RUN: only its shape.
# Hardware by arithmetic: 1 GPU of 80 GB; frozen bf16 base 15 GB, adapters and Adam 1.3 GB, and the
# engine's 28 GB while it samples. Time and reward: unknown; eval/reward must rise.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch.sh python -m pip install datasets
bash launch.sh python -c 'import datasets
datasets.load_dataset("openai/gsm8k", "main", split="test").to_json("gsm8k_test.jsonl")'
bash launch.sh grpo.py --name qwen2.5-7b_gsm8k_lora --model Qwen/Qwen2.5-7B-Instruct \
  --data openai/gsm8k:main --eval-data gsm8k_test.jsonl --eval-every 50 --num-steps 200 \
  --data.max-prompt-tokens 384 --rollout.max-response-tokens 1024 --rollout.memory-fraction 0.45 \
  --data.system-prompt 'Reason step by step. Put the final answer in \boxed{}.' \
  --lora.rank 32 --learning-rate 1e-5 --loss.kl-coef 0.001 --model.activation-checkpointing "$@"
