"""The harness of the benchmark: what it computes, counts, verifies and prints. Nothing here is timed."""

import io
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import attngrad
from attngrad import reference
from attngrad._options import bind
from attngrad.bench import bounds, grid, memory, passes, peers, probe, quiet, report, runner, timing, verify
from attngrad.bench.cases import KINDS, Case, dims
from attngrad.bench.cli import command
from attngrad.bench.markdown import page
from attngrad.bench.peers import OURS, OWN_FLOAT32, Ours, Peer
from attngrad.bench.results import Results, Row, geometric_mean
from attngrad.bench.timing import Budget, Timing

F, FB = "forward", "forward + backward"
TINY = list(dict.fromkeys(replace(case.tiny(), level=1) for case in grid.CASES))


def ids(case):
    return f"{case.group} {case.label}"


def checked(peer, case, names=None):
    """The largest error of a peer over the passes of a case."""
    x, sample = case.inputs(), verify.choose(case)
    names = names or [name for name in case.passes if peer.refuses(case, name) is None]
    expected = verify.expect(case, verify.restrict(x, sample, case.n.group), sample, names) if names else {}
    errors = [0.0]
    for name in names:
        ready = peer.prepare(case, name, verify.restrict(x, sample, case.n.group))
        found = ready.arrays(ready.call())
        errors.append(verify.check(peer.name, found, expected, passes.PASSES[name].outputs, case.dtype))
    return max(errors)


# --- the table of cases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_attngrad_and_numpy_agree_with_the_reference_on_every_case(case):
    assert checked(Ours(), case) <= verify.TOLERANCE[case.dtype]
    assert checked(peers.NumPy(), case) <= verify.TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", [c for c in TINY if c.dtype in ("float32", "float64")], ids=ids)
def test_torch_agrees_with_the_reference_on_every_case(case):
    pytest.importorskip("torch")
    assert checked(peers.load("torch", 1), case) <= verify.TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", {(c.kind, c.dtype, c.n.t == c.n.s): c for c in TINY}.values(), ids=ids)
def test_jax_agrees_with_the_reference_on_every_kind(case):
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    try:
        assert checked(peers.load("jax", 1), case) <= verify.TOLERANCE[case.dtype]
    finally:
        jax.config.update("jax_enable_x64", before)


def test_sixteen_bit_rows_are_held_against_float32_on_the_same_numbers():
    case = Case("bfloat16", dims(1, 2, 5, 3), dtype="bfloat16")
    ready = peers.OursInFloat32().prepare(case, F, case.inputs())
    assert ready.call().dtype == np.float32
    assert checked(peers.OursInFloat32(), case) < 1e-6


def test_the_grid_has_what_the_project_promises():
    default = grid.select(grid.DEFAULT)
    labels = {f"{case.group} {case.label} {name}" for case, name in default}
    for n, kind, name in itertools.product((10, 16, 64, 512, 2048, 16384), ("", "causal"), (F, FB)):
        assert any(c.group == "sizes" and c.n.t == n and c.kind == kind and p == name for c, p in default)
    for wanted in (
        "window 1,8,2048,64 window 256 forward",
        "masks and bias 4,8,512,64 mask 50% forward + backward",
        "masks and bias 2,8,1024,64 dbias HTS forward + backward",
        "grouped heads 2,8/2,1024,64 causal forward",
        "cross 4,8,128/1024,64 forward + backward",
        "decoding 8,32/8,1/16384,128 forward",
        "head sizes 4,8,512,80 causal forward",
        "float64 1,8,2048,64 causal f64 forward + backward",
        "bfloat16 8,12,128,64 bf16 forward",
    ):
        assert wanted in labels
    assert {c.dtype for c, _ in default} == {"float32", "float64", "bfloat16", "float16"}


def test_each_level_contains_the_one_before_and_no_row_stands_twice():
    rows = [set(grid.select(level)) for level in (grid.QUICK, grid.DEFAULT, grid.FULL)]
    assert rows[0] < rows[1] < rows[2]
    assert len({(c.group, c.label) for c in grid.CASES}) == len(grid.CASES)
    assert {c.group for c in grid.CASES} == set(grid.TITLES)


