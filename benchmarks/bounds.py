"""What must hold, as one table, and whether it does. Stated for two threads and torch 2.13.0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.memory import exponent
from benchmarks.passes import PASSES
from benchmarks.peers import OURS, OWN_BASE, OWN_FLOAT32
from benchmarks.results import Results, Row, geometric_mean
from benchmarks.startup import HELP

Found = tuple[float, str]
"""A value, and the row that it comes from."""

Where = Callable[[Row], bool]
Statistic = Callable[[Results, list[Row]], Found]


def _worst(largest: bool, of: Callable[[Results, Row], float]) -> Statistic:
    """The smallest (largest) value of a row, among those that have one."""

    def statistic(results: Results, rows: list[Row]) -> Found:
        values = [(of(results, row), row.label) for row in rows]
        values = [found for found in values if math.isfinite(found[0])]
        if not values:
            return math.nan, ""
        return max(values) if largest else min(values)

    return statistic


def _ratio(_: Results, row: Row) -> float:
    return row.ratio("torch")


def _mean_ratio(results: Results, rows: list[Row]) -> Found:
    ratios = [ratio for row in rows if math.isfinite(ratio := row.ratio("torch"))]
    return geometric_mean(ratios), f"{len(ratios)} rows" if ratios else ""


def _as_fast_as_memory(results: Results, row: Row) -> float:
    """At least 1 where the ratio is 0.95 or the share of the bandwidth 85 %."""
    shares = (row.ratio("torch") / 0.95, results.fraction(row) / 0.85)
    return max((share for share in shares if math.isfinite(share)), default=math.nan)


def _memory(work: str, n: int) -> Statistic:
    """Sizes of q beyond the inputs, at length ``n``."""

    def statistic(results: Results, _: list[Row]) -> Found:
        found = [usage for usage in results.usage().get(work, {}).get(OURS, ()) if usage.n == n]
        return (found[0].multiple, f"n = {n}") if found else (math.nan, "")

    return statistic


def _growth(work: str) -> Statistic:
    """The exponent of the memory over the length."""

    def statistic(results: Results, _: list[Row]) -> Found:
        found = [usage for usage in results.usage().get(work, {}).get(OURS, ()) if usage.bytes > 0]
        if len(found) < 2:
            return math.nan, ""
        sizes = [usage.n for usage in found]
        return exponent(sizes, [usage.bytes for usage in found]), f"n = {min(sizes)} to {max(sizes)}"

    return statistic


def _startup(results: Results, _: list[Row]) -> Found:
    """Milliseconds until the help is printed."""
    found = results.startup
    return (math.nan, "") if found is None or found.disturbed else (found.milliseconds[HELP], HELP)


def _microseconds(_: Results, row: Row) -> float:
    return row.times[OURS].median * 1e6 if OURS in row.times else math.nan


def _own(_: Results, row: Row) -> float:
    """Our time over our float32 time."""
    return 1.0 / row.ratio(OWN_FLOAT32)


def _over_own_pass(_: Results, row: Row) -> float:
    """Our time over that of our own forward (+ backward); along one tangent, over its share of products too."""
    one = PASSES[row.name]
    return PASSES[one.method].cost / one.cost / row.ratio(OWN_BASE)


def _share(results: Results, row: Row) -> float:
    """Of the peak; NaN where it is above 1 by more than the clock moves: then the probe did not run as it should."""
    share = results.fraction(row)
    return share if share <= 1.2 else math.nan


LEAST_RATIO = _worst(False, _ratio)
LEAST_FRACTION = _worst(False, _share)
MOST_OWN = _worst(True, _over_own_pass)
F, FB = "forward", "forward + backward"
JVP, HVP = "jvp", "hvp"

MOST_MEMORY = {FB: 12, HVP: 16}
"""Sizes of q, by work."""


def _no_row(_: Row) -> bool:
    """Of bounds on the memory and on the start."""
    return False


def _first_order(row: Row) -> bool:
    return row.name in (F, FB)


def _grid(row: Row) -> bool:
    """float32 rows bound by arithmetic, but for those where torch differentiates a bias, on its n x n path."""
    return row.case.dtype == "float32" and _first_order(row) and not row.by_bytes and not row.case.options.dbias


def _shape(row: Row, name: str, *shape: int) -> bool:
    n = row.case.n
    return row.case.dtype == "float32" and row.name == name and (n.batch, n.heads, n.t, n.d) == shape


def _full(row: Row, name: str, *shape: int) -> bool:
    return _shape(row, name, *shape) and row.case.kind == ""


def _tangent(row: Row, *names: str, alone: bool | None = None) -> bool:
    """float32 rows of the passes ``names``, along all tangents, one, or either."""
    one = PASSES[row.name]
    return row.case.dtype == "float32" and one.method in names and alone in (None, one.whole is not None)


def _tokens(row: Row, most: int, kind: str | None = None, least: int = 1) -> bool:
    n = row.case.n
    of_kind = kind is None or row.case.kind == kind
    return _grid(row) and row.case.group != "overhead" and of_kind and n.t == n.s and least <= n.t <= most


@dataclass(frozen=True)
class Bound:
    """``statistic`` of the rows ``where`` is at least ``limit``; with ``at_most``, at most."""

    text: str
    statistic: Statistic
    limit: float
    where: Where
    at_most: bool = False
    unit: str = ""


BOUNDS: tuple[Bound, ...] = (
    Bound("FMA share, 1,8,2048,64 fwd", LEAST_FRACTION, 0.80, lambda r: _full(r, F, 1, 8, 2048, 64)),
    Bound("FMA share, 1,8,2048,64 fwd+bwd", LEAST_FRACTION, 0.82, lambda r: _full(r, FB, 1, 8, 2048, 64)),
    Bound("float32: every shape", LEAST_RATIO, 1.0, _grid),
    Bound(
        "decoding: ratio/0.95 or stream/0.85",
        _worst(False, _as_fast_as_memory),
        1.0,
        lambda r: r.by_bytes and r.case.dtype == "float32",
    ),
    Bound("float32 fwd: mean", _mean_ratio, 1.6, lambda r: _grid(r) and r.name == F),
    Bound("float32 fwd+bwd: mean", _mean_ratio, 1.6, lambda r: _grid(r) and r.name == FB),
    Bound("causal, up to 512 tokens", LEAST_RATIO, 2.0, lambda r: _tokens(r, 512, "causal")),
    Bound("causal, 1024 tokens", LEAST_RATIO, 1.6, lambda r: _tokens(r, 1024, "causal", 1024)),
    Bound("up to 16 tokens", LEAST_RATIO, 4.0, lambda r: _tokens(r, 16)),
    Bound("up to 64 tokens", LEAST_RATIO, 2.0, lambda r: _tokens(r, 64)),
    Bound(
        "mask or bias given",
        LEAST_RATIO,
        1.5,
        lambda r: r.case.dtype == "float32" and r.case.group == "masks and bias",
    ),
    Bound("float64: mean", _mean_ratio, 1.5, lambda r: r.case.dtype == "float64" and _first_order(r)),
    Bound("float64: every shape", LEAST_RATIO, 1.2, lambda r: r.case.dtype == "float64" and _first_order(r)),
    Bound("bfloat16 fwd+bwd", LEAST_RATIO, 4.0, lambda r: r.case.dtype == "bfloat16" and r.name == FB),
    Bound("float16 fwd+bwd", LEAST_RATIO, 4.0, lambda r: r.case.dtype == "float16" and r.name == FB),
    Bound(
        "16-bit fwd+bwd: over own float32",
        _worst(True, _own),
        1.2,
        lambda r: r.case.dtype in ("bfloat16", "float16") and r.name == FB,
        at_most=True,
    ),
    Bound("jvp, 1,8,1024,64 full and causal", LEAST_RATIO, 4.0, lambda r: _shape(r, JVP, 1, 8, 1024, 64)),
    Bound("hvp, 1,8,1024,64 full and causal", LEAST_RATIO, 3.0, lambda r: _shape(r, HVP, 1, 8, 1024, 64)),
    Bound("jvp and hvp: every shape", LEAST_RATIO, 1.0, lambda r: _tangent(r, JVP, HVP)),
    Bound("jvp: over own fwd", MOST_OWN, 3.5, lambda r: _tangent(r, JVP, alone=False), at_most=True),
    Bound("hvp: over own fwd+bwd", MOST_OWN, 3.6, lambda r: _tangent(r, HVP, alone=False), at_most=True),
    Bound("jvp, one tangent: by its products", MOST_OWN, 3.5, lambda r: _tangent(r, JVP, alone=True), at_most=True),
    Bound("hvp, one tangent: by its products", MOST_OWN, 3.6, lambda r: _tangent(r, HVP, alone=True), at_most=True),
    Bound(
        "hvp memory, n = 32768, in sizes of q", _memory(HVP, 32768), MOST_MEMORY[HVP], _no_row, at_most=True, unit="x"
    ),
    Bound("hvp memory: exponent of n", _growth(HVP), 1.1, _no_row, at_most=True),
    Bound("memory, n = 65536, in sizes of q", _memory(FB, 65536), MOST_MEMORY[FB], _no_row, at_most=True, unit="x"),
    Bound(
        "one call, 1,1,10,32 fwd",
        _worst(True, _microseconds),
        10.0,
        lambda r: r.case.group == "overhead" and r.name == F,
        at_most=True,
        unit="us",
    ),
    Bound("start of the command", _startup, 150.0, _no_row, at_most=True, unit="ms"),
)


@dataclass(frozen=True)
class Verdict:
    """A bound and what was found; ``holds`` is None where no row of it was measured."""

    bound: Bound
    value: float
    source: str

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept."""
        if math.isnan(self.value):
            return None
        return self.value <= self.bound.limit if self.bound.at_most else self.value >= self.bound.limit

    @property
    def sentence(self) -> str:
        """The bound, what was found, and where."""
        sense, unit = ("at most" if self.bound.at_most else "at least"), f" {self.bound.unit}".rstrip()
        where = f" ({self.source})" if self.source else ""
        return f"{self.bound.text}: {sense} {self.bound.limit:g}{unit}; found {self.value:.3g}{unit}{where}"

    def to_json(self) -> dict[str, Any]:
        """As a line of the JSON."""
        return {
            "bound": self.bound.text,
            "limit": self.bound.limit,
            "at_most": self.bound.at_most,
            "value": self.value,
            "source": self.source,
            "holds": self.holds,
        }


def judge(results: Results) -> list[Verdict]:
    """Every bound, against the rows that were timed on a quiet machine."""
    rows = results.judged
    return [Verdict(bound, *bound.statistic(results, [row for row in rows if bound.where(row)])) for bound in BOUNDS]
