"""The report in the terminal: verdict first, then the results by stage, the mistake, the fix, the smallest case."""

from __future__ import annotations

import io
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attngrad.auditor.report import AuditReport, short, symbol
from attngrad.explain.marks import mark, print_hanging, signs

_COLOUR = {"right": "bold green", "wrong": "bold red", "not audited": "bold yellow"}


WIDE = 72
"""Columns from which on a table has room for what is wrong with a result; below, that stands under it."""


def render(report: AuditReport, console: Console) -> None:
    """Print the report."""
    head, _, rest = report.verdict.partition(":")
    print_hanging(Text(), Text.assemble((head, _COLOUR[report.status]), f":{rest}"), console)
    if report.settings:
        facts = " · ".join(report.facts())
        facts = facts.replace("·", "|") if console.options.ascii_only else facts
        print_hanging(Text(), Text(facts, style="dim"), console)
    if report.stages:
        console.print()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("", "result", "error", "allowed", "wrong in"):
            table.add_column(name, justify="left" if name in ("", "result") else "right", no_wrap=True)
        below = []
        if wide := console.width >= WIDE:
            table.add_column("", ratio=1)
        for stage in report.stages:
            counted = f"{stage.wrong} of {stage.cases}" if stage.wrong else ""
            first = Text("first to diverge; ", "bold") if stage.name == report.first else Text()
            what = Text.assemble(first, stage.what)
            below += [] if stage.ok else [(Text(f"{symbol(stage.name)}: ", "bold"), what)]
            table.add_row(
                mark(console, stage.ok),
                Text(f"{symbol(stage.name)} ({stage.name})", "" if stage.ok else "bold"),
                short(stage.error),
                short(stage.allowed),
                counted,
                *((what,) if wide else ()),
            )
        console.print(table)
        for label, what in () if wide else below:
            print_hanging(label, what, console)
    _mistakes(report, console)
    _findings(report, console)
    for title, text in (
        ("The smallest failing case", report.smallest),
        ("What the candidate raised", report.traceback),
    ):
        if text:
            console.print()
            console.print(Text(title, "bold"))
            console.print(Text(indent(text.rstrip(), "    ", lambda line: True)), soft_wrap=True)


def _mistakes(report: AuditReport, console: Console) -> None:
    seen: set[str] = set()
    if len(report.explanations) > 1:
        console.print()
        console.print(Text("Numerically the same in every case; it may be any of these:", "italic"))
    for number, state in enumerate(report.explanations):
        if len(state) > 1 and len(report.explanations) > 1:
            console.print(Text(f"Explanation {number + 1}: {' + '.join(m.id for m in state)}", "bold"))
        for m in state:
            if m.id in seen:
                continue
            seen.add(m.id)
            console.print()
            title = Text.assemble(("The mistake  ", "dim"), (m.id, "bold red"), f": {m.title}")
            print_hanging(Text(), title, console)
            for label, value in m.rows():
                if value:
                    body = Text(signs(value, console), "bold" if label == "fix" else "")
                    print_hanging(Text(f"  {label:<9} ", "dim"), body, console)


def _findings(report: AuditReport, console: Console) -> None:
    patterns = [s for s in report.stages if s.pattern]
    unexplained = {f.name for f in report.findings if f.kind == "unexplained"}
    if patterns:
        console.print()
        words = "Wrong, and no known mistake explains it:" if unexplained else "Where it is wrong:"
        console.print(Text.assemble(("Finding  ", "bold red"), words))
        rows = Table.grid(padding=(0, 1))
        for stage in patterns:
            rows.add_row(Text(f"  {symbol(stage.name)}", "bold"), Text(stage.pattern))
        console.print(rows)
    for finding in report.findings:
        if finding.kind in ("wrong", "mistake", "unexplained"):
            continue
        if finding.fault and report.status == "not audited" and report.verdict.endswith(finding.text):
            continue
        console.print()
        label = ("Finding  ", "bold red") if finding.fault else ("Note  ", "bold cyan")
        console.print(Text.assemble(label, finding.text))
    for head, lines in (("Tried", report.tried), ("Not tried", report.untried)):
        if lines:
            console.print()
            print_hanging(Text(f"{head}  ", "dim"), Text("; ".join(lines) + ".", "dim"), console)


def as_text(report: AuditReport, width: int = 120) -> str:
    """The report without colours."""
    buffer: Any = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    render(report, console)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    return "\n".join(lines) + "\n"
