"""The blocked backend: torch operations, several blocks, any device; every option, every pass, any order."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attngrad.torch as bridge
from attngrad import backends, reference
from attngrad.backends.blocked import blocks
from attngrad.core.binding import bind
from attngrad.core.operands import Operands, Tangents
from attngrad.core.options import Options
from attngrad.core.philox import keep_mask
from attngrad.testing import relative_error
from attngrad.torch._tensors import to_tensor
from cases import EVERYTHING, PAIRS, SHAPES, SINGLES, label, make

ROOT = Path(__file__).parents[2]
blocked = backends.get("blocked")
GRID = [
    *SINGLES,
    EVERYTHING,
    ("causal", "bias", "sinks"),
    ("masked rows", "sinks", "dropout"),
    ("window left", "dropout"),
]


@pytest.fixture
def small_blocks(monkeypatch):
    """A row or a few per block."""
    monkeypatch.setattr(blocks, "BUDGET", 6000)
    monkeypatch.setattr(blocks, "_TIMES_Q", 0)


def tensors(x):
    """Arrays as tensors that are views into memory full of NaN, every second number."""

    def one(y):
        if not isinstance(y, np.ndarray):
            return y
        if y.dtype.kind != "f":
            return torch.from_numpy(y)
        whole = torch.full((*y.shape[:-1], 2 * y.shape[-1]), torch.nan, dtype=to_tensor(y).dtype)
        whole[..., ::2] = to_tensor(y)
        return whole[..., ::2]

    return type(x)(
        *(tuple(map(one, y)) if isinstance(y, tuple) and y and isinstance(y[0], np.ndarray) else one(y) for y in x)
    )


def check_passes(names, shape, bound):
    case = make(names, SHAPES[shape])
    arrays, o, _ = bind("attention", *case.qkv, case.options)
    x, t = tensors(arrays), tensors(case.t)
    dout, dlse, dout_dot, dlse_dot = (torch.from_numpy(y) for y in (case.dout, case.dlse, case.dout_dot, case.dlse_dot))
    out, lse, residuals = blocked.forward(x, o)
    expected, pullback = reference.vjp(*case.qkv, **case.options, return_lse=True)
    moved = reference.jvp(case.qkv, case.t[:3], **case.tangents, **case.options, return_lse=True)
    second = blocked.backward_tangent(x, o, t, dout, dout_dot, dlse, dlse_dot)
    twice = reference.hvp(
        case.qkv,
        case.t[:3],
        case.dout,
        case.dout_dot,
        dlse=case.dlse,
        dlse_dot=case.dlse_dot,
        **case.tangents,
        **case.options,
    )
    pairs = [
        *zip((out, lse), expected, strict=True),
        *zip(blocked.backward(x, o, residuals, dout, dlse), pullback(case.dout, case.dlse), strict=True),
        *zip(blocked.forward_tangent(x, o, t), (*moved[0], *moved[1]), strict=True),
        *zip((*second.grads, *second.grads_dot), (*twice[0], *twice[1]), strict=True),
    ]
    for found, right in pairs:
        assert (found is None) == (right is None)
        if found is not None:
            assert relative_error(found.numpy(), right) < bound


@pytest.mark.parametrize("shape", ["grouped", "more queries than keys"])
@pytest.mark.parametrize("names", GRID, ids=label)
def test_every_pass_in_several_blocks_is_that_of_the_reference(small_blocks, names, shape):
    check_passes(names, shape, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("names", PAIRS, ids=label)
def test_pairs_of_options_in_several_blocks(small_blocks, names):
    check_passes(names, "grouped", 1e-11)


@pytest.mark.parametrize(("keys", "offset"), [(0, 0), (5, -40), (5, -2)])
def test_blocks_whose_queries_see_no_key_at_all_give_zero(small_blocks, keys, offset):
    q, k, v = (torch.randn(2, 4, n, 3, requires_grad=True) for n in (7, keys, keys))
    k, v = k[:, :2].detach().requires_grad_(), v[:, :2].detach().requires_grad_()
    with bridge.use_backend("blocked"):
        out, lse = bridge.attention(q, k, v, causal=True, offset=offset, return_lse=True)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))
        _, moved = torch.func.jvp(lambda x: bridge.attention(x, k, v, causal=True, offset=offset), (q,), (q,))
    hidden = 7 if keys == 0 else min(7, -offset)
    assert not out[..., :hidden, :].any()
    assert not grads[0][..., :hidden, :].any()
    assert not moved[..., :hidden, :].any()
    assert (lse[..., :hidden] == -torch.inf).all()
    assert lse[..., hidden:].isfinite().all()


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_blocks_cover_every_query_once_and_hold_the_keys_that_it_sees(monkeypatch):
    monkeypatch.setattr(blocks, "BUDGET", 4 * 40 * 7)
    monkeypatch.setattr(blocks, "_TIMES_Q", 0)
    q, offset, o = torch.zeros(1, 1, 50, 3), -5, Options(1.0, causal=True, window=(6, None))
    found = blocks.cut(q, 40, offset, o, 1)
    assert len(found) > 3
    assert [i for block in found for i in block.rows] == list(range(50))
    for block in found:
        for i in block.rows:
            seen = {j for j in range(40) if i + offset - 6 <= j <= i + offset}
            assert seen <= set(block.keys)
    assert sum(len(block.keys) for block in found) < 40 * len(found) / 2


class Watch(TorchDispatchMode):
    """The largest product of the last two axes of any tensor that is made, and how many operations there were."""

    def __init__(self):
        super().__init__()
        self.largest, self.operations = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.operations += 1
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, torch.Tensor) and x.ndim > 1:
                self.largest = max(self.largest, x.shape[-1] * x.shape[-2])
        return found


def all_passes(x, o):
    t = Tangents(x.q, x.k, x.v)
    _, _, residuals = blocked.forward(x, o)
    blocked.backward(x, o, residuals, x.q)
    blocked.forward_tangent(x, o, t)
    blocked.backward_tangent(x, o, t, x.q, x.q)


def test_no_matrix_of_all_queries_by_all_keys_is_ever_made(monkeypatch):
    monkeypatch.setattr(blocks, "cut", lambda q, keys, offset, o, _: cut_by(128, q, keys, offset, o))
    monkeypatch.setattr("attngrad.backends.blocked.passes.cut", blocks.cut)
    monkeypatch.setattr("attngrad.torch._higher.cut", blocks.cut)
    q = torch.randn(1, 1, 1024, 4)
    more = {"bias": torch.randn(1, 1024), "mask": torch.rand(1, 1024) > 0.1, "sinks": torch.zeros(1)}
    ids = torch.arange(1024) // 300
    for o in (Options(0.5, causal=True), Options(0.5, softcap=2.0, dropout=0.1, seed=3, window=(900, 900))):
        with Watch() as watch:
            all_passes(Operands(q, q, q), o)
            all_passes(Operands(q, q, q, segments=(ids, ids), **more), o)
        assert 130 * 1024 >= watch.largest > 64 * 1024
    leaf = q.clone().requires_grad_()
    with Watch() as watch:
        (g,) = torch.autograd.grad(bridge.attention(leaf, q, q, causal=True).sin().sum(), leaf, create_graph=True)
        (h,) = torch.autograd.grad(g.sin().sum(), leaf, create_graph=True)
        torch.autograd.grad(h.sum(), leaf)
    assert watch.largest < 130 * 1024


def cut_by(rows, q, keys, offset, o):
    return tuple(blocks._block(i, min(i + rows, q.shape[-2]), keys, offset, o) for i in range(0, q.shape[-2], rows))


@pytest.mark.parametrize("causal", [False, True])
def test_a_forward_pass_of_4096_tokens_is_at_most_960_operations(causal):
    q = torch.empty(2, 16, 4096, 64, device="meta")
    with Watch() as watch:
        blocked.forward(Operands(q, q, q), Options(0.125, causal=causal))
    assert watch.operations <= 960


# --- memory -----------------------------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """The most bytes that tensors made within hold at a time; ``before`` are not counted."""

    def __init__(self, before):
        super().__init__()
        self.now = self.highest = 0
        self.known = {x.untyped_storage()._cdata: None for x in before}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                size = x.untyped_storage().nbytes()
                self.now += size
                self.known[key] = weakref.ref(x.untyped_storage(), functools.partial(self.freed, key, size))
        self.highest = max(self.highest, self.now)
        return found

    def freed(self, key, size, _):
        self.now -= size
        del self.known[key]


def double_backward(q, k, v, dout, *u):
    x = [y.detach().requires_grad_() for y in (q, k, v)]
    return torch.autograd.grad(torch.autograd.grad(bridge.attention(*x), x, dout, create_graph=True), x, u)


def jvp_of_vjp(q, k, v, dout, *u):
    grads, grads_dot = torch.func.jvp(lambda *x: torch.func.vjp(bridge.attention, *x)[1](dout), (q, k, v), u)
    return *grads, *grads_dot


@pytest.mark.parametrize("second", [double_backward, jvp_of_vjp])
def test_an_hvp_of_16384_tokens_holds_at_most_12_times_q_beyond_inputs_and_results(second):
    x = [torch.empty(1, 1, 16384, 64, device="meta") for _ in range(7)]
    with Held(x) as held:
        results = second(*x)
    beyond = held.highest - sum(y.untyped_storage().nbytes() for y in results)
    assert 4 <= beyond / x[0].untyped_storage().nbytes() <= 12


def test_what_is_held_is_counted_while_it_is_alive():
    with Held([]) as held:
        a = torch.zeros(100)
        b = a[10:].view(9, 10) + 1.0
        del a
        c = torch.zeros(200)
    assert (held.highest, held.now, len(b) + len(c)) == (1160, 1160, 209)


@pytest.mark.thorough
@pytest.mark.parametrize("second", ["double_backward", "jvp_of_vjp"])
def test_an_hvp_of_16384_tokens_on_the_cpu_takes_20_times_q_at_most(second):
    """Resident memory of a fresh process beyond inputs and results: what a matrix product takes for itself is in it."""
    code = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT)!r}, {str(ROOT / "tests/support")!r}]
        import torch, test_blocked
        from benchmarks.memory import _highest, _reset
        with test_blocked.bridge.use_backend("blocked"):
            for n in (128, 16384):
                x = [torch.randn(1, 1, n, 64) for _ in range(7)]
                before = _reset()
                results = test_blocked.{second}(*x)
        size = x[0].untyped_storage().nbytes()
        print((_highest() - before) / size - len(results))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 our own
    assert 0.0 < float(told.stdout.split()[-1]) <= 20.0


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", GRID, ids=label)
def test_the_meta_device_gives_shapes_and_dtypes(names):
    case = make(names, SHAPES["grouped"])
    arrays, o, _ = bind("attention", *case.qkv, case.options)
    x = tensors(arrays)
    meta = Operands(*(move(y) for y in x))
    found, right = blocked.forward(meta, o), blocked.forward(x, o)
    assert [(y.shape, y.dtype) for y in (*found[:2], *found[2])] == [
        (y.shape, y.dtype) for y in (*right[:2], *right[2])
    ]
    grads = blocked.backward(meta, o, found[2], torch.empty_like(found[0]))
    for g, primal in zip(grads, (meta.q, meta.k, meta.v, meta.bias, meta.sinks), strict=True):
        assert (g is None and primal is None) or (g.shape, g.dtype, g.device.type) == (
            primal.shape,
            primal.dtype,
            "meta",
        )


def move(y):
    if isinstance(y, torch.Tensor):
        return y.to("meta")
    return tuple(map(move, y)) if isinstance(y, tuple) and isinstance(y[0], torch.Tensor) else y


@pytest.mark.parametrize("names", [*SINGLES, ("causal", "window"), EVERYTHING], ids=label)
def test_no_number_is_read_from_the_device(names):
    from torch._subclasses.fake_tensor import FakeTensorMode  # which raises where a number is asked for

    case = make(names, SHAPES["grouped"])
    arrays, o, _ = bind("attention", *case.qkv, case.options)
    x = tensors(arrays)
    with FakeTensorMode() as mode:
        fake = Operands(*(fakes(y, mode) for y in x))
        out, _, residuals = blocked.forward(fake, o)
        blocked.backward(fake, o, residuals, torch.empty_like(out))
        t = Tangents(*(None if y is None else torch.empty_like(y) for y in (fake.q, fake.k, fake.v, fake.bias)))
        _, _, out_dot, _ = blocked.forward_tangent(fake, o, t)
        second = blocked.backward_tangent(fake, o, t, out, out_dot)
    assert second.grads_dot.q.shape == x.q.shape


def fakes(y, mode):
    if isinstance(y, torch.Tensor):
        return mode.from_tensor(y)
    return tuple(fakes(z, mode) for z in y) if isinstance(y, tuple) and isinstance(y[0], torch.Tensor) else y


@pytest.mark.parametrize("origin", [(0, 0, 0, 0), (1, 2, 30, 7)])
@pytest.mark.parametrize("seed", [0, 2**64 - 5])
def test_the_dropout_mask_of_a_device_is_that_of_the_kernels(origin, seed):
    shape = (2, 3, 5, 11)
    found = keep_mask(shape, 0.3, seed, origin, like=torch.empty(0))
    assert np.array_equal(found.numpy(), backends.get("cpu").keep_mask(shape, 0.3, seed, origin))
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    assert torch.equal(keep_mask(shape, 0.3, signed, origin, like=torch.empty(0)), found)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_backend_is_that_of_the_device_unless_one_is_named():
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert (bridge.backend_of(cpu), bridge.backend_of(meta)) == ("cpu", "blocked")
    with bridge.use_backend("blocked"):
        assert bridge.backend_of(cpu) == "blocked"
        with bridge.use_backend(None):
            assert bridge.backend_of(cpu) == "cpu"
    assert bridge.backend_of(cpu) == "cpu"


def test_a_backend_that_cannot_take_a_tensor_is_an_error_that_names_those_that_can():
    x = torch.zeros(1, 1, 2, 2, device="meta")
    with bridge.use_backend("cpu"), pytest.raises(ValueError, match=r"takes tensors on meta \(blocked\); got 'cpu'"):
        bridge.attention(x, x, x)
    with pytest.raises(ValueError, match="backend must be one of cpu, blocked, or None; got 'reference'"):
        bridge.use_backend("reference").__enter__()


def test_a_compiled_function_does_not_keep_the_backend_it_was_compiled_with():
    q = torch.randn(1, 2, 6, 4)
    seen = []

    def backend(graph, inputs):
        seen.append([node.args[-1] for node in graph.graph.nodes if "attngrad" in str(node.target)])
        return graph.forward

    compiled = torch.compile(lambda x: bridge.attention(x, x, x), backend=backend, fullgraph=True)
    first = compiled(q)
    with bridge.use_backend("blocked"):
        second = compiled(q)
    assert seen == [[None], ["blocked"]]
    assert torch.allclose(first, second, atol=1e-6)


# --- any order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("names", SINGLES, ids=label)
def test_third_order_is_that_of_dense_autograd(small_blocks, names, backend):
    case = make(names, SHAPES["small"] if "small" in SHAPES else SHAPES["grouped"])
    options = {
        k: tuple(map(torch.from_numpy, y)) if isinstance(y, tuple) and isinstance(y[0], np.ndarray) else y
        for k, y in case.options.items()
    }
    options = {k: torch.from_numpy(y) if isinstance(y, np.ndarray) else y for k, y in options.items()}

    def third(function):
        x = [torch.from_numpy(y).clone().requires_grad_() for y in case.qkv]
        moving = {n: options[n].clone().requires_grad_() for n in ("bias", "sinks") if n in options}
        leaves = [*x, *moving.values()]
        out = function(*x, **{**options, **moving})
        for _ in range(3):
            value = sum(
                (y.nan_to_num(neginf=0.0) * y.nan_to_num(neginf=0.0)).sum()
                for y in (out if isinstance(out, tuple) else (out,))
            )
            out = torch.autograd.grad(value, leaves, create_graph=True)
        return out

    with bridge.use_backend(backend):
        found = third(bridge.attention)
    for a, b in zip(found, third(reference.attention), strict=True):
        assert relative_error(a.detach().numpy(), b.detach().numpy()) < 1e-9


def test_transforms_nest_to_any_depth(small_blocks):
    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)

    def loss(function, x):
        return function(x, k, v, causal=True, softcap=2.0).sin().sum()

    func = torch.func
    for way in (
        lambda f: func.jacfwd(func.hessian(f))(q),
        lambda f: func.grad(lambda x: func.grad(lambda y: func.grad(f)(y).sin().sum())(x).sin().sum())(q),
        lambda f: func.jvp(lambda x: func.jvp(lambda y: func.jvp(f, (y,), (k,))[1], (x,), (v,))[1], (q,), (k,))[1],
        lambda f: func.vmap(lambda s: func.hessian(lambda x: func.jvp(f, (x,), (k,))[1])(s * q))(
            torch.tensor([0.5, 1.0])
        ),
    ):
        found, right = way(lambda x: loss(bridge.attention, x)), way(lambda x: loss(reference.attention, x))
        assert relative_error(found.numpy(), right.numpy()) < 1e-10


@pytest.mark.parametrize("given", ["q", "k", "v", "bias", "sinks"])
def test_tangents_that_are_not_given_are_zero(small_blocks, given):
    case = make(("softcap", "bias", "sinks", "dropout"), SHAPES["grouped"])
    arrays, o, _ = bind("attention", *case.qkv, case.options)
    x, t = tensors(arrays), tensors(case.t)
    dout = torch.from_numpy(case.dout)
    alone = Tangents(**{given: getattr(t, given)})
    zeros = Tangents(*(y if name == given else torch.zeros_like(y) for name, y in t._asdict().items()))
    some, all_of = (blocked.forward_tangent(x, o, y) for y in (alone, zeros))
    again, as_well = (blocked.backward_tangent(x, o, y, dout) for y in (alone, zeros))
    for a, b in zip((*some, *again.grads_dot), (*all_of, *as_well.grads_dot), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_a_query_that_sees_nothing_passes_nothing_on(small_blocks):
    case = make(("masked rows", "softcap", "sinks"), SHAPES["grouped"])
    dout, found = torch.from_numpy(case.dout), []
    for padding in (0.0, torch.nan):
        arrays, o, _ = bind("attention", *case.qkv, case.options)
        x, t = tensors(arrays), tensors(case.t)
        for y in (x.q, t.q, dout):
            y[..., 0, :] = padding
        _, _, residuals = blocked.forward(x, o)
        second = blocked.backward_tangent(x, o, t, dout)
        moved = blocked.forward_tangent(x, o, t)
        found.append([*blocked.backward(x, o, residuals, dout), *moved, *second.grads, *second.grads_dot])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
