"""Verify before timing: every contender's result against the reference in float64.

Where the dense reference would not fit, a sample of the queries is checked: dout and dout_dot are zero outside of the
sample, so that dk, dv and dbias and their tangents too come from the sampled rows alone, and every gradient is compared
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from benchmarks.cases import Case, Inputs
from benchmarks.passes import PASSES, Arrays

MOST_PAIRS = 20_000_000
"""Scores that the reference may hold, over all sampled rows."""

MOST_NUMBERS = 100_000_000
"""Entries of keys and values that the reference may read, repeated for the query heads of a group."""

TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "bfloat16": 4e-2, "float16": 6e-3}
"""Largest difference over largest entry, for each output. It tells a wrong computation, not a rounded one."""

APPROXIMATION = {"float64": 5e-9, "float32": 3e-3}
"""The same for central differences, which truncate and cancel: some 200 times eps to the power 2/3, their best."""


class VerificationError(Exception):
    """A contender computed something else than the reference."""


@dataclass(frozen=True)
class Sample:
    """Which queries are checked: ``rows``, of the heads that read key head h of batch b for (b, h) in ``units``."""

    units: tuple[tuple[int, int], ...]
    rows: NDArray
    whole: bool


Expected = dict[str, list[tuple[Any, NDArray]]]
"""By output: where in the array, and what should be there."""


def _spread(count: int, wanted: int) -> NDArray:
    """Up to ``wanted`` of range(count), evenly spread, first and last among them."""
    return np.unique(np.linspace(0, count - 1, max(min(count, wanted), 1)).round().astype(np.int64))


def choose(case: Case) -> Sample:
    """Every query where the dense scores fit, else rows spread over every head; of long caches, a part of the heads."""
    n = case.n
    units = [(b, h) for b in range(n.batch) for h in range(n.key_heads)]
    kept = _spread(len(units), MOST_NUMBERS // (n.group * n.s * (n.d + n.e)))
    rows = _spread(n.t, max(MOST_PAIRS // (len(kept) * n.group * n.s), 16))
    return Sample(tuple(units[i] for i in kept), rows, len(rows) == n.t and len(kept) == len(units))


def _place(shape: tuple[int, ...], b: int, heads: NDArray, rows: NDArray) -> Any:
    """Where an array (B, H, T, ...) holds these rows of these heads; axes of length 1 stay."""
    return (
        b if shape[0] > 1 else 0,
        (heads if shape[1] > 1 else np.zeros(1, np.int64))[:, None],
        rows if shape[2] > 1 else np.zeros(1, np.int64),
    )


def restrict(x: Inputs, sample: Sample, group: int) -> Inputs:
    """``x`` with dout and dout_dot zero outside of the sample."""
    if sample.whole:
        return x

    def kept(whole: NDArray) -> NDArray:
        part = np.zeros_like(whole)
        for b, h in sample.units:
            place = _place(part.shape, b, np.arange(h * group, (h + 1) * group), sample.rows)
            part[place] = whole[place]
        return part

    return x._replace(dout=kept(x.dout), dout_dot=None if x.dout_dot is None else kept(x.dout_dot))


def _wide(x: NDArray) -> NDArray:
    return x.astype(np.float64)


def expect(case: Case, x: Inputs, sample: Sample, names: Sequence[str]) -> dict[str, Expected]:
    """By pass, the outputs of the passes ``names``, by the reference."""
    found: dict[str, Expected] = {}
    # The largest pass first: most others along the same tangents find their outputs among its own.
    for one in sorted((PASSES[name] for name in names), key=lambda one: -len(one.outputs)):
        shared = [
            expected
            for other, expected in found.items()
            if PASSES[other].tangents == one.tangents and set(one.outputs) <= set(expected)
        ]
        found[one.name] = shared[0] if shared else _expect(case, x.along(one.tangents), sample, one.reference)
    return found


def _expect(case: Case, x: Inputs, sample: Sample, reference: Callable[[Inputs], Arrays]) -> Expected:
    """The outputs of the reference, head group by head group."""
    found: Expected = {}
    plane = case.visible(sample.rows)
    for b, h in sample.units:
        heads = np.arange(h * case.n.group, (h + 1) * case.n.group)

        def queries(a: NDArray, b: int = b, heads: NDArray = heads) -> NDArray:
            part: NDArray = a[_place(a.shape, b, heads, sample.rows)]
            return part

        def keys(a: NDArray, b: int = b, h: int = h) -> NDArray:
            return a[b, h : h + 1]

        mask = None if x.mask is None else queries(x.mask)
        if plane is not None:
            mask = plane if mask is None else plane & mask
        by_name = {"k": keys, "v": keys}
        wide = {
            name: _wide(by_name.get(name.removesuffix("_dot"), queries)(a))
            for name, a in x._asdict().items()
            if a is not None and name != "mask"
        }
        for output, value in reference(Inputs(**wide, mask=mask)).items():
            argument = output.removesuffix("_dot").removeprefix("d")
            if argument == "bias" and x.bias is not None:
                [(_, total)] = found.setdefault(output, [(..., np.zeros(x.bias.shape))])
                total[_place(total.shape, b, heads, sample.rows)] += value
                continue
            index = (b, slice(h, h + 1)) if argument in ("k", "v") else _place(x.q.shape, b, heads, sample.rows)
            found.setdefault(output, []).append((index, value))
    return found


def error(actual: NDArray, parts: Sequence[tuple[Any, NDArray]]) -> float:
    """The largest difference over the largest entry expected; NaN where either has one."""
    largest = np.max([np.max(np.abs(value), initial=0.0) for _, value in parts])
    worst = np.max([np.max(np.abs(_wide(actual[index]) - value), initial=0.0) for index, value in parts])
    return float(worst / (largest or 1.0))


def check(
    arrays: Arrays, expected: Expected, outputs: Sequence[str], dtype: str, *, approximate: bool = False
) -> float:
    """The largest error over the outputs; raises VerificationError where one is missing or beyond the tolerance."""
    tolerance, what = (
        (APPROXIMATION[dtype], f"an approximation in {dtype}") if approximate else (TOLERANCE[dtype], dtype)
    )
    errors: Mapping[str, float] = {
        output: error(value, expected[output]) for output, value in arrays.items() if output in expected
    }
    missing = [output for output in outputs if output not in errors]
    if missing:
        raise VerificationError(f"returned no {', '.join(missing)}. Not timed.")
    for output, value in errors.items():
        if not value <= tolerance:
            raise VerificationError(
                f"{output} is off by {value:.1e} of the largest entry; {what} may be off by {tolerance:.0e}. Not timed."
            )
    return max(errors.values())
