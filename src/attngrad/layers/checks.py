"""The argument checks of the layer: everything is checked before anything is computed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from attngrad.core import checks
from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.binding import bind
from attngrad.core.checks import check_like, fail
from attngrad.core.conversion import read, read_like, settle
from attngrad.core.dtypes import ACCUMULATE, KERNEL_DTYPES, SENTENCE
from attngrad.core.spec import Spec

PARAMETERS = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")
"""The names of a layer's parameters; each bias may be absent."""


class Config(NamedTuple):
    """The configuration of a layer: all but its parameters."""

    num_heads: int
    num_kv_heads: int
    rope: float | None = None


class Call(NamedTuple):
    """One checked call: the inputs given, by name; which of them feeds q, k and v; the position of query 0."""

    inputs: dict[str, NDArray]
    source: dict[str, str]
    offset: NDArray | int


def positive(function: str, name: str, x: object) -> int:
    """A positive integer."""
    number = checks.check_integer(function, name, x)
    if number < 1:
        fail(ValueError, function, name, "be positive", number)
    return number


def layer_dtype(function: str, dtype: Any) -> np.dtype[Any]:
    """One of the four dtypes that the kernels compute in."""
    remedy = "bfloat16 is ml_dtypes.bfloat16."
    rule = f"be {SENTENCE}"
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        fail(TypeError, function, "dtype", rule, repr(dtype), remedy)
    if kind not in KERNEL_DTYPES or not kind.isnative:
        fail(TypeError, function, "dtype", rule, kind, remedy)
    return kind


def generator(function: str, rng: Any) -> np.random.Generator:
    """A NumPy generator: as it is, from a seed, or, where rng is None, from one that the system draws."""
    if rng is None or isinstance(rng, np.random.Generator):
        return np.random.default_rng(rng)
    seed = checks.check_integer(function, "rng", rng)
    if seed < 0:
        fail(ValueError, function, "rng", "be a seed >= 0 or a numpy.random.Generator", seed)
    return np.random.default_rng(seed)


def check_config(function: str, num_heads: Any, num_kv_heads: Any, rope: Any) -> Config:
    """The configuration, where its numbers are positive and the heads divide."""
    heads = positive(function, "num_heads", num_heads)
    kv_heads = heads if num_kv_heads is None else positive(function, "num_kv_heads", num_kv_heads)
    if heads % kv_heads:
        fail(ValueError, function, "num_kv_heads", f"divide num_heads, {heads}", kv_heads)
    if rope is None:
        return Config(heads, kv_heads)
    base = checks.check_real(function, "rope", rope)
    if base <= 0.0:
        fail(ValueError, function, "rope", "be a positive base", base, "10000.0 is usual; None: no positions.")
    return Config(heads, kv_heads, base)


def check_names(function: str, params: Mapping[str, NDArray]) -> None:
    """All four weights, and nothing but parameters."""
    wrong = [*(name for name in PARAMETERS[:4] if name not in params), *(n for n in params if n not in PARAMETERS)]
    if wrong:
        rule = "be w_q, w_k, w_v, w_o and, of b_q, b_k, b_v, b_o, those there are"
        fail(ValueError, function, "the tensors", rule, f"{', '.join(params)} ({wrong[0]!r} is missing or unknown)")


def check_fit(function: str, params: Mapping[str, NDArray], c: Config) -> None:
    """The parameters are of one dtype, and their shapes fit each other and the configuration."""
    w_q = params["w_q"]
    for name, p in params.items():
        axes = 1 if name.startswith("b_") else 2
        if p.dtype != w_q.dtype or p.dtype not in KERNEL_DTYPES:
            rule = f"be {SENTENCE}, all of them the same"
            fail(TypeError, function, "the parameters", rule, f"{name} of {p.dtype}, w_q of {w_q.dtype}")
        if p.ndim != axes or 0 in p.shape:
            fail(ValueError, function, name, f"have {axes} axes, none empty", f"shape {p.shape}")
    d_model, inner = w_q.shape
    if inner % c.num_heads:
        fail(ValueError, function, "num_heads", f"divide the {inner} columns of w_q", c.num_heads)
    d_head = inner // c.num_heads
    if c.rope is not None and d_head % 2:
        rule = "be even where rope is given, for features turn in pairs"
        fail(ValueError, function, "d_head", rule, d_head, "Pass an even d_head.")
    columns = {"q": inner, "k": c.num_kv_heads * d_head, "v": c.num_kv_heads * d_head, "o": d_model}
    for letter, n in columns.items():
        for name in (f"w_{letter}", f"b_{letter}"):
            if name in params and params[name].shape[-1] != n:
                fail(ValueError, function, name, f"have {n} columns", f"shape {params[name].shape}")
    if params["w_o"].shape[0] != inner:
        fail(ValueError, function, "w_o", f"have {inner} rows, as w_q has columns", f"shape {params['w_o'].shape}")


