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

from attngrad.core import option_checks
from attngrad.core.arrays import Array, is_array, kind_of
from attngrad.core.checks import (
    base_array,
    check_flag,
    check_floating,
    check_like,
    fail,
    refuse_masked,
    shape_of,
)
from attngrad.core.dtypes import ACCUMULATE, KERNEL_DTYPES
from attngrad.core.operands import DIFFERENTIABLE, Operands, Tangents, default_offset
from attngrad.core.options import OPTION_NAMES, OPTIONS, Kind, Option, Options, reject_unknown
from attngrad.core.spec import Spec

_LAYOUT = "Axes are (..., heads, tokens, features)."
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
    qs, ks, vs = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    for name, shape in (("k", ks), ("v", vs)):
        if len(shape) != len(qs) or shape[:-3] != qs[:-3]:
            rule = f"have as many axes as q and its leading axes {qs[:-3]}"
            fail(ValueError, function, name, rule, f"shape {shape} beside q of {qs}", "Leading axes do not broadcast.")
    if ks[-1] != qs[-1]:
        fail(ValueError, function, "k", f"have {qs[-1]} features (axis -1), like q", f"shape {ks}", _LAYOUT)
    if vs[-2] != ks[-2]:
        fail(ValueError, function, "v", f"have {ks[-2]} tokens (axis -2), like k", f"shape {vs}", _LAYOUT)
    if len(qs) > 2:
        hq, hk = qs[-3], ks[-3]
        if hk != hq and (hk == 0 or hq % hk):
            rule = f"have {hq} or a divisor of {hq} heads (axis -3), like q"
            fail(ValueError, function, "k", rule, hk, "Repeat or regroup the key heads.")
        if vs[-3] != hk:
            fail(ValueError, function, "v", f"have {hk} heads (axis -3), like k", vs[-3], _LAYOUT)
    if kernels:
        for name, shape in (("q", qs), ("k", ks)):
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
    function: str, q: Array, k: Array, v: Array, options: Mapping[str, Any], *, kernels: bool = True
) -> tuple[Operands, Options, bool]:
    """Check everything once; give the operands, the options and ``return_lse``.

    ``kernels=True`` admits what the kernels compute: NumPy arrays in float64, float32, float16 and bfloat16, or Specs.
    ``kernels=False`` is for the reference: any floating dtype, real or complex, of any array-API namespace.
    """
    offset = _quick_offset(q, k, v) if kernels else None
    if offset is None:
        if kernels:
            require_numpy(function, q=q, k=k, v=v)
            q, k, v = base_array(q), base_array(k), base_array(v)
        _check_qkv(function, q, k, v, kernels)
        offset = default_offset(q, k)
    default = _default_options(int(q.shape[-1]))
    x = Operands(q, k, v, offset=offset)
    if not options:
        return x, default, False

    numbers: dict[str, Any] = {"scale": default.scale}
    arrays: dict[str, Any] = {"offset": offset}
    for name, value in options.items():
        row = OPTIONS.get(name)
        if row is None:
            reject_unknown(function, (name,))
        elif value is None and row.default is None:
            continue
        elif not row.is_array:
            numbers[name] = row.check(function, value, x)
        else:
            arrays[name] = row.check(function, _base_arrays(function, row, value) if kernels else value, x)
    o = Options(**numbers)
    option_checks.seed_beside(function, o.dropout, o.seed)
    if kernels:
        option_checks.magnitudes(function, o, q.dtype)
    return Operands(q, k, v, **arrays), o, check_flag(function, "return_lse", options.get("return_lse", False))


def _base_arrays(function: str, row: Option, value: Any) -> Any:
    """The arrays of an option as base arrays of NumPy; masked arrays and matrices are refused."""
    if type(value) is np.ndarray:
        return value
    if row.kind is Kind.IDS:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            return value  # of which the check has to tell
        if type(value[0]) is type(value[1]) is np.ndarray:
            return value
        require_numpy(function, **{f"{row.name}[{i}]": ids for i, ids in enumerate(value)})
        return tuple(map(base_array, value))
    if row.kind is Kind.OFFSET and not is_array(value):
        return value
    require_numpy(function, **{row.name: value})
    return base_array(value)


def require_numpy(function: str, **arrays: object) -> None:
    """NumPy arrays only, neither masked nor matrices; an option that is None was not given."""
    for name, x in arrays.items():
        if x is None and name in OPTION_NAMES:
            continue
        if type(x) is Spec:
            continue
        if not issubclass(type(x), np.ndarray):  # isinstance asks x, which may lie
            module = type(x).__module__.split(".")[0]
            remedy = "Convert it with numpy.asarray."
            if module in ("torch", "jax", "jaxlib"):
                bridge = "torch" if module == "torch" else "jax"
                remedy = f"attngrad.{bridge}.attention takes it, and differentiates; or convert it with numpy.asarray."
            fail(TypeError, function, name, "be a numpy.ndarray", kind_of(x), remedy)
        refuse_masked(function, name, x)


# --- tangents and cotangents ----------------------------------------------------------------------------------------


def bind_tangents(function: str, x: Operands, tangents: object, *others: object, kernels: bool = True) -> Tangents:
    """The tangents of (q, k, v) and of the other differentiable inputs: None, or of their shape and dtype."""
    if not isinstance(tangents, (tuple, list)):
        fail(TypeError, function, "tangents", "be (q_dot, k_dot, v_dot), None for zero", kind_of(tangents))
    if len(tangents) != 3:
        got = f"{len(tangents)} values"
        fail(ValueError, function, "tangents", "be (q_dot, k_dot, v_dot), None for zero", got)
    given = Tangents(*tangents, *others)
    if kernels:
        require_numpy(function, **{f"{name}_dot": t for name, t in given._asdict().items() if t is not None})
        given = Tangents(*map(base_array, given))
    for name, t in given._asdict().items():
        primal = getattr(x, name)
        if t is None:
            continue
        if primal is None:
            raise ValueError(f"{function}: {name}_dot was given without {name}. Pass {name}= as well.")
        check_like(function, f"{name}_dot", t, primal.shape, primal.dtype, name)
    return given


def bind_primals(function: str, primals: object) -> tuple[Array, Array, Array]:
    """``(q, k, v)`` from the first argument of jvp and hvp."""
    if not isinstance(primals, (tuple, list)):
        fail(TypeError, function, "primals", "be a tuple (q, k, v)", kind_of(primals))
    if len(primals) != 3:
        fail(ValueError, function, "primals", "be a tuple (q, k, v)", f"{len(primals)} values")
    return primals[0], primals[1], primals[2]


def check_cotangents(
    function: str, x: Operands, dout: object, dlse: object, suffix: str = "", *, kernels: bool = True
) -> tuple[Any, Any]:
    """dout, of out's shape and q's dtype, and dlse, of lse's shape and dtype; either may be None."""
    shape = x.out_shape
    if kernels and dlse is None and type(dout) is np.ndarray and dout.dtype is x.q.dtype and dout.shape == shape:
        return dout, None
    lse_dtype = ACCUMULATE.get(x.q.dtype, x.q.dtype) if kernels else x.q.dtype
    if kernels:
        require_numpy(function, **{f"{n}{suffix}": c for n, c in (("dout", dout), ("dlse", dlse)) if c is not None})
        dout, dlse = base_array(dout), base_array(dlse)
    if dout is not None:
        check_like(function, f"dout{suffix}", dout, shape, x.q.dtype, "out")
    if dlse is not None:
        check_like(function, f"dlse{suffix}", dlse, shape[:-1], lse_dtype, "lse")
    return dout, dlse


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
