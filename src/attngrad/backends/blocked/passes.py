"""The four passes over tensors of any device, block by block, by torch operations alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngrad.backends.blocked.blocks import Block, cut, run
from attngrad.backends.blocked.formulas import Formulas
from attngrad.backends.blocked.programs import LAYOUTS, RESIDUALS, result_of, widen
from attngrad.backends.protocol import SecondOrder
from attngrad.core.dtypes import TABLE
from attngrad.core.operands import DIFFERENTIABLE, SEEDS, Gradients, Operands, Tangents, flatten
from attngrad.core.options import Options
from attngrad.core.spec import Spec

_COMPUTE = {**{d.numpy: d.compute for d in TABLE}, **{getattr(torch, d.name): d.compute for d in TABLE}}
MATRICES = {"forward": 3, "backward": 7, "forward_tangent": 8, "backward_tangent": 12}
"""About how many matrices of queries by keys a pass has at a time."""


def named(x: Operands, o: Options, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a block is given: tensors, and numbers, by name."""
    seeds = {name: getattr(o, name) for name in SEEDS}
    flat = {"q": x.q, "k": x.k, "v": x.v, **flatten({**x._asdict(), **seeds}), **more}
    tensors = {name: y for name, y in flat.items() if isinstance(y, Tensor)}
    return tensors, {name: y for name, y in flat.items() if y is not None and name not in tensors}


def compute(
    x: Operands, o: Options, which: Callable[[Formulas], Mapping[str, Tensor]], wanted: Sequence[str], **more: Any
) -> dict[str, Tensor]:
    """What is ``wanted`` of a pass, in the dtype of computation."""
    tensors, numbers = named(x, o, **more)

    def function(block: Block, *slices: Tensor) -> list[Tensor]:
        found = which(Formulas(block, o, {**numbers, **dict(zip(tensors, map(widen, slices), strict=True))}))
        return [found[name] for name in wanted]

    results = [result_of(name, tensors) for name in wanted]
    blocks = cut(x.q, x.k.shape[-2], x.offset, o, MATRICES[which.__name__])
    with torch.no_grad():
        found = run(function, blocks, [LAYOUTS[name] for name in tensors], results, tuple(tensors.values()))
    return dict(zip(wanted, found, strict=True))


def residual_specs(x: Operands, o: Options) -> tuple[Spec, ...]:
    """out and the row statistics, as those of the kernels in natural units."""
    wide, shape = _COMPUTE[x.q.dtype], tuple(x.out_shape)
    return Spec(shape, wide), Spec(shape[:-1], wide), Spec(shape[:-1], wide)


def refuses(x: Operands, o: Options) -> str | None:
    """None: every option is computed on every device that has the dtype."""
    return None


def forward(
    x: Operands, o: Options, *, save: bool = True, into: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """``out, lse, residuals``."""
    found = compute(x, o, Formulas.forward, ("out", "lse", *(tuple(RESIDUALS)[1:] if save else ())))
    wide, lse, *rest = found.values()
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
    x: Operands, o: Options, t: Tangents, into: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``out, lse, out_dot, lse_dot``."""
    found = compute(x, o, Formulas.forward_tangent, ("out", "lse", "out_dot", "lse_dot"), **_dots(t))
    out, lse, out_dot, lse_dot = found.values()
    out_dot, lse_dot = _placed((out_dot.to(x.q.dtype), lse_dot), into)
    return out.to(x.q.dtype), lse, out_dot, lse_dot


def backward_tangent(
    x: Operands,
    o: Options,
    t: Tangents,
    dout: Tensor | None,
    dout_dot: Tensor | None = None,
    dlse: Tensor | None = None,
    dlse_dot: Tensor | None = None,
) -> SecondOrder:
    """The VJP and its tangent."""
    wanted = ["out", "out_dot", *second_order(x)]
    cotangents = {"dout": dout, "dout_dot": dout_dot, "dlse": dlse, "dlse_dot": dlse_dot}
    found = compute(x, o, Formulas.backward_tangent, wanted, **_dots(t), **cotangents)
    return SecondOrder(found["out"], found["out_dot"], _gradients(x, found, ""), _gradients(x, found, "_dot"))


def second_order(x: Operands) -> list[str]:
    """The names of the gradients of the inputs that are given, then of their tangents."""
    grads = [f"d{name}" for name in DIFFERENTIABLE if getattr(x, name) is not None]
    return [*grads, *(f"{name}_dot" for name in grads)]


def _placed(values: Sequence[Any], into: Sequence[Tensor] | None) -> Sequence[Any]:
    """The values, in the memory of ``into`` where that is given."""
    return values if into is None else [place.copy_(value) for place, value in zip(into, values, strict=True)]


def _dots(t: Tangents) -> dict[str, Any]:
    return {f"{name}_dot": dot for name, dot in t._asdict().items()}


def _gradients(x: Operands, found: dict[str, Tensor], suffix: str) -> Gradients:
    """In the dtypes of the arguments."""
    grads = (found.get(f"d{name}{suffix}") for name in DIFFERENTIABLE)
    return Gradients(
        *(None if g is None else g.to(getattr(x, name).dtype) for name, g in zip(DIFFERENTIABLE, grads, strict=True))
    )
