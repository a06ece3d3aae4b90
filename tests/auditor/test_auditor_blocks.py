"""Faults at the sizes where kernels branch, at every effort; candidates that are slow there are not accused."""

import time
from itertools import product
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import attngrad.jax
from attngrad.auditor import audit, repeat, session
from attngrad.auditor.budget import LIMITS
from attngrad.auditor.cases import cases
from planted import attention, right
from tiers import first, only

RULES = {
    "D >= 128": lambda q: q.shape[3] >= 128,
    "D == 64": lambda q: q.shape[3] == 64,
    "T > 256": lambda q: q.shape[2] > 256,
    "T % 64 == 0": lambda q: q.shape[2] % 64 == 0,
}


def wrong_where(rule):
    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq * 1.5 if rule(q) else dq, dk, dv

    return candidate


QUICK = [(rule, "quick") for rule in RULES]
TOLD = {"T > 256": "T >= 257, right up to T = 256", "D == 64": "D = 64, right in the others"}


@pytest.mark.parametrize(("rule", "effort"), only(QUICK, product(RULES, ("quick", "default"))))
def test_a_fault_of_one_branch_is_seen(rule, effort):
    report = audit(wrong_where(RULES[rule]), effort=effort)
    assert report.status == "wrong"
    assert [s.name for s in report.stages if not s.ok] == ["dq"]
    assert "Wrong in every case tried with" in report.stages[1].pattern
    assert len(report.smallest.splitlines()) < 60


@pytest.mark.parametrize("rule", first(1, TOLD))
def test_where_it_is_wrong_is_told_by_the_sizes(rule):
    assert f"Wrong in every case tried with {TOLD[rule]}." in audit(wrong_where(RULES[rule])).stages[1].pattern


def test_the_rule_on_sizes_tells_two_tokens_from_one():
    def beyond(tokens):
        def candidate(q, k, v, dout):
            out, dq, dk, dv = right(q, k, v, dout)
            return out, dq, dk, dv * 1.5 if q.shape[2] > tokens else dv

        return audit(candidate, effort="quick").stages[3].pattern

    assert beyond(1).endswith("Wrong in every case tried with T >= 2, right with T = 1.")
    assert beyond(2).endswith("Wrong in every case tried with T >= 3, right up to T = 2.")


def test_what_explains_the_small_cases_must_hold_in_the_large_ones():
    def candidate(q, k, v, dout):
        found = attention("mean")(q, k, v, dout)
        return found | {"dv": found["dv"] * (1.5 if q.shape[2] > 256 else 1.0)}

    report = audit(candidate, effort="quick")
    assert report.mistakes == ("mean-for-row-sum",), report
    assert "and dV for another reason, which no known mistake explains" in report.verdict


def in_blocks(tile):
    """A softmax within each block of keys."""

    def candidate(q, k, v, dout):
        scale = 1 / np.sqrt(q.shape[-1])
        z, da = scale * (q @ k.swapaxes(-1, -2)), dout @ v.swapaxes(-1, -2)
        a, ds = np.empty_like(z), np.empty_like(z)
        for start in range(0, z.shape[-1], tile):
            keys = slice(start, start + tile)
            e = np.exp(z[..., keys] - z[..., keys].max(-1, keepdims=True))
            a[..., keys] = e / e.sum(-1, keepdims=True)
            ds[..., keys] = a[..., keys] * (da[..., keys] - (a * da)[..., keys].sum(-1, keepdims=True))
        return a @ v, scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ dout

    return candidate


