"""The reference under the signatures of the public functions: on any array, dense."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Unpack

from attngrad.core.arrays import Array
from attngrad.core.binding import (
    bind,
    bind_primals,
    bind_tangents,
    bind_wrt,
    check_cotangents,
    refuse_lse,
    require_cotangent,
)
from attngrad.core.calls import told_how
from attngrad.core.operands import Gradients
from attngrad.core.options import OptionArguments
from attngrad.reference.dense import zeros_if_none
from attngrad.reference.passes import GRADS, GRADS_DOT, Forward, directions, inputs, take
from attngrad.reference.table import evaluate


def attention(q: Array, k: Array, v: Array, **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention``, dense, on any array.

    >>> import numpy as np
    >>> x = np.eye(2, dtype=np.longdouble)
    >>> attention(x, x, x, scale=1.0).dtype == np.longdouble
    True
    """
    x, o, return_lse = bind("attention", q, k, v, options, kernels=False)
    f = evaluate(inputs(x, o), ("out", "lse") if return_lse else ("out",))
    return (f["out"], f["lse"]) if return_lse else f["out"]


def vjp(q: Array, k: Array, v: Array, **options: Unpack[OptionArguments]) -> tuple[Any, Callable[..., Gradients]]:
    """``attngrad.vjp``, dense, on any array: ``out, pullback``.

    >>> import numpy as np
    >>> out, pullback = vjp(*np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.longdouble))
    >>> pullback(out).k.dtype == np.longdouble
    True
    """
    x, o, return_lse = bind("vjp", q, k, v, options, kernels=False)
    f = evaluate(inputs(x, o), Forward._fields)

    def pullback(
        dout: Array | None, dlse: Array | None = None, *, wrt: str | Collection[str] | None = None
    ) -> Gradients:
        require_cotangent("pullback", dout, dlse)
        check_cotangents("pullback", x, dout, dlse, kernels=False)
        wanted = bind_wrt("pullback", x, wrt)
        names = tuple(f"d{name}" for name in wanted)
        b = evaluate({**f, "dout": zeros_if_none(dout, f["out"]), "dlse": dlse}, names)
        return Gradients(*(b[name] if name in names else None for name in GRADS))

    return ((f["out"], f["lse"]) if return_lse else f["out"]), pullback


@told_how
def jvp(
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array | None, Array | None, Array | None],
    *,
    bias_dot: Array | None = None,
    sinks_dot: Array | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Any, Any]:
    """``attngrad.jvp``, dense, on any array: ``out, out_dot``.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> out, out_dot = jvp((q, k, v), (None, None, v))
    >>> np.allclose(out_dot, out)                                             # linear in v
    True
    """
    x, o, return_lse = bind("jvp", *bind_primals("jvp", primals), options, kernels=False)
    t = bind_tangents("jvp", x, tangents, bias_dot, sinks_dot, kernels=False)
    f = evaluate({**inputs(x, o), **directions(x, t)}, ("out", "lse", "out_dot", "lse_dot"))
    return ((f["out"], f["lse"]), (f["out_dot"], f["lse_dot"])) if return_lse else (f["out"], f["out_dot"])


@told_how
def hvp(
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array | None, Array | None, Array | None],
    dout: Array | None,
    dout_dot: Array | None = None,
    *,
    bias_dot: Array | None = None,
    sinks_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
    **options: Unpack[OptionArguments],
) -> tuple[Gradients, Gradients]:
    """``attngrad.hvp``, dense, on any array: ``grads, grads_dot``.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> grads, grads_dot = hvp((q, k, v), (None, None, v), dout)
    >>> np.allclose(grads_dot.q, grads.q)                                     # linear in v
    True
    """
    x, o, return_lse = bind("hvp", *bind_primals("hvp", primals), options, kernels=False)
    refuse_lse("hvp", return_lse)
    t = bind_tangents("hvp", x, tangents, bias_dot, sinks_dot, kernels=False)
    require_cotangent("hvp", dout, dlse)
    check_cotangents("hvp", x, dout, dlse, kernels=False)
    check_cotangents("hvp", x, dout_dot, dlse_dot, "_dot", kernels=False)
    f = evaluate(inputs(x, o), ("out",))
    dout = zeros_if_none(dout, f["out"])
    f |= {"dout": dout, "dlse": dlse, "dout_dot": zeros_if_none(dout_dot, dout), "dlse_dot": dlse_dot}
    f = evaluate({**f, **directions(x, t)}, GRADS + GRADS_DOT)
    return Gradients(*take(f, GRADS)), Gradients(*take(f, GRADS_DOT))


def attention_weights(q: Array, k: Array, **options: Unpack[OptionArguments]) -> Any:
    """``attngrad.attention_weights``, on any array: the dense A.

    >>> import numpy as np
    >>> attention_weights(np.zeros((2, 1)), np.zeros((2, 1)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    x, o, return_lse = bind("attention_weights", q, k, k, options, kernels=False)
    f = evaluate(inputs(x, o), ("weights", "lse") if return_lse else ("weights",))
    return (f["weights"], f["lse"]) if return_lse else f["weights"]
