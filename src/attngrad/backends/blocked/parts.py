"""Passes over parts of the keys: results of parts are merged by the row statistics, in float32 or wider.

A part has no sinks: they enter once, as one more key whose value is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngrad.backends.blocked.formulas import Formulas, finish_rows
from attngrad.backends.blocked.passes import compute, dots_of
from attngrad.backends.blocked.programs import SUMS, widen
from attngrad.backends.merge import TangentMerge
from attngrad.backends.protocol import FIRST_ORDER
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import Options
from attngrad.reference.dense import sum_sinks


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """In the dtype that ``like`` is computed in."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


class forward_parts:  # noqa: N801 - the protocol calls it as a function
    """The running sums of rows: ``out = sum_j exp(s_j - row_max) v_j``, the same of ones, and row_max."""

    def __init__(self, x: Operands, o: Options) -> None:
        self._options, self._dtype, self._sinks = o, x.q.dtype, x.sinks
        self._out, self._sum = _zeros(x.q, x.out_shape), _zeros(x.q, x.q.shape[:-1])
        self._row_max = torch.full_like(self._sum, -torch.inf)

    def add(self, rows: slice, part: Operands) -> None:
        """The keys of ``part`` for ``rows``."""
        of_part = compute(part._replace(sinks=None), self._options, Formulas.forward, SUMS)
        out_b, row_max_b, sum_b = (of_part[name] for name in SUMS)
        out, row_max, total = self._out[..., rows, :], self._row_max[..., rows], self._sum[..., rows]
        row_max_b = row_max_b.masked_fill(sum_b == 0, -torch.inf)
        highest = torch.maximum(row_max, row_max_b)
        level = highest.masked_fill(highest == -torch.inf, 0.0)
        old, new = (row_max - level).exp(), (row_max_b - level).exp()
        out.mul_(old[..., None]).add_(out_b.mul_(new[..., None]))
        total.mul_(old).add_(sum_b.mul_(new))
        row_max.copy_(highest)

    def finish(self) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """``out, lse, residuals``; the sums are used up."""
        row_max = self._row_max.masked_fill_(self._sum == 0, 0.0)
        sinks = None if self._sinks is None else widen(self._sinks)
        out, lse, *rest = finish_rows(self._out, row_max, self._sum, sinks)
        return out.to(self._dtype), lse, (out, *rest)


class backward_parts:  # noqa: N801
    """Each part from the statistics of the whole row, so that what it gives is exact; dq is their sum."""

    def __init__(
        self, x: Operands, o: Options, residuals: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None
    ) -> None:
        self._x, self._options, self._residuals = x, o, residuals
        self._dout, self._dlse = dout, dlse
        self._dq = _zeros(x.q, x.q.shape)

    def add(self, rows: slice, part: Operands) -> Gradients:
        """The gradients of the part."""
        out, row_max, inv_row_sum = self._residuals
        given = {
            "out": out[..., rows, :],
            "row_max": row_max[..., rows],
            "inv_row_sum": inv_row_sum[..., rows],
            "dout": None if self._dout is None else self._dout[..., rows, :],
            "dlse": None if self._dlse is None else self._dlse[..., rows],
        }
        names = ("dq", "dk", "dv", *(() if part.bias is None else ("dbias",)))
        found = compute(part._replace(sinks=None), self._options, Formulas.backward, names, **given)
        self._dq[..., rows, :].add_(found["dq"])
        return Gradients(found["dq"], found["dk"], found["dv"], found.get("dbias"))

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """dq, and the gradient of the sinks."""
        sinks = self._x.sinks
        return self._dq.to(self._x.q.dtype), None if sinks is None else self._of_sinks().to(sinks.dtype)

    def _of_sinks(self) -> Tensor:
        """(R6): -sum_i exp(sigma - lse_i) delta_i."""
        out, row_max, inv_row_sum = self._residuals
        sigma, masked = widen(self._x.sinks)[:, None], inv_row_sum == 0
        delta = torch.zeros_like(row_max)
        if self._dout is not None:
            delta = (widen(self._dout) * out).sum(-1).masked_fill(masked, 0.0)  # dout of such a row may be NaN
        if self._dlse is not None:
            delta = delta - self._dlse
        among = (sigma - row_max).exp() * inv_row_sum
        share = torch.where(masked, (sigma > -torch.inf).to(among.dtype), among)
        found: Tensor = sum_sinks(-(share * delta), widen(self._x.sinks))
        return found


class tangent_parts(TangentMerge):  # noqa: N801
    """The tangent of a forward pass."""

    def __init__(self, x: Operands, o: Options, t: Tangents) -> None:
        self._dtype = x.q.dtype
        out, out_dot = (_zeros(x.q, x.out_shape) for _ in range(2))
        lse, lse_dot = (_zeros(x.q, x.q.shape[:-1]) for _ in range(2))
        lse.fill_(-torch.inf)
        if x.sinks is not None:
            lse.copy_(widen(x.sinks)[:, None])
            if t.sinks is not None:
                lse_dot.copy_(widen(t.sinks)[:, None]).masked_fill_(lse == -torch.inf, 0.0)

        def tangent_of(part: Operands, t: Tangents) -> Any:
            part, t = part._replace(sinks=None), t._replace(sinks=None)
            found = compute(part, o, Formulas.forward_tangent, FIRST_ORDER, **dots_of(t))
            return [found[name] for name in FIRST_ORDER]

        super().__init__((out, lse, out_dot, lse_dot), tangent_of, torch)

    def finish(self) -> tuple[Tensor, Tensor]:
        """``out_dot, lse_dot``."""
        return self._out_dot.to(self._dtype), self._lse_dot
