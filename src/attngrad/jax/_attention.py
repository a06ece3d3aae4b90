"""``attention`` with our signature, and ``dot_product_attention`` with that of ``jax.nn``."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

import jax
from attngrad.core.arrays import Array, kind_of
from attngrad.core.checks import check_flag, fail, plain, refuse_masked
from attngrad.core.options import OptionArguments, bind, reject_unknown
from attngrad.jax._passes import INPUTS, Call
from attngrad.jax._primitives import attention_p

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
    segments = options.get("segments")
    arrays = {name: _array(function, name, options[name]) for name in ("bias", "sinks", "mask") if name in options}
    if isinstance(segments, (tuple, list)) and len(segments) == 2:
        arrays |= {
            f"{side}_segments": _array(function, f"{side}_segments", x) for side, x in zip("qk", segments, strict=True)
        }
    seed = options.get("seed")
    if _is_array(seed) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        fail(TypeError, function, "seed", "be an integer", "a PRNG key", "Pass seed=jax.random.bits(key).")
    arrays |= {n: _array(function, n, options[n]) for n in ("offset", "seed") if _is_array(options.get(n))}

    # The checks read shapes and dtypes; arrays of one zero that have them stand in for what may be a tracer.
    checked = options | {name: _stand_in(x) for name, x in arrays.items() if name in options}
    if "q_segments" in arrays:
        checked["segments"] = (_stand_in(arrays["q_segments"]), _stand_in(arrays["k_segments"]))
    if "offset" in arrays and not isinstance(arrays["offset"], jax.core.Tracer):
        checked["offset"] = np.asarray(arrays["offset"])  # which has a range
    if "seed" in arrays:
        if arrays["seed"].shape != () or not jnp.issubdtype(arrays["seed"].dtype, jnp.integer):
            fail(
                TypeError, function, "seed", "be an integer, or an integer array of shape ()", kind_of(options["seed"])
            )
        checked["seed"] = 0
    x, o, _ = bind(function, _stand_in(q), _stand_in(k), _stand_in(v), checked)

    flat = q.ndim == 2
    if flat:
        q, k, v = q[None], k[None], v[None]
    arrays |= {"q": q, "k": k, "v": v}
    names = tuple(name for name in INPUTS if name in arrays)
    call = Call(o, names, x.offset if isinstance(x.offset, int) else 0)
    out, lse = attention_p.bind(*(arrays[name] for name in names), call=call, saving=False)
    return (out[0], lse[0]) if flat else (out, lse)


def _is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _array(function: str, name: str, x: object) -> Array:
    if not _is_array(x):
        fail(TypeError, function, name, "be an array of JAX or NumPy", kind_of(x), "Convert it with jax.numpy.asarray.")
    return _of_numpy(function, name, x) if isinstance(x, np.ndarray) else jnp.asarray(x)


def _of_numpy(function: str, name: str, x: np.ndarray[Any, Any]) -> Array:
    """A NumPy array as one of JAX: floats narrowed as JAX does without x64, integers only where they fit."""
    refuse_masked(function, name, x)
    x = plain(x)
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


def _stand_in(x: Array) -> Any:
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


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
    **options: Any,
) -> Any:
    """``jax.nn.dot_product_attention``, by ``attention``: ``(B, T, N, H)``, or ``(T, N, H)`` without a batch.

    ``is_causal`` aligns top-left, as there. A query that may see nothing gives 0. Our options ``softcap, sinks,
    dropout, seed, segments, return_lse`` may be added.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    name = "dot_product_attention"
    reject_unknown(name, options)
    for taken, instead in (("causal", "is_causal"), ("window", "local_window_size"), ("offset", "is_causal")):
        if taken in options:
            raise TypeError(f"{name}: unknown option {taken!r}. Use {instead!r}, or attngrad.jax.attention.")
    query, key, value = (_array(name, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    for n, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            fail(ValueError, name, n, "have 3 or 4 axes, (T, N, H) or (B, T, N, H)", f"shape {x.shape}")
    rows, columns = jnp.arange(query.shape[-3])[:, None], jnp.arange(key.shape[-3])[None, :]
    masks = [] if mask is None else [_array(name, "mask", mask)]
    for lengths, positions in ((query_seq_lengths, rows), (key_value_seq_lengths, columns)):
        if lengths is not None:
            masks.append(positions < jnp.asarray(lengths)[..., None, None, None])
    if masks:
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    given: Any = {"scale": scale, "causal": is_causal, "window": window, "offset": 0, "mask": mask, "bias": bias}
    return attention(query, key, value, layout="BTNH", **given, **options)
