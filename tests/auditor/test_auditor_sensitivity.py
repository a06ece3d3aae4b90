"""Small errors are seen, and right implementations pass: with every dtype, with the peers, over many seeds."""

import os
import subprocess
import sys

import autograd
import autograd.numpy as anp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attngrad
import attngrad.jax
import attngrad.torch
import planted
from attngrad import reference
from attngrad.auditor import audit
from attngrad.auditor.budget import LIMITS, Limits
from tiers import first, only

FEW, MANY = range(2), range(100)


@pytest.fixture(autouse=True)
def unshrunk(monkeypatch):
    """What is named is of interest here, not the smallest case."""
    for effort, limits in LIMITS.items():
        monkeypatch.setitem(LIMITS, effort, limits._replace(calls=0))


ALL = ["float64", "float32", "float16", "bfloat16"]


# --- small errors ----------------------------------------------------------------------------------------------------

SMALL = {"one entry": "dS_ij times 0.99", "dk times 1.001": "", "biased row": "1e-6", "one small entry": "1e-9"}


def missed(bug, seeds, effort="quick"):
    LIMITS[effort] = Limits(0, 0.0, 0, 0.0)  # seen or not: nothing need be named
    return [seed for seed in seeds if audit(planted.attention(bug), effort=effort, seed=seed).ok]


@pytest.mark.parametrize("bug", SMALL)
def test_a_small_error_is_seen(bug):
    assert missed(bug, range(5)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("bug", SMALL)
def test_a_small_error_is_seen_with_every_seed(bug):
    assert missed(bug, MANY) == []


# --- no false alarm --------------------------------------------------------------------------------------------------


def kernels(q, k, v, dout):
    out, pullback = attngrad.vjp(q, k, v)
    return (out, *pullback(dout)[:3])


def book(q, k, v, dout):
    out, pullback = reference.vjp(q, k, v)
    return (out, *pullback(dout)[:3])


def causal_kernels(q, k, v, dout, causal, bias):
    out, pullback = attngrad.vjp(q, k, v, causal=causal, bias=bias)
    grads = pullback(dout)
    return {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v, "dbias": grads.bias}


def hips(q, k, v, dout):
    group = q.shape[1] // k.shape[1]

    def f(x):
        a, b, c = x
        b, c = anp.repeat(b, group, axis=1), anp.repeat(c, group, axis=1)
        z = anp.matmul(a, anp.swapaxes(b, -1, -2)) / q.dtype.type(np.sqrt(q.shape[-1]))
        e = anp.exp(z - anp.max(z, axis=-1, keepdims=True))
        return anp.matmul(e / anp.sum(e, axis=-1, keepdims=True), c)

    pullback, out = autograd.core.make_vjp(f, autograd.builtins.tuple((q, k, v)))
    return (out, *pullback(dout))


def flash(q, k, v):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def dense(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def with_jax(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    z = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    return jax.nn.softmax(z, axis=-1) @ v


def alarms(candidate, dtype, seeds, effort, **keywords):
    audits = {flash: attngrad.torch.audit, dense: attngrad.torch.audit, with_jax: attngrad.jax.audit}
    keywords |= {"dtype": dtype, "effort": effort, "time_limit": 600.0}  # a loaded machine is no fault
    reports = (audits.get(candidate, audit)(candidate, seed=s, **keywords) for s in seeds)
    return [str(report) for report in reports if not report.ok]


NUMPY = [(f, dtype) for f in (kernels, book) for dtype in ALL] + [(hips, dtype) for dtype in ALL[:3]]
TORCH = [(f, dtype) for f in (flash, dense) for dtype in ALL if (f, dtype) != (flash, "bfloat16")]
ONCE = [(kernels, "bfloat16"), (book, "float64"), (hips, "float32"), (flash, "float32")]
"""What ``make test`` runs of them."""
IDS = lambda x: getattr(x, "__name__", str(x))  # noqa: E731


@pytest.mark.parametrize(("candidate", "dtype"), only(ONCE, NUMPY + TORCH), ids=IDS)
def test_a_right_implementation_passes(candidate, dtype):
    assert alarms(candidate, dtype, FEW, "default") == []


@pytest.mark.parametrize("dtype", first(1, ALL))
def test_a_right_implementation_passes_with_options(dtype):
    assert alarms(causal_kernels, dtype, FEW, "default", options={"causal": True, "bias": True}) == []


@pytest.mark.thorough
def test_a_right_jax_function_passes():
    assert alarms(with_jax, "float32", range(1), "quick") == []


@pytest.mark.full
@pytest.mark.parametrize(("candidate", "dtype"), NUMPY + TORCH, ids=IDS)
def test_a_right_implementation_passes_with_every_seed(candidate, dtype):
    assert alarms(candidate, dtype, MANY, "default") == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", ALL)
def test_a_right_jax_function_passes_with_every_seed(dtype):
    assert alarms(with_jax, dtype, MANY, "quick") == []


def flash_in_bfloat16(seeds, effort):
    """In a process of its own, without AMX: on some virtual machines torch's bfloat16 backward dies with it."""
    code = (
        "import tests.auditor.test_auditor_sensitivity as t\n"
        f"found = t.alarms(t.flash, 'bfloat16', range({seeds}), {effort!r})\n"
        "print(found[0] if found else 'no alarm')"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)  # noqa: S603
    return done.stdout.strip() or done.stderr[-2000:]


@pytest.mark.thorough
def test_torch_flash_in_bfloat16_passes():
    assert flash_in_bfloat16(2, "default") == "no alarm"


@pytest.mark.full
def test_torch_flash_in_bfloat16_passes_with_every_seed():
    assert flash_in_bfloat16(100, "default") == "no alarm"


@pytest.mark.parametrize("effort", first(1, ["quick", "default"]))
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_kernel_that_stores_in_16_bits_and_accumulates_in_32_passes(dtype, effort):
    def candidate(q, k, v, dout):
        wide = [x.astype(np.float32) for x in (q, k, v, dout)]
        return [x.astype(q.dtype) for x in book(*wide)]

    assert alarms(candidate, dtype, FEW, effort) == []


# --- torch and jax, where something is wrong -------------------------------------------------------------------------


def test_a_torch_function_with_a_wrong_gradient_is_named():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            a = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
            ctx.save_for_backward(q, k, v, a)
            return a @ v

        @staticmethod
        def backward(ctx, dout):
            q, k, v, a = ctx.saved_tensors
            ds = a * (dout @ v.mT)  # no row term
            return ds @ k / q.shape[-1] ** 0.5, ds.mT @ q / q.shape[-1] ** 0.5, a.mT @ dout

    report = attngrad.torch.audit(Wrong.apply, effort="quick", name="Wrong")
    assert report.mistakes == ("row-term-missing",), report
    notes = [f.text for f in report.findings if f.kind == "unsupported"]
    assert any("forward mode" in note for note in notes)


def test_torch_forward_mode_and_double_backward_are_audited():
    report = attngrad.torch.audit(dense, effort="quick")
    assert {"out_dot", "dq_dot", "dk_dot", "dv_dot"} <= {s.name for s in report.stages}
    assert report.ok, report


def test_a_silent_zero_tangent_is_a_fault():
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(q, k, v):
            return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, dout):
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            with torch.enable_grad():
                return torch.autograd.grad(Silent.forward(q, k, v), (q, k, v), dout)

        @staticmethod
        def jvp(ctx, *tangents):
            q, _, v = ctx.saved_tensors
            return torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)

    report = attngrad.torch.audit(Silent.apply, effort="quick", name="Silent")
    assert report.first == "out_dot"


def test_torch_options_are_passed_only_if_taken():
    def causal(q, k, v, is_causal=True):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    assert attngrad.torch.audit(causal, options={"causal": True, "offset": 0}, effort="quick").ok
    other = attngrad.torch.audit(causal, options={"causal": True}, effort="quick")
    assert other.ok, other
    assert "the causal mask starts at the top left corner" in other.verdict
    untold = attngrad.torch.audit(lambda q, k, v: causal(q, k, v, False), options={"causal": True}, effort="quick")
    assert "candidate must take causal; it takes (q, k, v), and its results are right for" in untold.verdict


class Tripled(torch.autograd.Function):
    """A bias whose gradient is three times what it should be."""

    @staticmethod
    def forward(ctx, bias):
        return bias.clone()

    @staticmethod
    def backward(ctx, dbias):
        return 3 * dbias


def test_the_gradient_of_a_bias_is_audited_in_torch():
    def biased(q, k, v, bias, wrong=False):
        bias = Tripled.apply(bias) if wrong else bias
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, -1) @ v

    assert attngrad.torch.audit(biased, options={"bias": True}, effort="quick").ok
    report = attngrad.torch.audit(
        lambda q, k, v, bias: biased(q, k, v, bias, True), options={"bias": True}, effort="quick"
    )
    assert report.first == "dbias"

    def constant(q, k, v, bias):
        return biased(q, k, v, bias.detach())

    report = attngrad.torch.audit(constant, options={"bias": True}, effort="quick")
    assert report.ok
    assert any("does not offer the gradient of bias" in f.text for f in report.findings)


