"""Reports in a notebook: short where they are text, escaped and legible where they are HTML."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import errata
from attngrad.auditor import audit
from attngrad.explain import check, notebook
from planted import right

EVIL = "<b>mine & yours</b>"


def wrong(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    return out, dk, dq, dv


def crashing(q, k, v, dout):
    raise ValueError(EVIL)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return {
        "audit": audit(wrong, effort="quick", name=EVIL),
        "audit, right": audit(right, effort="quick"),
        "audit, none": audit(crashing, effort="quick"),
        "formula": attngrad.audit_formula("dK = Q^T dS / sqrt(d)"),
        "formula, right": attngrad.audit_formula("dK = dS^T Q / sqrt(d)"),
        "errata": errata.run(),
        "errata, one": errata.run("back-pass")[7],
        "check": check.run(),
    }


NAMES = ("audit", "audit, right", "audit, none", "formula", "formula, right", "errata", "errata, one", "check")


@pytest.mark.parametrize("name", NAMES)
def test_the_text_at_the_end_of_a_cell_is_one_line(reports, name):
    text = repr(reports[name])
    assert "\n" not in text
    assert len(text) <= 240, text


@pytest.mark.parametrize("name", NAMES)
def test_the_html_is_whole_escaped_and_needs_nothing_else(reports, name):
    html = reports[name]._repr_html_()
    assert "<b>mine" not in html
    assert not re.search(r"<script|<style|\son\w+=|https?:|class=", html)
    for tag in ("div", "table", "tr", "td", "details", "pre", "b"):
        assert html.count(f"<{tag}>") + html.count(f"<{tag} ") == html.count(f"</{tag}>"), tag


def test_every_part_of_a_report_is_escaped():
    parts = notebook.table((EVIL,), [(EVIL, notebook.sign(True))]) + notebook.folded(EVIL, EVIL) + notebook.code(EVIL)
    parts += notebook.report(None, EVIL, EVIL) + notebook.muted(EVIL)
    assert "<b>mine" not in parts
    assert parts.count("&lt;b&gt;mine &amp; yours&lt;/b&gt;") == 8
    assert notebook.sign(True) in parts


def test_an_audit_shows_its_verdict_its_stages_its_mistake_and_its_smallest_case(reports):
    html = reports["audit"]._repr_html_()
    order = ("WRONG: dQ and dK are wrong", "&lt;b&gt;mine &amp; yours", "first to diverge", "dq-dk-exchanged", ">fix<",
             "<summary>The smallest failing case</summary>", "q = np.array")  # fmt: skip
    places = [html.index(words) for words in order]
    assert places == sorted(places)
    assert len(html) < 9000
    assert "&lt;b&gt;mine &amp; yours&lt;/b&gt;" in reports["audit, none"]._repr_html_()
    assert notebook.sign(True) not in reports["audit, none"]._repr_html_()


def test_a_formula_shows_its_shapes_and_the_right_one(reports):
    html = reports["formula"]._repr_html_()
    assert "wrong shape" in html
    assert "m x d_k" in html
    assert "<b>dK = dS.T @ Q / sqrt(d_k)" in html
    assert repr(reports["formula"]).endswith("corrected='dK = dS.T @ Q / sqrt(d_k)')")


def test_the_errata_show_every_claim_under_the_title_of_its_document(reports):
    html = reports["errata"]._repr_html_()
    results = reports["errata"]
    assert html.count(notebook.sign(True)) == sum(r.holds for r in results)
    assert html.count(notebook.sign(False)) == sum(not r.holds for r in results)
    assert [html.index(f"<summary>{title}</summary>") for title in errata.DOCUMENTS.values()]
    assert repr(results).startswith("Results(79 claims: 49 hold, 30 are wrong; ")
    assert repr(reports["errata, one"]) == "Result(back-pass-8: 'dK = Q^T dS / sqrt(d)' is wrong)"


def test_a_check_says_what_is_wrong():
    report = check.CheckReport((check.Row("VJP", "dq", 1e-16), check.Row("HVP", "dk_dot", 1e-3)))
    assert repr(report) == "CheckReport(WRONG: HVP dk_dot, 2 results)"
    assert report._repr_html_().count(notebook.sign(False)) == 2  # the verdict and the row


def test_an_explanation_shows_its_sum():
    x = np.eye(2)
    found = attngrad.trace(x, x, x).explain("O", 0, 1)
    assert repr(found) == str(found)
    assert repr(found).startswith("O[0, 1] = sum_j A[0,j] V[j,1] = ")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [notebook.GREEN, notebook.RED])
def test_marks_are_legible_on_light_and_dark(colour):
    light = luminance(colour) + 0.05
    assert 1.05 / light >= 4.0
    assert light / (luminance("#111111") + 0.05) >= 3.5
