"""One step of grpo.py on a CPU: two prompts, two samples each, and what each phase hands on.

    python examples/one_step.py

The calls are those of grpo.py in its order. The model is the built-in one, made at the first call
in about a minute. The batch serves two passes: in the second one the ratio has moved.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import advantages
import attention
import data
import exchange
import hf_backend
import logprobs
import losses
import model
import optim
import packing
import reshard
import rewards
import rollout
import run
from batch import BatchConfig
from examples import addition


def main(seed: int = 24) -> None:
    path = addition.cached_model(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = model.load_policy(path, run.init_distributed(seed, timeout_s=600.0))
    attention.use_packed_attention(policy)
    optimizer = optim.make_optimizer(policy, optim.OptimConfig(), 3e-4)
    sizes = dict(max_prompt_tokens=8, num_samples=4, stop_ids=[tokenizer.eos_token_id], seed=seed)
    config = rollout.RolloutConfig(max_response_tokens=8)
    engine = rollout.Engine(hf_backend.HfBackend, path, config, **sizes)
    questions = addition.problems(held_out=True)[seed : seed + 2]
    prompts = data.to_prompts(questions, tokenizer, data.DataConfig(), "addition")

    print("1. Sample. The engine gets the policy's weights and answers each prompt twice.")
    with engine.awake():
        reshard.sync_weights(policy, engine)
        samples = engine.generate([p.prompt_ids for p in prompts], 2, seed=seed)
    known = []
    for i, sample in enumerate(samples):
        text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        known.append({"response": text, "answer": prompts[i // 2].answer})
        print(f"   {prompts[i // 2].text}{text:4}", sample.prompt_ids, sample.response_ids)

    print("2. Score. Is the answer right, and how much better is it than the others to its prompt?")
    scores = torch.tensor(rewards.score(["exact"], known, num_workers=1)[0]).reshape(2, 2)
    better = advantages.group_advantages(scores)
    print(f"   rewards [P, G] {scores.tolist()}; advantages [P, G] {better.tolist()}")

    print("3. Lay out. All sequences lie in one row; attention stops where cu_seqlens says.")
    config = BatchConfig(2, 2, num_epochs=2, tokens_per_row=64)  # P = 2, G = 2
    made = [
        packing.sequence(s.prompt_ids, s.response_ids, advantages=a, rollout_logprobs=s.logprobs)
        for s, a in zip(samples, better.flatten().tolist(), strict=True)
    ]
    rows, [total] = packing.lay_out(made, [0] * 4, config, exchange=exchange.exchange, like=made[0])
    print(f"   cu_seqlens {rows[0][0].cu_seqlens.tolist()}; response tokens, sequences: {total}")
    print("   tokens       ", *tokenizer.convert_ids_to_tokens(rows[0][0].tokens))
    print("   position_ids ", *rows[0][0].position_ids.tolist())
    print("   response_mask", *rows[0][0].fields["response_mask"].int().tolist())

    print("4. Log-probabilities of the policy as it is now: old_logprobs, in the tables below.")
    [[row]] = logprobs.with_logprobs(policy, rows, "old_logprobs", temperature=1.0)
    a, sampler, old = (row.fields[n] for n in ("advantages", "rollout_logprobs", "old_logprobs"))

    for epoch in range(config.num_epochs):
        print(f"5. Update, pass {epoch + 1}.")
        print("   token advantage  sampler      old      new    ratio     loss")
        new, entropy = logprobs.token_logprobs(policy, row, temperature=1.0)
        for i in row.fields["response_mask"].nonzero().flatten().tolist():
            alone = replace(row, fields=row.fields | {"response_mask": torch.arange(len(new)) == i})
            term, _ = losses.actor_loss(new, entropy, alone, total, losses.LossConfig(), 8)
            numbers = (a[i], sampler[i], old[i], new[i], (new[i] - old[i]).exp(), term)
            print(f"   {tokenizer.decode(row.tokens[i]):5}", *(f"{x.item():8.4f}" for x in numbers))
        loss, _ = losses.actor_loss(new, entropy, row, total, losses.LossConfig(), 8)
        loss.backward()
        norm = optim.optimizer_step(policy, optimizer, 3e-4, max_grad_norm=1.0)
        print(f"   loss, the sum of these terms: {loss.item():.4f}; gradient norm {norm:.3f}")

    with engine.awake():
        print("1. Next step. Bytes sent:", reshard.sync_weights(policy, engine))


if __name__ == "__main__":
    argparse.ArgumentParser("examples/one_step.py", description=__doc__).parse_args()
    main()
