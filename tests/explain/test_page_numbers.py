"""The page, in a real Chromium: it computes what Python computes, whatever is switched or edited; each sum is shown."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import attngrad
from cases import EVERYTHING, OPTIONS, SHAPES, make
from page_tools import ALL, SWITCHES, assert_same, by_python, example


def test_the_numbers_shown_are_those_of_the_trace(opened):
    t = example(causal=True)
    page = opened(t)
    for name in ALL:
        expected = t[name].value[0].reshape(4, -1)
        for i, j in itertools.product(range(4), range(expected.shape[1])):
            cell = page.cell(name, i, j)
            value = float(cell.get_attribute("data-value").replace("Infinity", "inf"))
            assert value == expected[i, j] or abs(value - expected[i, j]) < 1e-12, name
            text = cell.inner_text().replace("\u2212", "-")
            assert text == "·" or abs(float(text) - expected[i, j]) <= 0.0051 * max(1.0, 100 * abs(expected[i, j])), (
                name
            )


def test_every_invariant_holds_and_has_its_green_mark(opened):
    page = opened(example(causal=True))
    assert set(page.checks().values()) == {True}
    marks = page.tab.locator("#checks li")
    assert marks.count() == 5
    assert page.tab.locator("#checks li.holds b").all_inner_texts() == ["✓"] * 5


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_heads", [1, 2])
def test_every_combination_of_switches_is_that_of_python(opened, key_heads):
    t = example(key_heads=key_heads)
    page = opened(t)
    for n in range(2 ** len(SWITCHES)):
        bits = n ^ (n >> 1)  # one switch at a time
        on = {name: bool(bits >> place & 1) for place, name in enumerate(SWITCHES)}
        for name, value in page.state()["on"].items():
            if value != on[name]:
                page.tab.locator(f"#switch-{name}").click()
        assert page.state()["on"] == on
        assert_same(page.numbers(), by_python(t, on))
        assert set(page.checks().values()) == {True}, on


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_at_once_reaches_the_page(opened, shape):
    case = make(EVERYTHING, SHAPES[shape])
    t = attngrad.trace(*case.qkv, case.dout, dlse=case.dlse, **case.options)
    batch = int(np.prod(case.shape.batch, dtype=int)) - 1
    page = opened(t, place={"head": case.shape.heads - 1, "batch": batch})
    assert_same(page.numbers(), by_python(t, page.state()["on"], batch))
    assert set(page.checks().values()) == {True}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone_reaches_the_page(opened, name):
    case = make((name,))
    t = attngrad.trace(*case.qkv, case.dout, **case.options)
    page = opened(t)
    assert_same(page.numbers(), by_python(t, page.state()["on"]))


def test_an_edited_number_moves_everything(opened):
    t = example(causal=True)
    page = opened(t)
    cell = page.cell("K", 2, 1)
    cell.dblclick()
    page.tab.locator("td input").fill("-1.25")
    page.tab.keyboard.press("Enter")
    moved = t.operands.k.copy()
    moved[0, 2, 1] = -1.25
    after = attngrad.trace(t.operands.q, moved, t.operands.v, t["dO"].value, causal=True)
    assert_same(page.numbers(), by_python(after, page.state()["on"]))
    assert cell.inner_text() == "\u22121.25"
    assert set(page.checks().values()) == {True}
    page.tab.locator("#reset").click()
    assert_same(page.numbers(), by_python(t, page.state()["on"]))


def test_what_is_no_number_is_refused(opened):
    page = opened(example())
    before = page.numbers()
    page.cell("Q", 0, 0).dblclick()
    box = page.tab.locator("td input")
    box.fill("two")
    page.tab.keyboard.press("Enter")
    assert box.get_attribute("aria-invalid") == "true"
    page.tab.keyboard.press("Escape")
    assert page.numbers() == before
    page.cell("dK", 0, 0).dblclick()
    assert page.tab.locator("td input").count() == 0


def test_dragging_a_number_moves_everything(opened):
    t = example()
    page = opened(t)
    page.cell("dO", 1, 1).click()
    page.tab.locator(".dragger input").evaluate("(e) => { e.value = 2.5; e.dispatchEvent(new Event('input')); }")
    dout = t["dO"].value.copy()
    dout[0, 1, 1] = 2.5
    after = attngrad.trace(t.operands.q, t.operands.k, t.operands.v, dout)
    assert_same(page.numbers(), by_python(after, page.state()["on"]))


# --- the sum behind a number -----------------------------------------------------------------------------------------


def test_hovering_a_cell_of_dk_shows_its_sum_and_lights_its_row_and_column(opened):
    t = example(causal=True)
    page = opened(t)
    page.cell("dK", 2, 1).hover()
    found = t.explain("dK", 2, 1)
    text = page.tab.locator("#sum").inner_text().replace("\u2212", "-")
    assert "dK[2,1] = scale · Σi dS[i,2] · Q[i,1]" in text
    assert f"{found.value:.6f}" in text
    for term in found.terms:
        for label, number in term.factors:
            assert label in text
            assert f"{number:.4f}" in text
        assert f"{term.value:.4f}" in text
    lit = page.tab.locator("td.source").evaluate_all(
        "(cells) => cells.map((c) => c.closest('figure').dataset.name + c.dataset.i + c.dataset.j)"
    )
    assert sorted(lit) == ["Q21", "Q31", "dS22", "dS32"]
    assert page.tab.locator("td.target").count() == 1


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 1.2}, {"sinks": np.ones(2), "bias": np.ones((4, 4))}], ids=str
)
def test_the_sum_of_every_cell_is_that_of_python(opened, options):
    t = example(key_heads=1, **options)
    page = opened(t)
    for name in (*ALL, "delta"):
        shape = t[name].value[0].reshape(4, -1).shape
        for i, j in ((0, 0), (3, shape[1] - 1), (2, shape[1] // 2)):
            page.cell(name, i, j).hover()
            head = page.tab.locator("#sum .head")
            total, value = (
                float(head.get_attribute(f"data-{n}").replace("Infinity", "inf")) for n in ("total", "value")
            )
            expected = t.explain(name, i, *(() if len(t.rules[name].letters) == 1 else (j,)))
            assert value == expected.value or abs(value - expected.value) < 1e-9
            assert total == expected.total or abs(total - expected.total) < 1e-9
            rows = page.tab.locator("#sum table.terms tbody tr:not(.total)").count()
            assert rows == len(expected.terms), name


def test_a_group_is_summed_over_its_heads(opened):
    page = opened(example(heads=4, key_heads=2))
    page.cell("dK", 0, 0).hover()
    text = page.tab.locator("#sum").inner_text()
    assert "dS[h0; 0,0]" in text
    assert "dS[h1; 3,0]" in text
    assert "h2" not in text
