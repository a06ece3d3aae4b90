"""What every rendering shares: the matrix of one head, cut to what fits, numbers of six characters, a signed heat."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from attngrad.core.arrays import NDArray
from attngrad.core.checks import check_integer, fail
from attngrad.explain.rules import KEY_SIDE, STAGES, is_flat
from attngrad.explain.terms import ZERO_WHERE_HIDDEN

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace


NOISE = 1e-14
BLUE, ORANGE = (33, 102, 172), (230, 97, 1)  # told apart in all common kinds of colour blindness


class Matrix(NamedTuple):
    """A step of one head as a matrix: a window of it, which entries are hidden, the labels, and what was cut.

    Entries below NOISE of the largest are 0 here.
    """

    name: str
    values: NDArray
    hidden: npt.NDArray[np.bool_]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cut: str


def check_place(function: str, trace: Trace, head: int, batch: int) -> None:
    """``head`` and ``batch`` are in the trace."""
    x = trace.operands
    if 0 in (*x.out_shape, *x.scores_shape, x.q.shape[-1]):
        raise ValueError(f"{function}: there is nothing to show; got q of shape {x.q.shape}, v of {x.v.shape}.")
    for argument, value, n in (("head", head, x.heads), ("batch", batch, math.prod(x.q.shape[:-3]))):
        if not 0 <= check_integer(function, argument, value) < n:
            fail(ValueError, function, argument, f"be in [0, {n})", value)


def matrix(trace: Trace, name: str, head: int, batch: int, rows: int, columns: int) -> Matrix:
    """The step ``name`` at query head ``head`` (its key head, for K and V), at most ``rows`` by ``columns``."""
    rule, x = trace.rules[name], trace[name].value
    operands = trace.operands
    index = rule.letters
    if name in ("bias", "bias_dot", "dbias", "dbias_dot"):
        x = np.broadcast_to(x, (*(1,) * (len(operands.scores_shape) - x.ndim), *x.shape)) if x.ndim < 2 else x
        lead = x.shape[:-2]
        places = [int(a) for a in np.unravel_index(batch, operands.q.shape[:-3] or (1,))]
        where = [*places, head][-len(lead) :] if lead else []
        x = x[tuple(0 if n == 1 else a for a, n in zip(where, lead, strict=True))]
    elif index == "h":
        x = x[:, None]
    elif is_flat(name):
        by_batch = name.removeprefix("d")[0] in "XY"
        x = x.reshape(-1, *x.shape[-2:])[batch] if by_batch else np.atleast_2d(x)
    else:
        share = trace.group if name in KEY_SIDE else 1
        x = x.reshape(-1, operands.heads // share, *x.shape[-len(index) :])[batch, head // share]
        x = x[:, None] if len(index) == 1 else x
    hidden = np.zeros(x.shape, bool)
    if index == "ij" and name in ZERO_WHERE_HIDDEN and x.shape == operands.scores_shape[-2:]:
        hidden = ~trace.visible.reshape(-1, operands.heads, *x.shape)[batch, head]
    finite = np.abs(x[np.isfinite(x)])
    noise = NOISE * float(finite.max(initial=0.0))  # what rounding leaves where the sum is 0
    x = np.where(np.abs(x) <= noise, 0.0, x)
    t, s = x.shape
    parts = [f"rows 0 to {rows - 1} of {t}"] if t > rows else []
    parts += [f"columns 0 to {columns - 1} of {s}"] if s > columns else []
    row_labels, column_labels = _labels(trace, index)
    return Matrix(
        name, x[:rows, :columns], hidden[:rows, :columns], row_labels[:rows], column_labels[:columns], ", ".join(parts)
    )


def _labels(trace: Trace, index: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens along the rows and columns of a step; none where there are none."""
    if trace.tokens is None:
        return (), ()
    by_letter = {"i": trace.tokens[0], "j": trace.tokens[1]}
    return by_letter.get(index[0], ()), by_letter.get(index[1:], ())


def number(value: float, digits: int = 2) -> str:
    """``value`` in about six characters: -0.12, 3e-16, -inf.

    >>> number(-0.125), number(3.2e-16), number(-12345.0), number(0.0), number(float("-inf"))
    ('-0.12', '3e-16', '-1e4', '0.00', '-inf')
    """
    if not math.isfinite(value):
        return f"{value}"
    if value == 0.0 or 0.5 * 10.0**-digits <= abs(value) < 999.5:
        return f"{value:.{digits}f}"
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.0e}")


def by_stage(trace: Trace) -> list[tuple[str, list[str]]]:
    """The title of each stage that the trace has, and its steps worth showing."""
    stages = [(title, [n for n in shown(trace) if trace.rules[n].stage == stage]) for stage, title in STAGES.items()]
    return [(title, names) for title, names in stages if names]


def shown(trace: Trace) -> list[str]:
    """The steps worth showing: dZ is dS where there is no softcap, and sines and cosines explain nothing."""
    no_softcap = trace.options.softcap is None
    return [n for n in trace if not (no_softcap and n in ("dZ", "dZ_dot")) and not n.startswith(("cos_", "sin_"))]


class Cell(NamedTuple):
    """A number in about six characters, the colour behind it, and whether that is dark."""

    value: float
    text: str
    colour: str
    dark: bool


def heat(m: Matrix) -> list[list[Cell | None]]:
    """The cells of a matrix, row by row, blue below zero and orange above; None where hidden."""
    largest = float(np.abs(m.values[np.isfinite(m.values)]).max(initial=0.0)) or 1.0

    def cell(value: float) -> Cell:
        strength = min(1.0, abs(value) / largest) if np.isfinite(value) else 0.0
        paint = ",".join(str(round(255 + (c - 255) * strength)) for c in (ORANGE if value > 0 else BLUE))
        return Cell(value, number(value), f"rgb({paint})", strength > 0.7)

    rows = zip(m.values, m.hidden, strict=True)
    return [[None if h else cell(float(x)) for x, h in zip(row, hidden, strict=True)] for row, hidden in rows]
