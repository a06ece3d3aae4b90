"""The findings as a Markdown page, for docs/."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.bounds import judge
from benchmarks.grid import TITLES
from benchmarks.passes import PASSES
from benchmarks.peers import HOUSE, OURS
from benchmarks.report import (
    LEGEND,
    disturbance,
    figure,
    growth,
    left_out,
    limits,
    memory_cells,
    memory_title,
    percent,
)
from benchmarks.results import Results, Row

GOALS = """What the project aims at, not what it claims: *missed* means that the figure falls short. Ratios to
torch unless said; means are geometric, of the rows that arithmetic bounds, where those above are of all."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the first column to the left, the others to the right.

    >>> table(["n", "ms"], [["10", "0.1"]])
    ['| n | ms |', '|:--|--:|', '| 10 | 0.1 |', '']
    """
    rule = "|:--|" + "--:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _ratio(value: float, judged: bool = True) -> str:
    if not math.isfinite(value):
        return "-"
    return f"**{value:.2f}**" if judged and value < 1.0 else f"{value:.2f}"


def _group(results: Results, rows: Sequence[Row]) -> list[str]:
    others = list(dict.fromkeys(name for row in rows for name in row.times if name != OURS))
    rate = ["GB/s", "of stream"] if any(row.by_bytes for row in rows) else ["GF", "of peak"]
    lines = []
    for row in rows:
        cells = [row.case.label, PASSES[row.name].short + row.mark]
        if row.failure is not None:
            lines.append([*cells, "failed", "", "", *("" for _ in others)])
            continue
        cells += [figure(row.times[OURS].median * 1e3), figure(row.rate / 1e9), percent(results.fraction(row))]
        lines.append(cells + [_ratio(row.ratio(name), judged=name not in HOUSE) for name in others])
    return table(["case", "pass", "ms", *rate, *others], lines)


def page(results: Results, images: Sequence[str] = ()) -> str:
    """The whole page."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        "# Benchmark",
        "",
        f"{LEGEND} Losses in bold.",
        "",
    ]
    for image in images:
        name = image.rsplit("/", 1)[-1].removesuffix(".png")
        lines += [f"![{name}]({image})", ""]
    lines += [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads; {versions}; "
        f"commit {results.commit or 'unknown'}; {results.date}; written by `make bench`.",
        "",
        limits(results),
        "",
    ]
    for group, rows in results.groups():
        lines += [f"## {TITLES.get(group, group)}", "", *_group(results, rows)]
    if results.memory:
        for work in results.usage():
            lines += [f"## {memory_title(work)}", "", *table(*memory_cells(results, work))]
        lines += [*(f"- {line}" for line in growth(results)), ""]
    if results.startup is not None:
        lines += ["## Start of the command", "", results.startup.sentence, ""]
    means = results.means()
    peers = list(dict.fromkeys(peer for by in means.values() for peer in by))
    if means:
        body = [[key, *(_ratio(by.get(p, math.nan)) for p in peers)] for key, by in means.items()]
        lines += ["## Geometric means of the ratios", "", *table(["rows", *peers], body)]
    lines += ["## Goals, and how far they are met", "", GOALS, ""]
    words = {True: "holds", False: "**missed**", None: "not run"}
    verdicts = [
        [
            v.bound.text,
            f"{'<=' if v.bound.at_most else '>='} {v.bound.limit:g}",
            figure(v.value),
            words[v.holds],
            v.source,
        ]
        for v in judge(results)
    ]
    lines += table(["bound", "limit", "found", "", "worst"], verdicts)
    lines += ["## Losses", ""]
    losses = [
        f"- {row.label}{row.mark}: {peer} is faster, ratio {row.ratio(peer):.2f}" for row, peer in results.losses()
    ]
    lines += losses or ["None."]
    absent = left_out(results)
    lines += ["", "## Left out", "", *(f"- {line}" for line in absent)] if absent else []
    lines += ["", disturbance(results)] if results.disturbed else []
    lines += ["", *(f"- {remark}" for remark in results.remarks)] if results.remarks else []
    return "\n".join(lines).rstrip() + "\n"
