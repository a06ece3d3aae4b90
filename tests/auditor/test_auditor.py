"""The auditor: its pipeline is the book, its cases provoke, and what it takes and returns is understood."""

import ml_dtypes
import numpy as np
import pytest

import attngrad
import planted
from attngrad import reference
from attngrad.auditor import audit
from attngrad.auditor.budget import LIMITS, Limits
from attngrad.auditor.cases import cases
from attngrad.auditor.pipeline import Pipeline
from attngrad.auditor.truth import Truth
from attngrad.core.binding import bind
from attngrad.core.operands import Tangents
from planted import right

# --- the pipeline is the book ----------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"causal": True, "softcap": 1.5},
    {"mask": True, "bias": True, "sinks": True},
    {"window": (2, 1), "dropout": 0.3, "seed": 4, "scale": 0.4},
    {"segments": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dtype", [np.longdouble, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_pipeline_without_mistakes_is_the_reference(options, dtype):
    eps = float(ml_dtypes.finfo(dtype).eps) if dtype is not np.longdouble else float(np.finfo(np.longdouble).eps)
    made = cases(options=options, effort="quick", dtype=np.float64 if dtype is np.longdouble else dtype)
    found = [case for case in made if not case.dims.large]
    assert found
    for case in found:
        p = Pipeline(case.given, dtype)
        arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
        given = {n: x.astype(dtype) if n in ("bias", "sinks") else x for n, x in case.options.items()}
        given.setdefault("scale", 1 / np.sqrt(np.longdouble(case.dims.d)))
        x, o, _ = bind("vjp", arrays["q"], arrays["k"], arrays["v"], given, kernels=False)
        f = reference.forward(x, o)
        b = reference.backward(x, o, f, arrays["dout"])
        t = Tangents(*(arrays.get(f"{n}_dot") for n in ("q", "k", "v", "bias", "sinks")))
        ft = reference.forward_tangent(x, o, f, t)
        bt = reference.backward_tangent(x, o, f, b, ft, t, arrays["dout"], arrays["dout_dot"])
        expected = {"scores": f.scores, "lse": f.lse, "weights": f.weights, "out": f.out, "dweights": b.dweights,
                    "delta": b.delta, "dscores": b.dscores, "dz": b.dz, "out_dot": ft.out_dot,
                    "dscores_dot": bt.dscores_dot}  # fmt: skip
        expected |= {f"d{n}": g for n, g in b.grads._asdict().items() if g is not None}
        expected |= {f"d{n}_dot": g for n, g in bt.grads_dot._asdict().items() if g is not None}
        for name, value in expected.items():
            mine, theirs = getattr(p, name).astype(np.longdouble), np.asarray(value).astype(np.longdouble)
            if name == "dweights":  # where nothing is seen, any value is as good
                mine, theirs = (np.where(p.visible, x, 0) for x in (mine, theirs))
            finite = np.isfinite(theirs)
            assert np.array_equal(np.isfinite(mine), finite), (case.name, name)
            size = max(float(np.max(np.abs(theirs[finite]), initial=0.0)), 1.0)
            # The scale is a float64 in the reference: its own rounding is all that may differ.
            assert np.all(np.abs(mine[finite] - theirs[finite]) <= max(64 * eps, 1e-14) * size), (case.name, name)


def test_the_layer_of_the_pipeline_is_attngrads_layer():
    layers = list(cases("layer", effort="quick", dtype=np.float64))
    assert layers
    for case in layers:
        x, n = case.arrays, case.dims
        layer = attngrad.MultiHeadAttention(n.model, n.hq, num_kv_heads=n.hk, d_head=n.d, dtype=np.float64)
        for name in ("w_q", "w_k", "w_v", "w_o"):
            layer.params[name][...] = x[name]
        y = layer(x["query"], x["key"], x["value"])
        inputs = layer.backward(np.ascontiguousarray(x["dy"]))
        p = Pipeline(case.given, np.longdouble)
        found = {"y": y, **dict(zip(("dquery", "dkey", "dvalue"), inputs, strict=True))}
        found |= {f"d{name}": g for name, g in layer.grads.items()}
        for name, value in found.items():
            assert Truth(case, np.float64).judge(name, value).right, (case.name, name)
            assert getattr(p, name).shape == value.shape


# --- cases -----------------------------------------------------------------------------------------------------------


def test_the_cases_have_what_provokes():
    made = list(cases())
    dims = [c.dims for c in made]
    assert any(n.t == 1 for n in dims)
    assert any(n.s == 1 < n.t for n in dims)
    assert any(n.t < n.s for n in dims)
    assert any(n.t > n.s for n in dims)
    assert any(n.hq > n.hk > 1 for n in dims)
    assert any(n.d != n.e for n in dims)
    assert any(n.b > 1 for n in dims)
    strides = [c.arrays["dout"].strides for c in made]
    assert any(0 in s for s in strides)
    assert any(list(s) != sorted(s, reverse=True) and 0 not in s for s in strides)
    assert any(c.arrays["v"].mean() > 5 for c in made)
    logits = [np.max(np.abs(Truth(c, np.float64).value("z"))) for c in made]
    assert max(logits) > 1000
    for c in made:
        assert not np.all(c.arrays["dout"] == c.arrays["dout"].flat[0])


def test_masks_that_are_made_have_rows_that_see_nothing():
    masked = [case for case in cases(options={"mask": True}, effort="quick") if case.dims.t > 1]
    assert masked
    for case in masked:
        blind = ~case.options["mask"].any(axis=-1)
        assert blind.any(), case.name


def test_an_array_among_the_options_sets_the_sizes():
    mask = np.tril(np.ones((6, 9), bool))
    report = audit(lambda q, k, v, dout, mask: attngrad.vjp(q, k, v, mask=mask)[1](dout), options={"mask": mask},
                   effort="quick")  # fmt: skip
    assert report.ok, report
    assert {(c.dims.t, c.dims.s) for c in cases(options={"mask": mask})} == {(6, 9)}


def test_the_seed_changes_the_values_and_nothing_else_does():
    a, b, c = (next(iter(cases(seed=s))).arrays["q"] for s in (0, 0, 1))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


# --- options and what a candidate takes ------------------------------------------------------------------------------


def test_without_options_none_is_passed():
    seen = []

    def candidate(q, k, v, dout, causal="untouched", **kwargs):
        seen.append((causal, kwargs))
        return right(q, k, v, dout)

    assert audit(candidate, effort="quick").ok
    assert set(map(str, seen)) == {"('untouched', {})"}


def test_options_are_passed_as_keywords_if_taken():
    def takes(q, k, v, dout, causal):
        return attngrad.vjp(q, k, v, causal=causal)[1](dout)

    def has_its_own(q, k, v, dout):
        return attngrad.vjp(q, k, v, causal=True)[1](dout)

    assert audit(takes, options={"causal": True}, effort="quick").ok
    assert audit(has_its_own, options={"causal": True}, effort="quick").ok


def nothing_but_qkv(q, k, v, dout):
    return right(q, k, v, dout)


def nothing_but_qkv_and_wrong(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    return out, 2 * dq, dk, dv


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": True, "softcap": 1.5}, {"dropout": 0.3}])
@pytest.mark.parametrize("candidate", [nothing_but_qkv, nothing_but_qkv_and_wrong])
def test_a_candidate_without_the_option_is_not_accused(candidate, options):
    report = audit(candidate, options=options, effort="quick")
    close = "right for" if candidate is nothing_but_qkv else "closer to"
    names = " and ".join(options)
    assert report.verdict == (
        f"NOT AUDITED: audit: candidate must take {names}; it takes (q, k, v, dout), and its results are {close} "
        f"attention without {names}. Give it the parameter, or leave the option out."
    )
    assert (report.exit_code, report.mistakes) == (2, ())


def test_a_mistake_is_named_where_the_option_is_built_in():
    def causal_and_wrong(q, k, v, dout):
        out, pullback = attngrad.vjp(q, k, v, causal=True)
        dq, dk, dv, _, _ = pullback(dout)
        return out, dk, dq, dv

    report = audit(causal_and_wrong, options={"causal": True}, effort="quick")
    assert report.mistakes == ("dq-dk-exchanged",)
    assert "It has no parameter causal" in str(report)


LAYER_OPTIONS = [
    {"causal": True, "window": (2, 0), "scale": 0.4},
    {"mask": True, "softcap": 2.0},
    {"bias": True, "sinks": True},
    {"dropout": 0.3, "seed": 4, "segments": True},
]


def through_the_layer(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, num_kv_heads=None, **options):
    dims = {"num_kv_heads": num_kv_heads, "d_head": w_q.shape[1] // num_heads}
    layer = attngrad.MultiHeadAttention(query.shape[-1], num_heads, dtype=query.dtype, **dims)
    for name, w in {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}.items():
        layer.params[name][...] = w
    y = layer(query, key, value, **options)
    inputs = layer.backward(np.ascontiguousarray(dy))
    results = {"y": y, **dict(zip(("dquery", "dkey", "dvalue"), inputs, strict=True))}
    at_attention = layer.attention_gradients
    results |= {f"d{name}": getattr(at_attention, name) for name in ("bias", "sinks") if name in options}
    return results | {f"d{name}": g for name, g in layer.grads.items()}


@pytest.mark.parametrize("options", LAYER_OPTIONS, ids="+".join)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_layer_takes_every_option(options, dtype, monkeypatch):
    report = audit(through_the_layer, level="layer", options=options, dtype=dtype, effort="quick")
    assert report.ok, report
    assert {f"d{x}" for x in ("bias", "sinks") if x in options} <= {s.name for s in report.stages}
    monkeypatch.setitem(LIMITS, "quick", Limits(0, 0.0, 0, 0.0))  # nothing need be named
    wrong = audit(planted.layer(), level="layer", options=options, dtype=dtype, effort="quick")
    assert wrong.status == "not audited", "an option that is not taken is missed"
    assert "audit: candidate must take " in wrong.verdict


def test_a_layer_with_groups_of_heads_is_audited_where_it_asks_for_their_number():
    report = audit(through_the_layer, level="layer", effort="quick")
    assert report.ok, report
    assert not report.findings

    def averaged(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, num_kv_heads):
        right = through_the_layer(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, num_kv_heads)
        group = num_heads // num_kv_heads
        return right | {name: right[name] / group for name in ("dw_k", "dw_v", "dkey", "dvalue")}

    assert audit(averaged, level="layer", effort="quick").mistakes == ("group-averaged",)


@pytest.mark.parametrize(
    ("returns", "names"),
    [
        (lambda out, g, lse: (out, *g[:3]), ["out", "dq", "dk", "dv"]),
        (lambda out, g, lse: g[:3], ["dq", "dk", "dv"]),
        (lambda out, g, lse: g, ["dq", "dk", "dv"]),
        (lambda out, g, lse: (out, g), ["out", "dq", "dk", "dv"]),
        (lambda out, g, lse: {"lse": lse, "dv": g.v}, ["lse", "dv"]),
        (lambda out, g, lse: {"dv": g.v, "out": out}, ["out", "dv"]),
    ],
)
def test_every_way_to_return_is_understood(returns, names):
    def candidate(q, k, v, dout):
        (out, lse), pullback = attngrad.vjp(q, k, v, return_lse=True)
        return returns(out, pullback(dout), lse)

    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert [s.name for s in report.stages] == names


def test_a_forward_alone_is_audited():
    assert audit(attngrad.attention, effort="quick").ok
    report = audit(lambda q, k, v: attngrad.attention(q, k, v, scale=1.0), effort="quick")
    assert report.mistakes == ("scale-missing",)


def test_jvp_and_hvp_candidates_are_audited():
    assert [s.name for s in audit(lambda q, k, v, q_dot, k_dot, v_dot: attngrad.jvp((q, k, v), (q_dot, k_dot, v_dot)),
                                  effort="quick").stages] == ["out", "out_dot"]  # fmt: skip

    def hvp(primals, tangents, dout, dout_dot):
        return attngrad.hvp(primals, tangents, dout, dout_dot)

    report = audit(hvp, effort="quick")
    assert report.ok, report
    assert [s.name for s in report.stages] == ["dq", "dk", "dv", "dq_dot", "dk_dot", "dv_dot"]


def test_the_first_stage_that_diverges_is_named():
    names = ("scores", "weights", "out", "dweights", "dscores", "dq", "dk", "dv")
    report = audit(planted.attention("mean", names=names), effort="quick")
    assert report.first == "dscores"
    assert [s.name for s in report.stages if s.ok] == ["scores", "weights", "out", "dweights", "dv"]
    assert audit(planted.attention("scale missing", names=names), effort="quick").first == "scores"


def test_scores_may_hold_any_large_negative_number_where_nothing_is_seen():
    def candidate(q, k, v, dout, causal):
        scores = planted.attention(names=("scores",))(q, k, v, dout, causal=causal)["scores"]
        return {"scores": np.where(np.isneginf(scores), -1e9, scores)}

    assert audit(candidate, options={"causal": True}, effort="quick").ok
