"""The run of the benchmark, with a clock that stands still."""

import re
import subprocess
import sys

import pytest

import attngrad
from attngrad import reference
from bench_tools import FB, F, spoiled, timing_of
from benchmarks import memory, passes, peers, probe, quiet, runner, startup, timing
from benchmarks.cases import TANGENTS, Case, dims
from benchmarks.numpy_peer import NumPy
from benchmarks.peers import OURS, OWN_BASE, OWN_FLOAT32, Ours, Peer
from benchmarks.timing import Budget


def a_second_each(calls, budgets):
    for call in calls.values():
        call()
    return {name: timing_of(1.0) for name in calls}


@pytest.fixture
def still(monkeypatch):
    """Every contender takes a second, and the machine is quiet."""
    monkeypatch.setattr(runner, "interleave", a_second_each)
    monkeypatch.setattr(runner.Probe, "rounds", 1000)
    monkeypatch.setattr(runner.Watch, "others", lambda self: 0.0)


def run_rows(case, *others):
    return list(runner.run_case(case, case.passes, others, lambda name: Budget(0.0, 1), quiet.Patience(0.0)))


def test_every_contender_of_a_row_is_verified_and_timed(still):
    rows = run_rows(Case("bfloat16", dims(1, 2, 5, 3), dtype="bfloat16"), NumPy())
    assert [row.name for row in rows] == [F, FB]
    for row in rows:
        assert list(row.times) == [OURS, OWN_FLOAT32]
        assert row.notes == {"numpy": "computes bfloat16 in software"}
        assert row.errors[OURS] > row.errors[OWN_FLOAT32]


def test_the_peak_is_measured_beside_a_row_unless_memory_bounds_it(still, monkeypatch):
    def measure(self):
        self.operations = 3e9 if self.double else 7e9

    monkeypatch.setattr(runner.Probe, "measure", measure)
    for group, dtype, peak in [("sizes", "float32", 7e9), ("sizes", "float64", 3e9), ("decoding", "float32", 0.0)]:
        (row,) = run_rows(Case(group, dims(1, 2, 5, 3), dtype=dtype, passes=(F,)))
        assert row.peak == peak
        assert list(row.times) == [OURS]


def off_by_one(arrays):
    return {name: array + 1.0 for name, array in arrays.items()}


def test_a_peer_that_fails_the_verification_is_left_out_of_the_row(still):
    rows = run_rows(Case("sizes", dims(1, 2, 5, 3)), spoiled(off_by_one), NumPy())
    assert [row.name for row in rows] == [F, FB]
    for row in rows:
        assert row.failure is None
        assert list(row.times) == list(row.errors) == [OURS, "numpy"]
        assert re.fullmatch(r"out is off by .* of the largest entry; float32 .* Not timed\.", row.notes["spoiled"])


@pytest.mark.parametrize(
    ("contender", "name", "dtype"),
    [("Ours", F, "float32"), ("OursInFloat32", FB, "bfloat16"), ("OursInAnotherPass", "hvp", "float32")],
)
def test_a_row_in_which_attngrad_itself_fails_is_not_timed(contender, name, dtype, still, monkeypatch):
    before = getattr(runner, contender)

    class Wrong(before):
        def prepare(self, case, name, x):
            ready = super().prepare(case, name, x)
            return ready._replace(arrays=lambda found: off_by_one(ready.arrays(found)))

    monkeypatch.setattr(runner, contender, Wrong)
    (row,) = run_rows(Case("sizes", dims(1, 2, 5, 3), dtype=dtype, passes=(name,)), NumPy())
    label = Case("", dims(1, 2, 5, 3), dtype=dtype).label
    assert row.failure.startswith(f"{before.name}, {label} {name}: ")
    assert row.times == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_tangents_have_our_own_pass_without_them_beside(dtype, still):
    rows = run_rows(Case("jvp and hvp", dims(1, 2, 5, 3), dtype=dtype, passes=("jvp", "hvp", "hvp k_dot")), NumPy())
    numpy = ["numpy"] if dtype == "float32" else []
    assert [(row.name, list(row.times)) for row in rows] == [
        (name, [OURS, *numpy, OWN_BASE]) for name in ("jvp", "hvp", "hvp k_dot")
    ]


def test_tangents_take_memory_only_where_a_pass_needs_them(still, monkeypatch):
    asked, draw = [], Case.inputs

    def inputs(self, tangents=(), seed=0):
        asked.append(tuple(tangents))
        return draw(self, tangents, seed)

    monkeypatch.setattr(Case, "inputs", inputs)
    for names in ((F, FB), ("jvp",), ("jvp", "hvp"), ("jvp v_dot", "hvp k_dot")):
        run_rows(Case("", dims(1, 1, 4, 2), passes=names))
    assert asked == [(), TANGENTS[:3], TANGENTS, ("k_dot", "v_dot")]


