# SPDX-FileCopyrightText: 2026 handful contributors (logprobs.py of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
"""Token log-probabilities and entropy without the [N, V] matrix of logits.

The problem. A loss needs one number per token, but the head makes V of them: for 4,096 tokens and
152,000 words, logits, their log-softmax and its gradient take 5 GB in fp32, more than the rest of
the activations. And prompt tokens need none.

How it works. The head is applied to the positions that predict response tokens, `chunk` of them at
a time; of each chunk only two numbers per token survive, logprob and entropy. The backward pass
computes each chunk's logits again and turns them in place into their own gradient. A Python loop
under autograd would keep every chunk alive, hence the autograd Function.
    z = h W^T / T                                 lse = log sum exp z
    logprob = z[target] - lse                     entropy = lse - sum softmax(z) z
    d logprob / dz_j = [j = target] - p_j          d entropy / dz_j = -p_j (log p_j + entropy)

One convention, one shift. x[i] belongs to tokens[i]: logprobs[i] = log pi(tokens[i] | tokens[<i])
comes from the hidden state at i - 1, and so does a critic's values[i] = V(tokens[<i]). The shift is
in `_states_before` alone (a table if prefixes are shared). A sequence's first token has logprob 0.
    tokens       5 6 | 7 8 9      response_mask 0 1 0 1 1      states used  5 7 8      targets 6 8 9
The temperature divides the logits, as in the sampler; else every ratio would be wrong.
Shapes: N tokens in a row, R response tokens, C tokens in a chunk, V vocabulary, D hidden size.
Results and sums are fp32. Memory: two [C, V] fp32 matrices (three with a soft-cap) and the head's
gradient, whatever R is. If layers are compiled, so is the work on a chunk. What we give up: the
head's product is done twice. Source: cut cross-entropy (Wijmans 2024, arXiv:2411.09009), section 4.

Copied, with attention.py, packing.py and transformers:
    import torch
    from attention import use_packed_attention
    from logprobs import token_logprobs
    from packing import pack, sequence
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2)).eval()
    use_packed_attention(model)
    [row] = pack([sequence(torch.tensor([5, 6]), torch.tensor([7, 8, 9]))], capacity=64)
    token_logprobs(model, row)[0].sum().backward()
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method


def token_logprobs(
    model: nn.Module, row, *, temperature: float = 1.0, chunk: int = 512, likeliest: bool = False
) -> tuple[Tensor, Tensor]:
    """log pi(tokens[i] | tokens[<i]) and that distribution's entropy at response tokens, 0
    elsewhere: [N], [N] fp32.

    model: a Transformers causal LM, plain or under FSDP2, with packed attention
    (attention.use_packed_attention). row: any object with tokens, position_ids,
    fields["response_mask"] [N], cu_seqlens [S+1], max_seqlen, num_response_tokens and prefix
    (packing.PackedRow). chunk: tokens whose logits exist at one time. Both carry grad. Without
    response tokens they are zeros connected to every parameter: FSDP's backward runs on all ranks.
    likeliest: in the entropy's place 1 for tokens than which none is likelier, without gradient.
    """
    return _run(model, _response_logprobs, row, temperature, chunk, likeliest)


def token_values(critic: nn.Module, row) -> Tensor:
    """V(tokens[<i]) at response tokens, 0 elsewhere: [N] fp32, with grad.

    critic: a Transformers decoder under a head `score` of one number per token (model.load_critic);
    row and the rest as in token_logprobs.
    """
    return _run(critic, _response_values, row)


def _run(model: nn.Module, method, row, *options):
    """method(model, ...) on the row, as a method that FSDP knows."""
    if not hasattr(model, "get_decoder"):  # DDP, which reduces gradients around forward alone
        rule = "if it wraps one: put the call into the forward of a module of yours, and wrap that"
        raise ValueError(f"{type(model).__name__} is no Transformers model; {rule}")
    name = f"{method.__name__}_{id(method)}"  # another one after this file was reloaded
    if not hasattr(model, name):
        setattr(model, name, types.MethodType(method, model))
        if isinstance(model, FSDPModule):
            # It gathers parameters around forward alone: the head would be a sharded DTensor.
            register_fsdp_forward_method(model, name)
    positions = response_positions(row.fields["response_mask"], row.num_response_tokens)
    result = getattr(model, name)(row, positions, *options)
    if isinstance(model, FSDPModule) and not torch.is_grad_enabled():
        # No backward will come and free the root's gathered weights, which parameters() would be.
        model.reshard()
    return result


def model_scores(model: nn.Module, rows: Sequence) -> list[float]:
    """Scores of packed sequences by a decoder with one label, in the order they were packed from.

    rows: of packing.pack_alike, as many on all ranks. A score is read at a sequence's last token.
    ValueError for several labels or attention that leaks; RuntimeError for NaN or Inf.
    """
    config = model.config
    attends = config._attn_implementation
    both_ways = any(getattr(x, "is_causal", None) is False for x in [config, *model.modules()])
    lost = attends == "eager" or (attends != "packed" and any(row.prefix for row in rows))
    if config.num_labels != 1 or not hasattr(model, "score") or lost or both_ways:
        rule = "needs a `score` head, num_labels 1 and causal attention other than eager"
        raise ValueError(f"{type(model).__name__}: {rule}")
    outputs = []

    def read(head, inputs, _):
        """The scores of all tokens: the model itself would pick one by the pad token's id."""
        outputs.append(inputs[0].float() @ head.weight.t().float())  # bf16 rounds 10 to 1/16

    scores = {}
    with torch.no_grad(), model.score.register_forward_hook(read):
        for row in rows:
            row = row.to(model.device)
            spans = _spans(row) if attends == "packed" else {}
            model(row.tokens[None], position_ids=row.position_ids[None], use_cache=False, **spans)
            ends = outputs.pop()[0, row.cu_seqlens[1:] - 1, 0]
            if row.source:
                scores |= dict(zip(row.source, ends.tolist(), strict=True))
    if not all(map(math.isfinite, scores.values())):
        raise RuntimeError(f"{type(model).__name__} gave a score of NaN or Inf")
    return [scores[i] for i in sorted(scores)]


