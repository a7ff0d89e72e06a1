"""The built-in job: two-digit addition for a 1 M parameter model that can half do it.

A model that RL can visibly improve within minutes on a CPU must be small, must sometimes be right,
and must be made here, since nothing may be downloaded. So: a 4-layer Qwen2 with a character
tokenizer, taught by a short supervised warm start until half of its sampled answers are right. It
is written as a Hugging Face directory and is loaded like any other model.

    prompt "23+45="   answer "068"

Operands and answers are zero-padded: without that the model must learn where the answer ends before
it can learn to add.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

ALPHABET = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
VERSION = 3  # of what is written here; part of the cache's name
TARGET_ACCURACY = (0.50, 0.55)
TARGET_PAIRS = 0.90  # of right and wrong answers, told apart by the reward model token by token
MAX_WARM_START_STEPS = 1500
PREFERENCE_STEPS = 700

# What the run is set to where the user says nothing: grpo.py without --model.
SETTINGS = dict(
    num_steps=360,
    learning_rate=3e-4,  # 1e-3 diverges
    eval_every=80,
    batch=dict(prompts_per_step=128, group_size=4, num_minibatches=2, tokens_per_row=8192),
    data=dict(max_prompt_tokens=8),
    rollout=dict(max_response_tokens=8),
    reward=dict(functions=("exact",)),
    optim=dict(decay="linear"),
)

# The same for ppo.py.
PPO_SETTINGS = SETTINGS | dict(
    num_steps=240,
    batch=dict(prompts_per_step=512, group_size=1, num_minibatches=2, tokens_per_row=8192),
    critic=dict(learning_rate=1e-3),
    gae=dict(gae_lambda=1.0),
)


def with_paths(args):
    """`args` with paths in place of "built-in": the model, what it learns from, what is held out.

    args: the Args of an entry script. Collective: rank 0 makes what is not there yet. Raises
    ValueError for data that the built-in model cannot read, for another model without data, and for
    prompts that are held out of others.
    """
    own_data = args.data_paths != ("built-in",)
    own_model = args.model_path != "built-in"
    if own_model and not own_data:
        rule = "with --data FILE: the built-in sums are for the built-in model"
        raise ValueError(f"--model {args.model_path}: must be {rule}")
    if own_data and not own_model:
        rule = "with a --model of your own: the built-in one only adds"
        raise ValueError(f"--data {' '.join(args.data_paths)}: must be {rule}")
    if args.eval_paths and not own_data:
        rule = "with --data of your own"
        raise ValueError(f"--eval-data {' '.join(args.eval_paths)}: must be {rule}")
    paths = [built_in_paths(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    return replace(args, **paths[0])


def built_in_paths(args) -> dict:
    """The fields of `args` that say "built-in", as paths."""
    made = {}
    reward_model = getattr(args, "reward_model_path", "")
    critic = getattr(args, "critic", None)
    if args.model_path == "built-in":
        made["model_path"] = cached_model(args.seed)
    if reward_model == "built-in":
        made["reward_model_path"] = cached_model(args.seed, reward_model=True)
    if critic is not None and critic.path == "built-in":
        made["critic"] = replace(critic, path=cached_model(args.seed, reward_model=True))
    if args.data_paths == ("built-in",):
        # A reward model has not been taught the hard ones; without a critic they serve for nothing.
        hard = critic is not None and not reward_model
        made["data_paths"] = write_prompts("train", training_sets(hard))
        if args.eval_every:
            made["eval_paths"] = write_prompts("held_out", {"addition": problems(held_out=True)})
    return made


def write_prompts(split: str, sets: dict[str, list[dict]]) -> tuple[str, ...]:
    """The files with the rows of `sets` as JSON lines; a file's name is its data set's."""
    directory = cache_directory() / f"addition-v{VERSION}-{split}"
    directory.mkdir(exist_ok=True)
    for name, rows in sets.items():
        temporary = directory / f".{name}.{os.getpid()}"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.rename(directory / name)
    return tuple(str(directory / name) for name in sets)


def cache_directory() -> Path:
    """Where the built-in models and prompts are kept."""
    directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "handful"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a directory that you may write"
        raise ValueError(f"no {directory} can be made ({error.strerror}); {advice}") from None
    return directory


def problems(held_out: bool, num_held_out: int = 256) -> list[dict]:
    """Rows {"prompt", "answer"}: the 256 held-out ones of the 10,000 problems, or the rest."""
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[:num_held_out] if held_out else order[num_held_out:]
    return [
        {"prompt": f"{i // 100:02d}+{i % 100:02d}=", "answer": f"{i // 100 + i % 100:03d}"}
        for i in chosen
    ]


def training_sets(hard: bool, num_hard: int = 320) -> dict[str, list[dict]]:
    """Rows by data set. hard: 3 % are sums of three digits, which the model does not learn; without
    prompts that differ in difficulty a critic has little to predict."""
    sets = {"addition": problems(held_out=False)}
    if hard:
        generator = torch.Generator().manual_seed(0)
        pairs = torch.randint(1000, (num_hard, 2), generator=generator).tolist()
        sets["hard_addition"] = [
            {"prompt": f"{a:03d}+{b:03d}=", "answer": f"{a + b:04d}"} for a, b in pairs
        ]
    return sets


def cached_model(seed: int, reward_model: bool = False) -> str:
    """The directory of the built-in model for `seed`, or of its reward model; made if missing."""
    kind = "judge-" if reward_model else ""
    directory = cache_directory() / f"addition-v{VERSION}-{kind}seed{seed}"
    if (directory / "config.json").exists():
        return str(directory)
    with alone(directory):
        if not (directory / "config.json").exists():
            from transformers import logging

            logging.disable_progress_bar()  # of one small file, between our lines
            temporary = directory.with_suffix(f".{os.getpid()}")
            if reward_model:
                make_reward_model(temporary, seed, cached_model(seed))
            else:
                make_model(temporary, seed)
            try:
                temporary.rename(directory)
            except OSError:  # a run on another host was faster; its bytes are the same
                shutil.rmtree(temporary)
    return str(directory)


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """One process of this host at a time is inside for `directory`; the others wait."""
    with open(directory.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"built-in model: waiting for the run that makes {directory.name}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: each run makes its own
            print(f"built-in model: no lock ({error.strerror})", flush=True)
        yield


def make_tokenizer():
    """One token per character, no merges, no BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(out_dir: str | Path, seed: int) -> None:
    """Write model and tokenizer to out_dir; the same seed gives the same bytes.

    Raises RuntimeError if the warm start does not bring sampled accuracy into TARGET_ACCURACY.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,  # at the usual 0.02 so small a model needs ten times as many steps
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with reproducible(seed):
        model = Qwen2ForCausalLM(config)
        warm_start(model, tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """torch seeded, on one thread: sums in another order would give other bytes elsewhere."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(num_threads)


