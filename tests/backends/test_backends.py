"""The seam: every backend computes every pass, whole and in parts; the registry finds them by name and by device."""

from __future__ import annotations

import inspect
import sys
import types

import ml_dtypes
import numpy as np
import pytest
import torch

from attngrad import backends, reference
from attngrad.backends.protocol import Backend
from attngrad.core.binding import bind
from attngrad.core.operands import DIFFERENTIABLE, Tangents
from attngrad.core.spec import Spec
from attngrad.testing import relative_error
from attngrad.torch._tensors import to_array, to_tensor
from cases import EVERYTHING, SHAPES, SINGLES, label, make

GRID = [*SINGLES, EVERYTHING, ("causal", "bias", "sinks"), ("masked rows", "sinks", "dropout")]
every_backend = pytest.mark.parametrize("name", backends.REGISTRY)


def load(name):
    """The backend; one that takes tensors, behind NumPy arrays."""
    backend = backends.get(name)
    return backend if backend.LIBRARY == "numpy" else OnArrays(backend)


class OnArrays:
    """The passes of a backend of tensors, for arrays; and those over parts, for those of arrays."""

    def __init__(self, backend):
        self._backend = backend
        if hasattr(backend, "refuses"):
            self.refuses, self.residual_specs = backend.refuses, backend.residual_specs

    def __getattr__(self, member):
        def change(x, one, kind):
            if isinstance(x, kind):
                return one(x)
            if isinstance(x, (tuple, list)):
                parts = [change(y, one, kind) for y in x]
                return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
            return x

        def run(*args, **kwargs):
            kwargs = {key: change(x, to_tensor, np.ndarray) for key, x in kwargs.items()}
            found = getattr(self._backend, member)(*change(args, to_tensor, np.ndarray), **kwargs)
            return OnArrays(found) if hasattr(found, "finish") else change(found, to_array, torch.Tensor)

        return run


grid = pytest.mark.parametrize("names", GRID, ids=label)


def close(found, expected, bound=1e-12):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert relative_error(np.asarray(a), np.asarray(b)) < bound


def bound_case(names, shape="grouped", dtype=None):
    case = make(names, SHAPES[shape])
    case = case if dtype is None else case.cast(dtype)
    x, o, _ = bind("attention", *case.qkv, case.options)
    return case, x, o


# --- one call ---------------------------------------------------------------------------------------------------------


@every_backend
@grid
def test_the_four_passes_are_those_of_the_reference(name, names):
    backend = load(name)
    case, x, o = bound_case(names)
    assert backend.refuses(x, o) is None
    out, lse, residuals = backend.forward(x, o)
    expected, pullback = reference.vjp(*case.qkv, **case.options, return_lse=True)
    close((out, lse), expected)
    close(backend.backward(x, o, residuals, case.dout, case.dlse), pullback(case.dout, case.dlse))
    some = backend.backward(x, o, residuals, case.dout, wanted=("k",))
    close(some, pullback(case.dout, wrt="k"))
    moved = reference.jvp(case.qkv, case.t[:3], **case.tangents, **case.options, return_lse=True)
    close(backend.forward_tangent(x, o, case.t), (*moved[0], *moved[1]))
    second = backend.backward_tangent(x, o, case.t, case.dout, case.dout_dot, case.dlse, case.dlse_dot)
    cotangents = {"dlse": case.dlse, "dlse_dot": case.dlse_dot}
    grads, grads_dot = reference.hvp(
        case.qkv, case.t[:3], case.dout, case.dout_dot, **cotangents, **case.tangents, **case.options
    )
    close((*second.grads, *second.grads_dot), (*grads, *grads_dot))
    close((second.out, second.out_dot), (moved[0][0], moved[1][0]))


@every_backend
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_residuals_are_as_announced_and_results_may_be_written_in_place(name, dtype):
    backend = load(name)
    case, x, o = bound_case(("bias", "sinks"), dtype=dtype)
    specs = backend.residual_specs(x._replace(**{n: Spec.of(getattr(x, n)) for n in DIFFERENTIABLE}), o)
    out, lse, residuals = backend.forward(x, o)
    assert [Spec.of(r) for r in residuals] == list(specs)
    assert np.array_equal(np.asarray(residuals[0]).astype(dtype), out)  # the first holds out
    into = [np.empty_like(a) for a in (out, lse, *residuals)]
    again = backend.forward(x, o, into=into)
    assert all(np.shares_memory(a, b) for a, b in zip((*again[:2], *again[2]), into, strict=True))
    for a, b in zip(into, (out, lse, *residuals), strict=True):
        assert np.array_equal(a, b)
    grads = backend.backward(x, o, residuals, case.dout)
    places = [np.empty_like(g) for g in grads[:3]]
    written = backend.backward(x, o, residuals, case.dout, into=places)
    for place, g, expected in zip(places, written, grads, strict=False):
        assert np.shares_memory(g, place)
        assert np.array_equal(place, expected)
    assert backend.forward(x, o, save=False)[2] in ((), [])


