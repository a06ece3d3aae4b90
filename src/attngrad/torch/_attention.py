"""``attention`` with our signature, ``scaled_dot_product_attention`` with PyTorch's, ``sdpa`` to put it in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn import functional

from attngrad.core import layouts, option_checks
from attngrad.core.checks import check_flag, fail
from attngrad.core.options import OPTION_NAMES, OptionArguments, ScoreArguments, reject_unknown
from attngrad.torch import _direct, _functions, _ops, _private
from attngrad.torch._passes import NUMBERS, bind_inputs, draw_seed, passes_of, plain_passes
from attngrad.torch._tensors import Inputs, check_dtype, check_tensor, wide_dtype

TORCHS = functional.scaled_dot_product_attention
"""PyTorch's own, which ``sdpa`` has not yet replaced."""
SDPA_OPTIONS = (
    *("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    *(name for name in OPTION_NAMES if name not in ("causal", "dropout", "scale")),
)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[ScoreArguments]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[ScoreArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[OptionArguments]) -> Any: ...
def attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention`` on tensors of any device, with every derivative.

    ::

        out = softmax(cap(scale * q k^T) + bias, masked) v

    Backward, double backward, forward mode, and either over the other; ``torch.func`` and ``torch.compile``. Gradients
    reach q, k, v, ``bias`` and ``sinks``, from out and, with ``return_lse=True``, from lse. On the CPU the kernels
    have first and second derivatives; elsewhere, and beyond, it is PyTorch's operations block by block: see
    ``use_backend``.

    Args:
        q, k, v: ``(..., Hq, T, D)``, ``(..., Hk, S, D)``, ``(..., Hk, S, E)``, of one dtype: float64, float32, float16
            or bfloat16. They are read where they lie, whatever their strides, if the last axis is contiguous.
        options: those of ``attngrad.attention``, tensors in place of arrays. ``seed`` may be an int64 tensor.

    Returns:
        out ``(..., Hq, T, E)``; with ``return_lse=True`` the pair ``(out, lse)``.

    >>> x = torch.eye(2).requires_grad_()
    >>> out = attention(x, x, x, scale=0.0, causal=True)
    >>> out
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], grad_fn=<SelectBackward0>)
    """
    reject_unknown("attention", options)
    return call("attention", q, k, v, options)


def call(function: str, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Any:
    """``attention``, for the functions that put other signatures on it; ``function`` is named in errors."""
    if _private.transforms_active():
        return _untraced(function, q, k, v, options)
    if not torch.compiler.is_compiling():
        return _eager(function, q, k, v, options)
    out, lse = _ops.attention(q, k, v, options)
    return (out, lse) if options.get("return_lse", False) else out


def _eager(function: str, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Any:
    want_lse = check_flag(function, "return_lse", options.get("return_lse", False))
    only_numbers = options.keys() <= _NUMBERS
    if only_numbers and _direct.fits(q, k, v):
        passes = passes_of(function, q, options)
        if options:
            option_checks.magnitudes(function, passes.options, _direct.COMPUTED[q.dtype])
        if passes.tensors is not None:
            found = _direct.attention(passes, q, k, v, want_lse)
            if found is not None:
                return found
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(function, name, x, q if isinstance(q, Tensor) else None)
        check_dtype(function, name, x)
    flat = q.ndim == k.ndim == v.ndim == 2  # one head
    if flat:
        q, k, v = q[None], k[None], v[None]
    passes = passes_of(function, q, options)
    x = Inputs(q, k, v) if only_numbers else bind_inputs(function, q, k, v, passes.options, options)
    out, lse = _functions.attention(passes, x)
    if flat:
        out, lse = out[0], lse[0]
    return (out, lse) if want_lse else out


# Operators would let tangents pass in silence: so a graph ends here, and fullgraph=True is an error that says why.
# Where it has ended before, in torch.func, the compiler would go on to trace what is below.
_untraced = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _eager,
    reason="attngrad.torch.attention cannot be traced under torch.func or forward-mode AD: "
    "compile without fullgraph=True, or use attngrad.reference.attention, which is dense.",
)


_NUMBERS = NUMBERS - {"dropout"} | {"return_lse"}  # dropout comes with a seed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``, by ``attention``.

    As PyTorch's: leading axes broadcast; a boolean ``attn_mask`` says where to attend, a floating one is added (and
    gets its gradient); ``is_causal`` aligns top-left; ``enable_gqa`` lets key heads divide query heads; ``dropout_p``
    applies whenever it is not 0, its seed drawn from PyTorch's generator, so that ``torch.manual_seed`` repeats it;
    ``torch.autocast`` casts query, key and value.
    Beyond PyTorch's: ``attn_mask`` and ``is_causal`` combine; a query that may see nothing gives 0; and every option of
    ``attention`` that has no argument here may be added. ``offset`` is 0 by default here, as ``is_causal`` has it.

    >>> x = torch.eye(2)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.0)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    name = "scaled_dot_product_attention"
    if attn_mask is None and not options and dropout_p == 0.0 and not torch.compiler.is_compiling():
        found = _plain(name, query, key, value, scale, is_causal)
        if found is not None:
            return found
    if options:
        for option, instead in (("causal", "is_causal"), ("dropout", "dropout_p")):
            if option in options:
                raise TypeError(f"{name}: unknown option {option!r}. Did you mean {instead!r}?")
        reject_unknown(name, options, SDPA_OPTIONS)
    for argument, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, argument, x, query if isinstance(query, Tensor) else None, "query")
        check_dtype(name, argument, x)
        if x.ndim < 2:
            fail(ValueError, name, argument, "have at least 2 axes, (..., tokens, features)", f"{x.ndim}")
    query, key, value = autocast(query, key, value)
    given = {**options, "scale": scale, "causal": is_causal}
    if (is_causal or given.get("window") is not None) and query.shape[-2] != key.shape[-2]:
        given.setdefault("offset", 0)  # which it is by itself for as many queries as keys
    if dropout_p != 0.0:
        given["dropout"] = dropout_p
        if given.get("seed") is None:
            given["seed"] = draw_seed(query)
    if attn_mask is not None:
        check_tensor(name, "attn_mask", attn_mask, query, "query")
        kind = "mask" if attn_mask.dtype is torch.bool else "bias"
        if given.get(kind) is not None:
            fail(ValueError, name, kind, f"not be given beside a {attn_mask.dtype} attn_mask", "both", "Combine them.")
        if kind == "bias" and attn_mask.dtype not in (query.dtype, wide_dtype(query.dtype)):
            if not attn_mask.is_floating_point():
                fail(TypeError, name, "attn_mask", "be boolean or floating", attn_mask.dtype)
            attn_mask = attn_mask.to(query.dtype)
        given[kind] = attn_mask
    query, key, value = _broadcast(name, query, key, value, enable_gqa)
    if attn_mask is not None and not torch.compiler.is_compiling():  # while it traces, sizes may be symbols
        _check_mask(name, attn_mask, *(tuple(x.shape) for x in (query, key, value)))
    return call(name, query, key, value, given)


def _plain(function: str, q: Any, k: Any, v: Any, scale: Any, causal: Any) -> Any:
    """What most models ask for, self-attention, in the fewest steps; None for all else, and for what is not valid."""
    if not _direct.fits(q, k, v) or q.shape != k.shape or not q.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    passes = plain_passes(function, q, scale, causal)
    if passes is None or passes.tensors is None:
        return None
    if scale is not None:
        option_checks.magnitudes(function, passes.options, _direct.COMPUTED[q.dtype])
    return _direct.attention(passes, q, k, v)


def _check_mask(function: str, mask: Tensor, q: layouts.Shape, k: layouts.Shape, v: layouts.Shape) -> None:
    """It broadcasts to the scores, if q, k and v have any; errors of theirs come first."""
    scores = (*((1,) if len(q) == 2 else ()), *q[:-1], k[-2])  # one head has its axis
    if layouts.misfit(q, k, v) is None and not layouts.broadcasts(tuple(mask.shape), scores):
        rule, got = f"broadcast to (..., query tokens, key tokens) = {scores}", f"shape {tuple(mask.shape)}"
        fail(ValueError, function, "attn_mask", rule, got, "Axes are matched from the last; each is 1 or as long.")


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as ``torch.autocast`` has the inputs of PyTorch's attention: all but float64 in its dtype."""
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # meta has none
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (q, k, v))
    return q, k, v


