"""The auditor: what it takes, what it says, and how it stands candidates that misbehave."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

import attngrad
import planted
from attngrad import reference
from attngrad._options import Tangents, bind
from attngrad.auditor import AuditReport, audit
from attngrad.auditor.cases import cases
from attngrad.auditor.pages import pages
from attngrad.auditor.pipeline import Pipeline
from attngrad.auditor.truth import Truth
from attngrad.testing import assert_attention_gradients
from attngrad.testing import cases as provoking


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Searching ends when it is done, not by the clock: these tests must not depend on the machine."""
    seconds = dict.fromkeys(("quick", "default", "full"), (1e9, 1e9, 60))
    monkeypatch.setattr("attngrad.auditor.run._SECONDS", seconds)


def right(q, k, v, dout):
    out, pullback = attngrad.vjp(q, k, v)
    return (out, *pullback(dout)[:3])


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
    for case in cases(options=options, effort="quick", dtype=np.float64 if dtype is np.longdouble else dtype):
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
    for case in cases("layer", effort="quick", dtype=np.float64):
        x, n = case.arrays, case.dims
        layer = attngrad.MultiHeadAttention(n.model, n.hq, d_head=n.d, dtype=np.float64)
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
    for case in cases(options={"mask": True}, effort="quick"):
        blind = ~case.options["mask"].any(axis=-1)
        assert blind.any() or case.dims.t == 1


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
    assert not audit(right, options={"causal": True}, effort="quick").ok


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


# --- what is not supported -------------------------------------------------------------------------------------------


def plain_only(q, k, v, dout):
    if q.shape[1] != k.shape[1]:
        raise ValueError("heads must agree")
    if q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3]:
        raise ValueError("square only")
    return right(q, k, v, dout)


def test_what_is_not_supported_is_a_note():
    report = audit(plain_only)
    assert report.ok, report
    assert {f.name for f in report.findings} == {"gqa", "cross", "widths"}
    assert not any(f.fault for f in report.findings)
    assert "does not support" in str(report)


def test_what_is_claimed_and_not_supported_is_a_fault():
    report = audit(plain_only, supports=("gqa",), effort="quick")
    assert not report.ok
    assert report.exit_code == 2
    assert "claims to support gqa" in str(report)


def test_shapes_that_broadcasting_lets_through_are_no_fault_where_groups_are_not_supported():
    def candidate(q, k, v, dout):
        t = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
        z = q @ t(k) / np.sqrt(q.shape[-1])
        e = np.exp(z - z.max(-1, keepdims=True))
        a = e / e.sum(-1, keepdims=True)
        da = dout @ t(v)
        ds = a * (da - np.sum(a * da, -1, keepdims=True)) / np.sqrt(q.shape[-1])
        return a @ v, ds @ k, t(ds) @ q, t(a) @ dout

    report = audit(candidate)
    assert report.ok, report
    assert [f.name for f in report.findings] == ["gqa"]


# --- candidates that misbehave ---------------------------------------------------------------------------------------


def crashes(q, k, v, dout):
    return undefined_name  # noqa: F821


def exits(q, k, v, dout):
    raise SystemExit(3)


def loops(q, k, v, dout):
    while True:
        pass


def nothing(q, k, v, dout):
    return None


def none_inside(q, k, v, dout):
    return {"dq": None, "dv": right(q, k, v, dout)[3]}


