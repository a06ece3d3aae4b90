"""The checks of what a function is given, once: ``bind``, and its siblings for tangents and cotangents.

Data flows one way. A public function calls ``bind`` once; what comes back is valid, and nothing below checks again.
The checks read shapes and dtypes, so they serve NumPy arrays, those of any array-API namespace, and Specs alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from attngrad.core import layouts, option_checks
from attngrad.core.arrays import Array, is_array, kind_of
from attngrad.core.calls import CALLED_AS
from attngrad.core.checks import (
    base_array,
    check_flag,
    check_floating,
    check_like,
    fail,
    shape_of,
)
from attngrad.core.conversion import Given, read, read_like, read_qkv, require_numpy, settle
from attngrad.core.dtypes import ACCUMULATE, KERNEL_DTYPES
from attngrad.core.operands import DIFFERENTIABLE, Operands, Tangents, default_offset
from attngrad.core.options import OPTIONS, Kind, Option, Options, reject_unknown

_MANY = 2**31
"""Tokens and heads stay below this: the kernels number them in 32 bits."""


@lru_cache(maxsize=256)
def _default_options(features: int) -> Options:
    return Options(1.0 / math.sqrt(max(features, 1)))


# --- q, k, v --------------------------------------------------------------------------------------------------------


def _check_qkv(function: str, q: Array, k: Array, v: Array, kernels: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(function, name, x, kernels)
        if len(x.shape) < 2:
            fail(ValueError, function, name, "have at least 2 axes, (..., heads, tokens, features)", shape_of(x))
    if k.dtype != q.dtype or v.dtype != q.dtype:
        name, x = ("k", k) if k.dtype != q.dtype else ("v", v)
        fail(TypeError, function, name, f"have the dtype of q, {q.dtype}", x.dtype, "Cast one to the other.")
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    wrong = layouts.misfit(*shapes)
    if wrong is not None:
        argument, rule, got, remedy = wrong
        fail(ValueError, function, argument, rule, got, remedy + layouts.note(*shapes))
    if kernels:
        for name, shape in (("q", shapes[0]), ("k", shapes[1])):
            if max(shape[-3:-1]) >= _MANY:
                rule = "have fewer than 2**31 tokens (axis -2) and heads (axis -3)"
                fail(ValueError, function, name, rule, f"shape {shape}", "Pass a part of it.")


def _quick_offset(q: Array, k: Array, v: Array) -> int | None:
    """The default offset where all is certainly well with q, k and v; None: no opinion."""
    if not (type(q) is type(k) is type(v) is np.ndarray and q.dtype is k.dtype is v.dtype and q.dtype in KERNEL_DTYPES):
        return None
    qs, ks, vs = q.shape, k.shape, v.shape
    n = len(qs)
    if not (n >= 2 and len(ks) == len(vs) == n and qs[-1] == ks[-1] and ks[-2] == vs[-2] < _MANY and qs[-2] < _MANY):
        return None
    heads_fit = n == 2 or (ks[-3] == vs[-3] > 0 and qs[-3] % ks[-3] == 0 and qs[-3] < _MANY)
    return int(ks[-2] - qs[-2]) if heads_fit and qs[:-3] == ks[:-3] == vs[:-3] else None


# --- options --------------------------------------------------------------------------------------------------------


def bind(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: Mapping[str, Any],
    *,
    kernels: bool = True,
    convert: bool = False,
) -> tuple[Operands, Options, bool]:
    """Check everything once; give the operands, the options and ``return_lse``.

    ``kernels=True`` admits what the kernels compute: NumPy arrays in float64, float32, float16 and bfloat16, or Specs.
    ``kernels=False`` is for the reference: any floating dtype, real or complex, of any array-API namespace.
    ``convert=True`` is for the functions on NumPy arrays, which compute with the operands that come back: lists and
    integers are taken too (core/conversion.py).
    """
    offset = _quick_offset(q, k, v) if kernels else None
    if offset is None:
        if convert:
            q, k, v = read_qkv(function, q, k, v)
        elif kernels:
            require_numpy(function, q=q, k=k, v=v)
            q, k, v = base_array(q), base_array(k), base_array(v)
        _check_qkv(function, q, k, v, kernels)
        offset = default_offset(q, k)
    default = _default_options(int(q.shape[-1]))
    x = Operands(q, k, v, offset=offset)
    if not options:
        return x, default, False

    numbers: dict[str, Any] = {"scale": default.scale}
    arrays: dict[str, Any] = {}
    for name, value in options.items():
        row = OPTIONS.get(name)
        if row is None:
            reject_unknown(function, (name,))
        elif value is None and row.default is None:
            continue
        elif not row.is_array:
            numbers[name] = row.check(function, value, x)
        else:
            if kernels:
                value = _base_arrays(function, row, value, q.dtype if convert else None)
            arrays[name] = row.check(function, value, x)
    o = Options(**numbers)
    option_checks.seed_beside(function, o.dropout, o.seed)
    if kernels:
        option_checks.magnitudes(function, o, q.dtype)
    if arrays:
        x = Operands(q, k, v, **{"offset": offset, **arrays})
    return x, o, check_flag(function, "return_lse", options.get("return_lse", False))


def _base_arrays(function: str, row: Option, value: Any, dtype: Any) -> Any:
    """The arrays of an option as base arrays of NumPy; where ``dtype`` is given, from lists too, open ones in it."""
    if type(value) is np.ndarray and (dtype is None or value.dtype is dtype or not row.differentiable):
        return value
    if row.kind is Kind.PARAMETERS:
        if not isinstance(value, Mapping):
            return value  # of which the check has to tell
        return {n: _base_array(function, f"{row.name}[{n!r}]", y, dtype).array for n, y in value.items()}
    is_list = isinstance(value, (tuple, list))
    if row.kind is Kind.IDS:
        if not is_list or len(value) != 2:
            return value  # of which the check has to tell
        if type(value[0]) is type(value[1]) is np.ndarray:
            return value
        return tuple(_base_array(function, f"{row.name}[{i}]", ids, dtype).array for i, ids in enumerate(value))
    if row.kind is Kind.OFFSET and not (is_array(value) or (is_list and dtype is not None)):
        return value
    given = _base_array(function, row.name, value, dtype)
    return settle(function, row.name, given, dtype) if row.differentiable else given.array


def _base_array(function: str, name: str, x: Any, dtype: Any) -> Given:
    if dtype is not None:
        return read(function, name, x)
    require_numpy(function, **{name: x})
    return Given(base_array(x), False)


# --- tangents and cotangents ----------------------------------------------------------------------------------------


def bind_tangents(function: str, x: Operands, tangents: object, *others: object, kernels: bool = True) -> Tangents:
    """The tangents of (q, k, v) and of the other differentiable inputs: None, or of their shape and dtype."""
    if not isinstance(tangents, (tuple, list)):
        rule = "be (q_dot, k_dot, v_dot), None for zero"
        fail(TypeError, function, "tangents", rule, kind_of(tangents), CALLED_AS.get(function, ""))
    if len(tangents) != 3:
        got = f"{len(tangents)} values"
        fail(ValueError, function, "tangents", "be (q_dot, k_dot, v_dot), None for zero", got)
    given = Tangents(*tangents, *others)._asdict()
    for name, t in given.items():
        primal, argument = getattr(x, name), f"{name}_dot"
        if t is None:
            continue
        if kernels:
            t = given[name] = read_like(function, argument, t, x.q.dtype if primal is None else primal.dtype)
        if primal is None:
            raise ValueError(f"{function}: {argument} was given without {name}. Pass {name}= as well.")
        check_like(function, argument, t, primal.shape, primal.dtype, name)
    return Tangents(**given)


def bind_primals(function: str, primals: object) -> tuple[Array, Array, Array]:
    """``(q, k, v)`` from the first argument of jvp and hvp."""
    if not isinstance(primals, (tuple, list)):
        fail(TypeError, function, "primals", "be a tuple (q, k, v)", kind_of(primals), CALLED_AS.get(function, ""))
    if len(primals) != 3:
        got = f"{len(primals)} values"
        fail(ValueError, function, "primals", "be a tuple (q, k, v)", got, CALLED_AS.get(function, ""))
    return primals[0], primals[1], primals[2]


def check_cotangents(
    function: str, x: Operands, dout: object, dlse: object, suffix: str = "", *, kernels: bool = True
) -> tuple[Any, Any]:
    """dout, of out's shape and q's dtype, and dlse, of lse's shape and dtype; either may be None."""
    shape = x.out_shape
    if kernels and dlse is None and type(dout) is np.ndarray and dout.dtype is x.q.dtype and dout.shape == shape:
        return dout, None
    lse_dtype = ACCUMULATE.get(x.q.dtype, x.q.dtype) if kernels else x.q.dtype
    found = []
    for name, c, axes, dtype in (("dout", dout, shape, x.q.dtype), ("dlse", dlse, shape[:-1], lse_dtype)):
        argument = f"{name}{suffix}"
        if c is not None:
            c = read_like(function, argument, c, dtype) if kernels else c
            check_like(function, argument, c, axes, dtype, name[1:])
        found.append(c)
    return found[0], found[1]


