"""The first pass: does every product fit, and have both sides one shape?

A shape is a tuple of sizes by name, ``("n", "m")``; two axes are a matrix, ``("1", "1")`` a number. Sizes that names
leave open (those of ``I``, of ``e_i``, and how far an index runs) are found by unification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from attngrad.formulas.symbols import KNOWN, ONE, SCALAR, SIZED
from attngrad.formulas.tree import (
    Binary,
    Call,
    Equation,
    Expression,
    Negate,
    Number,
    Power,
    Sum,
    Symbol,
    Transpose,
    names,
    show,
)

MAX_INDICES = 4
"""Indices in force at one place: each is an axis of the arrays that are computed."""

MAX_AXES = 16
"""Indices in all; one that is summed over twice counts twice."""


class Open:
    """A size that is not known yet; ``same`` is what it was found to be."""

    def __init__(self) -> None:
        self.same: Size | None = None


Size = str | Open
Dims = tuple[Size, ...]


class Fault(Exception):  # noqa: N818
    """A part of a formula, and what is wrong with it."""

    def __init__(self, part: Expression | Equation, message: str) -> None:
        super().__init__(message)
        self.part, self.message = part, message


class ShapeFault(Fault):
    """A part that does not fit."""


class Unsized(Fault):
    """A part whose size nothing tells, or that has too many indices."""


def resolve(size: Size) -> Size:
    """What a size is known to be by now."""
    while isinstance(size, Open) and size.same is not None:
        size = size.same
    return size


def unify(a: Size, b: Size) -> bool:
    """Make two sizes one; False where they are known to differ."""
    a, b = resolve(a), resolve(b)
    if a is b or a == b:
        return True
    if isinstance(a, Open):
        a.same = b
        return True
    if isinstance(b, Open):
        b.same = a
        return True
    return False


def shape_text(dims: Dims) -> str:
    """n x m; ? for what is not known."""
    return " x ".join(_named(dims))


@dataclass
class Shapes:
    """What the pass found, by the identity of the parts: shapes, and which axis each index has.

    ``ranges`` holds how far each axis runs, ``sized`` the sizes that I and e_i were found to have,
    ``free`` the axes of the indices that no sum binds.
    """

    of: dict[int, Dims] = field(default_factory=dict)
    axes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ranges: list[Size] = field(default_factory=list)
    sized: dict[int, Size] = field(default_factory=dict)
    free: tuple[int, ...] = ()

    def __getitem__(self, part: Expression) -> tuple[str, ...]:
        """The shape of a part."""
        return _named(self.of[id(part)])

    def by_part(self) -> dict[int, tuple[str, ...]]:
        """All shapes, by the identity of the parts."""
        return {part: _named(dims) for part, dims in self.of.items()}


class _Pass:
    def __init__(self, dims_of: Callable[[str], tuple[str, ...]], shapes: Shapes) -> None:
        self.dims_of, self.shapes = dims_of, shapes
        self.scope: dict[str, int] = {}

    def new_axis(self, x: Expression) -> int:
        """An axis for one more index, where there is room for it."""
        if len(self.scope) >= MAX_INDICES or len(self.shapes.ranges) >= MAX_AXES:
            raise Unsized(x, f"at most {MAX_INDICES} indices may be in force at once, and {MAX_AXES} in all.")
        self.shapes.ranges.append(Open())
        return len(self.shapes.ranges) - 1

    def visit(self, x: Expression) -> Dims:
        dims = self.find(x)
        self.shapes.of[id(x)] = dims
        return dims

    def find(self, x: Expression) -> Dims:
        if isinstance(x, Number):
            return SCALAR
        if isinstance(x, Symbol):
            return self.symbol(x)
        if isinstance(x, Sum):
            return self.sum(x)
        if isinstance(x, Binary):
            left, right = self.visit(x.left), self.visit(x.right)
            return self.product(x, left, right) if x.op == "@" else self.entrywise(x, left, right)
        inner = self.visit(x.of)
        if isinstance(x, Negate):
            return inner
        if len(inner) != 2:
            raise ShapeFault(x, f"{show(x.of)} has {len(inner)} axes, {shape_text(inner)}; a matrix is needed here")
        if isinstance(x, Transpose):
            return inner[::-1]
        if isinstance(x, Power):
            if _known(inner) != SCALAR:
                raise ShapeFault(x, f"{show(x.of)} is {shape_text(inner)}; only a number has powers here")
            return SCALAR
        return self.call(x, inner)

    def symbol(self, x: Symbol) -> Dims:
        if x.name in SIZED:
            own = self.shapes.sized[id(x)] = Open()
            dims: Dims = tuple(own if d == "?" else d for d in SIZED[x.name])
        else:
            dims = self.dims_of(x.name)
        kept = tuple(size for letter, size in zip(x.indices, dims, strict=False) if letter == ":")
        for letter, size in zip(x.indices, dims, strict=False):
            if letter == ":":  # A_{:j}, a column
                continue
            if letter not in self.scope:
                self.scope[letter] = self.new_axis(x)
            axis = self.scope[letter]
            known = resolve(self.shapes.ranges[axis])
            if not unify(known, size):
                raise ShapeFault(
                    x, f"the index {letter} runs to {resolve(size)} in {show(x)}, and elsewhere to {known}"
                )
        self.shapes.axes[id(x)] = tuple(self.scope[letter] for letter in x.indices if letter != ":")
        rest = dims[len(x.indices) :]
        if kept:
            if len(kept) + len(rest) != 1:
                raise ShapeFault(x, f"{show(x)} has more than one axis left; only a column may be taken so")
            return (kept[0], ONE)
        return ((ONE,) * (2 - len(rest)) + rest) if x.indices else rest

    def sum(self, x: Sum) -> Dims:
        outer = self.scope
        axis = self.new_axis(x)
        self.scope = {**outer, x.index: axis}
        dims = self.visit(x.of)
        # A free index that was first met inside the sum stays in force outside.
        inner, self.scope = self.scope, outer
        self.scope.update({k: v for k, v in inner.items() if k != x.index})
        self.shapes.axes[id(x)] = (axis,)
        if isinstance(resolve(self.shapes.ranges[axis]), Open) and not any(
            axis in axes for part, axes in self.shapes.axes.items() if part != id(x)
        ):
            raise Unsized(x, f"the index {x.index} of the sum is not used in it.")
        return dims

    def entrywise(self, x: Binary, left: Dims, right: Dims) -> Dims:
        if _known(left) == SCALAR or _known(right) == SCALAR:
            return right if _known(left) == SCALAR else left
        if len(left) != len(right):
            self.misfit(x, left, right, "an equal number of axes")
        found = []
        for a, b in zip(map(resolve, left), map(resolve, right), strict=True):
            if a != ONE and b != ONE and not unify(a, b):
                self.misfit(x, left, right, "equal shapes, or a row or column for each")
            found.append(b if a == ONE else a)
        return tuple(found)

    def product(self, x: Binary, left: Dims, right: Dims) -> Dims:
        if _known(left) == SCALAR or _known(right) == SCALAR:
            return right if _known(left) == SCALAR else left
        if (len(left), len(right)) == (2, 4):  # the chain rule: dL/dZ dZ/dQ sums over both axes of Z
            if all(unify(a, b) for a, b in zip(left, right[:2], strict=True)):
                return right[2:]
            self.misfit(x, left, right, "the axes of the left first on the right")
        if len(left) != 2 or len(right) not in (2, 3):
            self.misfit(x, left, right, "two matrices")
        if not unify(left[1], right[-2]):
            self.misfit(x, left, right, f"{shape_text(left[1:])} = {shape_text(right[-2:-1])}")
        return (*right[:-2], left[0], right[-1])

    def misfit(self, x: Binary, left: Dims, right: Dims, need: str) -> NoReturn:
        what = {"@": "product", "*": "product entry by entry", "/": "quotient", "+": "sum", "-": "difference"}[x.op]
        raise ShapeFault(
            x,
            f"{show(x.left)} is {shape_text(left)} and {show(x.right)} is {shape_text(right)}: the {what} needs {need}",
        )

    def call(self, x: Call, inner: Dims) -> Dims:
        rows, columns = inner
        if x.function in {"sum", "mean"}:
            return SCALAR
        if x.function in {"rowsum", "rowmean", "rowmax"}:
            return (rows, ONE)
        if x.function in {"colsum", "colmean"}:
            return (ONE, columns)
        if x.function in {"diag", "dsoftmax"} and ONE in _known(inner):
            size = rows if resolve(columns) == ONE else columns
            return (size, size)
        if x.function == "dsoftmax":
            raise ShapeFault(x, f"{show(x.of)} is {shape_text(inner)}; dsoftmax takes one row or column")
        if x.function in {"diag", "trace"}:
            if not unify(rows, columns):
                raise ShapeFault(x, f"{show(x.of)} is {shape_text(inner)}; {x.function} takes a square matrix")
            return SCALAR if x.function == "trace" else (rows, ONE)
        return inner


def _named(dims: Dims) -> tuple[str, ...]:
    """Sizes by name, "?" for one that was never found."""
    return tuple(d if isinstance(d := resolve(size), str) else "?" for size in dims)


def _known(dims: Dims) -> Dims:
    return tuple(resolve(d) for d in dims)


def is_constant(x: Expression) -> bool:
    """Whether it is made of numbers and sizes alone; then it may stand for a matrix of that number: rowsum(dS) = 0."""
    return all(KNOWN[name] == SCALAR for name in names(x))


def infer(
    equation: Equation, dims_of: Callable[[str], tuple[str, ...]], into: Shapes | None = None, agree: bool = True
) -> Shapes:
    """The shape of every part; a ShapeFault where parts do not fit or sides differ, ``into`` keeping what was found.

    With ``agree=False`` the sides may differ.

    >>> from attngrad.formulas.parser import parse
    >>> from attngrad.formulas.symbols import SHAPES
    >>> infer(parse("dV = A dO")[0], SHAPES.__getitem__)
    Traceback (most recent call last):
        ...
    attngrad.formulas.shapes.ShapeFault: A is n x m and dO is n x d_v: the product needs m = n
    """
    run = _Pass(dims_of, Shapes() if into is None else into)
    sides = [(side, run.visit(side)) for side in equation.sides]
    run.shapes.free = tuple(run.scope.values())
    for (first, dims), (second, others) in pairwise(s for s in sides if not is_constant(s[0])):
        same = len(dims) == len(others) and all(unify(a, b) for a, b in zip(dims, others, strict=True))
        if agree and not same:
            raise ShapeFault(equation, f"{_side(first)} is {shape_text(dims)}, {_side(second)} is {shape_text(others)}")
    for size in (*run.shapes.ranges, *run.shapes.sized.values(), *(d for dims in run.shapes.of.values() for d in dims)):
        if isinstance(resolve(size), Open):
            raise Unsized(equation.sides[0], "nothing in the formula tells the size of its I, ones, e_i or index.")
    return run.shapes


def _side(x: Expression) -> str:
    text = show(x)
    return text if len(text) <= 40 else "the other side"
