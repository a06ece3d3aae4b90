"""The pattern of a wrong result: where it is wrong, by a constant ratio, or like the rounding of a coarser dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attngrad.auditor.report import Heat
from attngrad.auditor.truth import LONG, Observation, Truth, epsilon
from attngrad.core.dtypes import TABLE
from attngrad.testing import rms_error

_AXES = {4: ("batch", "head", "row", "column"), 3: ("batch", "head", "row"), 2: ("row", "column"), 1: ("head",)}
_FLAT = {3: ("batch", "row", "column")}


def _errors(o: Observation, name: str) -> Any:
    """|actual - truth|, infinite where it is no number."""
    with np.errstate(invalid="ignore"):
        error = np.abs(o.results[name].astype(LONG) - o.truth.expected(name)).astype(np.float64)
    return np.where(np.isnan(error), np.inf, error)


def wrong_entries(o: Observation, name: str) -> Any:
    """Where the candidate is off by more than a thousandth of its largest error, and by more than rounding."""
    error = _errors(o, name)
    error = np.where(np.isneginf(o.truth.expected(name)) & np.isneginf(o.results[name].astype(LONG)), 0.0, error)
    finite = error[np.isfinite(error)]
    top = float(np.max(finite, initial=0.0))
    return (error > 1e-3 * top) & (error > 2.0 * o.truth.bound(name)) | ~np.isfinite(error)


def ratio(o: Observation, name: str) -> float | None:
    """The constant c with candidate = c * truth, if there is one."""
    truth = o.truth.expected(name)
    a, b = o.results[name].astype(LONG).ravel(), truth.ravel()
    if a.size < 2 or not np.isfinite(a).all() or not np.any(b != 0) or not np.isfinite(b).all():
        return None
    c = float(a @ b / (b @ b))
    left = float(np.sqrt(np.mean((a - c * b) ** 2)))
    return c if left <= 4.0 * o.truth.bound(name) * max(1.0, abs(c)) else None


def some(indices: Any, length: int) -> str:
    """A few of the indices, or from where to where they run."""
    values = [int(i) for i in indices]
    if len(values) > 1 and values == list(range(values[0], values[-1] + 1)):
        if values[-1] == length - 1:
            return f"from {values[0]} on"
        return f"{values[0]} to {values[-1]}"
    shown = ", ".join(map(str, values[:6]))
    return shown + (", ..." if len(values) > 6 else "")


def describe(o: Observation, name: str, flat: bool = False) -> str:
    """One or two sentences on where a result is wrong."""
    bad = wrong_entries(o, name)
    if not bad.any():
        where = o.judgements[name].where
        return f"One entry stands out, at {list(where or ())}: its error is far above that of its neighbours."
    said = [f"{int(bad.sum())} of {bad.size} entries are wrong"]
    axes = (_FLAT if flat else _AXES).get(bad.ndim) or _AXES.get(bad.ndim, tuple(f"axis {i}" for i in range(bad.ndim)))
    for axis, label in enumerate(axes):
        others = tuple(i for i in range(bad.ndim) if i != axis)
        hit = np.flatnonzero(bad.any(axis=others))
        if bad.shape[axis] > 1 and len(hit) < bad.shape[axis]:
            plural = {"batch": "batches", "axis": "axes"}.get(label, label + "s")
            left = np.setdiff1d(np.arange(bad.shape[axis]), hit)
            few = some(hit, bad.shape[axis])
            if not few.endswith("..."):
                said.append(f"only {label if len(hit) == 1 else plural} {few}")
            elif len(left) <= 6:
                said.append(f"all {plural} but {some(left, bad.shape[axis])}")
            elif len(hit) <= len(left):
                said.append(f"only {plural} {few}")
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    said.append(f"the first at {list(first)}")
    text = ", ".join(said) + "."
    constant = ratio(o, name)
    if constant is not None:
        text += f" It is {constant:.6g} times what it should be."
    return text


def sizes(held: Sequence[Observation], bad: Sequence[Observation]) -> str:
    """Which sizes the wrong cases have, and which the right ones; empty where no one rule tells them apart.

    It is a rule of the cases that were tried: between these it says nothing.
    """
    right = [o.truth.case.dims for o in held if all(o is not x for x in bad)]
    wrong = [o.truth.case.dims for o in bad]
    if not right or not wrong:
        return ""
    for axis, letter in (("t", "T"), ("s", "S"), ("d", "D"), ("e", "E")):
        ours, theirs = {getattr(n, axis) for n in wrong}, {getattr(n, axis) for n in right}
        if min(ours) > max(theirs):
            up_to = "with" if len(theirs) == 1 else "up to"
            return f"{letter} >= {min(ours)}, right {up_to} {letter} = {max(theirs)}"
        if len(ours) == 1 and not ours & theirs:
            return f"{letter} = {ours.pop()}, right in the others"
        for tile in (512, 256, 128, 64, 32, 16):
            if all(x % tile == 0 for x in ours) and not any(x % tile == 0 for x in theirs):
                return f"{letter} a multiple of {tile}, right in the others"
    return ""


def heat_of(observations: Sequence[Observation], name: str) -> Heat | None:
    """The error over (row, column) in the worst head of the largest case that fits on a page."""
    bad = [o for o in observations if name in o.judgements and o.judgements[name].kind in ("wrong", "nan")]
    held = [o for o in bad if o.results[name].ndim >= 2 and max(o.results[name].shape[-2:]) <= 48]
    if not held:
        return None
    o = max(held, key=lambda o: o.size)
    error = np.where(np.isneginf(o.truth.expected(name).astype(np.float64)), 0.0, _errors(o, name))
    unit = o.truth.unit(name)
    flat = error.reshape(-1, *error.shape[-2:])
    head = int(np.argmax(np.max(flat, axis=(1, 2))))
    where = tuple(int(i) for i in np.unravel_index(head, error.shape[:-2])) if error.ndim > 2 else ()
    rows = tuple(tuple(float(x) for x in row) for row in flat[head] / unit)
    return Heat(name, o.truth.case.name, where, rows, o.truth.bound(name) / unit)


def low_precision(observations: Sequence[Observation]) -> str | None:
    """The coarser dtype whose rounding the errors look like; None where they do not look like rounding."""
    wrong = [(o, n) for o in observations for n, j in o.judgements.items() if not j.right]
    if not wrong or any(o.judgements[n].kind != "wrong" for o, n in wrong) or not _spread(wrong):
        return None
    for dtype in TABLE[1:]:
        coarser = all(epsilon(dtype.numpy)[0] >= 2.0 * o.truth.eps for o, _ in wrong)
        if coarser and _like_rounding(wrong, dtype.numpy):
            return dtype.name
    return None


def _like_rounding(wrong: Sequence[tuple[Observation, str]], dtype: Any) -> bool:
    """Errors no larger than rounding to ``dtype`` everywhere leaves, and most of them not much smaller either.

    Most, not all: where weights are nearly one-hot, one computation may be exact and another is not.
    """
    parts = []
    coarse: dict[int, Truth] = {}
    for o, name in wrong:
        t = coarse.setdefault(id(o), Truth(o.truth.case, dtype))
        with np.errstate(all="ignore"):
            usual = rms_error(getattr(t.naive[0], name), o.truth.expected(name))
        rms = o.judgements[name].rms
        if not rms <= 6.0 * usual and not rms <= t.bound(name):
            return False
        parts.append(rms >= usual / 1000.0)
    return float(np.mean(parts)) > 0.7


def _spread(wrong: Sequence[tuple[Observation, str]]) -> bool:
    """Whether errors are many, of both signs, and no constant multiple of the truth: noise, not a formula."""
    votes = []
    for o, name in wrong:
        truth = o.truth.expected(name)
        error = (o.results[name].astype(LONG) - truth).astype(np.float64).ravel()
        size = truth.astype(np.float64).ravel()
        if error.size < 12:
            continue
        many = np.mean(np.abs(error) > 0.05 * np.sqrt(np.mean(error**2))) > 0.5
        signs = 0.15 < np.mean(error > 0) < 0.85
        norms = float(np.linalg.norm(error) * np.linalg.norm(size))
        free = norms == 0 or abs(float(error @ size)) < 0.7 * norms
        votes.append(float(many and signs and free))
    return bool(votes) and float(np.mean(votes)) > 0.7
