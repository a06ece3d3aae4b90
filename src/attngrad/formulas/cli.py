"""What ``attngrad audit --formula`` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from attngrad.formulas.report import FormulaReport

HOLDS, WRONG, UNREADABLE = 0, 1, 2


def run(text: str, as_json: bool) -> int:
    """Judge a formula and print the report; 0 where it holds, 1 where it is wrong, 2 where it cannot be read."""
    from attngrad.formulas import FormulaError, audit_formula

    try:
        report = audit_formula(text)
    except FormulaError as error:
        if as_json:
            told = {"text": text, "kind": "unreadable", "ok": False, "error": error.message, "position": error.position}
            click.echo(json.dumps(told, indent=2))
        else:
            click.echo(str(error), err=True)
        return UNREADABLE
    if as_json:
        click.echo(report.to_json())
    else:
        from rich.console import Console

        render(report, Console())
    return HOLDS if report.ok else WRONG


def render(report: FormulaReport, console: Console) -> None:
    """Print the report: the verdict first, the formula with its shapes, then what was found and the right formula."""
    from rich.text import Text

    from attngrad.explain.marks import mark, print_hanging
    from attngrad.formulas.report import figure

    head = Text.assemble(mark(console, report.ok), " ", (report.kind, "bold green" if report.ok else "bold red"))
    if report.error is not None:
        head.append(f"  [{figure(report.error)}]", style="dim")
    console.print(head)
    # Shapes stand under their names, so these two lines are never folded.
    for line, style in zip(report.shapes.splitlines(), ("bold", "cyan"), strict=False):
        console.print(Text(f"    {line}", style=style), soft_wrap=True)
    for label, text in report.rows():
        body = Text(text, style="green" if label == "correct" else "")
        print_hanging(Text.assemble("    ", (f"{label:<9}", "dim")), body, console)
