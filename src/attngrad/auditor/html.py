"""The report as one self-contained page: no scripts, a strict content policy, everything escaped."""

from __future__ import annotations

import base64
import hashlib
import math
from html import escape

from attngrad.auditor.report import AuditReport, Explained, Heat, symbol
from attngrad.auditor.terminal import what

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --soft: #626a75; --paper: #ffffff; --line: #dfe3e8; --code: #f5f6f8;
  --good: #1a7f37; --bad: #c62828; --unsure: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ae; --paper: #14171b; --line: #30363d;
  --code: #1d2127; --good: #56d364; --bad: #ff7b72; --unsure: #e3b341; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.35rem; line-height: 1.35; margin: 0 0 .25rem; padding-left: .9rem; border-left: .4rem solid; }
h1.right { border-color: var(--good); } h1.wrong { border-color: var(--bad); }
h1.not-audited { border-color: var(--unsure); }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.facts { color: var(--soft); margin: 0 0 1.5rem; padding-left: 1.3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.ok { color: var(--good); font-weight: 600; } .no { color: var(--bad); font-weight: 600; }
section.mistake { border: 1px solid var(--line); border-radius: .5rem; padding: .9rem 1.1rem; margin: .7rem 0; }
section.mistake h3 { margin: 0 0 .5rem; font-size: 1rem; } section.mistake code { color: var(--bad); }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .3rem .8rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; } dd.fix { font-weight: 600; }
pre, dd.formula { font: .86rem/1.45 ui-monospace, monospace; }
pre { background: var(--code); padding: .9rem 1rem; border-radius: .5rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
"""
_RAMP = ("#e8f3ec", "#fff3c4", "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#990000")
"""From within rounding to as large as the result."""


def page(report: AuditReport) -> str:
    """One HTML page."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    s = report.settings
    facts = [
        report.candidate,
        s.get("level"),
        s.get("dtype"),
        f"{s.get('cases', 0)} cases",
        f"effort {s.get('effort')}",
    ]
    facts += [f"options {s['options']}"] if s.get("options") else []
    body = [
        f'<h1 class="{report.status.replace(" ", "-")}">{escape(report.verdict)}</h1>',
        f'<p class="facts">{escape(" · ".join(str(f) for f in facts))}</p>',
        _stages(report),
        _mistakes(report),
        _findings(report),
        "" if report.heat is None else _heat(report.heat),
        _block("The smallest failing case", report.smallest),
        _block("What the candidate raised", report.traceback),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Audit of {escape(report.candidate)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _number(x: float) -> str:
    return "-" if not math.isfinite(x) else "0" if x == 0 else f"{x:.1e}"


def _stages(report: AuditReport) -> str:
    if not report.stages:
        return ""
    rows = []
    for stage in report.stages:
        sign = '<span class="ok">right</span>' if stage.ok else '<span class="no">wrong</span>'
        first = "<strong>first to diverge</strong>; " if stage.name == report.first else ""
        rows.append(
            f"<tr><td>{sign}</td><td><strong>{escape(symbol(stage.name))}</strong> {escape(stage.name)}</td>"
            f'<td class="n">{_number(stage.error)}</td><td class="n">{_number(stage.allowed)}</td>'
            f'<td class="n">{f"{stage.wrong} of {stage.cases}" if stage.wrong else ""}</td>'
            f"<td>{first}{escape(what(stage))}</td></tr>"
        )
    head = "<tr><th></th><th>result</th><th>error</th><th>allowed</th><th>wrong in</th><th></th></tr>"
    return f'<h2>Results by stage</h2>\n<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _mistakes(report: AuditReport) -> str:
    told: dict[str, Explained] = {}
    for state in report.explanations:
        for m in state:
            told.setdefault(m.id, m)
    if not told:
        return ""
    several = len(report.explanations) > 1
    title = "The mistake" if len(told) == 1 else "The mistakes"
    parts = [f"<h2>{title}</h2>"]
    if several:
        combos = "; ".join(" + ".join(m.id for m in state) for state in report.explanations)
        parts.append(f"<p>Numerically the same in every case, so any of these it may be: {escape(combos)}.</p>")
    for m in told.values():
        styles = {"computed": "formula", "should be": "formula", "fix": "fix"}
        rows = [(label, text, styles.get(label, "")) for label, text in m.rows()]
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
    squares = []
    for i, row in enumerate(heat.errors):
        for j, error in enumerate(row):
            squares.append(
                f'<rect x="{left + j * side}" y="{top + i * side}" width="{side - 1}" height="{side - 1}" '
                f'fill="{_colour(error, heat.allowed)}"><title>[{i}, {j}] {_number(error)}</title></rect>'
            )
    bottom = top + rows * side + 16
    legend = [
        f'<rect x="{left + n * 20}" y="{bottom}" width="19" height="12" fill="{colour}"/>'
        for n, colour in enumerate(_RAMP)
    ]
    words = (
        f'<text x="{left}" y="{bottom + 28}">within rounding</text>'
        f'<text x="{left + 20 * len(_RAMP) + 8}" y="{bottom + 11}">as large as the result; violet: not finite</text>'
    )
    axes = (
        f'<text x="{left}" y="{top - 8}">column 0 to {columns - 1}</text>'
        f'<text x="4" y="{top + 12}">row 0</text><text x="4" y="{top + rows * side - 3}">row {rows - 1}</text>'
    )
    width, height = left + max(columns * side, 460), bottom + 36
    where = f", [{', '.join(map(str, heat.head))}]" if heat.head else ""
    title = f"Error of {symbol(heat.name)} over row and column (case '{heat.case}'{where})"
    return (
        f'<h2>{escape(title)}</h2>\n<svg role="img" aria-label="{escape(title)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{axes}{"".join(squares)}{"".join(legend)}{words}</svg>'
    )
