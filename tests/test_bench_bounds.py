"""What the benchmark makes of its times: bounds, means, and JSON."""

import json
import math
from dataclasses import replace

import pytest

from attngrad.bench import bounds, memory
from attngrad.bench.peers import OURS
from attngrad.bench.results import Results
from bench_tools import results_of, spoil, timing_of


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
