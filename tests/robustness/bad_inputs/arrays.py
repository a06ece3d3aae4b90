"""Kinds of array: ``do(x)`` is the good array ``x`` of an argument, spoiled. Each is tried in every argument."""

from __future__ import annotations

import array
import tempfile
import warnings
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from bad_inputs.row import Row

NDArray = np.ndarray

# --- memory: the numbers are right, wherever and however they lie -------------------------------------------------------


def every_other(x: NDArray) -> NDArray:
    wide = np.full([2 * n + 1 for n in x.shape], 7, x.dtype)
    part = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    part[...] = x
    return part


def backwards(x: NDArray) -> NDArray:
    every_axis = tuple(slice(None, None, -1) for _ in x.shape)
    return x[every_axis].copy()[every_axis]


def inside(x: NDArray) -> NDArray:
    wide = np.full([n + 2 for n in x.shape], 7, x.dtype)
    part = wide[tuple(slice(1, -1) for _ in x.shape)]
    part[...] = x
    return part


def read_only(x: NDArray) -> NDArray:
    x = x.copy()
    x.flags.writeable = False
    return x


def of_bytes(x: NDArray) -> NDArray:
    return np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)


def unaligned(x: NDArray) -> NDArray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    found = memory[1:].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


def field(x: NDArray) -> NDArray:
    """Strides that are no multiple of the item size."""
    records = np.zeros(x.shape, [("gap", "u1"), ("x", x.dtype)])
    records["x"] = x
    return records["x"]


def repeated(x: NDArray) -> NDArray:
    """All entries along the axis before the last are one, by a stride of zero."""
    axis = max(x.ndim - 2, 0)
    return np.broadcast_to(x.take([0], axis=axis), x.shape)


def one_number(x: NDArray) -> NDArray:
    return np.broadcast_to(x.reshape(-1)[0], x.shape)


def windows(x: NDArray) -> NDArray:
    """Rows that overlap: each begins one number after the one before."""
    x = np.ascontiguousarray(x)
    steps = tuple(x.itemsize * (1 if axis >= x.ndim - 2 else 3) for axis in range(x.ndim))
    return as_strided(x, x.shape, steps, writeable=False)


class Tagged(np.ndarray):
    """An honest subclass."""


class Unwilling(np.ndarray):
    """Takes part in no ufunc."""

    __array_ufunc__ = None


class WrongShape(np.ndarray):
    """Says that it is larger than it is."""

    shape = property(lambda self: (2, 4, 300, 4))
    strides = property(lambda self: (1 << 20, 1 << 16, 1 << 10, 8))


class WrongDtype(np.ndarray):
    """Says that it is of another dtype."""

    dtype = property(lambda self: np.dtype(np.float32))
    itemsize = property(lambda self: 4)


class WrongMethods(np.ndarray):
    """Gives something else for whatever it is asked."""

    def reshape(self, *_: Any, **__: Any) -> Any:
        return np.zeros(1)

    astype = copy = transpose = __getitem__ = reshape


def memory_map(x: NDArray) -> NDArray:
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, x.dtype, "w+", shape=x.shape)
    found[...] = x
    return found


def with_metadata(x: NDArray) -> NDArray:
    return x.astype(np.dtype(x.dtype, metadata={"unit": "m"}))


MEMORY = [
    Row("Fortran order", np.asfortranarray),
    Row("transposed", lambda x: x.T.copy().T),
    Row("every other number", every_other),
    Row("negative strides", backwards),
    Row("a part of a larger array", inside),
    Row("read-only", read_only),
    Row("the memory of a bytes object", of_bytes),
    Row("unaligned", unaligned),
    Row("strides that are no multiple of the item", field),
    Row("strides of zero along tokens", repeated),
    Row("strides of zero along all axes", one_number),
    Row("overlapping rows", windows),
    Row("a subclass", lambda x: x.view(Tagged)),
    Row("a subclass that refuses ufuncs", lambda x: x.view(Unwilling)),
    Row("a subclass that lies about its shape", lambda x: x.view(WrongShape)),
    Row("a subclass that lies about its dtype", lambda x: x.view(WrongDtype)),
    Row("a subclass whose methods lie", lambda x: x.view(WrongMethods)),
    Row("a record array's view", lambda x: x.view(np.recarray)),
    Row("a memory map", memory_map),
    Row("a dtype with metadata", with_metadata),
]

# --- kinds: no array, or none of ours -----------------------------------------------------------------------------------


class Honest:
    """What numpy.asarray would take."""

    def __init__(self, x: NDArray) -> None:
        self.x = x

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.x


class Fickle(Honest):
    """Of another shape every time."""

    calls = 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.calls += 1
        return np.zeros((self.calls, 1))


