"""The working tree against another revision: does a change cost speed?

    python -m benchmarks.against REV [--rows TEXT ...] [--rounds N] [--seconds S] [--json FILE]

REV is exported, built and installed in an environment of its own, build/against/<commit>; the working tree is what the
environment of this script runs. Three processes take turns, row by row: the working tree, REV, and the working tree
once more. The third one says how far two runs of the same code lie apart: the noise floor. Each row is verified first:
all three have to give the same results. benchmarks/README.md says how to read the table.

Exit status 0: nothing is slower. 1: a float32 row is slower than the noise explains, or the mean of all is, or results
differ. 2: it could not be measured. 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks import against_worker
from benchmarks.against_worker import ROWS, MeasurementError, Process, Row, difference
from benchmarks.grid import matches
from benchmarks.machine import ROOT, cpu_model

TREE, REVISION, AGAIN = "tree", "revision", "again"
WHO = {TREE: "the working tree", REVISION: "the revision", AGAIN: "the working tree, once more,"}
ORDERS = tuple(
    tuple({"A": TREE, "B": REVISION, "C": AGAIN}[letter] for letter in order)
    for order in ("ABC", "BCA", "CAB", "ACB", "CBA", "BAC")
)
"""The order of each round: everybody follows everybody equally often, and nobody follows itself."""

LEAST_FLOOR, HIGH_FLOOR = 0.01, 0.05
"""The noise floor at least, and one beyond which the summary says that little can be seen."""

LONGEST_ROW = 9.0
"""Seconds beyond which a row gets fewer rounds, but one of each order always."""

LAPS = 3
"""How often all rows are run, each time in new processes and with a share of the rounds. Where a process happens to
have its memory costs it some percent for as long as it lives; and others may use the machine for a minute."""


def select_rows(patterns: Sequence[str]) -> list[Row]:
    """The rows whose label one of the patterns matches; all where there is none."""
    found = [row for row in ROWS if not patterns or any(matches(row.label, pattern) for pattern in patterns)]
    if not found:
        raise MeasurementError(
            f"--rows must match the label of a row, such as {ROWS[0].label!r}; got {', '.join(patterns)}"
        )
    return found


# --- judging --------------------------------------------------------------------------------------------------------


def floor_of(ratios: Iterable[float]) -> float:
    """How much slower a row may look by chance: what the ratios of the tree to itself show, but at least 1 %.

    >>> floor_of([1.001, 0.999]), floor_of([1.0, 2.0, 0.9])
    (0.01, 0.5)
    """
    return max([LEAST_FLOOR, *(1.0 - min(ratio, 1.0 / ratio) for ratio in ratios)])


@dataclass(frozen=True)
class Result:
    """What came of a row: the seconds per call of each process, one per round; or a remark why there are none."""

    row: Row
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remark: str = ""
    wrong: bool = False

    def then(self, later: Result) -> Result:
        """This one and the rounds of a later lap; a remark ends it."""
        if later.remark or not self.times:
            return later
        return replace(self, times={name: [*times, *later.times[name]] for name, times in self.times.items()})

    def _over_tree(self, who: str) -> float:
        """The median over the rounds of a process's time over the tree's: slow minutes slow both."""
        return statistics.median(x / y for x, y in zip(self.times[who], self.times[TREE], strict=True))

    @property
    def ratio(self) -> float:
        """Of the revision to the tree: above 1, the tree is faster."""
        return self._over_tree(REVISION)

    @property
    def own(self) -> float:
        """Of the tree to itself: noise."""
        return self._over_tree(AGAIN)


@dataclass(frozen=True)
class Verdict:
    """On the rows of one group: how many, their geometric means, the noise floors, and which rows are slower."""

    rows: int
    mean: float
    own_mean: float
    floor: float
    slower: tuple[Result, ...]

    @property
    def slower_mean(self) -> bool:
        """Whether the mean is slower than its noise explains: below 0.99, or what the tree to itself shows."""
        return self.mean < 1.0 - floor_of([self.own_mean])


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Those that were timed, float32 apart from the others."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.times:
            groups.setdefault(result.row.group, []).append(result)
    return groups


def suspects(results: Iterable[Result]) -> list[Row]:
    """The rows that look slower, and are to be timed again before they are called so."""
    found = []
    for timed in by_group(results).values():
        floor = floor_of(x.own for x in timed)
        found += [x.row for x in timed if x.ratio < 1.0 - floor]
    return found


def judge(first: Sequence[Result], second: Sequence[Result] = ()) -> dict[str, Verdict]:
    """The verdict on each group. ``second``: suspects, timed again; only they can be slower.

    The second time counts in place of the first, and the noise of both widens the floor.
    """
    again = {x.row: x for x in second if x.times}
    verdicts = {}
    for name, timed in by_group(first).items():
        last = [again.get(x.row, x) for x in timed]
        floor = floor_of(x.own for x in (*timed, *last))
        slower = tuple(x for x in last if x.row in again and x.ratio < 1.0 - floor)
        mean, own = (statistics.geometric_mean(x) for x in ([x.ratio for x in last], [x.own for x in last]))
        verdicts[name] = Verdict(len(last), mean, own, floor, slower)
    return verdicts


def failed(results: Iterable[Result], verdicts: Mapping[str, Verdict]) -> bool:
    """Whether the exit status is 1: wrong results, slower float32 rows, a slower mean, or nothing to judge."""
    slower = any(v.slower_mean or (v.slower and name == "float32") for name, v in verdicts.items())
    return slower or not verdicts or any(x.wrong for x in results)


# --- processes ------------------------------------------------------------------------------------------------------


class Asked(Protocol):
    """What answers questions: a process, or in the tests something that pretends to be one."""

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """The answer to a question of ``against_worker``."""


Trio = Mapping[str, Asked]


@contextlib.contextmanager
def processes(tree: str, revision: str) -> Iterator[dict[str, Process]]:
    """The three workers, of the two interpreters; killed at the end, whatever happens."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, python in ((TREE, tree), (REVISION, revision), (AGAIN, tree)):
            try:
                found[name] = Process(WHO[name], [python, "-P", "-s", against_worker.__file__])
            except OSError as error:
                raise MeasurementError(f"{python} does not start: {error}") from None
            stack.callback(found[name].close)
        yield found


