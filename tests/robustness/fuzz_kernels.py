"""Random shapes, strides, dtypes, threads, instruction sets and options: every pass against the reference.

A result must keep the rounding rule: an RMS error of at most twice that of the naive computation, plus 8 eps times the
largest result. A result of few numbers may miss it by chance, where the naive computation happens to round well. So a
case that misses is drawn again, with inputs that differ in their last digits, and the rule is applied to the RMS over
all draws. The naive computation multiplies by BLAS, which has several sums for one number and so errs less than one sum
of rounded products: a case that misses by this measure too is held against the rule to its letter, every step rounded.
How often either was needed is told at the end.

A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

import attngrad
import instruction_sets
from attngrad import _native, reference
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.operands import Tangents
from attngrad.reference import steps, tangent_steps
from attngrad.testing import rms_error, rounding_bound
from cases import OPTIONS, Case, Shape, make
from passes import all_passes, redraw

WHAT = "cases"
DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 130, 193)
WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 48, 64, 65, 80)


def draw(number: int) -> tuple[Case, np.random.Generator]:
    """The case of this number."""
    rng = np.random.default_rng([number, 17])
    key_heads = int(rng.integers(1, 4))
    shape = Shape(
        tuple(int(n) for n in rng.integers(1, 3, rng.integers(0, 3))),
        key_heads * int(rng.integers(1, 5)),
        key_heads,
        *(int(rng.choice(EDGES)) for _ in range(2)),
        *(int(rng.choice(WIDTHS)) for _ in range(2)),
    )
    names = tuple(rng.choice(list(OPTIONS), rng.integers(0, 6), replace=False))
    c = make(names, shape, number)
    if "bias" in c.options and rng.random() < 0.5:  # broadcast along random axes
        axes = rng.random(c.options["bias"].ndim) < 0.5
        c.options["bias"] = c.options["bias"][tuple(slice(0, 1) if cut else slice(None) for cut in axes)]
        c.t = c.t._replace(bias=rng.standard_normal(c.options["bias"].shape))
    c.t = Tangents(*(x if rng.random() < 0.8 else None for x in c.t))
    if rng.random() < 0.3:
        c.dout_dot = None
    if rng.random() < 0.2:
        c.q = c.q * 10.0 ** rng.integers(0, 4)
    return c, rng


def scatter(x: Any, rng: np.random.Generator) -> Any:
    """The same values at other strides: permuted axes, gaps, reversed axes, read-only."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        return x
    order = rng.permutation(x.ndim) if rng.random() < 0.5 else np.arange(x.ndim)
    steps = rng.choice([1, 1, 2, -1], x.ndim)
    wide = np.zeros(
        [int(n) * abs(int(s)) for n, s in zip(np.array(x.shape)[order], steps[order], strict=True)], x.dtype
    )
    view = wide.transpose(np.argsort(order))[tuple(slice(None, None, int(s)) for s in steps)]
    view[...] = x
    view.flags.writeable = False
    return view


def results(c: Case, module: Any) -> dict[str, Any]:
    """Every pass by name, and the forward pass that keeps nothing."""
    return all_passes(c, module) | {"out alone": module.attention(*c.qkv, **c.options)}


DRAWS = 24
MATMUL = steps.matmul


@contextmanager
def rounding_every_step() -> Iterator[None]:
    """Within, the reference rounds every product and every sum; BLAS has several sums for a number, each smaller."""
    with _multiplying_by(_one_by_one):
        yield


@contextmanager
def _multiplying_by(matmul: Any) -> Iterator[None]:
    with patch.object(steps, "matmul", matmul), patch.object(tangent_steps, "matmul", matmul):
        yield


def _one_by_one(a: Any, b: Any) -> Any:
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total = total + a[..., i, None] * b[..., i, None, :]
    return total


def errors(c: Case, moved: Case, dtype: Any) -> dict[str, tuple[float, float, float]]:
    """By result: our RMS error on ``moved`` (``c`` at other strides), the naive one, and 8 eps times the largest.

    The last with what the truth may be off by on top: the smallest normal number, below which digits are lost, and in
    tangents the difference of two numbers that agree in every digit.
    """
    got = results(moved, attngrad)
    narrow = c.cast(dtype)
    narrow.dlse = c.dlse.astype(dtype)
    narrow.dlse_dot = None if c.dlse_dot is None else c.dlse_dot.astype(dtype)
    with np.errstate(all="ignore"):
        with _multiplying_by(MATMUL):
            truth = results(c.cast(np.longdouble), reference)
        naive = results(narrow, reference)
    eps, least = float(ml_dtypes.finfo(dtype).eps), float(np.finfo(ACCUMULATE.get(np.dtype(dtype), dtype)).tiny)
    moving = truth["lse_dot"][np.isfinite(truth["lse_dot"])]
    digit = float(np.finfo(np.longdouble).eps)
    blind = digit * np.abs(moving).max(initial=1.0)  # of s_dot - lse_dot in longdouble; the kernels keep more digits
    found = {}
    for name, x in got.items():
        finite = np.isfinite(truth[name])
        if not np.isfinite(naive[name][finite].astype(np.float64)).all():
            continue  # out of the range of the dtype
        ours = np.isfinite(x.astype(np.float64))
        if ours[~finite].any() or not ours[np.abs(truth[name]) < 0.99 * float(ml_dtypes.finfo(x.dtype).max)].all():
            raise AssertionError(f"{name} is finite elsewhere")
        finite &= ours
        a, b, n = x[finite], truth[name][finite], naive[name][finite]
        floor = rounding_bound(b, b, eps) + (least + blind if name.endswith("_dot") else least)
        found[name] = rms_error(a, b), rms_error(n, b), floor
    return found


def describe(number: int) -> str:
    """The case of this number, in words."""
    c, rng = draw(number)
    return f"{c.shape}, options {sorted(c.options)}, {np.dtype(DTYPES[int(rng.integers(len(DTYPES)))])}"


def judge(number: int) -> str:
    """Every pass of the case of this number: "right", or how else it kept the rule; see above."""
    c, rng = draw(number)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    _native.set_isa(str(rng.choice(instruction_sets.ALL)))
    attngrad.set_num_threads(int(rng.integers(1, 5)))
    c = c.cast(dtype)
    moved = Case(
        c.shape,
        {n: scatter(x, rng) if n in ("mask", "bias") else x for n, x in c.options.items()},
        *(scatter(x, rng) for x in (*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot)),
        Tangents(*(scatter(x, rng) for x in c.t)),
    )
    first = errors(c, moved, dtype)
    missed = [name for name, (ours, naive, floor) in first.items() if ours > 2 * naive + floor]
    if not missed:
        return "right"
    drawn = [redraw(c, dtype, rng) for _ in range(DRAWS)]
    if not over(drawn, dtype, missed):
        return "drawn again"
    with rounding_every_step():
        told = over(drawn, dtype, missed)
    assert not told, told
    return "right to the letter"


def over(drawn: list[Case], dtype: Any, names: list[str]) -> str:
    """Which of the results miss the rule by their RMS over all draws, and by how much."""
    found = [errors(c, c, dtype) for c in drawn]
    told = []
    for name in names:
        squares = [np.square(e[name]) for e in found if name in e]
        ours, naive, floor = np.sqrt(np.mean(squares, axis=0)) if squares else (np.inf, 0.0, 0.0)
        if ours > 2 * naive + floor:
            told.append(f"{name} is off by {ours:.1e}, the naive one by {naive:.1e}, 8 eps is {floor:.1e}")
    return "; ".join(told)
