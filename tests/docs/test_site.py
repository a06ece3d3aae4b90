"""The site builds without a warning and every link on it leads somewhere; in a real Chromium nothing overflows at the
widths of a phone, a tablet and a laptop.

Skipped, loudly, where there is no Chromium; under CI=true that is a failure.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.packaging.test_public import MODULES, NAMES

DOCS = Path(__file__).parents[2] / "docs"
WIDTHS = (375, 768, 1280)
NEEDED = ("sphinx", "myst_nb", "furo", "latex2mathml", "sphinx_design")

pytestmark = [
    pytest.mark.xdist_group("site"),  # built once
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDED),
        reason="the site needs more packages: make docs installs them and builds it",
    ),
]

# What sticks out: of the window, or, a code block or a table, of its box. What is folded is unfolded first.
OVERFLOWING = """() => {
  document.querySelectorAll('article details').forEach(e => { e.open = true; });
  const found = [], root = document.documentElement, article = document.querySelector('article');
  if (root.scrollWidth > root.clientWidth) found.push(`page: ${root.scrollWidth} > ${root.clientWidth}`);
  const edge = article.getBoundingClientRect().right + 1;
  for (const e of article.querySelectorAll('pre, table, .table-wrapper, div.math')) {
    if (!e.checkVisibility()) continue;
    const box = e.getBoundingClientRect(), said = e.textContent.trim().slice(0, 60);
    if (e.scrollWidth > e.clientWidth + 1) found.push(`${e.tagName}: ${e.scrollWidth} > ${e.clientWidth}: ${said}`);
    if (box.right > edge) found.push(`${e.tagName}: ends at ${box.right}, its page at ${edge}: ${said}`);
  }
  return found;
}"""
# Exponents that do not reach down to what they are exponents of: what MathML looks like without a math font.
FLOATING = """() => [...document.querySelectorAll('msup')].filter(e => {
  const [base, exponent] = [...e.children].map(c => c.getBoundingClientRect());
  return !/[\u2032\u2033]/.test(e.textContent) && exponent.bottom < base.top + 0.2 * base.height;
}).map(e => e.textContent)"""


# Of each picture: its name, how wide it is shown, and how wide it was drawn.
PICTURES = """() => [...document.querySelectorAll('article img')].filter(e => e.checkVisibility()).map(
  e => [e.src.slice(0, 80), e.getBoundingClientRect().width, e.naturalWidth])"""
RECIPES = sorted(path.stem for path in (DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-q",
        "-d",
        folder / "trees",
        DOCS,
        folder / "html",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert found.returncode == 0, found.stderr
    return folder / "html"


def pages(site: Path) -> list[Path]:
    found = [page for page in sorted(site.rglob("*.html")) if "_static" not in page.parts]
    assert len(found) > 80
    return found


def test_the_site_has_every_name_and_asks_nothing_of_another_host(site):
    reference = (site / "api.html").read_text()
    flat = {id(value) for name, value in NAMES.items() if name.count(".") == 1}  # described there, not once more
    for name, value in NAMES.items():
        assert f'id="{name}"' in reference or (name.count(".") > 1 and id(value) in flat), name
    for name in MODULES[1:]:
        assert f'id="module-{name}"' in reference, name
    derivation = (site / "derivation.html").read_text()
    assert derivation.count("<math ") > 100
    assert '<span class="eqno">(R4)</span>' in derivation
    for page in pages(site):
        text = page.read_text()
        assert not re.search(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="https?:', text), page.name
        assert "mistakes/scale-by-d.html" not in text.split('class="main"')[0], f"{page.name}: a mistake in the sidebar"


def test_the_errata_are_folded_and_say_which_claims_are_wrong(site):
    judged = (site / "errata.html").read_text()
    assert "Self-Attention Gradients Calculation for Back Pass" in judged
    assert re.search(r'<details class="claim wrong">(?:(?!</details>).)*id="back-pass-8"', judged, re.S)
    assert re.search(r'<details class="claim right">(?:(?!</details>).)*id="equation-z-1"', judged, re.S)


def test_the_reference_has_a_row_for_every_option(site):
    from attngrad.core.options import OPTION_NAMES

    section = (site / "api.html").read_text().split('<section id="functions">')[0]
    for name in OPTION_NAMES:
        assert re.search(rf'<td>.*href="options.html.*<span class="pre">{name}</span>', section), name


class Links(HTMLParser):
    """What a page leads to, and where it can be led to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def broken(site: Path) -> list[str]:
    """The links on the site that lead nowhere."""
    found = {page: Links(page.read_text()) for page in sorted(site.rglob("*.html"))}
    wrong = []
    for page, links in found.items():
        for target in links.targets:
            if re.match(r"[a-z]+:", target):
                continue
            path, fragment = urldefrag(unquote(target))
            file = (page.parent / path.split("?")[0]).resolve() if path else page
            known = found.get(file)
            if not file.exists() or (
                fragment and known and page.parent.name != "_static" and fragment not in known.ids
            ):
                wrong.append(f"{page.relative_to(site)}: {target}")
    return wrong


