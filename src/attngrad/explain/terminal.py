"""A trace in the terminal: every matrix as numbers on a signed heat, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attngrad.explain.marks import mark, print_hanging, signs
from attngrad.explain.windows import Matrix, by_stage, check_place, heat, matrix

if TYPE_CHECKING:
    from attngrad.explain.entries import Explanation
    from attngrad.explain.trace import Trace


CELL = 7
ROWS = 12
GAP = 3


def heat_table(m: Matrix) -> Table:
    """A small matrix as a table of numbers on a signed heat: blue below zero, orange above, a dot where hidden."""
    table = Table(box=None, padding=(0, 0), show_header=bool(m.columns), pad_edge=False, header_style="dim")
    if m.rows:
        table.add_column("", no_wrap=True, style="dim")
    for j in range(m.values.shape[1]):
        label = Text(_cut(m.columns[j], CELL - 1) + " ") if m.columns else ""
        table.add_column(label, justify="right", no_wrap=True, overflow="crop")
    for i, row in enumerate(heat(m)):
        cells = [Text(_cut(m.rows[i], CELL) + " ")] if m.rows else []
        for cell in row:
            if cell is None:
                cells.append(Text(f"{'.':>{CELL - 1}} ", "dim"))
            else:
                style = Style(color="white" if cell.dark else "black", bgcolor=cell.colour)
                cells.append(Text(f"{cell.text:>{CELL - 1}} ", style))
        table.add_row(*cells)
    return table


def _cut(label: str, width: int) -> str:
    """A label of at most ``width`` columns, control characters and wide characters told by their escape."""
    plain = "".join(c if c.isprintable() and ord(c) < 0x1100 else f"\\u{ord(c):x}" for c in label)
    return plain if len(plain) <= width else plain[: width - 1] + "~"


class _Block:
    """A matrix with its title, and the columns that it takes."""

    def __init__(self, console: Console, trace: Trace, m: Matrix) -> None:
        rule = trace.rules[m.name]
        line = f"[bold]{m.name}[/bold] {'=' if rule.entry else ''} {signs(rule.formula, console)}"
        title = len(m.name) + 3 + len(rule.formula)
        body = m.values.shape[1] * CELL + (min(CELL, max(map(len, m.rows))) + 1 if m.rows else 0)
        self.width = max(title, len(m.cut), body)
        self.drawn = Group(line, *([f"[dim]{m.cut}[/dim]"] if m.cut else []), heat_table(m))


def render(trace: Trace, console: Console | None = None, *, head: int = 0, batch: int = 0) -> None:
    """Print every step of one head, side by side where there is room, and the invariants."""
    check_place("trace.print", trace, head, batch)
    console = console or Console(highlight=False)
    width = console.width
    console.print(trace.summary(), highlight=False)
    several = trace.operands.heads > 1 or len(trace.operands.q.shape) > 3
    where = ", ".join([f"head {head}"] + ([f"batch {batch}"] if len(trace.operands.q.shape) > 3 else []))
    for title, names in by_stage(trace):
        console.print()
        fits = several and len(title) + len(where) + 5 <= width
        console.rule(f"[bold]{title}[/bold]" + (f" [dim]({where})[/dim]" if fits else ""), align="left")
        blocks(console, trace, names, head, batch)
    console.rule("[bold]What must hold[/bold]", align="left")
    invariant_lines(console, trace)


def blocks(console: Console, trace: Trace, names: Sequence[str], head: int, batch: int) -> None:
    """Print these steps, side by side where there is room."""
    width = console.width
    room = max(1, (width - CELL - 1) // CELL) if trace.tokens else max(1, width // CELL)
    for line in _pack([_Block(console, trace, matrix(trace, n, head, batch, ROWS, room)) for n in names], width):
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for block in line:
            grid.add_column(min_width=min(block.width, width), no_wrap=len(line) > 1)
        grid.add_row(*(block.drawn for block in line))
        console.print(grid, highlight=False)
        console.print()


def _pack(blocks: Sequence[_Block], width: int) -> list[list[_Block]]:
    """Blocks in lines, each as full as the width allows."""
    lines: list[list[_Block]] = []
    used = 0
    for block in blocks:
        if lines and used + GAP + block.width <= width:
            lines[-1].append(block)
            used += GAP + block.width
        else:
            lines.append([block])
            used = block.width
    return lines


def invariant_lines(console: Console, trace: Trace) -> None:
    """A line for each invariant: its mark, the claim, the error."""
    longest = max((len(i.claim) for i in trace.invariants), default=0)
    longest = longest if longest + 16 <= console.width else 0
    for i in trace.invariants:
        claim = f"{signs(i.claim, console):<{longest}}  off by {i.error:.0e}"
        print_hanging(Text.assemble(mark(console, i.holds), " "), Text(claim), console)


def explanation(console: Console, found: Explanation, difference: float | None = None) -> None:
    """Print the sum behind one entry, and what finite differences make of it."""
    what = escape(f"[{found.place}] = {signs(found.entry or found.formula, console)}")
    console.print(f"[bold]{found.name}[/bold]{what}", highlight=False)
    if found.note:
        console.print(f"[dim]{found.note}[/dim]", highlight=False)
    table = plain_table("", "term", "numbers", "product", wraps="term")
    for term in found.terms:
        sign, labels, numbers = term.parts(".4f")
        table.add_row(sign, escape(labels), numbers, f"{term.value: .6f}")
    if found.terms:
        console.print(table, highlight=False)
    last = {
        "scale": f"times the scale, {found.factor:.6f}",
        "log": f"the logarithm of the sum, plus m = {found.factor:.6f}",
        "exp": "the exponential of the sum",
        "": "the sum",
    }[found.outer]
    console.print(f"{last if found.terms else 'the value'}: [bold]{found.value:.6f}[/bold]", highlight=False)
    if difference is not None:
        console.print(f"by finite differences: {difference:.6f}", highlight=False)


def plain_table(*columns: str, wraps: str | None = None) -> Table:
    """A table without lines. In a narrow terminal the column ``wraps`` takes more rows, and none is cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != wraps, overflow="fold")
    return table