@pytest.mark.thorough
def test_the_gradient_of_a_bias_and_segments_are_audited_in_jax():
    def attention(q, k, v, bias=0.0, segments=None):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + bias
        if segments is not None:
            same = segments[0][..., None, :, None] == segments[1][..., None, None, :]
            scores = jnp.where(same, scores, -jnp.inf)
            top = jnp.where(same.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0.0)
            weights = jnp.where(same, jnp.exp(jnp.where(same, scores, 0.0) - top), 0.0)
            return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v
        return jax.nn.softmax(scores, -1) @ v

    def tripled(q, k, v, bias):
        return attention(q, k, v, 3 * bias - 2 * jax.lax.stop_gradient(bias))

    report = attngrad.jax.audit(tripled, options={"bias": True}, effort="quick")
    assert report.first == "out_dot", report
    assert not next(s for s in report.stages if s.name == "dbias").ok
    report = attngrad.jax.audit(attention, options={"segments": True}, effort="quick")
    assert report.status != "not audited", report


@pytest.mark.thorough
def test_a_jax_function_with_a_wrong_gradient_is_named():
    @jax.custom_vjp
    def wrong(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1]), axis=-1) @ v

    def forward(q, k, v):
        return wrong(q, k, v), (q, k, v)

    def backward(saved, dout):
        q, k, v = saved
        dq, dk, dv = jax.vjp(lambda *x: jax.nn.softmax(x[0] @ x[1].swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])) @ x[2],
                             q, k, v)[1](dout)  # fmt: skip
        return dk, dq, dv

    wrong.defvjp(forward, backward)
    report = attngrad.jax.audit(wrong, effort="quick", name="wrong")
    assert "dq-dk-exchanged" in report.mistakes, report
    assert any("forward mode" in f.text for f in report.findings)
