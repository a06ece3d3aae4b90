"""The formula of one entry, read into its products; and what comes of it: a sum, term by term."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from attngrad.explain.rules import Rule

OUTER = ("scale", "log", "exp")
_FACTOR = re.compile(r"(?:(cap'{0,2}|exp)\()?(\w+)\[(\w*)\]\)?")


class Product(NamedTuple):
    """One product of an entry formula: its sign, what it is summed over, its factors (function, name, letters)."""

    sign: int
    over: str
    factors: tuple[tuple[str, str, str], ...]


def parse(entry: str) -> tuple[str, list[Product]]:
    """An entry formula as its outer function and its products.

    >>> parse("scale sum_i dS[ij] Q[id]")
    ('scale', [Product(sign=1, over='i', factors=(('', 'dS', 'ij'), ('', 'Q', 'id')))])
    """
    words = entry.split()
    outer = words.pop(0) if words[0] in OUTER else ""
    products, sign, over = [], 1, ""
    factors: list[tuple[str, str, str]] = []
    for word in [*words, "+"]:
        if word in "+-":
            if factors:
                products.append(Product(sign, over, tuple(factors)))
            sign, over, factors = (1 if word == "+" else -1), "", []
        elif word.startswith("sum_"):
            over = word[4:]
        else:
            match = _FACTOR.fullmatch(word)
            if match is None:
                raise ValueError(f"rules: {word!r} in {entry!r} is no factor.")
            factors.append((match[1] or "", match[2], match[3]))
    return outer, products


class Term(NamedTuple):
    """One term: its sign, its factors as (label, number), and its value, the signed product."""

    sign: int
    factors: tuple[tuple[str, float], ...]
    value: float

    def parts(self, form: str) -> tuple[str, str, str]:
        """The sign, the labels and the numbers, these by a format."""
        numbers = " * ".join(f"{number:{form}}" for _, number in self.factors)
        return "-" if self.sign < 0 else "+", " * ".join(label for label, _ in self.factors), numbers

    def __str__(self) -> str:
        sign, labels, numbers = self.parts(" .4f")
        return f"{sign} {labels}  =  {numbers}  =  {self.value: .6f}"


class Explanation(NamedTuple):
    """One entry of a trace as the sum it is: ``value = outer(sum of terms)``.

    ``outer`` is "scale", "log", "exp" or "", and ``factor`` the scale; of a log, ``factor`` is the maximum m that is
    taken out of the exponents. ``note`` says why terms are missing, where they are. ``total`` is the value that the
    terms give, ``value`` the one in the trace: the same but for rounding.
    """

    name: str
    place: str
    formula: str
    entry: str
    outer: str
    factor: float
    terms: tuple[Term, ...]
    total: float
    value: float
    note: str = ""

    @property
    def label(self) -> str:
        """``dK[2, 1]``."""
        return f"{self.name}[{self.place}]"

    def __repr__(self) -> str:
        lines = [f"{self.label} = {self.entry or self.formula} = {self.value:.6f}"]
        if self.note:
            lines.append(f"  ({self.note})")
        if self.outer == "scale":
            lines.append(f"  scale = {self.factor:.6f}, times the sum of")
        elif self.outer == "log":
            lines.append(f"  m = {self.factor:.6f}, plus the logarithm of the sum of")
        elif self.outer == "exp":
            lines.append("  the exponential of the sum of")
        terms = [(t.value, *t.parts("9.4f")) for t in self.terms]
        width = max((len(labels) for _, _, labels, _ in terms), default=0)
        lines += [f"  {sign} {labels:<{width}}  {numbers}  = {v:10.6f}" for v, sign, labels, numbers in terms]
        return "\n".join(lines)


def readable(rule: Rule, env: Mapping[str, int]) -> str:
    """The entry formula with the letters of this entry replaced by their numbers: ``scale sum_i dS[i,2] Q[i,1]``."""
    bound = {c: str(env[c]) for c in rule.letters if c in env}
    if "n" not in rule.letters and "n" in env and "sum_n" not in rule.entry:
        bound["n"] = str(env["n"])

    def fill(match: re.Match[str]) -> str:
        return "[" + ",".join(bound.get(c, c) for c in match[1]) + "]"

    text = re.sub(r"\[(\w*)\]", fill, rule.entry)
    text = re.sub(r"^(exp|log) (.*)$", r"\1(\2)", text)
    return re.sub(r"^scale (.* [+-] .*)$", r"scale (\1)", text)
