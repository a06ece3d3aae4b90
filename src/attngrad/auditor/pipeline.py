"""One pipeline of named steps: the forward pass, the backward pass and their tangents, of attention and of the layer.

Every step is a small function of the ones before it, computed when it is asked for, in any dtype. A mistake of the
catalogue overrides steps, and two mistakes compose because they override steps of the same pipeline. Without mistakes,
in longdouble, it is the truth; in the dtype of the candidate, it is the straightforward computation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from attngrad._dense import (
    drop,
    keep_factor,
    matmul,
    per_key_head,
    per_query_head,
    rowsum,
    sum_over,
    sum_to,
    transpose,
    visibility,
    zero_hidden,
)
from attngrad._options import Operands, Options
from attngrad.reference import SoftCap

Step = Callable[["Pipeline"], Any]
Override = Callable[["Pipeline", Callable[[], Any]], Any]

ATTENTION_STEPS: dict[str, Step] = {}
LAYER_STEPS: dict[str, Step] = {}


class Undefined(Exception):  # noqa: N818
    """The mistake has no meaning for these shapes or options."""


def _attention(function: Step) -> Step:
    ATTENTION_STEPS[function.__name__] = function
    return function


def _layer(function: Step) -> Step:
    LAYER_STEPS[function.__name__] = function
    return function


_READS: defaultdict[str, set[str]] = defaultdict(set)
"""Which steps each step reads, as seen in pipelines without mistakes."""


@cache
def affected(steps: frozenset[str]) -> frozenset[str]:
    """The steps, and those that read them, and so on: what must be computed anew when ``steps`` change."""
    found = set(steps)
    while more := {name for name, reads in _READS.items() if name not in found and reads & found}:
        found |= more
    return frozenset(found)


class Pipeline:
    """The steps of one case, each computed once, when it is first asked for: ``p.dscores``, ``p.dq``, ...

    ``given`` are the inputs and options by name, ``overrides`` what mistakes compute instead: functions of the pipeline
    and of ``base()``, which gives what this step would be without them. ``parent`` is the pipeline without mistakes, of
    the same case and dtype: steps that no mistake can reach are taken from it.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        dtype: Any,
        overrides: Sequence[Mapping[str, Override]] = (),
        parent: Pipeline | None = None,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._values: dict[str, Any] = {name: self._round(x) for name, x in given.items()}
        self._overrides = overrides
        self._steps = {**ATTENTION_STEPS, **LAYER_STEPS} if "query" in given else ATTENTION_STEPS
        self._parent = parent
        self._fresh = None if parent is None else affected(frozenset(x for y in overrides for x in y))
        self._stack: list[str] = []

    def _round(self, x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and x.dtype.kind not in "biu"
        return x.astype(self._dtype) if floating else x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._stack and not self._overrides:
            _READS[self._stack[-1]].add(name)
        values = self._values
        if name not in values:
            if name not in self._steps:
                values[name] = None  # an option that was not given
            elif self._fresh is not None and name not in self._fresh:
                values[name] = getattr(self._parent, name)
            else:
                values[name] = self._compute(name)
        return values[name]

    def _compute(self, name: str) -> Any:
        def base() -> Any:
            return self._steps[name](self)

        for overrides in self._overrides:
            if name in overrides:
                base = _wrap(overrides[name], self, base)
        self._stack.append(name)
        try:
            return base()
        finally:
            self._stack.pop()

    def learn(self) -> None:
        """Compute every step, so that it is known which step reads which."""
        for name in self._steps:
            with contextlib.suppress(Exception):  # tangents of a layer, dx of three inputs: not there
                getattr(self, name)
        affected.cache_clear()

    def has(self, name: str) -> bool:
        """Whether the input or option was given."""
        return self._values.get(name) is not None

    def c(self, value: Any) -> Any:
        """A constant in the dtype of the pipeline."""
        return np.asarray(value).astype(self._dtype)


def _wrap(override: Override, p: Pipeline, base: Callable[[], Any]) -> Callable[[], Any]:
    """The override, or the step as it was where the mistake has no meaning or its shapes do not fit."""

    def step() -> Any:
        try:
            return override(p, base)
        except (Undefined, ValueError):
            return base()

    return step


# --- forward ---------------------------------------------------------------------------------------------------------


@_attention
def group(p: Pipeline) -> int:
    return int(p.q.shape[1] // p.k.shape[1])


@_attention
def scale_value(p: Pipeline) -> Any:
    """The scale, in longdouble where it is 1/sqrt(D)."""
    return p.scale if p.scale is not None else 1 / np.sqrt(np.longdouble(p.q.shape[-1]))


@_attention
def scale_z(p: Pipeline) -> Any:
    return p.scale_value


@_attention
def k_heads(p: Pipeline) -> Any:
    return per_query_head(p.k, p.group)


@_attention
def v_heads(p: Pipeline) -> Any:
    return per_query_head(p.v, p.group)


@_attention
def position(p: Pipeline) -> Any:
    """The offset, resolved: where query 0 stands among the keys."""
    return p.offset if p.offset is not None else p.k.shape[-2] - p.q.shape[-2]


@_attention
def band(p: Pipeline) -> Any:
    """The window."""
    return p.window


@_attention
def is_causal(p: Pipeline) -> bool:
    return bool(p.causal)


@_attention
def visible(p: Pipeline) -> Any:
    return visible_with(p, p.is_causal, p.position, p.band, p.mask)


def visible_with(p: Pipeline, causal: bool, offset: Any, window: Any, mask: Any) -> Any:
    """Which key each query may see, (B, Hq, T, S)."""
    x = Operands(p.q, p.k, p.v, p.bias, None, mask, p.segments, offset)
    seen = visibility(x, Options(1.0, causal, window))
    return np.broadcast_to(seen, x.scores_shape)


@_attention
def z(p: Pipeline) -> Any:
    return p.c(p.scale_z) * matmul(p.q, transpose(p.k_heads))


@_attention
def scores_unmasked(p: Pipeline) -> Any:
    s = SoftCap(p.softcap).value(p.z)
    if p.bias is None:
        return s
    return s + np.where(np.isneginf(p.bias.astype(np.float64)), p.c(0.0), p.bias)


@_attention
def scores(p: Pipeline) -> Any:
    return np.where(p.visible, p.scores_unmasked, p.c(-np.inf))


def exponentials(p: Pipeline, scores: Any, visible: Any) -> tuple[Any, Any, Any, Any]:
    """exp(scores - top), the exponential of the sink, their sum, and top, the row maximum."""
    extra = np.broadcast_to(p.c(-np.inf) if p.sinks is None else p.sinks[:, None], scores.shape[:-1])
    top = np.maximum(np.max(np.where(visible, scores, p.c(-np.inf)), axis=-1), extra)
    top = np.where(top == -np.inf, p.c(0.0), top)
    e = np.where(visible, np.exp(np.where(visible, scores, top[..., None]) - top[..., None]), p.c(0.0))
    sink = np.exp(extra - top)
    return e, sink, rowsum(e) + sink, top


def softmax(p: Pipeline, scores: Any, visible: Any) -> Any:
    """Row softmax over what is visible, the sink in the denominator; a row that sees nothing is zero."""
    e, _, total, _ = exponentials(p, scores, visible)
    return e / np.where(total == 0, p.c(1.0), total)[..., None]


@_attention
def normaliser(p: Pipeline) -> Any:
    return exponentials(p, p.scores, p.visible)


@_attention
def lse(p: Pipeline) -> Any:
    _, _, total, top = p.normaliser
    return np.where(total == 0, p.c(-np.inf), top + np.log(np.where(total == 0, p.c(1.0), total)))


@_attention
def weights(p: Pipeline) -> Any:
    e, _, total, _ = p.normaliser
    return e / np.where(total == 0, p.c(1.0), total)[..., None]


@_attention
def sink_share(p: Pipeline) -> Any:
    _, sink, total, _ = p.normaliser
    return sink / np.where(total == 0, p.c(1.0), total)


@_attention
def keep(p: Pipeline) -> Any:
    """M, the keep mask over (1 - rate); None without dropout."""
    return keep_with(p, p.seed)


def keep_with(p: Pipeline, seed: Any) -> Any:
    """M of another seed."""
    if not p.dropout:
        return None
    return keep_factor(Operands(p.q, p.k, p.v), Options(1.0, dropout=p.dropout, seed=seed))


@_attention
def out(p: Pipeline) -> Any:
    return matmul(drop(p.weights, p.keep), p.v_heads)


# --- reverse: the backward may see other weights than the forward had, so they have names of their own -----------------


@_attention
def visible_back(p: Pipeline) -> Any:
    return p.visible


@_attention
def weights_back(p: Pipeline) -> Any:
    return p.weights


@_attention
def keep_back(p: Pipeline) -> Any:
    return p.keep


@_attention
def scale_dq(p: Pipeline) -> Any:
    return p.scale_value


@_attention
def scale_dk(p: Pipeline) -> Any:
    return p.scale_value


@_attention
def dv_heads(p: Pipeline) -> Any:
    return matmul(transpose(drop(p.weights_back, p.keep_back)), p.dout)


@_attention
def dv(p: Pipeline) -> Any:
    return per_key_head(p.dv_heads, p.v)


@_attention
def dweights(p: Pipeline) -> Any:
    return drop(matmul(p.dout, transpose(p.v_heads)), p.keep_back)


@_attention
def delta(p: Pipeline) -> Any:
    return rowsum(p.dout * p.out)


@_attention
def dscores(p: Pipeline) -> Any:
    return zero_hidden(p.weights_back * (p.dweights - p.delta[..., None]), p.visible_back)


@_attention
def dbias(p: Pipeline) -> Any:
    return None if p.bias is None else sum_to(p.dscores, p.bias.shape)


@_attention
def dsinks(p: Pipeline) -> Any:
    return None if p.sinks is None else sum_over(-(p.sink_share * p.delta), (0, 2))


@_attention
def slope(p: Pipeline) -> Any:
    return SoftCap(p.softcap).first(p.z)


@_attention
def dz(p: Pipeline) -> Any:
    return p.dscores * p.slope


@_attention
def dq(p: Pipeline) -> Any:
    return p.c(p.scale_dq) * matmul(p.dz, p.k_heads)


@_attention
def dk_heads(p: Pipeline) -> Any:
    return p.c(p.scale_dk) * matmul(transpose(p.dz), p.q)


@_attention
def dk(p: Pipeline) -> Any:
    return per_key_head(p.dk_heads, p.k)


# --- forward mode ----------------------------------------------------------------------------------------------------


@_attention
def z_dot(p: Pipeline) -> Any:
    k_dot = per_query_head(p.k_dot, p.group)
    return p.c(p.scale_value) * (matmul(p.q_dot, transpose(p.k_heads)) + matmul(p.q, transpose(k_dot)))


@_attention
def scores_dot(p: Pipeline) -> Any:
    s_dot = SoftCap(p.softcap).first(p.z) * p.z_dot
    return zero_hidden(s_dot if p.bias_dot is None else s_dot + p.bias_dot, p.visible)


@_attention
def lse_dot(p: Pipeline) -> Any:
    moved = rowsum(p.weights * p.scores_dot)
    return moved if p.sinks_dot is None else moved + p.sink_share * p.sinks_dot[:, None]


@_attention
def weights_dot(p: Pipeline) -> Any:
    return p.weights * (p.scores_dot - p.lse_dot[..., None])


@_attention
def out_dot(p: Pipeline) -> Any:
    v_dot = per_query_head(p.v_dot, p.group)
    return matmul(drop(p.weights_dot, p.keep), p.v_heads) + matmul(drop(p.weights, p.keep), v_dot)


# --- second order ----------------------------------------------------------------------------------------------------


@_attention
def dweights_dot(p: Pipeline) -> Any:
    v_dot = per_query_head(p.v_dot, p.group)
    return drop(matmul(p.dout_dot, transpose(p.v_heads)) + matmul(p.dout, transpose(v_dot)), p.keep)


@_attention
def delta_dot(p: Pipeline) -> Any:
    return rowsum(p.dout_dot * p.out + p.dout * p.out_dot)


@_attention
def dscores_dot(p: Pipeline) -> Any:
    first = p.weights_dot * (p.dweights - p.delta[..., None])
    return zero_hidden(first + p.weights * (p.dweights_dot - p.delta_dot[..., None]), p.visible)


@_attention
def dz_dot(p: Pipeline) -> Any:
    cap = SoftCap(p.softcap)
    return p.dscores_dot * cap.first(p.z) + p.dscores * cap.second(p.z) * p.z_dot


@_attention
def dq_dot(p: Pipeline) -> Any:
    k_dot = per_query_head(p.k_dot, p.group)
    return p.c(p.scale_value) * (matmul(p.dz_dot, p.k_heads) + matmul(p.dz, k_dot))


@_attention
def dk_dot(p: Pipeline) -> Any:
    heads = matmul(transpose(p.dz_dot), p.q) + matmul(transpose(p.dz), p.q_dot)
    return per_key_head(p.c(p.scale_value) * heads, p.k)


@_attention
def dv_dot(p: Pipeline) -> Any:
    heads = matmul(transpose(drop(p.weights_dot, p.keep)), p.dout)
    return per_key_head(heads + matmul(transpose(drop(p.weights, p.keep)), p.dout_dot), p.v)


@_attention
def dbias_dot(p: Pipeline) -> Any:
    return None if p.bias is None else sum_to(p.dscores_dot, p.bias.shape)


@_attention
def dsinks_dot(p: Pipeline) -> Any:
    if p.sinks is None:
        return None
    shift = -p.lse_dot if p.sinks_dot is None else p.sinks_dot[:, None] - p.lse_dot
    return sum_over(-(p.sink_share * (shift * p.delta + p.delta_dot)), (0, 2))


# --- the layer: y = merge(attention(split(x w))) w_o -------------------------------------------------------------------


def split_heads(x: Any, heads: int) -> Any:
    """(B, T, H D) to (B, H, T, D)."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Any) -> Any:
    """(B, H, T, D) to (B, T, H D)."""
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)


def per_token(x: Any, w: Any) -> Any:
    """x w."""
    return matmul(x, w)


@_layer
def split(p: Pipeline) -> Any:
    """How heads are split, as a function."""
    return split_heads


@_layer
def merge(p: Pipeline) -> Any:
    """How heads are merged, as a function."""
    return merge_heads


@_layer
def split_back(p: Pipeline) -> Any:
    """How the backward splits, which inverts the merge."""
    return split_heads


@_layer
def merge_back(p: Pipeline) -> Any:
    return merge_heads


@_layer
def q(p: Pipeline) -> Any:
    return p.split(per_token(p.query, p.w_q), p.num_heads)


@_layer
def k(p: Pipeline) -> Any:
    return p.split(per_token(p.key, p.w_k), p.num_heads)


@_layer
def v(p: Pipeline) -> Any:
    return p.split(per_token(p.value, p.w_v), p.num_heads)


@_layer
def merged(p: Pipeline) -> Any:
    return p.merge(p.out)


@_layer
def y(p: Pipeline) -> Any:
    return per_token(p.merged, p.w_o)


@_layer
def dmerged(p: Pipeline) -> Any:
    return per_token(p.dy, transpose(p.w_o))


@_layer
def dout(p: Pipeline) -> Any:
    return p.split_back(p.dmerged, p.num_heads)


def outer(x: Any, dx: Any) -> Any:
    """x^T dx, summed over batch and tokens."""
    return matmul(transpose(x.reshape(-1, x.shape[-1])), dx.reshape(-1, dx.shape[-1]))


@_layer
def weight_gradient(p: Pipeline) -> Any:
    """How dW comes from an input and an output gradient, as a function."""
    return outer


@_layer
def input_gradient(p: Pipeline) -> Any:
    """How dX comes from an output gradient, W and dW, as a function."""
    return lambda dx, w, dw: per_token(dx, transpose(w))


@_layer
def dq_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dq)


@_layer
def dk_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dk)


@_layer
def dv_flat(p: Pipeline) -> Any:
    return p.merge_back(p.dv)


@_layer
def dw_o(p: Pipeline) -> Any:
    return p.weight_gradient(p.merged, p.dy)


@_layer
def dw_q(p: Pipeline) -> Any:
    return p.weight_gradient(p.query, p.dq_flat)


@_layer
def dw_k(p: Pipeline) -> Any:
    return p.weight_gradient(p.key, p.dk_flat)


@_layer
def dw_v(p: Pipeline) -> Any:
    return p.weight_gradient(p.value, p.dv_flat)


@_layer
def dquery(p: Pipeline) -> Any:
    return p.input_gradient(p.dq_flat, p.w_q, lambda: p.dw_q)


@_layer
def dkey(p: Pipeline) -> Any:
    return p.input_gradient(p.dk_flat, p.w_k, lambda: p.dw_k)


@_layer
def dvalue(p: Pipeline) -> Any:
    return p.input_gradient(p.dv_flat, p.w_v, lambda: p.dw_v)


@_layer
def dx(p: Pipeline) -> Any:
    """The gradient of the one input of self-attention."""
    if p.key.shape != p.query.shape or not (np.array_equal(p.key, p.query) and np.array_equal(p.value, p.query)):
        raise Undefined
    return p.dquery + p.dkey + p.dvalue


FORWARD = ("q", "k", "v", "z", "scores", "lse", "weights", "out", "y")
REVERSE = ("dout", "dweights", "delta", "dscores", "dbias", "dsinks", "dz", "dq", "dk", "dv")
LAYER = ("dw_o", "dw_q", "dw_k", "dw_v", "dquery", "dkey", "dvalue", "dx")
TANGENT = ("scores_dot", "lse_dot", "weights_dot", "out_dot")
SECOND = ("dweights_dot", "delta_dot", "dscores_dot", "dbias_dot", "dsinks_dot", "dq_dot", "dk_dot", "dv_dot")
RESULTS = (*FORWARD, *TANGENT, *REVERSE, *LAYER, *SECOND)
"""Every result that can be checked, in the order of the data flow."""
