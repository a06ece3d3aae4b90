"""vmap: the mapped axis becomes the first of the leading axes, which the passes loop over in any case.

Where samples would see each other it is a loop over them: what is given per head is shared by the leading axes, and
dropout counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from attngrad.core.operands import DIFFERENTIABLE, INPUTS
from attngrad.core.options import Kind

_KINDS = tuple(i.kind for i in INPUTS)
_TANGENTS = _KINDS[: len(DIFFERENTIABLE)]


def run(
    apply: Callable[..., Any], tangents: bool, gradients: int, size: int, passes: Any, args: Sequence[Any], dims: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """``apply`` over ``size`` samples; ``args`` are inputs, perhaps tangents, and what has the leading axes of q.

    Of the results, the first are ``gradients`` sets of them.
    """
    per_head = any(k is Kind.PER_HEAD and x is not None for k, x in zip(_KINDS, args, strict=False))
    if per_head or passes.options.dropout > 0.0:
        samples = [
            apply(passes, *(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)))
            for i in range(size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    else:
        kinds = (*_KINDS, *(_TANGENTS if tangents else ()))
        kinds += (None,) * (len(args) - len(kinds))
        axes = args[0].ndim - (dims[0] is not None)
        folded = (_fold(x, d, k, axes, size) for x, d, k in zip(args, dims, kinds, strict=True))
        outputs = apply(passes, *folded)
        if gradients:
            shapes = _plane_shapes(args, dims) * gradients
            outputs = tuple(
                y if shape is None else y.reshape(size, *shape)
                for y, shape in zip_longest(outputs, shapes)  # what follows the gradients is as rows are
            )
    return outputs, (0,) * len(outputs)


def _plane_shapes(args: Sequence[Any], dims: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """For each differentiable input that is given: the shape of a sample where it is a plane, else None."""
    return [
        tuple(n for i, n in enumerate(x.shape) if d is None or i != d % x.ndim) if kind is Kind.PLANE else None
        for x, d, kind in zip(args, dims, _TANGENTS, strict=False)
        if x is not None
    ]


def _fold(x: Any, dim: int | None, kind: Kind | None, axes: int, size: int) -> Any:
    """``x`` with the mapped axis as the first of the leading axes of q, which has ``axes`` without it.

    Where ``x`` is not mapped: what must agree with q on its leading axes is expanded, and so is a plane that has a
    gradient, so that each sample has its own; what broadcasts stays.
    """
    if not isinstance(x, Tensor):
        return x
    full = {None: 0, Kind.PLANE: axes, Kind.IDS: axes - 2, Kind.OFFSET: axes - 3}[kind]
    if dim is None:
        if kind is not None and not (kind is Kind.PLANE and x.is_floating_point()):
            return x
        x = x.expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(size, *(1,) * (full - (x.ndim - 1)), *x.shape[1:]) if full else x
