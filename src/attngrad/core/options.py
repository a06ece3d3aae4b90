"""What crosses every layer: Options, Operands, Gradients; and the checks of what a function is given.

Data flows one way. A public function calls ``bind`` once; what comes back is valid, and nothing below checks again.
The checks read shapes and dtypes only, so they serve NumPy arrays and those of any array-API namespace alike.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np

from attngrad.core.arrays import (
    Array,
    is_array,
    is_boolean,
    is_integer,
    kind_of,
    namespace,
)
from attngrad.core.checks import (
    check_array,
    check_broadcast,
    check_flag,
    check_floating,
    check_integer,
    check_like,
    check_real,
    fail,
    plain,
    refuse_masked,
    shape_of,
)
from attngrad.core.dtypes import ACCUMULATE, KERNEL_DTYPES


class ScoreArguments(TypedDict, total=False):
    """The keyword options that change what is computed."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    offset: Array | int | None
    mask: Array | None
    bias: Array | None
    softcap: float | None
    sinks: Array | None
    dropout: float
    seed: int | None
    segments: tuple[Array, Array] | None


class OptionArguments(ScoreArguments, total=False):
    """The keyword options of ``attention``, ``vjp``, ``jvp``, ``hvp``, ``jacobian`` and ``attention_weights``."""

    return_lse: bool


