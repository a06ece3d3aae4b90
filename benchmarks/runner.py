"""The run: for each case, verify every contender, then time them in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from typing import TypeVar

import attngrad
from attngrad.backends.cpu.threads import choose_isa
from benchmarks import grid, machine, memory, startup, verify
from benchmarks.cases import TANGENTS, Case
from benchmarks.passes import PASSES
from benchmarks.peers import HOUSE, NAMES, OURS, Ours, OursInAnotherPass, OursInFloat32, Peer, Prepared, load
from benchmarks.probe import survey
from benchmarks.quiet import Patience, Watch
from benchmarks.results import Results, Row
from benchmarks.startup import Startup
from benchmarks.timing import Budget, Call, Probe, bandwidth, interleave

Tell = Callable[[str, int], None]
"""Takes what is being done, and how many steps are behind it since the last time."""

BUDGETS = (Budget(0.08, 5), Budget(0.3, 7), Budget(1.0, 9))
"""By level, for attngrad and torch; the others get about a third of it."""

PATIENCE = (10.0, 120.0, 300.0)
"""By level, the seconds that a run waits, in all, for other processes to leave the machine alone."""

ATTEMPTS = 3

PROBE = "fma"
"""The contender that a share of the peak is taken of."""


@dataclass(frozen=True)
class Settings:
    """What the options of the command ask for."""

    level: int
    threads: int
    peers: tuple[str, ...] = NAMES
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def cases(self) -> list[tuple[Case, list[str]]]:
        """The cases of the run, each with its passes."""
        pairs = grid.select(self.level, self.only, self.dtypes)
        return [(case, [name for _, name in of_case]) for case, of_case in groupby(pairs, key=lambda pair: pair[0])]

    def usages(self) -> list[tuple[str, str, int]]:
        """The (peer, work, length) of the memory section; none where the patterns or dtypes leave it out."""
        if self.dtypes and "float32" not in self.dtypes:
            return []
        return [
            (peer, work, n)
            for work, sizes in memory.SIZES.items()
            if not self.only or any(grid.matches(f"memory {work}", pattern) for pattern in self.only)
            for n in (sizes if self.level else memory.QUICK_SIZES)
            for peer in (OURS, *(peer for peer in self.peers if peer == "torch"))
            if peer == OURS or n <= memory.MOST_OF_PEERS.get(work, n)
        ]

    def startup(self) -> bool:
        """Whether the start of the command is timed."""
        return not self.dtypes and (not self.only or any(grid.matches(startup.NAME, one) for one in self.only))

    def budget(self, contender: str) -> Budget:
        """attngrad and torch have the whole of it."""
        whole = BUDGETS[self.level]
        return whole if contender in (*HOUSE, "torch") else Budget(whole.seconds / 3, whole.least // 3 + 1)


Timed = TypeVar("Timed", Row, Startup)


def time_quietly(row: Timed, calls: Mapping[str, Call], budget: Callable[[str], Budget], patience: Patience) -> Timed:
    """``row`` with its timings; while it is disturbed and patience lasts, timed again, and the quietest kept."""
    best = row
    for attempt in range(ATTEMPTS):
        watch = Watch.begin()
        times = interleave(calls, {name: budget(name) for name in calls})
        found = replace(row, times=times, others=watch.others())
        if attempt == 0 or found.others < best.others or (best.disturbed and not found.disturbed):
            best = found
        if not found.disturbed or not patience.wait():
            break
    return best


def run_case(
    case: Case,
    names: Sequence[str],
    peers: Sequence[Peer],
    budget: Callable[[str], Budget],
    patience: Patience,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """The rows of a case, each verified, then timed; ``tell`` is told which, and what is done to it.

    A peer that fails the verification is left out of the row, and a note says why. Where attngrad fails, the row does.
    """
    x = case.inputs([name for name in TANGENTS if any(name in PASSES[one].tangents for one in names)])
    sample = verify.choose(case)
    shown = verify.restrict(x, sample, case.n.group)
    expected = verify.expect(case, shown, sample, names)
    for name in names:
        title = f"{case.group}: {case.label} {name}"
        tell(f"{title}: verifying")
        contenders = [Ours(), *peers, *_held_against(case, name)]
        notes = {peer.name: reason for peer in contenders if (reason := peer.refuses(case, name))}
        fit = [peer for peer in contenders if peer.name not in notes]
        errors: dict[str, float] = {}
        prepared: dict[str, Prepared] = {}
        failure = None
        for peer in fit:
            ready = peer.prepare(case, name, shown)
            try:
                errors[peer.name] = verified(peer, ready, name, expected[name], case.dtype)
            except verify.VerificationError as error:
                if peer.name in HOUSE:
                    failure = f"{peer.name}, {case.label} {name}: {error}"
                    break
                notes[peer.name] = str(error)
                continue
            prepared[peer.name] = ready if sample.whole else peer.prepare(case, name, x)
        row = Row(case, name, errors=errors, notes=notes, failure=failure)
        if failure:
            yield row
            continue
        calls: dict[str, Call] = {contender: ready.call for contender, ready in prepared.items()}
        probe = Probe(row.precision == "float64")
        if not row.by_bytes:
            calls[PROBE] = probe.measure
        tell(f"{title}: timing {', '.join(contender for contender in calls if contender != PROBE)}")
        timed = time_quietly(row, calls, budget, patience)
        yield replace(timed, peak=probe.rate(timed.times.pop(PROBE)) if PROBE in timed.times else 0.0)


def _held_against(case: Case, name: str) -> list[Peer]:
    """What attngrad is held against of its own: another pass, or float32 in the 16-bit dtypes."""
    if PASSES[name].own is not None:
        return [OursInAnotherPass()]
    return [OursInFloat32()] if case.dtype in ("bfloat16", "float16") else []


def verified(peer: Peer, ready: Prepared, name: str, expected: verify.Expected, dtype: str) -> float:
    """The error of a call; its arrays are gone when this returns."""
    run = peer.runs(name)
    arrays = ready.arrays(ready.call())
    return verify.check(arrays, expected, run.outputs, dtype, approximate=run.method in peer.approximate)


def find_peers(settings: Settings) -> tuple[list[Peer], list[str]]:
    """The peers that are installed, and remarks on those that are not or that do not survive a dtype."""
    installed = [name for name in settings.peers if name != "numpy" and find_spec(name) is not None]
    environment, deadly, remarks = survey(installed, list(dict.fromkeys(case.dtype for case, _ in settings.cases())))
    os.environ.update(environment)
    peers = []
    for name in settings.peers:
        try:
            peer = load(name, settings.threads)
        except ImportError as error:
            remarks.append(str(error))
        else:
            peer.deadly |= {dtype: reason for (of, dtype), reason in deadly.items() if of == name}
            peers.append(peer)
    return peers, remarks


def run(settings: Settings, tell: Tell) -> Results:
    """Everything that the settings ask for; an interrupt ends the run early and keeps what was found."""
    choose_isa()
    attngrad.set_num_threads(settings.threads)
    tell(f"importing {', '.join(settings.peers)}", 0)
    peers, remarks = find_peers(settings)
    results = Results(
        machine.describe(settings.threads),
        {"python": machine.python_version(), OURS: attngrad.__version__, **{peer.name: peer.version for peer in peers}},
        machine.commit(),
        machine.now(),
        grid.LEVELS[settings.level],
        remarks=remarks,
    )
    try:
        _measure(settings, peers, results, tell)
    except KeyboardInterrupt:
        results.remarks.append("bench: interrupted; this is what was measured until then.")
    return results


def _measure(settings: Settings, peers: list[Peer], results: Results, tell: Tell) -> None:
    patience = Patience(PATIENCE[settings.level], lambda text: tell(text, 0))
    tell("measuring the bandwidth of the memory", 0)
    patience.wait()
    results.bandwidth = bandwidth()
    for case, names in settings.cases():
        tell(f"{case.group}: {case.label}: making inputs and their reference", 0)
        for row in run_case(case, names, peers, settings.budget, patience, lambda text: tell(text, 0)):
            results.rows.append(row)
            tell(_line(row), 1)
    if settings.startup():
        tell(f"{startup.NAME}: timing", 0)
        results.startup = time_quietly(Startup(), startup.calls(), lambda _: BUDGETS[-1], patience)
        tell(results.startup.sentence, 1)
    for name, work, n in settings.usages():
        if name not in (OURS, *(peer.name for peer in peers)):
            continue
        tell(f"memory: {name}, {work}, n = {n}: measuring in a process of its own", 0)
        try:
            usage = memory.measure(name, n, settings.threads, work)
        except RuntimeError as error:
            if name == OURS:
                raise
            results.remarks.append(str(error))  # a peer that runs out of memory, say
            continue
        results.memory.append(usage)
        tell(f"memory: {name}, {work}, n = {n}: {usage.multiple:.1f} x the size of q", 1)
    tell("measuring the bandwidth of the memory again", 0)
    patience.wait()
    results.bandwidth = max(results.bandwidth, bandwidth())


def _line(row: Row) -> str:
    """A row in one line, for the log."""
    if row.failure is not None:
        return f"FAILED {row.failure}"
    others = "".join(f", {name} x{row.ratio(name):.2f}" for name in row.times if name != OURS)
    disturbed = f" (disturbed; others used {row.others:.1f} cores)" if row.disturbed else ""
    return f"{row.case.group}: {row.label} {row.times[OURS].median * 1e3:.4g} ms{others}{disturbed}"


def steps(settings: Settings) -> int:
    """How many steps the progress of a run has, where torch is installed."""
    return sum(len(names) for _, names in settings.cases()) + len(settings.usages()) + settings.startup()
