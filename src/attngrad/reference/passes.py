"""The four passes, each with every intermediate by name; what they compute is in ``steps`` and ``tangent_steps``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from attngrad.core.arrays import Array
from attngrad.core.operands import Gradients, Operands, Tangents
from attngrad.core.options import OPTIONS, STATIC, Options
from attngrad.reference import steps, tangent_steps  # noqa: F401 - they fill the table
from attngrad.reference.dense import zeros_if_none
from attngrad.reference.modifiers import MODIFIERS, modifiers
from attngrad.reference.table import STEPS, evaluate

GRADS = tuple(f"d{name}" for name in Gradients._fields)
GRADS_DOT = tuple(f"{name}_dot" for name in GRADS)


NUMBERS = tuple(row.name for row in STATIC if row.name not in MODIFIERS)
"""The options that steps read as they are."""


def inputs(x: Operands, o: Options) -> dict[str, Any]:
    """What the steps of the forward pass start from, by name."""
    found = {**x._asdict(), **{name: getattr(o, name) for name in NUMBERS}}
    refuse_unread(found)
    return {**found, "group": x.group, "modifier": modifiers(o)}


def refuse_unread(given: Mapping[str, Any]) -> None:
    """An error where an option is given that no step reads: it is in the table of options, and not in the book yet."""
    for name in _unread():
        if given.get(name) is not None and given[name] is not OPTIONS[name].default:
            raise NotImplementedError(f"attngrad.reference: no step reads the option {name!r}.")


@cache
def _unread() -> tuple[str, ...]:
    read = {name for step in STEPS.values() for name in step.reads}
    return tuple(name for name in OPTIONS if name not in read and name not in MODIFIERS)


def directions(x: Operands, t: Tangents) -> dict[str, Any]:
    """The tangents by name; zeros for the None of q, k and v."""
    found = {"q": zeros_if_none(t.q, x.q), "k": zeros_if_none(t.k, x.k), "v": zeros_if_none(t.v, x.v)}
    return {f"{name}_dot": d for name, d in (t._asdict() | found).items()}


def take(values: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """The values of ``names``."""
    return [values[name] for name in names]


# --- forward --------------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """The intermediates of the forward pass. ``keep`` is M, None without dropout; ``sink`` is exp(sigma - lse)."""

    z: Array
    scores: Array
    lse: Array
    weights: Array
    out: Array
    visible: Array
    keep: Any
    sink: Any


def forward(x: Operands, o: Options) -> Forward:
    """Attention, with every intermediate.

    ::

        z      = scale * q k^T                              (F1)
        scores = cap(z) + bias, -inf where masked           (F2)
        lse_i  = log( sum_j exp(scores_ij) + exp(sigma) )   (F3)
        p      = exp(scores - lse)                          (F4)
        out    = (p o M) v                                  (F5)

    >>> import numpy as np
    >>> from attngrad.core.binding import bind
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("attention", q, k, v, {"causal": True}, kernels=False)
    >>> f = forward(x, o)
    >>> np.allclose(f.weights.sum(-1), 1.0), np.allclose(f.out, f.weights @ v)
    (True, True)
    """
    return Forward(*take(evaluate(inputs(x, o), Forward._fields), Forward._fields))


# --- reverse mode ----------------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """The intermediates of the backward pass; ``dscores`` is Omega."""

    dweights: Array
    delta: Array
    dscores: Array
    dz: Array
    grads: Gradients


def backward(x: Operands, o: Options, f: Forward, dout: Array, dlse: Array | None = None) -> Backward:
    """The VJP: the gradient of <dout, out> + <dlse, lse>.

    ::

        dv     = (p o M)^T dout                          (R1)
        dp     = (dout v^T) o M                          (R2)
        delta  = rowsum(dout o out) - dlse               (R3)
        ds     = p o (dp - delta)                        (R4)   Omega
        dbias  = ds summed over the axes bias was broadcast along  (R5)
        dsigma = - sum_i exp(sigma - lse_i) delta_i      (R6)
        dz     = ds o cap'(z)                            (R7)
        dq     = scale * dz k                            (R8)
        dk     = scale * dz^T q                          (R9)

    dk and dv are summed over the query heads of a group.

    >>> import numpy as np
    >>> from attngrad.core.binding import bind
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("vjp", q, k, v, {"causal": True}, kernels=False)
    >>> b = backward(x, o, forward(x, o), dout)
    >>> np.allclose(b.dscores.sum(-1), 0.0), np.allclose(b.grads.q, o.scale * b.dscores @ k)
    (True, True)
    """
    given = {**inputs(x, o), **f._asdict(), "dout": dout, "dlse": dlse}
    found = evaluate(given, Backward._fields[:-1] + GRADS)
    found["grads"] = Gradients(*take(found, GRADS))
    return Backward(*take(found, Backward._fields))


# --- forward mode ----------------------------------------------------------------------------------------------------


class ForwardTangent(NamedTuple):
    """The tangents of the forward pass."""

    z_dot: Array
    scores_dot: Array
    lse_dot: Array
    weights_dot: Array
    out_dot: Array


def forward_tangent(x: Operands, o: Options, f: Forward, t: Tangents) -> ForwardTangent:
    """The JVP: how out and lse move when the inputs move along ``t``.

    ::

        z_dot   = scale * (q_dot k^T + q k_dot^T)                    (T1)
        s_dot   = cap'(z) o z_dot + bias_dot                         (T2)
        lse_dot = rowsum(p o s_dot) + exp(sigma - lse) sigma_dot     (T3)
        p_dot   = p o (s_dot - lse_dot)                              (T4)
        out_dot = (p_dot o M) v + (p o M) v_dot                      (T5)

    >>> import numpy as np
    >>> from attngrad.core.binding import bind, bind_tangents
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("jvp", q, k, v, {}, kernels=False)
    >>> t = bind_tangents("jvp", x, (None, None, dout), None, None, kernels=False)
    >>> f = forward(x, o)
    >>> np.allclose(forward_tangent(x, o, f, t).out_dot, f.weights @ dout)
    True
    """
    given = {**inputs(x, o), **f._asdict(), **directions(x, t)}
    return ForwardTangent(*take(evaluate(given, ForwardTangent._fields), ForwardTangent._fields))


# --- second order ----------------------------------------------------------------------------------------------------


class BackwardTangent(NamedTuple):
    """The tangents of the backward pass."""

    dweights_dot: Array
    delta_dot: Array
    dscores_dot: Array
    dz_dot: Array
    grads_dot: Gradients


def backward_tangent(
    x: Operands,
    o: Options,
    f: Forward,
    b: Backward,
    ft: ForwardTangent,
    t: Tangents,
    dout: Array,
    dout_dot: Array | None = None,
    dlse_dot: Array | None = None,
) -> BackwardTangent:
    """The HVP: the tangent of the VJP along ``t`` and ``dout_dot``, ``dlse_dot``.

    ::

        delta_dot  = rowsum(dout_dot o out + dout o out_dot) - dlse_dot              (H1)
        dp_dot     = (dout_dot v^T + dout v_dot^T) o M                               (H2)
        ds_dot     = p_dot o (dp - delta) + p o (dp_dot - delta_dot)                 (H3)
        dz_dot     = ds_dot o cap'(z) + ds o cap''(z) o z_dot                        (H4)
        dq_dot     = scale * (dz_dot k + dz k_dot)                                   (H5)
        dk_dot     = scale * (dz_dot^T q + dz^T q_dot)                               (H6)
        dv_dot     = (p_dot o M)^T dout + (p o M)^T dout_dot                         (H7)
        dbias_dot  = ds_dot summed as dbias                                          (H8)
        dsigma_dot = - sum_i exp(sigma - lse_i) ((sigma_dot - lse_dot_i) delta_i + delta_dot_i)   (H9)

    >>> import numpy as np
    >>> from attngrad.core.binding import bind, bind_tangents
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> x, o, _ = bind("hvp", q, k, v, {}, kernels=False)
    >>> t = bind_tangents("hvp", x, (None, None, None), None, None, kernels=False)
    >>> f = forward(x, o)
    >>> b, ft = backward(x, o, f, dout), forward_tangent(x, o, f, t)
    >>> along = backward_tangent(x, o, f, b, ft, t, dout, dout_dot=dout)      # the gradient is linear in dout
    >>> np.allclose(along.grads_dot.k, b.grads.k)
    True
    """
    given = {**inputs(x, o), **f._asdict(), **b._asdict(), **ft._asdict(), **directions(x, t)}
    given |= {"dout": dout, "dout_dot": zeros_if_none(dout_dot, dout), "dlse_dot": dlse_dot}
    found = evaluate(given, BackwardTangent._fields[:-1] + GRADS_DOT)
    found["grads_dot"] = Gradients(*take(found, GRADS_DOT))
    return BackwardTangent(*take(found, BackwardTangent._fields))
