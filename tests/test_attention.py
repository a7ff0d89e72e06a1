"""Packed attention against masked attention in float64: within sequences, within windows, and at
what cost.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rows import best_time_s, make_model, random_sequences
from torch import nn

import attention
from attention import packed_attention, rotary_limit, use_packed_attention
from logprobs import token_logprobs
from packing import pack


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(num_tokens, heads=4, kv_heads=2, size=8, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (1, heads, num_tokens, size),
        (1, kv_heads, num_tokens, size),
        (1, kv_heads, num_tokens, size),
    ]
    return [
        torch.randn(shape, generator=generator).to(**options).requires_grad_() for shape in shapes
    ]


def attend(q, k, v, lengths, **options):
    cu_seqlens = boundaries(lengths).to(q.device)
    return packed_attention(
        nn.Identity(), q, k, v, None, cu_seq_lens_q=cu_seqlens, max_length_q=max(lengths), **options
    )[0]


def reference(q, k, v, lengths, scaling=None, sliding_window=None):
    """[1, N, H, D] by one matrix of all scores, in float64, with what must not be seen at minus
    infinity.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(owner))[:, None] - torch.arange(len(owner))
    seen = (owner[:, None] == owner) & (distance >= 0)
    if sliding_window:
        seen &= distance < sliding_window
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


LENGTHS = [5, 1, 9, 5, 2, 9, 17, 1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options", [{}, {"scaling": 0.2}, {"sliding_window": 4}, {"sliding_window": 100}], ids=str
)
def test_each_token_attends_to_the_past_of_its_own_sequence(kv_heads, options):
    tensors = inputs(sum(LENGTHS), kv_heads=kv_heads)
    found, expected = attend(*tensors, LENGTHS, **options), reference(*tensors, LENGTHS, **options)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    exact = torch.autograd.grad((expected * weights).sum(), tensors)
    for x, y in zip(gradients, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)  # sums of some 20 terms


def test_missing_boundaries_raise_instead_of_attending_over_the_row():
    q, k, v = inputs(6)
    with pytest.raises(
        ValueError, match="Identity got no cu_seq_lens_q: pass the row's cu_seqlens"
    ):
        packed_attention(nn.Identity(), q, k, v, None)
    model = make_model()
    with pytest.raises(ValueError, match="LlamaAttention got no cu_seq_lens_q"):
        model(torch.ones(1, 6, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "attention_mask", "two rows", "values"])