@pytest.mark.thorough
def test_every_link_leads_somewhere(site, tmp_path):
    assert broken(site) == []
    for name, text in (("a.html", '<a href="b.html#here">'), ("b.html", '<p id="there"><img src="no.png">')):
        (tmp_path / name).write_text(text)
    assert broken(tmp_path) == ["a.html: b.html#here", "b.html: no.png"]


@pytest.mark.thorough
def test_no_page_code_block_or_table_overflows(site, browser):
    tab = browser.new_page(offline=True)
    wrong = []
    for page in pages(site):
        tab.goto(page.as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            wrong += [f"{page.relative_to(site)} at {width}: {what}" for what in tab.evaluate(OVERFLOWING)]
    assert wrong == []
    tab.set_content("<article style='width: 200px'><pre>" + "x" * 500 + "</pre></article>")
    assert len(tab.evaluate(OVERFLOWING)) >= 2  # the page, and the block
    tab.close()


@pytest.mark.thorough
def test_formulas_have_their_font(site, browser):
    tab = browser.new_page(offline=True)
    tab.goto((site / "derivation.html").as_uri())
    assert tab.evaluate("document.fonts.ready.then(() => [...document.fonts].map(f => [f.family, f.status]))") == [
        ["STIX Two Math", "loaded"]
    ]
    assert tab.locator("msup").count() > 20
    assert tab.evaluate(FLOATING) == []
    tab.add_style_tag(content="math { font-family: serif !important; }")
    assert tab.evaluate(FLOATING) != []
    tab.close()


@pytest.mark.thorough
def test_the_worked_page_shows_forward_and_backward_in_its_frame(site, browser):
    tab = browser.new_page(offline=True, viewport={"width": 1280, "height": 900})
    tab.goto((site / "index.html").as_uri())
    tab.locator(".worked").scroll_into_view_if_needed()
    frame = tab.frame_locator(".worked iframe")
    visible = tab.locator(".worked").bounding_box()
    for name in ("Q", "O", "dQ", "dO"):
        box = frame.locator(f"#step-{name}").bounding_box()
        assert visible["x"] <= box["x"], name
        assert box["x"] + box["width"] <= visible["x"] + visible["width"], name
        assert box["y"] + box["height"] <= visible["y"] + visible["height"], name
    tab.set_viewport_size({"width": 375, "height": 900})
    assert not tab.locator(".worked").is_visible()
    assert tab.locator(".worked-picture img.on-phones").is_visible()
    assert not tab.locator(".worked-picture img.on-paper").is_visible()
    tab.close()


@pytest.mark.thorough
def test_pictures_keep_their_labels_legible_on_a_phone(site, browser):
    """They scroll, or are at least half as wide as they are drawn: labels of 10 px in a plot stay above 4."""
    tab = browser.new_page(offline=True, viewport={"width": 375, "height": 900})
    seen = 0
    for page in ("index", "benchmarks", "meaning", "options", "explain", *(f"notebooks/{name}" for name in RECIPES)):
        tab.goto((site / f"{page}.html").as_uri())
        for name, shown, drawn in tab.evaluate(PICTURES):
            seen += 1
            assert shown >= min(0.5 * drawn, 600), f"{page}: {name} is {shown} px wide of {drawn}"
    assert seen > 12
    tab.close()


# Names in code, and headings, of which a line ends within a word, where that is no longer than a third of the window.
CUT = """() => [...document.querySelectorAll('article :is(h1, h2, td:first-child code, th)')].filter(e => {
  const walk = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (walk.nextNode()) {
    for (const word of walk.currentNode.data.matchAll(/(?<![\\w.])[A-Za-z]{3,15}(?![\\w.])/g)) {
      range.setStart(walk.currentNode, word.index);
      range.setEnd(walk.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) return true;
    }
  }
  return false;
}).map(e => `${e.tagName}: ${e.textContent}`)"""


@pytest.mark.thorough
def test_words_are_not_cut_on_a_phone(site, browser):
    tab = browser.new_page(offline=True, viewport={"width": 375, "height": 900})
    wrong = []
    for page in ("index", "torch", "troubleshooting", "options", "reliability", "faq", "coming_from", "design", "api"):
        tab.goto((site / f"{page}.html").as_uri())
        wrong += [f"{page}: {what}" for what in tab.evaluate(CUT)]
    assert wrong == []
    tab.set_content("<article style='width: 60px; overflow-wrap: anywhere'><h1>Troubleshooting</h1></article>")
    assert len(tab.evaluate(CUT)) == 1
    tab.close()


@pytest.mark.thorough
def test_on_paper_nothing_is_cut_and_nothing_of_the_screen_is_left(site, browser):
    tab = browser.new_page(offline=True, viewport={"width": 718, "height": 1000})  # A4 less its margins, at 96 dpi
    tab.emulate_media(media="print")
    wrong = []
    for page in ("index", "api", "errata", "benchmarks", "compared", "derivation", "notebooks/force_matching"):
        tab.goto((site / f"{page}.html").as_uri())
        wrong += [f"{page}: {what}" for what in tab.evaluate(OVERFLOWING)]
        for left in (".skip-to-content", ".worked", ".on-phones", ".mobile-header", "footer"):
            wrong += [f"{page}: {left}"] * sum(e.is_visible() for e in tab.locator(left).all())
    assert wrong == []
    tab.close()