# --- parts ------------------------------------------------------------------------------------------------------------


def parts_of(x, t):
    """Rows in two runs, and for each the keys in runs, the first seen by nobody where causal says so."""
    queries, keys = x.q.shape[-2], x.k.shape[-2]
    for rows in (slice(0, queries // 2), slice(queries // 2, queries)):
        for columns in (slice(keys // 2, keys), slice(0, keys // 2)):

            def plane(y, rows=rows, columns=columns):
                cut = ..., (rows if y.shape[-2] != 1 else slice(None)), (columns if y.shape[-1] != 1 else slice(None))
                return y[cut]

            part = x._replace(
                q=x.q[..., rows, :],
                k=x.k[..., columns, :],
                v=x.v[..., columns, :],
                bias=None if x.bias is None else plane(x.bias),
                mask=None if x.mask is None else plane(x.mask),
                sinks=None,
                segments=None if x.segments is None else (x.segments[0][..., rows], x.segments[1][..., columns]),
                offset=x.offset + rows.start - columns.start,
                origin=(0, 0, rows.start, columns.start),
            )
            moved = Tangents(
                t.q[..., rows, :], t.k[..., columns, :], t.v[..., columns, :], None if t.bias is None else plane(t.bias)
            )
            yield rows, columns, part, moved


def in_parts(backend, case, x, o):
    """The results of the three passes, part by part; gradients of keys and bias put together here."""
    forward, tangent = backend.forward_parts(x, o), backend.tangent_parts(x, o, case.t)
    for rows, _, part, moved in parts_of(x, case.t):
        forward.add(rows, part)
        tangent.add(rows, part, moved)
    out, lse, residuals = forward.finish()
    backward = backend.backward_parts(x, o, residuals, case.dout, case.dlse)
    dk, dv = np.zeros(x.k.shape), np.zeros(x.v.shape)
    for rows, columns, part, _ in parts_of(x, case.t):
        g = backward.add(rows, part)
        dk[..., columns, :] += g.k
        dv[..., columns, :] += g.v
    dq, dsinks = backward.finish()
    return out, lse, *tangent.finish(), dq, dk, dv, dsinks


def whole(backend, case, x, o):
    out, lse, residuals = backend.forward(x, o)
    g = backend.backward(x, o, residuals, case.dout, case.dlse)
    return out, lse, *backend.forward_tangent(x, o, case.t)[2:], g.q, g.k, g.v, g.sinks


@every_backend
@grid
@pytest.mark.parametrize("shape", ["grouped", "more queries than keys"])
def test_parts_of_the_keys_give_what_the_whole_gives(name, names, shape):
    backend = load(name)
    case, x, o = bound_case(names, shape)
    close(in_parts(backend, case, x, o), whole(backend, case, x, o))


@every_backend
def test_a_query_that_sees_nothing_in_any_part_passes_nothing_on(name):
    backend = load(name)
    case, x, o = bound_case(("masked rows", "sinks"))
    expected = in_parts(backend, case, x, o)
    case.q[..., 0, :] = case.dout[..., 0, :] = np.nan
    found = in_parts(backend, case, x, o)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b)


# --- the registry -----------------------------------------------------------------------------------------------------


@every_backend
def test_a_backend_has_all_that_the_protocol_names(name):
    backend = backends.get(name)
    members = {m for m in vars(Backend) if not m.startswith("_") and m != "_abc_impl"}
    assert {m for m in members if not hasattr(backend, m)} == set()
    assert name == backend.NAME
    for member in ("forward", "backward", "forward_tangent", "backward_tangent"):
        wanted = [p for p in inspect.signature(getattr(Backend, member)).parameters if p != "self"]
        has = list(inspect.signature(getattr(backend, member)).parameters)
        assert has[: len(wanted)] == wanted


def test_backends_are_found_by_name_and_by_device():
    for library in ("numpy", "torch", "jax"):
        assert backends.find(library, "cpu").NAME == "cpu"
    with pytest.raises(ValueError, match="backend must be one of cpu, blocked, reference; got 'gpu'"):
        backends.get("gpu")
    assert backends.find("torch", "cuda").NAME == backends.find("torch", "mps").NAME == "blocked"
    with pytest.raises(
        ValueError, match=r"where a backend computes \(cpu: .*; blocked: torch on any.*\); got jax on cuda"
    ):
        backends.find("jax", "cuda")


def test_the_dense_backend_is_never_a_default():
    assert backends.REGISTRY["reference"] == backends.Entry("attngrad.backends.reference")


def test_a_new_backend_is_a_module_and_a_line(monkeypatch):
    module = types.ModuleType("attngrad_new")
    module.NAME = "new"
    monkeypatch.setitem(sys.modules, "attngrad_new", module)
    monkeypatch.setitem(backends.REGISTRY, "new", backends.Entry("attngrad_new", ("torch",), ("xpu",)))
    assert backends.get("new") is module
    assert backends.find("torch", "xpu") is module
    backends.find.cache_clear()