def test_what_the_backends_do_not_compute_is_refused(option):
    q, k, v = (x.detach() for x in inputs(6))
    mask = torch.ones(6, 6, dtype=torch.bool) if option == "attention_mask" else None
    options = {"softcap": {"softcap": 30.0}, "s_aux": {"s_aux": torch.zeros(4)}}.get(option, {})
    if option == "two rows":
        q, k, v = (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    if option == "values":  # of DeepSeek's latent attention
        v = v[..., :4]
    with pytest.raises(
        ValueError,
        match="one row without a mask, values .*, and has no soft-cap or attention sinks; use a",
    ):
        packed_attention(
            nn.Identity(), q, k, v, mask, cu_seq_lens_q=boundaries([6]), max_length_q=6, **options
        )


MIXED = dict(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Bloom", {}, "code of its own"),  # computes alibi attention itself
        ("Lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}, "conv"),
        ("RecurrentGemma", {}, "(code of its own|linear_attention)"),  # by the version
        ("Mamba", {}, ""),
    ],
)
def test_a_model_that_mixes_tokens_by_other_ways_is_refused(name, options, reason):
    """Each of these runs with packed attention chosen, and lets neighbours through in silence."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**MIXED | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError,
        match=f"mixes tokens by {reason}.* use a model of full or sliding-window attention",
    ):
        use_packed_attention(model)


def test_defaults_that_lose_the_boundaries_elsewhere_do_not_here():
    """With Transformers' sdpa an all-ones mask or a cache in evaluation mode changes
    log-probabilities by about 2.
    """
    model = make_model().eval()
    (row,) = pack(random_sequences([(3, 9), (5, 1), (2, 20)]), 50)
    known = dict(
        position_ids=row.position_ids[None],
        cu_seq_lens_q=row.cu_seqlens,
        cu_seq_lens_k=row.cu_seqlens,
    )
    known |= dict(max_length_q=row.max_seqlen, max_length_k=row.max_seqlen)
    with torch.no_grad():
        expected = model(row.tokens[None], use_cache=False, **known).logits
        assert model(row.tokens[None], **known).logits.equal(expected)
        mask = torch.ones(1, len(row.tokens), dtype=torch.int64)
        assert model(row.tokens[None], attention_mask=mask, **known).logits.equal(expected)


def test_gradient_checkpointing_keeps_the_boundaries_in_the_recomputed_forward():
    model = make_model("gemma3").train()
    (row,) = pack(random_sequences([(3, 9), (5, 1), (2, 20)]), 50)

    def gradients():
        model.zero_grad()
        token_logprobs(model, row)[0].sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    for x, y in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())
    handle.remove()
    assert len(calls) == 2  # it was recomputed


def test_there_is_one_kernel_call_per_length(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or real(*a, **k)
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 16, (512,), generator=generator).tolist()
    attend(*inputs(sum(lengths)), lengths)
    assert len(calls) == len(set(lengths)) == 11


@pytest.mark.parametrize("lengths", ["512 of 10", "512 of 5 to 15"])
def test_many_short_sequences_cost_at_most_three_padded_calls(lengths):
    """Forward and backward. Slices of the row in a loop cost 25 padded calls."""
    drawn = torch.randint(5, 16, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [10] * 512 if lengths == "512 of 10" else drawn
    tensors = inputs(sum(lengths), size=32)
    padded = [
        x.detach().new_zeros(512, x.shape[1], max(lengths), 32).requires_grad_() for x in tensors
    ]

    def packed_call():
        attend(*tensors, lengths).sum().backward()

    def padded_call():
        F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True).sum().backward()

    assert best_time_s(packed_call) <= 3 * best_time_s(padded_call)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.2}, {"sliding_window": 4}], ids=str)
def test_the_gpu_kernel_attends_as_the_cpu_segments_do(kv_heads, options):
    lengths = [5, 1, 200, 5, 33]
    on_cpu = inputs(sum(lengths), kv_heads=kv_heads, size=64)
    on_gpu = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in on_cpu]
    expected, found = attend(*on_cpu, lengths, **options), attend(*on_gpu, lengths, **options)
    torch.testing.assert_close(
        found.float().cpu(), expected, rtol=2e-2, atol=2e-2
    )  # bf16 has 8 bits
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad((expected * weights).sum(), on_cpu)
    for x, y in zip(
        torch.autograd.grad((found.float() * weights.cuda()).sum(), on_gpu), exact, strict=True
    ):
        assert (x.float().cpu() - y).norm() < 2e-2 * y.norm()


# What the row's other sequences would change, and what sees the future

ROTARY = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROTARY)
def test_a_sequence_has_the_same_rotary_angles_alone_and_in_a_row_or_is_refused(kind):
    """0.36 nats (longrope) and 0.10 (dynamic) between alone and beside one of 48 tokens."""
    rope = ROTARY[kind] | {"rope_theta": 10000.0}
    positions = 16 if kind == "dynamic" else 64
    model = make_model(rope_parameters=rope, max_position_embeddings=positions)
    lengths = [(3, 9), (4, 44)]
    if kind in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match="depend on a row's longest sequence above 16 tok"):
            token_logprobs(model, pack(random_sequences(lengths), 60)[0])
        lengths = [(3, 9), (4, 12)]
    alone, other = random_sequences(lengths)
    (row,) = pack([alone, other], 60)
    (single,) = pack([alone], 60)
    start = row.source.index(0) and int(row.cu_seqlens[1])
    with torch.no_grad():
        found = token_logprobs(model, row)[0][start : start + 12]
        torch.testing.assert_close(found, token_logprobs(model, single)[0], rtol=1e-5, atol=1e-5)


def test_a_rotary_kind_that_is_not_known_and_one_of_one_layer_type_have_a_limit():
    scaled = {"rope_type": "new", "original_max_position_embeddings": 32}
    config = SimpleNamespace(rope_parameters=scaled, max_position_embeddings=64)
    assert rotary_limit(config) == 32
    by_layer = {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}
    config = SimpleNamespace(rope_parameters=by_layer, max_position_embeddings=64)
    assert rotary_limit(config) == 32
    config = SimpleNamespace(rope_scaling={"type": "dynamic"}, max_position_embeddings=64)
    assert rotary_limit(config) == 64
    assert rotary_limit(SimpleNamespace()) is None


def test_chunks_are_no_full_attention():
    """Llama 4's."""
    model = make_model()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="mixes tokens by chunked_attention, which would cross"):
        use_packed_attention(model)


@pytest.mark.parametrize("kind", ["BERT", "Gemma 3", "Llama"])
def test_a_model_in_which_tokens_see_what_comes_after_them_is_refused(kind):
    """They became causal, in silence: hidden states off by up to 2.9."""
    import transformers

    if kind == "BERT":
        model = transformers.BertModel(transformers.BertConfig(**MIXED))
    elif kind == "Llama":
        model = make_model()
        model.config.is_causal = False
    else:
        sizes = MIXED | dict(num_key_value_heads=2, head_dim=8)
        config = transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match=f"{type(model).__name__}: is not causal: packed attention"
    ):
        use_packed_attention(model)


