"""The findings for a terminal: a table a group, memory and growth, geometric means, the bounds, and every loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.bounds import Verdict, judge
from benchmarks.grid import TITLES
from benchmarks.memory import D, Usage, exponent
from benchmarks.passes import PASSES
from benchmarks.peers import HOUSE, OURS
from benchmarks.results import Results, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 100
"""Columns from which on the spread is shown."""

LEGEND = (
    "Cases are B,H,T,D; a slash where sides differ: query/key heads, queries/keys, D/E. ms: medians. GF: GFLOP/s by "
    "the formulas of benchmarks/README.md. Ratios: the peer's time over ours, above 1 attngrad is faster."
)


def figure(value: float) -> str:
    """Three or four significant digits, without exponents; a dash for what was not measured.

    >>> figure(0.00571), figure(0.4321), figure(12.345), figure(1402.3), figure(math.nan)
    ('0.0057', '0.432', '12.3', '1402', '-')
    """
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share in whole percent, or a dash."""
    return f"{value:.0%}" if math.isfinite(value) else "-"


def ratio(value: float, judged: bool = True) -> str:
    """A ratio; red where it is a loss."""
    text = f"{value:.2f}" if math.isfinite(value) else "-"
    return f"[bold red]{text}[/bold red]" if judged and value < 1.0 else text


def render(results: Results, console: Console) -> None:
    """Print everything."""
    from rich.text import Text

    machine = results.machine
    console.print(
        f"[bold]{machine['cpu']}[/bold], {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in results.versions.items())
        + f"; commit {results.commit or 'unknown'}; {results.date}",
        highlight=False,
    )
    console.print(limits(results), highlight=False)
    console.print(Text(LEGEND, style="dim"))
    for group, rows in results.groups():
        console.print()
        console.print(group_table(results, group, rows, console.width))
    for row in results.rows:
        if row.failure is not None:
            console.print(f"[bold red]VERIFICATION FAILED[/bold red] {row.failure}", highlight=False)
    if results.memory:
        for work in results.usage():
            console.print()
            console.print(memory_table(results, work))
        for line in growth(results):
            console.print(line, highlight=False)
    if results.startup is not None:
        console.print()
        console.print(results.startup.sentence, highlight=False)
    if results.means():
        console.print()
        console.print(means_table(results))
    console.print()
    console.print(bounds_table(judge(results)))
    _print_losses(results, console)
    if absent := left_out(results):
        console.print("Left out:")
    for line in absent:
        console.print(Text(f"  {line}"))
    if results.disturbed:
        console.print(Text(disturbance(results), style="bold yellow"))
    for remark in results.remarks:
        console.print(Text(remark, style="yellow"))


def limits(results: Results) -> str:
    """What the machine can do, as measured in the same run."""
    peaks = ", ".join(f"{name} {rate / 1e9:.0f} GF" for name, rate in results.peak.items())
    bandwidth = f"{results.bandwidth / 1e9:.1f} GB/s" if results.bandwidth else "never on a quiet machine"
    return f"FMA rate beside the rows, at most: {peaks or 'not measured'}. Reading memory: {bandwidth}."


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True, header_style="dim")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True, header_style="dim")
    return table


def group_table(results: Results, group: str, rows: Sequence[Row], width: int) -> Table:
    """The rows of a group: our time and rate, torch's time, and the ratio to every contender."""
    by_bytes = any(row.by_bytes for row in rows)
    present = dict.fromkeys(name for row in rows for name in row.times if name != OURS)
    others = [name for name in present if name != "torch"]
    wide = width >= WIDE
    spread = ["+-"] if wide else []
    torch = ["torch", *spread, "ratio"] if "torch" in present else []
    rate = ["GB/s", "stream"] if by_bytes else ["GF", "peak"]
    table = _table(TITLES.get(group, group), ["case", "pass"], ["ms", *spread, *rate, *torch, *others])
    previous = None
    for row in rows:
        label = row.case.label if row.case.label != previous else ""
        previous = row.case.label
        cells = [label, PASSES[row.name].short + row.mark]
        if row.failure is not None:
            table.add_row(*cells, "[bold red]failed[/bold red]")
            continue

        def time(name: str, row: Row = row) -> list[str]:
            if name not in row.times:
                return ["-", *("" for _ in spread)]
            timing = row.times[name]
            return [figure(timing.median * 1e3), *(percent(timing.spread / 2) for _ in spread)]

        cells += [*time(OURS), figure(row.rate / 1e9), percent(results.fraction(row))]
        cells += [*time("torch"), ratio(row.ratio("torch"))] if torch else []
        cells += [ratio(row.ratio(name), judged=name not in HOUSE) for name in others]
        table.add_row(*cells)
    return table