def _broadcast(function: str, q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the leading axes of all (heads among them unless they are grouped), as views."""
    axes = 3 if grouped else 2  # that do not broadcast
    if grouped and min(q.ndim, k.ndim, v.ndim) < 3:
        fail(ValueError, function, "query", "have a heads axis (-3) with enable_gqa", f"shape {tuple(q.shape)}")
    shapes = [x.shape[:-axes] for x in (q, k, v)]
    if shapes[0] == shapes[1] == shapes[2]:
        return q, k, v
    try:
        leading = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        remedy = "" if grouped else " enable_gqa=True lets key heads divide query heads."
        remedy += layouts.note(*(tuple(x.shape) for x in (q, k, v)))
        raise ValueError(
            f"{function}: the leading axes of query, key and value must broadcast; got "
            f"{', '.join(str(tuple(s)) for s in shapes)}.{remedy}"
        ) from None
    q, k, v = (x.expand(*leading, *x.shape[-axes:]) for x in (q, k, v))
    return q, k, v


@contextmanager
def sdpa() -> Iterator[None]:
    """Let ``torch.nn.functional.scaled_dot_product_attention`` be ours for a while, in all threads.

    It serves the models that look the function up when they call it, as PyTorch's and Transformers' do; a name bound
    earlier by ``from torch.nn.functional import ...`` stays what it was. Restored also on exceptions. On a GPU, first
    derivatives alone are what PyTorch's own fused kernels are made for: use it there where more is asked for.

    >>> with sdpa():
    ...     torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
    True
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
