"""A trace in a notebook: tables with signed heat, in HTML without script, safe to keep in the file."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from attngrad.explain.windows import Matrix, by_stage, heat, matrix

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

ROWS, COLUMNS = 12, 12
_FLOW = "display:flex;flex-wrap:wrap;gap:14px 22px;align-items:flex-start;margin:6px 0 14px"
_CELL = "padding:2px 6px;text-align:right;font:12px ui-monospace,monospace;border:0"


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
            caption = f"<b>{name}</b> <span>{equals}{html.escape(rule.formula)}</span>{cut}"
            parts.append(f'<div><div style="font:12px sans-serif;margin-bottom:3px">{caption}</div>{_table(m)}</div>')
        parts.append("</div>")
    for i in trace.invariants:
        colour, sign = ("#1a7f37", "&#10003;") if i.holds else ("#b3261e", "&#10007;")
        text = f"{html.escape(i.claim)} <span style='opacity:.6'>off by {i.error:.0e}</span>"
        parts.append(f'<div><b style="color:{colour}">{sign}</b> {text}</div>')
    return "".join(parts) + "</div>"
