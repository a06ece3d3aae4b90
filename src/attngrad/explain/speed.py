"""One call of attngrad beside dense NumPy and, where it is installed, PyTorch: verified, then timed in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import attngrad
from attngrad.core.arrays import NDArray
from attngrad.testing import relative_error

if TYPE_CHECKING:
    from rich.console import Console

SHAPE = (1, 8, 512, 64)
SAMPLES, FEWEST, SECONDS = 7, 3, 2.5
"""Rounds of calls; fewer, but not fewer than FEWEST, where they take longer than SECONDS."""
PAUSES = (0.02, 0.13)
"""Seconds before a call, and before a round: it ends with NumPy, and OpenBLAS's threads spin for 120 ms more."""
TOLERANCE = 1e-4
Call = Callable[[], tuple[Any, ...]]


def softmax_backward(a: NDArray, da: NDArray) -> NDArray:
    """dS = A o (dA - rowsum(A o dA))."""
    ds: NDArray = a * (da - (a * da).sum(-1, keepdims=True))
    return ds


def dense(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    dout: NDArray,
    hidden: NDArray | None = None,
    dscores: Callable[[NDArray, NDArray], NDArray] = softmax_backward,
) -> tuple[NDArray, ...]:
    """out, dq, dk and dv by the formulas, as one writes them in NumPy.

    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 3, 4))
    >>> relative_error(dense(q, k, v, dout)[2], attngrad.vjp(q, k, v)[1](dout).k) < 1e-14
    True
    """
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = scale * (q @ k.swapaxes(-1, -2))
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    da = dout @ v.swapaxes(-1, -2)
    ds = dscores(a, da)
    return a @ v, scale * (ds @ k), scale * (ds.swapaxes(-1, -2) @ q), a.swapaxes(-1, -2) @ dout


def _numpy(x: NDArray) -> Call:
    q, k, v, dout = x
    hidden = ~np.tri(x.shape[-2], dtype=bool)
    return lambda: dense(q, k, v, dout, hidden)


def _ours(x: NDArray) -> Call:
    q, k, v, dout = x

    def call() -> tuple[Any, ...]:
        out, pullback = attngrad.vjp(q, k, v, causal=True)
        return out, *pullback(dout)[:3]

    return call


def _torch(x: NDArray) -> Call:
    import torch

    q, k, v = (torch.from_numpy(a).requires_grad_() for a in x[:3])
    dout = torch.from_numpy(x[3])

    def call() -> tuple[Any, ...]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    return call


def _load() -> list[str]:
    """A remark where other programs keep at least half of the processors busy."""
    load, count = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    return [f"Other programs are running (load {load:.1f}): the ratios say little."] if load > 0.5 * count else []


def measure(seed: int = 0) -> tuple[dict[str, float], list[str]]:
    """Median seconds of each; remarks on a busy machine, and on each that could not run or was wrong."""
    x = np.random.default_rng(seed).standard_normal((4, *SHAPE)).astype(np.float32)
    makers = {"attngrad": _ours}
    if find_spec("torch") is not None:
        makers["torch SDPA"] = _torch
    makers["NumPy, dense"] = _numpy
    calls: dict[str, Call] = {}
    remarks = _load()
    truth: tuple[Any, ...] = ()
    for name, make in makers.items():
        try:
            call = make(x)
            found = call()
        except (ImportError, OSError, RuntimeError) as failure:  # a torch that is there and does not load
            remarks.append(f"{name}: {failure}".splitlines()[0])
            continue
        truth = truth or found
        error = max(relative_error(np.asarray(a), np.asarray(b)) for a, b in zip(found, truth, strict=True))
        if error < TOLERANCE:
            calls[name] = call
        else:
            remarks.append(f"{name} is off by {error:.0e}; not timed")
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + SECONDS
    for turn in range(SAMPLES):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        time.sleep(PAUSES[1])
        for name, call in calls.items():
            time.sleep(PAUSES[0])
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}, remarks


def render(console: Console, seed: int = 0) -> None:
    """Print the medians, each with its bar."""
    from rich.text import Text

    from attngrad.explain.marks import print_hanging

    size = "(" + ", ".join(map(str, SHAPE)) + ")"
    told = f"Forward and backward, causal, float32, {size}, {attngrad.get_num_threads()} threads; medians."
    print_hanging(Text(), Text(told), console)
    console.print()
    medians, remarks = measure(seed)
    full, ours = "#" if console.options.ascii_only else "█", medians["attngrad"]
    slowest = max(medians.values())
    for name, seconds in medians.items():
        label = f"{name:<12} {seconds * 1e3:7.1f} ms  "
        ratio = "" if name == "attngrad" else f" {seconds / ours:.1f}x"
        bar = max(1, round((min(console.width, 100) - len(label) - 7) * seconds / slowest))
        console.print(Text.assemble(label, (full * bar, "green" if name == "attngrad" else "dim"), ratio))
    for remark in remarks:
        print_hanging(Text(), Text(remark, "dim"), console)
