"""Audit your attention: hand over any implementation, and hear which gradient is wrong, where, and why.

A gradient check says that something is off; the auditor names the line. Two candidates here, each with two mistakes as
people make them, then put right: homework in NumPy, and a ``torch.autograd.Function`` such as wraps a kernel of one's
own. Tests of the forward pass see none of these: both outputs are right. (PyTorch's fused attention can be audited in
the same way; of it the report says that forward mode and double backward raise, torch 2.13.)

Run it: ``python examples/audit_your_attention.py`` (NumPy and PyTorch; some seconds)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import attngrad
import attngrad.torch

NDArray = npt.NDArray[Any]


def homework(q: NDArray, k: NDArray, v: NDArray, dout: NDArray) -> dict[str, NDArray]:
    """The backward pass as it was handed in."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.mT
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    da = dout @ v.mT
    ds = a * (1 - a) * da  # as for a sigmoid: the diagonal of the Jacobian alone
    return {"out": a @ v, "dscores": ds, "dq": scale * ds @ k, "dk": ds.mT @ q, "dv": a.mT @ dout}


def homework_corrected(q: NDArray, k: NDArray, v: NDArray, dout: NDArray) -> dict[str, NDArray]:
    """The same, after the audit."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.mT
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    da = dout @ v.mT
    ds = a * (da - np.sum(a * da, -1, keepdims=True))
    return {"out": a @ v, "dscores": ds, "dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": a.mT @ dout}


def masked_softmax(s: Tensor) -> Tensor:
    """Causal, the last query at the last key; a row that sees nothing is 0."""
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
    return torch.softmax(s.masked_fill(hidden, -torch.inf), -1).nan_to_num()


class Kernel(torch.autograd.Function):
    """Causal attention for grouped queries; its own backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q ``(B, H, T, D)``; k and v ``(B, H / group, S, D)``."""
        ctx.group, ctx.scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        k, v = (x.repeat_interleave(ctx.group, 1) for x in (k, v))
        ctx.save_for_backward(q, k, v)
        return masked_softmax(ctx.scale * q @ k.mT) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        """As it was written at night."""
        q, k, v = ctx.saved_tensors
        a = masked_softmax(ctx.scale * q @ k.mT)
        da = dout @ v.mT
        ds = a * (da - (a * da).sum(-1, keepdim=True))
        dk, dv = (x[:, :: ctx.group] for x in (ctx.scale * ds.mT @ q, a.mT @ dout))
        return ds @ k, dk, dv


class KernelCorrected(Kernel):
    """The same, after the audit."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        """dQ with its scale; each query head of a group adds to its key head."""
        q, k, v = ctx.saved_tensors
        a = masked_softmax(ctx.scale * q @ k.mT)
        da = dout @ v.mT
        ds = a * (da - (a * da).sum(-1, keepdim=True))
        dk, dv = ctx.scale * ds.mT @ q, a.mT @ dout
        dk, dv = (x.unflatten(1, (-1, ctx.group)).sum(2) for x in (dk, dv))
        return ctx.scale * ds @ k, dk, dv


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What the auditor calls."""
    return Kernel.apply(q, k, v)


def kernel_corrected(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What the auditor calls, after the audit."""
    return KernelCorrected.apply(q, k, v)


def audits(effort: str = "quick") -> dict[str, Any]:
    """The report on each candidate."""
    causal = {"options": {"causal": True}, "supports": ("gqa",)}
    candidates: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
        "homework": (attngrad.audit, homework, {}),
        "homework, corrected": (attngrad.audit, homework_corrected, {}),
        "kernel": (attngrad.torch.audit, kernel, causal),
        "kernel, corrected": (attngrad.torch.audit, kernel_corrected, causal),
    }
    return {name: audit(candidate, effort=effort, **how) for name, (audit, candidate, how) in candidates.items()}


def main() -> None:
    """Print the verdicts, and the first report in full."""
    reports = audits()
    for name, report in reports.items():
        print(f"{name}: {report.verdict}")
        print(f"  mistakes: {', '.join(report.mistakes) or 'none'}")
    print(f"\n{reports['homework']}")


if __name__ == "__main__":
    main()