def test_only_and_dtype_narrow_the_selection():
    assert all(c.kind == "causal" for c, _ in grid.select(grid.FULL, ["causal"]))
    assert all(name == FB for _, name in grid.select(grid.FULL, ["*+ backward"]))
    assert {c.dtype for c, _ in grid.select(grid.FULL, (), ["float64"])} == {"float64"}
    assert runner.Settings(1, 1, only=("decoding",)).lengths() == ()
    assert runner.Settings(1, 1, only=("memory",)).lengths()[-1] == 65536


# --- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_pairs_are_those_that_causal_and_window_leave_in_the_reference(case):
    x = case.inputs()
    options = {"causal": case.options.causal}
    if case.options.window is not None:
        options["window"] = (case.options.window, 0)
    wide = [a.astype(np.float64) for a in (x.q, x.k, x.v)]
    operands, o, _ = bind("test", *wide, options, kernels=False)
    visible = np.broadcast_to(reference.forward(operands, o).visible, (*x.q.shape[:-1], case.n.s))
    assert case.pairs() == visible.sum()
    plane = case.visible(np.arange(case.n.t))
    assert plane is None or np.array_equal(plane, visible[0, 0])


def test_flops_are_the_formulas_of_the_readme():
    n = 2048
    assert Case("", dims(1, 8, n, 64)).flops() == 4 * 8 * n * n * 64
    assert Case("", dims(1, 8, n, 64), "causal").flops() == 4 * 8 * 64 * n * (n + 1) // 2
    assert Case("", dims(2, 3, 5, 7, e=11)).flops() == 2 * 2 * 3 * 5 * 5 * (7 + 11)
    full = Row(Case("", dims(1, 8, n, 64)), FB)
    assert full.flops == 3.5 * 4 * 8 * n * n * 64


def test_causal_pairs_of_oblong_shapes_end_at_the_last_key():
    # T = 3, S = 5: the rows see 3, 4, 5 keys. T = 5, S = 3: 0, 0, 1, 2, 3.
    assert Case("", dims(1, 1, 3, 2, s=5), "causal").pairs() == 12
    assert Case("", dims(1, 1, 5, 2, s=3), "causal").pairs() == 6
    assert Case("", dims(1, 1, 5, 2), "window 2").pairs() == 1 + 2 + 3 + 3 + 3


def test_bytes_of_decoding_are_those_of_the_cache():
    case = Case("decoding", dims(8, 32, 1, 128, key_heads=8, s=4096))
    cache = 2 * 8 * 8 * 4096 * 128 * 4
    assert 1.0 < case.bytes() / cache < 1.01


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert geometric_mean([0.25, 4.0]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))


def test_the_exponent_of_a_power_law_is_its_power():
    sizes = [4096, 8192, 65536]
    assert memory.exponent(sizes, [3.0 * n**1.5 for n in sizes]) == pytest.approx(1.5)


# --- verification ----------------------------------------------------------------------------------------------------


def spoiled(change):
    """An Ours whose arrays go through ``change``."""

    class Spoiled(Ours):
        name = "spoiled"

        def prepare(self, case, name, x):
            ready = super().prepare(case, name, x)
            return ready._replace(arrays=lambda found: change(ready.arrays(found)))

    return Spoiled()


@pytest.mark.parametrize("output", ["out", "dq", "dk", "dv", "dbias"])
def test_a_wrong_output_is_refused(output):
    case = Case("", dims(2, 4, 6, 3, key_heads=2), "bias HTS")

    def change(arrays):
        arrays[output] = arrays[output].copy()
        arrays[output].flat[-1] *= 1.01
        return arrays

    with pytest.raises(verify.VerificationError, match=rf"{output} is off by .* Not timed"):
        checked(spoiled(change), case, [FB])


