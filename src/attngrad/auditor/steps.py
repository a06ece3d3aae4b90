"""The steps of attention as the auditor has them: those of the book, with more names where a mistake may differ.

No formula stands here, but for where causal and window count from in sequences end to end, which the book does not
have. ``_READS`` says which steps of the book read another name, and ``_ALIASES`` what that name is where no mistake
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attngrad.core.operands import Operands
from attngrad.reference.dense import matmul, transpose
from attngrad.reference.modifiers import MODIFIERS, compose
from attngrad.reference.table import STEPS, Step, parameters


class Undefined(Exception):  # noqa: N818
    """The mistake has no meaning for these shapes or options; the case has no such step.

    The one reason for which a mistake may have no effect. Any other exception is an error of the auditor.
    """


_BACK = {name: f"{name}_back" for name in ("visible", "weights", "keep", "slope")}
"""The backward may see other weights than the forward had, so these have names of their own."""
_SECOND = {name: f"{name}_second" for name in ("weights_dot", "out_dot", "lse_dot")}
"""So has second order, by double backward, which need not share code with forward mode."""

_READS: Mapping[str, Mapping[str, str]] = {
    "z": {"scale": "scale_z"},
    "scores_unmasked": {"bias": "bias_finite"},
    "dq": {"scale": "scale_dq"},
    "dk_heads": {"scale": "scale_dk"},
}
"""What a step reads, by its name in the book; ``scale`` is read as ``scale_value`` by all others."""

_MADE = {"dq": "dq_made", "dk": "dk_made", "dv": "dv_made"}
"""Gradients as they are made; the name without ``_made`` is what is returned in its place."""

_ALIASES = {
    **{alias: name for name, alias in {**_BACK, **_SECOND}.items()},
    **_MADE,
    **dict.fromkeys(("scale_z", "scale_dq", "scale_dk"), "scale_value"),
    "band": "window",
    # The book keeps what is not finite out of rows that see nothing and of hidden scores. Inputs of an audit are
    # finite, and a mistake that gives such a row weight must show in the gradients.
    **{f"{name}_seen": name for name in ("q", "z", "dout", "q_dot", "z_dot", "dout_dot")},
}


def _position(offset: Any, q: Any, k: Any, segments: Any, by_sequence: Any) -> Any:
    """The offset: as given, or S - T, of each query's own sequence where these come end to end."""
    if offset is not None:
        return offset
    if not by_sequence:
        return k.shape[-2] - q.shape[-2]
    ids, key_ids = (x.reshape(-1) for x in segments)
    count = 1 + max(ids.max(initial=0), key_ids.max(initial=0))
    lengths, key_lengths = (np.bincount(x, minlength=count) for x in (ids, key_ids))
    return (key_lengths - lengths)[ids]


def _visible(
    q: Any, k: Any, bias: Any, mask: Any, segments: Any, position: Any, causal: Any, band: Any, by_sequence: Any
) -> Any:
    """That of the book; in sequences end to end, causal and window as a mask, by places within each of them."""
    if by_sequence and (causal or band is not None):
        ids, key_ids = (x.reshape(-1) for x in segments)
        i, j = (np.arange(len(x)) - np.searchsorted(x, x) for x in (ids, key_ids))
        ahead = j[None, :] - (i + position)[:, None]
        left, right = band or (None, None)
        right = 0 if causal and (right is None or right > 0) else right
        seen = (ahead <= (np.inf if right is None else right)) & (ahead >= (-np.inf if left is None else -left))
        mask, causal, band = seen if mask is None else seen & mask, False, None
    return STEPS["visible"].function(q, k, bias, mask, segments, 0 if by_sequence else position, causal, band)


_OWN: dict[str, Callable[..., Any]] = {
    # the scale, in longdouble where it is 1/sqrt(D); the offset, and the bias without -inf, which masks
    "scale_value": lambda scale, q: 1 / np.sqrt(np.longdouble(q.shape[-1])) if scale is None else scale,
    "position": _position,
    "bias_finite": lambda bias: None if bias is None else np.where(bias == -np.inf, np.zeros_like(bias), bias),
    "group": lambda q, k: Operands(q, k, k).group,
    "origin": lambda: (0, 0, 0, 0),
}


