# SPDX-FileCopyrightText: 2026 handful contributors (plan.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Plan: what a run will do, checked and printed before it takes any memory.

The problem. A rule between settings of different groups belongs to none of them, and whoever breaks
it learns so when the first row does not fit. What a run amounts to, in samples, tokens and
engines, follows from ten settings that nobody multiplies by hand.

How it works. `check` holds the rules that all scripts share; each is refused with the flag, its
value, the rule, and what to type. `print_plan` says the arithmetic:
       model  models/x: 494.0 M parameters on 8 ranks: weights 0.23, gradients 0.23, ...
        data  7473 prompts for 200 steps, 1319 to evaluate
       ranks  8; 8 vllm engines
       batch  64 prompts x 8 = 512 samples of up to 512 + 1024 tokens; 1 epochs x 1 minibatches ...

What we give up: an estimate of activations and of time, which only a step can tell.

Copied:
    from plan import require
    batch = 64
    parts = 4
    require(batch % parts == 0, "--num-minibatches", parts, f"a divisor of {batch}")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def require(holds: object, flag: str, value: object, rule: str) -> None:
    """ValueError "flag value: must be rule" unless `holds`."""
    if not holds:
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        raise ValueError(f"{flag} {value}: must be {rule}")


def check(args: Any) -> None:
    """The rules between settings of different groups that all scripts share; args: their Args."""
    require(args.num_steps >= 1, "--num-steps", args.num_steps, "at least 1; try 200")
    rate = args.learning_rate
    require(0 < rate < 1, "--learning-rate", rate, "above 0 and below 1; try 1e-6")
    require(0 <= args.seed < 2**32, "--seed", args.seed, "at least 0, and below 2^32")
    require(1 <= args.timeout_s < 1e7, "--timeout-s", args.timeout_s, "at least 1; try 3600")
    require(args.eval_every >= 0, "--eval-every", args.eval_every, "at least 0 (never)")
    require(args.eval_samples >= 0, "--eval-samples", args.eval_samples, "at least 0 (none)")
    require(args.verify_every >= 0, "--verify-every", args.verify_every, "at least 0 (never)")
    if args.eval_every == 0:
        no_samples = args.eval_samples == 0
        require(no_samples, "--eval-samples", args.eval_samples, "0, or with --eval-every 20")
        require(not args.eval_paths, "--eval-data", args.eval_paths, "with --eval-every 20")
    least = longest(args)
    rule = f"at least {least}, --data.max-prompt-tokens + --rollout.max-response-tokens"
    row = args.batch.tokens_per_row
    samples = not hasattr(args, "uses") or args.uses("rl")  # hybrid.py may do without
    require(row >= least or not samples, "--tokens-per-row", row, rule)
    passes = args.batch.num_minibatches * args.batch.num_epochs * getattr(args, "rollout_every", 1)
    rule = "0 with one minibatch and one epoch: no later step could be left out"
    require(args.loss.target_kl == 0 or passes > 1, "--loss.target-kl", args.loss.target_kl, rule)
    if args.model_path != "built-in":
        critic = getattr(getattr(args, "critic", None), "path", "")
        judges = {"--reward-model": getattr(args, "reward_model_path", ""), "--critic.path": critic}
        for flag, path in judges.items():
            require(path != "built-in", flag, path, "a model with the tokens of your --model")
    dtype = args.model.master_dtype
    is_plain = dtype == "float32" or args.lora.rank == 0
    require(is_plain, "--model.master-dtype", dtype, "float32 with --lora.rank, whose adapters are")
    if args.rollout.eight_bit:
        kind = args.loss.importance
        rule = "token: an 8-bit sampler is another policy"
        require(kind != "off", "--loss.importance", kind, rule)


def check_groups(args: Any) -> None:
    """The rules of a script whose advantages come from groups."""
    tries = args.resample_tries
    require(tries >= 1, "--resample-tries", tries, "at least 1")
    if args.batch.group_size == 1:
        rule = "1 with groups of 1, which have no spread"
        require(tries == 1, "--resample-tries", tries, rule)
        has_others = args.advantage.baseline == "batch"
        require(has_others, "--group-size", 1, "at least 2; try 8")
    every = args.refresh_every
    require(every >= 0, "--refresh-every", every, "at least 0 (never)")
    has_use = args.needs_reference or every == 0
    require(has_use, "--refresh-every", every, "0 without --loss.kl-coef: there is no reference")
    has_own = args.lora.rank == 0 or every == 0
    require(has_own, "--refresh-every", every, "0 with --lora.rank: the base is the reference")
    buffer = args.advantage.overlong_buffer
    limit = args.rollout.max_response_tokens
    rule = f"at most --rollout.max-response-tokens {limit}"
    require(buffer <= limit, "--advantage.overlong-buffer", buffer, rule)


def longest(args: Any) -> int:
    """Tokens of a prompt with its response, at most."""
    return args.data.max_prompt_tokens + args.rollout.max_response_tokens


def require_columns(datasets: Sequence[Sequence], wanted: dict[str, list[str]]) -> None:
    """ValueError if a reward function wants a column that a data set has in no row.

    datasets: lists of data.Prompt. wanted: {function: columns}.
    """
    for prompts in datasets:
        known = {"prompt", "response", "truncated"}
        known.update(*(prompt.columns for prompt in prompts))
        if any(prompt.answer != "" for prompt in prompts):
            known.add("answer")
        has = f"{prompts[0].source} has {', '.join(sorted(known))}"
        for function, names in wanted.items():
            for name in names:
                if name not in known:
                    wants = f"wants {name}, which is no column; {has}"
                    raise ValueError(f"--reward.functions {function}: {wants}")


def print_plan(args: Any, datasets: Sequence, eval_sets: Sequence, **models: str) -> None:
    """The arithmetic of a run as a table, on rank 0."""
    if dist.get_rank() != 0:
        return
    num_prompts, num_evals = (sum(map(len, sets)) for sets in (datasets, eval_sets))
    num_ranks = dist.get_world_size()
    num_engines = num_ranks // args.rollout.tensor_parallel_size
    plan = models | {
        "data": f"{num_prompts} prompts for {args.num_steps} steps, {num_evals} to evaluate",
        "ranks": f"{num_ranks}; {num_engines} {args.rollout.backend} engines",
        "batch": args.batch.describe(args.data.max_prompt_tokens, args.rollout.max_response_tokens),
    }
    lines = [*plan.items(), *(("warning", text) for text in _warnings(args, num_prompts))]
    for name, text in lines:
        print(f"{name:>8}  {text}", flush=True)


def _warnings(args: Any, num_prompts: int) -> list[str]:
    """What is allowed, and is seldom meant."""
    found = []
    warmup = args.optim.warmup_steps
    if warmup >= args.num_steps:
        found.append(f"--optim.warmup-steps {warmup} outlasts the run of {args.num_steps} steps")
    if num_prompts < args.batch.prompts_per_step:
        times = args.batch.prompts_per_step / num_prompts
        found.append(f"a step takes each of the {num_prompts} prompts {times:.1f} times")
    for path in sorted(set(args.data_paths) & set(args.eval_paths)):
        found.append(f"{path} is in --data and in --eval-data: it is evaluated on what it learned")
    return found
