"""The blocked backend in float32, bfloat16 and float16: every pass and option by the rounding rule of the kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from attngrad import backends
from attngrad.backends.blocked import blocks
from attngrad.core.binding import bind
from attngrad.core.operands import Gradients, Tangents
from attngrad.torch._tensors import to_array, to_tensor
from cases import EVERYTHING, SINGLES, Shape, label, make
from passes import assert_within_the_rounding_bound
from tiers import only

blocked = backends.get("blocked")
SHAPE = Shape((2,), 4, 2, 9, 13, 7, 5)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
ROWS = [(dtype, names) for dtype in DTYPES for names in (*SINGLES, EVERYTHING)]
TOLD = [(dtype, names) for dtype in DTYPES for names in ((), ("causal",), ("bias",), ("sinks",), EVERYTHING)]


def tensor(x):
    return to_tensor(x) if isinstance(x, np.ndarray) else x


def arrays(values):
    return [to_array(y) if isinstance(y, torch.Tensor) else y for y in values]


class Blocked:
    """The public functions of NumPy by the backend: what ``all_passes`` calls, with lse."""

    @staticmethod
    def bound(q, k, v, options):
        x, o, _ = bind("attention", q, k, v, options)
        return type(x)(*(tuple(map(tensor, y)) if isinstance(y, tuple) else tensor(y) for y in x)), o

    @classmethod
    def vjp(cls, q, k, v, *, return_lse, **options):
        x, o = cls.bound(q, k, v, options)
        out, lse, residuals = blocked.forward(x, o)

        def pullback(dout, dlse):
            return Gradients(*arrays(blocked.backward(x, o, residuals, tensor(dout), tensor(dlse))))

        return tuple(arrays((out, lse))), pullback

    @classmethod
    def jvp(cls, qkv, dots, *, return_lse, bias_dot, sinks_dot, **options):
        x, o = cls.bound(*qkv, options)
        found = arrays(blocked.forward_tangent(x, o, Tangents(*map(tensor, (*dots, bias_dot, sinks_dot)))))
        return tuple(found[:2]), tuple(found[2:])

    @classmethod
    def hvp(cls, qkv, dots, dout, dout_dot, *, dlse, dlse_dot, bias_dot, sinks_dot, **options):
        x, o = cls.bound(*qkv, options)
        cotangents = map(tensor, (dout, dout_dot, dlse, dlse_dot))
        found = blocked.backward_tangent(x, o, Tangents(*map(tensor, (*dots, bias_dot, sinks_dot))), *cotangents)
        return Gradients(*arrays(found.grads)), Gradients(*arrays(found.grads_dot))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BUDGET", 30000)
    monkeypatch.setattr(blocks, "_TIMES_Q", 0)


@pytest.mark.parametrize(("dtype", "names"), only(TOLD, ROWS), ids=lambda x: label(x) if isinstance(x, tuple) else None)
def test_every_pass_keeps_the_rounding_bound(dtype, names):
    assert_within_the_rounding_bound(make(names, SHAPE).cast(dtype), dtype, module=Blocked)


def test_results_are_in_the_dtypes_of_their_arguments_and_lse_is_wide():
    for dtype in DTYPES:
        c = make(("bias", "sinks"), SHAPE).cast(dtype)
        (out, lse), pullback = Blocked.vjp(*c.qkv, return_lse=True, **c.options)
        assert {x.dtype for x in (out, *pullback(c.dout, c.dlse))} == {np.dtype(dtype)}
        assert lse.dtype == np.float32
