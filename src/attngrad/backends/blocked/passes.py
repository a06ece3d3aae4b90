"""The four passes over tensors of any device, block by block, by torch operations alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngrad.backends.blocked.blocks import KEYS, Block, cut, run
from attngrad.backends.blocked.formulas import READS, Formulas, Space, finish_rows
from attngrad.backends.blocked.programs import LAYOUTS, RESIDUALS, SUMS, result_of, widen
from attngrad.backends.protocol import FIRST_ORDER, SecondOrder
from attngrad.core.dtypes import TABLE
from attngrad.core.operands import DIFFERENTIABLE, SEEDS, Gradients, Operands, Tangents, flatten
from attngrad.core.options import OPTIONS, Options
from attngrad.core.spec import Spec

_COMPUTE = {**{d.numpy: d.compute for d in TABLE}, **{getattr(torch, d.name): d.compute for d in TABLE}}
MATRICES = {"forward": 5, "backward": 7, "forward_tangent": 8, "backward_tangent": 16}
"""About how many matrices of queries by keys a pass has at a time."""


def named(x: Operands, o: Options, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a block is given: tensors, and numbers, by name."""
    seeds = {name: getattr(o, name) for name in SEEDS}
    flat = {"q": x.q, "k": x.k, "v": x.v, "origin": x.origin, **flatten({**x._asdict(), **seeds}), **more}
    tensors = {name: y for name, y in flat.items() if isinstance(y, Tensor)}
    return tensors, {name: y for name, y in flat.items() if y is not None and name not in tensors}


def compute(
    x: Operands, o: Options, which: Callable[[Formulas], Mapping[str, Tensor]], wanted: Sequence[str], **more: Any
) -> dict[str, Tensor]:
    """What is ``wanted`` of a pass, in the dtype of computation."""
    tensors, numbers = named(x, o, **more)
    results = {name: result_of(name, tensors) for name in wanted}
    blocks = cut(x.q, x.k.shape[-2], x.offset, o, MATRICES[which.__name__])
    sums = {name: _sum_of(x.q, r.shape) for name, r in results.items() if r.layout is KEYS}
    space = Space(math.prod(x.q.shape[:-2]) * max(len(b.rows) * len(b.keys) for b in blocks), sums)
    others = [name for name in wanted if name not in sums]

    def function(block: Block, *slices: Tensor) -> list[Tensor]:
        given = {**numbers, **dict(zip(tensors, map(widen, slices), strict=True))}
        found = which(Formulas(block, o, given, wanted, space))
        return [found[name] for name in others]

    with torch.no_grad():
        layouts = [LAYOUTS[name] for name in tensors]
        found = run(function, blocks, layouts, [results[name] for name in others], tuple(tensors.values()))
    space.matrices.clear()  # each is free before the next is copied
    added = {name: sums.pop(name).mT.contiguous().view(results[name].shape) for name in tuple(sums)}
    return {**dict(zip(others, found, strict=True)), **added}


def _sum_of(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros for what has the shape of keys, transposed, leading axes as one."""
    return q.new_zeros((math.prod(shape[:-2]), shape[-1], shape[-2]), dtype=torch.promote_types(q.dtype, torch.float32))


def residual_specs(x: Operands, o: Options) -> tuple[Spec, ...]:
    """out and the row statistics, as those of the kernels in natural units."""
    wide, shape = _COMPUTE[x.q.dtype], tuple(x.out_shape)
    return Spec(shape, wide), Spec(shape[:-1], wide), Spec(shape[:-1], wide)


def refuses(x: Operands, o: Options) -> str | None:
    """The option that no formula reads; None: all others are computed on every device that has the dtype."""
    for row in _UNREAD:
        value = getattr(x if row.is_array else o, row.name)
        if value is not None and (row.is_array or value != row.default):
            return f"the backend 'blocked' does not compute the option {row.name!r}."
    return None


_UNREAD = tuple(row for name, row in OPTIONS.items() if name not in READS)


def forward(
    x: Operands, o: Options, *, save: bool = True, into: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """``out, lse, residuals``."""
    found = compute(x, o, Formulas.forward, SUMS)
    with torch.no_grad():
        out, row_max, row_sum = (found[name] for name in SUMS)
        wide, lse, *rest = finish_rows(out, row_max, row_sum, None if x.sinks is None else widen(x.sinks))
    out, lse, *residuals = _placed((wide.to(x.q.dtype, copy=save), lse, *((wide, *rest) if save else ())), into)
    return out, lse, tuple(residuals)


def backward(
    x: Operands,
    o: Options,
    residuals: Sequence[Tensor],
    dout: Tensor | None,
    dlse: Tensor | None = None,
    *,
    wanted: Collection[str] = DIFFERENTIABLE,
    into: Sequence[Tensor] = (),
) -> Gradients:
    """The VJP."""
    names = [f"d{name}" for name in DIFFERENTIABLE if name in wanted and getattr(x, name) is not None]
    kept = dict(zip(RESIDUALS, residuals, strict=True))
    g = _gradients(x, compute(x, o, Formulas.backward, names, dout=dout, dlse=dlse, **kept), "")
    return Gradients(*_placed(g[:3], into or None), *g[3:])


def forward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    into: Sequence[Tensor] | None = None,
    *,
    wanted: Collection[str] = FIRST_ORDER,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """``out, lse, out_dot, lse_dot``."""
    found = compute(x, o, Formulas.forward_tangent, [name for name in FIRST_ORDER if name in wanted], **dots_of(t))
    out, lse = found.get("out"), found.get("lse")
    out_dot, lse_dot = _placed((found["out_dot"].to(x.q.dtype), found["lse_dot"]), into)
    return None if out is None else out.to(x.q.dtype), lse, out_dot, lse_dot


def backward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Tensor | None,
    dout_dot: Tensor | None = None,
    dlse: Tensor | None = None,
    dlse_dot: Tensor | None = None,
    *,
    wanted: Collection[str] = SecondOrder._fields,
) -> SecondOrder:
    """The VJP and its tangent."""
    grads = [f"d{name}" for name in DIFFERENTIABLE if getattr(x, name) is not None]
    groups = {"grads": grads, "grads_dot": [f"{name}_dot" for name in grads]}
    names = [name for field in SecondOrder._fields if field in wanted for name in groups.get(field, [field])]
    cotangents = {"dout": dout, "dout_dot": dout_dot, "dlse": dlse, "dlse_dot": dlse_dot}
    found = compute(x, o, Formulas.backward_tangent, names, **dots_of(t), **cotangents)
    return SecondOrder(
        found.get("out"),
        found.get("out_dot"),
        _gradients(x, found, ""),
        _gradients(x, found, "_dot"),
        found.get("lse_dot"),
    )


def _placed(values: Sequence[Any], into: Sequence[Tensor] | None) -> Sequence[Any]:
    """The values, in the memory of ``into`` where that is given."""
    return values if into is None else [place.copy_(value) for place, value in zip(into, values, strict=True)]


def dots_of(t: Tangents) -> dict[str, Any]:
    """By the names that a block knows them by."""
    return {f"{name}_dot": dot for name, dot in t._asdict().items()}


def _gradients(x: Operands, found: dict[str, Tensor], suffix: str) -> Gradients:
    """In the dtypes of the arguments."""
    grads = (found.get(f"d{name}{suffix}") for name in DIFFERENTIABLE)
    return Gradients(
        *(None if g is None else g.to(getattr(x, name).dtype) for name, g in zip(DIFFERENTIABLE, grads, strict=True))
    )
