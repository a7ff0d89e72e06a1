"""TRL's losses and gradients on a small padded batch, for settings with a counterpart here.

    python tests/trl_losses.py    # where trl 1.16 is installed: writes tests/trl_losses.json

tests/test_copy.py compares losses.py with the numbers of that file.
"""

import json
import math
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import torch

FILE = pathlib.Path(__file__).with_suffix(".json")
LENGTHS = (6, 3, 1, 4)
LONGEST = 8  # max_completion_length
# A name, TRL's settings, and those of losses.LossConfig.
SETTINGS = {
    "grpo": ({"loss_type": "grpo", "beta": 0.04}, {"normalize": "sequence", "kl_coef": 0.04}),
    "bnpo": ({"loss_type": "bnpo", "beta": 0.0}, {"normalize": "token"}),
    "dapo": ({"loss_type": "dapo", "beta": 0.0}, {"normalize": "token"}),
    "dapo, beta": ({"loss_type": "dapo", "beta": 0.04}, {"normalize": "token", "kl_coef": 0.04}),
    "dr_grpo": ({"loss_type": "dr_grpo", "beta": 0.0}, {"normalize": "constant"}),
    "gspo": (
        {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "sequence"},
        {"normalize": "sequence", "ratio": "sequence"},
    ),
    "default KL": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
        {"normalize": "sequence", "kl_coef": 0.04},  # no counterpart: this is the nearest
    ),
}


def batch():
    """logprobs, old and reference log-probabilities [B, T], advantages [B], mask [B, T]; ratios are
    spread by 0.4 nats.
    """
    place = torch.arange(float(len(LENGTHS) * max(LENGTHS))).view(len(LENGTHS), -1)
    logprobs = -1.5 - place.sin()
    old_logprobs = logprobs + 0.4 * (3.0 * place).cos()
    ref_logprobs = logprobs + 0.3 * (5.0 * place).sin()
    advantages = torch.tensor([1.0, -0.5, -1.5, 0.75])
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return logprobs, old_logprobs, ref_logprobs, advantages, mask


def by_trl(loss_type, beta, importance_sampling_level="token", use_bias_correction_kl=False):
    """The loss of TRL's own code, and its gradient at the response tokens."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs, old_logprobs, ref_logprobs, advantages, mask = batch()
    logprobs.requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, 0 * mask, None),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=use_bias_correction_kl, delta=None, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type=loss_type,
        beta=beta,
        importance_sampling_level=importance_sampling_level,
        epsilon_low=0.2,
        epsilon_high=0.28,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    ids = mask.long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": ids,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad[mask].tolist()}


if __name__ == "__main__":
    found = {name: by_trl(**theirs) for name, (theirs, _) in SETTINGS.items()}
    assert all(math.isfinite(each["loss"]) for each in found.values())
    FILE.write_text(json.dumps(found, indent=1) + "\n")
