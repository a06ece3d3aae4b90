"""Attention right after a matrix product of the framework, over its time back to back.

    python -m benchmarks.after [--frameworks torch numpy jax]

After its own work a framework's workers spin; whoever has a second set of threads has to fight them for the cores. Each
framework runs in a process of its own, with workers of attngrad's own and with borrowed (torch) or shared (NumPy) ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SHAPES = (((2, 6, 197, 64), False), ((1, 12, 512, 64), True), ((1, 8, 1024, 64), True))
WAYS: dict[str, dict[str, dict[str, str]]] = {
    "torch": {"own": {"ATTNGRAD_THREADS": "own"}, "borrowed": {}},
    "numpy": {"own": {}, "shared": {"ATTNGRAD_SHARE_THREADS": "1"}},
    "jax": {"own": {}},
}
CALLS = 80
Call = Callable[[], Any]


def torch_calls(shape: tuple[int, ...], causal: bool) -> tuple[Call, Call]:
    """Attention, and a product, of PyTorch."""
    import torch

    import attngrad.torch

    q, k, v = torch.randn(3, *shape)
    a, b = torch.randn(512, 768), torch.randn(768, 768)
    return lambda: attngrad.torch.attention(q, k, v, causal=causal), lambda: torch.mm(a, b)


def numpy_calls(shape: tuple[int, ...], causal: bool) -> tuple[Call, Call]:
    """Attention, and a product, of NumPy."""
    import numpy as np

    import attngrad

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, *shape), dtype=np.float32)
    a, b = rng.standard_normal((512, 768), dtype=np.float32), rng.standard_normal((768, 768), dtype=np.float32)
    return lambda: attngrad.attention(q, k, v, causal=causal), lambda: a @ b


def jax_calls(shape: tuple[int, ...], causal: bool) -> tuple[Call, Call]:
    """Attention, and a product, of JAX, compiled and awaited."""
    import jax

    import attngrad.jax

    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape))
    a, b = jax.random.normal(jax.random.key(1), (512, 768)), jax.random.normal(jax.random.key(2), (768, 768))
    attend = jax.jit(lambda q, k, v: attngrad.jax.attention(q, k, v, causal=causal))
    product = jax.jit(lambda a, b: a @ b)
    return lambda: attend(q, k, v).block_until_ready(), lambda: product(a, b).block_until_ready()


MAKE = {"torch": torch_calls, "numpy": numpy_calls, "jax": jax_calls}


def median_after(call: Call, before: Call) -> float:
    """The median milliseconds of ``call``, each right after ``before``."""
    times = []
    for _ in range(CALLS):
        before()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(framework: str, way: str) -> None:
    """Print the rows of one process."""
    for shape, causal in SHAPES:
        attend, product = MAKE[framework](shape, causal)
        for _ in range(20):
            attend(), product()
        alone, after = median_after(attend, attend), median_after(attend, product)
        label = f"{','.join(map(str, shape))}{' causal' if causal else ''}"
        print(f"{framework:8}{way:10}{label:20}{alone:10.3f}{after:10.3f}{after / alone:8.2f}", flush=True)


def main() -> None:
    """One process per framework and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--one", nargs=2, metavar=("FRAMEWORK", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return measure(*arguments.one)
    print(f"{'':8}{'workers':10}{'shape':20}{'alone ms':>10}{'after ms':>10}{'ratio':>8}")
    for framework in arguments.frameworks:
        for way, environment in WAYS[framework].items():
            command = [sys.executable, "-m", "benchmarks.after", "--one", framework, way]
            subprocess.run(command, env=os.environ | environment, check=True)  # noqa: S603
    return None


if __name__ == "__main__":
    main()
