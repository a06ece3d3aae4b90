"""The table of every step, ``rules.toml``: its matrix formula, and that of one entry, which ``explain`` evaluates.

The terminal, LaTeX, JSON and the page all read it; the page carries it along and reads it again in JavaScript. A layer
adds rules of its own, with letters of its own: m feature of the layer, n feature of all heads together, p the feature
that turns with d (RoPE). Numbers are those of docs/notation.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import NamedTuple

from attngrad.core.files import read_toml
from attngrad.reference.table import STEPS, symbols


class Rule(NamedTuple):
    """How one step comes about. ``letters`` are those of an entry; a rule without ``entry`` is an input."""

    name: str
    number: str
    stage: str
    letters: str
    formula: str
    entry: str = ""
    needs: str = ""


STAGES = {
    "forward": "Forward",
    "backward": "Backward: the VJP",
    "tangent": "Forward mode: the JVP",
    "second": "Second order: the HVP",
}


def _read() -> tuple[Rule, ...]:
    stage_of = {symbol: stage for stage in STAGES for symbol in symbols((stage,)).values()}
    number = {step.symbol: step.number for step in STEPS.values()}
    table = read_toml("attngrad.explain", "rules.toml")
    return tuple(Rule(n, number[n] if "entry" in row else "", stage_of[n], **row) for n, row in table.items())


RULES = _read()

KEY_SIDE = frozenset(f"{a}{b}{c}" for a in ("", "d") for b in "KV" for c in ("", "_dot", "_in")) | {"cos_k", "sin_k"}
"""Steps with one matrix per key head; all others with heads have one per query head."""

_FLAT = ("X", "Y", "W", "b")


def is_flat(name: str) -> bool:
    """Whether a step has no heads: X, Y, W_q, b_q and their gradients.

    >>> is_flat("dX_k"), is_flat("db_q"), is_flat("bias"), is_flat("delta")
    (True, True, False, False)
    """
    return name.removeprefix("d").split("_")[0] in _FLAT


_CHOICE = re.compile(r"\{(\w+)\?([^:}]*):([^}]*)\}")


def choose(template: str, flags: Set[str]) -> str:
    """``template`` with its braces resolved.

    >>> choose("{cap?cap(Z):Z}{bias? + bias:}", {"bias"})
    'Z + bias'
    """
    return _CHOICE.sub(lambda m: m[2] if m[1] in flags else m[3], template)


def resolve(rules: Iterable[Rule], flags: Set[str]) -> dict[str, Rule]:
    """The rules that apply under ``flags``, by name, their braces resolved; of two with one name the last."""
    found = {}
    for rule in rules:
        if not rule.needs or rule.needs in flags:
            found[rule.name] = rule._replace(formula=choose(rule.formula, flags), entry=choose(rule.entry, flags))
    return found