@torch.no_grad()
def with_logprobs(
    model: nn.Module, rows: list[list], name: str, temperature: float, skip: int = 0
) -> list[list]:
    """The rows of each minibatch with one more field: the model's log-probabilities [N]; the first
    `skip` minibatches stay as they are.
    """
    return rows[:skip] + _with_field(
        rows[skip:], name, lambda row: token_logprobs(model, row, temperature=temperature)[0]
    )


@torch.no_grad()
def with_values(critic: nn.Module, rows: list[list]) -> list[list]:
    """The same rows (of each minibatch) with one more field, "values" [N], by token_values."""
    return _with_field(rows, "values", lambda row: token_values(critic, row))


def warm_up(
    models: Sequence, rows: Sequence, present: Callable, kinds: Sequence[bool] = (False, True)
) -> None:
    """Each model's passes over each row, on GPUs or if compiled, so that step 0 compiles nothing.

    present(model): a context with the model on the device. kinds: of passes, with gradients or not.
    """
    for model in filter(None, models):
        if model.device.type == "cpu" and not _is_compiled(model):
            continue
        scores = hasattr(model, "score")
        learns = any(parameter.requires_grad for parameter in model.parameters())
        with present(model):
            for row, grad in itertools.product(rows, kinds if learns else [False]):
                with torch.set_grad_enabled(grad):
                    row = row.to(model.device)
                    found = token_values(model, row) if scores else token_logprobs(model, row)[0]
                if grad:
                    found.sum().backward()
            model.zero_grad(set_to_none=True)


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def _with_field(rows: list[list], name: str, compute: Callable) -> list[list]:
    def extended(row):
        return dataclasses.replace(row, fields=row.fields | {name: compute(row)})

    return [[extended(row) for row in minibatch] for minibatch in rows]


def response_positions(response_mask: Tensor, num_response_tokens: int) -> Tensor:
    """Indices [R] of the response tokens, ascending: response_mask [N] bool."""
    # Counted on the host: nonzero() would wait for the device.
    order = torch.argsort(response_mask.logical_not().to(torch.uint8), stable=True)
    return order[:num_response_tokens]


