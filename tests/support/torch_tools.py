"""What the tests of the PyTorch bridge share: a case as a function of its differentiable inputs, ours and dense."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attngrad.torch as bridge
import torch_dense
from attngrad.testing import relative_error
from cases import EVERYTHING, SINGLES, Case, Shape, label

SMALL = Shape((2,), 2, 1, 2, 3, 2, 1)
GRID = [*SINGLES, EVERYTHING, ("causal", "bias", "sinks"), ("mask", "softcap", "bias of a head")]


def grid(test):
    return pytest.mark.parametrize("names", GRID, ids=label)(test)


def problem(case: Case, return_lse: bool = True):
    """The differentiable inputs as leaves, and attention as a function of them."""
    options = dict(case.options)
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)
    given = {"q": case.q, "k": case.k, "v": case.v, "bias": bias, "sinks": sinks}
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in given.items() if x is not None}
    fixed = {}
    for name, value in options.items():
        if name == "segments":
            value = tuple(torch.tensor(ids) for ids in value)
        elif isinstance(value, np.ndarray):
            value = torch.tensor(value)
        fixed[name] = value

    def function(*inputs):
        named = dict(zip(leaves, inputs, strict=True))
        q, k, v = named.pop("q"), named.pop("k"), named.pop("v")
        out = bridge.attention(q, k, v, **named, **fixed, return_lse=return_lse)
        if return_lse:  # the lse of a row that sees nothing is -inf, which finite differences cannot take
            out = (out[0], torch.where(out[1] == -torch.inf, 0.0, out[1]))
        return out

    return function, tuple(leaves.values())


def dense(case: Case):
    """The same function as ``problem``'s, in plain PyTorch."""
    options = dict(case.options)
    names = [name for name in ("bias", "sinks") if options.pop(name, None) is not None]

    def function(q, k, v, *rest):
        out, lse = torch_dense.attention(q, k, v, **dict(zip(names, rest, strict=True)), **options)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return function


def finite(case: Case) -> Case:
    """No -inf in the bias: gradcheck perturbs every entry by finite differences, and -inf + eps is no number."""
    if case.options.get("bias") is not None:
        bias = case.options["bias"]
        case.options["bias"] = np.where(np.isinf(bias), 0.0, bias)
    return case


def close(actual, expected, bound=1e-11):
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a.detach().numpy(), b.detach().numpy()) < bound


def directions(inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in inputs)
