# ruff: noqa: E731, NPY002
"""Candidates in their own layout, at their own sizes, as layers, pairs and modules, and with recorded inputs."""

import numpy as np
import pytest
import torch

from attngrad.auditor import audit
from attngrad.auditor.adapters import framework_of
from planted import right


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Linear:
    def __init__(self, i, o):
        self.weight = np.random.randn(o, i) / np.sqrt(i)
        self.bias = np.random.randn(o)
        self.grad_weight = None

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        self.grad_weight = np.einsum("bto,bti->oi", dy, self.x)
        return dy @ self.weight


class MHA:
    def __init__(self, embed_dim, n_heads=4):
        self.h = n_heads
        self.q_proj = Linear(embed_dim, embed_dim)
        self.k_proj = Linear(embed_dim, embed_dim)
        self.v_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    def split(self, x):
        b, t, c = x.shape
        return x.reshape(b, t, self.h, c // self.h).transpose(0, 2, 1, 3)

    def merge(self, x):
        b, h, t, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)

    def forward(self, x):
        self.q, self.k, self.v = (self.split(p.forward(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        self.a = softmax(self.q @ self.k.swapaxes(-1, -2) / np.sqrt(self.q.shape[-1]))
        return self.out_proj.forward(self.merge(self.a @ self.v))

    def backward(self, dy):
        do = self.split(self.out_proj.backward(dy))
        da = do @ self.v.swapaxes(-1, -2)
        dv = self.a.swapaxes(-1, -2) @ do
        ds = self.a * (da - (da * self.a).sum(-1, keepdims=True)) / np.sqrt(self.q.shape[-1])
        dq = ds @ self.k
        dk = ds.swapaxes(-1, -2) @ self.q
        return (
            self.q_proj.backward(self.merge(dq))
            + self.k_proj.backward(self.merge(dk))
            + self.v_proj.backward(self.merge(dv))
        )


class MHAbad(MHA):
    def backward(self, dy):
        do = self.split(self.out_proj.backward(dy))
        da = do @ self.v.swapaxes(-1, -2)
        dv = self.a.swapaxes(-1, -2) @ do
        ds = self.a * da / np.sqrt(self.q.shape[-1])
        dq = ds @ self.k
        dk = ds.swapaxes(-1, -2) @ self.q
        return (
            self.q_proj.backward(self.merge(dq))
            + self.k_proj.backward(self.merge(dk))
            + self.v_proj.backward(self.merge(dv))
        )


class SingleTD:
    def __init__(self, d_in, d_k):
        self.params = {k: np.random.randn(d_in, d_k) for k in ("Wq", "Wk", "Wv")}
        self.grads = {}

    def forward(self, X):
        P = self.params
        self.X = X
        self.Q, self.K, self.V = X @ P["Wq"], X @ P["Wk"], X @ P["Wv"]
        self.A = softmax(self.Q @ self.K.T / np.sqrt(self.Q.shape[1]))
        return self.A @ self.V

    def backward(self, dO):
        dA = dO @ self.V.T
        dV = self.A.T @ dO
        dS = self.A * (dA - (dA * self.A).sum(1, keepdims=True)) / np.sqrt(self.Q.shape[1])
        dQ, dK = dS @ self.K, dS.T @ self.Q
        X = self.X
        P = self.params
        self.grads = {"Wq": X.T @ dQ, "Wk": X.T @ dK, "Wv": X.T @ dV}
        return dQ @ P["Wq"].T + dK @ P["Wk"].T + dV @ P["Wv"].T


class Packed:
    def __init__(self, dim, heads):
        self.dim, self.heads = dim, heads
        self.Wqkv = np.random.randn(dim, 3 * dim)
        self.Wo = np.random.randn(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        self.x = x
        qkv = (x @ self.Wqkv).reshape(b, t, 3, self.heads, c // self.heads).transpose(2, 0, 3, 1, 4)
        self.q, self.k, self.v = qkv
        self.a = softmax(self.q @ self.k.swapaxes(-1, -2) / np.sqrt(c // self.heads))
        self.o = (self.a @ self.v).transpose(0, 2, 1, 3).reshape(b, t, c)
        return self.o @ self.Wo

    def backward(self, g):
        b, t, c = g.shape
        self.dWo = self.o.reshape(-1, c).T @ g.reshape(-1, c)
        do = (g @ self.Wo.T).reshape(b, t, self.heads, -1).transpose(0, 2, 1, 3)
        dv = self.a.swapaxes(-1, -2) @ do
        da = do @ self.v.swapaxes(-1, -2)
        ds = self.a * (da - (da * self.a).sum(-1, keepdims=True)) / np.sqrt(c // self.heads)
        d = np.stack([ds @ self.k, ds.swapaxes(-1, -2) @ self.q, dv]).transpose(1, 3, 0, 2, 4).reshape(b, t, 3 * c)
        self.dWqkv = self.x.reshape(-1, c).T @ d.reshape(-1, 3 * c)
        return d @ self.Wqkv.T


def fwd(x, Wq, Wk, Wv, Wo, n_heads):
    m = MHA(x.shape[-1], n_heads)
    q, k, v = (m.split(x @ w) for w in (Wq, Wk, Wv))
    a = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    o = m.merge(a @ v)
    return o @ Wo, (x, q, k, v, a, o, Wq, Wk, Wv, Wo, m)


def bwd(dy, cache):
    x, q, k, v, a, o, Wq, Wk, Wv, Wo, m = cache
    f = lambda z: z.reshape(-1, z.shape[-1])
    do = m.split(dy @ Wo.T)
    da = do @ v.swapaxes(-1, -2)
    ds = a * (da - (da * a).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    dq, dk, dv = map(m.merge, (ds @ k, ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ do))
    return dq @ Wq.T + dk @ Wk.T + dv @ Wv.T, {
        "dWq": f(x).T @ f(dq),
        "dWk": f(x).T @ f(dk),
        "dWv": f(x).T @ f(dv),
        "dWo": f(o).T @ f(dy),
    }


def afwd(Q, K, V, causal=False):
    s = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
    A = softmax(s)
    return A @ V, (Q, K, V, A)


def abwd(dO, cache):
    Q, K, V, A = cache
    dA = dO @ V.swapaxes(-1, -2)
    dS = A * (dA - (dA * A).sum(-1, keepdims=True)) / np.sqrt(Q.shape[-1])
    return dS @ K, dS.swapaxes(-1, -2) @ Q, A.swapaxes(-1, -2) @ dO


class SDPA:
    def forward(self, Q, K, V, mask=None):
        self.c = afwd(Q, K, V)
        out, self.c = self.c
        return out

    def backward(self, dO):
        return abwd(dO, self.c)


class Module(torch.nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.qkv = torch.nn.Linear(d_model, 3 * d_model)
        self.proj = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        return self.proj(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


def fparams(x, params, dout):
    y, c = fwd(x, params["Wq"], params["Wk"], params["Wv"], params["Wo"], 1)
    dx, g = bwd(dout, c)
    return y, dx, g


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dout):
    out = np.zeros_like(q)
    dq, dk, dv = map(np.zeros_like, (q, k, v))
    t = lambda x: x.swapaxes(0, 1)
    for i in range(len(cu_seqlens_q) - 1):
        a, b, c, d = cu_seqlens_q[i], cu_seqlens_q[i + 1], cu_seqlens_k[i], cu_seqlens_k[i + 1]
        o, cache = afwd(t(q[a:b]), t(k[c:d]), t(v[c:d]))
        out[a:b] = t(o)
        g = abwd(t(dout[a:b]), cache)
        dq[a:b], dk[c:d], dv[c:d] = map(t, g)
    return out, dq, dk, dv


def _name(candidate: object) -> str:
    return getattr(candidate, "__name__", "a pair")


@pytest.mark.parametrize("candidate", [MHA, SingleTD, Packed, (fwd, bwd), fparams, varlen, Module], ids=_name)
def test_what_people_write_is_audited_without_a_wrapper(candidate):
    report = audit(candidate, effort="quick")
    assert report.ok, report


def test_a_wrong_layer_is_named():
    assert audit(MHAbad, effort="quick").mistakes == ("row-term-missing",)


def swapped(q, k, v, dout):
    t = lambda x: np.swapaxes(x, 1, 2)
    return tuple(map(t, right(*map(t, (q, k, v, dout)))))


def test_the_layout_is_found_out_and_told():
    report = audit(swapped, effort="quick")
    assert report.ok, report
    assert any("'BTHD'" in f.text for f in report.findings)
    assert not audit(swapped, layout="BHTD", effort="quick").ok


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return tensor_methods(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(tensor_methods(*inputs), inputs, dout)


def tensor_methods(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def tensor_axes(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def makes_a_constant(q, k, v):
    return torch.softmax(q @ k.mT * torch.tensor(q.shape[-1] ** -0.5, dtype=q.dtype), -1) @ v


def applied(q, k, v):
    return Function.apply(q, k, v)


def applied_from_around():
    around = Function

    def attend(q, k, v):
        return around.apply(q, k, v)

    return attend


@pytest.mark.parametrize("candidate", [applied, applied_from_around()], ids=["global", "closure"])
def test_a_function_that_applies_a_torch_function_is_of_torch(candidate):
    assert framework_of(candidate) == "torch"


def test_a_function_that_applies_a_torch_function_is_audited_by_its_backward():
    report = audit(applied, effort="quick")
    assert {"dq", "dk", "dv"} <= {s.name for s in report.stages if s.ok}, report


@pytest.mark.parametrize("candidate", [tensor_methods, tensor_axes, makes_a_constant], ids=_name)
def test_where_numpy_arrays_raise_in_a_file_that_imports_torch_tensors_are_tried(candidate):
    report = audit(candidate, effort="quick")
    assert report.ok, report
    assert {"dq", "dk", "dv"} <= {s.name for s in report.stages}
    note = next(f for f in report.findings if f.kind == "framework")
    assert "audited with tensors of PyTorch" in note.text
    assert not note.fault


def test_what_cannot_be_called_with_numpy_arrays_is_told_of_the_framework_and_of_no_transpose():
    names = {}
    exec("def attend(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v", names)  # noqa: S102
    report = audit(names["attend"], effort="quick")
    assert report.status == "not audited"
    assert report.verdict.endswith('If it takes tensors: framework="torch" (--framework torch).')
    assert not [f for f in report.findings if f.kind == "axes"]

    def misspelled(q, k, v):
        return (q @ k.transpose(-2, -1)).softmx(-1) @ v

    assert audit(misspelled, effort="quick").verdict.endswith('framework="torch" (--framework torch).')


def test_a_transpose_of_all_axes_is_told_of_where_the_code_has_it():
    def candidate(q, k, v, dout):
        return np.concatenate([q, k.T @ 0, v], 9)

    assert [f for f in audit(candidate, effort="quick").findings if f.kind == "axes"]


def test_sizes_that_a_candidate_does_not_take_are_not_tried():
    def kernel(q, k, v, dout):
        assert q.shape[2] % 16 == 0
        assert q.shape[3] in (32, 64)
        return right(q, k, v, dout)

    assert audit(kernel, sizes={"tokens": "multiple of 16", "features": (32, 64)}, effort="quick").ok
    with pytest.raises(ValueError, match="sizes must have only the names tokens"):
        audit(kernel, sizes={"words": 3})


def test_float32_alone_is_audited_in_float32_and_said():
    def single(q, k, v, dout):
        return tuple(x.astype(np.float32) for x in right(*(x.astype(np.float32) for x in (q, k, v, dout))))

    report = audit(single, effort="quick")
    assert report.ok, report
    assert report.settings["dtype"] == "float32"
    assert any(f.kind == "dtype" for f in report.findings)


def test_a_device_must_compute():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert audit(sdpa, device="cpu", effort="quick").ok
    with pytest.raises(ValueError, match="device must be a device of PyTorch that computes here"):
        audit(sdpa, device="meta")


def test_recorded_inputs_are_told_by_the_smallest_slice_that_fails():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 2, 40, 8))
    v[1, 1, 30] *= 100.0

    def loud(q, k, v, dout):
        out, dq, dk, dv = right(q, k, v, dout)
        return out, dq, dk, dv * np.where(np.abs(v).max(-1, keepdims=True) > 60.0, 1.5, 1.0)

    inputs = {"q": q, "k": k, "v": v, "dout": dout}
    assert audit(loud, effort="quick").ok
    report = audit(loud, inputs=inputs, effort="quick")
    assert report.status == "wrong"
    names = {"inputs": inputs, "candidate": loud}
    exec(report.smallest, names)  # noqa: S102
    assert names["v"].shape[:3] == (1, 1, 1), report.smallest
    assert np.array_equal(names["v"][0, 0, 0], v[1, 1, 30])
    assert audit(right, inputs=inputs, effort="quick").ok
    with pytest.raises(ValueError, match="inputs must have q, k and v"):
        audit(right, inputs={"q": q})
