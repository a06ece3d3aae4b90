"""Checks of single arguments, and the sentence that every error is: function, argument, rule, what came, remedy."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import numpy as np

from attngrad.core import layouts
from attngrad.core.arrays import Array, is_array, is_floating, kind_of
from attngrad.core.dtypes import SENTENCE
from attngrad.core.spec import Spec


def fail(error: type[Exception], function: str, argument: str, rule: str, got: object, remedy: str = "") -> NoReturn:
    """Raise ``error`` with the house sentence: function, argument, rule, what came, remedy."""
    raise error(f"{function}: {argument} must {rule}; got {got}.{' ' + remedy if remedy else ''}")


def shape_of(x: Array) -> str:
    """The shape of an array, as errors tell it."""
    return f"shape {tuple(int(n) for n in x.shape)}"


def check_integer(function: str, name: str, x: object) -> int:
    """``x`` as an int, if it is an integer and no bool."""
    if type(x) is int:  # as it mostly is; asking the abstract classes of numbers takes longer than all else here
        return x
    if isinstance(x, Integral) and not isinstance(x, (bool, np.bool_)):
        return int(x)
    fail(TypeError, function, name, "be an integer", kind_of(x))


def check_real(function: str, name: str, x: object) -> float:
    """``x`` as a float, if it is a finite real number."""
    if type(x) is float and math.isfinite(x):
        return x
    if isinstance(x, (Real, np.floating)) and not isinstance(x, (bool, np.bool_)):
        try:
            value = float(x)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
        fail(ValueError, function, name, "be finite", value)
    fail(TypeError, function, name, "be a real number", kind_of(x))


def check_flag(function: str, name: str, x: object) -> bool:
    """``x`` as a bool, if it is one."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    fail(TypeError, function, name, "be True or False", kind_of(x))


def base_array(x: Any) -> Any:
    """An array of a subclass as a base array: what a subclass makes of shapes and methods is its own."""
    return x if x is None or type(x) in (np.ndarray, Spec) else np.asarray(x)


def check_array(function: str, name: str, x: Any, dtype: Any = None, remedy: str = "") -> Array:
    """``x`` as it is, if it is an array of ``dtype`` (any dtype where that is None)."""
    if type(x) is not np.ndarray:
        if not is_array(x):
            fail(TypeError, function, name, "be an array", kind_of(x), remedy or "Convert it with numpy.asarray.")
        refuse_masked(function, name, x)
    if dtype is not None and x.dtype != dtype:
        fail(TypeError, function, name, f"have dtype {dtype}", x.dtype, remedy or f"Cast it to {dtype}.")
    return x


def refuse_masked(function: str, name: str, x: object) -> None:
    """Masked arrays and matrices compute by rules of their own."""
    if isinstance(x, (np.ma.MaskedArray, np.matrix)):
        remedy = "Pass numpy.asarray(x)" + ("." if isinstance(x, np.matrix) else ", and what is masked by mask=.")
        fail(TypeError, function, name, "be a plain numpy.ndarray", kind_of(x), remedy)


def check_floating(function: str, name: str, x: Array, kernels: bool = True) -> None:
    """``x`` is an array of a dtype that the kernels (else: the reference) compute in."""
    check_array(function, name, x)
    if is_floating(x, kernels):
        return
    if not kernels:
        fail(TypeError, function, name, "have a real or complex floating dtype", x.dtype, "Cast it with astype.")
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        remedy = "Convert it with x.astype(x.dtype.newbyteorder('='))."
    elif is_floating(x, kernels=False):
        remedy = "attngrad.reference computes in longdouble and complex; or cast to float64."
    else:
        remedy = "Cast it, for instance with x.astype(numpy.float32)."
    fail(TypeError, function, name, f"have dtype {SENTENCE}", x.dtype, remedy)


def check_like(function: str, name: str, x: object, shape: tuple[int, ...], dtype: Any, model: str) -> Array:
    """``x`` as it is, if it is an array of exactly this shape and dtype, which are those of ``model``."""
    check_array(function, name, x, dtype, f"It has the dtype of {model}: cast it.")
    got = tuple(cast(Array, x).shape)
    if got != tuple(shape):
        remedy = layouts.exchanged_note(name, got, tuple(shape)) if model in ("q", "k", "v", "out") else ""
        fail(ValueError, function, name, f"have the shape of {model}, {tuple(shape)}", shape_of(x), remedy)
    return x


def check_broadcast(function: str, name: str, array: Array, target: tuple[int, ...], what: str, x: Any) -> None:
    """``array`` broadcasts to exactly ``target``, the shape of ``what``; beside the operands ``x``."""
    shape = tuple(array.shape)
    if not layouts.broadcasts(shape, target):
        remedy = "Axes are matched from the last; each is 1 or as long."
        remedy += layouts.array_note(name, shape, target, x)
        fail(ValueError, function, name, f"broadcast to {what} = {target}", shape_of(array), remedy)