def test_nan_and_missing_outputs_are_refused():
    case = Case("", dims(1, 2, 6, 3))
    with pytest.raises(verify.VerificationError, match="dk is off by nan"):
        checked(spoiled(lambda arrays: arrays | {"dk": arrays["dk"] * np.nan}), case, [FB])
    with pytest.raises(verify.VerificationError, match="returned no dv"):
        checked(spoiled(lambda arrays: {k: v for k, v in arrays.items() if k != "dv"}), case, [FB])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "window 256"])
def test_a_sample_of_rows_is_verified_where_the_dense_scores_do_not_fit(kind, monkeypatch):
    monkeypatch.setattr(verify, "MOST_PAIRS", 1)
    case = Case("", dims(2, 4, 40, 3, key_heads=2), kind)
    sample = verify.choose(case)
    assert not sample.whole
    assert len(sample.rows) == 16
    assert {0, 39} <= set(sample.rows)
    assert checked(Ours(), case) < 1e-5

    def change(arrays):
        arrays["dk"] = arrays["dk"].copy()
        arrays["dk"][1, 1, 0] += 1.0
        return arrays

    with pytest.raises(verify.VerificationError, match="dk is off"):
        checked(spoiled(change), case, [FB])


def test_long_caches_are_verified_on_a_part_of_the_heads(monkeypatch):
    monkeypatch.setattr(verify, "MOST_NUMBERS", 3 * 2 * 50 * 8)
    case = Case("decoding", dims(2, 4, 1, 4, key_heads=2, s=50), passes=(F,))
    sample = verify.choose(case)
    assert sample.units == ((0, 0), (1, 0), (1, 1))
    assert checked(Ours(), case) < 1e-5


# --- the run, with a clock that stands still --------------------------------------------------------------------------


def timing_of(seconds, spread=0.02):
    return Timing(seconds, seconds * (1 - spread / 2), seconds * (1 + spread / 2), seconds * 0.9, 7, 1)


@pytest.fixture
def still(monkeypatch):
    """Every contender takes a second, and the machine is quiet."""
    monkeypatch.setattr(runner, "interleave", lambda calls, budgets: {name: timing_of(1.0) for name in calls})
    monkeypatch.setattr(runner.Watch, "others", lambda self: 0.0)


def run_rows(case, *others):
    return list(runner.run_case(case, case.passes, others, lambda name: Budget(0.0, 1), quiet.Patience(0.0)))


def test_every_contender_of_a_row_is_verified_and_timed(still):
    rows = run_rows(Case("bfloat16", dims(1, 2, 5, 3), dtype="bfloat16"), peers.NumPy())
    assert [row.name for row in rows] == [F, FB]
    for row in rows:
        assert list(row.times) == [OURS, OWN_FLOAT32]
        assert row.notes == {"numpy": "computes bfloat16 in software"}
        assert row.errors[OURS] > row.errors[OWN_FLOAT32]


def test_a_row_that_fails_the_verification_is_not_timed(still):
    bad = spoiled(lambda arrays: {name: array + 1.0 for name, array in arrays.items()})
    rows = run_rows(Case("sizes", dims(1, 2, 5, 3)), bad)
    assert all(row.failure is not None and row.failure.startswith("spoiled, 1,2,5,3") for row in rows)
    assert not any(row.times for row in rows)


def test_a_new_pass_is_one_entry_and_one_method_a_peer(still, monkeypatch):
    """JVP along v_dot = v, as an example."""

    def along_v(x):
        return {"out": reference.attention(x.q, x.k, x.v), "out_dot": reference.jvp(x[:3], (None, None, x.v))[1]}

    def ours(case, x):
        return peers.Prepared(lambda: attngrad.jvp(x[:3], (None, None, x.v)), lambda f: {"out": f[0], "out_dot": f[1]})

    monkeypatch.setitem(passes.PASSES, "jvp", passes.Pass("jvp", "jvp", 2.5, ("out", "out_dot"), along_v))
    before = Ours.__init__

    def extended(self):
        before(self)
        self.passes = {**self.passes, "jvp": ours}

    monkeypatch.setattr(Ours, "__init__", extended)
    (row,) = run_rows(Case("jvp", dims(1, 2, 5, 3), passes=("jvp",)), peers.NumPy())
    assert row.failure is None
    assert row.errors[OURS] < 1e-5
    assert row.notes == {"numpy": "has no jvp"}


