"""The findings as PNG plots: throughput over n, ratios, and growth of time and memory. matplotlib comes when asked."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounds import MOST_MEMORY
from benchmarks.memory import D, Usage, exponent
from benchmarks.passes import PASSES
from benchmarks.peers import OURS
from benchmarks.report import growing
from benchmarks.results import Results, Row

# Okabe and Ito's colours, told apart in all common kinds of colour blindness; markers tell them apart in print.
STYLES: dict[str, tuple[str, str]] = {
    OURS: ("#0072B2", "o"),
    "torch": ("#D55E00", "s"),
    "jax": ("#009E73", "^"),
    "numpy": ("#999999", "D"),
}
INK = "#222222"
BARS = (("#0072B2", "#D55E00"), ("#56B4E9", "#F0A673"), ("#009E73", "#D55E00"), ("#7FCFB9", "#F0A673"))
"""By pass: attngrad is faster, torch is faster."""

TICKS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
RULES = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "figure.dpi": 150,
}


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("bench: --plots needs matplotlib: make .venv/.group-bench.") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _caption(results: Results) -> str:
    m = results.machine
    versions = ", ".join(f"{name} {results.versions[name]}" for name in STYLES if name in results.versions)
    return f"{m['cpu']}, {m['threads']} threads, {m['isa']}; {versions}; {results.date[:10]}"


def _save(figure: Any, results: Results, path: Path, title: str, disturbed: str = "") -> Path:
    """Write the figure, with a title, with what it was measured, and how disturbed points look, if there are any."""
    height = figure.get_figheight()
    top = 1 - 0.1 / height
    figure.text(0.01, top, title, fontsize=11, weight="bold", va="top")
    figure.text(0.01, 0.07 / height, _caption(results), fontsize=7, color="#666666")
    if disturbed:
        note = f"{disturbed}: disturbed, not to be relied on"
        figure.text(0.99, top, note, fontsize=8, color="#666666", ha="right", va="top")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.25 / height))
    figure.savefig(path)
    return path


def throughput(plt: Any, results: Results, path: Path) -> Path | None:
    """GFLOP/s over n, full and causal, by pass, with the measured peak; of shapes of the same n, the largest."""
    rows = [row for row in results.timed if row.case.group in ("sizes", "jvp and hvp") and row.case.dtype == "float32"]
    names = [name for name in PASSES if any(row.name == name for row in rows)]
    if not names:
        return None
    figure, axes = plt.subplots(len(names), 2, figsize=(10, 3.6 * len(names)), sharex=True, sharey=True, squeeze=False)
    peak = results.peak.get("float32", 0.0) / 1e9
    for line, name in zip(axes, names, strict=True):
        for ax, kind in zip(line, ("", "causal"), strict=True):
            own = _largest([row for row in rows if row.name == name and row.case.kind == kind])
            for peer, (colour, marker) in STYLES.items():
                timed = [row for row in own if peer in row.times]
                if timed:
                    rates = [row.flops / row.times[peer].median / 1e9 for row in timed]
                    points = ([row.case.n.t for row in timed], rates)
                    _line(ax, points, colour, marker, [row.disturbed for row in timed], peer)
            if peak:
                ax.axhline(peak, color=INK, ls="--", lw=1, label=f"FMA peak, {peak:.0f}")
            ax.set_title(f"{name}, {kind or 'full'}", fontsize=10)
            _powers_of_two(ax, [row.case.n.t for row in rows])
    for ax in axes[-1]:
        ax.set_xlabel("tokens n")
    for ax in axes[:, 0]:
        ax.set_ylabel("GFLOP/s")
        ax.set_ylim(0, max(peak * 1.08, ax.get_ylim()[1]))
    axes[0, 0].legend(frameon=False, fontsize=8)
    hollow = any(row.disturbed for row in rows)
    return _save(figure, results, path, "Throughput over the length of the sequence, float32", "hollow" * hollow)


def _largest(rows: Sequence[Row]) -> list[Row]:
    """By n, the row of the most pairs."""
    found: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.case.pairs()):
        found[row.case.n.t] = row
    return [found[n] for n in sorted(found)]


def _line(
    ax: Any, points: tuple[list[int], list[float]], colour: str, marker: str, hollow: Sequence[bool], label: str
) -> None:
    """A line with markers, hollow where the point was disturbed."""
    ax.plot(*points, color=colour, lw=1.5, zorder=2)
    faces = ["white" if one else colour for one in hollow]
    ax.scatter(*points, s=26, marker=marker, c=faces, edgecolors=colour, zorder=3)
    ax.plot([], [], color=colour, marker=marker, ms=5, lw=1.5, label=label)


def _powers_of_two(ax: Any, sizes: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    ticks = [2**i for i in range(low, high + 1)]
    ax.set_xticks(ticks, [str(n) for n in ticks], fontsize=8)
    ax.minorticks_off()


def ratios(plt: Any, results: Results, path: Path) -> Path | None:
    """Torch's time over ours, a bar a case and pass, with a line at 1; passes along one tangent alone left out."""
    rows = [row for row in results.timed if "torch" in row.times and PASSES[row.name].whole is None]
    if not rows:
        return None
    names = [name for name in PASSES if any(row.name == name for row in rows)]
    places = _places(rows)
    height = max(places.values()) + 1
    figure, ax = plt.subplots(figsize=(8.5, 0.21 * height + 1.5))
    thick = 0.42
    for row in rows:
        value, (ours, theirs) = row.ratio("torch"), BARS[names.index(row.name) % len(BARS)]
        at = places[row.case.group, row.case.label] + _below(rows, row) * thick
        alpha = 0.3 if row.disturbed else 1.0
        ax.barh(at, value - 1.0, left=1.0, height=thick, color=theirs if value < 1.0 else ours, alpha=alpha)
        side = {"ha": "right", "x": value / 1.02} if value < 1.0 else {"ha": "left", "x": value * 1.02}
        ax.text(y=at, s=f"{value:.2f}", va="center", fontsize=5.5, color=INK, alpha=max(alpha, 0.5), **side)
    ax.axvline(1.0, color=INK, lw=1)
    ax.set_xscale("log", base=2)
    values = [row.ratio("torch") for row in rows]
    low, high = min(*values, 1.0) / 1.25, max(*values, 2.0) * 1.25
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_yticks(list(places.values()), [label for _, label in places], fontsize=7)
    for group in dict.fromkeys(group for group, _ in places):
        first = min(place for (g, _), place in places.items() if g == group)
        ax.text(1.0, first - 0.8, f"  {group}", fontsize=8, weight="bold", va="center", color=INK)
    ax.set_ylim(height - 0.3, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time of torch over time of attngrad, B,H,T,D as in the tables")
    colours = [(name, ours) for name, (ours, _) in zip(names, BARS, strict=False)] + [("torch is faster", BARS[0][1])]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in colours]
    ax.legend(
        handles,
        [name for name, _ in colours],
        frameon=False,
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
    )
    return _save(figure, results, path, "How much faster than torch", "pale" * any(row.disturbed for row in rows))


