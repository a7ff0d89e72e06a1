"""verl's GRPO (main_ppo, FSDP actor, colocated vLLM server) on the workloads of
benchmarks/end_to_end.py, on one GPU.

    python benchmarks/peers/verl_grpo.py MODEL_DIR gsm8k.jsonl --metrics verl.jsonl

verl adds a line a step to --metrics itself, with its own timings: gen (sampling), old_log_prob,
update_actor, update_weights, step. This program writes the prompts as parquet, then becomes verl.

Settings: no checkpointing, micro-batches by tokens (dynamic), padding removed where the package
flash_attn is there, CUDA graphs captured for the few sizes that are used, an engine that keeps all
samples of a step in flight. verl brings ray, tensordict, hydra-core and more of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path

GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512]
FIXED = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.truncation=left data.shuffle=False data.dataloader_num_workers=0
actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.max_num_batched_tokens=8192
actor_rollout_ref.rollout.agent.num_workers=8
reward.custom_reward_function.name=compute_score reward.num_workers=2
transfer_queue.backend.SimpleStorage.num_data_storage_units=2
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console,file]
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
trainer.resume_mode=disable trainer.total_epochs=1
++ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init._node_ip_address=127.0.0.1
+ray_kwargs.ray_init.object_store_memory=4000000000
"""
ENVIRONMENT = {
    "HYDRA_FULL_ERROR": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "TOKENIZERS_PARALLELISM": "true",
    # All its processes talk over the loopback device: a benchmark machine may have no other.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "no_proxy": "127.0.0.1,localhost",
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_) -> float:
    """verl's reward function: 1 if the last number is the answer."""
    numbers = re.findall(r"-?\d+", solution_str.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == ground_truth)


def write_prompts(source: str, num_rows: int, directory: Path) -> None:
    """The first rows of GSM8K in verl's columns, as train.parquet and val.parquet."""
    import pandas

    rows = []
    for line in Path(source).read_text().splitlines()[:num_rows]:
        row = json.loads(line)
        answer = row["answer"].split("####")[-1].strip().replace(",", "")
        rows.append(
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": row["question"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": len(rows), "split": "train"},
            }
        )
    table = pandas.DataFrame(rows)
    table.to_parquet(directory / "train.parquet")
    table.head(8).to_parquet(directory / "val.parquet")


def settings(args, directory: Path) -> list[str]:
    """What of verl's command line depends on the workload and the machine."""
    packed = importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if packed else "sdpa"
    model = "actor_rollout_ref.model"
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={directory}/train.parquet",
        f"data.val_files={directory}/val.parquet",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.max_prompt}",
        f"data.max_response_length={args.max_new}",
        f"{model}.path={Path(args.model).resolve()}",
        f"{model}.use_remove_padding={packed}",
        f"+{model}.override_config.attn_implementation={attention}",
        f"{model}.enable_gradient_checkpointing={args.checkpointing}",
        f"{actor}.ppo_mini_batch_size={args.prompts}",
        f"{actor}.ppo_max_token_len_per_gpu={args.micro_tokens}",
        f"{rollout}.n={args.samples}",
        f"{rollout}.ignore_eos={args.forced}",
        f"{rollout}.gpu_memory_utilization={args.memory_fraction}",
        f"{rollout}.cudagraph_capture_sizes={GRAPH_SIZES}".replace(" ", ""),
        f"{rollout}.free_cache_engine={args.sleep}",
        f"{rollout}.max_num_seqs={args.prompts * args.samples}",
        f"{rollout}.max_model_len={args.max_prompt + args.max_new}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={directory}/checkpoints",
        f"ray_kwargs.ray_init.num_cpus={os.cpu_count()}",
        # Its sockets lie there, and their paths are limited to 107 characters.
        f"+ray_kwargs.ray_init._temp_dir={tempfile.mkdtemp(prefix='ray')}",
        f"hydra.run.dir={directory}/hydra",
    ]


def in_common_names(line: dict, num_samples: int) -> dict:
    """A line of verl's file logger in the names of benchmarks/end_to_end.py."""
    data = line["data"]
    times = {name[9:]: s for name, s in data.items() if name.startswith("timing_s/")}
    new_tokens = num_samples * data["response_length/mean"]
    sample_s = times["gen"] + times.get("update_weights", 0.0)
    return {
        "step": line["step"] - 1,
        "step_s": times["step"],
        "sample_s": sample_s,
        "score_s": times["step"] - sample_s - times["update_actor"],
        "update_s": times["update_actor"],
        "new_tokens": round(new_tokens),
        "trained_tokens": round(new_tokens + num_samples * data["prompt_length/mean"]),
        "phases": {name: s for name, s in times.items() if name != "step"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--metrics", required=True, help="file to which verl adds a line a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-prompt", type=int, default=512)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--forced", action="store_true", help="always --max-new tokens")
    parser.add_argument("--sleep", action="store_true", help="the engine frees its memory")
    parser.add_argument("--micro-tokens", type=int, default=32768, help="tokens in one forward")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--memory-fraction", type=float, default=0.45, help="the engine's")
    args = parser.parse_args()
    metrics = Path(args.metrics).resolve()
    write_prompts(args.data, args.prompts * (args.steps + 1), metrics.parent)
    flags = [*FIXED.split(), *settings(args, metrics.parent)]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *flags]
    environment = ENVIRONMENT | os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
