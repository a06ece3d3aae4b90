"""The findings, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attngrad.errata._documents import DOCUMENTS
from attngrad.errata._records import Result
from attngrad.errata._report import summary
from attngrad.explain.marks import mark, print_hanging
from attngrad.formulas.report import figure

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = (
    "Every claim is computed now, in float64, beside the derivative by the complex step. In brackets: the error, "
    "relative to the largest entry. Code is judged as it runs, a formula as a matrix formula in its document's "
    "notation; a kinder reading that holds is named."
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
    print_hanging(head, Text.assemble((r.entry.title, "bold"), (f"  ({r.entry.where})", "dim")), console)

    def line(label: str, text: str, error: float | None = None) -> None:
        body = Text(text)
        if error is not None:
            body.append(f"  [{figure(error)}]", style=colour if label == "says" else "green")
        print_hanging(Text(f"    {label:<9}", style="dim"), body, console)

    line("says", r.entry.says, r.error)
    if r.evidence:
        line("note" if r.holds else "found", r.evidence)
    if r.timing:
        line("time", r.timing)
    if not r.holds:
        line("wrong", r.entry.wrong)
        line("correct", r.entry.correct, r.corrected_error)