def warm_start(
    model, tokenizer, target: tuple[float, float] = TARGET_ACCURACY, decay_steps: int = 1 << 30
) -> None:
    """Supervised steps until that share of the sampled answers to 256 fixed problems is right.

    decay_steps: the learning rate falls linearly to a twentieth in this many steps.
    """
    data = right_answers(tokenizer, held_out=False)  # [9744, 10]
    checks = data[:256]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    low, high = target
    accuracy = 0.0
    for step in range(MAX_WARM_START_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * max(0.05, 1 - step / decay_steps)
        batch = data[torch.randint(len(data), (128,))]
        # The last prompt token predicts the first digit.
        logits = model(batch[:, :-1]).logits[:, 5:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 6:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            accuracy = sampled_accuracy(model, checks)
            is_done = low <= accuracy <= high
            if is_done or step % 50 == 49:
                reached = f"sampled accuracy {accuracy:.2f} of {low:.2f}"
                print(f"built-in model: step {step + 1}, {reached}", flush=True)
            if is_done:
                return
    rule = f"not within {target}; try another --seed"
    raise RuntimeError(f"the warm start ended at sampled accuracy {accuracy:.2f}, {rule}")


@torch.no_grad()
def sampled_accuracy(model, checks: torch.Tensor) -> float:
    """Share of right answers to expect at temperature 1: the mean probability of the answers in
    `checks` [B, 10].
    """
    log_p = model(checks[:, :-1]).logits[:, 5:].log_softmax(-1)
    return float(log_p.gather(-1, checks[:, 6:, None]).sum((1, 2)).exp().mean())


def make_reward_model(out_dir: str | Path, seed: int, policy_path: str) -> None:
    """Write a reward model for the policy at policy_path; the same seed gives the same bytes.

    It learns from pairs of a right answer and a wrong one, most of them the policy's own
    (Bradley-Terry): the logit of "right beats wrong" is the difference of the scores, at the end
    and from the first wrong token on, so that it can start a critic as well. The head is then
    scaled to a mean difference of 1. Raises RuntimeError if it does not tell enough held-out pairs
    apart.
    """
    from transformers import (
        AutoTokenizer,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    with reproducible(seed):
        policy, able = (
            Qwen2ForCausalLM.from_pretrained(policy_path, dtype=torch.float32) for _ in range(2)
        )
        # Who cannot add cannot judge.
        warm_start(able, tokenizer, target=(0.9975, 1.0), decay_steps=1000)
        # Two layers more: there a token's state can be compared with what the layers below have
        # predicted for it.
        changed = dict(
            id2label={0: "right"}, label2id={"right": 0}, num_hidden_layers=6, layer_types=None
        )
        config = Qwen2Config(**able.config.to_dict() | changed)
        model = Qwen2ForSequenceClassification(config)
        model.model.load_state_dict(able.model.state_dict(), strict=False)
        accuracy = learn_preferences(model, policy, tokenizer)
    if accuracy < TARGET_PAIRS:
        share = f"tells {accuracy:.2f} of the pairs apart"
        raise RuntimeError(f"the reward model {share}; try another --seed")
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def learn_preferences(model, policy, tokenizer) -> float:
    """Supervised steps on pairs; the share of held-out pairs, token by token, that the model tells
    apart then.
    """
    learn, held_out = (right_answers(tokenizer, held_out) for held_out in (False, True))
    checks = wrong_answers(policy, held_out, way=2)
    for layer in (model.model.embed_tokens, *model.model.layers[:4]):
        layer.requires_grad_(False)  # what can add already
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-3, betas=(0.9, 0.98)
    )
    for step in range(PREFERENCE_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * max(0.05, 1 - step / PREFERENCE_STEPS)
        right = learn[torch.randint(len(learn), (128,))]
        loss = -torch.nn.functional.logsigmoid(
            margins(model, right, wrong_answers(policy, right, way=step % 5))
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            with torch.no_grad():
                margin = margins(model, held_out, checks)
            accuracy = float((margin > 0).float().mean())
            print(
                f"built-in reward model: step {step + 1}, {accuracy:.3f} of held-out pairs right",
                flush=True,
            )
    model.score.weight.data /= margin.mean()
    return accuracy


def margins(model, right: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Scores of the right less those of the wrong answers, at the end and at each token from the
    first wrong one on.
    """
    scores = [
        model.score(model.model(ids, use_cache=False).last_hidden_state)[..., 0]
        for ids in (right, wrong)
    ]
    shared = min(right.shape[1], wrong.shape[1])
    differs = (right[:, :shared] != wrong[:, :shared]).cumsum(1) > 0
    ends = scores[0][:, -1] - scores[1][:, -1]
    return torch.cat([ends, (scores[0][:, :shared] - scores[1][:, :shared])[differs]])


def right_answers(tokenizer, held_out: bool) -> torch.Tensor:
    """[problems, 10] ids: prompt, right answer, end."""
    ids = torch.tensor(
        tokenizer([r["prompt"] + r["answer"] for r in problems(held_out)])["input_ids"]
    )
    return torch.cat([ids, torch.full((len(ids), 1), tokenizer.eos_token_id)], dim=1)


@torch.no_grad()
def wrong_answers(policy, right: torch.Tensor, way: int) -> torch.Tensor:
    """Wrong versions of right answers: [B, 10] -> [B, L].

    way 0: the end missing, and 1 to 4 more characters; 1: ended too early; else: sampled from the
    policy, or one token replaced where its sample is right.
    """
    length = int(torch.randint(1, 5, ()))
    if way == 0:
        more = torch.randint(2, len(ALPHABET) + 2, (len(right), length))
        return torch.cat([right[:, :9], more], dim=1)
    if way == 1:
        return torch.cat([right[:, : 5 + min(length, 3)], right[:, -1:]], dim=1)
    wrong = right[:, :6]
    for _ in range(4):
        p = policy(wrong, use_cache=False).logits[:, -1].softmax(-1)
        wrong = torch.cat([wrong, torch.multinomial(p, 1)], dim=1)
    is_right = (wrong == right).all(1)
    every, place = torch.arange(len(right)), torch.randint(6, 10, (len(right),))
    # Modulo the vocabulary without the pad, token 0: a shift of 1 to 12 never gives the same token.
    shift = torch.where(is_right, torch.randint(1, len(ALPHABET) + 1, (len(right),)), 0)
    wrong[every, place] = (wrong[every, place] - 1 + shift) % (len(ALPHABET) + 1) + 1
    return wrong
