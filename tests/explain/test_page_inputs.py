"""What a page is made of: large arrays are cut and say so, labels are text and nothing else, nothing is reached."""

from __future__ import annotations

import html
import re

import numpy as np
import pytest

import attngrad
from attngrad.explain.html import WHOLE, WINDOW
from page_tools import Page, assert_same, by_python, example


def test_a_large_input_is_shown_by_a_window_that_moves(opened):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 40, 20))
    t = attngrad.trace(q, k, v, dout, causal=True)
    page = opened(t)
    assert f"A window of {WINDOW} rows and columns" in page.tab.locator("#notice").inner_text()
    assert "rows 0 to 7 of 40" in page.tab.locator("#step-dS .cut").inner_text()
    assert page.tab.locator("#step-dS td").count() == WINDOW**2
    assert_same(page.numbers(), by_python(t, page.state()["on"]))
    page.tab.get_by_label("First of the queries shown").fill("32")
    page.tab.keyboard.press("Tab")
    assert page.cell("dS", 39, 7).count() == 1
    assert float(page.cell("dS", 39, 7).get_attribute("data-value")) == pytest.approx(t["dS"][0, 39, 7], rel=1e-9)
    assert float(page.cell("dQ", 39, 0).get_attribute("data-value")) == pytest.approx(t["dQ"][0, 39, 0], rel=1e-9)


def test_a_very_large_input_is_cut_and_says_so(opened):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 600, 32))
    page = opened(attngrad.trace(q, k, v, dout, causal=True, offset=0), place={"head": 1})
    notice = page.tab.locator("#notice").inner_text()
    assert "heads 1 to 1 of 2" in notice
    assert re.search(r"the first (\d+) of 600 queries and \1 of 600 keys", notice)
    n = int(re.search(r"the first (\d+)", notice)[1])
    part = attngrad.trace(q[1:, :n], k[1:, :n], v[1:, :n], dout[1:, :n], causal=True)
    assert float(page.cell("dK", 0, 0).get_attribute("data-value")) == pytest.approx(part["dK"][0, 0, 0], rel=1e-9)


def test_without_a_gradient_at_o_the_loss_is_the_sum_of_o(opened):
    t = example()
    page = opened(attngrad.trace(t.operands.q, t.operands.k, t.operands.v))
    assert "the loss is the sum of O" in page.tab.locator("#notice").inner_text()
    ones = attngrad.trace(t.operands.q, t.operands.k, t.operands.v, np.ones_like(t.operands.q))
    assert_same(page.numbers(), by_python(ones, page.state()["on"]))


def test_a_matrix_of_twelve_is_shown_whole(opened):
    rng = np.random.default_rng(0)
    page = opened(attngrad.trace(*rng.standard_normal((3, WHOLE, 4)), rng.standard_normal((WHOLE, 4))))
    assert page.tab.locator("#step-dS td").count() == WHOLE**2
    assert page.tab.locator("#notice").is_hidden()
    assert page.tab.locator("#switch-gqa").is_disabled()


# --- safety ----------------------------------------------------------------------------------------------------------

EVIL = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<b>bold</b>",
    "<!-- <script &amp;\u2028'",
]


def test_labels_are_text_and_nothing_else(opened):
    rng = np.random.default_rng(0)
    t = attngrad.trace(*rng.standard_normal((3, 4, 3)), rng.standard_normal((4, 3)), tokens=EVIL)
    page = opened(t)
    assert page.tab.locator("#step-Q tbody th").all_text_contents() == EVIL
    assert page.tab.locator("#flow b:text('bold'), img").count() == 0
    assert page.tab.locator("script").count() == 2
    page.cell("dS", 0, 1).hover()
    assert EVIL[0] in page.tab.locator("#sum").inner_text()


def test_the_page_is_one_file_that_may_reach_nothing():
    page = example().to_html(title="<i>&")
    assert "<title>&lt;i&gt;&amp;</title>" in page
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)\s*=|@import|url\((?!#)|https?://(?!www\.w3\.org)", page)


def test_a_script_that_was_not_in_it_does_not_run(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(example().to_html().replace("</body>", "<script>window.ran = 1</script></body>"))
    page = Page(browser, path)
    assert page.tab.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in page.said)
    page.context.close()
