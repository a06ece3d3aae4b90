"""The findings in one line, as JSON, and for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attngrad.errata._claim import TOLERANCE, Result
from attngrad.errata._entries import DOCUMENTS
from attngrad.explain.marks import mark, print_hanging, signs
from attngrad.formulas.report import figure

if TYPE_CHECKING:
    from rich.console import Console


def summary(results: Sequence[Result]) -> str:
    """One line: how many claims hold, how many are wrong, and how well the corrected forms do.

    >>> from attngrad import errata
    >>> summary(errata.run("equation-z")).partition(";")[0]
    '7 claims: 2 hold, 5 are wrong'
    """
    wrong = [r for r in results if not r.holds]
    right = len(results) - len(wrong)
    line = (
        f"{len(results)} claim{'s' * (len(results) != 1)}: {right} hold{'s' * (right == 1)}, "
        f"{len(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong"
    )
    if not wrong:
        return f"{line}."
    errors = [r.corrected_error for r in wrong]
    failed = [r.entry.id for r in wrong if r.corrected_error is None or r.corrected_error >= TOLERANCE]
    if failed:
        return f"{line}; the corrected form does not hold for {', '.join(failed)}."
    return f"{line}; every corrected form holds to {figure(max(e for e in errors if e is not None))}."


def fragment(results: Sequence[Result]) -> str:
    """The findings for a notebook: the documents folded where there are several; of each claim what the terminal says.

    >>> from attngrad import errata
    >>> fragment(errata.run("equation-z")).count("</b></td>")
    7
    """
    from attngrad.explain import notebook

    parts = []
    for name, title in DOCUMENTS.items():
        rows = [
            (notebook.sign(r.holds), f"{r.entry.id}  {r.entry.title}", notebook.table((), _told(r)))
            for r in results
            if r.entry.document == name
        ]
        if rows:
            table = notebook.table((), rows)
            parts.append(table if len(rows) == len(results) else notebook.folded(title, table))
    return notebook.report(None, summary(results), *parts)


def _told(r: Result) -> list[tuple[str, str]]:
    """The rows of a claim, errors in brackets."""
    return [(label, signs(text) + ("" if e is None else f"  [{figure(e)}]")) for label, text, e in r.rows()]


_SAID = ("id", "document", "where", "title", "says", "wrong", "correct")
_FOUND = ("holds", "error", "corrected_error", "evidence")


def to_json(results: Sequence[Result]) -> str:
    """The findings as a JSON object: documents, claims, summary. An error without a number is null.

    Timings are left out, so that one seed gives the same text in every run.

    >>> from attngrad import errata
    >>> json.loads(to_json(errata.run("equation-z")))["summary"]["wrong"]
    5
    """
    claims = [
        {name: getattr(r.entry, name) for name in _SAID} | {name: getattr(r, name) for name in _FOUND} for r in results
    ]
    found = {
        "claims": len(results),
        "hold": sum(r.holds for r in results),
        "wrong": sum(not r.holds for r in results),
        "text": summary(results),
    }
    return json.dumps({"documents": DOCUMENTS, "claims": claims, "summary": found}, indent=2, allow_nan=False)


LEGEND = (
    "Every claim is computed now, in float64, and compared with the derivative by the complex step. In brackets: the "
    "error, relative to the largest entry. Code is judged as it runs, a formula as a matrix formula in its document's "
    "notation; where a more charitable reading holds, it is named."
)


def render(results: Sequence[Result], console: Console) -> None:
    """Print the findings: a heading per document, a block per claim, the summary last.

    >>> from rich.console import Console
    >>> from attngrad import errata
    >>> render(errata.run("explicit-formula")[:1], Console(width=60, quiet=True))
    """
    from rich.text import Text

    print_hanging(Text(), Text(LEGEND, style="dim"), console)
    for name, title in DOCUMENTS.items():
        of_document = [r for r in results if r.entry.document == name]
        if not of_document:
            continue
        console.print()
        _print_heading(name, title, of_document, console)
        apart = True
        for result in of_document:
            if apart or not result.holds:
                console.print()
            _print_block(result, console)
            apart = not result.holds
    console.print()
    print_hanging(Text(), Text(summary(results), style="bold"), console)


def render_few(results: Sequence[Result], console: Console) -> None:
    """Print some findings in short, each under the title of its document.

    >>> from rich.console import Console
    >>> from attngrad import errata
    >>> render_few(errata.run("explicit-formula")[:1], Console(width=60, quiet=True))
    """
    from rich.text import Text

    last = ""
    for r in results:
        if r.entry.document != last:
            if last:
                console.print()
            print_hanging(Text(), Text(DOCUMENTS[r.entry.document], style="italic"), console)
        _print_block(replace(r, entry=replace(r.entry, where=""), evidence="", timing=""), console)
        last = r.entry.document


def _print_heading(name: str, title: str, results: Sequence[Result], console: Console) -> None:
    """The title in a rule; below it the name, and the count."""
    from rich.rule import Rule
    from rich.text import Text

    heading = Text(title, style="bold")
    if heading.cell_len + 2 <= console.width:
        console.print(Rule(heading, align="left", style="dim"))
    else:  # a rule would cut it
        print_hanging(Text(), heading, console)
    wrong = sum(not r.holds for r in results)
    count = f"{len(results)} claim{'s' * (len(results) != 1)}, {f'{wrong} wrong' if wrong else 'none wrong'}"
    print_hanging(Text(), Text(f"{name}: {count}", style="dim"), console)


def _print_block(r: Result, console: Console) -> None:
    """Mark, id and title; below them what it says and what was found, by label."""
    from rich.text import Text

    colour = "green" if r.holds else "red"
    head = Text.assemble(mark(console, r.holds), " ", (r.entry.id, colour), "  ")
    where = f"  ({r.entry.where})" if r.entry.where else ""
    print_hanging(head, Text.assemble((r.entry.title, "bold"), (where, "dim")), console)

    for label, text, error in r.rows():
        body = Text(signs(text, console))
        if error is not None:
            body.append(f"  [{figure(error)}]", style=colour if label == "says" else "green")
        print_hanging(Text(f"    {label:<9}", style="dim"), body, console)