def _response_logprobs(
    self: nn.Module, row, positions: Tensor, temperature: float, chunk: int, likeliest: bool
) -> tuple[Tensor, Tensor]:
    states = _states_before(self, row, positions)
    head = plain_head(self)
    softcap = getattr(self.config, "final_logit_softcapping", None)
    known = states, head.weight, head.bias, row.tokens[positions], temperature, softcap, chunk
    found = head_logprobs(*known, fused=_is_compiled(self), likeliest=likeliest)
    return tuple(_placed(values, positions, row) for values in found)


def _placed(values: Tensor, positions: Tensor, row) -> Tensor:
    """values [R] at their positions in the row, 0 elsewhere and at first tokens: [N] fp32."""
    placed = torch.zeros(len(row.tokens), device=values.device).index_put((positions,), values)
    # The state before a sequence's first token is its neighbour's.
    return placed.masked_fill(row.position_ids == 0, 0)


def plain_head(model: nn.Module) -> nn.Linear:
    """The head of a model whose logits are head(states) and no more; ValueError for others."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        advice = "merge its adapters, or leave the head without"
        raise ValueError(f"the head is a {type(head).__name__}, not a matrix; {advice}")
    config = model.config.get_text_config()
    for name in filter(re.compile("logits?_(scal|mult)|lm_head_mult").search, dir(config)):
        if getattr(config, name) not in (None, 1.0):
            raise ValueError(f"models that scale their logits ({name}) are not supported")
    return head


def _response_values(self: nn.Module, row, positions: Tensor) -> Tensor:
    states = _states_before(self, row, positions)
    values = states.float() @ self.score.weight[0].float()  # bf16 would round 0.9 to 1/256
    return _placed(values, positions, row)


def _states_before(model: nn.Module, row, positions: Tensor) -> Tensor:
    """Hidden states [R, D] that have seen all tokens before each position [R], no more."""
    hidden = model.get_decoder()(
        input_ids=row.tokens[None],
        position_ids=row.position_ids[None],
        use_cache=False,
        **_spans(row),
    ).last_hidden_state[0]  # [N, D]
    before = row.prefix.previous[positions] if getattr(row, "prefix", None) else positions - 1
    # Not hidden[before], whose backward adds up a prompt's states in another order each time.
    return hidden.index_select(0, before.clamp(min=0))


def _spans(row) -> dict[str, Tensor | int]:
    """What each sequence sees, by Transformers' names; key_index is attention.py's."""
    spans = {"cu_seq_lens_q": row.cu_seqlens, "max_length_q": row.max_seqlen}
    if getattr(row, "prefix", None) is None:
        return spans | {"cu_seq_lens_k": row.cu_seqlens, "max_length_k": row.max_seqlen}
    spans |= {"cu_seq_lens_k": row.prefix.cu_seqlens_k, "max_length_k": row.prefix.max_seqlen_k}
    return spans | {"key_index": row.prefix.keys}


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 512,
    fused: bool = False,
    likeliest: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(z)[target] and entropy of softmax(z), z = softcap(hidden weight^T + bias) /
    temperature: [R], [R].

    hidden [R, D], weight [V, D], bias [V] or None, targets [R]. softcap c maps z to c tanh(z / c)
    (Gemma 2); None: off. fused: the work on a chunk's logits is compiled. likeliest: in place of
    the entropy, as in token_logprobs.
    """
    options = temperature, softcap, chunk, fused, likeliest
    return _HeadLogprobs.apply(hidden, weight, bias, targets, *options)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, softcap, chunk, fused, likeliest):
        chunk_values = _compiled(_chunk_values) if fused else _chunk_values
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        lse = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            head = hidden[part], weight, bias, temperature, softcap
            found = chunk_values(*head, targets[part], likeliest)
            logprobs[part], entropy[part], lse[part] = found
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse)
        ctx.options = temperature, softcap, chunk, fused
        ctx.set_materialize_grads(fused)  # zeros cost nothing there, other code would
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, entropy, lse = ctx.saved_tensors
        temperature, softcap, chunk, fused = ctx.options
        chunk_gradient = _compiled(_chunk_gradient) if fused else _chunk_gradient
        per_token = targets, entropy, lse, grad_logprobs, grad_entropy
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks stay in fp32 whatever the model's dtype; what is frozen has none.
        learns = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if learns[2] else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            head = hidden[part], weight, bias, temperature, softcap
            of_part = (x if x is None else x[part, None] for x in per_token)
            dz = chunk_gradient(*head, *of_part)
            if grad_bias is not None:
                grad_bias += dz.sum(0, dtype=torch.float32)
            grad_hidden[part] = dz @ weight
            if grad_weight is not None:
                _add_product(grad_weight, dz, hidden[part])
            del dz  # else it lives on while the next chunk's logits are made
        return grad_hidden, grad_weight, grad_bias, *[None] * 6