def test_a_disturbed_row_is_timed_again_and_the_quietest_kept(monkeypatch):
    others = iter([1.5, 0.7, 0.0])
    monkeypatch.setattr(runner, "interleave", lambda calls, budgets: {name: timing_of(1.0) for name in calls})
    monkeypatch.setattr(runner.Watch, "others", lambda self: next(others))
    monkeypatch.setattr(runner.Patience, "wait", lambda self: True)
    (row,) = run_rows(Case("sizes", dims(1, 1, 4, 2), passes=(F,)))
    assert row.others == 0.0
    assert not row.disturbed


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


def test_a_missing_peer_is_left_out_with_a_remark_that_names_the_extra(monkeypatch):
    real = peers.importlib.import_module

    def without_jax(name):
        if name == "jax":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(peers.importlib, "import_module", without_jax)
    found, remarks = runner.find_peers(runner.Settings(0, 1, ("jax", "numpy"), ("sizes 32",)))
    assert [peer.name for peer in found] == ["numpy"]
    assert remarks == ["bench: jax is not installed: pip install 'attngrad[bench]'."]


def test_a_peer_that_dies_in_a_dtype_runs_without_amx_or_not_at_all(monkeypatch):
    deaths = {("torch", "bfloat16", False): "SIGILL", ("jax", "float16", True): "SIGSEGV"}
    monkeypatch.setattr(probe, "death", lambda peer, dtype, env: deaths.get((peer, dtype, bool(env))))
    environment, refused, remarks = probe.survey(["torch", "jax"], ["float32", "bfloat16", "float16"])
    assert environment == probe.WITHOUT_AMX["torch"]
    assert refused == {("jax", "float16"): "dies of SIGSEGV here"}
    assert len(remarks) == 2
    peer = Peer("1", {F: lambda case, x: None})
    peer.deadly["float16"] = "dies of SIGSEGV here"
    assert peer.refuses(Case("", dims(1, 1, 4, 2), dtype="float16"), F) == "dies of SIGSEGV here"
    assert peer.refuses(Case("", dims(1, 1, 4, 2)), F) is None


# --- results, bounds, report ------------------------------------------------------------------------------------------


def results_of(faster=5.0, **changes):
    """A whole default run in which attngrad reaches 90 % of the peak and every peer is ``faster`` times slower."""
    peak = {"float32": 200e9, "float64": 100e9}
    rows = []
    for case, name in grid.select(grid.DEFAULT):
        row = Row(case, name)
        limit = peak["float64" if case.dtype == "float64" else "float32"]
        own = 5e-6 if case.group == "overhead" else case.bytes() / 18e9 if row.by_bytes else row.flops / (0.9 * limit)
        times = {OURS: timing_of(own), "torch": timing_of(own * faster), "jax": timing_of(own * 2 * faster)}
        if case.dtype in ("bfloat16", "float16"):
            times[OWN_FLOAT32] = timing_of(own)
        rows.append(replace(row, times=times, errors=dict.fromkeys(times, 1e-7), notes={"numpy": "too large"}))
    usage = [memory.Usage(peer, n, 6 * n * 256, n * n * 1e-9) for n in memory.SIZES[1] for peer in (OURS, "torch")]
    machine = {
        "cpu": "Some(R) CPU with a long name @ 2.00GHz",
        "cores": 2,
        "isa": "avx2",
        "threads": 2,
        "system": "Linux",
    }
    versions = {"python": "3.11.7", OURS: "0.1.0", "torch": "2.13.0+cpu", "jax": "0.10.2"}
    fields = {"peak": peak, "bandwidth": 20e9, "rows": rows, "memory": usage, "remarks": ["bench: a remark."]} | changes
    return Results(machine, versions, "0123456789ab", "2026-01-01T00:00:00+00:00", "default", **fields)


def spoil(results, **changes):
    results.rows[0] = replace(results.rows[0], **changes)
    return results


