"""Random shapes, strides, dtypes, threads, instruction sets and options: the kernels against the reference.

Run by `make fuzz`. A failure prints the number that makes it again: `python tests/fuzz.py --only NUMBER`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ml_dtypes
import numpy as np

import attngrad
from attngrad import _native, reference
from attngrad._options import Tangents
from attngrad.testing import rms_error, rounding_bound
from cases import OPTIONS, Case, Shape, make

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 130, 193)
WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 48, 64, 65, 80)


def draw(number: int) -> tuple[Case, np.random.Generator]:
    """The case of this number."""
    rng = np.random.default_rng([number, 17])
    key_heads = int(rng.integers(1, 4))
    shape = Shape(
        tuple(int(n) for n in rng.integers(1, 3, rng.integers(0, 3))),
        key_heads * int(rng.integers(1, 5)),
        key_heads,
        *(int(rng.choice(EDGES)) for _ in range(2)),
        *(int(rng.choice(WIDTHS)) for _ in range(2)),
    )
    names = tuple(rng.choice(list(OPTIONS), rng.integers(0, 6), replace=False))
    c = make(names, shape, number)
    if "bias" in c.options and rng.random() < 0.5:  # broadcast along random axes
        axes = rng.random(c.options["bias"].ndim) < 0.5
        c.options["bias"] = c.options["bias"][tuple(slice(0, 1) if cut else slice(None) for cut in axes)]
    c.t = Tangents()
    if rng.random() < 0.2:
        c.q = c.q * 10.0 ** rng.integers(0, 4)
    return c, rng


def scatter(x: Any, rng: np.random.Generator) -> Any:
    """The same values at other strides: permuted axes, gaps, reversed axes, read-only."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        return x
    order = rng.permutation(x.ndim) if rng.random() < 0.5 else np.arange(x.ndim)
    steps = rng.choice([1, 1, 2, -1], x.ndim)
    wide = np.zeros(
        [int(n) * abs(int(s)) for n, s in zip(np.array(x.shape)[order], steps[order], strict=True)], x.dtype
    )
    view = wide.transpose(np.argsort(order))[tuple(slice(None, None, int(s)) for s in steps)]
    view[...] = x
    view.flags.writeable = False
    return view


def results(c: Case, module: Any) -> dict[str, Any]:
    """Out, lse and the gradients by name."""
    (out, lse), pullback = module.vjp(*c.qkv, return_lse=True, **c.options)
    grads = pullback(c.dout, c.dlse)
    named = {"out": out, "lse": lse, "out alone": module.attention(*c.qkv, **c.options)} | {
        f"d{n}": g for n, g in grads._asdict().items()
    }
    return {n: x for n, x in named.items() if x is not None}


def check(number: int) -> str | None:
    """What is wrong with case ``number``, or None."""
    c, rng = draw(number)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    _native.set_isa(str(rng.choice(_native.isa_names())))
    attngrad.set_num_threads(int(rng.integers(1, 5)))
    c = c.cast(dtype)
    moved = Case(
        c.shape,
        {n: scatter(x, rng) if n in ("mask", "bias") else x for n, x in c.options.items()},
        *(scatter(x, rng) for x in (*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot)),
        c.t,
    )
    got = results(moved, attngrad)
    narrow = c.cast(dtype)
    narrow.dlse = c.dlse.astype(dtype)
    with np.errstate(all="ignore"):
        naive, truth = results(narrow, reference), results(c.cast(np.longdouble), reference)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, x in got.items():
        finite = np.isfinite(truth[name])
        if not np.isfinite(naive[name][finite].astype(np.float64)).all():
            continue  # out of the range of the dtype
        if not np.array_equal(finite, np.isfinite(x.astype(np.float64))):
            return f"{name} is finite elsewhere"
        a, b, n = x[finite], truth[name][finite], naive[name][finite]
        bound = rounding_bound(n, b, eps)
        if rms_error(a, b) > bound:
            return f"{name} is off by {rms_error(a, b):.1e}, bound {bound:.1e}"
    return None


def main() -> None:
    """Fuzz for a while; exit 1 at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    number = arguments.first if arguments.only is None else arguments.only
    while True:
        problem = check(number)
        if problem:
            c, _ = draw(number)
            raise SystemExit(f"case {number}: {problem}\n  {c.shape}, options {sorted(c.options)}")
        number += 1
        if arguments.only is not None or time.monotonic() > end:
            break
    print(f"{number - arguments.first} cases, nothing found")


if __name__ == "__main__":
    main()