def test_a_new_pass_is_one_entry_and_one_method_a_peer(still, monkeypatch):
    """JVP along v_dot = v, as an example."""

    def along_v(x):
        return {"out": reference.attention(x.q, x.k, x.v), "out_dot": reference.jvp(x[:3], (None, None, x.v))[1]}

    def ours(case, x):
        return peers.Prepared(lambda: attngrad.jvp(x[:3], (None, None, x.v)), lambda f: {"out": f[0], "out_dot": f[1]})

    monkeypatch.setitem(passes.PASSES, "along v", passes.Pass("along v", "v", 2.5, ("out", "out_dot"), along_v))
    before = Ours.__init__

    def extended(self):
        before(self)
        self.passes = {**self.passes, "along v": ours}

    monkeypatch.setattr(Ours, "__init__", extended)
    (row,) = run_rows(Case("new", dims(1, 2, 5, 3), passes=("along v",)), NumPy())
    assert row.failure is None
    assert row.errors[OURS] < 1e-5
    assert row.notes == {"numpy": "has no along v"}


def test_a_disturbed_row_is_timed_again_and_the_quietest_kept(monkeypatch):
    others = iter([1.5, 0.7, 0.0])
    monkeypatch.setattr(runner, "interleave", a_second_each)
    monkeypatch.setattr(runner.Watch, "others", lambda self: next(others))
    monkeypatch.setattr(runner.Patience, "wait", lambda self: True)
    (row,) = run_rows(Case("sizes", dims(1, 1, 4, 2), passes=(F,)))
    assert row.others == 0.0
    assert not row.disturbed


def test_waiting_for_a_quiet_machine_says_why_and_how_long(monkeypatch):
    busy, told = iter([1.5] * 50 + [0.0]), []
    monkeypatch.setattr(quiet.Watch, "others", lambda self: next(busy))
    monkeypatch.setattr(quiet.time, "sleep", lambda seconds: None)
    assert quiet.Patience(120.0, told.append).wait()
    assert told[0] == "waiting: other processes use 1.5 cores; at most 120 s more"
    assert told[1:] == ["waiting: other processes use 1.5 cores; at most 110 s more"]


def test_a_run_says_which_row_and_what_is_done_to_it(monkeypatch):
    monkeypatch.setattr(runner, "interleave", a_second_each)
    monkeypatch.setattr(runner.Watch, "others", lambda self: 0.0)
    monkeypatch.setattr(runner.Patience, "wait", lambda self: True)
    monkeypatch.setattr(runner, "bandwidth", lambda: 0.0)
    monkeypatch.setattr(runner, "find_peers", lambda settings: ([NumPy()], []))
    told = []
    settings = runner.Settings(0, 1, ("numpy",), ("overhead*",))
    runner.run(settings, lambda text, step: told.append((text, step)))
    assert sum(step for _, step in told) == runner.steps(settings) == 2
    row = "overhead: 1,1,10,32"
    assert [text for text, step in told if not step] == [
        "importing numpy",
        "measuring the bandwidth of the memory",
        f"{row}: making inputs and their reference",
        f"{row} forward: verifying",
        f"{row} forward: timing attngrad, numpy",
        f"{row} forward + backward: verifying",
        f"{row} forward + backward: timing attngrad, numpy",
        "measuring the bandwidth of the memory again",
    ]


def test_contenders_take_turns_and_slow_ones_fewer(monkeypatch):
    order = []
    seconds = {"a": 0.01, "b": 0.01, "c": 0.5}
    calls = {name: lambda name=name: order.append(name) for name in seconds}

    def timed(call, loops):
        call()
        return seconds[order[-1]]

    monkeypatch.setattr(timing, "_timed", timed)
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr(timing, "_estimate", lambda call: (call(), seconds[order.pop()])[1])
    budgets = {"a": Budget(0.08, 4), "b": Budget(0.08, 4), "c": Budget(0.02, 2)}
    found = timing.interleave(calls, budgets)
    assert {name: t.samples for name, t in found.items()} == {"a": 4, "b": 4, "c": 2}
    assert found["a"].loops == 2
    assert "".join(order) == "aabb" + "aabbc" + "aabb" + "aabbc"  # a and b run once more, to wake up


def test_the_quartiles_of_samples():
    t = timing.summarise([4.0, 1.0, 3.0, 2.0, 5.0], 3)
    assert (t.lower, t.median, t.upper, t.best, t.samples, t.loops) == (2.0, 3.0, 4.0, 1.0, 5, 3)
    assert t.spread == pytest.approx(2 / 3)