def test_every_bound_holds_of_a_fast_run_and_is_judged():
    verdicts = bounds.judge(results_of())
    assert len(verdicts) == len(bounds.BOUNDS) == 18
    assert [v.bound.text for v in verdicts if not v.holds] == []


def test_every_ratio_bound_is_missed_by_a_slow_run():
    verdicts = bounds.judge(results_of(0.9))
    missed = {v.bound.text for v in verdicts if v.holds is False}
    kept = {v.bound.text for v in verdicts if v.holds}
    assert kept == {
        "FMA share, 1,8,2048,64 fwd",
        "FMA share, 1,8,2048,64 fwd+bwd",
        "decoding: ratio/0.95 or stream/0.85",
        "16-bit fwd+bwd: over own float32",
        "memory, n = 65536, in sizes of q",
        "one call, 1,1,10,32 fwd",
    }
    assert len(missed) == len(bounds.BOUNDS) - len(kept)


def test_decoding_may_lose_five_percent_or_else_reach_the_bandwidth():
    (bound,) = [b for b in bounds.BOUNDS if b.text.startswith("decoding")]

    def holds(**changes):
        (verdict,) = [v for v in bounds.judge(results_of(**changes)) if v.bound is bound]
        return verdict.holds

    assert holds(faster=0.9, bandwidth=20e9)  # 18 of 20 GB/s
    assert not holds(faster=0.9, bandwidth=30e9)
    assert holds(faster=0.96, bandwidth=30e9)


def test_memory_and_overhead_bounds_are_upper_bounds():
    heavy = results_of(memory=[memory.Usage(OURS, 65536, 13 * 65536 * 256, 1.0)])
    assert [v.bound.text for v in bounds.judge(heavy) if v.holds is False] == ["memory, n = 65536, in sizes of q"]
    slow = results_of()
    slow.rows = [r if r.case.group != "overhead" else replace(r, times={OURS: timing_of(11e-6)}) for r in slow.rows]
    (verdict,) = [v for v in bounds.judge(slow) if v.holds is False]
    assert verdict.sentence == "one call, 1,1,10,32 fwd: at most 10 us; found 11 us (1,1,10,32 fwd)"


def test_disturbed_rows_are_neither_judged_nor_averaged():
    lucky = spoil(results_of(1.0), others=1.0, times={OURS: timing_of(1e-3), "torch": timing_of(1.0)})
    assert lucky.means()["float32 forward"]["torch"] == pytest.approx(1.0)
    unsteady = spoil(results_of(), times={OURS: timing_of(1.0, spread=0.5), "torch": timing_of(0.1)})
    assert unsteady.rows[0].disturbed
    assert all(v.holds for v in bounds.judge(unsteady))
    nothing = results_of()
    nothing.rows = [replace(row, others=1.0) for row in nothing.rows]
    assert {v.holds for v in bounds.judge(nothing)} == {None, True}  # True: the memory, which does not mind


def test_json_comes_back_as_it_went():
    results = spoil(results_of(), others=math.nan)
    text = json.dumps(results.to_json(), allow_nan=False)
    again = Results.from_json(json.loads(text))
    assert json.dumps(again.to_json(), allow_nan=False) == text


def test_the_json_says_where_with_what_and_how_spread():
    found = results_of().to_json()
    assert found["schema"] == 1
    assert {"cpu", "cores", "isa", "threads"} <= set(found["machine"])
    assert {"python", OURS, "torch"} <= set(found["versions"])
    assert {"commit", "date", "level", "peak", "bandwidth", "memory", "geometric_means", "bounds"} <= set(found)
    row = found["rows"][0]
    assert set(row["times"][OURS]) == {"median", "lower", "upper", "best", "samples", "loops"}
    assert row["ratios"]["torch"] == pytest.approx(5.0)
    assert row["fraction"] == pytest.approx(0.9)
    assert set(row["shape"]) == {"batch", "heads", "key_heads", "t", "s", "d", "e"}


def test_results_of_another_schema_are_refused():
    with pytest.raises(ValueError, match="must have schema 1; got 99"):
        Results.from_json({"schema": 99})


