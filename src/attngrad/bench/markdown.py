"""The findings as a Markdown page, for docs/."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attngrad.bench.bounds import judge
from attngrad.bench.grid import TITLES
from attngrad.bench.memory import Usage
from attngrad.bench.passes import PASSES
from attngrad.bench.peers import OURS
from attngrad.bench.report import LEGEND, disturbance, figure, growth, limits, percent
from attngrad.bench.results import Results, Row


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the first column to the left, the others to the right.

    >>> table(["n", "ms"], [["10", "0.1"]])
    ['| n | ms |', '|:--|--:|', '| 10 | 0.1 |', '']
    """
    rule = "|:--|" + "--:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"**{value:.2f}**" if value < 1.0 else f"{value:.2f}"


def _cells(usage: Usage) -> list[str]:
    seconds = figure(usage.seconds) + ("~" if usage.disturbed else "")
    return [figure(usage.bytes / 1e6), figure(usage.multiple), seconds]


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
        lines.append(cells + [_ratio(row.ratio(name)) for name in others])
    return table(["case", "pass", "ms", *rate, *others], lines)


def page(results: Results, images: Sequence[str] = ()) -> str:
    """The whole page."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        "# Benchmark",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads; {versions}; "
        f"commit {results.commit or 'unknown'}; {results.date}; written by `attngrad bench`.",
        "",
        limits(results),
        "",
        f"{LEGEND} Losses in bold.",
        "",
    ]
    for image in images:
        name = image.rsplit("/", 1)[-1].removesuffix(".png")
        lines += [f"![{name}]({image})", ""]
    for group, rows in results.groups():
        lines += [f"## {TITLES.get(group, group)}", "", *_group(results, rows)]
    if results.memory:
        usage = results.usage()
        lines += ["## Memory beyond the inputs: one head, D = 64, float32, fwd+bwd", ""]
        head = ["n", *(cell for name in usage for cell in (f"{name} MB", "x q", "s"))]
        body = []
        for n in dict.fromkeys(u.n for u in results.memory):
            found = [u for of_peer in usage.values() for u in of_peer if u.n == n]
            body.append([str(n), *(cell for u in found for cell in _cells(u))])
        lines += [*table(head, body), *(f"- {line}" for line in growth(results)), ""]
    means = results.means()
    peers = list(dict.fromkeys(peer for by in means.values() for peer in by))
    lines += ["## Geometric means of the ratios", ""]
    lines += table(
        ["rows", *peers], [[key, *(_ratio(by.get(p, math.nan)) for p in peers)] for key, by in means.items()]
    )
    lines += ["## What must hold", "", "Ratios to torch unless said; means are geometric.", ""]
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
    lines += ["", disturbance(results)] if results.disturbed else []
    lines += ["", *(f"- {remark}" for remark in results.remarks)] if results.remarks else []
    return "\n".join(lines).rstrip() + "\n"
