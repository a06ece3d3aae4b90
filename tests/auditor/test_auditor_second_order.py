"""Second order that is silently wrong is found and named, in PyTorch and in JAX; what raises when asked stays right."""

import jax
import jax.numpy as jnp
import pytest
import torch

import attngrad.jax
import attngrad.torch
from tiers import first, only


def weights_of(q, k):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)


def gradients(q, k, v, a, dout, out=None):
    """By the formulas; delta from ``out``, or where that is None from A and dA."""
    da = dout @ v.mT
    ds = a * (da - ((a * da) if out is None else (dout * out)).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return ds @ k, ds.mT @ q, a.mT @ dout


class Recomputed(torch.autograd.Function):
    """Everything is computed again in the backward, in operations that have a derivative: right in every order."""

    @staticmethod
    def forward(q, k, v):
        return weights_of(q, k) @ v

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, dout):
        q, k, v = ctx.saved_tensors
        return gradients(q, k, v, weights_of(q, k), dout)

    @staticmethod
    def jvp(ctx, q_dot, k_dot, v_dot):
        q, k, v = ctx.saved_tensors
        a = weights_of(q, k)
        s_dot = (q_dot @ k.mT + q @ k_dot.mT) / q.shape[-1] ** 0.5
        return (a * (s_dot - (a * s_dot).sum(-1, keepdim=True))) @ v + a @ v_dot


class WithoutGraph(Recomputed):
    """As the interfaces of fused kernels have it."""

    @staticmethod
    def backward(ctx, dout):
        with torch.no_grad():
            return Recomputed.backward(ctx, dout)


class Once(Recomputed):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return Recomputed.backward(ctx, dout)


class Raises(Recomputed):
    @staticmethod
    def backward(ctx, dout):
        if dout.requires_grad:
            raise NotImplementedError("no double backward")
        return Recomputed.backward(ctx, dout)


class DetachedTangent(Recomputed):
    @staticmethod
    def jvp(ctx, *tangents):
        return Recomputed.jvp(ctx, *tangents).detach()


def saving(what, out_in_ctx, delta_from_out):
    """A Function that saves lse, or the weights, or neither; out as an output, or as a constant."""

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            scores = q @ k.mT / q.shape[-1] ** 0.5
            lse = torch.logsumexp(scores, -1, keepdim=True)
            a = torch.exp(scores - lse)
            out = a @ v
            ctx.out = out.clone() if out_in_ctx else None
            ctx.save_for_backward(q, k, v, lse if what == "lse" else a, out)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, saved, out = ctx.saved_tensors
            a = saved if what == "weights" else weights_of(q, k)
            if what == "lse":
                a = torch.exp(q @ k.mT / q.shape[-1] ** 0.5 - saved)
            out = ctx.out if out_in_ctx else out
            return gradients(q, k, v, a, dout, out if delta_from_out else None)

    return Saving.apply


CONSTANT = [(what, kept, by) for what in ("lse", "weights") for kept in (False, True) for by in (True, False)]
CONSTANT.append(("nothing", True, True))


@pytest.mark.parametrize("effort", first(1, ["quick", "default"]))
def test_gradients_without_a_graph_are_a_fault(effort):
    report = attngrad.torch.audit(WithoutGraph.apply, effort=effort)
    assert report.mistakes == ("detached-second-order",), report
    assert {s.name for s in report.stages if not s.ok} == {"dq_dot", "dk_dot", "dv_dot"}


@pytest.mark.parametrize("fn", [Once, Raises], ids=lambda f: f.__name__)
def test_what_raises_when_it_is_asked_is_right_and_said_to_raise(fn):
    report = attngrad.torch.audit(fn.apply, effort="quick")
    assert report.ok, report
    note = next(f for f in report.findings if f.name == "double backward")
    assert "it raises, so nothing is silently wrong" in note.text
    assert ("torch.autograd.grad to chosen inputs goes past it" in note.text) == (fn is Once)
    assert not note.fault


def test_once_differentiable_is_silently_wrong_under_autograd_grad_as_the_note_says():
    def penalty(fn):
        q, k, v = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        [dq] = torch.autograd.grad(fn(w * q, w * k, w * v).square().sum(), q, create_graph=True)
        return dq.square().sum(), w

    values = [torch.autograd.grad(*penalty(fn.apply))[0].item() for fn in (Recomputed, Once)]
    assert values[0] != pytest.approx(values[1])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        penalty(Once.apply)[0].backward()