def test_a_call_that_wants_dropout_or_the_future_is_refused():
    q, k, v = (x.detach() for x in inputs(6))
    known = dict(cu_seq_lens_q=boundaries([6]), max_length_q=6)
    with pytest.raises(ValueError, match="drops nothing; set attention_dropout of its config to 0"):
        packed_attention(nn.Identity(), q, k, v, None, dropout=0.5, **known)
    with pytest.raises(ValueError, match="Identity: is not causal: packed attention lets a"):
        packed_attention(nn.Identity(), q, k, v, None, is_causal=False, **known)


def test_the_way_back_to_padded_batches_is_named_and_works():
    model = make_model()
    with pytest.raises(ValueError, match=r'call model.set_attn_implementation\("sdpa"\) first'):
        model(torch.ones(2, 6, dtype=torch.int64), use_cache=False)
    model.set_attn_implementation("sdpa")
    assert model(torch.ones(2, 6, dtype=torch.int64), use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_transformers_makes_no_mask_and_looks_for_no_packed_sequences(monkeypatch, kind):
    """Its look at the positions would wait for the device in each forward."""
    from transformers import masking_utils

    def refuse(*args, **kwargs):
        raise AssertionError("positions were read")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    model = make_model(kind)
    [row] = pack(random_sequences([(3, 9), (5, 1)]), 20)
    assert torch.isfinite(token_logprobs(model, row)[0]).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_gpu_kernel_is_asked_for_the_past_inside_the_window(monkeypatch, window, kv_heads):
    """The kernel's window is what lies before a token; ours counts the token itself as well."""

    def kernel(q, k, v, starts, key_starts, longest, longest_k, *, scale, window_size, **gqa):
        lengths = starts.diff().tolist()
        before, after = window_size
        assert longest == max(lengths) and after == 0
        assert key_starts is starts and longest_k == longest
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return reference(*heads_first, lengths, scale, before + 1 if before >= 0 else None)[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    q, k, v = inputs(sum(LENGTHS), kv_heads=kv_heads)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    spans = attention.Spans(edges, edges, max(LENGTHS), max(LENGTHS))
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    found = attention._varlen_attention(*flat, None, window, spans)
    expected = reference(q, k, v, LENGTHS, sliding_window=window)[0]
    torch.testing.assert_close(found, expected)


# Sequences whose queries see more keys than their own (prefix.py): 6 tokens whole, then 3 and 1
# that see 4 of them, then one of 2 alone

KEY_INDEX = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8, 0, 1, 2, 3, 9, 10, 11]
SHARED = dict(
    cu_seq_lens_q=torch.tensor([0, 6, 9, 10, 12], dtype=torch.int32),
    max_length_q=6,
    cu_seq_lens_k=torch.tensor([0, 6, 13, 18, 20], dtype=torch.int32),
    max_length_k=7,
    key_index=torch.tensor(KEY_INDEX),
)


def shared_reference(q, k, v, sliding_window=None):
    """Each sequence alone, with its keys gathered and queries of its whole length."""
    outputs = []
    edges = [0, 6, 9, 10, 12], [0, 6, 13, 18, 20]
    for (start, end), (first, last) in zip(*map(list, map(pairs, edges)), strict=True):
        index = torch.tensor(KEY_INDEX[first:last])
        alone = (x[:, :, index] for x in (q, k, v))
        outputs.append(reference(*alone, [last - first], None, sliding_window)[:, start - end :])
    return torch.cat(outputs, 1)


def pairs(edges):
    return itertools.pairwise(edges)


def by_sequence(q, k, v, starts, key_starts, window_size):
    """What the GPU's kernel does, in float64, for each sequence: slices of queries and keys, and
    the probabilities [H, queries, keys], causal and aligned at the end.
    """
    before, _ = window_size
    edges = starts.tolist(), key_starts.tolist()
    for (start, end), (first, last) in zip(*map(pairs, edges), strict=True):
        scores = torch.einsum("nhd,mhd->hnm", q[start:end], k[first:last]) * q.shape[-1] ** -0.5
        num_q, num_k = scores.shape[1:]
        distance = torch.arange(num_k - num_q, num_k)[:, None] - torch.arange(num_k)
        seen = (distance >= 0) & (distance <= (before if before >= 0 else num_k))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        yield slice(start, end), slice(first, last), weights


def use_stand_ins(monkeypatch):
    """The GPU's two operations, forward and backward, on a CPU."""

    def repeated(q, k, v):
        num = q.shape[1] // k.shape[1]
        return q.double(), *(x.double().repeat_interleave(num, dim=1) for x in (k, v))

    def forward(q, k, v, starts, key_starts, longest, longest_k, **options):
        assert longest == starts.diff().max() and longest_k == key_starts.diff().max()
        assert options["return_aux"].lse
        wide = repeated(q, k, v)
        out = torch.zeros_like(q)
        for rows, keys, p in by_sequence(*wide, starts, key_starts, options["window_size"]):
            out[rows] = torch.einsum("hnm,mhd->nhd", p, wide[2][keys]).to(q.dtype)
        return out, torch.full((q.shape[1], q.shape[0]), 7.0)

    def backward(grad, q, k, v, out, lse, starts, key_starts, longest, longest_k, *rest):
        is_causal, state, _, window_size = rest
        assert longest == starts.diff().max() and longest_k == key_starts.diff().max()
        assert (lse == 7).all() and lse.shape == (q.shape[1], q.shape[0])
        assert is_causal == (window_size[0] == -1) and (state == 0).all()
        wide = repeated(q, k, v)
        grads = [torch.zeros_like(x) for x in wide]
        delta = (grad.double() * out).sum(-1)  # [N, H]
        for rows, keys, p in by_sequence(*wide, starts, key_starts, window_size):
            grads[2][keys] = torch.einsum("hnm,nhd->mhd", p, grad[rows].double())
            dp = torch.einsum("nhd,mhd->hnm", grad[rows].double(), wide[2][keys])
            ds = p * (dp - delta[rows].t()[..., None]) * q.shape[-1] ** -0.5
            grads[0][rows] = torch.einsum("hnm,mhd->nhd", ds, wide[1][keys])
            grads[1][keys] = torch.einsum("hnm,nhd->mhd", ds, wide[0][rows])
        shapes = q.shape[1], k.shape[1], v.shape[1]
        return [
            x.unflatten(1, (heads, -1)).sum(2).to(q.dtype)
            for x, heads in zip(grads, shapes, strict=True)
        ]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", forward)
    monkeypatch.setattr("torch.nn.attention.varlen._varlen_attn_backward", backward)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["segments", "kernel"])