def introduce(trio: Trio, same: bool) -> dict[str, dict[str, Any]]:
    """Who they are, with the tree's number of threads. Both sides running one attngrad is a mistake, unless meant."""
    about = {TREE: trio[TREE].ask("start")}
    threads = about[TREE]["threads"]
    about |= {name: trio[name].ask("start", threads=threads) for name in (REVISION, AGAIN)}
    if not same and about[TREE]["file"] == about[REVISION]["file"]:
        raise MeasurementError(f"the two environments must have an attngrad each; both import {about[TREE]['file']}")
    return about


def rounds_of(call: float, rounds: int, seconds: float) -> int:
    """How many rounds of a call that takes so long: ``rounds``, but fewer of slow calls, and whole sets of orders.

    >>> rounds_of(1e-5, 18, 0.04), rounds_of(0.2, 18, 0.04), rounds_of(2.0, 18, 0.04), rounds_of(2.0, 1, 0.04)
    (18, 12, 6, 1)
    """
    fit = int(LONGEST_ROW / (3 * max(call, seconds)))
    return rounds if rounds <= fit else min(rounds, max(len(ORDERS), fit - fit % len(ORDERS)))


def measure(trio: Trio, row: Row, rounds: int, seconds: float, lap: int = 0, laps: int = 1) -> Result:
    """Verify, then time in turns: this lap's share of the rounds."""
    ready = {name: worker.ask("row", row=asdict(row)) for name, worker in trio.items()}
    for name in (TREE, AGAIN):
        if "error" in ready[name]:
            return Result(row, remark=f"fails: the working tree raises {ready[name]['error']}", wrong=True)
    if "error" in ready[REVISION]:
        return Result(row, remark=f"not compared: the revision raises {ready[REVISION]['error']}")
    for name in (REVISION, AGAIN):
        found = difference(ready[name]["sums"], ready[TREE]["sums"], row.dtype)
        if found is not None:
            return Result(row, remark=f"differs: {WHO[name]} {found}", wrong=True)
    rounds = rounds_of(max(x["seconds"] for x in ready.values()), rounds, seconds)
    times: dict[str, list[float]] = {name: [] for name in trio}
    for turn in range(rounds * lap // laps, rounds * (lap + 1) // laps):
        for name in ORDERS[turn % len(ORDERS)]:
            times[name].append(trio[name].ask("turn", seconds=seconds)["seconds"])
    return Result(row, times)


Start = Callable[[], contextlib.AbstractContextManager[Trio]]
"""What starts the three processes."""


def run(start: Start, rows: Sequence[Row], rounds: int, seconds: float) -> list[Result]:
    """Verify and time every row, in LAPS laps; each is shown as soon as it is finished, in the last one."""
    results = {row: Result(row) for row in rows}
    for lap in range(LAPS):
        begin = time.monotonic()
        with start() as trio:
            introduce(trio, same=True)  # which sets their number of threads
            for row in rows:
                if not results[row].remark:
                    results[row] = results[row].then(measure(trio, row, rounds, seconds, lap, LAPS))
                    if lap == LAPS - 1 or results[row].remark:
                        print(line_of(results[row]), flush=True)
        if lap < LAPS - 1:
            print(f"lap {lap + 1} of {LAPS}: {len(rows)} rows, {time.monotonic() - begin:.0f} s", flush=True)
    return list(results.values())


# --- the revision ---------------------------------------------------------------------------------------------------


def git(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    """What git says of this checkout."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=False)  # noqa: S603 the user's own revision
    except OSError as error:
        raise MeasurementError(f"git does not start: {error}") from None


def commit_of(revision: str, root: Path = ROOT) -> str:
    """The commit that a revision names."""
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", root=root)
    if found.returncode:
        raise MeasurementError(
            f"REV must name a commit of this repository, such as HEAD~1, a tag or a hash; got {revision!r}"
        )
    return found.stdout.decode().strip()


def run_quietly(command: Sequence[str], **settings: Any) -> None:
    """Run, and show what it says only where it fails."""
    result = subprocess.run(  # noqa: S603 our own commands
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **settings
    )
    if result.returncode:
        sys.stderr.write(result.stdout.decode(errors="replace"))
        raise MeasurementError(f"{' '.join(command)} failed with status {result.returncode}")


def build(commit: str, root: Path = ROOT) -> str:
    """The interpreter of an environment in which that commit is installed; built unless it is there already.

    NumPy and ml_dtypes are those of this environment: a small call spends much of its time in NumPy.
    """
    folder = root / "build" / "against" / commit[:12]
    python, stamp, pins = folder / "venv" / "bin" / "python", folder / "complete", folder / "constraints.txt"
    versions = [f"{name}=={importlib.metadata.version(name)}" for name in ("numpy", "ml_dtypes")]
    wanted = "\n".join([commit, f"python {platform.python_version()}", *versions])
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return str(python)
    print(f"Building {commit[:12]} in build/against/{commit[:12]}, some minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    pins.write_text("\n".join(versions) + "\n")
    archive = git("archive", "--format=tar", commit, root=root)
    if archive.returncode:
        raise MeasurementError(f"git archive failed: {archive.stderr.decode(errors='replace').strip()}")
    run_quietly(["tar", "-x", "-C", str(folder / "source")], input=archive.stdout)
    run_quietly([sys.executable, "-m", "venv", str(folder / "venv")])
    run_quietly([str(python), "-I", "-m", "pip", "install", "--constraint", str(pins), str(folder / "source")])
    stamp.write_text(wanted)
    return str(python)


def check_tree(about: Mapping[str, Any]) -> str | None:
    """The environment of this script has to run this working tree; a remark where it is not compiled as it is now."""
    if not Path(about["file"]).is_relative_to(ROOT / "src"):
        raise MeasurementError(f"{sys.executable} must import attngrad from src/; got {about['file']}. Run it by make.")
    built = Path(about["native"]).stat().st_mtime
    newer = [path for path in sorted((ROOT / "csrc").rglob("*.?pp")) if path.stat().st_mtime > built]
    return f"{newer[0].name} is newer than the compiled module: make .venv/.installed" if newer else None


# --- the report -----------------------------------------------------------------------------------------------------

WIDTH = 42


def readable(seconds: float) -> str:
    """Three digits and a unit.

    >>> readable(1.234e-5), readable(0.123), readable(2.0)
    ('12.3 us', '123 ms', '2 s')
    """
    unit, factor = ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1.0 else ("s", 1.0)
    return f"{seconds * factor:.3g} {unit}"


def line_of(result: Result) -> str:
    """The row as the table shows it."""
    if not result.times:
        return f"{result.row.label:{WIDTH}}{result.remark}"
    tree, revision = (readable(statistics.median(result.times[name])) for name in (TREE, REVISION))
    rounds = len(result.times[TREE])
    return f"{result.row.label:{WIDTH}}{tree:>10}{revision:>10}{result.ratio:>8.3f}{result.own:>8.3f}{rounds:>8}"


def header(about: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """Where and with what it is measured."""
    lines = [f"{cpu_model()}, threads: {about[TREE]['threads']}"]
    for name in (TREE, REVISION):
        x = about[name]
        lines.append(
            f"{name + ':':10}{names[name]}, attngrad {x['version']}, {x['isa'] or 'unknown instruction set'}, "
            f"compiler {x['compiler'] or 'unknown'}, Python {x['python']}, NumPy {x['numpy']}"
        )
    lines += ["", f"{'row':{WIDTH}}{'tree':>10}{'revision':>10}{'ratio':>8}{'self':>8}{'rounds':>8}"]
    return lines


def summary(results: Sequence[Result], verdicts: Mapping[str, Verdict]) -> list[str]:
    """The verdict in words."""
    lines = [""]
    for name, v in verdicts.items():
        lines.append(
            f"{name}: {v.rows} rows, geometric mean {v.mean:.3f} (self {v.own_mean:.3f}), "
            f"noise floor {100 * v.floor:.1f} %" + (". The mean is slower." if v.slower_mean else "")
        )
    for name, v in verdicts.items():
        lines += [f"slower, {name}: {x.row.label}, ratio {x.ratio:.3f} (self {x.own:.3f})" for x in v.slower]
    lines += [f"{x.row.label} {x.remark}" for x in results if x.wrong]
    lines += [
        f"{name}: the noise hides losses below {100 * v.floor:.0f} % per row; run it again when the machine is at rest."
        for name, v in verdicts.items()
        if v.floor > HIGH_FLOOR
    ]
    if not verdicts:
        lines.append("No row was timed.")
    elif not any(v.slower for v in verdicts.values()):
        lines.append("No row is slower.")
    return lines


def interpreter(path: str) -> str:
    """Its absolute path, for workers start in another folder; links are kept, since they are what an environment is."""
    return str(Path(shutil.which(path) or path).absolute())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV", help="what to compare with: any name that git has for a commit")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="rows whose label has this; * and ? too")
    parser.add_argument("--rounds", type=int, default=18, metavar="N", help="turns of each process, at most (18)")
    parser.add_argument("--seconds", type=float, default=0.04, metavar="S", help="length of a turn (0.04)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times and the verdict there")
    parser.add_argument(
        "--python-a", type=interpreter, metavar="PYTHON", help="the working tree's interpreter, if not this one"
    )
    parser.add_argument(
        "--python-b", type=interpreter, metavar="PYTHON", help="the revision's interpreter: nothing is built"
    )
    found = parser.parse_args(arguments)
    if found.rounds < 1 or not found.seconds > 0.0:
        parser.error("--rounds must be at least 1 and --seconds more than 0")
    return found


def compare(given: argparse.Namespace) -> int:
    """Build, measure, judge, report; the exit status."""
    rows, commit = select_rows(given.rows), commit_of(given.revision)
    tree, changes = commit_of("HEAD"), git("status", "--porcelain").stdout.strip()
    names = {TREE: tree[:12] + (" with uncommitted changes" if changes else ""), REVISION: commit[:12]}
    if given.python_b:
        names[REVISION] += f", said to be that of {given.python_b}"
    tree_python = given.python_a or sys.executable
    revision_python = given.python_b or build(commit)

    def start() -> contextlib.AbstractContextManager[Trio]:
        return processes(tree_python, revision_python)

    begin = time.monotonic()
    with start() as trio:
        about = introduce(trio, same=tree_python == revision_python)
    if not given.python_a and (remark := check_tree(about[TREE])):
        print(f"remark: {remark}")
    print("\n".join(header(about, names)), flush=True)
    first, second = run(start, rows, given.rounds, given.seconds), []
    if again := suspects(first):
        print(f"\n{len(again)} of {len(first)} rows look slower; once more, with twice the rounds:", flush=True)
        second = run(start, again, 2 * given.rounds, given.seconds)
    verdicts = judge(first, second)
    status = int(failed((*first, *second), verdicts))
    print("\n".join(summary((*first, *second), verdicts)))
    print(f"{time.monotonic() - begin:.0f} s; exit status {status}", flush=True)
    if given.json:
        report = {
            "cpu": cpu_model(),
            "commits": names,
            "processes": about,
            "unit": "seconds per call, the median of each round",
            "rows": [{"label": x.row.label, **asdict(x)} for x in first],
            "again": [{"label": x.row.label, **asdict(x)} for x in second],
            "verdicts": {
                name: {**asdict(v), "slower": [x.row.label for x in v.slower]} for name, v in verdicts.items()
            },
            "status": status,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where it cannot be measured, 130 where it is interrupted."""
    given = parse(arguments)
    try:
        return compare(given)
    except MeasurementError as error:
        print(f"against: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("against: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
