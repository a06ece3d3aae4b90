"""What a result should be, and how far from it rounding may carry a right computation.

The bound on the RMS error is twice that of the straightforward computation in the dtype, every intermediate rounded to
it, plus 8 eps times the largest result; both against longdouble. Beside it every entry is held against a scale of its
own (``rounding``), so that one wrong entry is seen however small it is among the others.

Where scores are large, a rounding of one of them moves weights by much more than an eps, and the straightforward
computation may be right by luck. So before a result is called wrong, other orders of the same products are tried too
(``_ORDERS``). Without them one of 100 audits of the kernels in float32 found a fault, in scores of about 1500.

One kind of result has no largest entry to measure by: that whose terms cancel to nothing, as dQ and dK do with one key
or with equal keys. There 8 eps of the result are no room, and the straightforward computation may be exact by luck, so
that another order of the same sums would be called wrong. For these, and for no others, the bound is at least what
rounding the terms leaves (``_floor``). With options, 3 of 12,000 right results were over the rule without a floor, all
of them dQ and dK of one key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from attngrad.auditor.cases import Case
from attngrad.auditor.mistakes import delta_from_weights, weights_from_lse
from attngrad.auditor.pipeline import SECOND, TANGENT, Override, Pipeline, Undefined
from attngrad.auditor.rounding import ENTRYWISE, EntryErrors, TermErrors
from attngrad.core.arrays import NDArray
from attngrad.reference.dense import matmul, transpose
from attngrad.testing import rms_error, rounding_bound

LONG = np.dtype(np.longdouble)
_OUTLIER = {2: 1.2, 4: 4.0, 8: 4.0}
"""How many times its error scale one entry may be off, by the size of the dtype: ten times what eleven right
implementations showed at most, over 13 seeds (0.39, and 0.12 in 16 bits, where carrying errors on overestimates them);
other right computations round otherwise, hence the room."""

_DELTA: Mapping[str, Override] = {"delta": delta_from_weights}


def _from_lse(p: Pipeline, base: Any) -> Any:
    return weights_from_lse(p, p.visible)


_STRAIGHTFORWARD: tuple[Mapping[str, Override], ...] = (
    {},
    _DELTA,
    {"weights_back": _from_lse},
    {"weights": _from_lse},
    {"weights": _from_lse, **_DELTA},
)
"""The ways to compute that all count as straightforward: delta from out or from the weights, and the weights from lse,
in the backward pass or in both."""


def _key_by_key(p: Pipeline, base: Any) -> Any:
    """lse as a running sum, rounded at every key."""
    if p.scores_unmasked.dtype == ml_dtypes.bfloat16:  # which has no logaddexp
        return base()
    lse = np.logaddexp.reduce(np.where(p.visible, p.scores_unmasked, p.c(-np.inf)), axis=-1)
    return np.logaddexp(lse, p.c(p.sinks)[:, None]) if p.has("sinks") else lse


_ORDERS: tuple[Mapping[str, Override], ...] = tuple(
    {"z": z, **more}
    for more in ({}, {"weights": _from_lse}, {"lse": _key_by_key, "weights": _from_lse})
    for z in (
        lambda p, base: matmul(p.c(p.scale_z) * p.q, transpose(p.k_heads)),
        lambda p, base: matmul(p.q, transpose(p.c(p.scale_z) * p.k_heads)),
        lambda p, base: p.c(p.scale_z) * matmul(p.q[..., ::-1], transpose(p.k_heads[..., ::-1])),
        lambda p, base: matmul(p.c(p.scale_z * np.log2(np.e)) * p.q, transpose(p.k_heads)) / p.c(np.log2(np.e)),
    )
)
"""The scores in other orders: the scale within q or k, features from last to first, in powers of two; and each of these
with the weights from lse, summed at once or key by key."""


@dataclass(frozen=True)
class Judgement:
    """How one result of one case compares with what it should be."""

    kind: str
    """"right", "wrong", "shape" or "nan"."""
    error: float = 0.0
    """|actual - truth| at its worst, over the largest true entry or the terms that cancel in it."""
    rms: float = 0.0
    bound: float = 0.0
    where: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether it is within rounding."""
        return self.kind == "right"


