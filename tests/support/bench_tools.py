"""What the tests of the benchmark share. Nothing in them is timed."""

from dataclasses import replace

from benchmarks import grid, memory, passes, runner, verify
from benchmarks.cases import TANGENTS
from benchmarks.peers import OURS, OWN_BASE, OWN_FLOAT32, Ours
from benchmarks.results import Results, Row
from benchmarks.startup import BARE, HELP, Startup
from benchmarks.timing import Timing

F, FB = "forward", "forward + backward"
TINY = list(dict.fromkeys(replace(case.tiny(), level=1) for case in grid.CASES))


def ids(case):
    return f"{case.group} {case.label}"


def checked(peer, case, names=None):
    """The largest error of a peer over the passes of a case."""
    sample = verify.choose(case)
    names = names or [name for name in case.passes if peer.refuses(case, name) is None]
    x = verify.restrict(case.inputs(TANGENTS), sample, case.n.group)
    expected = verify.expect(case, x, sample, names)
    return max(
        (runner.verified(peer, peer.prepare(case, n, x), n, expected[n], case.dtype) for n in names), default=0.0
    )


def spoiled(change):
    """An Ours whose arrays go through ``change``."""

    class Spoiled(Ours):
        name = "spoiled"

        def prepare(self, case, name, x):
            ready = super().prepare(case, name, x)
            return ready._replace(arrays=lambda found: change(ready.arrays(found)))

    return Spoiled()


def timing_of(seconds, spread=0.02):
    return Timing(seconds, seconds * (1 - spread / 2), seconds * (1 + spread / 2), seconds * 0.9, 7, 1)


def started(seconds=0.06, **changes):
    """A start of the command."""
    return Startup({HELP: timing_of(seconds), BARE: timing_of(0.01)}, **changes)


def results_of(faster=5.0, **changes):
    """A whole default run in which attngrad reaches 90 % of the peak and every peer is ``faster`` times slower."""
    peak = {"float32": 200e9, "float64": 100e9}
    rows = []
    for case, name in grid.select(grid.DEFAULT):
        row = Row(case, name)
        limit = peak[row.precision]
        own = 5e-6 if case.group == "overhead" else case.bytes() / 18e9 if row.by_bytes else row.flops / (0.9 * limit)
        times = {OURS: timing_of(own), "torch": timing_of(own * faster), "jax": timing_of(own * 2 * faster)}
        base = passes.PASSES[name].own
        if base is not None:
            times[OWN_BASE] = timing_of(own * passes.PASSES[base].cost / passes.PASSES[name].cost)
        elif case.dtype in ("bfloat16", "float16"):
            times[OWN_FLOAT32] = timing_of(own)
        beside = 0.0 if row.by_bytes else limit
        rows.append(
            replace(row, times=times, peak=beside, errors=dict.fromkeys(times, 1e-7), notes={"numpy": "too large"})
        )
    usage = [
        memory.Usage(peer, n, 6 * n * 256, n * n * 1e-9, work=work)
        for peer, work, n in runner.Settings(grid.DEFAULT, 2).usages()
    ]
    machine = {
        "cpu": "Some(R) CPU with a long name @ 2.00GHz",
        "cores": 2,
        "isa": "avx2",
        "threads": 2,
        "system": "Linux",
    }
    versions = {"python": "3.11.7", OURS: "0.1.0", "torch": "2.13.0+cpu", "jax": "0.10.2"}
    fields = {"bandwidth": 20e9, "rows": rows, "memory": usage, "remarks": ["bench: a remark."]}
    fields |= {"startup": started()} | changes
    return Results(machine, versions, "0123456789ab", "2026-01-01T00:00:00+00:00", "default", **fields)


def spoil(results, **changes):
    results.rows[0] = replace(results.rows[0], **changes)
    return results
