"""What the bridges cost: one forward and backward pass through PyTorch and JAX, beside the same through NumPy.

    python -m benchmarks.bridges [--json FILE]

Every contender is verified against the NumPy call, then they take turns, sample by sample, in one process. The overhead
is the difference of the medians (and of the best samples, which a busy machine disturbs less) from the NumPy call, in
microseconds. Beside it "jax alone", a compiled function that adds 1 to each of the four arrays: what a call with such
results, in fresh memory every time, takes in JAX itself. The ratio to torch is torch's own median over that of the
contender: above 1, it is faster. Run it with the machine at rest, and with one thread (OMP_NUM_THREADS=1
ATTNGRAD_NUM_THREADS=1) for the overhead alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

import attngrad
import attngrad.jax
import attngrad.torch
from benchmarks import machine

SHAPES = ((1, 1, 4, 8), (32, 4, 10, 32), (4, 8, 128, 64))
BOUNDS = {"attngrad.torch": 60.0, "attngrad.torch sdpa": 60.0, "attngrad.jax": 150.0}  # microseconds over NumPy
ROUNDS = 150
ALONE = "jax alone"


def contenders(shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Functions of no argument that give ``out, dq, dk, dv``."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, *shape), dtype=np.float32)
    tensors = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v)]
    tensor_dout = torch.from_numpy(dout)
    arrays = [jnp.asarray(x) for x in (q, k, v, dout)]

    def by_numpy() -> Any:
        out, pullback = attngrad.vjp(q, k, v)
        return out, *pullback(dout)[:3]

    def by_torch(function: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            out = function(*tensors)
            return out, *torch.autograd.grad(out, tensors, tensor_dout)

        return run

    @jax.jit
    def compiled(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attngrad.jax.attention, q, k, v)
        return out, *pullback(dout)

    @jax.jit
    def alone(*arrays: Any) -> Any:
        return tuple(x + 1 for x in arrays)

    return {
        "numpy": by_numpy,
        "attngrad.torch": by_torch(attngrad.torch.attention),
        "attngrad.torch sdpa": by_torch(attngrad.torch.scaled_dot_product_attention),
        "torch": by_torch(functional.scaled_dot_product_attention),
        "attngrad.jax": lambda: jax.block_until_ready(compiled(*arrays)),  # type: ignore[no-untyped-call]
        ALONE: lambda: jax.block_until_ready(alone(*arrays)),  # type: ignore[no-untyped-call]
    }


def verify(runs: dict[str, Callable[[], Any]]) -> None:
    """All give what the NumPy call gives; a wrong one is not worth timing."""
    expected = [np.asarray(x) for x in runs["numpy"]()]
    for name, run in runs.items():
        if name == ALONE:
            continue
        for x, y in zip(run(), expected, strict=True):
            found = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
            if not np.allclose(found, y, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"bridges: {name} must give what NumPy gives; it is off by {np.abs(found - y).max()}.")


def measure(runs: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """Median and best of the microseconds a call, samples of some 2 ms taken in turn."""
    loops = {}
    for name, run in runs.items():
        start = time.perf_counter()
        for _ in range(20):
            run()
        loops[name] = max(1, round(0.002 / ((time.perf_counter() - start) / 20)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(loops[name]):
                run()
            samples[name].append((time.perf_counter() - start) / loops[name] * 1e6)
    gc.enable()
    return {name: (statistics.median(x), min(x)) for name, x in samples.items()}


def main() -> None:
    """Print the table; write it as JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'shape':16}{'contender':22}{'median us':>10}{'best us':>10}{'over NumPy':>12}{'best':>8}{'torch/it':>10}")
    for shape in SHAPES:
        runs = contenders(shape)
        verify(runs)
        times = measure(runs)
        for name, (median, best) in times.items():
            over = (median - times["numpy"][0], best - times["numpy"][1])
            ratio = times["torch"][0] / median
            label = "x".join(map(str, shape))
            print(f"{label:16}{name:22}{median:10.1f}{best:10.1f}{over[0]:12.1f}{over[1]:8.1f}{ratio:10.2f}")
            rows.append({"shape": shape, "contender": name, "median": median, "best": best, "over_numpy": over[0],
                         "over_numpy_best": over[1], "torch_ratio": ratio, "bound": BOUNDS.get(name)})  # fmt: skip
    if arguments.json:
        about = machine.describe(attngrad.get_num_threads()) | {"torch_threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"machine": about, "unit": "microseconds a call", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
