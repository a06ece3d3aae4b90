"""Accuracy beside PyTorch's own kernels: averaged over shapes and options, no worse, in every dtype."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attngrad
import instruction_sets
from attngrad import _native, reference
from attngrad.testing import rms_error
from tiers import first

DTYPES = {
    "float64": (np.float64, torch.float64),
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
}
# heads, key heads, queries, keys, features
SHAPES = [(2, 2, 10, 10, 32), (2, 2, 64, 64, 64), (2, 1, 33, 70, 80), (1, 1, 200, 200, 64)]
KINDS = ["full", "causal", "mask", "bias", "large logits", "values with a mean"]


def to_torch(x: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(x.astype(np.float64)).to(dtype)  # exact: float64 holds every number of the narrower dtypes


def errors(kind: str, shape: tuple[int, ...], name: str) -> dict[str, tuple[float, float]]:
    """The RMS errors of out, dq, dk and dv: ours and torch's."""
    ours, theirs = DTYPES[name]
    h, hk, t, s, d = shape
    rng = np.random.default_rng([KINDS.index(kind), SHAPES.index(shape)])
    q, k, v, dout = (rng.standard_normal(n) for n in ((1, h, t, d), (1, hk, s, d), (1, hk, s, d), (1, h, t, d)))
    q *= 60.0 if kind == "large logits" else 1.0
    v += 100.0 if kind == "values with a mean" else 0.0
    q, k, v, dout = (x.astype(ours) for x in (q, k, v, dout))
    options: dict[str, Any] = {}
    given: dict[str, Any] = {"enable_gqa": h != hk}
    if kind == "causal":
        options, given["is_causal"] = {"causal": True, "offset": 0}, True
    if kind == "mask":
        mask = rng.random((t, s)) < 0.5
        mask[:, 0] = True  # torch gives NaN for a row that sees nothing
        options, given["attn_mask"] = {"mask": mask}, torch.tensor(mask)
    if kind == "bias":
        bias = rng.standard_normal((1, h, t, s)).astype(ours)
        options, given["attn_mask"] = {"bias": bias}, to_torch(bias, theirs)

    wide = {n: x.astype(np.longdouble) if n == "bias" else x for n, x in options.items()}
    out, pullback = reference.vjp(*(x.astype(np.longdouble) for x in (q, k, v)), **wide)
    truth = (out, *pullback(dout.astype(np.longdouble))[:3])
    out, pullback = attngrad.vjp(q, k, v, **options)
    found = (out, *pullback(dout)[:3])
    leaves = [to_torch(x, theirs).requires_grad_() for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*leaves, **given)
    peers = (y.detach(), *torch.autograd.grad(y, leaves, to_torch(dout, theirs)))
    return {
        n: (rms_error(a, x), rms_error(b.to(torch.float64).numpy(), x))
        for n, a, b, x in zip(("out", "dq", "dk", "dv"), found, peers, truth, strict=True)
    }


def mean_ratios(name: str) -> dict[str, float]:
    """Our error over torch's: the geometric mean over all cases, by result."""
    logs: dict[str, list[float]] = {}
    for kind in KINDS:
        for shape in SHAPES:
            for result, (ours, theirs) in errors(kind, shape, name).items():
                logs.setdefault(result, []).append(np.log(ours / theirs))
    return {result: float(np.exp(np.mean(x))) for result, x in logs.items()}


@pytest.mark.parametrize("isa", instruction_sets.params([instruction_sets.ALL[0], "avx2-tiles"]))
@pytest.mark.parametrize("name", first(1, ["bfloat16", "float64", "float32", "float16"]))
def test_on_average_no_result_errs_more_than_that_of_torch(name, isa):
    # In a process of its own, without AMX for torch: on some virtual machines it dies of it.
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, name, isa]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)  # noqa: S603
    means = json.loads(done.stdout)
    assert set(means) == {"out", "dq", "dk", "dv"}
    assert max(means.values()) <= 1.0, means


if __name__ == "__main__":
    _native.set_isa(sys.argv[2])
    print(json.dumps(mean_ratios(sys.argv[1])))
