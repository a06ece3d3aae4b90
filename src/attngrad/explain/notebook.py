"""Traces and reports in a notebook: HTML without script, safe to keep in the file, legible on light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attngrad.explain.marks import signs
from attngrad.explain.windows import Matrix, by_stage, heat, matrix

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

ROWS, COLUMNS = 12, 12
_FLOW = "display:flex;flex-wrap:wrap;gap:14px 22px;align-items:flex-start;margin:6px 0 14px"
_CELL = "padding:2px 6px;text-align:right;font:12px ui-monospace,monospace;border:0"
_WORDS = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;border:0"
_TABLE = "border-collapse:collapse;margin:2px 0;font-size:inherit;color:inherit"
_PRE = "margin:4px 0;white-space:pre-wrap;font:12px ui-monospace,monospace"
GREEN, RED = "#218739", "#dd3b3b"
"""Marks with a contrast of at least 4 on white, and of 3.5 on black."""


class Html(str):
    """Markup, not to be escaped."""

    __slots__ = ()


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def sign(holds: bool) -> Html:
    """A tick or a cross."""
    colour, character = (GREEN, "&#10003;") if holds else (RED, "&#10007;")
    return Html(f'<b style="color:{colour}">{character}</b>')


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table of words, without lines; no row of titles where ``head`` is empty."""
    titles = "".join(f'<th style="{_WORDS};opacity:.6">{_escaped(title)}</th>' for title in head)
    body = ("<tr>" + "".join(f'<td style="{_WORDS}">{_escaped(x)}</td>' for x in row) + "</tr>" for row in rows)
    first = f"<tr>{titles}</tr>" if head else ""
    return Html(f'<table style="{_TABLE}">{first}{"".join(body)}</table>')


def muted(text: str) -> Html:
    """A line of less weight."""
    return Html(f'<div style="opacity:.6">{html.escape(text)}</div>')


def code(text: str) -> Html:
    """Lines as they are."""
    return Html(f'<pre style="{_PRE}">{html.escape(text)}</pre>')


def folded(title: str, *parts: str) -> Html:
    """Parts behind a title to click at."""
    return Html(f"<details><summary>{html.escape(title)}</summary>{''.join(map(_escaped, parts))}</details>")


def report(holds: bool | None, title: str, *parts: str) -> Html:
    """A report: its mark (none where it was not judged) and its verdict, then its parts."""
    mark = "" if holds is None else f"{sign(holds)} "
    return Html(f"<div>{mark}<b>{html.escape(title)}</b>{''.join(map(_escaped, parts))}</div>")


def _table(m: Matrix) -> str:
    head = ""
    if m.columns:
        labels = "".join(f'<th style="{_CELL};opacity:.6">{html.escape(label)}</th>' for label in m.columns)
        head = f"<tr><th></th>{labels}</tr>" if m.rows else f"<tr>{labels}</tr>"
    body = []
    for i, row in enumerate(heat(m)):
        cells = [f'<th style="{_CELL};opacity:.6">{html.escape(m.rows[i])}</th>'] if m.rows else []
        for cell in row:
            if cell is None:
                cells.append(f'<td style="{_CELL};opacity:.5" title="hidden">&middot;</td>')
            else:
                style = f"{_CELL};background:{cell.colour};color:{'#fff' if cell.dark else '#111'}"
                cells.append(f'<td style="{style}" title="{cell.value!r}">{cell.text}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table style="border-collapse:collapse;margin:0">{head}{"".join(body)}</table>'


def render(trace: Trace, head: int = 0, batch: int = 0) -> str:
    """The trace of one head; other heads are a call of ``print`` or a page away."""
    parts = [f"<div><p>{html.escape(trace.summary())}; head {head}, batch {batch}</p>"]
    for title, names in by_stage(trace):
        parts.append(f'<p style="margin:0"><b>{title}</b></p><div style="{_FLOW}">')
        for name in names:
            rule = trace.rules[name]
            m = matrix(trace, name, head, batch, ROWS, COLUMNS)
            equals = "= " if rule.entry else ""
            cut = f'<br><span style="opacity:.6">{m.cut}</span>' if m.cut else ""
            caption = f"<b>{name}</b> <span>{equals}{html.escape(signs(rule.formula))}</span>{cut}"
            parts.append(f'<div><div style="font:12px sans-serif;margin-bottom:3px">{caption}</div>{_table(m)}</div>')
        parts.append("</div>")
    for i in trace.invariants:
        text = f"{html.escape(signs(i.claim))} <span style='opacity:.6'>off by {i.error:.0e}</span>"
        parts.append(f"<div>{sign(i.holds)} {text}</div>")
    return "".join(parts) + "</div>"
