"""Every mistake, planted in a correct implementation, is found and named; pairs too."""

import random

import numpy as np
import pytest

import planted
from attngrad.auditor import audit, run
from attngrad.auditor.mistakes import catalogue, find

DTYPES = ["float64", "float32"]
# With the default scale these are the same number: scale^2 = 1/D.
SAME = {"scale-twice": {"scale-twice", "scale-by-d"}, "scale-by-d": {"scale-twice", "scale-by-d"}}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Searching ends when it is done, not by the clock: these tests must not depend on the machine."""
    monkeypatch.setattr(run, "_SECONDS", dict.fromkeys(("quick", "default", "full"), (1e9, 0.0, 0)))


def effort_of(*bugs):
    return "default" if "overflow" in bugs else "quick"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bug", planted.PLANTS)
def test_a_planted_mistake_is_named(bug, dtype):
    candidate, options, (expected,) = planted.plant(bug)
    report = audit(candidate, options=options, dtype=dtype, effort=effort_of(bug))
    assert report.status == "wrong"
    allowed = SAME.get(expected, {expected}) if not (options or {}).get("scale") else {expected}
    assert expected in report.mistakes, report
    assert set(report.mistakes) <= allowed, report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bug", planted.LAYER_PLANTS)
def test_a_mistake_planted_in_a_layer_is_named(bug, dtype):
    report = audit(planted.layer(bug), level="layer", dtype=dtype, effort="quick")
    assert report.mistakes == (planted.LAYER_PLANTS[bug],), report


def test_every_mistake_of_the_catalogue_is_planted_somewhere():
    planted_ids = {p[0] for p in planted.PLANTS.values()} | set(planted.LAYER_PLANTS.values())
    elsewhere = {m.id for m in catalogue() if "tangents" in m.needs} | {"sinks-gradient-sign"}
    assert {m.id for m in catalogue()} == planted_ids | elsewhere


@pytest.mark.parametrize("options", [None, *({k: v} for k, v in [
    ("causal", True), ("mask", True), ("window", (2, 1)), ("dropout", 0.3), ("softcap", 2.0), ("bias", True),
    ("scale", 0.3)])], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_implementation_without_a_plant_is_right(options, dtype):
    report = audit(planted.attention(), options=options, dtype=dtype)
    assert report.ok, report
    assert report.mistakes == ()


def test_the_layer_without_a_plant_is_right():
    report = audit(planted.layer(), level="layer")
    assert report.ok, report


def named(pair):
    candidate, options, ids = planted.plant(*pair)
    report = audit(candidate, options=options, effort=effort_of(*pair))
    return report.status == "wrong", ids <= set(report.mistakes)


def test_pairs_of_mistakes_are_named_a_sample():
    pairs = planted.pairs()
    random.Random(4).shuffle(pairs)  # noqa: S311
    found = [named(pair) for pair in pairs[:12]]
    assert all(detected for detected, _ in found)
    assert np.mean([whole for _, whole in found]) >= 0.8


@pytest.mark.full
def test_pairs_of_mistakes_are_all_detected_and_four_of_five_named():
    pairs = planted.pairs()
    assert len(pairs) > 1000
    found = [named(pair) for pair in pairs]
    assert all(detected for detected, _ in found)
    assert np.mean([whole for _, whole in found]) >= 0.8


def test_three_mistakes_in_results_that_follow_each_other_are_named():
    report = audit(planted.layer("mean", "dv", "update first"), level="layer", effort="quick")
    assert report.mistakes == ("mean-for-row-sum", "dv-not-transposed", "weights-updated-first"), report


def test_mistakes_that_are_numerically_the_same_are_named_together():
    report = audit(planted.attention("scale twice backward"), effort="quick")
    assert report.mistakes == ("scale-twice", "scale-by-d")
    assert "Numerically the same" in str(report)


def tangent_candidate(bug):
    """JVP and HVP from the formulas, with a term left out."""

    def candidate(q, k, v, dout, q_dot, k_dot, v_dot, dout_dot):
        t = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
        n = q.shape[1] // k.shape[1]
        many = lambda x: np.repeat(x, n, axis=1)  # noqa: E731
        few = lambda x: x.reshape(x.shape[0], -1, n, *x.shape[2:]).sum(axis=2)  # noqa: E731
        k, v, k_dot, v_dot = many(k), many(v), many(k_dot), many(v_dot)
        scale = q.dtype.type(1 / np.sqrt(q.shape[-1]))
        z = scale * (q @ t(k))
        e = np.exp(z - z.max(-1, keepdims=True))
        a = e / e.sum(-1, keepdims=True)
        out = a @ v
        z_dot = q_dot @ t(k) + (0 if bug == "tangent-term-missing" else q @ t(k_dot))
        z_dot = z_dot * (1 if bug == "tangent-scale-missing" else scale)
        a_dot = a * (z_dot - (0 if bug == "tangent-row-term-missing" else np.sum(a * z_dot, -1, keepdims=True)))
        out_dot = a_dot @ v + a @ v_dot
        da, delta = dout @ t(v), np.sum(dout * out, -1, keepdims=True)
        da_dot = dout_dot @ t(v) + dout @ t(v_dot)
        delta_dot = np.sum(dout_dot * out + dout * out_dot, -1, keepdims=True)
        ds = a * (da - delta)
        ds_dot = a_dot * (da - delta)
        if bug != "second-order-term-missing":
            ds_dot = ds_dot + a * (da_dot - delta_dot)
        return {
            "out_dot": out_dot,
            "dq_dot": scale * (ds_dot @ k + ds @ k_dot),
            "dk_dot": few(scale * (t(ds_dot) @ q + t(ds) @ q_dot)),
            "dv_dot": few(t(a_dot) @ dout + t(a) @ dout_dot),
        }

    return candidate


@pytest.mark.parametrize(
    "bug",
    ["tangent-row-term-missing", "tangent-term-missing", "tangent-scale-missing", "second-order-term-missing"],
)
def test_a_mistake_in_forward_mode_or_second_order_is_named(bug):
    report = audit(tangent_candidate(bug), effort="quick")
    assert report.mistakes == (bug,), report


def test_forward_mode_and_second_order_without_a_mistake_are_right():
    report = audit(tangent_candidate(""))
    assert report.ok, report
    assert [s.name for s in report.stages] == ["out_dot", "dq_dot", "dk_dot", "dv_dot"]


def test_a_mistake_with_sinks_and_a_softcap_in_second_order_are_named():
    import attngrad

    def sinks(q, k, v, dout, sinks):
        grads = attngrad.vjp(q, k, v, sinks=sinks)[1](dout)
        return {"dq": grads.q, "dsinks": -grads.sinks}

    assert audit(sinks, options={"sinks": True}, effort="quick").mistakes == ("sinks-gradient-sign",)

    def hvp(q, k, v, dout, q_dot, k_dot, v_dot, dout_dot, softcap):
        # Of the capped scores' second derivative nothing is left if cap is linearised at each point: dS_dot alone.
        x = (q, k, v), (q_dot, k_dot, v_dot)
        right = attngrad.hvp(*x, dout, dout_dot, softcap=softcap)[1]
        h = 1e-30
        n = q.shape[1] // k.shape[1]
        kk = np.repeat(k, n, axis=1)
        z = q @ kk.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        z_dot = (q_dot @ kk.swapaxes(-1, -2) + q @ np.repeat(k_dot, n, axis=1).swapaxes(-1, -2)) / np.sqrt(q.shape[-1])
        slope_dot = np.imag(1 - np.tanh((z + 1j * h * z_dot) / softcap) ** 2) / h
        a, out = attngrad.attention_weights(q, k, softcap=softcap), attngrad.attention(q, k, v, softcap=softcap)
        da = dout @ np.repeat(v, n, axis=1).swapaxes(-1, -2)
        ds = a * (da - np.sum(dout * out, axis=-1, keepdims=True))
        return {"dq_dot": right.q - (ds * slope_dot) @ kk / np.sqrt(q.shape[-1])}

    report = audit(hvp, options={"softcap": 1.5}, effort="quick")
    assert report.mistakes == ("softcap-second-derivative-missing",), report


def test_every_entry_explains_itself():
    ids = [m.id for m in catalogue()]
    assert len(ids) == len(set(ids))
    for m in catalogue():
        assert m.title
        assert m.formula != m.correct
        assert len(m.why) > 10
        assert m.fix.endswith((".", ")"))
    with pytest.raises(KeyError, match="no-such-mistake"):
        find("no-such-mistake")
