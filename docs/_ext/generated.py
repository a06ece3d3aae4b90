"""Pages that write themselves: ``{public-names}`` from ``attngrad.__all__`` and the bridges, ``{errata}`` from a run of
the errata, ``{worked-page}`` from a trace.

``{guides}`` is a toctree some of whose patterns may match no page. The empty line that ends a doctest is not shown.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.docutils import SphinxDirective
from sphinx.util.matching import patfilter

import attngrad
from attngrad import errata
from attngrad.explain import examples


def autodoc(directive: str, name: str, *options: str) -> str:
    """An autodoc directive, in MyST."""
    body = "\n".join([f".. {directive}:: {name}", *(f"   :{option}:" for option in options)])
    return f"```{{eval-rst}}\n{body}\n```\n"


def described(name: str, value: Any) -> str:
    """The autodoc directive that fits what the name is."""
    if inspect.isclass(value):
        return autodoc("autoclass", name, "members")
    return autodoc("autofunction", name)


def own_names(module: ModuleType) -> Iterator[str]:
    """The public functions and classes of a module: those of ``__all__``, or else those that it defines."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    for name in names:
        value = getattr(module, name)
        mine = str(getattr(value, "__module__", "")).startswith(module.__name__)
        if (inspect.isclass(value) or inspect.isfunction(value)) and (mine or hasattr(module, "__all__")):
            yield name


class PublicNames(SphinxDirective):
    """Every public name with its docstring: functions, classes, then modules."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        names = [name for name in dir(attngrad) if not name.startswith("_")]
        found = {name: self.value(name) for name in names}
        values = {name: value for name, value in found.items() if value is not None}
        modules = {name: value for name, value in values.items() if isinstance(value, ModuleType)}
        flat = {name: value for name, value in values.items() if name not in modules}
        functions = [name for name, value in flat.items() if not inspect.isclass(value)]
        classes = [name for name, value in flat.items() if inspect.isclass(value)]
        text = ["## Functions\n", *(described(f"attngrad.{name}", flat[name]) for name in functions)]
        text += ["## Classes\n", *(described(f"attngrad.{name}", flat[name]) for name in classes)]
        for name, module in modules.items():
            text += [f"## attngrad.{name}\n", autodoc("automodule", f"attngrad.{name}")]
            members = [member for member in own_names(module) if getattr(module, member) not in flat.values()]
            text += [described(f"attngrad.{name}.{member}", getattr(module, member)) for member in members]
        for name in (name for name in names if found[name] is None):
            text.append(f"## attngrad.{name}\n\nIts package was not installed where this site was built.\n")
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)

    def value(self, name: str) -> Any:
        """What the name stands for; None for a bridge whose package is not installed."""
        try:
            return getattr(attngrad, name)
        except ImportError:
            return None


class Errata(SphinxDirective):
    """Every claim of the documents, judged now."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        text = []
        for name, title in errata.DOCUMENTS.items():
            results = errata.run(name)
            wrong = sum(not r.holds for r in results)
            text.append(f"## {escaped(title)}\n\n`{name}`: {len(results)} claims, {wrong or 'none'} wrong.\n")
            for r in results:
                text.append(f"**{'✓' if r.holds else '✗'} {r.entry.id}** {r.entry.title} ({r.entry.where})\n")
                rows = [("says", r.entry.says, r.error), ("found", r.evidence, None)]
                if not r.holds:
                    rows += [("wrong", r.entry.wrong, None), ("correct", r.entry.correct, r.corrected_error)]
                for label, said, error in rows:
                    if said:
                        figure = "" if error is None else f" [{error:.1e}]"
                        shown = literal(said) if label in ("says", "correct") else escaped(said)
                        text.append(f"- *{label}* {shown}{figure}")
                text.append("")
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


class WorkedPage(SphinxDirective):
    """The page of ``attngrad explain``, in a frame."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        frame = (
            '<iframe class="worked" src="_static/worked.html" title="A backward pass, worked" loading="lazy"></iframe>'
            '<p>Forward and backward beside each other: <a href="_static/worked.html">on a page of its own</a>.</p>'
        )
        return [nodes.raw("", frame, format="html")]


def write_worked_page(app: Sphinx, error: Exception | None) -> None:
    """What the frame shows."""
    if error is None and app.builder.format == "html":
        arrays, tokens = examples.make(None, None, None, 0)
        dout = np.random.default_rng([0, 1]).standard_normal(arrays["q"].shape)
        trace = attngrad.trace(**arrays, dout=dout, tokens=tokens, causal=True)
        (Path(app.outdir) / "_static" / "worked.html").write_text(trace.to_html())


def literal(text: str) -> str:
    """The text as it stands, whatever signs it has."""
    ticks = "`" * (1 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return f"{ticks}{text}{ticks}"


def escaped(text: str) -> str:
    """Prose, with signs that mean nothing to MyST."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!$|<>~^])", r"\\\1", text)


class Guides(TocTree):
    """A toctree of patterns, without those that match no page."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        self.options["glob"] = True
        self.content = StringList([line for line in self.content if patfilter(self.env.found_docs, line)])
        return super().run()


def without_empty_ends(app: Sphinx, doctree: nodes.document) -> None:
    """Take the empty lines off the end of every code block."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext().rstrip()
        if text and len(block.children) == 1 and isinstance(block[0], nodes.Text):
            block.rawsource = text
            block[0] = nodes.Text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register them."""
    app.add_directive("guides", Guides)
    app.add_directive("public-names", PublicNames)
    app.add_directive("errata", Errata)
    app.add_directive("worked-page", WorkedPage)
    app.connect("doctree-read", without_empty_ends)
    app.connect("build-finished", write_worked_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