def disturbance(results: Results) -> str:
    """What to make of the rows that are marked with a tilde."""
    return (
        f"{len(results.disturbed)} of {len(results.timed)} rows, marked ~, were disturbed: other processes ran, or "
        "the times vary too much. Their ratios say little; means and bounds leave them out. Run again when it is quiet."
    )


def memory_title(work: str) -> str:
    """Of the table of a work."""
    return f"Memory beyond the inputs: one head, D = {D}, float32, {PASSES[work].short}"


def memory_cells(results: Results, work: str) -> tuple[list[str], list[list[str]]]:
    """Peak memory beyond the inputs, and time, by length: the head of the table, and its lines."""
    usage = results.usage()[work]
    lines = []
    for n in sorted({u.n for of_peer in usage.values() for u in of_peer}):
        cells = [str(n)]
        for of_peer in usage.values():
            found = next((u for u in of_peer if u.n == n), None)
            if found is None:
                cells += ["-", "-", "-"]
            else:
                mark = "~" if found.disturbed else ""
                cells += [figure(found.bytes / 1e6), figure(found.multiple), figure(found.seconds) + mark]
        lines.append(cells)
    return ["n", *(cell for name in usage for cell in (f"{name} MB", "x q", "s"))], lines


def memory_table(results: Results, work: str) -> Table:
    """The memory of a work."""
    head, lines = memory_cells(results, work)
    table = _table(memory_title(work), [], head)
    for cells in lines:
        table.add_row(*cells)
    return table


def growing(usage: Sequence[Usage]) -> Iterator[tuple[str, list[Usage]]]:
    """What an exponent can be fitted to: bytes of all calls, seconds of those that were not disturbed; two at least."""
    for key in ("bytes", "seconds"):
        used = [u for u in usage if getattr(u, key) > 0 and not (key == "seconds" and u.disturbed)]
        if len(used) > 1:
            yield key, used


def growth(results: Results) -> list[str]:
    """How memory and time grow with n: the fitted exponents."""
    lines = []
    for work, name, of_peer in ((w, p, u) for w, by_peer in results.usage().items() for p, u in by_peer.items()):
        fits = {key: exponent([u.n for u in used], [getattr(u, key) for u in used]) for key, used in growing(of_peer)}
        found = [f"{'memory' if key == 'bytes' else 'time'} as n^{fit:.2f}" for key, fit in fits.items()]
        if found:
            lines.append(f"{name}, {PASSES[work].short}, grows: {', '.join(found)}")
    return lines


def means_table(results: Results) -> Table:
    """Geometric means of the ratios, by dtype and pass."""
    means = results.means()
    peers = list(dict.fromkeys(peer for by in means.values() for peer in by))
    table = _table("Geometric means of the ratios", ["rows"], peers)
    for key, by in means.items():
        table.add_row(key, *(ratio(by.get(peer, math.nan)) for peer in peers))
    return table


MARKS = {True: "[green]holds[/green]", False: "[bold red]missed[/bold red]", None: "[dim]not run[/dim]"}


def bounds_table(verdicts: Sequence[Verdict]) -> Table:
    """What is aimed at, what was found, and where."""
    table = _table("Goals (ratios to torch unless said; means are geometric)", ["bound"], ["limit", "found"])
    table.add_column("", no_wrap=True)
    table.add_column("worst", header_style="dim", overflow="fold")
    for v in verdicts:
        limit = f"{'<=' if v.bound.at_most else '>='} {figure(v.bound.limit)}"
        table.add_row(v.bound.text, limit, figure(v.value), MARKS[v.holds], v.source)
    return table


def left_out(results: Results) -> list[str]:
    """Who was left out of how many rows, and why: too large, has no such pass, or failed the verification."""
    lines = []
    for (peer, reason), rows in results.left_out().items():
        where = rows[0].label if len(rows) == 1 else f"{len(rows)} rows, the first {rows[0].label}"
        lines.append(f"{where}: without {peer}, {reason}")
    return lines


def _print_losses(results: Results, console: Console) -> None:
    losses = results.losses()
    console.print()
    if not losses:
        console.print("No peer was faster in any row." if results.timed else "Nothing was timed.")
        return
    console.print(f"[bold red]Losses[/bold red]: {len(losses)}")
    for row, peer in losses:
        console.print(f"  {row.label}{row.mark}: {peer} is faster, ratio {ratio(row.ratio(peer))}", highlight=False)
