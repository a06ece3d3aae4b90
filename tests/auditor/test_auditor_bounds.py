"""How the auditor judges: the rule on the RMS, where it gives way and how far, and single entries."""

import numpy as np
import pytest

from attngrad.auditor import truth as judging
from attngrad.auditor.cases import cases
from attngrad.auditor.truth import Truth, rms_bound
from attngrad.testing import rms_error

NAMES = ("weights", "out", "dscores", "dq", "dk", "dv")
CANCELLED = {"one token", "one key", "equal logits", "huge logits", "one-hot attention", "one feature"}


def rule(t, name):
    return rms_bound(t.naive, name, t.value(name), t.eps)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_bound_is_the_rule_where_nothing_cancels(dtype):
    seen = 0
    for case in cases(dtype=dtype, effort="quick"):
        t = Truth(case, dtype)
        for name in NAMES:
            if case.name not in CANCELLED:
                assert t.bound(name) == rule(t, name), (case.name, name)
                seen += 1
    assert seen > 60


def test_twice_the_rule_is_wrong_and_half_of_it_is_not_wrong_by_the_rms():
    seen = 0
    for case in cases(effort="quick"):
        t = Truth(case, np.float64)
        for name in ("out", "dq", "dk", "dv"):
            exact = t.value(name)
            if case.name in CANCELLED or exact.size < 30:
                continue
            noise = np.random.default_rng(1).choice([-1.0, 1.0], exact.shape)  # of RMS 1
            half = t.judge(name, exact + 0.5 * t.bound(name) * noise)
            assert half.right or half.detail == "one entry stands out", (case.name, name)
            assert not t.judge(name, exact + 2.0 * t.bound(name) * noise).right, (case.name, name)
            seen += 1
    assert seen > 40


def cancelled():
    """dQ of one key: nothing, made of terms that are not."""
    case = next(c for c in cases(effort="quick") if c.name == "one key")
    t = Truth(case, np.float64)
    assert not np.any(t.value("dq"))
    return case, t


def test_rounding_of_terms_that_cancel_is_no_error():
    case, t = cancelled()
    dweights = t.value("dweights")
    off = np.full(dweights.shape, 0.5 * t.eps) * np.abs(dweights).max()  # dA and delta summed in two orders
    scale = 1 / np.sqrt(case.dims.d)
    dq = scale * off.astype(np.float64) @ case.arrays["k"]
    exact = [p for p in t.naive if not np.any(p.dq)]
    assert exact, "one of the straightforward computations is exact by luck"
    assert rms_error(dq, t.value("dq")) > rms_bound(exact, "dq", t.value("dq"), t.eps)
    assert t.judge("dq", dq).right


def test_an_error_beyond_the_rounding_of_the_terms_is_seen_where_they_cancel():
    case, t = cancelled()
    dq = 1e-12 * case.arrays["q"]
    assert not t.judge("dq", dq).right


def test_without_the_floor_a_right_result_would_be_called_wrong(monkeypatch):
    case, t = cancelled()
    dq = 1e-16 * case.arrays["q"]
    assert t.judge("dq", dq).right
    monkeypatch.setattr(judging.Truth, "_floor", lambda self, name, truth: 0.0)
    strict = Truth(case, np.float64)
    strict.naive = [p for p in strict.naive if not np.any(p.dq)]
    assert not strict.judge("dq", dq).right


@pytest.mark.parametrize(("dtype", "off"), [("float64", 1e-9), ("float32", 1e-3), ("float16", 0.5)])
def test_one_wrong_entry_among_thousands_is_seen(dtype, off):
    case = next(c for c in cases(dtype=dtype) if c.name == "longer rows")
    t = Truth(case, dtype)
    dq = t.value("dq").copy()
    where = np.unravel_index(np.argmax(np.abs(dq)), dq.shape)
    assert t.judge("dq", dq).right
    dq[where] *= 1 + off
    judged = t.judge("dq", dq)
    assert not judged.right
    assert judged.where == where


def test_one_small_entry_stands_out_where_the_rms_passes():
    case = next(c for c in cases() if c.name == "large logits")
    t = Truth(case, np.float64)
    dk = t.value("dk").copy()
    where = np.unravel_index(np.argmin(t.errors.dk), dk.shape)
    dk[where] += 0.5 * t.bound("dk")
    judged = t.judge("dk", dk)
    assert judged.rms < judged.bound
    assert (judged.right, judged.detail, judged.where) == (False, "one entry stands out", where)


def test_another_order_of_the_products_is_right_where_the_straightforward_one_is_so_by_luck(monkeypatch):
    case = next(c for c in cases(dtype="float32", seed=90) if c.name == "huge logits")
    t = Truth(case, np.float32)
    t.naive = [t.exact]
    out = max((p.out for p in t._orders), key=lambda out: rms_error(out, t.value("out")))
    assert rms_error(out, t.value("out")) > t.bound("out")
    judged = t.judge("out", out)
    assert judged.right
    assert judged.bound < 1e-3
    monkeypatch.setattr(judging, "_ORDERS", ())
    strict = Truth(case, np.float32)
    strict.naive = [strict.exact]
    assert not strict.judge("out", out).right
