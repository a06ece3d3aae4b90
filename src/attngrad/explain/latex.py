"""A trace as a LaTeX document: every formula with its number, every matrix of one head, and what must hold."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from attngrad.explain.windows import Matrix, by_stage, check_place, matrix, number

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

ROWS, COLUMNS = 10, 10

_SPECIAL = {c: rf"\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_GREEK = {"delta": r"\delta", "sigma": r"\sigma"}


def escape(text: str) -> str:
    """Any text as LaTeX; what is not ASCII as its code point, for no font is sure to have it."""
    return "".join(_SPECIAL.get(c, c if " " <= c <= "~" else rf"{{\footnotesize U+{ord(c):04X}}}") for c in text)


def symbol(name: str) -> str:
    r"""A name as a symbol: dQ_dot is a dQ with a dot.

    >>> symbol("dS"), symbol("delta"), symbol("Z_dot"), symbol("W_q")
    ('dS', '\\delta', '\\dot{Z}', 'W_{q}')
    """
    if name.endswith("_dot"):
        inner = name.removesuffix("_dot")
        return rf"d\dot{{{symbol(inner[1:])}}}" if inner[0] == "d" and inner != "delta" else rf"\dot{{{symbol(inner)}}}"
    if name in _GREEK:
        return _GREEK[name]
    if name.startswith("d") and name[1:] in ("sigma", "bias"):
        return "d" + symbol(name[1:])
    if "_" in name:
        stem, _, sub = name.partition("_")
        return rf"{symbol(stem)}_{{{sub if len(sub) == 1 else rf'{chr(92)}mathrm{{{sub}}}'}}}"
    return name if len(name) <= 2 else rf"\mathrm{{{name}}}"


def formula(text: str) -> str:
    """A matrix formula of the rules in LaTeX mathematics; what follows a comma is words."""
    math_part, comma, words = text.partition(",")

    def word(match: re.Match[str]) -> str:
        found = match[0]
        if found == "o":
            return r"\circ"
        if found == "scale":
            return r"\mathrm{scale}\,"
        if found in ("rowsum", "log", "exp", "cap", "rope", "sum"):
            return rf"\operatorname{{{found}}}"
        return symbol(found)

    body = re.sub(r"[A-Za-z]\w*", word, math_part.replace("^T", "^{@}"))
    return body.replace("{@}", r"{\top}") + (rf"\text{{,{escape(words)}}}" if comma else "")


def _cell(value: float, hidden: bool) -> str:
    if hidden:
        return r"\cdot"
    if math.isnan(value):
        return r"\mathrm{nan}"
    if math.isinf(value):
        return r"\infty" if value > 0 else r"-\infty"
    text = number(value, 3)
    if "e" in text:
        digits, _, power = text.partition("e")
        return rf"{digits}\mathrm{{e}}{{{power}}}"
    return text


def _matrix(m: Matrix) -> str:
    cells = (zip(row, hidden, strict=True) for row, hidden in zip(m.values, m.hidden, strict=True))
    rows = (" & ".join(_cell(float(a), bool(h)) for a, h in row) for row in cells)
    return "\\begin{pmatrix}\n" + " \\\\\n".join(rows) + "\n\\end{pmatrix}"


def document(trace: Trace, *, head: int = 0, batch: int = 0) -> str:
    """The whole document; compiles with pdflatex and amsmath alone."""
    check_place("trace.to_latex", trace, head, batch)
    lines = [
        r"\documentclass{article}",
        r"\usepackage{amsmath}",
        r"\usepackage[margin=2cm]{geometry}",
        rf"\setcounter{{MaxMatrixCols}}{{{COLUMNS + 2}}}",
        r"\setlength{\parindent}{0pt}",
        r"\allowdisplaybreaks",
        r"\begin{document}",
        r"\section*{Attention, worked}",
        escape(trace.summary()) + rf". Head {head}, batch {batch}.",
    ]
    if trace.tokens is not None:
        queries, keys = (", ".join(escape(label) for label in labels) for labels in trace.tokens)
        lines.append(rf"\par Queries: {queries}." + ("" if queries == keys else rf" Keys: {keys}."))
    for title, names in by_stage(trace):
        lines.append(rf"\subsection*{{{title}}}")
        for name in names:
            rule, m = trace.rules[name], matrix(trace, name, head, batch, ROWS, COLUMNS)
            tag = rf" \tag{{{rule.number}}}" if rule.number else ""
            made = [f"{symbol(name)} = {formula(rule.formula)}{tag} \\\\"] if rule.entry else []
            lines += [r"\begin{gather*}", *made, f"{symbol(name)} = {_matrix(m)}", r"\end{gather*}"]
            if m.cut:
                lines.append(rf"\begin{{center}}\small {escape(m.cut)}\end{{center}}")
    lines.append(r"\subsection*{What must hold}")
    lines.append(r"\begin{itemize}")
    for i in trace.invariants:
        verdict = "holds" if i.holds else "DOES NOT HOLD"
        lines.append(rf"\item {escape(i.claim)}: {verdict}, off by {i.error:.0e}")
    lines += [r"\end{itemize}", r"\end{document}", ""]
    return "\n".join(lines)