def wrong_shape(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    return out, dq[..., 0], dk, dv


def not_numbers(q, k, v, dout):
    return "out", "dq", "dk", "dv"


def nan(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    dq[0, 0, 0, 0] = np.nan
    return out, dq, dk, dv


def mutates(q, k, v, dout):
    results = right(q, k, v, dout)
    k += 1
    return results


def five(q, k, v, dout):
    return (q,) * 5


@pytest.mark.parametrize(
    ("candidate", "kind", "code", "words"),
    [
        (crashes, "crash", 2, "NameError: name 'undefined_name'"),
        (exits, "exit", 2, "sys.exit"),
        (loops, "timeout", 2, "did not return within 0.3 s"),
        (nothing, "strange", 2, "returned None"),
        (none_inside, "strange", 1, "dq is None"),
        (wrong_shape, "wrong", 1, "should be (1, 1, 1, 3)"),
        (not_numbers, "strange", 2, "no array of real numbers"),
        (nan, "wrong", 1, "nan at [0, 0, 0, 0]"),
        (mutates, "mutates", 1, "changes its input k in place"),
        (five, "strange", 2, "returned 5 arrays"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_candidate_that_misbehaves_is_a_clear_finding(candidate, kind, code, words):
    report = audit(candidate, effort="quick", time_limit=0.3 if candidate is loops else 10.0)
    assert not report.ok
    assert report.exit_code == code
    assert kind in {f.kind for f in report.findings if f.fault}
    assert words in str(report), report


def test_a_traceback_is_the_candidates_own():
    report = audit(crashes, effort="quick")
    assert "undefined_name" in report.traceback
    assert "attngrad/auditor" not in report.traceback.replace("\\", "/")


def test_printing_is_caught_and_noted(capsys):
    def candidate(q, k, v, dout):
        print("hello")
        return right(q, k, v, dout)

    report = audit(candidate, effort="quick")
    assert capsys.readouterr().out == ""
    assert report.ok
    assert [f.kind for f in report.findings] == ["printed"]


def test_an_unknown_result_is_noted():
    report = audit(lambda q, k, v, dout: {"dv": right(q, k, v, dout)[3], "attn": q}, effort="quick")
    assert report.ok
    assert "'attn'" in report.findings[0].text


@pytest.mark.parametrize(
    ("error", "words", "keywords"),
    [
        (TypeError, "candidate must be callable; got 3", {"candidate": 3}),
        (ValueError, "level must be", {"level": "head"}),
        (ValueError, "effort must be one of quick", {"effort": "huge"}),
        (ValueError, "supports must have only gqa", {"supports": ("everything",)}),
        (ValueError, "dtype must be float64", {"dtype": np.int32}),
        (ValueError, "options must have only the names scale", {"options": {"is_causal": True}}),
        (TypeError, "options must be a mapping", {"options": True}),
        (ValueError, "seed must be", {"seed": -1}),
    ],
)
def test_wrong_arguments_are_told(error, words, keywords):
    with pytest.raises(error, match=words):
        audit(**{"candidate": right, **keywords})


def test_a_candidate_that_cannot_be_called_is_told():
    report = audit(lambda a, b: a, effort="quick")
    assert report.exit_code == 2
    assert "must take (q, k, v, dout)" in str(report)


# --- layers as objects -----------------------------------------------------------------------------------------------


class Tutorial:
    """In the style of many tutorials, with three mistakes, and a fourth that stops it."""

    def __init__(self, d_model, num_heads):
        self.d_model, self.num_heads, self.depth = d_model, num_heads, d_model // num_heads
        self.WQ, self.WK, self.WV = np.random.default_rng(0).standard_normal((3, d_model, d_model))
        self.dWQ = self.dWK = self.dWV = self.A = None

    def _heads(self, x):
        return x.reshape(len(x), -1, self.num_heads, self.depth).transpose(0, 2, 1, 3)

    def _flat(self, x):
        return x.transpose(0, 2, 1, 3).reshape(len(x), -1, self.d_model)

    def forward(self, query, key, value):
        self.Q, self.K, self.V = (self._heads(x @ w) for x, w in ((query, self.WQ), (key, self.WK), (value, self.WV)))
        s = self.Q @ self.K.transpose(0, 1, 3, 2) / np.sqrt(self.depth)
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        self.A = e / e.sum(axis=-1, keepdims=True)
        return self._flat(self.A @ self.V)

    def weight_gradient(self, x, dx):
        return np.dot(x.T, dx)

    def backward(self, dO, query, key, value, learning_rate):
        dout = self._heads(dO)
        dv = self._flat(self.A.transpose(0, 1, 2, 3) @ dout)
        ds = (dout @ self.V.transpose(0, 1, 3, 2)) * self.A
        ds = ds - np.mean(ds, axis=-1, keepdims=True)
        dq = self._flat(ds @ self.K / np.sqrt(self.depth))
        dk = self._flat(ds.transpose(0, 1, 3, 2) @ self.Q / np.sqrt(self.depth))
        self.dWQ, self.dWK, self.dWV = (self.weight_gradient(*p) for p in ((query, dq), (key, dk), (value, dv)))
        self.WQ -= learning_rate * self.dWQ
        self.WK -= learning_rate * self.dWK
        self.WV -= learning_rate * self.dWV
        return dq @ self.WQ.T, dk @ self.WK.T, dv @ self.WV.T


class Mended(Tutorial):
    """The one mistake mended that stops it."""

    def weight_gradient(self, x, dx):
        return np.einsum("bti,btj->ij", x, dx)


class Misspelt(Tutorial):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.dWQ = np.zeros_like(self.Wq)


def test_a_class_with_forward_and_backward_is_audited():
    report = audit(Mended, level="layer")
    assert set(report.mistakes) == {"mean-for-row-sum", "dv-not-transposed", "weights-updated-first"}, report
    assert [s.name for s in report.stages if s.ok] == ["q", "k", "v", "weights", "y"]


def test_an_object_is_audited_at_its_own_sizes():
    report = audit(Mended(12, 3), level="layer", effort="quick")
    assert {"mean-for-row-sum", "dv-not-transposed"} <= set(report.mistakes), report


def test_a_class_that_crashes_is_told_where_and_what_ran_is_audited():
    report = audit(Tutorial, level="layer", effort="quick")
    assert report.exit_code == 2
    assert "np.dot(x.T, dx)" in report.traceback
    assert [s.name for s in report.stages] == ["q", "k", "v", "weights", "y"]
    assert all(s.ok for s in report.stages)
    report = audit(Misspelt, level="layer", effort="quick")
    assert report.exit_code == 2
    assert "'Misspelt' object has no attribute 'Wq'" in report.verdict


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong_report():
    return audit(planted.attention("mean", "scale missing dq"), effort="quick", name="<b>my & attention</b>")


def test_the_report_puts_the_verdict_first_then_stages_mistake_fix_and_case(wrong_report):
    text = str(wrong_report)
    order = ["WRONG: dQ and dK are wrong", "first to diverge", "The mistake", "fix", "The smallest failing case"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "scale-missing-in-dq" in text


def test_the_smallest_case_is_small_runs_and_shows_the_failure(wrong_report):
    names = {"candidate": planted.attention("mean", "scale missing dq")}
    exec(wrong_report.smallest, names)  # noqa: S102
    assert names["q"].size <= 4
    truth = reference.vjp(names["q"], names["k"], names["v"])[1](names["dout"]).q
    assert not np.allclose(names["results"]["dq"], truth)


def test_json_comes_back_as_the_same_report(wrong_report):
    again = AuditReport.from_json(wrong_report.to_json())
    assert again == wrong_report
    told = json.loads(wrong_report.to_json())
    assert told["ok"] is False
    assert told["first"] == "dq"
    assert str(again) == str(wrong_report)


def test_the_page_escapes_and_forbids_everything_but_its_own_style(wrong_report):
    page = wrong_report.to_html()
    assert "<b>my" not in page
    assert "&lt;b&gt;my &amp; attention&lt;/b&gt;" in page
    assert "default-src &#x27;none&#x27;" in page
    assert "<script" not in page
    assert not re.search(r"\son\w+=|\sstyle=|https?:", page)
    assert page.count("<rect") > 20
    assert "mean-for-row-sum" in page


def test_an_unexplained_result_is_told_with_its_pattern():
    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        dv[:, :, -1] *= 3
        return out, dq * 1.25, dk, dv

    report = audit(candidate, effort="quick")
    assert report.mistakes == ()
    text = str(report)
    assert "It is 1.25 times what it should be" in text
    assert "only row" in text
    assert "no known mistake explains it" in text


def test_the_same_call_gives_the_same_report():
    one, two = (audit(planted.attention("columns"), effort="quick", seed=3).to_json() for _ in range(2))
    assert one == two


# --- for the tests of others -----------------------------------------------------------------------------------------


def test_the_pytest_helper_fails_with_the_report():
    assert assert_attention_gradients(right, effort="quick").ok
    with pytest.raises(AssertionError, match="row-term-missing"):
        assert_attention_gradients(planted.attention("no row term"), effort="quick")


@pytest.mark.parametrize("case", provoking(effort="quick"), ids=str)
def test_the_cases_serve_parametrize(case):
    x = case.arrays
    results = right(x["q"], x["k"], x["v"], np.ascontiguousarray(x["dout"]))
    assert Truth(case, np.float64).judge("dq", results[1]).right


def test_the_pages_of_the_catalogue_are_those_it_makes():
    from pathlib import Path

    folder = Path(__file__).parent.parent / "docs" / "mistakes"
    assert {p.name: p.read_text() for p in folder.glob("*.md")} == pages()
