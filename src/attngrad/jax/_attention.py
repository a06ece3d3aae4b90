"""``attention`` with our signature, and ``dot_product_attention`` with that of ``jax.nn``."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attngrad.core.arrays import Array, kind_of
from attngrad.core.binding import bind
from attngrad.core.checks import base_array, check_flag, fail, refuse_masked
from attngrad.core.operands import INPUT_NAMES, NUMBERS, SEEDS, flatten
from attngrad.core.options import OPTION_NAMES, OPTIONS, Kind, OptionArguments, reject_not_flat, reject_unknown
from attngrad.core.spec import Spec
from attngrad.jax._passes import Call
from attngrad.jax._primitives import attention_p
from attngrad.jax._private import Tracer

_LAYOUTS = ("BHTD", "BTNH")


def attention(q: Array, k: Array, v: Array, *, layout: str = "BHTD", **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention`` on JAX arrays, with every derivative that the kernels have.

    ::

        out = softmax(cap(scale * q k^T) + bias, masked) v

    Under jit, grad, vjp, jvp, vmap, and any two derivatives one over the other, except forward over forward mode, which
    raises, as the third order does: ``attngrad.reference`` has them. Gradients reach q, k, v, ``bias`` and ``sinks``,
    from out and, with ``return_lse=True``, from lse.

    Args:
        q, k, v: ``(..., Hq, T, D)``, ``(..., Hk, S, D)``, ``(..., Hk, S, E)``; with ``layout="BTNH"``, that of
            ``jax.nn.dot_product_attention``, ``(..., T, Hq, D)`` and so on, and out likewise.
        options: those of ``attngrad.attention``, arrays of JAX in place of NumPy's. Masks, biases and lse have the axes
            ``(..., Hq, T, S)`` in either layout. Numbers are part of what jit compiles; ``offset`` and ``seed`` may be
            integer arrays instead.

    Returns:
        out ``(..., Hq, T, E)``; with ``return_lse=True`` the pair ``(out, lse)``.

    >>> x = jnp.eye(2)
    >>> attention(x, x, x, scale=0.0, causal=True)
    Array([[1. , 0. ],
           [0.5, 0.5]], dtype=float32)
    """
    reject_unknown("attention", options)
    if layout not in _LAYOUTS:
        fail(ValueError, "attention", "layout", f"be one of {', '.join(_LAYOUTS)}", repr(layout))
    q, k, v = (_array("attention", name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if layout == "BTNH":
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < 3:
                fail(ValueError, "attention", name, "have a heads axis (-2) in layout BTNH", f"shape {x.shape}")
        q, k, v = (jnp.swapaxes(x, -3, -2) for x in (q, k, v))
    out, lse = _call("attention", q, k, v, options)
    if layout == "BTNH":
        out = jnp.swapaxes(out, -3, -2)
    return (out, lse) if check_flag("attention", "return_lse", options.get("return_lse", False)) else out


def _call(function: str, q: Array, k: Array, v: Array, options: Any) -> tuple[Array, Array]:
    """Check, and bind the primitive; one head gets its axis for the while."""
    options = {name: x for name, x in options.items() if x is not None}
    reject_not_flat(function, options)
    for name, value in options.items():
        row = OPTIONS.get(name)
        if row is None:
            continue
        if row.kind is Kind.IDS and isinstance(value, (tuple, list)) and len(value) == 2:
            options[name] = tuple(_array(function, f"{side}_{name}", x) for side, x in zip("qk", value, strict=True))
        elif row.kind in (Kind.PLANE, Kind.PER_HEAD) or (row.kind in (Kind.OFFSET, Kind.SEED) and _is_array(value)):
            options[name] = _array(function, name, value)
            if row.kind is Kind.SEED:
                _check_seed(function, name, options[name])
        elif isinstance(value, Tracer):
            remedy = f"It is part of what jit compiles: name it in static_argnames, or bind it outside, {name}=..."
            fail(TypeError, function, name, "be a number that is known while jit traces", "a traced array", remedy)

    # The checks read shapes and dtypes; numbers are there unless this is traced.
    specs = {n: _specs(x) if OPTIONS[n].is_array else x for n, x in options.items() if n in OPTIONS}
    specs |= {n: 0 for n in SEEDS if _is_array(options.get(n))}
    x, o, _ = bind(function, _specs(q), _specs(k), _specs(v), specs)

    flat = q.ndim == 2
    if flat:
        q, k, v = q[None], k[None], v[None]
    given = {"q": q, "k": k, "v": v, **flatten(options)}
    names = tuple(name for name in INPUT_NAMES if _is_array(given.get(name)))
    numbers = ((name, getattr(x, name)) for name in sorted(NUMBERS) if name not in names and hasattr(x, name))
    call = Call(o, names, tuple(numbers))
    out, lse = attention_p.bind(*(given[name] for name in names), call=call, saving=False)
    return (out[0], lse[0]) if flat else (out, lse)


def _specs(x: Any) -> Any:
    """What is checked of a value: Specs for arrays, and for those in a pair; the numbers of an offset, where known."""
    if isinstance(x, tuple) and all(map(_is_array, x)):
        return tuple(map(_specs, x))
    if not _is_array(x):
        return x
    if jnp.issubdtype(x.dtype, jnp.integer) and not isinstance(x, Tracer):
        return np.asarray(x)
    return Spec(tuple(x.shape), np.dtype(x.dtype))


def _check_seed(function: str, name: str, x: Array) -> None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        fail(TypeError, function, name, "be an integer", "a PRNG key", "Pass seed=jax.random.bits(key).")
    if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, function, name, "be an integer, or an integer array of shape ()", kind_of(x))


def _is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _array(function: str, name: str, x: object) -> Array:
    if not _is_array(x):
        fail(TypeError, function, name, "be an array of JAX or NumPy", kind_of(x), "Convert it with jax.numpy.asarray.")
    return _of_numpy(function, name, x) if isinstance(x, np.ndarray) else jnp.asarray(x)


def _of_numpy(function: str, name: str, x: np.ndarray[Any, Any]) -> Array:
    """A NumPy array as one of JAX: floats narrowed as JAX does without x64, integers only where they fit."""
    refuse_masked(function, name, x)
    x = base_array(x)
    try:
        found = jnp.asarray(x.astype(x.dtype.newbyteorder("="), copy=False))
    except TypeError:
        fail(TypeError, function, name, "have a dtype that JAX has", x.dtype, "Cast it with astype.")
    if x.dtype.kind in "iu" and x.size and found.dtype.itemsize < x.dtype.itemsize:
        limits = np.iinfo(found.dtype)
        if x.min() < limits.min or x.max() > limits.max:
            rule = f"fit into {found.dtype} where jax_enable_x64 is off"
            fail(ValueError, function, name, rule, f"{x.min()} to {x.max()}", "Renumber it, or enable x64.")
    return found


_NN_INSTEAD = {"causal": "is_causal", "window": "local_window_size", "offset": "is_causal"}
_NN_OPTIONS = (
    *("is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size"),
    *("implementation", "return_residual"),
    *(name for name in OPTION_NAMES if name not in _NN_INSTEAD),
)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """``jax.nn.dot_product_attention``, by ``attention``: ``(B, T, N, H)``, or ``(T, N, H)`` without a batch.

    ``is_causal`` aligns top-left, as there. ``implementation`` is accepted, ``"xla"``, ``"cudnn"`` or None, and changes
    nothing: attngrad's kernels compute. ``return_residual=True`` returns ``(out, lse)`` with lse ``(B, T, N)`` in the
    dtype of key, as there; its gradient is the true one, which ``jax.nn`` stops. A query that may see nothing gives 0.
    Every option of ``attention`` that has no argument here may be added.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    name = "dot_product_attention"
    for taken, instead in _NN_INSTEAD.items():
        if taken in options:
            raise TypeError(f"{name}: unknown option {taken!r}. Use {instead!r}, or attngrad.jax.attention.")
    reject_unknown(name, options, _NN_OPTIONS)
    if implementation not in (None, "xla", "cudnn"):
        fail(ValueError, name, "implementation", "be None, 'xla' or 'cudnn'", kind_of(implementation))
    want_lse = check_flag(name, "return_lse", options.pop("return_lse", False))
    if check_flag(name, "return_residual", return_residual) and want_lse:
        remedy = "return_lse gives (B, N, T), return_residual (B, T, N)."
        fail(ValueError, name, "return_lse", "be False beside return_residual", "both", remedy)
    query, key, value = (_array(name, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    for n, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            fail(ValueError, name, n, "have 3 or 4 axes, (T, N, H) or (B, T, N, H)", f"shape {x.shape}")
    q, k, v = query.shape, key.shape, value.shape
    if k[:-3] != q[:-3] or k[-1] != q[-1] or v[:-1] != k[:-1] or q[-2] % max(k[-2], 1):
        remedy = "Here tokens come before heads; attngrad.jax.attention takes (batch, heads, tokens, features)."
        rule = "be (B, T, N, H), (B, S, K, H) and (B, S, K, H), N a multiple of K"
        fail(ValueError, name, "query, key and value", rule, f"{q}, {k}, {v}", remedy)
    if single := query.ndim == 3:  # mask, bias and lengths may have a batch axis all the same
        query, key, value = query[None], key[None], value[None]
    if bias is not None and (bias := _array(name, "bias", bias)).dtype != query.dtype:
        bias = bias.astype(jnp.promote_types(query.dtype, jnp.float32))
    masks = [] if mask is None else [_array(name, "mask", mask)]
    rows, columns = jnp.arange(query.shape[-3])[:, None], jnp.arange(key.shape[-3])[None, :]
    for n, lengths, positions in (
        ("query_seq_lengths", query_seq_lengths, rows),
        ("key_value_seq_lengths", key_value_seq_lengths, columns),
    ):
        if lengths is not None:
            lengths = jnp.asarray(lengths)
            if lengths.shape != query.shape[:-3] or not jnp.issubdtype(lengths.dtype, jnp.integer):
                got = f"shape {lengths.shape}, {lengths.dtype}"
                fail(ValueError, name, n, f"be integers of shape {query.shape[:-3]}, one length per batch entry", got)
            masks.append(positions < lengths[..., None, None, None])
    if masks:
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    given: Any = {"scale": scale, "causal": is_causal, "window": window, "offset": 0, "mask": mask, "bias": bias}
    query, key, value = (jnp.swapaxes(x, -3, -2) for x in (query, key, value))
    out, lse = _call(name, query, key, value, given | options)
    out = jnp.swapaxes(out, -3, -2)
    if return_residual:
        lse = jnp.swapaxes(lse, -2, -1).astype(key.dtype)
    if single:
        out, lse = out[0], lse[0]
    return (out, lse) if want_lse or return_residual else out
