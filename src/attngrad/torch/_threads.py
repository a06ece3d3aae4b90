"""PyTorch's own workers for the kernels: after a linear layer they are awake, and wait for work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from attngrad.backends.cpu.workers import use_openmp
from attngrad.backends.protocol import Backend

R = TypeVar("R")


def _libraries() -> Iterator[ctypes.CDLL]:
    """Where PyTorch's OpenMP runtime is found, in the order in which the loader looked for it.

    Other packages bring runtimes of their own, as scikit-learn does. PyTorch's is bound in the global scope, where it
    puts the one that it ships, or where LD_PRELOAD has put another; or else among what libtorch_cpu needs.
    """
    yield ctypes.CDLL(None)
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).with_name("lib") / name
        if path.is_file():
            yield ctypes.CDLL(str(path))


if torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
    use_openmp(_libraries())


def lent(backend: Backend, run: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """``run`` with PyTorch's workers, as many as PyTorch uses: the kernels use as many of them as they may use threads.

    They are asked on the main thread alone, which PyTorch computes on: each thread has workers of its own.
    """
    borrow = backend.borrow
    if borrow is None:
        return run(*args, **kwargs)
    borrow(torch.get_num_threads())
    try:
        return run(*args, **kwargs)
    finally:
        borrow(0)
