"""A differentiable PyTorch function, audited: its gradients by autograd, forward mode, double backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.frameworks import OPTION_GRADIENTS, audit_differentiable, function_of, inputs_of
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on torch tensors ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk, dv, dbias and dsinks come from ``torch.autograd.grad``; where ``fn`` offers them, forward mode
    (``torch.func.jvp``) and double backward are audited too. Options are passed as keywords if ``fn`` takes them.

    >>> import torch
    >>> audit(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, effort="quick").mistakes
    ('scale-missing',)
    """
    modes = {
        OPTION_GRADIENTS: _option_gradients,
        "forward mode": _forward_mode,
        "double backward": _double_backward,
    }
    return audit_differentiable(fn, _gradients, modes, **keywords)


def _tensor(x: Any) -> Any:
    import torch

    if isinstance(x, tuple):
        return tuple(map(_tensor, x))
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _given(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: _tensor(x) for n, x in arrays.items()}, {n: _tensor(x) for n, x in options.items()}


def _inputs(arrays: dict[str, Any], options: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple((arrays | options)[n].detach().requires_grad_() for n in names)


def _gradients(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import torch

    x, o = _given(arrays, options)
    inputs = _inputs(x, o, ("q", "k", "v"))
    out = fn(*inputs, **o)
    grads = torch.autograd.grad(out, inputs, x["dout"], allow_unused=True)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _option_gradients(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import torch

    x, o = _given(arrays, options)
    names = inputs_of(o)
    inputs = _inputs(x, o, names)
    if not names[3:]:
        return {}
    grads = torch.autograd.grad(function_of(fn, o, names)(*inputs), inputs[3:], x["dout"])
    return {f"d{n}": g for n, g in zip(names[3:], grads, strict=True)}


def _forward_mode(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import torch

    x, o = _given(arrays, options)
    names = inputs_of(o)
    primals, tangents = tuple((x | o)[n] for n in names), tuple(x[f"{n}_dot"] for n in names)
    return {"out_dot": torch.func.jvp(function_of(fn, o, names), primals, tangents)[1]}


def _double_backward(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The Hessian of <dout, out> applied to the tangents, plus the gradients along dout_dot."""
    import torch

    x, o = _given(arrays, options)
    names = inputs_of(o)
    inputs = _inputs(x, o, names)
    out = function_of(fn, o, names)(*inputs)
    grads = torch.autograd.grad(out, inputs, x["dout"], create_graph=True)
    along = tuple(x[f"{n}_dot"] for n in names)
    twice = torch.autograd.grad(grads, inputs, along, retain_graph=True, materialize_grads=True)
    more = torch.autograd.grad(out, inputs, x["dout_dot"])
    return {f"d{n}_dot": a + b for n, a, b in zip(names, twice, more, strict=True)}
