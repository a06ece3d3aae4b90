"""A differentiable PyTorch function, audited: its gradients by autograd, forward mode, double backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngrad.auditor.frameworks import Call, Mode, audit_differentiable, function_of, inputs_of
from attngrad.auditor.report import AuditReport
from attngrad.core.dtypes import BFLOAT16


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on torch tensors ``(B, H, T, D)``; keywords as of ``attngrad.audit``.

    dq, dk, dv, dbias and dsinks come from ``torch.autograd.grad``; where ``fn`` offers them, forward mode
    (``torch.func.jvp``) and double backward are audited too. Options are passed as keywords if ``fn`` takes them.

    >>> import torch
    >>> audit(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, effort="quick").mistakes
    ('scale-missing',)
    """
    import torch

    return audit_differentiable(fn, _caller, _vjp, torch.func.jvp, _second, **keywords)


def _tensor(x: Any) -> Any:
    import torch

    if isinstance(x, tuple):
        return tuple(map(_tensor, x))
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _caller(mode: Mode) -> Call:
    def call(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        names = inputs_of(options)
        tensors = {n: _tensor(x) for n, x in options.items()}
        return mode(function_of(fn, tensors, names), {n: _tensor(x) for n, x in given.items()} | tensors, names)

    return call


def _vjp(f: Any, inputs: tuple[Any, ...], dout: Any, part: slice, unused: bool = False) -> tuple[Any, Any]:
    import torch

    moved = tuple(x.detach().requires_grad_() for x in inputs[: part.stop])
    out = f(*moved, *inputs[len(moved) :])
    return out, torch.autograd.grad(out, moved[part], dout, allow_unused=unused)


def _second(f: Any, inputs: tuple[Any, ...], dout: Any, along: tuple[Any, ...]) -> Any:
    import torch

    moved = tuple(x.detach().requires_grad_() for x in inputs)
    grads = torch.autograd.grad(f(*moved), moved, dout, create_graph=True)
    return torch.autograd.grad(grads, moved, along, materialize_grads=True)
