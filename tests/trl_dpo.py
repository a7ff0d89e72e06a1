"""TRL's DPO losses and gradients on a small padded batch of pairs.

    python tests/trl_dpo.py    # where trl 1.16 is installed: writes tests/trl_dpo.json

tests/test_supervised.py compares preference_loss with the numbers of that file.
"""

import json
import math
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import torch

FILE = pathlib.Path(__file__).with_suffix(".json")
CHOSEN = (6, 3, 1, 4)  # response tokens
REJECTED = (2, 5, 1, 7)
KL_COEF = 0.3
# TRL's loss, and the settings of supervised.DpoConfig.
SETTINGS = {
    "sigmoid": {},
    "sigmoid_norm": {"length_normalize": True},
    "ipo": {"loss": "ipo", "length_normalize": True},
}


def batch():
    """Log-probabilities of the policy and of the reference [8, 8], mask [8, 8]: the chosen texts,
    then the rejected ones. Column 0 is the prompt.
    """
    place = torch.arange(64.0).view(8, 8)
    logprobs = -1.5 - place.sin()
    ref_logprobs = logprobs + 0.4 * (5.0 * place).sin()
    lengths = torch.tensor([*CHOSEN, *REJECTED])[:, None]
    mask = (torch.arange(8) > 0) & (torch.arange(8) <= lengths)
    return logprobs, ref_logprobs, mask


def by_trl(loss_type):
    """The loss of TRL's own code, and its gradient at the response tokens."""
    from trl.trainer.dpo_trainer import DPOTrainer

    logprobs, ref_logprobs, mask = batch()
    logprobs.requires_grad_()

    def gives(values):
        """A model with these log-probabilities, 0 at tokens that do not count, as TRL's head."""
        kept = torch.where(mask, values, 0.0)[:, 1:]
        others = dict.fromkeys(("entropy", "mean_logits"), 0 * kept)
        return lambda **_: SimpleNamespace(log_probs=kept, is_top1=mask[:, 1:], **others)

    model = gives(logprobs)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        model=SimpleNamespace(training=True, peft_config=None),
        ref_model=gives(ref_logprobs),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=KL_COEF,
        use_weighting=False,
    )
    inputs = {
        "input_ids": mask.long(),
        "attention_mask": torch.ones(8, 8, dtype=torch.int64),
        "completion_mask": mask.long(),
    }
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad[mask].tolist()}


if __name__ == "__main__":
    from trl.trainer import dpo_trainer

    dpo_trainer.disable_gradient_checkpointing = lambda *_: torch.no_grad()
    dpo_trainer.is_peft_model = lambda _: False
    found = {name: by_trl(name) for name in SETTINGS}
    assert all(math.isfinite(each["loss"]) for each in found.values())
    FILE.write_text(json.dumps(found, indent=1) + "\n")
