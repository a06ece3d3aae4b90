"""What is known of each name, ``known.toml``: formulas that are right, and wrong ones that are found in print."""

from __future__ import annotations

from dataclasses import dataclass

from attngrad.core.files import read_toml
from attngrad.formulas.parser import parse
from attngrad.formulas.tree import Equation, Expression, Symbol, names, renamed, symbol_text


@dataclass(frozen=True)
class Mistake:
    """A wrong formula for a name, by a short id, and what is wrong with it in words."""

    id: str
    target: str
    text: str
    why: str


def _read() -> tuple[dict[str, tuple[str, ...]], tuple[Mistake, ...]]:
    """Both tables; a wrong formula for dS is one for dQ and dK, too, and one that is right for dS is right for dZ."""
    table = read_toml("attngrad.formulas", "known.toml")
    right = {name: tuple(forms) for name, forms in table["right"].items()}
    wrong = [Mistake(**row) for row in table["wrong"]]
    wrong += [
        Mistake(m.id, target, around.format(m.text, s="{s}"), f"In its dS: {m.why}")
        for target, around in (("dQ", "({}) @ K{s}"), ("dK", "({}).T @ Q{s}"))
        for m in wrong
        if m.target == "dS"
    ]
    return right | {"dZ": right["dS"]}, tuple(wrong)


RIGHT, MISTAKES = _read()


def scale_style(used: set[str], scale: float | None) -> str:
    """How the scale is written behind a product: by d_k, by name, or not at all where it is 1."""
    if scale is not None:
        return "" if scale == 1.0 else " * scale"
    return " * scale" if "scale" in used else " / sqrt(d_k)"


def _canonical(target: Symbol) -> tuple[str, dict[str, str]]:
    """The target in the letters i, j, k, and what each letter of these tables is in the text.

    An index of a sum takes a letter that the text does not use.
    """
    distinct = list(dict.fromkeys(target.indices))
    forward = dict(zip(distinct, "ijkl", strict=False))
    free = [c for c in "ijklabcuvw" if c not in distinct]
    back = {c: free.pop(0) for c in "ijklab" if c not in forward.values()} if distinct else {}
    renamed = Symbol(target.name, tuple(forward[i] for i in target.indices))
    return symbol_text(renamed), back | {new: old for old, new in forward.items()}


def right_forms(target: Symbol, style: str) -> list[Equation]:
    """The right formulas for a name, in the letters of its indices."""
    key, back = _canonical(target)
    found = []
    for form in RIGHT.get(key, ()):
        (equation,) = parse(form.replace("{s}", style) if "=" in form else f"{key} = {form.replace('{s}', style)}")
        found.append(Equation(tuple(renamed(side, back) for side in equation.sides)))
    return found


def nearest_right_forms(target: Symbol, used: set[str], style: str) -> list[Equation]:
    """The right formulas, those first that speak in the names that are used, with M where it is, and few others."""
    forms = [f for f in right_forms(target, style) if "M" in used or "M" not in names(*f.sides)]

    def distance(form: Equation) -> tuple[bool, int]:
        own = names(*form.sides[1:])
        return "M" in used and "M" not in own, len(own ^ (used - {target.name}))

    return sorted(forms, key=distance)


def mistakes_of(target: Symbol, style: str) -> list[tuple[Mistake, Expression]]:
    """The known wrong formulas for a name, with their right sides."""
    key, back = _canonical(Symbol("dS", target.indices) if target.name == "dZ" else target)
    own = [m for m in MISTAKES if m.target == key]
    return [(m, renamed(parse(f"{key} = {m.text.replace('{s}', style)}")[0].sides[1], back)) for m in own]
