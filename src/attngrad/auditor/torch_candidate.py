"""A differentiable PyTorch function, audited: its gradients by autograd, forward mode, double backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.frameworks import audit_differentiable
from attngrad.auditor.report import AuditReport


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on torch tensors ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk and dv come from ``torch.autograd.grad``; where ``fn`` offers them, forward mode (``torch.func.jvp``) and
    double backward are audited too. Options are passed as keywords if ``fn`` takes them.

    >>> import torch
    >>> audit(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, effort="quick").mistakes
    ('scale-missing',)
    """
    modes = {"forward mode": _forward_mode, "double backward": _double_backward}
    return audit_differentiable(fn, _gradients, modes, **keywords)


def _tensor(x: Any) -> Any:
    import torch

    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _given(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: _tensor(x) for n, x in arrays.items()}, {n: _tensor(x) for n, x in options.items()}


def _forward(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    x, o = _given(arrays, options)
    inputs = tuple(x[n].detach().requires_grad_() for n in "qkv")
    return fn(*inputs, **o), inputs, x


def _gradients(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import torch

    out, inputs, x = _forward(fn, arrays, options)
    grads = torch.autograd.grad(out, inputs, x["dout"], allow_unused=True)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _forward_mode(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    import torch

    x, o = _given(arrays, options)
    tangents = tuple(x[f"{n}_dot"] for n in "qkv")
    moved = torch.func.jvp(lambda q, k, v: fn(q, k, v, **o), tuple(x[n] for n in "qkv"), tangents)
    return {"out_dot": moved[1]}


def _double_backward(fn: Any, arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The Hessian of <dout, out> applied to the tangents, plus the gradients along dout_dot."""
    import torch

    out, inputs, x = _forward(fn, arrays, options)
    grads = torch.autograd.grad(out, inputs, x["dout"], create_graph=True)
    along = tuple(x[f"{n}_dot"] for n in "qkv")
    twice = torch.autograd.grad(grads, inputs, along, retain_graph=True, materialize_grads=True)
    more = torch.autograd.grad(out, inputs, x["dout_dot"])
    return {f"d{n}_dot": a + b for n, a, b in zip("qkv", twice, more, strict=True)}
