"""What is public says what it is: a docstring with an example that runs, and a place in the reference."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import attngrad

ROOT = Path(__file__).parents[2]
MODULES = ["attngrad", *(f"attngrad.{name}" for name in (*attngrad._MODULES, *attngrad._BRIDGES))]
VERSION = attngrad.__version__


def public():
    """Every function and class of every public module, by its full name."""
    for place in MODULES:
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                yield f"{place}.{name}", value


NAMES = dict(public())
METHODS = {
    f"{name}.{method}": getattr(value, method)
    for name, value in NAMES.items()
    if inspect.isclass(value)
    for method, function in vars(value).items()
    if not method.startswith("_") and (inspect.isroutine(function) or isinstance(function, property))
}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_an_example(name):
    text = inspect.getdoc(NAMES[name]) or ""
    assert re.match(r"\S.*[.:]$", text.split("\n\n")[0], re.S), text
    assert ">>> " in text


@pytest.mark.parametrize("name", METHODS)
def test_a_public_method_has_a_docstring(name):
    assert inspect.getdoc(METHODS[name])


def test_the_public_modules_are_all_here_and_say_what_they_are():
    folder = Path(attngrad.__file__).parent
    files = {p.stem for p in folder.glob("[a-z]*.py")} | {p.parent.name for p in folder.glob("[a-z]*/__init__.py")}
    internal = {
        "auditor",
        "backends",
        "cli",
        "core",
        "explain",
        "formulas",
        "functional",
        "pytest_plugin",
    }  # reached through functions of attngrad, and the command
    assert {f"attngrad.{name}" for name in files - internal} == set(MODULES) - {"attngrad"}
    for place in MODULES:
        assert importlib.import_module(place).__doc__, place


def test_the_version_stands_in_one_place():
    """CITATION.cff has to repeat it; nothing else does."""
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    sources = *(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")
    for path in (*ROOT.glob("*.*"), *sources, ROOT / "docs/conf.py"):
        if path.is_file() and path.name not in ("CITATION.cff", "__init__.py"):
            assert VERSION not in path.read_text(errors="replace"), path
    assert (ROOT / "src/attngrad/__init__.py").read_text().count(VERSION) == 1


def test_the_citation_is_whole_and_invents_nobody():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(cited)
    assert cited["authors"] == [{"name": "The attngrad authors"}]
    assert cited["title"].startswith("attngrad")
    assert not re.search(r"https?:|@", (ROOT / "CITATION.cff").read_text())