def test_queries_see_the_keys_that_are_gathered_for_them_up_to_the_end(
    monkeypatch, backend, window
):
    """A mask aligned at the start would let the first response see one token of the prompt."""
    tensors = inputs(12)
    if backend == "kernel":
        use_stand_ins(monkeypatch)
        q, k, v = (x[0].transpose(0, 1) for x in tensors)
        order = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
        spans = [SHARED[name] for name in order]
        out = attention._gathered_varlen(q, k, v, SHARED["key_index"], *spans, None, window or 0)
        found = out[0][None]
    else:
        found = packed_attention(nn.Identity(), *tensors, None, sliding_window=window, **SHARED)[0]
    expected = shared_reference(*tensors, sliding_window=window)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    exact = torch.autograd.grad((expected * weights).sum(), tensors)
    for x, y in zip(gradients, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_key_that_many_see_are_added_up_in_fp32(monkeypatch):
    """In bf16 a GPU's sum of 1 and 300 times 2^-9 is 1; a CPU's is not rounded on the way."""
    dtypes = []
    real = torch.Tensor.index_add_
    monkeypatch.setattr(
        torch.Tensor, "index_add_", lambda x, *rest: dtypes.append(x.dtype) or real(x, *rest)
    )
    parts = torch.tensor([1.0] + [2.0**-9] * 300).bfloat16()[:, None, None]
    monkeypatch.setattr(
        "torch.nn.attention.varlen._varlen_attn_backward",
        lambda grad, q, *_: (q.clone(), parts, 2 * parts),
    )
    one = torch.ones(1, 1, 1).bfloat16()
    index = torch.zeros(301, dtype=torch.int64)
    edges = torch.tensor([0, 1]), torch.tensor([0, 301])
    inputs = one, one, one, one, one, one[0].float(), index, *edges, 1, 301, None, 0
    _, grad_k, grad_v = attention._gathered_varlen_backward(*inputs)
    assert dtypes == [torch.float32, torch.float32] and grad_k.dtype == torch.bfloat16
    assert grad_k.item() == pytest.approx(1 + 300 / 512, rel=1 / 256)
    assert grad_v.item() == pytest.approx(2 + 600 / 512, rel=1 / 256)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_sees_gathered_keys_as_the_cpu_segments_do(kv_heads, window):
    on_cpu = inputs(12, kv_heads=kv_heads, size=64)
    on_gpu = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in on_cpu]
    known = {name: x.cuda() if torch.is_tensor(x) else x for name, x in SHARED.items()}
    options = dict(sliding_window=window)
    expected = packed_attention(nn.Identity(), *on_cpu, None, **SHARED, **options)[0]
    found = packed_attention(nn.Identity(), *on_gpu, None, **known, **options)[0]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad((expected * weights).sum(), on_cpu)
    for x, y in zip(
        torch.autograd.grad((found.float() * weights.cuda()).sum(), on_gpu), exact, strict=True
    ):
        assert (x.float().cpu() - y).norm() < 2e-2 * y.norm()
