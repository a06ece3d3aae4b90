"""Options that a candidate takes by name are tried, under every convention; the report says what was not."""

import numpy as np
import pytest
import torch

import attngrad.torch
from attngrad.auditor import audit
from planted import attention, right
from tiers import first


def masked(q, k, v, dout, seen=None, add=0.0, safe=True, scale=None):
    """Attention where ``seen``, with something added to the scores; ``safe`` where nothing is seen."""
    if q.shape[1] != k.shape[1]:
        raise ValueError("no groups")
    scale = q.dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scale * (q @ k.swapaxes(-1, -2)) + add
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        e = np.exp(scores - (np.where(np.isneginf(top), 0, top) if safe else top))
        total = e.sum(-1, keepdims=True)
        a = e / (np.where(total == 0, 1, total) if safe else total)
    da = dout @ v.swapaxes(-1, -2)
    ds = scale * a * (da - (a * da).sum(-1, keepdims=True))
    return [x.astype(q.dtype) for x in (a @ v, ds @ k, ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ dout)]


def may_attend(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, mask)


def is_masked(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, None if mask is None else ~mask)


def additive(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, add=0.0 if mask is None else mask)


def top_left(q, k, v, dout, causal=False):
    return masked(q, k, v, dout, np.tri(q.shape[2], k.shape[2], dtype=bool) if causal else None)


def bottom_right(q, k, v, dout, causal=False):
    shift = k.shape[2] - q.shape[2]
    return masked(q, k, v, dout, np.tri(q.shape[2], k.shape[2], shift, dtype=bool) if causal else None)


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (may_attend, "mask (True = may attend, with a query that sees nothing)"),
        (is_masked, "mask (True = masked, with a query that sees nothing)"),
        (additive, "mask (additive, 0 or -inf)"),
        (top_left, "causal (top-left, as PyTorch's is_causal)"),
        (bottom_right, "causal (bottom-right)"),
    ],
)
@pytest.mark.parametrize("dtype", first(1, ["float64", "float32"]))
def test_a_candidate_is_right_under_its_own_convention(candidate, told, dtype):
    report = audit(candidate, dtype=dtype, effort="quick")
    assert report.ok, report
    assert told in report.tried
    assert told in " ".join(str(report).split())


def test_key_heads_that_are_tiled_are_a_convention_and_judged_by_it():
    report = audit(attention("tiled heads"), effort="quick")
    assert report.ok, report
    told = "Query head h reads key head h % Hk: audited by that convention"
    assert told in next(f.text for f in report.findings if f.kind == "convention")
    for options in ({"mask": True}, {"causal": True}, {"bias": True}):
        assert audit(attention("tiled heads"), options=options, effort="quick").ok
    report = audit(attention("tiled heads", "scale missing"), effort="quick")
    assert report.mistakes == ("scale-missing",), report
    assert audit(attention("tiled groups"), effort="quick").mistakes == ("group-interleaved",)


def test_a_mask_of_another_seed_is_not_blamed_on_the_backward():
    def ignores(q, k, v, dout, dropout=0.0, seed=0):
        return attention()(q, k, v, dout, dropout=dropout, seed=77)

    report = audit(ignores, options={"dropout": 0.3, "seed": 3}, effort="quick")
    assert (report.status, report.first, report.mistakes) == ("wrong", "out", ()), report


def zero_over_zero(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, mask, safe=False)


def large_negative(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, add=0.0 if mask is None else np.where(mask, 0, -1e9))


def hidden_is_true(q, k, v, dout, mask=None):
    return masked(q, k, v, dout, add=0.0 if mask is None else -1e9 * mask)


@pytest.mark.parametrize("effort", first(1, ["quick", "default"]))
@pytest.mark.parametrize("candidate", [zero_over_zero, large_negative, hidden_is_true])
def test_a_query_that_sees_nothing_is_tried_though_no_option_was_given(candidate, effort):
    report = audit(candidate, effort=effort)
    assert report.mistakes == ("masked-row-not-zero",), report
    names = {"candidate": candidate}
    exec(report.smallest, names)  # noqa: S102
    assert "mask" in names


def test_mistakes_with_an_option_that_nobody_asked_for_are_named():
    def ignores(q, k, v, dout, mask=None):
        return masked(q, k, v, dout)

    def one_more(q, k, v, dout, causal=False):
        shift = k.shape[2] - q.shape[2] + 1
        return masked(q, k, v, dout, np.tri(q.shape[2], k.shape[2], shift, dtype=bool) if causal else None)

    assert audit(ignores, effort="quick").mistakes == ("mask-ignored",)
    assert audit(one_more, effort="quick").mistakes == ("causal-off-by-one",)