def last_block(tile):
    """dQ by the last block of keys alone."""

    def candidate(q, k, v, dout):
        last = (k.shape[2] - 1) // tile * tile
        z = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        a = np.exp(z - z.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        da = dout @ v.swapaxes(-1, -2)
        ds = a * (da - (a * da).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return a @ v, ds[..., last:] @ k[..., last:, :], ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ dout

    return candidate


TILED = {"softmax-within-block": in_blocks, "overwritten-not-accumulated": last_block}


@pytest.mark.parametrize(
    ("mistake", "tile"), only(zip(TILED, (24, 48), strict=True), product(TILED, (12, 24, 48, 80, 96, 192)))
)
def test_tiles_of_lengths_that_are_no_power_of_two_are_named(mistake, tile):
    report = audit(TILED[mistake](tile), effort="quick")
    assert report.mistakes == (mistake,), report
    assert f"of {tile} keys" in report.explanations[0][0].note


def test_a_large_smallest_case_is_drawn_and_runs():
    report = audit(wrong_where(RULES["T > 256"]), effort="quick")
    names = {"candidate": wrong_where(RULES["T > 256"])}
    exec(report.smallest, names)  # noqa: S102
    assert names["q"].shape[2] > 256
    truth = right(*(names[n] for n in ("q", "k", "v", "dout")))[1]
    assert not np.allclose(names["results"][1], truth)


def test_the_default_set_covers_every_length_and_width_in_at_most_16_cases():
    small = {str(c) for c in cases() if not c.dims.large and c.dims.d < 64}
    block = [c.dims for c in cases() if str(c) not in small]
    assert len(block) <= 16
    lengths = {m for n in (64, 128, 256, 512) for m in (n - 1, n, n + 1)}
    assert {n.t for n in block} >= lengths
    assert {n.s for n in block} >= lengths
    for axis in ("d", "e"):
        assert {getattr(n, axis) for n in block} >= {64, 80, 128, 256}
    assert any(n.hq > n.hk for n in block)
    assert any(n.t == 320 for n in (c.dims for c in cases(effort="quick")))


def test_loops_in_python_are_not_run_where_they_would_take_long():
    def loops(q, k, v, dout):
        end = time.thread_time() + 2e-7 * q.size * k.shape[2]
        while time.thread_time() < end:  # as long as they take, on any machine
            pass
        return right(q, k, v, dout)

    report = audit(loops, effort="quick", time_limit=1.0)
    assert report.ok, report
    assert any("320 tokens (a call would take about" in text for text in report.untried)
    assert "320 tokens (a call would take about" in " ".join(str(report).partition("Not tried")[2].split())


def busy(seconds):
    """Take so much of the processor, on any machine."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_one_call_that_is_held_up_leaves_out_no_size():
    held_up = []

    def candidate(q, k, v, dout):
        if q.shape[2] == 37 and not held_up:  # the largest of the small cases
            held_up.append(True)
            busy(1.2)
        return right(q, k, v, dout)

    report = audit(candidate, effort="quick")
    assert held_up
    assert report.ok
    assert report.untried == ()
    assert "up to 320 tokens" in report.tried[0]


def test_what_a_call_costs_at_any_size_leaves_out_no_size():
    def candidate(q, k, v, dout):
        busy(0.1)
        return right(q, k, v, dout)

    report = audit(candidate, effort="quick")
    assert report.ok
    assert report.untried == ()
    assert "up to 320 tokens" in report.tried[0]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_exp_without_the_maximum_is_found_by_quick(dtype):
    def candidate(q, k, v, dout):
        wide = [x.astype(np.float32 if x.dtype == np.float16 else x.dtype) for x in (q, k, v, dout)]
        a, b, c, d = wide
        group = a.shape[1] // b.shape[1]
        b, c = np.repeat(b, group, 1), np.repeat(c, group, 1)
        scale = a.dtype.type(1 / np.sqrt(a.shape[-1]))
        with np.errstate(all="ignore"):
            e = np.exp(scale * (a @ b.swapaxes(-1, -2)))
            p = e / e.sum(-1, keepdims=True)
            out = p @ c
            ds = scale * p * (d @ c.swapaxes(-1, -2) - (d * out).sum(-1, keepdims=True))
            dk, dv = (
                x.reshape(len(x), -1, group, *x.shape[2:]).sum(2)
                for x in (ds.swapaxes(-1, -2) @ a, p.swapaxes(-1, -2) @ d)
            )
            return [x.astype(q.dtype) for x in (out, ds @ b, dk, dv)]

    report = audit(candidate, dtype=dtype, effort="quick")
    assert report.mistakes == ("softmax-overflow",), report


@pytest.mark.thorough
def test_a_jax_function_has_at_most_four_shapes_of_which_one_is_large(monkeypatch):
    monkeypatch.setitem(LIMITS, "default", LIMITS["default"]._replace(calls=0))  # no search for the smallest case
    seen = set()

    def candidate(q, k, v):
        seen.add((q.shape, k.shape, v.shape))
        if q.shape[1] != k.shape[1]:
            raise ValueError("no groups")
        return jax.nn.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v * (1.5 if q.shape[2] % 64 == 0 else 1.0)

    report = attngrad.jax.audit(candidate, effort="default")
    assert report.status == "wrong"
    assert len(seen) <= 4


@pytest.mark.parametrize(("effort", "seconds"), [("quick", 1.5), ("default", 10.0)])
def test_calls_at_the_sizes_of_blocks_take_a_bounded_time_in_all(effort, seconds, monkeypatch):
    clock, shapes = [0.0], []
    ticking = SimpleNamespace(**dict.fromkeys(("perf_counter", "process_time", "monotonic"), lambda: clock[0]))
    for module in (session, repeat):
        monkeypatch.setattr(module, "time", ticking)

    def slow(q, k, v, dout):
        clock[0] += 1.3e-6 * q.size * k.shape[2]  # as long as loops in Python over every score and feature
        shapes.append(q.shape[2])
        return right(q, k, v, dout)

    report = audit(slow, effort=effort)
    assert report.ok, report
    assert 64 in shapes
    assert 513 not in shapes
    assert len(report.untried) >= (1 if effort == "quick" else 9)
    assert clock[0] < seconds
