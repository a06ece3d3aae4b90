"""What is right by a convention of its own, in every result, is right and says so; what mixes two is wrong."""

import numpy as np
import pytest

import attngrad
from attngrad.auditor import audit
from planted import attention, layer
from tiers import first

DTYPES = first(1, ["float64", "float32", "float16", "bfloat16"])
CAUSAL = {"causal": True}


def with_offset(forward, backward):
    """Causal attention whose passes have these offsets; None is bottom-right."""

    def candidate(q, k, v, dout):
        out = attngrad.attention(q, k, v, causal=True, offset=forward)
        return (out, *attngrad.vjp(q, k, v, causal=True, offset=backward)[1](dout)[:3])

    return candidate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("candidate", "options", "told"),
    [
        (attention("tiled heads"), None, ["Query head h reads key head h % Hk"]),
        (with_offset(0, 0), CAUSAL, ["the top left corner, as PyTorch's is_causal"]),
        (attention("tiled heads", "alignment"), CAUSAL, ["Query head h reads", "the top left corner"]),
    ],
    ids=["groups", "corner", "both"],
)
def test_a_consistent_convention_is_right_and_is_told(candidate, options, told, dtype):
    report = audit(candidate, options=options, dtype=dtype, effort="quick")
    assert report.ok, report
    assert [f.kind for f in report.findings if f.kind == "convention"] == ["convention"] * len(told)
    assert all(text in report.verdict and text in " ".join(str(report).split()) for text in told)


@pytest.mark.parametrize(
    ("candidate", "options", "named"),
    [
        (attention("tiled groups"), None, ("group-interleaved",)),
        (attention("tiled heads", "no row term"), None, ("row-term-missing",)),
        (with_offset(0, 0), {"causal": True, "offset": 1}, None),
        (with_offset(None, 0), CAUSAL, None),
    ],
    ids=["summed otherwise", "and a fault", "not the one that is asked for", "two corners"],
)
def test_what_is_not_consistent_is_wrong(candidate, options, named):
    report = audit(candidate, options=options, effort="quick")
    assert report.status == "wrong"
    assert not any("Right by" in f.text for f in report.findings)
    assert named is None or report.mistakes == named, report


def test_a_right_candidate_has_no_convention_of_its_own():
    assert audit(attention(), options=CAUSAL, effort="quick").findings == ()


def test_one_entry_that_is_wrong_is_seen_under_a_convention_too():
    def candidate(q, k, v, dout):
        results = attention("tiled heads")(q, k, v, dout)
        results["dq"][..., -1, 0] *= 1 + 1e-9
        return results

    assert audit(candidate, effort="quick").status == "wrong"


def test_the_heads_of_a_layer_have_conventions_too():
    def candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, num_kv_heads):
        order = np.argsort(np.arange(num_heads) % num_kv_heads, kind="stable")  # as attngrad has them
        back = np.argsort(order)

        def columns(w, by):
            return w.reshape(len(w), num_heads, -1)[:, by].reshape(w.shape)

        many = num_heads // num_kv_heads
        keys = [np.repeat(w.reshape(len(w), num_kv_heads, -1), many, 1).reshape(len(w), -1) for w in (w_k, w_v)]
        w_q, w_o = columns(w_q, order), columns(w_o.T, order).T
        r = layer()(query, key, value, w_q, *keys, w_o, dy, num_heads)
        summed = {n: r[n].reshape(len(w_k), num_kv_heads, many, -1).sum(2).reshape(w_k.shape) for n in ("dw_k", "dw_v")}
        own = {"dw_q": columns(r["dw_q"], back), "dw_o": columns(r["dw_o"].T, back).T}
        return {n: r[n] for n in ("y", "dquery", "dkey", "dvalue")} | summed | own

    report = audit(candidate, level="layer", effort="quick")
    assert report.ok, report
    assert "query head h reads key head h % Hk" in report.verdict