@functools.cache
def _compiled(function: Callable) -> Callable:
    """The function in a few passes; step by step it reads or writes a chunk's logits 26 times."""
    compiled = torch.compile(function)

    def run(hidden: Tensor, weight: Tensor, *rest):
        if len(hidden) == 1:
            return function(hidden, weight, *rest)  # a size of its own to the compiler
        # Compiled once: not again for inputs that do not learn, nor for a last chunk's size.
        inputs = [hidden, weight, *rest]
        for i, x in enumerate(inputs):
            if isinstance(x, Tensor):
                inputs[i] = x.detach().contiguous()
                if len(x) == len(hidden):
                    torch._dynamo.maybe_mark_dynamic(inputs[i], 0)
        return compiled(*inputs)

    return run


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b; on a GPU in one pass, and the product is not rounded to bf16 on the way."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
    else:
        total += a.t() @ b


def _chunk_values(hidden: Tensor, weight, bias, temperature, softcap, targets, likeliest: bool):
    """logprobs [C], entropies [C] (or which are likeliest) and logsumexp of the logits [C]; a
    function of its own so that its matrices are gone before the next chunk's.
    """
    z, _ = _logits(hidden, weight, bias, temperature, softcap)
    lse = z.logsumexp(-1, keepdim=True)
    log_p = _log_softmax_(z, lse)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    if likeliest:
        return logprobs, (logprobs >= log_p.amax(-1)).float(), lse.squeeze(-1)
    return logprobs, log_p.exp().mul_(log_p).sum(-1).neg_(), lse.squeeze(-1)


def _chunk_gradient(hidden: Tensor, weight, bias, temperature, softcap, *per_token) -> Tensor:
    """Gradient [C, V] of hidden weight^T + bias, in hidden's dtype; per_token: targets, entropy,
    lse and the gradients of the two results, each [C, 1].
    """
    targets, entropy, lse, grad_logprobs, grad_entropy = per_token
    z, slope = _logits(hidden, weight, bias, temperature, softcap)
    log_p = _log_softmax_(z, lse)
    p = log_p.exp()
    if grad_entropy is None:
        dz = p.mul_(-grad_logprobs)
    else:
        dz = log_p.add_(entropy).mul_(p).mul_(-grad_entropy)
        if grad_logprobs is not None:
            dz.addcmul_(p, grad_logprobs, value=-1)
    if grad_logprobs is not None:
        if torch.compiler.is_compiling():
            # Part of the same pass; for a scatter dz would be written out first.
            words = torch.arange(dz.shape[1], device=dz.device)
            dz = torch.where(words == targets, dz + grad_logprobs, dz)
        else:
            dz.scatter_add_(-1, targets, grad_logprobs)
    if slope is not None:
        dz.mul_(slope)
    return dz.div_(temperature).to(hidden.dtype)


def _logits(hidden, weight, bias, temperature, softcap) -> tuple[Tensor, Tensor | None]:
    """Logits [C, V] fp32 over the temperature, and d(capped)/d(raw) [C, V] if there is a cap."""
    # Not rounded to bf16 on the way: a logit of 20 would be off by up to 0.06, and sampler and
    # trainer differ by that.
    if hidden.is_cuda and hidden.dtype != torch.float32:
        z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        z = hidden.float() @ weight.t().float()
    if bias is not None:
        z += bias
    slope = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        slope = torch.addcmul(z.new_ones(()), z, z, value=-1)
        z.mul_(softcap)
    return z.div_(temperature), slope


def _log_softmax_(z: Tensor, lse: Tensor) -> Tensor:
    """z - lse, in place."""
    # A word of probability 0 has logprob -inf, and 0 * -inf would make the entropy NaN.
    return z.sub_(lse).clamp_(min=torch.finfo(z.dtype).min)
