"""The page, in a real Chromium: it loads, computes what Python computes, and does what its controls say.

Skipped, loudly, where there is no Chromium; under CI=true that is a failure.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import reference
from attngrad.core.binding import bind
from attngrad.explain.html import WHOLE, WINDOW
from attngrad.reference.dense import visibility
from cases import EVERYTHING, OPTIONS, SHAPES, make

NAMES = ("Z", "S", "L", "A", "O", "dO", "dA", "delta", "dS", "dZ", "dQ", "dK", "dV")
ALL = ("Q", "K", "V", "Z", "S", "A", "O", "L", "dO", "dA", "dS", "dQ", "dK", "dV")
SWITCHES = ("causal", "mask", "gqa", "scale", "softcap")
TOKENS = ["the", "cat", "sat", "down"]


class Page:
    """A page in a tab of its own, with everything that its console said."""

    def __init__(self, browser: Any, path: Path, fragment: str = "", **context: Any) -> None:
        settings = {"viewport": {"width": 1440, "height": 900}, "offline": True, "reduced_motion": "reduce"} | context
        self.context = browser.new_context(**settings)
        self.tab = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri() + fragment)

    def numbers(self, which: str = "shown") -> dict[str, Any]:
        """The numbers of all heads; -inf comes as None through JSON, so it is sent as text."""
        text = self.tab.evaluate(
            f"JSON.stringify(window.attngrad.{which}(), (key, x) => "
            "typeof x === 'number' && !Number.isFinite(x) ? String(x).replace('Infinity', 'inf') : x)"
        )
        return json.loads(text)

    def state(self) -> Any:
        return self.tab.evaluate("window.attngrad.state()")

    def checks(self) -> dict[str, bool]:
        return {c["claim"]: c["holds"] for c in self.tab.evaluate("window.attngrad.checks()")}

    def cell(self, name: str, i: int, j: int = 0) -> Any:
        return self.tab.locator(f'#step-{name} td[data-i="{i}"][data-j="{j}"]')


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Any]:
    """Open a page of a trace; whatever it says on the console, or asks of the network, fails the test."""
    pages: list[Page] = []

    def open_page(
        trace: attngrad.Trace, fragment: str = "", place: dict[str, int] | None = None, **context: Any
    ) -> Page:
        path = tmp_path / f"page{len(pages)}.html"
        trace.save(path, **(place or {}))
        pages.append(Page(browser, path, fragment, **context))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.said == []
        assert len(page.requests) == 1, page.requests


def example(heads: int = 2, key_heads: int = 2, **options: Any) -> attngrad.Trace:
    """Four tokens, three features."""
    rng = np.random.default_rng(7)
    q, dout = rng.standard_normal((2, heads, 4, 3))
    k, v = rng.standard_normal((2, key_heads, 4, 3))
    return attngrad.trace(q, k, v, dout, tokens=TOKENS, **options)


def by_python(t: attngrad.Trace, on: dict[str, bool], batch: int = 0) -> dict[str, Any]:
    """What Python makes of the operands of a page under its switches; one list a head, as the page has it."""
    x, o = t.operands, t.options
    lead = len(x.q.shape) - 3

    def one(a: Any) -> Any:
        return a.reshape(-1, *a.shape[lead:])[batch]

    q, k, v, dout = (one(a) for a in (x.q, x.k, x.v, t["dO"].value))
    group = x.heads // k.shape[0]
    if group > 1 and not on["gqa"]:
        k, v = (np.repeat(a, group, axis=0) for a in (k, v))
    if group == 1 and on["gqa"]:
        k, v = k[:1], v[:1]
    visible = one(np.broadcast_to(visibility(x, type(o)(1.0, window=o.window)), x.scores_shape)).copy()
    if visible.all():
        visible[..., -1] = False
    options: dict[str, Any] = {"scale": o.scale if on["scale"] else 1.0, "causal": on["causal"]}
    if isinstance(x.offset, int):
        options["offset"] = x.offset
    else:
        options["offset"] = int(np.broadcast_to(x.offset, x.q.shape[:-3]).reshape(-1)[batch])
    if on["softcap"]:
        options["softcap"] = 1.5 if o.softcap is None else o.softcap
    if on["mask"]:
        options["mask"] = visible
    if x.bias is not None:
        full = one(np.broadcast_to(x.bias, x.scores_shape))
        options["bias"] = np.where(np.isfinite(full), full, 0.0)
    if x.sinks is not None:
        options["sinks"] = x.sinks
    operands, bound, _ = bind("test", q, k, v, options)
    f = reference.forward(operands, bound)
    if o.dropout:
        keep = one(t["M"].value)
        f = f._replace(keep=keep, out=(f.weights * keep) @ np.repeat(v, x.heads // k.shape[0], axis=0))
    b = reference.backward(operands, bound, f, dout, one(t["dL"].value) if "dL" in t else None)
    return {
        "Z": f.z,
        "S": f.scores,
        "L": f.lse[..., None],
        "A": f.weights,
        "O": f.out,
        "dO": dout,
        "dA": b.dweights,
        "delta": b.delta[..., None],
        "dS": b.dscores,
        "dZ": b.dz,
        "dQ": b.grads.q,
        "dK": b.grads.k,
        "dV": b.grads.v,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    for name in NAMES:
        numbers = np.array(found[name], dtype=object).astype(float)
        assert numbers.shape == expected[name].shape, name
        np.testing.assert_allclose(numbers, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_every_matrix_is_visible_at_load(opened):
    page = opened(example(causal=True))
    dock = page.tab.locator("#dock").bounding_box()
    for name in ALL:
        box = page.tab.locator(f"#step-{name}").bounding_box()
        assert box is not None, name
        assert box["width"] > 60
        assert box["y"] + box["height"] <= dock["y"] + 1, name
        assert box["x"] + box["width"] <= 1440
    assert page.tab.locator("figure.later").count() == 0


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


# --- steps, keys, links ----------------------------------------------------------------------------------------------


def test_keys_and_slider_step_through_the_pass(opened):
    page = opened(example())
    order = []
    for _ in range(15):
        page.tab.keyboard.press("]")
        order.append(page.state()["step"])
    assert order == ["Q", "K", "V", "Z", "S", "L", "A", "O", "dO", "dV", "dA", "delta", "dS", "dQ", "dK"]
    assert page.tab.locator("figure.current").get_attribute("data-name") == "dK"
    page.tab.keyboard.press("[")
    assert page.state()["step"] == "dQ"
    slider = page.tab.locator("#step")
    slider.focus()
    page.tab.keyboard.press("ArrowLeft")
    assert page.state()["step"] == "dS"
    assert slider.get_attribute("aria-valuetext") == "step 13: dS"
    assert "A ∘ (dA \u2212 δ)" in page.tab.locator("#step-name").inner_text()
    assert sorted(page.tab.locator("figure.input").evaluate_all("(f) => f.map((x) => x.dataset.name)")) == [
        "A",
        "dA",
        "delta",
    ]
    assert page.tab.locator("figure.later").evaluate_all("(f) => f.map((x) => x.dataset.name)") == ["dQ", "dK"]
    page.tab.locator("#next").click()
    assert page.state()["step"] == "dQ"


def test_links_lead_to_a_step_a_cell_and_a_mistake(opened):
    page = opened(example(), "#step=dS&cell=dK,2,1&head=1&on=causal,scale,softcap&break=mean")
    state = page.state()
    assert (state["step"], state["head"], state["mistake"]) == ("dS", 1, "mean")
    assert state["cell"] == {"name": "dK", "i": 2, "j": 1}
    assert [name for name in SWITCHES if state["on"][name]] == ["causal", "scale", "softcap"]
    page.tab.locator("#next").click()
    assert "step=dZ" in page.tab.url
    page.tab.evaluate("location.hash = '#step=4'")
    page.tab.wait_for_function("window.attngrad.state().step === 'Z'")
    assert page.state()["mistake"] is None


@pytest.mark.parametrize(
    "fragment", ["#step=nonsense", "#cell=dK,99,0", "#head=7&break=x", "#%%%", "#step", "#cell=<b>,0,0"]
)
def test_a_bad_link_is_the_overview(opened, fragment):
    page = opened(example(), fragment)
    assert page.state() == {"on": page.state()["on"], "head": 0, "step": None, "mistake": None, "cell": None}


def test_the_page_is_walked_by_keyboard_alone(opened):
    page = opened(example())
    press = page.tab.keyboard.press

    def focused() -> str:
        return page.tab.evaluate(
            "(() => { const e = document.activeElement, f = e.closest('figure'); return e.id || (f ? "
            "f.dataset.name + ':' + e.dataset.i + ',' + e.dataset.j : e.dataset.id || e.textContent); })()"
        )

    seen = []
    for _ in range(60):
        press("Tab")
        seen.append(focused())
        if seen[-1] == "fold":
            break
    assert {"theme", "reset", "step", "next", "mean", *(f"switch-{name}" for name in SWITCHES)} <= set(seen)
    order = ["Q", "K", "V", "Z", "S", "A", "O", "L", "dQ", "dK", "dV", "dS", "dA", "dO", "delta"]
    assert [s for s in seen if ":" in s] == [f"{name}:0,0" for name in order]
    page.tab.locator("#reset").focus()
    while focused() != "Q:0,0":
        press("Tab")
    press("ArrowDown")
    press("ArrowRight")
    assert focused() == "Q:1,1"
    press("End")
    assert focused() == "Q:1,2"
    press("ArrowRight")
    assert focused() == "Q:1,2"
    assert "Q[1,2]" in page.tab.locator("#sum").inner_text()
    press("Enter")
    page.tab.keyboard.type("0.5")
    press("Enter")
    assert focused() == "Q:1,2"
    assert page.numbers()["Q"][0][1][2] == 0.5
    page.tab.keyboard.type("-2")
    press("Enter")
    assert page.numbers()["Q"][0][1][2] == -2
    page.tab.locator("#switch-causal").focus()
    press("Space")
    assert page.state()["on"]["causal"]


def test_heads_are_chosen(opened):
    t = example()
    page = opened(t)
    page.tab.locator('#heads button[data-head="1"]').click()
    assert float(page.cell("dK", 0, 0).get_attribute("data-value")) == pytest.approx(t["dK"][1, 0, 0], rel=1e-12)
    page.tab.locator("#switch-gqa").check()
    shared = attngrad.trace(t.operands.q, t.operands.k[:1], t.operands.v[:1], t["dO"].value)
    assert float(page.cell("dK", 0, 0).get_attribute("data-value")) == pytest.approx(shared["dK"][0, 0, 0], rel=1e-12)


# --- mistakes --------------------------------------------------------------------------------------------------------


def planted(t: attngrad.Trace) -> dict[str, dict[str, Any]]:
    """O, dQ, dK, dV with each mistake in them, in NumPy, as the documents have it; no options but scale."""
    q, k, v, dout, weights, da, ds = (t[n].value for n in ("Q", "K", "V", "dO", "A", "dA", "dS"))
    scale = t.options.scale

    def turned(x: Any) -> Any:
        return x.swapaxes(-1, -2)

    def with_ds(wrong: Any, factor: float = scale) -> dict[str, Any]:
        return {"dQ": factor * wrong @ k, "dK": factor * turned(wrong) @ q}

    first = weights[:, 0]
    jacobian = np.stack([np.diag(a) - np.outer(a, a) for a in first])
    scores = q @ turned(k)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    a = e / e.sum(-1, keepdims=True)
    da_raw = dout @ turned(v)
    unscaled = a * (da_raw - (a * da_raw).sum(-1, keepdims=True))
    g = weights * da
    return {
        "mean": with_ds(g - g.mean(-1, keepdims=True)),
        "mix": with_ds(g - weights @ turned(da) @ weights),
        "columns": with_ds(weights * (da - g.sum(-2, keepdims=True))),
        "one-jacobian": with_ds(da @ jacobian),
        "skip-softmax": with_ds(da, 1.0),
        "forget-scale": with_ds(ds, 1.0),
        "transpose-dk": {"dK": scale * turned(q) @ ds},
        "unturned-dv": {"dV": weights @ dout},
        "unscaled-scores": {**with_ds(unscaled), "O": a @ v, "dV": turned(a) @ dout},
        "no-maximum": {},
    }


RED = {  # the rows of the mean's dS do sum to 0: only the adjoint and the differences tell
    "mix": {"rows of dS sum to 0"},
    "columns": {"rows of dS sum to 0"},
    "skip-softmax": {"rows of dS sum to 0"},
}


def test_each_mistake_breaks_what_it_should_and_by_how_much(opened):
    t = example()
    page = opened(t)
    ids = page.tab.locator("#mistakes button").evaluate_all("(b) => b.map((x) => x.dataset.id)")
    expected = planted(t)
    assert set(ids) == set(expected)
    for name in ids:
        page.tab.locator(f'#mistakes button[data-id="{name}"]').click()
        shown, damage = page.numbers(), {d["name"]: d["error"] for d in page.tab.evaluate("window.attngrad.damage()")}
        for step in ("O", "dQ", "dK", "dV"):
            right, wrong = t[step].value, expected[name].get(step, t[step].value)
            found = np.array(shown[step], float)
            np.testing.assert_allclose(found, wrong, rtol=1e-9, atol=1e-12, err_msg=f"{name} {step}")
            if wrong.shape != right.shape:
                assert damage[step] is None
                assert f"has shape {wrong.shape[1]} x {wrong.shape[2]}" in page.tab.locator("#damage").inner_text()
            else:
                error = np.abs(wrong - right).max() / np.abs(right).max()
                assert damage[step] == pytest.approx(error, rel=1e-6, abs=1e-12), (name, step)
                assert (page.tab.locator(f"#step-{step} td.wrong").count() > 0) == (
                    np.abs(wrong - right)[0].max() > 1e-8
                )
        broken = {claim for claim, holds in page.checks().items() if not holds}
        harmless = not expected[name]
        assert bool(broken) != harmless, name
        assert RED.get(name, set()) <= broken
        assert page.tab.locator("#checks li.broken").count() == len(broken)
        page.tab.locator(f'#mistakes button[data-id="{name}"]').click()
        assert page.tab.locator("#damage").is_hidden()
        assert page.tab.locator("td.wrong").count() == 0


def test_the_sum_of_a_wrong_number_says_what_is_right(opened):
    t = example()
    page = opened(t, "#break=forget-scale")
    page.cell("dK", 2, 1).hover()
    text = page.tab.locator("#sum").inner_text().replace("\u2212", "-")
    assert f"Planted: {t['dK'][0, 2, 1] / t.options.scale:.6f}. Right is {t['dK'][0, 2, 1]:.6f}:" in text


def test_exp_without_the_maximum_overflows_where_scores_are_large(opened):
    page = opened(example(), "#break=no-maximum")
    page.cell("Q", 0, 0).dblclick()
    page.tab.locator("td input").fill("9999")
    page.tab.keyboard.press("Enter")
    assert "nan" in str(page.numbers()["A"]).lower()
    assert np.isfinite(np.array(page.numbers("right")["A"], float)).all()
    assert "not a number" in page.tab.locator("#damage").inner_text()


# --- widths, themes, print, size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1280])
def test_nothing_sticks_out_at_any_width(opened, width, theme):
    page = opened(example(), viewport={"width": width, "height": 812}, color_scheme=theme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert page.tab.evaluate("document.documentElement.dataset.theme") == theme
    for name in ALL:
        box = page.tab.locator(f"#step-{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    cut = "(cells) => cells.filter((c) => c.scrollWidth > c.clientWidth + 1).map((c) => c.textContent)"
    assert page.tab.locator("td").evaluate_all(cut) == []


@pytest.mark.parametrize("width", [375, 768])
def test_in_one_column_the_backward_pass_reads_downward_from_do(opened, width):
    page = opened(example(), viewport={"width": width, "height": 812})
    order = ["#step-L", "#backward-title", "#step-dO", "#step-dA", "#step-dS", "#step-dQ"]
    places = [page.tab.locator(name).bounding_box() for name in order]
    assert sorted(places, key=lambda box: (box["y"], box["x"])) == places
    assert "reads downward, from dO" in page.tab.locator("#backward-title").inner_text()
    page.tab.set_viewport_size({"width": 1280, "height": 812})
    assert "reads upward, from dO: each" in page.tab.locator("#backward-title").inner_text()


def test_new_cells_have_their_colours_at_once_and_edits_fade(opened):
    page = opened(example(), reduced_motion="no-preference")
    fading = "document.getAnimations().length"
    assert page.tab.evaluate(f"(location.hash = '#step=dS', dispatchEvent(new Event('hashchange')), {fading})") == 0
    assert page.tab.evaluate(f"(document.getElementById('switch-softcap').click(), {fading})") == 0
    assert page.tab.evaluate(f"(document.getElementById('theme').click(), {fading})") > 0


def test_a_phone_taps_a_cell_and_reads_its_sum(opened):
    page = opened(example(), viewport={"width": 375, "height": 812}, has_touch=True, is_mobile=True)
    page.cell("dV", 1, 1).tap()
    assert "dV[1,1] = Σi A[i,1] · dO[i,1]" in page.tab.locator("#sum").inner_text()
    box = page.tab.locator("#sum .head").bounding_box()
    assert box["y"] + box["height"] <= 812
    page.tab.locator("#fold").tap()
    assert page.tab.locator("#dock-body").is_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_number_can_be_read_on_its_colour(opened, theme):
    page = opened(example(causal=True), color_scheme=theme)
    contrasts = page.tab.evaluate(
        """() => {
      const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      const light = (colour) => {
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => linear(x / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return [...document.querySelectorAll('#flow td:not(.hidden)')].map((c) => {
        const s = getComputedStyle(c), [a, b] = [light(s.color), light(s.backgroundColor)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    }"""
    )
    assert min(contrasts) >= 4.5


def test_the_theme_can_be_switched(opened):
    page = opened(example(), color_scheme="light")
    page.tab.locator("#theme").click()
    assert page.tab.evaluate("document.documentElement.dataset.theme") == "dark"


def test_it_prints_every_matrix_and_no_controls(opened):
    page = opened(example(), "#step=Z")
    page.tab.emulate_media(media="print")
    page.tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    for name in ALL:
        assert page.tab.locator(f"#step-{name}").is_visible()
        assert page.tab.locator(f"#step-{name}").evaluate("(f) => getComputedStyle(f).opacity") == "1"
    assert page.tab.locator(".tools").is_hidden()
    assert page.tab.locator(".stepper").is_hidden()
    forward, backward = (page.tab.locator(f"#step-{n}").bounding_box() for n in ("Q", "dQ"))
    assert forward["y"] == backward["y"]
    assert backward["x"] > forward["x"] + forward["width"]
    page.tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.tab.evaluate("window.attngrad.state().step") == "Z"
    assert page.tab.pdf(prefer_css_page_size=True).count(b"/Type /Page\n") == 1


def test_a_step_on_a_narrow_screen_is_not_behind_the_panel(opened):
    page = opened(example(), "#step=dS", viewport={"width": 375, "height": 760})
    for _ in range(2):
        step, dock = (page.tab.locator(place).bounding_box() for place in (".current", "#dock"))
        assert step["y"] >= 0
        assert step["y"] + step["height"] <= dock["y"]
        page.tab.keyboard.press("[")


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
