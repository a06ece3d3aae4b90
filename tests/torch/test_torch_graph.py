"""What autograd keeps of a call and asks of it: saved tensors, their end, and the gradients that are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import attngrad
import attngrad.torch as bridge
from attngrad.backends import cpu
from attngrad.torch import _functions


def test_gradients_are_computed_where_they_are_asked_for(monkeypatch):
    found = []
    backward = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a, **k: found.append(backward(*a, **k)) or found[-1])
    given = {"q": torch.randn(2, 3, 4), "k": torch.randn(2, 3, 4), "v": torch.randn(2, 3, 4)}
    given |= {"bias": torch.randn(3, 3), "sinks": torch.randn(2)}
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    every = dict(
        zip(leaves, torch.autograd.grad(bridge.attention(**leaves).sum(), tuple(leaves.values())), strict=True)
    )
    for name in leaves:
        some = {n: x if n == name else x.detach() for n, x in leaves.items()}
        (grad,) = torch.autograd.grad(bridge.attention(**some).sum(), (leaves[name],))
        assert torch.equal(grad, every[name])
        assert [n for n, g in found[-1]._asdict().items() if g is not None] == [name]


def test_inputs_are_not_written_to_and_writing_to_them_before_backward_is_noticed():
    q = torch.randn(2, 3, 4, requires_grad=True)
    k = torch.randn(2, 3, 4)
    before = k.clone()
    out = bridge.attention(q, k, k)
    assert torch.equal(k, before)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_was_kept_goes_when_the_graph_goes_and_stays_when_it_stays():
    import gc
    import weakref

    q = torch.randn(2, 3, 4, requires_grad=True)
    out = bridge.attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool), causal=True)
    node = out.grad_fn
    kept = weakref.ref(node.kept.saved[0])
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(first, second)
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), q)


def test_saved_tensor_hooks_see_all_that_is_saved():
    q = torch.randn(2, 3, 4, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
        out = bridge.attention(q, q, q)
    assert len(seen) == 6  # q, k, v, out and two numbers per row
    assert not hasattr(out.grad_fn, "kept")


def test_writing_to_the_output_does_not_spoil_the_gradient():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(bridge.attention(q, q, q), q, torch.ones(2, 3, 4, dtype=torch.float64))
    out = bridge.attention(q, q, q)
    with torch.no_grad():
        out.zero_()
    (actual,) = torch.autograd.grad(out, q, torch.ones(2, 3, 4, dtype=torch.float64))
    assert torch.equal(actual, expected)


def test_forward_ad_with_dual_tensors():
    q, t = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        out_dot = forward_ad.unpack_dual(bridge.attention(dual, q, q)).tangent
    _, expected = attngrad.jvp((q.numpy(),) * 3, (t.numpy(), None, None))
    assert np.allclose(out_dot.numpy(), expected, rtol=0, atol=1e-14)


def test_no_grad_and_detached_inputs_save_nothing(monkeypatch):
    forward = cpu.forward

    def checked(x, o, *, save):
        assert not save
        return forward(x, o, save=save)

    monkeypatch.setattr(cpu, "forward", checked)
    monkeypatch.setattr(_functions, "direct", None)
    q = torch.randn(2, 3, 4, requires_grad=True)
    for options in ({}, {"mask": torch.ones(3, 3, dtype=torch.bool)}):
        with torch.no_grad():
            assert not bridge.attention(q, q, q, **options).requires_grad
        with torch.inference_mode():
            bridge.attention(q, q, q, **options)
        bridge.attention(q.detach(), q.detach(), q.detach(), **options)


def test_a_gradient_can_be_taken_through_the_lse_alone():
    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    _, lse = bridge.attention(q, q, q, return_lse=True)
    (actual,) = torch.autograd.grad(lse.sum(), q)
    (expected,) = torch.autograd.grad(torch.logsumexp(q @ q.mT / 2, -1).sum(), q)
    assert torch.allclose(actual, expected)


def test_activation_checkpointing_repeats_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    q = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def f(q):
        return bridge.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sin()

    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(f(q).sum(), q)
    torch.manual_seed(0)
    (actual,) = torch.autograd.grad(checkpoint(f, q, use_reentrant=False).sum(), q)
    assert torch.equal(actual, expected)