@pytest.mark.parametrize(("what", "kept", "by"), only(CONSTANT[:3], CONSTANT))
def test_an_intermediate_that_is_a_constant_to_autograd_is_named(what, kept, by):
    report = attngrad.torch.audit(saving(what, kept, by), effort="quick")
    assert report.mistakes == ("constant-lse-second-order",), report
    assert all(s.ok for s in report.stages if s.name in ("out", "dq", "dk", "dv"))


class MaskForgotten(torch.autograd.Function):
    """The backward forgets the causal mask, and takes the saved log-sum-exp for a constant."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            rows, columns = scores.shape[-2:]
            scores = scores.masked_fill(~torch.ones(rows, columns, dtype=bool).tril(columns - rows), -torch.inf)
        ctx.lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.exp(scores - ctx.lse) @ v
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out = ctx.saved_tensors
        return *gradients(q, k, v, torch.exp(q @ k.mT / q.shape[-1] ** 0.5 - ctx.lse), dout, out), None


def test_a_fault_of_second_order_does_not_hide_one_of_first_order_under_an_option():
    def attend(q, k, v, causal=False):
        return MaskForgotten.apply(q, k, v, causal)

    report = attngrad.torch.audit(attend, effort="quick")
    assert report.mistakes == ("mask-ignored-in-backward", "constant-lse-second-order"), report
    assert [s.name for s in report.stages if not s.ok] == ["dq", "dk", "dv", "dq_dot", "dk_dot"]
    assert report.first == "dq"
    assert "tangents and second order with options (wrong without)" in report.untried


def test_a_detached_tangent_is_found_by_reverse_over_forward():
    report = attngrad.torch.audit(DetachedTangent.apply, effort="quick")
    assert report.mistakes == ("detached-tangent",), report
    assert next(s for s in report.stages if s.name == "out_dot").ok


def test_functions_that_compute_again_or_save_outputs_are_right_in_every_order():
    for fn in (Recomputed.apply, saving("nothing", False, True)):
        report = attngrad.torch.audit(fn, effort="quick")
        assert report.ok, report
    assert {"dq_mixed", "dk_mixed", "dv_mixed"} <= {
        s.name for s in attngrad.torch.audit(Recomputed.apply, effort="quick").stages
    }


# --- JAX -------------------------------------------------------------------------------------------------------------


def jax_attention(q, k, v):
    return jax.nn.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def custom_vjp(stop=""):
    """custom_vjp with what the backward reads (``lse``) or gives (``all``) behind stop_gradient."""

    @jax.custom_vjp
    def f(q, k, v):
        return jax_attention(q, k, v)

    def forward(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        lse = jax.nn.logsumexp(scores, -1, keepdims=True)
        out = jnp.exp(scores - lse) @ v
        return out, (q, k, v, out, jax.lax.stop_gradient(lse) if stop == "lse" else lse)

    def backward(saved, dout):
        q, k, v, out, lse = saved
        a = jnp.exp(q @ k.mT / q.shape[-1] ** 0.5 - lse)
        ds = a * (dout @ v.mT - (dout * out).sum(-1, keepdims=True)) / q.shape[-1] ** 0.5
        found = ds @ k, ds.mT @ q, a.mT @ dout
        return tuple(map(jax.lax.stop_gradient, found)) if stop == "all" else found

    f.defvjp(forward, backward)
    return f


def custom_jvp():
    """Right tangents whose coefficients are constants."""

    @jax.custom_jvp
    def f(q, k, v):
        return jax_attention(q, k, v)

    @f.defjvp
    def _(primals, tangents):
        fixed = tuple(map(jax.lax.stop_gradient, primals))
        return jax_attention(*primals), jax.jvp(jax_attention, fixed, tangents)[1]

    return f


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (custom_vjp("all"), ("detached-second-order",)),
        (custom_vjp("lse"), ("constant-lse-second-order",)),
        pytest.param(custom_vjp(), (), marks=pytest.mark.thorough),
        pytest.param(custom_jvp(), ("detached-second-order",), marks=pytest.mark.thorough),
    ],
    ids=["all", "lse", "right", "custom_jvp"],
)
def test_second_order_of_jax_rules(fn, named):
    report = attngrad.jax.audit(fn, effort="quick")
    assert report.mistakes == named, report
    assert report.ok == (not named)
