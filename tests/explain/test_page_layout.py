"""The page at every width, in both themes and on paper: all of it is visible, nothing is cut."""

from __future__ import annotations

import pytest

from page_tools import ALL, example


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
