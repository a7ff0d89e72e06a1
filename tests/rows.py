"""Models small enough for any test and sequences for them: what a packed row is compared with."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention import use_packed_attention
from packing import sequence

VOCAB_SIZE = 61
ARCHITECTURES = ("llama", "qwen2", "gemma", "gemma3", "gpt2")


def make_model(architecture: str = "llama", *, seed: int = 0, **options) -> nn.Module:
    """A causal language model of 2 layers in fp32 with packed attention and random weights;
    `options` of its config.

    qwen2 has biases; gemma, gemma3 and gpt2 a tied head; gemma3 a sliding window of 4 tokens in its
    first layer; gpt2 learned positions, where a position that does not restart shows.
    """
    import transformers

    sizes = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    sizes |= dict(
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3
    )
    sizes |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if architecture == "gemma3":
        sizes |= dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
        )
    name = {
        "llama": "Llama",
        "qwen2": "Qwen2",
        "gemma": "Gemma",
        "gemma3": "Gemma3Text",
        "gpt2": "GPT2",
    }[architecture]
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if "bias" in name:  # zeros would hide a bias that is left out
                nn.init.normal_(parameter, std=0.3)
    use_packed_attention(model)
    return model


def random_sequences(lengths: list[tuple[int, int]], *, seed: int = 0) -> list[dict[str, Tensor]]:
    """A sequence for pack() per (prompt length, response length): random tokens, advantages of
    random sign.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for num_prompt, num_response in lengths:
        ids = torch.randint(3, VOCAB_SIZE, (num_prompt + num_response,), generator=generator)
        advantage = torch.randn((), generator=generator).item()
        made.append(sequence(ids[:num_prompt], ids[num_prompt:], advantages=advantage))
    return made


def plain_logprobs(
    model: nn.Module, tokens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log pi(tokens[i] | tokens[<i]) and entropy of one sequence alone, [L] and [L], 0 at the first
    token.

    Independent of what is tested: all logits of a forward with Transformers' own attention, and
    log_softmax in float64.
    """
    model.set_attn_implementation("sdpa")
    logits = model(tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    model.set_attn_implementation("packed")
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, tokens[1:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return tuple(torch.cat([torch.zeros(1), x.float()]) for x in (logprobs, entropy))


def best_time_s(run: Callable[[], object], tries: int = 10) -> float:
    """CPU time of the fastest of several runs: other processes can only add to it."""
    times = []
    for _ in range(tries):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)
