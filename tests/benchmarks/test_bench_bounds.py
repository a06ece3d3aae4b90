"""What the benchmark makes of its times: bounds, means, and JSON."""

import json
import math
from dataclasses import replace

import pytest

from bench_tools import results_of, spoil, started, timing_of
from benchmarks import bounds, memory
from benchmarks.cases import dims
from benchmarks.peers import OURS, OWN_BASE
from benchmarks.results import Results


def test_every_bound_holds_of_a_fast_run_and_is_judged():
    verdicts = bounds.judge(results_of())
    assert len(verdicts) == len(bounds.BOUNDS) == 28
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
        "jvp: over own fwd",
        "hvp: over own fwd+bwd",
        "jvp, one tangent: by its products",
        "hvp, one tangent: by its products",
        "hvp memory, n = 32768, in sizes of q",
        "hvp memory: exponent of n",
        "memory, n = 65536, in sizes of q",
        "one call, 1,1,10,32 fwd",
        "start of the command",
    }
    assert len(missed) == len(bounds.BOUNDS) - len(kept)


def test_a_share_of_the_peak_above_one_is_not_judged():
    slow = results_of()
    slow.rows = [replace(row, peak=row.peak / 2) for row in slow.rows]  # as a probe on one thread of two
    shares = [v for v in bounds.judge(slow) if v.bound.text.startswith("FMA share")]
    assert [v.holds for v in shares] == [None, None]


def test_decoding_may_lose_five_percent_or_else_reach_the_bandwidth():
    (bound,) = [b for b in bounds.BOUNDS if b.text.startswith("decoding")]

    def holds(**changes):
        (verdict,) = [v for v in bounds.judge(results_of(**changes)) if v.bound is bound]
        return verdict.holds

    assert holds(faster=0.9, bandwidth=20e9)  # 18 of 20 GB/s
    assert not holds(faster=0.9, bandwidth=30e9)
    assert holds(faster=0.96, bandwidth=30e9)


def missed(results):
    return [v.bound.text for v in bounds.judge(results) if v.holds is False]


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("jvp", "jvp: over own fwd", 3.5),
        ("hvp", "hvp: over own fwd+bwd", 3.6),
        ("jvp q_dot", "jvp, one tangent: by its products", 3.5 * 4 / 6),
        ("jvp v_dot", "jvp, one tangent: by its products", 3.5 * 3 / 6),
        ("hvp k_dot", "hvp, one tangent: by its products", 3.6 * 14 / 21),
        ("hvp v_dot", "hvp, one tangent: by its products", 3.6 * 11 / 21),
    ],
)
def test_tangents_are_bound_by_our_own_time_and_one_tangent_by_its_share(name, text, limit):
    def with_own(times):
        """All float32 rows of the pass at ``times`` the time of our own pass."""
        results = results_of()
        results.rows = [
            replace(row, times=row.times | {OWN_BASE: timing_of(row.times[OURS].median / times)})
            if row.name == name and row.case.dtype == "float32"
            else row
            for row in results.rows
        ]
        return missed(results)

    assert with_own(limit * 0.99) == []
    assert with_own(limit * 1.01) == [text]


@pytest.mark.parametrize(
    ("name", "kind", "ratio", "expected"),
    [
        ("jvp", "", 3.9, ["jvp, 1,8,1024,64 full and causal"]),
        ("jvp", "causal", 3.9, ["jvp, 1,8,1024,64 full and causal"]),
        ("hvp", "causal", 3.1, []),
        ("hvp", "causal", 2.9, ["hvp, 1,8,1024,64 full and causal"]),
        ("hvp q_dot", "", 1.1, []),
        ("hvp q_dot", "", 0.9, ["jvp and hvp: every shape"]),
    ],
)
def test_tangents_are_bound_by_torch(name, kind, ratio, expected):
    results = results_of()
    (at,) = [
        i
        for i, row in enumerate(results.rows)
        if (row.name, row.case.kind, row.case.dtype, row.case.n) == (name, kind, "float32", dims(1, 8, 1024, 64))
    ]
    row = results.rows[at]
    results.rows[at] = replace(row, times=row.times | {"torch": timing_of(row.times[OURS].median * ratio)})
    assert missed(results) == expected


