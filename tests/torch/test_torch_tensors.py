"""Tensors as they come to the PyTorch bridge: every dtype, any stride, no copies, empty axes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attngrad
import attngrad.torch as bridge
from attngrad.backends import cpu
from attngrad.testing import rms_error, rounding_bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_gives_what_the_numpy_functions_give(dtype):
    from attngrad.torch._tensors import to_array

    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3, 5, 4, generator=generator).to(dtype) for _ in range(4))
    bias = torch.randn(3, 1, 5, generator=generator).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out, lse = bridge.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    assert out.dtype is dtype
    assert lse.dtype is (torch.float32 if dtype.itemsize == 2 else dtype)
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    assert all(g.dtype is dtype for g in grads)

    arrays = [to_array(x) for x in (q, k, v, bias)]
    (expected, expected_lse), pullback = attngrad.vjp(*arrays[:3], bias=arrays[3], causal=True, return_lse=True)
    expected_grads = pullback(to_array(dout), np.ones_like(expected_lse))
    for x, y in zip((out, lse, *grads), (expected, expected_lse, *expected_grads[:4]), strict=True):
        assert np.array_equal(to_array(x), y)
    t = torch.randn(2, 3, 5, 4, generator=generator).to(dtype)
    assert torch.func.jvp(lambda q: bridge.attention(q, k.detach(), v.detach()), (q.detach(),), (t,))[1].dtype is dtype


def test_sixteen_bit_double_backward_is_within_the_rounding_bound():
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(2, 3, 6, 4, generator=generator).to(torch.float16) for _ in range(5)]

    def second(dtype, attention):
        q, k, v, dout, u = (x.to(dtype).requires_grad_() for x in wide)
        (dq,) = torch.autograd.grad(attention(q, k, v), q, dout, create_graph=True)
        return [g.detach().numpy() for g in torch.autograd.grad(dq, (q, k, v, dout), u)]

    actual, truth = second(torch.float16, bridge.attention), second(torch.float64, bridge.attention)
    naive = second(torch.float16, lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v)
    for a, t, n in zip(actual, truth, naive, strict=True):
        assert a.dtype == np.float16
        assert rms_error(a, t) <= rounding_bound(n, t, 2.0**-10)


def test_float32_bias_and_sinks_beside_bfloat16_keep_their_dtype():
    q = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    bias, sinks = torch.randn(3, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    bridge.attention(q, q, q, bias=bias, sinks=sinks).sum().backward()
    assert q.grad.dtype is torch.bfloat16
    assert bias.grad.dtype is sinks.grad.dtype is torch.float32


def test_nothing_is_copied_in_or_out(monkeypatch):
    seen = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda x, o, **how: seen.append((x, forward(x, o, **how))) or seen[-1][1])
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(2, 5, 3, 2, 8).to(dtype)  # (batch, tokens, q k v, heads, features)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
        out = bridge.attention(q, k, v, mask=torch.ones(5, 5, dtype=torch.bool))
        x, (array, *_) = seen[-1]
        assert [a.ctypes.data for a in (x.q, x.k, x.v)] == [t.data_ptr() for t in (q, k, v)]
        assert out.data_ptr() == array.ctypes.data


def test_gradients_of_any_stride_and_negative_bits_are_read_right():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = bridge.attention(q, q, q)
    ones = torch.ones_like(out)
    (expected,) = torch.autograd.grad(out, q, ones, retain_graph=True)
    (expanded,) = torch.autograd.grad(out.sum(), q, retain_graph=True)  # strides of zero
    (strided,) = torch.autograd.grad(out, q, torch.ones(4, 3, 2, dtype=torch.float64).permute(2, 1, 0))
    assert torch.equal(expected, expanded)
    assert torch.equal(expected, strided)

    for dtype in (torch.float64, torch.float32):
        negative = (
            torch.randn(2, 3, 4, dtype=torch.complex128 if dtype is torch.float64 else torch.complex64).conj().imag
        )
        assert negative.is_neg()
        plain = negative.resolve_neg().clone()
        assert torch.equal(bridge.attention(negative, negative, negative), bridge.attention(plain, plain, plain))


def test_empty_and_two_axis_inputs():
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        q = torch.randn(shape, requires_grad=True)
        out = bridge.attention(q, q, q)
        assert out.shape == shape
        out.sum().backward()
        assert q.grad.shape == shape
    q = torch.randn(3, 4, requires_grad=True)
    out, lse = bridge.attention(q, q, q, return_lse=True, sinks=torch.zeros(1))
    assert out.shape == (3, 4)
    assert lse.shape == (3,)


# --- errors ---------------------------------------------------------------------------------------------------------

Q = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (TypeError, "q must be a torch.Tensor; got ndarray", lambda: bridge.attention(np.zeros((2, 3, 4)), Q, Q)),
        (TypeError, "mask must be a torch.Tensor", lambda: bridge.attention(Q, Q, Q, mask=np.ones((3, 3), bool))),
        (ValueError, "k must be on the device of q, meta; got cpu", lambda: bridge.attention(Q.to("meta"), Q, Q)),
        (TypeError, "must be a strided tensor", lambda: bridge.attention(Q.to_sparse(), Q, Q)),
        (TypeError, "must have dtype float64", lambda: bridge.attention(Q.int(), Q.int(), Q.int())),
        (TypeError, "must have dtype float64", lambda: bridge.attention(*(Q.to(torch.complex64),) * 3)),
        (TypeError, "k must have the dtype of q", lambda: bridge.attention(Q, Q.double(), Q)),
        (ValueError, "k must have 4 features", lambda: bridge.attention(Q, Q[..., :2], Q)),
        (ValueError, "at least 2 axes", lambda: bridge.attention(Q[0, 0], Q[0, 0], Q[0, 0])),
        (TypeError, "Did you mean 'causal'", lambda: bridge.attention(Q, Q, Q, casual=True)),
        (TypeError, "causal must be True or False", lambda: bridge.attention(Q, Q, Q, causal=[1])),
        (ValueError, "seed must be given", lambda: bridge.attention(Q, Q, Q, dropout=0.5)),
        (TypeError, "seed must be an integer or an int64", lambda: bridge.attention(Q, Q, Q, dropout=0.5, seed=Q)),
        (TypeError, "segments must be a pair", lambda: bridge.attention(Q, Q, Q, segments=Q)),
        (TypeError, "offset must be an integer", lambda: bridge.attention(Q, Q, Q, offset="1")),
        (ValueError, "offset must be within", lambda: bridge.attention(Q, Q, Q, offset=2**62)),
        (ValueError, "window must have sides >= 0", lambda: bridge.attention(Q, Q, Q, window=(-1, 0))),
        (ValueError, "sinks must have shape", lambda: bridge.attention(Q, Q, Q, sinks=torch.zeros(3))),
        (TypeError, "return_lse must be True or False", lambda: bridge.attention(Q, Q, Q, return_lse=1)),
    ],
)
def test_a_mistake_is_told_what_it_is(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
