"""What a run found: rows, memory, the machine; to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from benchmarks.cases import Case, Dims
from benchmarks.memory import D, Usage
from benchmarks.passes import PASSES
from benchmarks.peers import HOUSE, OURS, OWN_BASE
from benchmarks.quiet import DISTURBED, UNSTEADY
from benchmarks.startup import Startup
from benchmarks.timing import Timing

SCHEMA = 2


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios; NaN of nothing.

    >>> round(geometric_mean([1.0, 4.0]), 12)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


@dataclass(frozen=True)
class Row:
    """One case in one pass: times, verified errors, and notes, why a contender was left out; or why the row failed.

    A row fails where attngrad itself computes something else than the reference; a peer that does is left out.
    ``peak``: the FMA rate measured in turns with the contenders, in FLOP/s; 0 where memory bounds the row.
    ``others``: how many cores other processes used while it was timed; NaN where the system does not say.
    """

    case: Case
    name: str
    times: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    peak: float = 0.0
    others: float = 0.0

    @property
    def label(self) -> str:
        """Case and pass."""
        return f"{self.case.label} {PASSES[self.name].short}"

    @property
    def mark(self) -> str:
        """A tilde where other processes disturbed the row."""
        return "~" if self.disturbed else ""

    @property
    def precision(self) -> str:
        """What the kernels compute in."""
        return "float64" if self.case.dtype == "float64" else "float32"

    @property
    def flops(self) -> float:
        """Of the pass."""
        return self.case.flops() * PASSES[self.name].cost

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much, or the times vary so much, that they say little."""
        spreads = (self.times[name].spread for name in (OURS, OWN_BASE, "torch") if name in self.times)
        return self.others > DISTURBED or any(spread > UNSTEADY for spread in spreads)

    @property
    def by_bytes(self) -> bool:
        """Whether memory bounds this row, so that its rate is counted in bytes."""
        return self.case.group == "decoding"

    @property
    def rate(self) -> float:
        """Of attngrad: FLOP/s, or bytes/s where memory bounds the row; NaN where it was not timed."""
        if OURS not in self.times:
            return math.nan
        return (self.case.bytes() if self.by_bytes else self.flops) / self.times[OURS].median

    def ratio(self, peer: str) -> float:
        """The peer's median over ours: above 1, attngrad is faster; NaN where either was not timed."""
        if peer not in self.times or OURS not in self.times:
            return math.nan
        return self.times[peer].median / self.times[OURS].median

    def to_json(self) -> dict[str, Any]:
        """What was measured, and what is counted from it."""
        case = self.case
        return {
            "group": case.group,
            "label": case.label,
            "shape": case.n._asdict(),
            "kind": case.kind,
            "dtype": case.dtype,
            "pass": self.name,
            "pairs": case.pairs(),
            "flops": self.flops,
            "bytes": case.bytes(),
            "times": {name: asdict(timing) for name, timing in self.times.items()},
            "ratios": {name: self.ratio(name) for name in self.times if name != OURS and OURS in self.times},
            "errors": self.errors,
            "notes": self.notes,
            "failure": self.failure,
            "peak": self.peak,
            "others": self.others,
            "disturbed": self.disturbed,
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Row:
        """The row that ``to_json`` wrote."""
        n = Dims(**found["shape"])
        case = Case(found["group"], n, found["kind"], found["dtype"], (found["pass"],))
        times = {name: Timing(**timing) for name, timing in found["times"].items()}
        others = math.nan if found["others"] is None else found["others"]
        return Row(case, found["pass"], times, found["errors"], found["notes"], found["failure"], found["peak"], others)


@dataclass
class Results:
    """A run. ``bandwidth`` is that of reading memory, in bytes/s, as measured in the same run."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    date: str
    level: str
    bandwidth: float = 0.0
    rows: list[Row] = field(default_factory=list)
    memory: list[Usage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    startup: Startup | None = None

    @property
    def peak(self) -> dict[str, float]:
        """The highest FMA rate beside any row, by precision, in FLOP/s."""
        rows = sorted((row for row in self.rows if row.peak), key=lambda row: row.peak)
        return {row.precision: row.peak for row in rows}

    @property
    def timed(self) -> list[Row]:
        """The rows that passed the verification."""
        return [row for row in self.rows if row.failure is None]

    @property
    def judged(self) -> list[Row]:
        """The rows that means and bounds are taken from: timed, and not disturbed by other processes."""
        return [row for row in self.timed if not row.disturbed]

    @property
    def disturbed(self) -> list[Row]:
        """The rows that are not judged."""
        return [row for row in self.timed if row.disturbed]

    @property
    def unjudged(self) -> bool:
        """Whether something was measured that says too little to be judged."""
        return bool(self.disturbed) or (self.startup is not None and self.startup.disturbed)

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """The rows by group, in the order in which they ran."""
        for group in dict.fromkeys(row.case.group for row in self.rows):
            yield group, [row for row in self.rows if row.case.group == group]

    def fraction(self, row: Row) -> float:
        """The rate over what the machine can do: the FMA rate beside it, or bandwidth where memory bounds the row."""
        limit = self.bandwidth if row.by_bytes else row.peak
        return row.rate / limit if limit else math.nan

    def losses(self) -> list[tuple[Row, str]]:
        """Rows, and the peers that were faster there."""
        return [(row, peer) for row in self.timed for peer in row.times if peer not in HOUSE and row.ratio(peer) < 1.0]

    def means(self) -> dict[str, dict[str, float]]:
        """Geometric means of the ratios, by "dtype pass" and peer; rows where the peers differentiate a bias apart."""
        found: dict[str, dict[str, list[float]]] = {}
        for row in self.judged:
            key = f"{row.case.dtype} {row.name}" + (", with dbias" if row.case.options.dbias else "")
            for peer in row.times:
                if peer not in HOUSE:
                    found.setdefault(key, {}).setdefault(peer, []).append(row.ratio(peer))
        return {key: {peer: geometric_mean(ratios) for peer, ratios in by.items()} for key, by in found.items()}

    def left_out(self) -> dict[tuple[str, str], list[Row]]:
        """By peer and reason, the rows that it was left out of."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            for note in row.notes.items():
                found.setdefault(note, []).append(row)
        return found

    def usage(self) -> dict[str, dict[str, list[Usage]]]:
        """The memory by work and peer."""
        found: dict[str, dict[str, list[Usage]]] = {}
        for u in self.memory:
            found.setdefault(u.work, {}).setdefault(u.peer, []).append(u)
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, with NaN as None."""
        from benchmarks.bounds import judge

        fractions = [self.fraction(row) for row in self.rows]
        rows = [row.to_json() | {"rate": row.rate, "fraction": f} for row, f in zip(self.rows, fractions, strict=True)]
        found = {
            "schema": SCHEMA,
            "machine": self.machine,
            "versions": self.versions,
            "commit": self.commit,
            "date": self.date,
            "level": self.level,
            "peak": self.peak,
            "bandwidth": self.bandwidth,
            "rows": rows,
            "memory": [asdict(u) | {"multiple_of_q": u.multiple} for u in self.memory],
            "memory_case": {"batch": 1, "heads": 1, "d": D, "dtype": "float32"},
            "startup": None if self.startup is None else asdict(self.startup),
            "geometric_means": self.means(),
            "bounds": [verdict.to_json() for verdict in judge(self)],
            "remarks": self.remarks,
        }
        cleaned: dict[str, Any] = _without_nan(found)
        return cleaned

    @staticmethod
    def from_json(found: dict[str, Any]) -> Results:
        """The results that ``to_json`` wrote."""
        if found.get("schema") != SCHEMA:
            raise ValueError(
                f"bench: the results must have schema {SCHEMA}; got {found.get('schema')!r}. Run it again."
            )
        plain = {key: found[key] for key in ("machine", "versions", "commit", "date", "level", "bandwidth")}
        rows = [Row.from_json(row) for row in found["rows"]]
        memory = [Usage(**{f.name: u[f.name] for f in fields(Usage) if f.name in u}) for u in found["memory"]]
        startup = None
        if started := found.get("startup"):
            others = math.nan if started["others"] is None else started["others"]
            startup = Startup({name: Timing(**timing) for name, timing in started["times"].items()}, others)
        return Results(**plain, rows=rows, memory=memory, remarks=found["remarks"], startup=startup)


def _without_nan(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_nan(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_without_nan(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
