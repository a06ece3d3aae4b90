"""What the auditor says: the report, the smallest case, the page; and what it has for the tests of others."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import planted
from attngrad import reference
from attngrad.auditor import AuditReport, audit
from attngrad.auditor.pages import pages
from attngrad.auditor.truth import Truth
from attngrad.testing import assert_attention_gradients
from attngrad.testing import cases as provoking
from planted import right

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


def test_the_verdict_accounts_for_every_wrong_result():
    def three_faults(q, k, v, dout):
        found = planted.attention("scale missing dq")(q, k, v, dout)
        found["dk"][..., -1, :] *= 3.0
        return found | {"dv": found["dv"] + np.arange(v.shape[-1])}

    report = audit(three_faults, effort="quick")
    assert "scale-missing-in-dq" in report.mistakes, report
    assert report.verdict.startswith("WRONG: dQ, dK and dV are wrong; ")
    assert "; and dK and dV for another reason, which no known mistake explains. The error" in report.verdict


@pytest.mark.parametrize("error", [4e-11, 4.0])
def test_the_verdict_says_how_large_the_error_is(error):
    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq + error * np.max(np.abs(dq)), dk, dv

    verdict = audit(candidate, effort="quick").verdict
    told = float(re.search(r"The error is (\S+) of the largest entry", verdict)[1])
    assert 0.5 * error <= told <= 2.0 * error, verdict


def differs(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


class Mine(torch.autograd.Function):
    """Wrong in the backward, or under it."""

    @staticmethod
    def forward(ctx, q, k, v, factor, graph):
        ctx.save_for_backward(q, k, v)
        ctx.factor, ctx.graph = factor, graph
        return differs(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            inputs = [x if ctx.graph else x.detach().requires_grad_() for x in ctx.saved_tensors]
            dq, dk, dv = torch.autograd.grad(differs(*inputs), inputs, dout, create_graph=ctx.graph)
        return ctx.factor * dq, dk, dv, None, None


def gradient(q, k, v):
    return Mine.apply(q, k, v, 1.5, False)


def detached(q, k, v):
    return Mine.apply(q, k, v, 1.0, False)


def masked_wrong(q, k, v, is_causal=False):
    rows, columns = q.shape[-2], k.shape[-2]
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows + 1 if is_causal else columns)
    return torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf), -1) @ v


def beyond(q, k, v):
    return differs(q, k, v) * (1.5 if q.shape[-2] > 256 else 1.0)


@pytest.mark.parametrize(
    ("candidate", "name"),
    [(lambda q, k, v: 2 * differs(q, k, v), "out"), (gradient, "dq"), (detached, "dq_dot"), (masked_wrong, "out"),
     (beyond, "out")],
    ids=["out", "gradient", "second order", "option", "drawn"],
)  # fmt: skip
def test_the_smallest_case_of_a_torch_function_can_be_pasted(candidate, name):
    report = audit(candidate, framework="torch", effort="quick")
    assert report.first == name, report
    names = {"candidate": candidate}
    exec(report.smallest, names)  # noqa: S102
    assert isinstance(names[name], torch.Tensor)
    if candidate is not beyond:
        told = report.smallest.partition("but it is")[2].partition("q = torch")[0].replace("#", "")
        shown = np.array(re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", told), float)
        assert np.allclose(names[name].detach().ravel(), shown, atol=1e-5)


def test_numbers_are_printed_until_they_differ():
    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq * (1 + 1e-9), dk, dv

    report = audit(candidate, effort="quick")
    stage = report.stages[1]
    got, expected = stage.what.partition(": ")[2].split(", should be ")
    assert got != expected
    truth, found = report.smallest.partition("dq should be")[2].partition("q = np")[0].split("but it is")
    assert "".join(truth.split()).strip("#") != "".join(found.split()).strip("#")


def test_most_of_the_rows_are_not_listed_as_only_these():
    def wrong_in(rows):
        def candidate(q, k, v, dout):
            out, dq, dk, dv = right(q, k, v, dout)
            hit = [i for i in rows if i < q.shape[2]]
            dq[:, :, hit] = dq[:, :, hit] ** 2
            return out, dq, dk, dv

        found = audit(candidate, sizes={"tokens": (37,)}, effort="quick").stages[1].pattern
        return found.partition("entries are wrong, ")[2]

    assert wrong_in({*range(37)} - {3, 17}).startswith("all rows but 3, 17, ")
    assert "rows" not in wrong_in(i for i in range(37) if i % 3)
    assert wrong_in((2, 5)).startswith("only rows 2, 5, ")


def test_the_smallest_case_keeps_a_width_at_which_a_missing_scale_would_show():
    names = {"candidate": planted.attention("mean")}  # which fails with one feature too
    exec(audit(names["candidate"], effort="quick").smallest, names)  # noqa: S102
    assert names["q"].shape[-1] == 2


def test_an_unexplained_result_is_told_with_its_pattern():
    def candidate(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        dv[:, :, -1] *= 3
        return out, dq * 1.25, dk, dv

    report = audit(candidate, effort="quick")
    assert report.mistakes == ()
    text = " ".join(str(report).split())
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
    folder = Path(__file__).parents[2] / "docs" / "mistakes"
    assert {p.name: p.read_text() for p in folder.glob("*.md")} == pages()