def test_our_own_passes_are_no_peers():
    results = results_of()
    assert any(OWN_BASE in row.times for row in results.rows)
    assert results.losses() == []
    assert {peer for by in results.means().values() for peer in by} == {"torch", "jax"}


def test_memory_that_is_not_linear_misses_its_bounds():
    def hvp(power):
        return [memory.Usage(OURS, n, int(64 * n**power), 1.0, work="hvp") for n in memory.SIZES["hvp"]]

    assert missed(results_of(memory=hvp(1.0))) == []
    assert missed(results_of(memory=hvp(1.2))) == ["hvp memory: exponent of n"]
    assert missed(results_of(memory=[memory.Usage(OURS, 32768, 17 * 32768 * 256, 1.0, work="hvp")])) == [
        "hvp memory, n = 32768, in sizes of q"
    ]


def test_memory_and_overhead_bounds_are_upper_bounds():
    heavy = results_of(memory=[memory.Usage(OURS, 65536, 13 * 65536 * 256, 1.0)])
    assert [v.bound.text for v in bounds.judge(heavy) if v.holds is False] == ["memory, n = 65536, in sizes of q"]
    slow = results_of()
    slow.rows = [r if r.case.group != "overhead" else replace(r, times={OURS: timing_of(11e-6)}) for r in slow.rows]
    (verdict,) = [v for v in bounds.judge(slow) if v.holds is False]
    assert verdict.sentence == "one call, 1,1,10,32 fwd: at most 10 us; found 11 us (1,1,10,32 fwd)"


def test_a_slow_start_misses_its_bound_and_a_disturbed_one_is_not_judged():
    def verdict(startup):
        (found,) = [v for v in bounds.judge(results_of(startup=startup)) if v.bound.text == "start of the command"]
        return found

    slow = verdict(started(0.151))
    assert slow.holds is False
    assert slow.sentence == "start of the command: at most 150 ms; found 151 ms (attngrad --help)"
    assert verdict(started(0.149)).holds is True
    assert verdict(started(0.1, others=0.5)).holds is None
    assert verdict(None).holds is None


def test_disturbed_rows_are_neither_judged_nor_averaged():
    lucky = spoil(results_of(1.0), others=1.0, times={OURS: timing_of(1e-3), "torch": timing_of(1.0)})
    assert lucky.means()["float32 forward"]["torch"] == pytest.approx(1.0)
    unsteady = spoil(results_of(), times={OURS: timing_of(1.0, spread=0.5), "torch": timing_of(0.1)})
    assert unsteady.rows[0].disturbed
    assert {v.holds for v in bounds.judge(unsteady)} == {True}
    nothing = results_of()
    nothing.rows = [replace(row, others=1.0) for row in nothing.rows]
    assert {v.holds for v in bounds.judge(nothing)} == {None, True}  # True: the memory, which does not mind


def test_json_comes_back_as_it_went():
    results = spoil(results_of(startup=started(others=math.nan)), others=math.nan)
    text = json.dumps(results.to_json(), allow_nan=False)
    again = Results.from_json(json.loads(text))
    assert json.dumps(again.to_json(), allow_nan=False) == text


def test_json_from_before_there_was_more_than_one_work_is_still_read():
    found = results_of().to_json()
    for usage in found["memory"]:
        del usage["work"]
    del found["startup"]
    assert {usage.work for usage in Results.from_json(found).memory} == {"forward + backward"}


def test_the_json_says_where_with_what_and_how_spread():
    found = results_of().to_json()
    assert found["schema"] == 2
    assert {"cpu", "cores", "isa", "threads"} <= set(found["machine"])
    assert {"python", OURS, "torch"} <= set(found["versions"])
    assert {"commit", "date", "level", "bandwidth", "memory", "startup", "geometric_means", "bounds"} <= set(found)
    row = found["rows"][0]
    assert set(row["times"][OURS]) == {"median", "lower", "upper", "best", "samples", "loops"}
    assert row["ratios"]["torch"] == pytest.approx(5.0)
    assert row["fraction"] == pytest.approx(0.9)
    assert row["peak"] == 200e9
    assert set(row["shape"]) == {"batch", "heads", "key_heads", "t", "s", "d", "e"}


def test_results_of_another_schema_are_refused():
    with pytest.raises(ValueError, match="must have schema 2; got 99"):
        Results.from_json({"schema": 99})