class Raising(Honest):
    """Raises where it is asked."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("it is not to be asked")


class NoArray(Honest):
    """Gives no array."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return "abc"


class OtherDtype(Honest):
    """Gives integers, whatever was wanted."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.x.astype(int)


class Interface(Honest):
    """Points to memory that is not there."""

    @property
    def __array_interface__(self) -> Any:
        return {"shape": self.x.shape, "typestr": "<f8", "data": (8, False), "version": 3}


class Namespaced(Honest):
    """Has a namespace, and the attributes, but is no array."""

    def __init__(self, x: NDArray) -> None:
        super().__init__(x)
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.ndim

    def __array_namespace__(self, api_version: Any = None) -> Any:
        return np


def impostor(x: NDArray) -> Any:
    """isinstance says yes."""
    found = Mock(spec=np.ndarray)
    found.shape, found.dtype, found.ndim, found.strides, found.size = x.shape, x.dtype, x.ndim, x.strides, x.size
    return found


def matrix(x: NDArray) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy advises against them
        return np.asmatrix(np.ones((2, 2)))


NO_ARRAY = r"{name} must be (a plain |a )?numpy\.ndarray; got "
KINDS = [
    Row("a string", lambda x: "q", TypeError, NO_ARRAY + r"'q' \(str\)"),
    Row("bytes", lambda x: x.tobytes(), TypeError, NO_ARRAY + "bytes"),
    Row("None", lambda x: None, TypeError, NO_ARRAY + "None"),
    Row("an int", lambda x: 3, TypeError, NO_ARRAY + r"3 \(int\)"),
    Row("a float", lambda x: 0.5, TypeError, NO_ARRAY + r"0\.5 \(float\)"),
    Row("a complex number", lambda x: 1j, TypeError, NO_ARRAY + r"1j \(complex\)"),
    Row("True", lambda x: True, TypeError, NO_ARRAY + r"True \(bool\)"),
    Row("a NumPy scalar", lambda x: np.float64(1), TypeError, NO_ARRAY + r"np\.float64\(1\.0\) \(float64\)"),
    Row("a dict", lambda x: {"q": x}, TypeError, NO_ARRAY + "dict"),
    Row("a set", lambda x: {1.0}, TypeError, NO_ARRAY + "set"),
    Row("a generator", lambda x: (a for a in x), TypeError, NO_ARRAY + "generator"),
    Row("a range", lambda x: range(3), TypeError, NO_ARRAY + "range"),
    Row("a function", lambda x: len, TypeError, NO_ARRAY + "builtin_function_or_method"),
    Row("a class", lambda x: np.ndarray, TypeError, NO_ARRAY + "type"),
    Row("an ellipsis", lambda x: ..., TypeError, NO_ARRAY + "ellipsis"),
    Row("a memoryview", lambda x: memoryview(x), TypeError, NO_ARRAY + "memoryview"),
    Row("an array.array", lambda x: array.array("d", [1.0]), TypeError, NO_ARRAY + "array"),
    Row("a tensor of torch", lambda x: torch.zeros(2, 3), TypeError, NO_ARRAY + "Tensor.*numpy.asarray"),
    Row("a masked array", lambda x: np.ma.masked_array(x), TypeError, NO_ARRAY + "MaskedArray.*mask="),
    Row("a masked array with a mask", lambda x: np.ma.masked_less(x, 0), TypeError, NO_ARRAY + "MaskedArray"),
    Row("a matrix", matrix, TypeError, NO_ARRAY + r"matrix\. Pass numpy.asarray"),
    Row("an honest __array__", Honest, TypeError, NO_ARRAY + r"Honest\. Convert it with numpy.asarray"),
    Row("an __array__ of changing shape", Fickle, TypeError, NO_ARRAY + "Fickle"),
    Row("an __array__ that raises", Raising, TypeError, NO_ARRAY + "Raising"),
    Row("an __array__ that gives no array", NoArray, TypeError, NO_ARRAY + "NoArray"),
    Row("an __array__ of the wrong dtype", OtherDtype, TypeError, NO_ARRAY + "OtherDtype"),
    Row("an __array_interface__ of wild memory", Interface, TypeError, NO_ARRAY + "Interface"),
    Row("an __array_namespace__ without an array", Namespaced, TypeError, NO_ARRAY + "Namespaced"),
    Row("an object that claims to be an ndarray", impostor, TypeError, NO_ARRAY + "Mock"),
]  # fmt: skip

# --- lists: what numpy.asarray reads, but for what it would lose or ask for -----------------------------------------------


def of_scalars(x: Any) -> Any:
    """Tuples of tuples of NumPy scalars."""
    return tuple(map(of_scalars, x)) if x.ndim > 1 else tuple(x)


def endless(x: NDArray) -> Any:
    found: list[Any] = []
    found += [found, found]
    return found


CONVERSIONS = [
    Row("a list of Python's numbers", lambda x: x.tolist()),
    Row("a tuple of arrays", lambda x: tuple(x)),
    Row("tuples of NumPy scalars", of_scalars),
    Row("a list of a tuple and an array", lambda x: [*x[:1].tolist(), *map(np.asarray, x[1:])]),
]
IN_A_LIST = "{name} must hold numbers; got "
LISTS = [
    Row("a ragged list", lambda x: [[1.0], [1.0, 2.0]], ValueError, "{name} must be a rectangular array; got a ragged list. .*pad"),
    Row("a list of rows and numbers", lambda x: [[1.0], 2.0], ValueError, "{name} must be a rectangular array"),
    Row("a list that holds itself", endless, ValueError, "{name} must have at most 64 axes"),
    Row("a list of None", lambda x: [[None, 1.0]], TypeError, IN_A_LIST + "NoneType in a list"),
    Row("a list of strings", lambda x: [["1.0"]], TypeError, IN_A_LIST + "str in a list"),
    Row("a list of tensors", lambda x: [torch.zeros(3)], TypeError, IN_A_LIST + r"Tensor in a list\. attngrad\.torch\.attention"),
    Row("a list of masked arrays", lambda x: [np.ma.masked_array(row) for row in x], TypeError, IN_A_LIST + "MaskedArray in a list"),
    Row("a list of objects with __array__", lambda x: [Raising(x)], TypeError, IN_A_LIST + "Raising in a list"),
]  # fmt: skip
"""Of arguments that are arrays of any dtype."""

# --- dtypes, of arguments that are floating ------------------------------------------------------------------------------

DTYPE = r"{name} must (have|be of) (the )?dtype.*; got "
DTYPES = [
    Row("big-endian", lambda x: x.astype(">f8"), TypeError, DTYPE + ">f8"),
    Row("booleans", lambda x: x > 0, TypeError, DTYPE + "bool"),
    Row("a list of booleans", lambda x: (x > 0).tolist(), TypeError, DTYPE + "bool"),
    Row("a list of complex numbers", lambda x: (x * 1j).tolist(), TypeError, DTYPE + "complex128"),
    Row("a list of integers beyond 64 bits", lambda x: np.full(x.shape, 2**70, object).tolist(), TypeError, DTYPE + "object"),
    Row("complex128", lambda x: x.astype(np.complex128), TypeError, DTYPE + "complex128"),
    Row("longdouble", lambda x: x.astype(np.longdouble), TypeError, DTYPE + str(np.dtype(np.longdouble))),
    Row("objects", lambda x: x.astype(object), TypeError, DTYPE + "object"),
    Row("objects that are None", lambda x: np.full(x.shape, None), TypeError, DTYPE + "object"),
    Row("strings", lambda x: x.astype("U8"), TypeError, DTYPE + "<U8"),
    Row("byte strings", lambda x: np.full(x.shape, b"1"), TypeError, DTYPE + r"\|S1"),
    Row("void", lambda x: x.view("V8"), TypeError, DTYPE + r"\|V8"),
    Row("a structured dtype", lambda x: x.view([("re", "f8")]), TypeError, DTYPE + r"\[\('re'"),
    Row("datetimes", lambda x: x.view("M8[s]"), TypeError, DTYPE + "datetime64"),
    Row("timedeltas", lambda x: x.view("m8[s]"), TypeError, DTYPE + "timedelta64"),
    Row("float8", lambda x: x.astype(ml_dtypes.float8_e4m3fn), TypeError, DTYPE + "float8_e4m3fn"),
    Row("int4", lambda x: np.zeros(x.shape, ml_dtypes.int4), TypeError, DTYPE + "int4"),
]  # fmt: skip
INTEGERS = [
    Row("int64", lambda x: np.rint(4 * x).astype(np.int64)),
    Row("uint8", lambda x: np.rint(np.abs(4 * x)).astype(np.uint8)),
    Row("big-endian int32", lambda x: np.rint(4 * x).astype(">i4")),
    Row("a list of Python's integers", lambda x: np.rint(4 * x).astype(int).tolist()),
]
NARROW = [
    Row("float32 among float64", lambda x: x.astype(np.float32), TypeError, "must have.*; got float(32|64)"),
    Row("float16 among float64", lambda x: x.astype(np.float16), TypeError, "must have.*; got float(16|64)"),
    Row("bfloat16 among float64", lambda x: x.astype(ml_dtypes.bfloat16), TypeError, "must have.*; got (bfloat16|float64)"),
]  # fmt: skip
"""Refused in inputs, whose gradients have their dtype; cotangents and tangents are widened."""
