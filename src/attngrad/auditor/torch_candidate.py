"""A differentiable PyTorch function, audited: its gradients by autograd, forward mode, double backward."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np

from attngrad.auditor.adapters import adapter_of
from attngrad.auditor.frameworks import Call, Mode, audit_differentiable, function_of, inputs_of
from attngrad.auditor.report import AuditReport
from attngrad.core.checks import fail
from attngrad.core.dtypes import BFLOAT16


def audit(fn: Any, **keywords: Any) -> AuditReport:
    """Audit ``fn(q, k, v) -> out`` on torch tensors; keywords as of ``attngrad.audit``.

    dq, dk, dv, dbias and dsinks come from ``torch.autograd.grad``; where ``fn`` offers them, forward mode
    (``torch.func.jvp``) and double backward are audited too. Options are passed as keywords if ``fn`` takes them.
    Tensors are on ``device``; the truth is computed on the CPU. A ``torch.autograd.Function``, a module, and whatever
    ``attngrad.audit`` takes will do too, with tensors for arrays.

    >>> import torch
    >>> audit(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, effort="quick").mistakes
    ('scale-missing',)
    """
    from attngrad.auditor.run import audit as audit_any

    return audit_any(fn, framework="torch", **keywords)


def differentiate(fn: Any, *, device: Any = None, **keywords: Any) -> AuditReport:
    """Audit a function of q, k and v by its gradients."""
    import torch

    adapter = adapter_of(fn)
    caller = partial(_caller, place(device or (adapter.device if adapter is not None else None)))
    return audit_differentiable(fn, caller, caller, _vjp, torch.func.jvp, _second, True, **keywords)


def place(device: Any) -> Any:
    """The device of that name, which must be one that computes, here; None for the CPU."""
    import torch

    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = "it holds no numbers" if str(device) == "meta" else str(error).splitlines()[0]
        fail(ValueError, "audit", "device", "be a device of PyTorch that computes here", f"{device!r} ({reason})")
    return found


def tensor(x: Any, device: Any = None) -> Any:
    """An array as a tensor on the device; a tuple of them likewise; anything else as it is."""
    import torch

    if isinstance(x, tuple):
        return tuple(tensor(y, device) for y in x)
    if not isinstance(x, np.ndarray):
        return x
    made = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    return made if device is None else made.to(device)


def _caller(device: Any, modes: tuple[Mode, ...]) -> Call:
    def call(fn: Any, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        names = inputs_of(options)
        tensors = {n: tensor(x, device) for n, x in options.items()}
        x = {n: tensor(x, device) for n, x in given.items()} | tensors
        results: dict[str, Any] = {}
        for mode in modes:
            results |= mode(function_of(fn, tensors, names), x, names)
        return results

    return call


def _vjp(f: Any, inputs: tuple[Any, ...], dout: Any, part: slice, unused: bool = False) -> tuple[Any, Any]:
    import torch

    moved = tuple(x.detach().requires_grad_() for x in inputs[: part.stop])
    out = f(*moved, *inputs[len(moved) :])
    return out, torch.autograd.grad(out, moved[part], dout, allow_unused=unused)


def _second(f: Any, inputs: tuple[Any, ...], dout: Any, along: tuple[Any, ...], over: str) -> Any:
    """The second derivative, of ``f`` between two linear maps.

    These have a graph of their own, as the layers around an attention have: what ``f`` detaches then gives wrong
    numbers, as it would there, where ``f`` alone would give a gradient that does not require grad.
    """
    import torch

    one = torch.ones((), dtype=dout.dtype, device=dout.device, requires_grad=True)
    moved = tuple(x.detach().requires_grad_() for x in inputs)

    def mapped(*x: Any) -> Any:
        return one * f(*(one * y for y in x))

    if over == "forward":
        first: tuple[Any, ...] = (torch.func.jvp(mapped, moved, along)[1],)
        along = (dout,)
    else:
        first = torch.autograd.grad(mapped(*moved), moved, dout, create_graph=True)
    # To every leaf, as .backward() goes: what is marked once_differentiable raises on the way to leaves of its own.
    wanted = (*moved, *(x for x in _leaves(first) if all(x is not y for y in moved)))
    try:
        return torch.autograd.grad(first, wanted, along, materialize_grads=True, retain_graph=True)[: len(moved)]
    except Exception as error:
        with contextlib.suppress(Exception):
            torch.autograd.grad(first, moved, along, materialize_grads=True)
            error.add_note("with .backward(); torch.autograd.grad to chosen inputs goes past it, and is silently wrong")
        raise


def _leaves(tensors: tuple[Any, ...]) -> list[Any]:
    """The leaves of a graph, those that only it holds too."""
    found, seen, pending = [], set(), [x.grad_fn for x in tensors]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            pending += [n for n, _ in node.next_functions]
    return found
