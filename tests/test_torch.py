"""The PyTorch bridge: every derivative through autograd, torch.func and torch.compile."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch_dense
from cases import EVERYTHING, OPTIONS, SHAPES, SINGLES, Case, Shape, label, make
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional

import attngrad
import attngrad.torch as bridge
from attngrad.testing import relative_error, rms_error, rounding_bound

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


def finite(case: Case) -> Case:
    """No -inf in the bias: gradcheck perturbs every entry by finite differences, and -inf + eps is no number."""
    if case.options.get("bias") is not None:
        bias = case.options["bias"]
        case.options["bias"] = np.where(np.isinf(bias), 0.0, bias)
    return case


# --- gradcheck ------------------------------------------------------------------------------------------------------


@grid
def test_gradcheck_in_slow_mode_with_forward_ad_and_batched_gradients(names):
    function, inputs = problem(finite(make(names, SMALL)))
    assert gradcheck(
        function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True, fast_mode=False
    )


@grid
def test_gradgradcheck_with_forward_over_reverse_and_batched_gradients(names):
    function, inputs = problem(finite(make(names, SMALL)))
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


def test_gradcheck_notices_a_wrong_gradient(monkeypatch):
    from attngrad.torch import _passes

    right = _passes.backward

    def wrong(*args):
        dq, *rest = right(*args)
        return dq * 1.01, *rest

    monkeypatch.setattr(_passes, "backward", wrong)
    function, inputs = problem(make((), SMALL))
    with pytest.raises(torch.autograd.gradcheck.GradcheckError):
        gradcheck(function, inputs)
