"""Every example in the docs runs and prints what it says; every page is on the site; the site builds cleanly."""

import doctest
import importlib.util
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.packaging.test_public import MODULES, NAMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples(text):
    return doctest.DocTestParser().get_examples(text)


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def links(text):
    return re.findall(r"\]\(([^)#:]+)\)", text)


def on_every_page_with(found_in):
    """The pages in whose text something is found."""
    pages = [page for page in PAGES if found_in(page.read_text())]
    assert pages
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@on_every_page_with(examples)
def test_the_examples_on_a_page_run(page):
    failures, attempted = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert failures == 0
    assert attempted > 0


@on_every_page_with(blocks)
def test_every_block_of_python_is_an_example_that_runs(page):
    for block in blocks(page.read_text()):
        assert block.startswith(">>> "), block
        assert block.endswith("\n\n"), f"an empty line ends the expected output: {block}"


@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("docs/derivation.md", 40), ("docs/start.md", 10)])
def test_a_page_has_examples(page, least):
    _, examples = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=FLAGS)
    assert examples >= least


@on_every_page_with(links)
def test_links_between_pages_lead_somewhere(page):
    for target in links(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_contents():
    listed = []
    for contents in DOCS.rglob("index.md"):
        folder = contents.parent.relative_to(DOCS)
        listed += [str(folder / name) for name in re.findall(r"^([\w/*]+)$", contents.read_text(), re.M)]
    assert listed
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert name == "index" or any(fnmatch(name, pattern) for pattern in listed), name


def test_the_derivation_has_the_numbered_formulas_of_the_notation():
    derivation, notation = ((DOCS / f"{name}.md").read_text() for name in ("derivation", "notation"))
    numbers = set(re.findall(r"\(([FRTH]\d)\)", notation))
    assert len(numbers) == 28
    missing = numbers - set(re.findall(r"\(([FRTH]\d)\)", derivation))
    assert missing == {"H8", "H9"}  # the sums of H3 for bias and sinks


def test_the_table_of_the_scale_is_what_is_measured():
    spec = importlib.util.spec_from_file_location("scale", DOCS / "figures" / "scale.py")
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (DOCS / "meaning.md").read_text(), re.M)
    assert [int(d) for d, _ in rows] == scale.SIZES
    for d, row in rows:
        if int(d) <= 1024:  # the others take their time
            said = [float(x.rstrip("%")) / (100 if x.endswith("%") else 1) for x in row.split(" | ")]
            pairs = zip(scale.measure(int(d), int(d) ** -0.5)[:4], scale.measure(int(d), 1.0)[:4], strict=True)
            assert said == pytest.approx([x for pair in pairs for x in pair], rel=0.06, abs=0.006), d


def test_the_masks_are_drawn_by_the_library():
    spec = importlib.util.spec_from_file_location("masks", DOCS / "figures" / "masks.py")
    masks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(masks)
    for title, queries, keys, options in masks.PANELS:
        seen = masks.seen(queries, keys, options)
        if options.get("causal"):
            i, j = seen.nonzero()
            assert (j <= i + options.get("offset", keys - queries)).all(), title
        assert 0 < seen.sum() < seen.size, title


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("sphinx", "myst_parser", "furo", "latex2mathml")),
    reason="the site needs more packages: make docs installs them and builds it",
)
def test_the_site_builds_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-q",
        "-d",
        tmp_path / "trees",
        DOCS,
        tmp_path,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert found.returncode == 0, found.stderr
    reference = (tmp_path / "api.html").read_text()
    flat = {id(value) for name, value in NAMES.items() if name.count(".") == 1}  # described there, not once more
    for name, value in NAMES.items():
        assert f'id="{name}"' in reference or (name.count(".") > 1 and id(value) in flat), name
    for name in MODULES[1:]:
        assert f'id="module-{name}"' in reference, name
    derivation = (tmp_path / "derivation.html").read_text()
    assert derivation.count("<math ") > 100
    assert '<span class="eqno">(R4)</span>' in derivation
    judged = (tmp_path / "errata.html").read_text()
    assert "back-pass-8" in judged
    assert "Self-Attention Gradients Calculation for Back Pass" in judged
    for page in tmp_path.glob("*.html"):
        assert not re.search(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="https?:', page.read_text()), (
            page.name
        )
