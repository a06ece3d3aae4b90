"""The page does what its controls say: steps, keys, links, heads."""

from __future__ import annotations

import pytest

import attngrad
from page_tools import SWITCHES, example


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
