"""Every example in the docs runs and prints what it says; every page is on the site."""

import code
import doctest
import importlib.util
import re
import traceback
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
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


class Terminal(code.InteractiveConsole):
    """Python at a prompt: keeps what it complains of."""

    def __init__(self):
        super().__init__()
        self.complaints = ""

    def write(self, data):
        self.complaints += data

    def showtraceback(self, *_):
        self.write(traceback.format_exc())  # whatever hook another library has set

    showsyntaxerror = showtraceback


def pasted(text, capsys):
    """What the blocks of a page print, pasted into one session line by line; and what they say that they print."""
    terminal = Terminal()
    lines = [line for block in blocks(text) for line in [*block.splitlines(), ""]]
    for line in lines:
        terminal.push(line)
    assert terminal.complaints == ""
    said = [re.fullmatch(r"print\(.*\) +# (.*)", line).group(1) for line in lines if line.startswith("print")]
    return capsys.readouterr().out.splitlines(), said


def test_the_readme_can_be_pasted_and_prints_what_it_says(capsys):
    printed, said = pasted(README.read_text(), capsys)
    assert len(blocks(README.read_text())) >= 3
    assert len(printed) == len(said) >= 3
    for found, told in zip(printed, said, strict=True):
        assert told == found or told.startswith(f"{found}:")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_a_block_that_cannot_be_pasted_is_seen(capsys):
    for wrong in (">>> x = 1", "x = absent", "def f():\n    x = 1\n\n    return x", "def f():\n    return 1\nf()"):
        with pytest.raises(AssertionError):
            pasted(f"```python\n{wrong}\n```\n", capsys)
    assert pasted("```python\nprint(1)  # 2\n```\n", capsys) == (["1"], ["2"])


@on_every_page_with(blocks)
def test_every_block_of_python_is_an_example_that_runs(page):
    for block in blocks(page.read_text()) if page != README else ():
        assert block.startswith(">>> "), block
        assert block.endswith("\n\n"), f"an empty line ends the expected output: {block}"


@pytest.mark.parametrize(("page", "least"), [("docs/derivation.md", 40), ("docs/start.md", 10)])
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


def test_the_citation_is_that_of_the_file():
    said = dict(re.findall(r"^  (\w+) += \{+(.*?)\}+,?$", (DOCS / "index.md").read_text(), re.M))
    file = (ROOT / "CITATION.cff").read_text()
    assert set(said) == {"title", "author", "version", "license"}
    assert f'title: "{said["title"]}"' in file
    assert f"- name: {said['author']}" in file
    assert f"version: {said['version']}" in file
    assert f"license: {said['license']}" in file


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
