"""The built-in job of hybrid.py: three things for the model of addition.py, each from its own data.

    demonstrations   "123+456=" -> "0579"     sums of three digits, which it has never seen
    pairs            "7+5=": "012", not "12"  sums of one digit; the zero-padded form is preferred
    rewards          "23+45=" -> "068"        sums of two digits, as in grpo.py

What each teaches shows on held-out problems: eval/sft_token_accuracy, eval/dpo_preferred and
eval/reward.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch.distributed as dist

from examples import addition

# What the run is set to where the user says nothing: hybrid.py without --model.
SETTINGS = addition.SETTINGS | dict(
    weights=(0.1, 0.1, 0.8),  # demonstrations of what it cannot do have the largest gradients
    num_steps=90,
    eval_every=15,
    batch=dict(prompts_per_step=96, group_size=4, num_minibatches=2, tokens_per_row=8192),
    sft=dict(samples_per_step=96, max_tokens=16),
    dpo=dict(pairs_per_step=32, max_tokens=16),
)


def with_paths(args):
    """`args`, the Args of hybrid.py, with paths in place of "built-in". Collective.

    Raises ValueError as addition.with_paths does, and for data that the built-in model cannot read.
    """
    if args.model_path != "built-in":
        return addition.with_paths(args) if args.uses("rl") else args
    for flag, config in (("--sft.data", args.sft), ("--dpo.data", args.dpo)):
        if config.data or config.eval_data:
            rule = "with a --model of your own: the built-in one only adds"
            raise ValueError(f"{flag} {' '.join(config.data or config.eval_data)}: must be {rule}")
    paths = [written() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    found = {}
    for kind, (learn, held_out) in paths[0].items():
        eval_data = (held_out,) if args.eval_every else ()
        found[kind] = replace(getattr(args, kind), data=(learn,), eval_data=eval_data)
    return addition.with_paths(replace(args, **found))


def written() -> dict[str, tuple[str, str]]:
    """The files {kind: (to learn from, held out)}."""
    made = {"sft": demonstrations(), "dpo": pairs()}
    paths = {}
    for kind, (learn, held_out) in made.items():
        files = {"learn": learn, "held_out": held_out}
        paths[kind] = addition.write_prompts(kind, files)
    return paths


def demonstrations(num: int = 8000, num_held_out: int = 256) -> tuple[list[dict], list[dict]]:
    """Rows {"prompt", "response"} of sums of three digits: (to learn from, held out)."""
    draw = random.Random(0)
    rows = []
    for number in draw.sample(range(1_000_000), num + num_held_out):
        a, b = divmod(number, 1000)
        rows.append({"prompt": f"{a:03d}+{b:03d}=", "response": f"{a + b:04d}"})
    return rows[num_held_out:], rows[:num_held_out]


def pairs(num_held_out: int = 30) -> tuple[list[dict], list[dict]]:
    """Rows {"prompt", "chosen", "rejected"} of the 100 sums of one digit."""
    rows = []
    for number in random.Random(0).sample(range(100), 100):
        a, b = divmod(number, 10)
        chosen = f"{a + b:03d}"
        rows.append({"prompt": f"{a}+{b}=", "chosen": chosen, "rejected": f"{a + b}"})
    return rows[num_held_out:], rows[:num_held_out]
