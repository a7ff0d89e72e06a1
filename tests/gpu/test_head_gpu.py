"""The head on a GPU: compiled as written out, both as float64, and within its memory."""

import pytest
import torch

from logprobs import head_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def make(num_tokens, hidden_size, num_words, dtype):
    torch.manual_seed(0)
    with torch.device("cuda"):
        hidden = torch.randn(num_tokens, hidden_size)
        weight = 3 * torch.randn(num_words, hidden_size) / hidden_size**0.5
        targets = torch.randint(num_words, (num_tokens,))
        grads = torch.randn(2, num_tokens)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, grads


def exact(hidden, weight, targets):
    log_p = (hidden.double() @ weight.double().t()).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_those_in_float64(dtype, fused):
    hidden, weight, targets, grads = make(700, 256, 30_001, dtype)
    found = head_logprobs(hidden, weight, None, targets, fused=fused)
    expected = exact(hidden, weight, targets)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    leaves = hidden, weight
    ours = torch.autograd.grad(found, leaves, tuple(grads))
    theirs = torch.autograd.grad(expected, leaves, tuple(grads.double()))
    # In bf16 the logits' gradient is rounded on its way into two products.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert max(map(relative_error, ours, theirs)) < limit


@pytest.mark.parametrize("fused", [False, True])
def test_the_memory_of_16384_tokens_and_152000_words_is_at_most_1_gb_beyond_the_gradients(fused):
    hidden, weight, targets, grads = make(16_384, 1536, 152_000, torch.bfloat16)
    results = head_logprobs(hidden, weight, None, targets, fused=fused)  # compiles
    torch.autograd.backward(results, tuple(grads))
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = head_logprobs(hidden, weight, None, targets, fused=fused)
    torch.autograd.backward(results, tuple(grads))
    gradients = 2 * hidden.numel() + 4 * weight.numel()  # the head's is summed in fp32
    assert torch.cuda.max_memory_allocated() - before - gradients < 1e9