def _attention_steps() -> dict[str, Step]:
    found = {name: Step(function, parameters(function)) for name, function in _OWN.items()}
    found["modifier"] = Step(compose, tuple(MODIFIERS))
    for name, step in STEPS.items():
        own = {"backward": _BACK, "second": _SECOND}.get(step.stage, {})
        names = {"scale": "scale_value", **own, **_READS.get(name, {})}
        found[_MADE.get(name, name)] = step._replace(reads=tuple(names.get(x, x) for x in step.reads))
    found["visible"] = Step(_visible, parameters(_visible), *found["visible"][2:])
    found |= {
        f"d{x}_mixed": found[f"d{x}_dot"] for x in "qkv"
    }  # reverse over forward: the same numbers, asked otherwise
    return found | {alias: Step(lambda x: x, (name,)) for alias, name in _ALIASES.items()}


ATTENTION_STEPS = _attention_steps()
"""The steps of attention, by name."""


def split_heads(x: Any, heads: int) -> Any:
    """(B, T, H D) to (B, H, T, D)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: Any) -> Any:
    """(B, H, T, D) to (B, T, H D)."""
    return x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1)


def per_token(x: Any, w: Any) -> Any:
    """x w; a mistake before it may have given a factor another shape, and then there is no product."""
    if x.shape[-1] != w.shape[-2]:
        raise Undefined
    return matmul(x, w)


def outer(x: Any, dx: Any) -> Any:
    """x^T dx, summed over batch and tokens."""
    return per_token(transpose(x.reshape(-1, x.shape[-1])), dx.reshape(-1, dx.shape[-1]))


def _self_attention(query: Any, key: Any, value: Any, dquery: Any, dkey: Any, dvalue: Any) -> Any:
    """The gradient of the one input of self-attention."""
    if key.shape != query.shape or not (np.array_equal(key, query) and np.array_equal(value, query)):
        raise Undefined
    return dquery + dkey + dvalue


def _memory(key: Any, value: Any, dkey: Any, dvalue: Any) -> Any:
    """The gradient of the one input of keys and values."""
    if not np.array_equal(key, value):
        raise Undefined
    return dkey + dvalue


_STEPS: dict[str, Callable[..., Any]] = {
    # how heads are split and merged, as functions; in the backward each inverts the other
    "split": lambda: split_heads,
    "merge": lambda: merge_heads,
    "split_back": lambda: split_heads,
    "merge_back": lambda: merge_heads,
    # forward
    "q": lambda query, w_q, split, num_heads: split(per_token(query, w_q), num_heads),
    "k": lambda key, w_k, split, num_kv_heads: split(per_token(key, w_k), num_kv_heads),
    "v": lambda value, w_v, split, num_kv_heads: split(per_token(value, w_v), num_kv_heads),
    "merged": lambda out, merge: merge(out),
    "y": lambda merged, w_o: per_token(merged, w_o),
    # backward, with dW of an input and an output gradient, and dX of an output gradient and W, as functions
    "dmerged": lambda dy, w_o: per_token(dy, transpose(w_o)),
    "dout": lambda dmerged, split_back, num_heads: split_back(dmerged, num_heads),
    "weight_gradient": lambda: outer,
    "input_gradient": lambda: lambda dx, w: per_token(dx, transpose(w)),
    "dq_flat": lambda dq, merge_back: merge_back(dq),
    "dk_flat": lambda dk, merge_back: merge_back(dk),
    "dv_flat": lambda dv, merge_back: merge_back(dv),
    "dw_o": lambda weight_gradient, merged, dy: weight_gradient(merged, dy),
    "dw_q": lambda weight_gradient, query, dq_flat: weight_gradient(query, dq_flat),
    "dw_k": lambda weight_gradient, key, dk_flat: weight_gradient(key, dk_flat),
    "dw_v": lambda weight_gradient, value, dv_flat: weight_gradient(value, dv_flat),
    "dquery": lambda input_gradient, dq_flat, w_q: input_gradient(dq_flat, w_q),
    "dkey": lambda input_gradient, dk_flat, w_k: input_gradient(dk_flat, w_k),
    "dvalue": lambda input_gradient, dv_flat, w_v: input_gradient(dv_flat, w_v),
    "dx": _self_attention,
    "dmemory": _memory,
}

LAYER_STEPS = {name: Step(function, parameters(function)) for name, function in _STEPS.items()}
"""The steps that the layer adds, by name; their parameters are what they read."""
