"""The dense A, on request: T x S numbers per head, differentiable."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from attngrad.core import option_checks
from attngrad.core.operands import Operands, assemble, flatten
from attngrad.core.options import OptionArguments, Options, reject_unknown
from attngrad.core.philox import keep_mask
from attngrad.reference.dense import visibility
from attngrad.reference.modifiers import modifiers
from attngrad.torch._attention import attention
from attngrad.torch._passes import check_seed, passes_of
from attngrad.torch._tensors import wide_dtype


def attention_weights(q: Tensor, k: Tensor, lse: Tensor | None = None, **options: Unpack[OptionArguments]) -> Tensor:
    """What multiplies v, ``(..., Hq, T, S)``: A, and where dropout is given, A o M.

    ::

        p = exp(scores - lse) o M

    ``lse`` is that of ``attention(..., return_lse=True)``; without it that pass runs again. Gradients reach q, k, bias
    and sinks. It is made by PyTorch's own operations, so that derivatives go on to any order that lse has.

    >>> attention_weights(torch.zeros(2, 1), torch.zeros(2, 1), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    from attngrad.backends.blocked.blocks import as_given  # which most programs never need

    name = "attention_weights"
    reject_unknown(name, options)
    if lse is None:
        undropped: Any = {key: x for key, x in options.items() if key not in ("dropout", "seed")}
        _, lse = attention(q, k, k, **undropped | {"return_lse": True})
    wide = wide_dtype(q.dtype)
    o = passes_of(name, q, options).options
    flat = {i: y for i, y in flatten(options).items() if i != "seed"}
    x, _ = assemble(o, {"q": q, "k": k, "v": k, **flat})
    if x.group > 1:
        k = k.repeat_interleave(x.group, dim=-3)
    with as_given(q):  # lse is that of scores which nothing has rounded
        scores: Tensor = modifiers(o).value(o.scale * (q.to(wide) @ k.to(wide).mT))
    if x.bias is not None:
        scores = scores + x.bias.to(wide)
    if _masks(x, o):
        scores = scores.masked_fill(~visibility(x, o), -torch.inf)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of a query that sees nothing: all its scores are -inf
    weights = (scores - lse[..., None]).exp()
    if o.dropout > 0.0:
        seed: Any = options.get("seed")
        option_checks.seed_beside(name, o.dropout, seed)
        check_seed(name, seed)
        keep = keep_mask(tuple(weights.shape), o.dropout, seed, like=weights)
        weights = weights * keep / (1.0 - o.dropout)
    return weights.to(q.dtype)


def _masks(x: Operands, o: Options) -> bool:
    """Whether any score may be masked; -inf in the bias masks by itself."""
    return o.causal or o.window is not None or x.mask is not None or x.segments is not None
