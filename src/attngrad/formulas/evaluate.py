"""The second pass: the value of a side, in float64, at given values of the names.

Every index has an axis of its own in front of the matrix, of size 1 where the part does not depend on it: entries and
rows of all indices are computed at once, and a sum over an index is a sum over its axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.formulas.shapes import Shapes, Size, infer, resolve
from attngrad.formulas.symbols import SIZED
from attngrad.formulas.tree import Binary, Call, Equation, Expression, Negate, Number, Power, Symbol, Transpose

Values = Mapping[str, Array]


def _softmax(x: Array) -> Array:
    """Over rows; over the column where there is but one."""
    axis = -2 if x.shape[-1] == 1 else -1
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def _diagonal(x: Array) -> Array:
    """diag of a row or a column, or the diagonal of a square matrix as a column."""
    rows, columns = x.shape[-2:]
    if rows != 1 and columns != 1:
        return np.diagonal(x, axis1=-2, axis2=-1)[..., None]
    return np.eye(rows * columns) * x


def _softmax_jacobian(x: Array) -> Array:
    a = _softmax(x)
    column = a if a.shape[-1] == 1 else np.swapaxes(a, -1, -2)
    return _diagonal(a) - column * np.swapaxes(column, -1, -2)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    **{
        f"{over}{reduce.__name__}": partial(reduce, axis=axis, keepdims=True)
        for reduce in (np.sum, np.mean)
        for over, axis in (("", (-2, -1)), ("row", -1), ("col", -2))
    },
    "rowmax": partial(np.max, axis=-1, keepdims=True),
    "softmax": _softmax,
    "dsoftmax": _softmax_jacobian,
    "diag": _diagonal,
    "trace": lambda x: np.trace(x, axis1=-2, axis2=-1)[..., None, None],
}

_OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def _length(size: Size) -> int:
    """A size as a number; the names of sizes are numbers where values have been given."""
    return int(str(resolve(size)))


class _Evaluation:
    def __init__(self, shapes: Shapes, values: Values) -> None:
        self.shapes, self.values = shapes, values
        self.axes = len(shapes.ranges)

    def visit(self, x: Expression) -> Array:
        if isinstance(x, Number):
            return np.full((1,) * (self.axes + 2), x.value)
        if isinstance(x, Symbol):
            return self.symbol(x)
        if isinstance(x, Binary):
            return self.binary(x.op, self.visit(x.left), self.visit(x.right))
        inner = self.visit(x.of)
        if isinstance(x, Negate):
            return -inner
        if isinstance(x, Transpose):
            return np.swapaxes(inner, -1, -2)
        if isinstance(x, Power):
            return inner**x.exponent
        if isinstance(x, Call):
            return _FUNCTIONS[x.function](inner)
        return np.sum(inner, axis=self.shapes.axes[id(x)], keepdims=True)

    def symbol(self, x: Symbol) -> Array:
        if x.name in SIZED:
            size = _length(self.shapes.sized[id(x)])
            value = {"I": np.eye(size), "e": np.eye(size)[..., None], "ones": np.ones((size, 1))}[x.name]
        else:
            value = self.values[x.name]
        if not x.indices:
            return value.reshape((1,) * self.axes + value.shape)
        if ":" in x.indices:  # A_{:j}: the axis that stays comes last, and is a column
            value = np.moveaxis(value, x.indices.index(":"), -1)[..., None]
        at = []
        for axis in self.shapes.axes[id(x)]:
            along = [1] * self.axes
            along[axis] = -1
            at.append(np.arange(_length(self.shapes.ranges[axis])).reshape(along))
        picked = value[tuple(at)]
        rest = picked.shape[self.axes :]
        return picked.reshape(picked.shape[: self.axes] + (1,) * (2 - len(rest)) + rest)

    def binary(self, op: str, left: Array, right: Array) -> Array:
        axes = max(left.ndim, right.ndim) - self.axes
        numbers = [x.shape[self.axes :] == (1, 1) for x in (left, right)]
        if op == "@" and not any(numbers):
            if axes == 4:  # dL/dZ dZ/dQ
                return np.sum(left[..., None, None] * right, axis=(-4, -3))
            if axes == 3:
                left = left[..., None, :, :]
            return np.matmul(left, right)
        # A number gets as many axes as its neighbour has.
        pairs = zip((left, right), numbers, strict=True)
        left, right = (x.reshape(x.shape[: self.axes] + (1,) * axes) if n else x for x, n in pairs)
        return _OPERATORS["*" if op == "@" else op](left, right)


def dims_from(values: Values) -> Callable[[str], tuple[str, ...]]:
    """The shapes of the values, as ``infer`` takes them."""
    return lambda name: tuple(map(str, np.shape(values[name])))


def sides(equation: Equation, values: Values) -> tuple[Array, ...]:
    """The value of every side, broadcast to one shape; a ShapeFault where the sizes of these values do not fit.

    >>> import numpy as np
    >>> from attngrad.formulas.parser import parse
    >>> sides(parse("rowsum(A) = 1")[0], {"A": np.full((2, 4), 0.25)})[0].ravel()
    array([1., 1.])
    """
    shapes = infer(equation, dims_from(values))
    run = _Evaluation(shapes, values)
    return tuple(np.broadcast_arrays(*(run.visit(side) for side in equation.sides)))


def each_side(equation: Equation, values: Values) -> tuple[Array, ...]:
    """The value of every side in its own shape, which may differ: free indices first, then what is left of a matrix.

    >>> import numpy as np
    >>> from attngrad.formulas.parser import parse
    >>> [x.shape for x in each_side(parse("A = A.T")[0], {"A": np.ones((2, 4))})]
    [(2, 4), (4, 2)]
    """
    shapes = infer(equation, dims_from(values), agree=False)
    run = _Evaluation(shapes, values)
    free = [_length(shapes.ranges[axis]) for axis in shapes.free]
    return tuple(_without_axes(run.visit(side), run.axes, shapes.free, free) for side in equation.sides)


def _without_axes(x: Array, axes: int, free: tuple[int, ...], lengths: list[int]) -> Array:
    """x without the axes of indices that are summed over; with free indices, without those of a row or number too."""
    matrix = x.shape[axes:]
    picked = np.moveaxis(x, free, range(len(free))).reshape(*(x.shape[axis] for axis in free), *matrix)
    picked = np.broadcast_to(picked, (*lengths, *matrix))
    return picked.reshape(*lengths, *(n for n in matrix if n > 1)) if free else picked