def require_cotangent(function: str, dout: object, dlse: object) -> None:
    """At least one of dout and dlse."""
    if dout is None and dlse is None:
        raise TypeError(f"{function}: dout must be an array where dlse is not given; got None for both.")


def refuse_lse(function: str, return_lse: bool) -> None:
    """return_lse has no meaning in hvp and jacobian."""
    if return_lse:
        fail(ValueError, function, "return_lse", "be False", "True", "Take lse from attention or jvp.")


def bind_wrt(function: str, x: Operands, wrt: object) -> tuple[str, ...]:
    """The names of inputs whose gradients are wanted: one, several, or None for all."""
    if wrt is None:
        return DIFFERENTIABLE
    names = (wrt,) if isinstance(wrt, str) else wrt
    if not isinstance(names, (tuple, list, set, frozenset)) or not names:
        fail(TypeError, function, "wrt", "be a name, or several in a tuple", repr(wrt), "None means all.")
    for name in names:
        check_wrt(function, x, name)
    return tuple(names)


def check_wrt(function: str, x: Operands, wrt: object) -> None:
    """``wrt`` names a differentiable input that was given."""
    if not isinstance(wrt, str):
        fail(TypeError, function, "wrt", "be a string", kind_of(wrt))
    if wrt not in DIFFERENTIABLE:
        fail(ValueError, function, "wrt", f"be one of {', '.join(DIFFERENTIABLE)}", repr(wrt))
    if getattr(x, wrt) is None:
        raise ValueError(f"{function}: wrt={wrt!r}, but {wrt} was not given. Pass {wrt}= as well.")
