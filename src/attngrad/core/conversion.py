"""What NumPy users pass for an array: lists, tuples and integers, read as numpy.asarray reads them.

A list of Python numbers and an array of integers have no floating dtype of their own: theirs is *open*, and becomes
that of the other arrays of the call.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from attngrad.core.arrays import Array, kind_of
from attngrad.core.checks import base_array, fail, refuse_masked
from attngrad.core.dtypes import KERNEL_DTYPES
from attngrad.core.spec import Spec

_MOST_AXES = 64


class Given(NamedTuple):
    """A base array of NumPy, or a Spec; and whether its dtype is open."""

    array: Any
    is_open: bool


def require_numpy(function: str, **arrays: object) -> None:
    """NumPy arrays only, neither masked nor matrices, or Specs."""
    for name, x in arrays.items():
        if type(x) is Spec:
            continue
        if not issubclass(type(x), np.ndarray):  # isinstance asks x, which may lie
            fail(
                TypeError,
                function,
                name,
                "be a numpy.ndarray",
                kind_of(x),
                _bridge(type(x)) or "Convert it with numpy.asarray.",
            )
        refuse_masked(function, name, x)


def read(function: str, name: str, x: Any) -> Given:
    """An array, or numbers in lists and tuples, as numpy.asarray reads them; an error for what is neither."""
    numbers = False
    if issubclass(type(x), (list, tuple)) and type(x) is not Spec:
        numbers = _holds_python_numbers(function, name, x)
        try:
            x = np.asarray(x)
        except ValueError:
            remedy = "Its rows must be equally long: pad them, and hide what was padded by mask=."
            fail(ValueError, function, name, "be a rectangular array", "a ragged list", remedy)
    require_numpy(function, **{name: x})
    x = base_array(x)
    return Given(x, type(x) is not Spec and (x.dtype.kind in "iu" or (numbers and x.dtype.kind == "f")))


def read_qkv(function: str, q: Any, k: Any, v: Any) -> tuple[Array, ...]:
    """q, k and v, those of open dtype in the dtype of the others, or in float64."""
    given = {name: read(function, name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    found = (x.dtype for x, is_open in given.values() if not is_open and x.dtype in KERNEL_DTYPES)
    dtype = next(found, np.dtype(np.float64))
    return tuple(settle(function, name, x, dtype) for name, x in given.items())


def read_like(function: str, name: str, x: Any, dtype: Any) -> Any:
    """A cotangent or a tangent in ``dtype`` where nothing is lost by the cast; else as it is, for the check to tell."""
    if type(x) is np.ndarray and x.dtype is dtype:
        return x
    given = read(function, name, x)
    if given.array.dtype in KERNEL_DTYPES and np.can_cast(given.array.dtype, dtype, "safe"):
        return given.array.astype(dtype, copy=False)
    return settle(function, name, given, dtype)


def settle(function: str, name: str, given: Given, dtype: Any) -> Any:
    """The array, in ``dtype`` where its own is open. Numbers of lists are rounded; integers must be exact."""
    x = given.array
    if not given.is_open or x.dtype == dtype:
        return x
    with np.errstate(all="ignore"):
        found = x.astype(dtype)
        wide = found.astype(np.float64)
    exact = x.dtype.kind in "iu"
    lost = wide != x if exact else np.isinf(wide) & ~np.isinf(x)
    if lost.any():
        rule = f"hold integers that are exact in {dtype}" if exact else f"hold numbers that are finite in {dtype}"
        fail(ValueError, function, name, rule, x[lost][0], "Compute in a wider dtype, or round it with astype.")
    return found


def _holds_python_numbers(function: str, name: str, x: Any) -> bool:
    """Whether a nested list holds numbers of Python alone; an error where something in it is neither number nor array.

    numpy.asarray would also ask objects for their numbers: a tensor among them would lose its gradient.
    """
    kinds: set[type] = set()
    lists = {id(x): x}
    for _ in range(_MOST_AXES):
        kinds |= set(map(type, chain.from_iterable(lists.values())))
        lists = {id(y): y for y in chain.from_iterable(lists.values()) if issubclass(type(y), (list, tuple))}
        if not lists:
            break
    else:
        fail(ValueError, function, name, f"have at most {_MOST_AXES} axes", "a list that is deeper")
    kinds = {kind for kind in kinds if not issubclass(kind, (list, tuple))}
    for kind in kinds:
        plain = issubclass(kind, np.ndarray) and not issubclass(kind, (np.ma.MaskedArray, np.matrix))
        if not (plain or issubclass(kind, (int, float, complex, np.generic))):
            fail(TypeError, function, name, "hold numbers", f"{kind.__name__} in a list", _bridge(kind))
    return all(issubclass(kind, (int, float, np.integer)) and not issubclass(kind, np.floating) for kind in kinds)


def _bridge(kind: type) -> str:
    """Where a tensor of torch or an array of JAX is taken; nothing for other kinds."""
    module = kind.__module__.split(".")[0]
    if module not in ("torch", "jax", "jaxlib"):
        return ""
    bridge = "torch" if module == "torch" else "jax"
    return f"attngrad.{bridge}.attention takes it, and differentiates; or convert it with numpy.asarray."