def test_a_peer_whose_memory_cannot_be_measured_is_a_remark_and_attngrad_an_error(monkeypatch):
    def measure(name, n, threads, work):
        if name == guilty:
            raise RuntimeError(f"bench: {name} at n = {n} was killed")
        return memory.Usage(name, n, 1, 1.0, work=work)

    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(runner.Patience, "wait", lambda self: True)
    monkeypatch.setattr(runner, "bandwidth", lambda: 0.0)
    monkeypatch.setattr(runner, "find_peers", lambda settings: ([peers.load("torch", 1)], []))
    settings = runner.Settings(0, attngrad.get_num_threads(), only=("memory hvp",))
    guilty = "torch"
    results = runner.run(settings, lambda text, step: None)
    assert [(u.peer, u.n, u.work) for u in results.memory] == [(OURS, n, "hvp") for n in memory.QUICK_SIZES]
    assert results.remarks == [f"bench: torch at n = {n} was killed" for n in memory.QUICK_SIZES]
    guilty = OURS
    with pytest.raises(RuntimeError, match="attngrad at n = 2048 was killed"):
        runner.run(settings, lambda text, step: None)


@pytest.mark.parametrize("work", list(memory.SIZES))
def test_the_memory_of_every_work_is_measured_in_a_process_of_its_own(work):
    usage = memory.measure(OURS, 512, 1, work)
    assert (usage.peer, usage.n, usage.work) == (OURS, 512, work)
    assert 0 <= usage.bytes < 512 * 512 * 4 * 100
    assert usage.seconds > 0


def test_the_start_is_that_of_the_command_and_is_timed_where_asked_for(monkeypatch):
    run, seen = subprocess.run, []

    def watched(command, **settings):
        seen.append((command[1:], run(command, capture_output=True, text=True, check=True).stdout))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", watched)
        for call in startup.calls().values():
            call()
    assert [command for command, _ in seen] == [["-m", "attngrad", "--help"], ["-c", "pass"]]
    assert seen[0][1].startswith("Usage: ")
    monkeypatch.setattr(runner, "interleave", lambda calls, budgets: {name: timing_of(0.06) for name in calls})
    monkeypatch.setattr(runner.Watch, "others", lambda self: 0.0)
    monkeypatch.setattr(runner, "bandwidth", lambda: 0.0)
    settings = runner.Settings(1, 1, (), only=("startup",))
    assert (settings.cases(), settings.usages(), runner.steps(settings)) == ([], [], 1)
    results = runner.run(settings, lambda text, step: None)
    assert results.startup.milliseconds == {"attngrad --help": 60.0, "python -c pass": 60.0}
    assert not runner.Settings(1, 1, only=("sizes",)).startup()
    assert not runner.Settings(1, 1, dtypes=("float64",)).startup()


def test_children_of_the_benchmark_are_not_others():
    if quiet._busy_seconds() is None:
        pytest.skip("the system does not count")
    before = quiet._own_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert quiet._own_seconds() > before + 0.05


def test_a_missing_peer_is_left_out_with_a_remark_that_names_the_extra(monkeypatch):
    real = peers.importlib.import_module

    def without_jax(name):
        if name == "jax":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(peers.importlib, "import_module", without_jax)
    found, remarks = runner.find_peers(runner.Settings(0, 1, ("jax", "numpy"), ("sizes 32",)))
    assert [peer.name for peer in found] == ["numpy"]
    assert remarks == ["bench: jax is not installed: make .venv/.group-bench."]


def test_a_peer_that_dies_in_a_dtype_runs_without_amx_or_not_at_all(monkeypatch):
    deaths = {("torch", "bfloat16", False): "SIGILL", ("jax", "float16", True): "SIGSEGV"}
    monkeypatch.setattr(probe, "death", lambda peer, dtype, env: deaths.get((peer, dtype, bool(env))))
    environment, refused, remarks = probe.survey(["torch", "jax"], ["float32", "bfloat16", "float16"])
    assert environment == probe.WITHOUT_AMX["torch"]
    assert refused == {("jax", "float16"): "crashes here (SIGSEGV)"}
    assert len(remarks) == 2
    peer = Peer("1", {F: lambda case, x: None})
    peer.deadly["float16"] = "crashes here (SIGSEGV)"
    assert peer.refuses(Case("", dims(1, 1, 4, 2), dtype="float16"), F) == "crashes here (SIGSEGV)"
    assert peer.refuses(Case("", dims(1, 1, 4, 2)), F) is None
