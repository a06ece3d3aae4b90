"""Every example in the docs runs and prints what it says."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_on_a_page_run(page):
    failures, _ = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert failures == 0


def test_the_readme_has_examples():
    _, examples = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=FLAGS)
    assert examples >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    import re

    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
