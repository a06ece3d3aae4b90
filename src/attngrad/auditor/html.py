"""The report as one self-contained page: no scripts, a strict content policy, everything escaped."""

from __future__ import annotations

import math
from html import escape

from attngrad.auditor.report import AuditReport, Explained, Heat, short, symbol
from attngrad.explain import notebook
from attngrad.explain.marks import signs
from attngrad.explain.template import fill, policy, text

_RAMP = ("#e8f3ec", "#fff3c4", "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#990000")
"""From within rounding to as large as the result."""


_SMALLEST, _RAISED = "The smallest failing case", "What the candidate raised"


def page(report: AuditReport) -> str:
    """One HTML page."""
    style = "\n" + text("attngrad.auditor", "style.css")
    body = [
        f'<h1 class="{report.status.replace(" ", "-")}">{escape(report.verdict)}</h1>',
        f'<p class="facts">{escape(" · ".join(report.facts(effort=True)))}</p>',
        _stages(report),
        _mistakes(report),
        _findings(report),
        "" if report.heat is None else _heat(report.heat),
        _block(_SMALLEST, report.smallest),
        _block(_RAISED, report.traceback),
        *(f'<p class="facts">{title}: {escape(words)}</p>' for title, words in _coverage(report)),
    ]
    parts = {
        "CSP": escape(policy(style)),
        "CANDIDATE": escape(report.candidate),
        "STYLE": style,
        "BODY": "\n".join(part for part in body if part),
    }
    return fill(text("attngrad.auditor", "page.html"), parts)


def fragment(report: AuditReport) -> str:
    """The report for a notebook: without the heat map, the smallest case behind a click."""
    rows = []
    for stage in report.stages:
        counted = f"{stage.wrong} of {stage.cases}" if stage.wrong else ""
        first = "first to diverge; " if stage.name == report.first else ""
        numbers = (short(stage.error), short(stage.allowed), counted)
        rows.append((notebook.sign(stage.ok), f"{symbol(stage.name)} ({stage.name})", *numbers, first + stage.what))
    parts = [notebook.muted(" · ".join(report.facts()))] if report.settings else []
    if rows:
        parts.append(notebook.table(("", "result", "error", "allowed", "wrong in", ""), rows))
    for m in _told(report):
        told = [(label, signs(text)) for label, text in m.rows() if text]
        parts.append(notebook.Html(f"<div>The mistake <b>{escape(m.id)}</b>: {escape(m.title)}</div>"))
        parts.append(notebook.table((), told))
    kinds = ("wrong", "mistake")
    parts += [notebook.Html(f"<div>{escape(f.text)}</div>") for f in report.findings if f.kind not in kinds]
    parts += [notebook.muted(f"{title}: {words}") for title, words in _coverage(report)]
    for title, block in ((_SMALLEST, report.smallest), (_RAISED, report.traceback)):
        parts += [notebook.folded(title, notebook.code(block.rstrip()))] if block else []
    return notebook.report(None if report.status == "not audited" else report.ok, report.verdict, *parts)


def _told(report: AuditReport) -> list[Explained]:
    """Every mistake that an explanation has, once."""
    return list({m.id: m for state in report.explanations for m in state}.values())


