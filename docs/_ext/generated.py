"""Pages that write themselves: ``{public-names}`` from ``attngrad.__all__`` and the bridges, ``{option-table}`` from
the table of options, ``{errata}`` and ``{errata-summary}`` from a run of the errata, ``{worked-page}`` from a trace.

``{guides}`` is a toctree some of whose patterns may match no page. The empty line that ends a doctest is not shown. The
sidebar has the pages of the contents, not those below them.
"""

import inspect
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_type_hints

import numpy as np
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from furo.navigation import get_navigation_tree
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.docutils import SphinxDirective
from sphinx.util.matching import patfilter

import attngrad
from attngrad import errata
from attngrad.core.options import OPTIONS, OptionArguments
from attngrad.explain import examples

SECTIONS = {  # where an option is shown, on the page Options
    "causal": "causal-when-queries-and-keys-differ-in-number",
    "offset": "causal-when-queries-and-keys-differ-in-number",
    "window": "windows",
    "mask": "who-sees-whom",
    "bias": "bias-an-addend-of-the-scores",
    "softcap": "softcap-scores-that-cannot-grow",
    "sinks": "sinks-attention-that-may-go-nowhere",
    "dropout": "dropout-that-can-be-repeated",
    "seed": "dropout-that-can-be-repeated",
    "segments": "packed-sequences",
    "return_lse": "a-loss-of-the-log-sum-exp",
}


def autodoc(directive: str, name: str, *options: str) -> str:
    """An autodoc directive, in MyST."""
    body = "\n".join([f".. {directive}:: {name}", *(f"   :{option}:" for option in options)])
    return f"```{{eval-rst}}\n{body}\n```\n"


def described(name: str, value: Any) -> str:
    """The autodoc directive that fits what the name is."""
    if inspect.isclass(value):
        return autodoc("autoclass", name, "members")
    takes_options = "options" in inspect.signature(value).parameters
    return autodoc("autofunction", name) + ("\n`**options`: [the table](#options).\n" if takes_options else "")


def own_names(module: ModuleType) -> Iterator[str]:
    """The public functions and classes of a module: those of ``__all__``, or else those that it defines."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    for name in names:
        value = getattr(module, name)
        mine = str(getattr(value, "__module__", "")).startswith(module.__name__)
        if callable(value) and (mine or hasattr(module, "__all__")):
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


class OptionTable(SphinxDirective):
    """Every option: its type and default from the table of options, its meaning from the page Options."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        page = (Path(self.env.srcdir) / "options.md").read_text()
        meanings = dict(re.findall(r"^\| (`.+?`) \| (.+) \|$", page, re.M))
        text = ["| option | type | default | meaning |", "|---|---|---|---|"]
        for name, hint in get_type_hints(OptionArguments).items():
            [meaning] = [said for names, said in meanings.items() if re.search(rf"\b{name}\b", names)]
            row = OPTIONS.get(name)
            default = {"scale": "1/sqrt(D)", "offset": "S - T"}.get(name, f"`{row.default if row else False}`")
            kind = row.kind.value if row and row.is_array else plain(hint)
            gradient = " Has a gradient." if row and row.differentiable and "gradient" not in meaning else ""
            shown = f"[`{name}`](options.md#{SECTIONS[name]})" if name in SECTIONS else f"[`{name}`](options.md)"
            text.append(f"| {shown} | {kind} | {default} | {meaning}{gradient} |")
        found = self.parse_text_to_nodes("\n".join(text))
        for table in (table for node in found for table in node.findall(nodes.table)):
            table["classes"].append("options")
        return found


def plain(hint: Any) -> str:
    """The type of an option that is no array, as it is written; None, which stands for the default, is left out."""
    words = hint.__name__ if inspect.isclass(hint) else str(hint)
    return f"`{words.removesuffix(' | None')}`".replace("|", "\\|")