def test_another_meaning_of_an_option_is_no_fault():
    def temperature(q, k, v, dout, scale=None):
        return masked(q, k, v, dout, scale=None if scale is None else 1 / scale)

    def padding(q, k, v, dout, mask=None):
        return masked(q, k, v, dout, None if mask is None else mask[:, None, None, :])

    for candidate, name in ((temperature, "scale"), (padding, "mask")):
        report = audit(candidate, effort="quick")
        assert report.ok, report
        assert any(text.startswith(f"{name} (") for text in report.untried), report.untried


def test_gradients_that_are_wrong_where_the_output_is_right_under_a_convention_are_a_fault():
    def candidate(q, k, v, dout, mask=None):
        out, dq, dk, dv = masked(q, k, v, dout, None if mask is None else ~mask)
        return out, dq if mask is None else dq * dq, dk, dv  # which no known mistake explains

    report = audit(candidate, effort="quick")
    assert [s.name for s in report.stages if not s.ok] == ["dq"], report
    assert report.mistakes == ()
    assert "mask (True = masked)" in report.tried


def test_dropout_of_its_own_is_not_tried_and_said_so():
    def draws(q, k, v, dout, dropout=0.0, seed=None):
        out, dq, dk, dv = right(q, k, v, dout)
        return out * (np.random.default_rng(seed).random() if dropout else 1.0), dq, dk, dv

    report = audit(draws, effort="quick")
    assert report.ok, report
    assert report.untried == ("dropout (it draws a mask of its own)",)

    def unseeded(q, k, v, dout, dropout=0.0):
        return right(q, k, v, dout)

    assert audit(unseeded, effort="quick").untried == ("dropout (it draws a mask of its own)",)


def test_a_seed_that_is_taken_and_not_used_is_a_fault():
    rng = np.random.default_rng(0)

    def ignores(q, k, v, dout, dropout=0.0, seed=None):
        out, dq, dk, dv = right(q, k, v, dout)
        return out * (rng.random() if dropout else 1.0), dq, dk, dv

    report = audit(ignores, effort="quick")
    assert report.mistakes == ("not-deterministic",), report
    assert "15 of 16 calls with the same inputs differ in O" in report.verdict
    assert "(case 'with dropout and a seed, 5 queries, 5 keys')" in report.verdict


def test_every_option_of_a_right_candidate_is_tried_and_the_rest_is_told():
    report = audit(attention(), effort="quick")
    assert report.ok, report
    told = " ".join(report.tried)
    names = ("causal (bottom-right)", "window", "mask", "scale", "softcap", "dropout (by attngrad")
    assert all(name in told for name in names)
    assert report.untried == ("bias (only where it is asked for)",)
    assert report.verdict.endswith("within rounding. bias was not tried: options={'bias': True}.")
    asked = audit(attention(), options={"bias": True}, effort="quick")
    assert asked.ok
    assert asked.verdict.endswith("within rounding.")


def test_a_softcap_that_nobody_asked_for_is_tried():
    def candidate(q, k, v, dout, softcap=0.0):
        found = attention()(q, k, v, dout, softcap=softcap or None)
        return found | {"dq": found["dq"] * (1.01 if softcap else 1.0)}

    report = audit(candidate, effort="quick")
    assert [s.name for s in report.stages if not s.ok] == ["dq"], report
    assert "softcap" in report.tried


def test_where_options_are_given_no_other_is_tried():
    report = audit(attention(), options={"causal": True}, effort="quick")
    assert report.ok
    assert report.untried == ("window, mask, bias, softcap, scale, dropout (options were given)",)
    assert audit(large_negative, options={}, effort="quick").ok


def test_a_torch_function_is_tried_with_its_mask():
    def function(q, k, v, mask=None):
        if q.shape[1] != k.shape[1]:
            raise ValueError("no groups")
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask, -1e9)
        return torch.softmax(scores, -1) @ v

    report = attngrad.torch.audit(function, effort="quick")
    assert report.mistakes == ("masked-row-not-zero",), report
    assert "mask (True = masked, with a query that sees nothing)" in report.tried


def test_options_are_tried_beside_what_is_on_by_default():
    def candidate(q, k, v, dout, causal=True, window=None):
        out, pullback = attngrad.vjp(q, k, v, causal=causal, window=window)
        return (out, *pullback(dout)[:3])

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert "window ((left, right))" in report.tried
