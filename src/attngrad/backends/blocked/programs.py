"""What is computed of a block: the steps of the reference, from named inputs to named results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngrad.backends.blocked.blocks import KEY, KEYS, PLANE, ROW, ROWS, WHOLE, Block, Layout, Result
from attngrad.core.operands import DIFFERENTIABLE, INPUTS, QKV, SEEDS, Operands, unflatten
from attngrad.core.options import Kind, Options
from attngrad.reference.passes import inputs
from attngrad.reference.table import evaluate


def _layout(name: str, kind: Kind | None) -> Layout:
    if kind is None:
        return ROWS if name == "q" else KEYS
    if kind is Kind.IDS:
        return ROW if name.startswith("q_") else KEY
    return PLANE if kind is Kind.PLANE else WHOLE


_INPUTS = {i.name: _layout(i.name, i.kind) for i in INPUTS}
_MOVING = {**{name: _INPUTS[name] for name in DIFFERENTIABLE}, "dout": ROWS, "dlse": ROW}
RESIDUALS = {"out": ROWS, "row_max": ROW, "inv_row_sum": ROW}
SUMS = ("out", "row_max", "row_sum")
"""What a forward pass gives of a block, before ``finish_rows``."""
LAYOUTS = {**_INPUTS, **_MOVING, **{f"{name}_dot": layout for name, layout in _MOVING.items()}, **RESIDUALS}
"""Of everything that a block may be given."""
_ADDED = tuple(name for name in LAYOUTS if name not in _INPUTS and name not in RESIDUALS)
_LIKE = {"q_dot": "q", "k_dot": "k", "v_dot": "v", "dout_dot": "dout"}
"""Tangents that the steps want as zeros, not None."""


def result_of(name: str, given: Mapping[str, Tensor]) -> Result:
    """The layout and the shape of a result: a residual, lse, the gradient of an input; or a tangent of those."""
    name = name.removesuffix("_dot")
    rows = tuple(given["q"].shape[:-1])
    if name == "out":
        return Result(ROWS, (*rows, given["v"].shape[-1]))
    if name == "lse" or name in SUMS:
        return Result(ROW, rows)
    primal = name.removeprefix("d")
    return Result(LAYOUTS[primal], tuple(given[primal].shape))


def widen(x: Tensor) -> Tensor:
    """``x`` in the dtype that it is computed in."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 2 else x


@dataclass(frozen=True, eq=False)
class Program:
    """A function of a block: ``given`` names its tensors, ``wanted`` its results. Offset and seed may be numbers."""

    options: Options
    numbers: Mapping[str, Any]
    given: tuple[str, ...]
    wanted: tuple[str, ...]

    def __call__(self, block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results of a block, in the dtype of computation."""
        flat = {**self.numbers, **dict(zip(self.given, map(widen, tensors), strict=True))}
        options = unflatten(flat)
        seeds = {name: options.pop(name) for name in SEEDS if name in options}
        i, j = block.rows.start, block.keys.start
        x = Operands(*(flat[name] for name in QKV), **options)
        x = x._replace(offset=x.offset + (i - j), origin=block.origin(flat["origin"]))
        values = {**inputs(x, self.options), **seeds, **{name: flat.get(name) for name in _ADDED}}
        if values["dout"] is None and values["dlse"] is not None:
            values["dout"] = torch.zeros_like(values["dlse"])[..., None].expand(*values["dlse"].shape, x.v.shape[-1])
        for name, like in _LIKE.items():
            if values[name] is None and values[like] is not None:
                values[name] = torch.zeros_like(values[like])
        if "row_max" in flat:
            values = _from_residuals(values, *(flat[name] for name in RESIDUALS))
        found = evaluate(values, tuple(name for name in self.wanted if name not in RESIDUALS or name == "out"))
        if "row_max" in self.wanted:
            _, _, total, found["row_max"] = found["normaliser"]
            found["inv_row_sum"] = torch.where(total == 0, torch.zeros_like(total), 1 / total)
        return tuple(found[name] for name in self.wanted)


def _from_residuals(values: dict[str, Any], out: Tensor, row_max: Tensor, inv_row_sum: Tensor) -> dict[str, Any]:
    """The weights from the row statistics of the forward pass, and its out: neither is computed again."""
    values = evaluate(values, ("scores", "visible", "sigma"))
    e = torch.where(values["visible"], torch.exp(values["scores"] - row_max[..., None]), 0.0)
    sigma = values["sigma"]
    sink = None if sigma is None else torch.exp(sigma - row_max) * inv_row_sum
    return {**values, "out": out, "weights": e * inv_row_sum[..., None], "sink": sink}
