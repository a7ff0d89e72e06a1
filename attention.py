# SPDX-FileCopyrightText: 2026 handful contributors (attention.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Attention over packed rows: a token sees its own sequence's past and nothing else.

The problem. Sequences packed into one row must not see each other. Restarting position ids alone
does not do it: rotary positions and attention boundaries are two things, and a model trained with
one of them memorises its neighbours. In Transformers it is easy to lose the boundary in silence: an
all-ones mask, `use_cache` left on, or flash arguments given to the sdpa path each make the
difference between a sequence alone and in a row about 2 instead of 1e-6. And the mask that would be
right costs N x N entries: 4 GiB at N = 65,536.

How it works. One attention function, registered under one name, with two backends and no mask at
all:
    GPU   torch's variable-length kernel. cu_seqlens [S+1] is on the device and the longest length
          on the host: no device sync.
    CPU   sequences of equal lengths are gathered into a batch: one causal
          scaled_dot_product_attention call per length.
          (a loop over slices of the row would make the backward quadratic in S)
Boundaries travel as the model's own flash-attention keyword arguments (`cu_seq_lens_q`,
`max_length_q`), so gradient checkpointing hands them to the recomputed forward as well. If they do
not arrive, it raises; and a model that mixes tokens by anything else than this function
(convolutions, recurrent states, its own attention) is refused. So is a sequence so long that its
rotary positions would depend on its neighbours (`rotary_limit`).

    row        a a a | b b            cu_seqlens 0 3 5
    attention  a sees a; b sees b     scores 3x3 and 2x2, not 5x5

Where a prompt stands once for several responses (prefix.py), keys and values are gathered by
`key_index` first, and have boundaries of their own: the causal mask is aligned at the end.
    row        p p a | b b            keys 0 1 2 | 0 1 3 4: p p a, and p p b b
    attention  b sees p and b         scores 3x3 and 2x4

Shapes: N tokens in a row, S sequences, H query heads, K key/value heads, D head size; a model's are
[1, heads, N, D]. What we give up: attention sinks, soft-caps of attention scores, chunked and
bidirectional attention, dropout (all refused); context parallelism. Source: FlashAttention-2 varlen
(Dao 2023, arXiv:2307.08691), as torch.nn.attention.varlen.

Copied, with transformers. Back to padded batches: model.set_attn_implementation("sdpa").
    import torch
    from attention import use_packed_attention
    from transformers import GPT2Config, GPT2Model
    model = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2)).eval()
    use_packed_attention(model)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    edges = {"cu_seq_lens_q": torch.tensor([0, 3, 5]), "max_length_q": 3}
    model(torch.tensor([[7, 8, 9, 4, 5]]), position_ids=positions, use_cache=False, **edges)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "packed"
SUITABLE = (
    "a model of full or sliding-window attention "
    "(Llama, Qwen2, Qwen3, Mistral, Phi, OLMo, Gemma 1 and 3 work)"
)
ONE_WAY = "packed attention lets a token see its past alone"
# Frequencies of these are the same for every row.
FIXED_ROTARY = {"default", "linear", "yarn", "llama3", "proportional"}


def use_packed_attention(model: nn.Module) -> None:
    """The Transformers `model` computes attention by `packed_attention` from now on; its forward
    needs the boundaries: `model(tokens[None], position_ids=position_ids[None], use_cache=False,
    cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=max_seqlen,
    max_length_k=max_seqlen)`.

    Raises ValueError for a model in which tokens reach each other by other ways than this
    attention.
    """
    from transformers import AttentionInterface

    # What is not routed through the interface would run as before, over the whole row, and say
    # nothing.
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    layer_types -= {"full_attention", "sliding_attention"}
    if layer_types or model._is_stateful or not model._supports_attention_backend:
        raise ValueError(
            f"{type(model).__name__}: mixes tokens by "
            f"{', '.join(sorted(layer_types)) or 'code of its own'}, which "
            f"would cross the sequences of a packed row; use {SUITABLE}"
        )
    parts = [config, *model.modules()]
    if any(getattr(part, "is_causal", None) is False for part in parts):
        raise ValueError(f"{type(model).__name__}: is not causal: {ONE_WAY}; use {SUITABLE}")
    limit = rotary_limit(config)
    if limit is not None:
        model.register_forward_pre_hook(_refuse_longer(limit), with_kwargs=True)
        decoder = model.get_decoder()
        if decoder is not model:
            decoder.register_forward_pre_hook(_refuse_longer(limit), with_kwargs=True)
    AttentionInterface.register(NAME, packed_attention)
    # Without a mask function of that name Transformers makes no mask. Making none by a function
    # would wait for the device in each forward: it looks for packed sequences first.
    model.set_attn_implementation(NAME)


