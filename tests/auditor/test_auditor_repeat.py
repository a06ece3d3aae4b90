"""What comes and goes, and memory that nobody wrote, are found; how often a case was called is told."""

from itertools import product

import numpy as np
import pytest
import torch

import attngrad.torch
from attngrad.auditor import audit
from attngrad.auditor.repeat import REPEATS, Repeated, poisoned
from attngrad.core.dtypes import TABLE
from planted import right
from tiers import first, only

EFFORTS = ["quick", "default"]


def racing(every, factor=1.1):
    """Wrong in one call of ``every``."""
    calls = 0

    def candidate(q, k, v, dout):
        nonlocal calls
        calls += 1
        out, dq, dk, dv = right(q, k, v, dout)
        if calls % every == 0:
            dq[0, 0, 0] *= factor
        return out, dq, dk, dv

    return candidate


@pytest.mark.parametrize(("every", "effort"), only([(7, "quick"), (20, "default")], product((2, 7, 20), EFFORTS)))
def test_a_race_is_a_verdict_of_its_own(every, effort):
    report = audit(racing(every), effort=effort)
    assert report.mistakes == ("not-deterministic",)
    assert report.exit_code == 1
    assert report.verdict.startswith("NOT DETERMINISTIC: ")
    assert f" of {REPEATS[effort]} calls with the same inputs differ in dQ" in report.verdict


@pytest.mark.parametrize("seed", first(1, range(6)))
def test_a_random_fault_in_one_call_of_twenty_is_found_by_default(seed):
    rng = np.random.default_rng(seed)

    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq, dk, dv * (1.01 if rng.random() < 0.05 else 1.0)

    assert audit(candidate).mistakes == ("not-deterministic",)


def test_another_order_of_sums_is_a_note():
    calls = 0

    def candidate(q, k, v, dout):
        nonlocal calls
        calls += 1
        out, dq, dk, dv = right(q, k, v, dout)
        return out, np.nextafter(dq, np.inf) if calls % 3 == 0 else dq, dk, dv

    report = audit(candidate, effort="quick")
    assert report.ok, report
    note = next(f for f in report.findings if f.kind == "not-deterministic")
    assert not note.fault
    assert "within rounding" in note.text


def test_a_mistake_made_in_every_call_is_no_race():
    report = audit(lambda q, k, v, dout: right(q, k, v, 2 * dout), effort="quick")
    assert "not-deterministic" not in report.mistakes


def test_the_rate_that_would_have_shown_is_told():
    report = audit(right)
    assert (
        "64 calls with the same inputs gave the same bits: a fault in 1 call of 21 would have shown" in report.tried[-1]
    )
    assert report.tried[-1] in " ".join(str(report).split())
    for calls in (16, 64):  # missed with a probability of 5 %
        one_in = int(Repeated("", calls).told.partition("1 call of ")[2].split()[0])
        assert (1 - 1 / one_in) ** calls <= 0.05 < (1 - 1 / (one_in + 1)) ** calls


def test_few_calls_claim_nothing_of_faults_that_come_and_go():
    assert Repeated("", 1).told == "1 call: so few calls say nothing of faults that come and go"
    for calls in (2, 4, 9):
        told = Repeated("", calls).told
        assert told.startswith(f"{calls} calls with the same inputs gave the same bits: so few calls say nothing")
        assert "certainty" not in told


def unwritten(empty):
    """dQ of the last, partial tile is never written."""

    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        made, whole = empty(dq.shape), q.shape[2] // 4 * 4
        made[:, :, :whole] = dq[:, :, :whole]
        return out, made, dk, dv

    return candidate


@pytest.mark.parametrize("effort", first(1, EFFORTS))
def test_memory_that_was_never_written_is_named_though_it_may_hold_anything(effort):
    report = audit(unwritten(lambda shape: np.empty(shape)), effort=effort)
    assert report.mistakes == ("uninitialised-tail",), report
    assert [s.name for s in report.stages if not s.ok] == ["dq"]
    assert "of dQ, case" in report.explanations[0][0].note


@pytest.mark.parametrize("dtype", [d.numpy for d in TABLE], ids=str)
def test_a_nan_that_signals_is_a_wrong_number_like_any_other(dtype):
    def candidate(q, k, v, dout):
        out, pullback = attngrad.vjp(q, k, v)
        dq, dk, dv = (x.copy() for x in pullback(dout)[:3])
        bits = dq.view(f"u{dq.itemsize}")
        infinity = np.array(np.inf, dq.dtype).view(bits.dtype)
        bits[..., -1, 0] = infinity + 1  # the first bit of the fraction, which says "quiet", is not set
        return out, dq, dk, dv

    assert audit(candidate, dtype=dtype, effort="quick").status == "wrong"


def test_memory_that_torch_never_wrote_is_named():
    report = audit(unwritten(lambda shape: torch.empty(shape, dtype=torch.float64).numpy()), effort="quick")
    assert report.mistakes == ("uninitialised-tail",), report


def test_memory_that_is_written_before_it_is_read_is_right():
    def candidate(q, k, v, dout):
        results = right(q, k, v, dout)
        made = [np.empty_like(x) for x in results]
        for to, x in zip(made, results, strict=True):
            to[...] = x
        return made

    assert audit(candidate, effort="quick").ok


def test_poison_is_gone_afterwards():
    before = np.empty, np.empty_like, torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert np.isnan(np.empty(3)).all()
        assert torch.isnan(torch.empty(3)).all()
        assert np.empty(3, int).shape == (3,)
    assert (np.empty, np.empty_like, torch.are_deterministic_algorithms_enabled()) == before


def test_a_torch_function_that_comes_and_goes_is_told():
    calls = 0

    def candidate(q, k, v):
        nonlocal calls
        calls += 1
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        return (weights * (1.5 if calls % 9 == 0 else 1.0)) @ v

    assert attngrad.torch.audit(candidate, effort="quick").mistakes == ("not-deterministic",)