class Errata(SphinxDirective):
    """Every claim of the documents, judged now: a line per claim, to unfold."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        text = []
        for name, title in errata.DOCUMENTS.items():
            text.append(f"## {escaped(title)}\n\n`attngrad errata --document {name}`\n")
            text += [claim(r) for r in errata.run(name)]
        return self.parse_text_to_nodes("\n\n".join(text), allow_section_headings=True)


class ErrataSummary(SphinxDirective):
    """How many claims of each document are right and wrong; a title leads to its first wrong claim."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        table = ["| document | claims | right | wrong |", "|:--|--:|--:|--:|"]
        for name, title in errata.DOCUMENTS.items():
            results = errata.run(name)
            wrong = [r for r in results if not r.holds]
            shown = f'<a href="#{[*wrong, *results][0].entry.id}">{escape(title)}</a>'
            table.append(f"| {shown} | {len(results)} | {len(results) - len(wrong)} | {len(wrong)} |")
        return self.parse_text_to_nodes("\n".join(table))


def claim(r: errata.Result) -> str:
    """One claim, coloured and folded."""
    kind, sign = ("right", "✓") if r.holds else ("wrong", "✗")
    rows = [("says", r.entry.says, r.error), ("found", r.evidence, None)]
    if not r.holds:
        rows += [("wrong", r.entry.wrong, None), ("correct", r.entry.correct, r.corrected_error)]
    body = []
    for label, said, error in rows:
        if said:
            figure = "" if error is None else f" [{error:.1e}]"
            body.append(f"- *{label}* {literal(said) if label in ('says', 'correct') else escaped(said)}{figure}")
    head = f'<span class="verdict {kind}">{sign} {kind}</span> <b>{r.entry.id}</b> {escape(r.entry.title)}'
    where = f"{head} ({escape(r.entry.where)})"
    return (
        f'<details class="claim {kind}"><summary>{where}</summary><div class="body" id="{r.entry.id}">\n\n'
        + "\n".join(body)
        + "\n\n</div></details>\n"
    )


class WorkedPage(SphinxDirective):
    """The page of ``attngrad explain``, in a frame; on a phone and on paper a link, or with ``:picture:`` a picture."""

    option_spec: ClassVar = {"picture": directives.flag}

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        page = "_static/worked.html"
        frame = (
            f'<div class="worked"><iframe src="{page}" title="A backward pass, worked" loading="lazy"></iframe></div>'
        )
        found: list[nodes.Node] = [nodes.raw("", frame, format="html")]
        if "picture" in self.options:
            alt = "A backward pass, every matrix and the sum behind one number"
            found += [
                nodes.raw("", f'<a class="worked-picture" href="{page}">', format="html"),
                nodes.image(uri="explain/page.png", alt=alt, classes=["on-paper"]),
                nodes.image(uri="explain/phone.png", alt=alt, classes=["on-phones"]),
                nodes.raw("", "</a>", format="html"),
            ]
        link = f'<p><a href="{page}">Open it on a page of its own</a>.</p>'
        return [*found, nodes.raw("", link, format="html")]


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


def sections_only(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Make the tree of the sidebar again, one level deep."""
    if "toctree" in context:
        tree = context["toctree"](collapse=True, titles_only=True, maxdepth=1, includehidden=True)
        context["furo_navigation_tree"] = get_navigation_tree(tree)


def without_aliases(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a tuple that nothing is said of but their number."""
    return True if str(getattr(value, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register them."""
    app.add_directive("guides", Guides)
    app.add_directive("public-names", PublicNames)
    app.add_directive("option-table", OptionTable)
    app.add_directive("errata", Errata)
    app.add_directive("errata-summary", ErrataSummary)
    app.add_directive("worked-page", WorkedPage)
    app.connect("autodoc-skip-member", without_aliases)
    app.connect("doctree-read", without_empty_ends)
    app.connect("html-page-context", sections_only, priority=900)  # after the theme
    app.connect("build-finished", write_worked_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