def _below(rows: Sequence[Row], row: Row) -> float:
    """How many bars below the middle of its case the bar of ``row`` stands."""
    names = [r.name for r in rows if (r.case.group, r.case.label) == (row.case.group, row.case.label)]
    return names.index(row.name) - (len(names) - 1) / 2


def _places(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Where on the y axis each case stands: one line per case, a gap with a heading before each group."""
    places: dict[tuple[str, str], float] = {}
    line, group = -1.0, None
    for row in rows:
        key = (row.case.group, row.case.label)
        if key in places:
            continue
        line += 1.0 if row.case.group == group else 2.0
        group = row.case.group
        places[key] = line
    return places


def growth(plt: Any, results: Results, path: Path) -> Path | None:
    """Time and memory of one head over n, a line of panels a work, log-log, with the fitted exponents."""
    usage = results.usage()
    if not usage:
        return None
    figure, axes = plt.subplots(len(usage), 2, figsize=(10, 4 * len(usage)), squeeze=False)
    panels = ((1.0, "seconds", "time, s"), (1e6, "bytes", "memory beyond the inputs, MB"))
    for line, (work, by_peer) in zip(axes, usage.items(), strict=True):
        lengths = sorted({u.n for of_peer in by_peer.values() for u in of_peer})
        for ax, (unit, key, label) in zip(line, panels, strict=True):
            for peer, of_peer in by_peer.items():
                _grown(ax, peer, of_peer, key, unit)
            if key == "bytes":
                most = MOST_MEMORY[work]
                limit, square = [most * n * D * 4 / unit for n in lengths], [n * n * 4 / unit for n in lengths]
                ax.plot(lengths, limit, color=INK, ls="--", lw=1, label=f"{most} times q")
                ax.plot(lengths, square, color="#999999", ls=":", lw=1, label="one n x n matrix")
            ax.set_title(work, fontsize=10)
            ax.set_yscale("log")
            _powers_of_two(ax, lengths)
            ax.set_xlabel("tokens n")
            ax.set_ylabel(label)
            ax.legend(frameon=False, fontsize=8)
    hollow_note = "hollow" * any(u.disturbed for u in results.memory)
    return _save(figure, results, path, f"Growth: one head, D = {D}, float32", hollow_note)


def _grown(ax: Any, peer: str, usage: Sequence[Usage], key: str, unit: float) -> None:
    """The seconds or bytes of a peer, with the exponent in the legend."""
    colour, marker = STYLES.get(peer, (INK, "x"))
    points = [u for u in usage if getattr(u, key) > 0]
    fits = [exponent([u.n for u in used], [getattr(u, key) for u in used]) for k, used in growing(usage) if k == key]
    values = [getattr(u, key) / unit for u in points]
    hollow = [key == "seconds" and u.disturbed for u in points]
    label = peer + "".join(f", n^{x:.2f}" for x in fits)
    _line(ax, ([u.n for u in points], values), colour, marker, hollow, label)


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that the results allow, and say where."""
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for plot in (throughput, ratios, growth):
        with plt.rc_context(RULES):
            path = plot(plt, results, folder / f"{plot.__name__}.png")
            plt.close("all")
        if path is not None:
            drawn.append(path)
    return drawn
