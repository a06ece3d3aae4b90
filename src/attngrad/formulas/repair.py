"""The smallest change that mends a formula: one edit of its tree, or two, found by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from attngrad.formulas.tree import (
    Binary,
    Call,
    Equation,
    Expression,
    Negate,
    Symbol,
    Transpose,
    children,
    show,
    walk,
)

MAX_WORK = 30_000
"""Parts of formulas that are tried, in all: single edits of a formula of the usual size (20 parts), and many pairs."""

# Names that are taken for one another.
_CONFUSED = (("dA", "dS"), ("S", "A"), ("Q", "K", "V"), ("dO", "O"), ("d_k", "d_v", "n", "m"), ("W_Q", "W_K", "W_V"))
_REDUCTIONS = ("rowsum", "colsum", "sum", "rowmean", "colmean", "mean")


@dataclass(frozen=True)
class Edit:
    """A changed side, the short id of the mistake that the change undoes, and the change in words."""

    side: Expression
    id: str
    words: str


def edits(x: Expression) -> Iterator[Edit]:
    """Every formula that is one edit away from x."""
    yield from _here(x)
    for i, child in enumerate(children(x)):
        for edit in edits(child):
            changed: dict[str, Any] = {("left", "right")[i] if isinstance(x, Binary) else "of": edit.side}
            yield replace(edit, side=replace(x, **changed))


def _here(x: Expression) -> Iterator[Edit]:
    if isinstance(x, Transpose):
        yield Edit(x.of, "transposed", f"{show(x.of)} must stand as it is, not transposed")
    elif isinstance(x, Symbol | Binary) and not (isinstance(x, Binary) and x.op in "+-/"):
        yield Edit(_transposed(x), "transposed", f"{show(x)} must be transposed")
    if isinstance(x, Symbol) and not x.indices:
        for group in _CONFUSED:
            for other in group if x.name in group else ():
                if other != x.name:
                    yield Edit(Symbol(other), f"{x.name}-for-{other}", f"{other} belongs where {x.name} stands")
    if isinstance(x, Call) and x.function in _REDUCTIONS:
        for other in _REDUCTIONS:
            if other != x.function:
                yield Edit(replace(x, function=other), f"{x.function}-for-{other}", f"{other} in place of {x.function}")
    if isinstance(x, Binary):
        yield from _of_binary(x)


def _of_binary(x: Binary) -> Iterator[Edit]:
    if x.op == "@":
        exchanged = replace(x, left=x.right, right=x.left)
        yield Edit(exchanged, "factors-exchanged", f"the factors of {show(x)} must change places")
        yield Edit(replace(x, op="*"), "product-kind", f"{show(x)} must be a product entry by entry")
    elif x.op == "*":
        yield Edit(replace(x, op="@"), "product-kind", f"{show(x)} must be a matrix product")
        yield Edit(x.left, "factor-too-many", f"the factor {show(x.right)} does not belong")
        yield Edit(x.right, "factor-too-many", f"the factor {show(x.left)} does not belong")
    elif x.op in "+-":
        yield Edit(replace(x, op="-" if x.op == "+" else "+"), "sign", f"the sign before {show(x.right)} is wrong")
        yield Edit(x.left, "term-too-many", f"the term {show(x.right)} does not belong")


def _transposed(x: Expression) -> Expression:
    """x^T, with the transpose carried to the names of a product, where it reads best."""
    if isinstance(x, Transpose):
        return x.of
    if isinstance(x, Binary) and x.op == "@":
        return Binary("@", _transposed(x.right), _transposed(x.left))
    return Transpose(x)


def _whole(x: Expression) -> Iterator[Edit]:
    """Edits of a side as a whole."""
    yield Edit(Transpose(x), "transposed", "the whole is transposed")
    yield Edit(Negate(x), "sign", "the sign is wrong")
    yield Edit(Binary("*", x, Symbol("scale")), "scale-missing", "the scale is missing")
    yield Edit(Binary("/", x, Symbol("scale")), "scale-too-many", "there is one scale too many")


def repair(equation: Equation, holds: Callable[[Equation], bool]) -> tuple[Equation, tuple[Edit, ...]] | None:
    """The equation with its last side repaired, and the edits; else with its first side; None where nothing helps."""
    for at in (len(equation.sides) - 1, 0):
        others = {*equation.sides[:at], *equation.sides[at + 1 :]}

        def put(edit: Edit, at: int = at) -> Equation:
            return replace(equation, sides=(*equation.sides[:at], edit.side, *equation.sides[at + 1 :]))

        def tries(at: int = at) -> Iterator[tuple[Edit, ...]]:
            first = []
            for one in chain(_whole(equation.sides[at]), edits(equation.sides[at])):
                first.append(one)
                yield (one,)
            yield from ((one, two) for one in first for two in edits(one.side))

        trials = MAX_WORK // sum(1 for side in equation.sides for _ in walk(side))
        for found in islice(tries(), trials):
            # A side that becomes the other one says nothing.
            if found[-1].side not in others and holds(put(found[-1])):
                return put(found[-1]), found
        if isinstance(equation.sides[0], Symbol):
            break
    return None