OPTION_NAMES = tuple(OptionArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that are not arrays: frozen and hashable. ``scale`` is resolved, never None.

    >>> import numpy as np
    >>> from attngrad import trace
    >>> options = trace(*np.zeros((3, 2, 4)), causal=True).options
    >>> options.scale, options.causal, options == Options(0.5, causal=True)
    (0.5, True, True)
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | None = None


class Operands(NamedTuple):
    """The arrays of one call, as they were given. ``offset`` is resolved, never None.

    ``origin`` is where the first score stands in a whole of which this is a part, (batch, head, query, key): a shard
    sees its part of the global dropout mask.

    >>> import numpy as np
    >>> from attngrad import trace
    >>> x = trace(np.zeros((4, 2, 3)), *np.zeros((2, 2, 5, 3))).operands
    >>> x.heads, x.group, x.scores_shape, x.offset
    (4, 2, (4, 2, 5), 3)
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    sinks: Array | None = None
    mask: Array | None = None
    segments: tuple[Array, Array] | None = None
    offset: Array | int = 0
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def heads(self) -> int:
        """Hq, the number of query heads; 1 for 2-D input."""
        return int(self.q.shape[-3]) if len(self.q.shape) > 2 else 1

    @property
    def group(self) -> int:
        """Hq / Hk, the number of query heads that read one key head."""
        key_heads = int(self.k.shape[-3]) if len(self.k.shape) > 2 else 1
        return self.heads // key_heads if key_heads else 1

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """``(..., Hq, T, S)``."""
        return (*self.q.shape[:-1], int(self.k.shape[-2]))

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``(..., Hq, T, E)``."""
        return (*self.q.shape[:-1], int(self.v.shape[-1]))


class Gradients(NamedTuple):
    """One array per differentiable input, of its shape and dtype: None for one that was not given or is not wanted.

    >>> import numpy as np
    >>> from attngrad import vjp
    >>> x = np.eye(2)
    >>> grads = vjp(x, x, x)[1](x)
    >>> grads.q.shape, grads.bias, grads._fields
    ((2, 2), None, ('q', 'k', 'v', 'bias', 'sinks'))
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    sinks: Array | None = None


class Tangents(NamedTuple):
    """A direction in the space of the differentiable inputs. None is zero."""

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


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


def _plainly_fit(q: Array, k: Array, v: Array) -> bool:
    """Whether all is certainly well with q, k and v: a quick yes, or no opinion."""
    if not (type(q) is type(k) is type(v) is np.ndarray and q.dtype is k.dtype is v.dtype and q.dtype in KERNEL_DTYPES):
        return False
    qs, ks, vs = q.shape, k.shape, v.shape
    n = len(qs)
    if not (n >= 2 and len(ks) == len(vs) == n and qs[-1] == ks[-1] and ks[-2] == vs[-2]):
        return False
    if qs[-2] >= _MANY or ks[-2] >= _MANY:
        return False
    return n == 2 or (
        qs[:-3] == ks[:-3] == vs[:-3] and ks[-3] == vs[-3] > 0 and qs[-3] % ks[-3] == 0 and qs[-3] < _MANY
    )


_FAR = 2**61
"""Offsets stay below this, and sides of a window below twice this: a position and a side then fit into 64 bits."""
_POWERS = {np.dtype(np.float64): 1000, np.dtype(np.float32): 100}
"""A softcap c is from 2**-n to 2**n in the dtype it is computed in: neither z/c nor c tanh(z/c) loses digits."""

# --- options --------------------------------------------------------------------------------------------------------


def _window(function: str, window: object) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)):
        fail(TypeError, function, "window", "be a pair (left, right)", kind_of(window))
    if len(window) != 2:
        fail(ValueError, function, "window", "be a pair (left, right)", f"{len(window)} values")
    sides = []
    for side in window:
        width = None if side is None else check_integer(function, "window", side)
        if width is not None and width < 0:
            fail(ValueError, function, "window", "have sides >= 0", window, "None on a side leaves it unbounded.")
        sides.append(None if width is None or width >= 2 * _FAR else width)
    return None if sides == [None, None] else (sides[0], sides[1])


def check_dropout(function: str, rate: object, seed: object, name: str = "dropout") -> tuple[float, int | None]:
    """The dropout rate and the 64-bit seed, checked; ``name`` is what the function calls the rate."""
    value = check_real(function, name, rate)
    if not 0.0 <= value < 1.0:
        fail(ValueError, function, name, "be in [0, 1)", value)
    if seed is None:
        if value > 0.0:
            rule = "be given where dropout is"
            fail(ValueError, function, "seed", rule, "None", "Pass seed=<integer>; the backward reuses the same mask.")
        return value, None
    number = check_integer(function, "seed", seed)
    if not 0 <= number < 2**64:
        fail(ValueError, function, "seed", "be in [0, 2**64)", number)
    return value, number


def check_magnitudes(function: str, scale: float, softcap: float | None, dtype: Any) -> None:
    """``scale`` and ``softcap`` are numbers of the dtype that inputs of ``dtype`` are computed in."""
    wide = ACCUMULATE.get(dtype, dtype)
    n, cap = _POWERS[wide], 1.0 if softcap is None else softcap
    if not 2.0**-n <= cap <= 2.0**n:
        fail(ValueError, function, "softcap", f"be from 2**-{n} to 2**{n} in {wide}", cap, "None means no cap.")
    if abs(scale) / min(cap, 1.0) > float(np.finfo(wide).max) / 2:
        over = "" if softcap is None else f" over a softcap of {cap}"
        fail(ValueError, function, "scale", f"be finite in {wide}", f"{scale}{over}", "Scale q or k instead.")


def _check_offset(function: str, offset: object, leading: tuple[int, ...]) -> Array | int:
    if not is_array(offset):
        if isinstance(offset, Integral):
            number = check_integer(function, "offset", offset)
            if abs(number) >= _FAR:
                fail(ValueError, function, "offset", "be within 2**61 of zero", number)
            return number
        fail(TypeError, function, "offset", "be an integer or an integer array", kind_of(offset))
    array = cast(Array, offset)
    if not is_integer(array):
        fail(TypeError, function, "offset", "have an integer dtype", array.dtype)
    check_broadcast(function, "offset", array, leading, "the leading axes of q")
    if math.prod(array.shape):
        xp = namespace(array)
        low, high = int(xp.min(array)), int(xp.max(array))
        if low <= -_FAR or high >= _FAR:
            fail(ValueError, function, "offset", "be within 2**61 of zero", low if low <= -_FAR else high)
    return array


def _check_mask(function: str, mask: object, x: Operands) -> None:
    check_array(function, "mask", mask)
    array = cast(Array, mask)
    if not is_boolean(array):
        remedy = "True = may attend; for additive terms use bias."
        fail(TypeError, function, "mask", "be boolean", f"dtype {array.dtype}", remedy)
    check_broadcast(function, "mask", array, x.scores_shape, "(..., Hq, T, S)")


def _check_additive(function: str, name: str, array: object, q: Array) -> None:
    """bias and sinks: of q's dtype or, beside 16-bit inputs, float32."""
    check_array(function, name, array)
    dtype = cast(Array, array).dtype
    if dtype != q.dtype and not (isinstance(q, np.ndarray) and dtype == ACCUMULATE.get(q.dtype, q.dtype)):
        also = " or float32" if isinstance(q, np.ndarray) and q.dtype in ACCUMULATE else ""
        fail(TypeError, function, name, f"have the dtype of q, {q.dtype}{also}", dtype, "Cast it with astype.")


def _check_segments(function: str, segments: object, x: Operands) -> None:
    if not isinstance(segments, (tuple, list)):
        got = kind_of(segments)
        fail(TypeError, function, "segments", "be a pair (q_segments, k_segments)", got, "Use (ids, ids).")
    if len(segments) != 2:
        fail(ValueError, function, "segments", "be a pair (q_segments, k_segments)", f"{len(segments)} values")
    leading = tuple(x.q.shape[:-3])
    for name, ids, tokens in (
        ("q_segments", segments[0], int(x.q.shape[-2])),
        ("k_segments", segments[1], int(x.k.shape[-2])),
    ):
        check_array(function, name, ids)
        if not is_integer(ids):
            fail(TypeError, function, name, "have an integer dtype", ids.dtype)
        if len(ids.shape) == 0 or ids.shape[-1] != tokens:
            fail(ValueError, function, name, f"have {tokens} ids along axis -1, one a token", shape_of(ids))
        check_broadcast(function, name, ids, (*leading, tokens), "(leading axes, tokens)")


def reject_unknown(function: str, options: Mapping[str, object], known: Sequence[str] = OPTION_NAMES) -> None:
    """Every option is ``known``; else a TypeError that suggests the nearest name."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Options are: {', '.join(known)}."
            raise TypeError(f"{function}: unknown option {name!r}. {hint}")


def bind(
    function: str, q: Array, k: Array, v: Array, options: Mapping[str, Any], *, kernels: bool = True
) -> tuple[Operands, Options, bool]:
    """Check everything once; give the operands, the options and ``return_lse``.

    ``kernels=True`` admits what the kernels compute: NumPy arrays in float64, float32, float16 and bfloat16.
    ``kernels=False`` is for the reference: any floating dtype, real or complex, of any array-API namespace.
    """
    if not (kernels and _plainly_fit(q, k, v)):
        if kernels:
            require_numpy(function, q=q, k=k, v=v)
            q, k, v = plain(q), plain(k), plain(v)
        _check_qkv(function, q, k, v, kernels)
    default = _default_options(int(q.shape[-1]))
    offset: Array | int = int(k.shape[-2]) - int(q.shape[-2])
    if not options:
        return Operands(q, k, v, offset=offset), default, False

    reject_unknown(function, options)
    get = options.get
    x = Operands(q, k, v)
    scale, softcap = get("scale"), get("softcap")
    if softcap is not None and (softcap := check_real(function, "softcap", softcap)) <= 0.0:
        fail(ValueError, function, "softcap", "be positive", softcap, "None means no cap.")
    dropout, seed = default.dropout, default.seed
    if "dropout" in options or "seed" in options:
        dropout, seed = check_dropout(function, get("dropout", 0.0), get("seed"))
    bound = Options(
        scale=default.scale if scale is None else check_real(function, "scale", scale),
        causal=check_flag(function, "causal", get("causal", False)),
        window=_window(function, get("window")),
        softcap=softcap,
        dropout=dropout,
        seed=seed,
    )
    mask, bias, sinks, segments, start = get("mask"), get("bias"), get("sinks"), get("segments"), get("offset")
    if kernels and (scale is not None or softcap is not None):
        check_magnitudes(function, bound.scale, softcap, q.dtype)
    if kernels and not (mask is bias is sinks is segments is start is None):
        require_numpy(function, mask=mask, bias=bias, sinks=sinks)
        mask, bias, sinks = plain(mask), plain(bias), plain(sinks)
        if isinstance(segments, (tuple, list)) and len(segments) == 2:
            require_numpy(function, **{f"segments[{i}]": ids for i, ids in enumerate(segments)})
            segments = tuple(map(plain, segments))
        if is_array(start):
            require_numpy(function, offset=start)
            start = plain(start)
    if mask is not None:
        _check_mask(function, mask, x)
    if bias is not None:
        _check_additive(function, "bias", bias, q)
        check_broadcast(function, "bias", bias, x.scores_shape, "(..., Hq, T, S)")
    if sinks is not None:
        _check_additive(function, "sinks", sinks, q)
        if tuple(sinks.shape) != (x.heads,):
            fail(ValueError, function, "sinks", f"have shape ({x.heads},), one logit a query head", shape_of(sinks))
    if segments is not None:
        _check_segments(function, segments, x)
        segments = (segments[0], segments[1])
    if start is not None:
        offset = _check_offset(function, start, tuple(q.shape[:-3]))
    operands = Operands(q, k, v, bias, sinks, mask, segments, offset)
    return operands, bound, check_flag(function, "return_lse", get("return_lse", False))


def require_numpy(function: str, **arrays: object) -> None:
    """NumPy arrays only, neither masked nor matrices; an option that is None was not given."""
    for name, x in arrays.items():
        if x is None and name in OPTION_NAMES:
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


def bind_tangents(
    function: str, x: Operands, tangents: object, bias_dot: object, sinks_dot: object, *, kernels: bool = True
) -> Tangents:
    """The tangents of (q, k, v), bias and sinks: each None, or of its input's shape and dtype."""
    if not isinstance(tangents, (tuple, list)):
        fail(TypeError, function, "tangents", "be (q_dot, k_dot, v_dot), None for zero", kind_of(tangents))
    if len(tangents) != 3:
        got = f"{len(tangents)} values"
        fail(ValueError, function, "tangents", "be (q_dot, k_dot, v_dot), None for zero", got)
    given = Tangents(tangents[0], tangents[1], tangents[2], bias_dot, sinks_dot)
    if kernels:
        require_numpy(function, **{f"{name}_dot": t for name, t in given._asdict().items() if t is not None})
        given = Tangents(*map(plain, given))
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
        dout, dlse = plain(dout), plain(dlse)
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
        return Gradients._fields
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
    if wrt not in Gradients._fields:
        fail(ValueError, function, "wrt", f"be one of {', '.join(Gradients._fields)}", repr(wrt))
    if getattr(x, wrt) is None:
        raise ValueError(f"{function}: wrt={wrt!r}, but {wrt} was not given. Pass {wrt}= as well.")