def _stages(report: AuditReport) -> str:
    if not report.stages:
        return ""
    rows = []
    for stage in report.stages:
        sign = '<span class="ok">right</span>' if stage.ok else '<span class="no">wrong</span>'
        first = "<strong>first to diverge</strong>; " if stage.name == report.first else ""
        rows.append(
            f"<tr><td>{sign}</td><td><strong>{escape(symbol(stage.name))}</strong> {escape(stage.name)}</td>"
            f'<td class="n">{short(stage.error)}</td><td class="n">{short(stage.allowed)}</td>'
            f'<td class="n">{f"{stage.wrong} of {stage.cases}" if stage.wrong else ""}</td>'
            f"<td>{first}{escape(stage.what)}</td></tr>"
        )
    head = "<tr><th></th><th>result</th><th>error</th><th>allowed</th><th>wrong in</th><th></th></tr>"
    return f'<h2>Results by stage</h2>\n<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _mistakes(report: AuditReport) -> str:
    told = _told(report)
    if not told:
        return ""
    several = len(report.explanations) > 1
    title = "The mistake" if len(told) == 1 else "The mistakes"
    parts = [f"<h2>{title}</h2>"]
    if several:
        combos = "; ".join(" + ".join(m.id for m in state) for state in report.explanations)
        parts.append(f"<p>Numerically the same in every case; it may be any of these: {escape(combos)}.</p>")
    for m in told:
        styles = {"computed": "formula", "should be": "formula", "fix": "fix"}
        rows = [(label, signs(text), styles.get(label, "")) for label, text in m.rows()]
        items = "".join(
            f"<dt>{label}</dt><dd" + (f' class="{css}"' if css else "") + f">{escape(text)}</dd>"
            for label, text, css in rows
            if text
        )
        parts.append(
            f'<section class="mistake"><h3><code>{escape(m.id)}</code> {escape(m.title)}</h3><dl>{items}</dl></section>'
        )
    return "\n".join(parts)


def _findings(report: AuditReport) -> str:
    shown = [f for f in report.findings if f.kind not in ("wrong", "mistake")]
    if not shown:
        return ""
    items = "".join(
        f'<li><span class="{"no" if f.fault else "ok"}">{"finding" if f.fault else "note"}</span> {escape(f.text)}</li>'
        for f in shown
    )
    return f"<h2>Also found</h2>\n<ul>{items}</ul>"


def _coverage(report: AuditReport) -> list[tuple[str, str]]:
    """What was tried and what was not, by title."""
    told = (("Tried", report.tried), ("Not tried", report.untried))
    return [(title, "; ".join(lines) + ".") for title, lines in told if lines]


def _block(title: str, text: str) -> str:
    return f"<h2>{title}</h2>\n<pre>{escape(text.rstrip())}</pre>" if text else ""


def _colour(error: float, allowed: float) -> str:
    if not math.isfinite(error):
        return "#4a148c"
    floor = max(allowed, 1e-18)
    if error <= 4.0 * floor:
        return _RAMP[0]
    span = max(-math.log10(4.0 * floor), 1e-9)
    level = (math.log10(error) - math.log10(4.0 * floor)) / span
    return _RAMP[1 + min(int(level * (len(_RAMP) - 1)), len(_RAMP) - 2)]


def _heat(heat: Heat) -> str:
    """The error over (row, column): one square per entry, on a logarithmic ramp from rounding to the whole result."""
    rows, columns = len(heat.errors), len(heat.errors[0]) if heat.errors else 0
    side = max(8, min(24, 440 // max(rows, columns, 1)))
    left, top = 58, 26
    bottom = top + rows * side + 16
    squares = (
        f'<rect x="{left + j * side}" y="{top + i * side}" width="{side - 1}" height="{side - 1}" '
        f'fill="{_colour(error, heat.allowed)}"><title>[{i}, {j}] {short(error)}</title></rect>'
        for i, row in enumerate(heat.errors)
        for j, error in enumerate(row)
    )
    legend = (
        f'<rect x="{left + n * 20}" y="{bottom}" width="19" height="12" fill="{colour}"/>'
        for n, colour in enumerate(_RAMP)
    )
    where = f", [{', '.join(map(str, heat.head))}]" if heat.head else ""
    title = f"Error of {symbol(heat.name)} over row and column (case '{heat.case}'{where})"
    places = {"LEFT": left, "LAST-COLUMN": columns - 1, "LAST-ROW": rows - 1, "LAST-ROW-Y": top + rows * side - 3}
    places |= {"WIDTH": left + max(columns * side, 460), "HEIGHT": bottom + 36, "BELOW": bottom + 28}
    places |= {"BESIDE": left + 20 * len(_RAMP) + 8, "BESIDE-Y": bottom + 11}
    parts = {"TITLE": escape(title), "SQUARES": "".join(squares), "LEGEND": "".join(legend)}
    return fill(text("attngrad.auditor", "heat.html").rstrip(), parts | {name: str(x) for name, x in places.items()})