def check_params(
    function: str, params: Mapping[str, NDArray], grads: Mapping[str, NDArray], dtype: np.dtype[Any]
) -> None:
    """The parameters are still those of the layer, by name, shape and dtype: their arrays may have been replaced."""
    if params.keys() != grads.keys():
        got = ", ".join(map(str, params)) or "none"
        remedy = "Biases are made with bias=True; one that is missing may be zeros."
        fail(ValueError, function, "params", f"have the names of grads, {', '.join(map(str, grads))}", got, remedy)
    for name, g in grads.items():
        check_like(function, f"params[{name!r}]", params[name], g.shape, dtype, "the layer")


def check_grads(function: str, params: Mapping[str, NDArray], grads: Mapping[str, NDArray]) -> None:
    """The gradients can be added to, all of them: their arrays may have been replaced."""
    for name, p in params.items():
        argument = f"grads[{name!r}]"
        g = check_like(function, argument, grads.get(name), p.shape, None, f"params[{name!r}]")
        if not g.flags.writeable:
            fail(ValueError, function, argument, "be writable", "a read-only array", "Copy it.")


def check_call(
    function: str,
    params: Mapping[str, NDArray],
    c: Config,
    query: Any,
    key: Any,
    value: Any,
    options: Mapping[str, Any],
) -> Call:
    """Inputs ``(..., T, I)`` that fit the weights, and options that fit the attention of their heads."""
    dtype = params["w_q"].dtype
    inputs = {"query": query} | {name: x for name, x in (("key", key), ("value", value)) if x is not None}
    key_source = "key" if "key" in inputs else "query"
    source = {"q": "query", "k": key_source, "v": "value" if "value" in inputs else key_source}
    inputs = {name: settle(function, name, read(function, name, x), dtype) for name, x in inputs.items()}
    query = inputs["query"]
    for name, x in inputs.items():
        if x.dtype != dtype:
            rule = f"have the dtype of the parameters, {dtype}"
            other = f", or make the layer with dtype={x.dtype.name!r}" if x.dtype in KERNEL_DTYPES else ""
            fail(TypeError, function, name, rule, x.dtype, f"Cast it with astype{other}.")
        if x.ndim < 2:
            fail(ValueError, function, name, "have at least 2 axes, (..., tokens, features)", f"shape {x.shape}")
        if x.shape[:-2] != query.shape[:-2]:
            rule = f"have the leading axes of query, {query.shape[:-2]}"
            fail(ValueError, function, name, rule, f"shape {x.shape}", "Leading axes do not broadcast.")
    for letter, name in source.items():
        size, shape = params[f"w_{letter}"].shape[0], inputs[name].shape
        if shape[-1] != size:
            fail(ValueError, function, name, f"have {size} features (axis -1), like w_{letter}", f"shape {shape}")
    keys, shape = inputs[source["k"]].shape[-2], inputs[source["v"]].shape
    if shape[-2] != keys:
        rule = f"have {keys} tokens (axis -2), like {key_source}"
        fail(ValueError, function, source["v"], rule, f"shape {shape}")

    d_head = params["w_q"].shape[1] // c.num_heads
    q = Spec((*query.shape[:-2], c.num_heads, query.shape[-2], d_head), dtype)
    k = Spec((*query.shape[:-2], c.num_kv_heads, keys, d_head), dtype)
    operands, _, return_lse = bind(function, q, k, k, options, convert=True)
    if return_lse:
        fail(ValueError, function, "return_lse", "be False", "True", "Take lse from attngrad.attention.")
    return Call(inputs, source, operands.offset)


def check_input_tangents(function: str, call: Call, inputs_dot: Any) -> dict[str, NDArray]:
    """The tangents of the inputs by name, without those that are None."""
    found = {name: t for name, t in zip(call.inputs, inputs_dot, strict=True) if t is not None}
    for name, t in found.items():
        x, argument = call.inputs[name], f"{name}_dot"
        found[name] = check_like(function, argument, read_like(function, argument, t, x.dtype), x.shape, x.dtype, name)
    return found


def check_param_tangents(function: str, params: Mapping[str, NDArray], params_dot: Any) -> dict[str, NDArray]:
    """The tangents of the parameters by name; those of 16-bit parameters may be float32, as their gradients are."""
    if params_dot is None:
        return {}
    if not isinstance(params_dot, Mapping):
        fail(TypeError, function, "params_dot", "be a mapping of names to arrays", kind_of(params_dot))
    found = {}
    for name, t in params_dot.items():
        if name not in params:
            near = difflib.get_close_matches(str(name), params, n=1, cutoff=0.0)
            fail(ValueError, function, "params_dot", "name parameters", repr(name), f"Did you mean {near[0]!r}?")
        p, argument = params[name], f"params_dot[{name!r}]"
        wide = ACCUMULATE.get(p.dtype, p.dtype)
        found[name] = check_like(function, argument, read_like(function, argument, t, wide), p.shape, wide, name)
    return found
