"""Which backend computes: by the device of the tensors, or as the user says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from attngrad import backends
from attngrad.backends.protocol import Backend
from attngrad.torch._tensors import check_tensor

VARIABLE = "ATTNGRAD_TORCH_BACKEND"
_forced: str | None = os.environ.get(VARIABLE) or None


def forced() -> str | None:
    """The backend that the user has named, or None."""
    return _forced


def choose(device: str, name: str | None) -> Backend:
    """The backend for tensors on a device: that of ``name``, or the one of the device."""
    if name is None:
        return backends.find("torch", device)
    _check(name)
    if not backends.REGISTRY[name].takes("torch", device):
        rule = f"be one that takes tensors on {device} ({', '.join(_names(device))})"
        raise ValueError(f"attngrad.torch: backend must {rule}; got {name!r}. use_backend(None) chooses by device.")
    return backends.get(name)


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Let one backend compute for a while, in all threads: "cpu", "blocked", or None for the one of the device.

    ``"cpu"`` are the native kernels, for tensors on the CPU; ``"blocked"`` is made of PyTorch's operations, for tensors
    on any device. The environment variable ATTNGRAD_TORCH_BACKEND names the one to begin with.

    >>> import torch
    >>> with use_backend("blocked"):
    ...     backend_of(torch.zeros(1))
    'blocked'
    """
    global _forced
    if name is not None:
        _check(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def backend_of(x: Tensor) -> str:
    """The name of the backend that computes on tensors like ``x``.

    >>> import torch
    >>> backend_of(torch.zeros(1)), backend_of(torch.zeros(1, device="meta"))
    ('cpu', 'blocked')
    """
    check_tensor("backend_of", "x", x)
    return choose(x.device.type, _forced).NAME


def _names(device: str | None = None) -> list[str]:
    """The backends that take tensors, on ``device`` or anywhere."""
    return [name for name, entry in backends.REGISTRY.items() if entry.takes("torch", device)]


def _check(name: str) -> None:
    if name not in _names():
        raise ValueError(f"attngrad.torch: backend must be one of {', '.join(_names())}, or None; got {name!r}.")