def rendered(results, width):
    stream = io.StringIO()
    report.render(results, Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(width):
    results = spoil(results_of(0.5), failure="torch, a case: dq is off by 1e+00 of the largest entry.", times={})
    results.rows[1] = replace(results.rows[1], others=1.0)
    text = rendered(results, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for wanted in ("VERIFICATION FAILED", "Losses: ", "fwd+bwd~", "missed", "n^1.00", "n^2.00", "bench: a remark."):
        assert wanted in text
    for group in grid.TITLES.values():
        assert group.split(",")[0].split(":")[0] in text
    for row in results.rows:
        assert row.case.label in text


def test_the_report_of_nothing_says_so():
    text = rendered(results_of(rows=[], memory=[], peak={}, bandwidth=0.0), 80)
    assert "Nothing was timed." in text
    assert "never on a quiet machine" in text


def test_losses_name_every_peer_that_is_faster():
    results = spoil(results_of(), times={OURS: timing_of(1.0), "torch": timing_of(0.5), "jax": timing_of(0.9)})
    assert [peer for _, peer in results.losses()] == ["torch", "jax"]
    assert "32,4,10,32 fwd: torch is faster, ratio 0.50" in rendered(results, 80)
    assert "No peer was faster in any row." in rendered(results_of(), 80)


def test_the_markdown_page_has_every_row_and_its_losses():
    text = page(results_of(0.5), ["plots/ratios.png"])
    assert text.count("\n| ") >= len(grid.select(grid.DEFAULT))
    assert "**0.50**" in text
    assert "![ratios](plots/ratios.png)" in text


def test_the_plots_are_drawn_of_whatever_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from attngrad.bench.plots import draw

    results = results_of(1.5)
    results.rows[3] = replace(results.rows[3], others=1.0)
    assert [path.name for path in draw(results, tmp_path)] == ["throughput.png", "ratios.png", "growth.png"]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
    assert draw(results_of(rows=[], memory=[]), tmp_path) == []


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    def save(results):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(results.to_json()))
        return str(path)

    return save


def invoke(*arguments):
    return CliRunner().invoke(command, arguments)


def test_the_command_lists_rows_and_refuses_what_it_does_not_know(tmp_path):
    assert "decoding 1,32/8,1/4096,128 forward\n" in invoke("--quick", "--list").output
    assert len(invoke("--list").output.splitlines()) == len(grid.select(grid.DEFAULT))
    assert "must be of torch,jax,numpy; got tensorflow" in invoke("--peers", "torch,tensorflow").output
    assert "no row matches" in invoke("--only", "nothing like this").output
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "must name results written by --json" in invoke("--load", str(other)).output


def test_check_exits_with_one_where_a_bound_is_missed(saved):
    good, bad = invoke("--load", saved(results_of()), "--check"), invoke("--load", saved(results_of(1.1)), "--check")
    assert good.exit_code == 0
    assert bad.exit_code == 1
    assert "missed: up to 16 tokens: at least 4; found 1.1" in bad.output
    assert invoke("--load", saved(results_of(1.1))).exit_code == 0


def test_check_does_not_pass_on_rows_that_were_not_judged_or_not_verified(saved):
    assert invoke("--load", saved(spoil(results_of(), others=1.0)), "--check").exit_code == 1
    assert invoke("--load", saved(spoil(results_of(), failure="wrong", times={}))).exit_code == 1


def test_the_command_writes_the_page_from_saved_results(saved, tmp_path):
    target = tmp_path / "page.md"
    assert invoke("--load", saved(results_of()), "--markdown", str(target)).exit_code == 0
    assert target.read_text().startswith("# Benchmark\n")


def test_the_help_loads_nothing_but_click():
    code = "import sys\nfrom attngrad.bench.cli import command\n"
    code += "try:\n    command(['--help'])\nexcept SystemExit:\n    pass\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    loaded = {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}
    assert not loaded & {"numpy", "ml_dtypes", "rich", "torch", "jax", "matplotlib"}