def epsilon(dtype: Any) -> tuple[float, float]:
    """eps of a dtype, and what may underflow in it: the smallest normal number (float16 has no others to spare)."""
    info = ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
    return float(info.eps), float(info.smallest_subnormal if np.dtype(dtype) == np.float16 else info.smallest_normal)


def rms_bound(pipelines: list[Pipeline], name: str, truth: NDArray, eps: float) -> float:
    """The bound on the RMS error, by the worst of the straightforward computations."""
    seen = np.isfinite(truth.astype(np.float64))
    if not seen.any():
        return 0.0
    bounds = [rounding_bound(getattr(p, name)[seen], truth[seen], eps) for p in pipelines]
    return max((b for b in bounds if np.isfinite(b)), default=float("inf"))


class Truth:
    """One case, computed in longdouble, and the bounds on what a candidate in ``dtype`` may be off by."""

    def __init__(self, case: Case, dtype: Any) -> None:
        self.case = case
        self.dtype = np.dtype(dtype)
        self.eps, self.tiny = epsilon(dtype)
        self.outlier = _OUTLIER[self.dtype.itemsize]
        self.wide = np.dtype(np.float64) if case.dims.large else LONG
        if self.wide == self.dtype:  # the truth rounds as the candidate does
            self.eps *= 4.0
        self.exact = Pipeline(case.given, self.wide)
        self.naive = [Pipeline(case.given, self.dtype, (ways,)) for ways in _STRAIGHTFORWARD]
        self.errors = EntryErrors(self.exact, self.eps, self.tiny)
        self.terms = TermErrors(self.exact, self.eps, self.tiny)
        self._bounds: dict[tuple[str, bool, bool], float] = {}

    def value(self, name: str) -> NDArray | None:
        """What the result should be; None where the case has no such result."""
        try:
            found: NDArray | None = getattr(self.exact, name)
        except Undefined:
            return None
        return found

    def expected(self, name: str) -> NDArray:
        """What the result should be, in a case that has it."""
        found: NDArray = getattr(self.exact, name)
        return found

    def bound(self, name: str, widest: bool = False, first: bool = False) -> float:
        """The bound on the RMS error of a result; the ``widest``, by other orders of the same products as well.

        By the ``first`` of the straightforward computations alone it is not above that by all of them.
        """
        key = name, widest, first
        if key not in self._bounds:
            truth = self.expected(name)
            ways = [*self.naive, *self._orders] if widest else self.naive[:1] if first else self.naive
            with np.errstate(all="ignore"):
                least = self.bound(name) if widest else self._floor(name, truth)
                self._bounds[key] = max(rms_bound(ways, name, truth, self.eps), least)
        return self._bounds[key]

    @cached_property
    def _orders(self) -> list[Pipeline]:
        return [Pipeline(self.case.given, self.dtype, (ways,)) for ways in _ORDERS]

    def _floor(self, name: str, truth: NDArray) -> float:
        """What rounding leaves of a result whose terms cancel to nothing; 0 for any other."""
        finite = np.isfinite(truth.astype(np.float64))
        largest = float(np.max(np.abs(truth[finite]), initial=0.0))
        if name in ENTRYWISE:
            left = float(np.sqrt(np.mean(getattr(self.terms, name)[finite] ** 2))) if finite.any() else 0.0
            return left if largest < left / self.eps / 1024.0 else 0.0
        if name in (*TANGENT, *SECOND):  # the estimate of their terms is by maxima, and so larger
            left = self.eps * self._terms_of_tangent(name)
            return left if largest < left / self.eps / 4096.0 else 0.0
        return 0.0

    def _terms_of_tangent(self, name: str) -> float:
        """The size of the terms that a tangent is made of, none of them cancelled."""
        p, name = self.exact, name.replace("_mixed", "_dot")

        def top(step: str) -> float:
            x = getattr(p, step)
            return float(np.max(np.abs(x), initial=0.0)) if x is not None else 0.0

        s_dot = top("scores_dot") + top("lse_dot")
        first = {"scores_dot": s_dot, "lse_dot": s_dot, "weights_dot": s_dot}
        first["out_dot"] = s_dot * top("v") + top("v_dot")
        if name in first:
            return first[name]
        dp = top("dweights") + top("delta")
        ds = 2.0 * s_dot * dp + top("dweights_dot") + top("delta_dot")
        ds += dp * top("z_dot") * top("curvature")
        rows, scale = p.q.shape[-2] * p.group, abs(float(p.scale_value))
        second = {"dq_dot": scale * (ds * top("k") + dp * top("k_dot"))}
        second["dk_dot"] = scale * rows * (ds * top("q") + dp * top("q_dot"))
        second["dv_dot"] = rows * (s_dot * top("dout") + top("dout_dot"))
        second["dbias_dot"] = second["dsinks_dot"] = ds * np.sqrt(p.dscores.size)
        return second.get(name, ds)

    def unit(self, name: str, first: bool = False) -> float:
        """What errors are measured in: the largest true entry, or the size of the terms where these cancel."""
        truth = self.expected(name)
        largest = float(np.max(np.abs(np.where(np.isfinite(truth), truth, 0)), initial=0.0))
        unit = max(largest, self.bound(name, first=first) / (64.0 * self.eps))
        return unit if unit > 1e-30 else 1.0  # all zero: errors are absolute

    def judge(self, name: str, actual: NDArray) -> Judgement:
        """Whether ``actual`` is the result ``name``, within rounding."""
        truth = self.expected(name)
        if actual.shape != truth.shape:
            return Judgement("shape", np.inf, np.inf, detail=f"shape {actual.shape}, should be {truth.shape}")
        if actual.size == 0:
            return Judgement("right")
        a, b = actual.astype(LONG), truth
        if name == "scores":  # what stands where nothing is seen does not matter, if softmax cannot see it
            hidden = ~self.exact.visible & ~(a > -1e4)
            a, b = np.where(hidden, 0, a), np.where(~self.exact.visible, 0, b)
        if name.startswith("dweights"):  # nor does the gradient of weights that are zero whatever happens
            a, b = (np.where(self.exact.visible, x, 0) for x in (a, b))
        same = (a == b) | (np.isneginf(a) & np.isneginf(b))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, LONG.type(0), np.abs(a - b))
        bad = ~np.isfinite(difference)
        large = self.case.dims.large  # most are right by the first bound, and the others cost as much as the truth
        bound, unit = self.bound(name, first=large), self.unit(name, large)
        if bad.any():
            return self._found("nan", a, b, np.where(bad, np.inf, 0.0), unit, np.inf, bound)
        rms = rms_error(difference, np.zeros_like(difference))
        off = difference.astype(np.float64)
        # Far beyond the bound no order of the sums is off, and the other orders need not be computed. Where terms may
        # cancel to nothing, and the bound with them, that is no argument: only for results that have a floor.
        floored = name in ENTRYWISE or name in (*TANGENT, *SECOND)
        clear = (large or floored) and rms > (1e4 if large else 1e6) * bound > 0.0
        for widest in (False, True):
            bound = bound if clear or rms <= bound else self.bound(name, widest)
        if rms > bound:
            return self._found("wrong", a, b, off, unit, rms, bound)
        if name in ENTRYWISE:
            with np.errstate(divide="ignore", invalid="ignore"):
                stands_out = np.where(off > 0, off / getattr(self.errors, name), 0.0)
            if np.max(stands_out) > self.outlier:
                return self._found("wrong", a, b, stands_out, unit, rms, bound, "one entry stands out")
        return Judgement("right", float(np.max(off)) / unit, rms, bound)

    def _found(
        self, kind: str, a: Any, b: Any, by: Any, unit: float, rms: float, bound: float, detail: str = ""
    ) -> Judgement:
        where = tuple(int(i) for i in np.unravel_index(np.argmax(by), by.shape))
        error = float(abs(a[where] - b[where])) / unit
        return Judgement(kind, error, rms, bound, where, float(a[where]), float(b[where]), detail)


@dataclass
class Observation:
    """What a candidate returned in one case, and how it was judged."""

    truth: Truth
    results: dict[str, NDArray]
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, actual in self.results.items():
            self.judgements[name] = self.truth.judge(name, actual)

    def without(self, names: Collection[str]) -> Observation:
        """The same, without these results."""
        if self.results.keys().isdisjoint(names):
            return self
        left = Observation(self.truth, {})
        left.results = {n: x for n, x in self.results.items() if n not in names}
        left.judgements = {n: j for n, j in self.judgements.items() if n not in names}
        return left

    @property
    def size(self) -> int:
        """The number of scores: small cases are tried first."""
        return int(np.prod(self.truth.case.dims.scores))