def rotary_limit(config) -> int | None:
    """The longest sequence whose rotary angles do not depend on the others in its row; None: any.

    Transformers chooses the frequencies of "longrope" and "dynamic" once for a row, by its largest
    position. Up to the original length it chooses the same ones for every row.
    """
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    scaling = scaling or {}
    by_layer_type = [x for x in scaling.values() if isinstance(x, dict)]
    limits = []
    for rope in by_layer_type or [scaling]:
        if rope.get("rope_type", rope.get("type", "default")) not in FIXED_ROTARY:
            original = rope.get("original_max_position_embeddings")
            limits.append(original or config.max_position_embeddings)
    return min(limits, default=None)


def _refuse_longer(limit: int):
    """A hook on the forward: an error for a row with a sequence above the limit."""

    def check(module: nn.Module, args: tuple, kwargs: dict) -> None:
        longest = kwargs.get("max_length_k") or kwargs.get("max_length_q") or 0
        if longest > limit:
            raise ValueError(
                f"{type(module).__name__}: its rotary positions depend on a row's longest sequence "
                f"above {limit} tokens, this row's has {longest}; shorten prompt + response limit"
            )

    return check


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    key_index: Tensor | None = None,
    **_,
) -> tuple[Tensor, None]:
    """softmax(Q K^T scaling) V within each sequence, causal: [1, H, N, D] and twice [1, K, N, D] ->
    [1, N, H, D].

    `sliding_window` w: a token sees itself and the w - 1 tokens before it. key_index, with
    boundaries of its own: the keys that a sequence sees, if they are not its own tokens alone; its
    last query sees all of them (prefix.py). Raises ValueError when the boundaries are missing, and
    for what neither backend computes (a score soft-cap, attention sinks, a mask, more than one row,
    dropout, a token that sees what comes after it).
    """
    if cu_seq_lens_q is None:
        raise ValueError(
            f"{type(module).__name__} got no cu_seq_lens_q: pass the row's cu_seqlens to the "
            "model's forward; for padded batches and generate() call "
            'model.set_attn_implementation("sdpa") first'
        )
    _refuse_others(module, query, value, attention_mask, softcap, s_aux, dropout, is_causal)
    spans = Spans(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    if key_index is not None:
        spans = Spans(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    out = _attend(q, k, v, scaling, sliding_window, spans, key_index)
    return out[None], None


def _refuse_others(module, query, value, mask, softcap, s_aux, dropout, is_causal) -> None:
    """ValueError for what neither backend computes."""
    if (
        softcap is not None
        or s_aux is not None
        or mask is not None
        or query.shape[0] != 1
        or query.shape[-1] != value.shape[-1]  # latent attention
    ):
        raise ValueError(
            f"{type(module).__name__}: packed attention takes one row without a mask, values as "
            f"long as keys, and has no soft-cap or attention sinks; use {SUITABLE}"
        )
    if dropout:
        advice = "set attention_dropout of its config to 0"
        raise ValueError(f"{type(module).__name__}: packed attention drops nothing; {advice}")
    if is_causal is False:
        raise ValueError(f"{type(module).__name__}: is not causal: {ONE_WAY}")


class Spans(NamedTuple):
    """Where each sequence's queries and keys begin, [S+1] each, and the longest of both."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int


def _attend(q, k, v, scaling, window, spans: Spans, index: Tensor | None) -> Tensor:
    if q.is_cuda and index is not None:
        out, _ = _gathered_varlen(q, k, v, index, *spans, scaling, window or 0)
        return out
    if q.is_cuda:
        return _varlen_attention(q, k, v, scaling, window, spans)
    if index is not None:
        # Not k[index]: the sums of its backward have another order each time.
        k = k.index_select(0, index)
        v = v.index_select(0, index)
    return _segment_attention(q, k, v, scaling, window, spans)


def _varlen_attention(q, k, v, scaling, window, spans: Spans) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    k, v, gqa = _for_heads(q, k, v)
    return varlen_attn(q, k, v, *spans, scale=scaling, window_size=_size(window), **gqa)


def _size(window: int | None) -> tuple[int, int]:
    """Tokens before and behind a query's own that the kernel lets it see; -1: all."""
    return (window - 1 if window else -1, 0)


def _for_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Keys and values as the kernel wants them for the queries' heads, and its option for that."""
    from torch.nn.attention.varlen import varlen_attn

    if q.shape[1] == k.shape[1]:
        return k, v, {}
    # Of torch 2.13; 2.11 wants the heads repeated.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return k, v, {"enable_gqa": True}
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return k, v, {}


# An operation of its own, so that the backward gathers once more: what autograd or the compiler
# would keep of gathered keys, in all layers, may be larger than all other activations.
@torch.library.custom_op("handful::gathered_varlen", mutates_args=())
def _gathered_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    """_varlen_attention with the keys and values k[index], v[index]: [N, H, D], and the logarithms
    of the softmax's sums [H, N]. window 0: none."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    keys, values, gqa = _for_heads(q, k.index_select(0, index), v.index_select(0, index))
    return varlen_attn(
        q,
        keys,
        values,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=_size(window),
        **gqa,
    )


@_gathered_varlen.register_fake
def _(q, k, v, index, *_) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("handful::gathered_varlen_backward", mutates_args=())
def _gathered_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from torch.nn.attention import varlen

    keys, values, _ = _for_heads(q, k.index_select(0, index), v.index_select(0, index))
    grad_q, *grads = varlen._varlen_attn_backward(
        grad,
        q,
        keys,
        values,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_q,
        max_k,
        window == 0,  # is_causal
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # the state of a dropout of 0
        scale,
        list(_size(window)),
    )
    # A prompt's key gets a gradient from each response: in bf16 their sum would be rounded each
    # time.
    sums = []
    for part in grads:
        by_head = part.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32)
        total = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        sums.append(total.index_add_(0, index, by_head).to(k.dtype))
    return grad_q, *sums


@_gathered_varlen_backward.register_fake
def _(grad, q, k, v, *_) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, index, cu_seqlens_q, cu_seqlens_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, index, cu_seqlens_q, cu_seqlens_k)


def _backward(ctx, grad: Tensor, _) -> tuple:
    tensors = ctx.saved_tensors
    return (*_gathered_varlen_backward(grad, *tensors, *ctx.numbers), *[None] * 7)


_gathered_varlen.register_autograd(_backward, setup_context=_save_for_backward)


def _segment_attention(q, k, v, scaling, window, spans: Spans) -> Tensor:
    alike: dict[tuple[int, int], list[int]] = {}  # sequences by their numbers of queries and keys
    shapes = zip(spans.queries.diff().tolist(), spans.keys.diff().tolist(), strict=True)
    for i, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(i)
    # Sequences of one shape become one batch; a gather in all, instead of a kernel call per
    # sequence.
    order = _grouped(spans.queries, alike.values())
    k_order = _grouped(spans.keys, alike.values())
    q_sizes = [n * len(members) for (n, _), members in alike.items()]
    k_sizes = [m * len(members) for (_, m), members in alike.items()]
    grouped = zip(
        alike.items(),
        q[order].split(q_sizes),
        k[k_order].split(k_sizes),
        v[k_order].split(k_sizes),
        strict=True,
    )  # each [tokens of a batch, heads, D]
    outputs = []
    for ((n, m), members), *parts in grouped:
        batch = [x.unflatten(0, (len(members), -1)).transpose(1, 2) for x in parts]
        band = None
        if n < m or (window and n > window):
            distance = torch.arange(m - n, m)[:, None] - torch.arange(m)[None]
            band = (distance >= 0) & (distance < (window or m))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            *batch, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=gqa
        )  # [sequences, heads, n, D]
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[order.argsort()]  # [N, H, D]


def _grouped(cu_seqlens: Tensor, batches: Iterable[list[int]]) -> Tensor:
    """The tokens of the sequences of each batch, one batch after the other."""
    starts = cu_seqlens.tolist()
    spans = [torch.arange(starts[i], starts[i + 1]) for members in batches for i in members]
    return torch.cat(spans)
