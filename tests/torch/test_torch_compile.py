"""torch.compile and the operators behind it."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import attngrad.torch as bridge
from attngrad.torch import _ops
from attngrad.torch._passes import bind_inputs, passes_of
from cases import EVERYTHING, Shape, label, make
from torch_tools import problem

SMALL = Shape((2,), 4, 2, 3, 4, 2, 3)


def arguments(names, dtype=torch.float64):
    """The arguments of the operators for a case of the table, as leaves."""
    case = make(names, SMALL)
    options = dict(case.options)
    arrays = {"bias", "sinks", "mask", "offset"} & options.keys()
    for name in arrays:
        options[name] = torch.as_tensor(options[name])
    if "segments" in options:
        options["segments"] = tuple(torch.as_tensor(ids) for ids in options["segments"])
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = options[name].to(dtype).requires_grad_()
    q, k, v = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in case.qkv)
    o = passes_of("attention", q, options).options
    return case, _ops._arguments(
        {row.name: getattr(o, row.name) for row in _ops._ROWS}, bind_inputs("attention", q, k, v, o, options), None
    )


@pytest.mark.parametrize("names", [(), ("causal", "mask"), ("bias of a head", "sinks"), EVERYTHING], ids=label)
def test_opcheck_passes_for_every_operator(names):
    case, args = arguments(names)
    torch.library.opcheck(torch.ops.attngrad.forward.default, args)
    saved = [x.detach() for x in torch.ops.attngrad.forward(*args)[2:]]
    dout, dlse = torch.tensor(case.dout, requires_grad=True), torch.tensor(case.dlse, requires_grad=True)
    torch.library.opcheck(torch.ops.attngrad.backward.default, (*args, dout, dlse, *saved))
    torch.library.opcheck(torch.ops.attngrad.backward.default, (*args, dout, None, *saved))
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    t = [None if x is None else torch.tensor(x) for x in case.t]
    torch.library.opcheck(torch.ops.attngrad.forward_tangent.default, (*plain, *t))
    cotangents = (dout.detach(), None, dlse.detach().new_zeros(dout.shape), None)
    torch.library.opcheck(torch.ops.attngrad.backward_tangent.default, (*plain, *t, *cotangents))


def test_opcheck_passes_in_bfloat16():
    _, args = arguments(("causal", "bias"), torch.bfloat16)
    torch.library.opcheck(torch.ops.attngrad.forward.default, args)


def test_the_operators_have_the_double_backward_of_the_eager_functions():
    case, args = arguments(("causal", "bias", "sinks"))
    leaves = [x for x in args[:5] if x is not None]
    dout, dlse = torch.tensor(case.dout, requires_grad=True), torch.tensor(case.dlse, requires_grad=True)
    function, _ = problem(case)

    def second(out, lse):
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse), create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in grads), [*leaves, dout, dlse])

    for a, b in zip(second(*torch.ops.attngrad.forward(*args)[:2]), second(*function(*leaves)), strict=True):
        torch.testing.assert_close(a, b)


def compiled(function):
    """Traced whole, and differentiated, without the seconds that code generation takes."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def same_gradients(function, other, inputs):
    generator = torch.Generator().manual_seed(0)
    out, expected = function(*inputs), other(*inputs)
    cotangent = torch.randn(out.shape, generator=generator).to(out.dtype)
    for a, b in zip(
        (out, *torch.autograd.grad(out, inputs, cotangent)),
        (expected, *torch.autograd.grad(expected, inputs, cotangent)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.thorough
def test_a_full_graph_compiles_forward_and_backward():
    """By the default backend, with its C++."""

    def function(q, k, v, bias):
        return bridge.scaled_dot_product_attention(q.sin(), k, v, bias, is_causal=True, enable_gqa=True).cos()

    inputs = leaves((2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (4, 1, 3))
    same_gradients(torch.compile(function, fullgraph=True), function, inputs)


def test_every_option_traces_whole():
    q, k, v, bias, sinks = leaves((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6), (4, 1, 5), (4,))
    mask, ids = torch.rand(3, 5) > 0.2, torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    options = {"mask": mask, "window": (2, 1), "softcap": 2.0, "dropout": 0.3, "seed": 2**64 - 1, "scale": 0.4}

    def function(q, k, v, bias, sinks):
        segments, offset = (ids[:, :3], ids), torch.tensor([1, 2])
        more = {"bias": bias, "sinks": sinks, "segments": segments, "offset": offset, "return_lse": True}
        out, lse = bridge.attention(q, k, v, causal=True, **options, **more)
        return out.sin().sum() + torch.where(lse == -torch.inf, 0.0, lse).sum()

    same_gradients(compiled(function), function, [q, k, v, bias, sinks])


def test_shapes_may_be_dynamic_and_inputs_have_two_axes():
    def function(q, k):
        return bridge.attention(q, k, k, causal=True) * 2

    traced = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for t, s in ((3, 5), (4, 7), (6, 9)):
        same_gradients(traced, function, leaves((t, 8), (s, 8)))


def test_dropout_inside_a_graph_is_repeated_by_manual_seed():
    (q,) = leaves((2, 4, 3, 8))
    function = compiled(lambda q: bridge.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    torch.manual_seed(1)
    first, second = function(q), function(q)
    torch.manual_seed(1)
    assert torch.equal(function(q), first)
    assert not torch.equal(first, second)


def test_sdpa_and_the_module_trace_whole():
    layer = bridge.MultiheadAttention(8, 2, batch_first=True)
    (x,) = leaves((2, 3, 8))
    same_gradients(compiled(lambda x: layer(x, x, x, need_weights=False)[0]), lambda x: layer(x, x, x)[0], [x])

    def function(x):
        with bridge.sdpa():
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    torch.testing.assert_close(compiled(function)(x), function(x))


def test_forward_mode_never_passes_a_graph_in_silence():
    (q,) = leaves((2, 3, 4))
    q = q.detach()

    def function(q):
        return bridge.attention(q, q, q).sin()

    traced = compiled(function)
    traced(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"cannot be traced under torch\.func or forward-mode AD"
        ):
            traced(dual)
        with pytest.raises(NotImplementedError, match=r"Without torch\.compile it is"):
            torch.ops.attngrad.forward(dual, *arguments(())[1][1:])
    along = torch.compile(lambda q: torch.func.jvp(function, (q,), (q,)), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be traced"):
        along(q)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda q: torch.func.jvp(f, (q,), (q,))[1],
        lambda f: lambda q: torch.func.grad(lambda x: f(x).sum())(q),
        lambda f: lambda q: torch.func.vmap(f)(q[None]),
        lambda f: lambda q: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (q,), (q,))[1],
    ],
    ids=["jvp", "grad", "vmap", "hvp"],
)
def test_transforms_inside_a_compiled_function_break_the_graph_and_then_work(transform, backend):
    torch._dynamo.reset()
    q = torch.randn(1, 2, 6, 4)
    function = transform(lambda q: bridge.attention(q, q, q, causal=True).sin())
    with bridge.use_backend(backend):
        found = torch.compile(function, backend="aot_eager")(q)
        assert torch.allclose(found, function(q), atol=1e-6)


def test_a_wrong_argument_is_told_inside_a_graph_too():
    (q,) = leaves((2, 3, 4))
    traced = compiled(lambda q: bridge.attention(q, q, q, softcap=-1.0))
    with pytest.raises(ValueError, match="softcap must be positive"):
        traced(q)
