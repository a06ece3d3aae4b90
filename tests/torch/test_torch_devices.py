"""What the bridge promises, on the blocked backend: modules, checkpointing, autocast, export, graphs, shapes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import attngrad.torch as bridge
from attngrad.backends.blocked import blocks, formulas
from attngrad.torch import _tensors
from attngrad.torch._passes import draw_seed
from tests.backends import test_blocked
from tests.torch.test_torch_compile import compiled, leaves, same_gradients

func = torch.func


@pytest.fixture(autouse=True)
def blocked(monkeypatch):
    monkeypatch.setattr(blocks, "BUDGET", 3000)
    monkeypatch.setattr(blocks, "_TIMES_Q", 0)
    with bridge.use_backend("blocked"):
        yield


@pytest.mark.parametrize("text", ["x", "0", "-3", "nan", "inf"])
def test_a_budget_that_is_no_positive_number_is_an_error(text):
    with pytest.raises(ImportError, match=f"ATTNGRAD_BLOCK_MIB must be a positive number of MiB; got '{text}'"):
        blocks._budget(text)


def same(found, expected, bound=1e-10):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def by_kernels(function):
    with bridge.use_backend("cpu"):
        return function()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_both_kinds_gives_the_same_gradients(reentrant):
    x = leaves((2, 3, 9, 4), dtype=torch.float64)

    def function(x):
        return bridge.attention(x.sin(), x, x, causal=True, dropout=0.3, seed=7).cos()

    def gradient(run):
        return torch.autograd.grad(run(x[0]).sin().sum(), x) if not reentrant else backward(run)

    def backward(run):
        x[0].grad = None
        run(x[0]).sin().sum().backward()
        return (x[0].grad,)

    again = gradient(lambda x: checkpoint(function, x, use_reentrant=reentrant))
    same(again, gradient(function))


def test_autocast_casts_as_on_the_kernels():
    q, k, v = leaves(*((1, 2, 9, 4),) * 3)

    def run():
        with torch.autocast("cpu", torch.bfloat16), bridge.sdpa():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found, expected = run(), by_kernels(run)
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.autograd.grad(found.float().sin().sum(), q)[0].dtype is torch.float32


def by_order(function, x, orders=3):
    """The values and their derivatives, each of the sum of sines of those before."""
    found = [function(x)]
    for _ in range(orders):
        found += torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)
    return [y.detach() for y in found]


def test_autocast_rounds_nothing_that_is_given_wide():
    """``attention`` takes what it is given: products inside are in float32 there, of every order."""
    (x,) = leaves((1, 2, 9, 4))

    def run():
        return by_order(lambda x: bridge.attention(x, x, x, causal=True, softcap=3.0), x)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_under_autocast_weights_add_up_to_one_as_elsewhere():
    q = 4 * torch.randn(1, 2, 9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = bridge.attention_weights(q, q)
    torch.testing.assert_close(found, bridge.attention_weights(q, q))
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 9), rtol=1e-5, atol=1e-5)


def test_autocast_serves_a_module_that_adds_keys_of_its_own():
    torch.manual_seed(0)
    layer = bridge.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    theirs = torch.nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (m(x, x, x, need_weights=False)[0] for m in (layer, theirs))
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_module_and_export_give_what_the_kernels_give():
    layer = bridge.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = layer(x, x, x)
    same(found, by_kernels(lambda: layer(x, x, x)))

    class Model(torch.nn.Module):
        def forward(self, x):
            return bridge.attention(x, x, x, causal=True).sin()

    program = torch.export.export(Model(), (x,))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "attngrad.forward.default" in names
    same([program.module()(x)], [by_kernels(lambda: Model()(x))])


def test_transformers_give_what_the_kernels_give():
    transformers = pytest.importorskip("transformers")
    import attngrad.transformers  # noqa: F401 - makes the name known

    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attngrad").double().eval()
    ids = torch.arange(12).view(2, 6)

    def run():
        model.zero_grad()
        model(ids).logits.sin().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    same(run(), by_kernels(run))


@pytest.mark.parametrize(
    "way",
    [
        lambda f, x, t: func.jvp(f, (x,), (t,)),
        lambda f, x, t: func.vjp(f, x)[1](t),
        lambda f, x, t: (func.vmap(f)(torch.stack([x, t])),),
        lambda f, x, t: (func.hessian(lambda y: f(y).sin().sum())(x),),
        lambda f, x, t: func.jvp(func.grad(lambda y: f(y).sin().sum()), (x,), (t,)),
        lambda f, x, t: (func.grad(lambda y: func.jvp(f, (y,), (t,))[1].sin().sum())(x),),
    ],
    ids=["jvp", "vjp", "vmap", "hessian", "forward over reverse", "reverse over forward"],
)
def test_transforms_give_what_the_kernels_give(way):
    x, t = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    bias = torch.randn(2, 1, 5, dtype=torch.float64)

    def function(x):
        return bridge.attention(x, x, x, causal=True, bias=bias, softcap=3.0)

    same(way(function, x, t), by_kernels(lambda: way(function, x, t)))


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_a_compiled_graph_is_one_operator_each_way_and_stores_no_block():
    """The tensors that autograd saves are inputs, out and row statistics: linear in the sequence."""
    q, k, v = leaves(*((1, 1, 64, 4),) * 3)
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    def function(q, k, v):
        return bridge.attention(q.sin(), k, v, causal=True).cos()

    same_gradients(compiled(function), function, [q, k, v])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compiled(function)(q, k, v)
    assert sizes
    assert max(sizes) <= 64 * 4  # a block would be 64 keys times its queries
    assert sum(sizes) <= 16 * 64 * 4


@pytest.mark.thorough
def test_inductor_compiles_forward_and_backward():
    q, k, v = leaves((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 6))

    def function(q, k, v):
        return bridge.attention(q.sin(), k, v, causal=True).cos()

    same_gradients(torch.compile(function, fullgraph=True), function, [q, k, v])


def test_a_second_length_costs_one_recompilation_and_a_third_none():
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(1)
        return graph.forward

    function = torch.compile(lambda x: bridge.attention(x, x, x, causal=True), backend=backend, fullgraph=True)
    counts = []
    for length in (8, 12, 20, 24):
        x = torch.randn(1, 2, length, 4)
        torch.testing.assert_close(function(x), bridge.attention(x, x, x, causal=True))
        counts.append(len(seen))
    assert counts == [1, 2, 2, 2]


# --- meta -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_meta_has_every_pass_by_autograd_and_forward_mode(dtype):
    q, k, v, bias = (
        torch.empty(s, dtype=dtype, device="meta", requires_grad=True)
        for s in ((2, 4, 9, 6), (2, 2, 11, 6), (2, 2, 11, 5), (4, 1, 11))
    )
    inputs = (q, k, v, bias)
    values = (bridge.attention(q, k, v, bias=bias, causal=True, softcap=2.0),)
    assert values[0].shape == (2, 4, 9, 5)
    for _ in range(3):
        values = torch.autograd.grad(values, inputs, [torch.empty_like(y) for y in values], create_graph=True)
        assert [(g.shape, g.dtype, g.device.type) for g in values] == [(x.shape, dtype, "meta") for x in inputs]
    with forward_ad.dual_level():
        out = bridge.attention(forward_ad.make_dual(q, torch.empty_like(q)), k, v, bias=bias)
        moved = forward_ad.unpack_dual(out).tangent
    assert (moved.shape, moved.dtype, moved.device.type) == ((2, 4, 9, 5), dtype, "meta")


ALL = {
    "causal": True,
    "window": (5, 3),
    "offset": torch.tensor([0, 2]),
    "mask": torch.ones(9, 11, dtype=torch.bool),
    "bias": torch.zeros(4, 1, 11),
    "softcap": 2.0,
    "sinks": torch.zeros(4),
    "dropout": 0.2,
    "seed": 7,
    "segments": (torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 11, dtype=torch.int64)),
}


def moved(value, device):
    if isinstance(value, tuple):
        return tuple(moved(x, device) for x in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


class Copies(TorchFunctionMode):
    """What makes a tensor of a device from numbers of the host, for whose copy the host waits."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.asarray, torch.as_tensor, torch.tensor) and not isinstance(args[0], torch.Tensor):
            self.made.append((func.__name__, args))
        return func(*args, **(kwargs or {}))


def test_no_number_is_copied_to_a_device():
    q, k, v = (torch.empty(2, *s, device="meta", requires_grad=True) for s in ((4, 9, 6), (2, 11, 6), (2, 11, 5)))
    options = {name: moved(value, "meta") for name, value in ALL.items()}
    with Copies() as copies:
        by_order(lambda q: bridge.attention(q, k, v, **options), q)
        func.jvp(lambda q: bridge.attention(q, k, v, **options), (q,), (q,))
    assert not copies.made


def test_drop_ins_make_their_tensors_on_the_device():
    q = torch.empty(1, 9, 2, 4, device="meta")
    heads = q.transpose(1, 2)
    slopes = torch.empty(2, device="meta")
    for causal in (False, True):
        found = bridge.flash_attn_func(q, q, q, alibi_slopes=slopes, causal=causal, return_attn_probs=True)
        assert [x.device.type for x in found[:2]] == ["meta", "meta"]
    assert bridge.scaled_dot_product_attention(heads, heads, heads).is_meta
    with pytest.raises(ValueError, match="alibi_slopes must be on the device of q, meta; got cpu"):
        bridge.flash_attn_func(q, q, q, alibi_slopes=torch.ones(2))


def test_packed_sequences_of_transformers_are_told_on_the_device(monkeypatch):
    pytest.importorskip("transformers")
    from attngrad.transformers import attention_forward

    q, lengths = torch.empty(1, 2, 9, 4, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    monkeypatch.setattr(torch, "equal", lambda a, b: pytest.fail("the host would wait for the device"))
    out, _ = attention_forward(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    assert out.is_meta


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flash_attn_func", "module", "transformers"])
def test_a_seed_is_drawn_on_the_device_where_a_graph_may_be_replayed(name, monkeypatch):
    x, devices = torch.empty(2, 4, 4, 4, device="meta"), []
    drawn = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, device, **k: devices.append(device) or drawn(*a, device=device))
    if name == "module":
        layer = bridge.MultiheadAttention(4, 2, dropout=0.1, batch_first=True, device="meta")
        layer(x[0], x[0], x[0])
    elif name == "transformers":
        pytest.importorskip("transformers")
        from attngrad.transformers import attention_forward

        attention_forward(torch.nn.Module(), x, x, x, None, dropout=0.1)
    else:
        getattr(bridge, name)(x, x, x, dropout_p=0.1)
    assert [torch.device(d).type for d in devices] == ["meta"]


@pytest.mark.parametrize("keys", [3, 9])
def test_sums_without_baddbmm_are_the_same(keys, monkeypatch):
    """As for MPS; of 3 keys some blocks see none."""
    torch.manual_seed(0)
    q, k, v, t = (torch.randn(2, 2, n, 3, dtype=torch.float64) for n in (9, keys, keys, keys))

    def run():
        def function(k):
            return bridge.attention(q, k, v, causal=True)

        x = k.clone().requires_grad_()
        return [*by_order(function, x, 2), *func.jvp(func.grad(lambda k: function(k).sin().sum()), (k,), (t,))]

    expected = run()
    monkeypatch.setattr(formulas, "_APART", ("cpu",))
    monkeypatch.setattr(torch.Tensor, "baddbmm_", lambda *x: pytest.fail("in place"))
    same(run(), expected)


def test_a_seed_for_mps_is_drawn_on_the_cpu():
    assert draw_seed(SimpleNamespace(device=torch.device("mps"))).is_cpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_device_changes_nothing(dtype):
    _tensors._numpy_dtype.cache_clear()
    q = torch.randn(2, 9, 4, dtype=dtype)
    mask = torch.ones(9, 9, dtype=torch.bool)
    with torch.device("meta"):
        found = bridge.attention(q, q, q, mask=mask, dropout=0.1, seed=7)
    assert torch.equal(found, bridge.attention(q, q, q, mask=mask, dropout=0.1, seed=7))


# --- planted mistakes -------------------------------------------------------------------------------------------------

PLANTED = {
    "scale": ("qs = q * o.scale", "qs = q * (1.01 * o.scale)"),
    "lse without its sum": ("self.lse = row_max + total.log()", "self.lse = row_max + 0.9 * total.log()"),
    "a sink counted twice": (
        "total = total + (self.sinks[:, None] - row_max).exp()",
        "total = total + 2 * (self.sinks[:, None] - row_max).exp()",
    ),
    "dlse forgotten": ("delta = delta - dlse", "delta = delta"),
    "delta forgotten": ("ds = dp.sub_(delta[..., None]).mul_(p)", "ds = dp.mul_(p)"),
    "dq without scale": ('self.combine(ds, self.x["k"]) * self.o.scale', 'self.combine(ds, self.x["k"])'),
    "dk of unscaled queries": ('self.collect("dk", ds, self.qs)', 'self.collect("dk", ds, self.x["q"])'),
    "dv without dropout": ('self.collect("dv", self.drop(p), dout)', 'self.collect("dv", p, dout)'),
    "no slope of the softcap": ("ds = ds * self.modifier.first(self.z)", "ds = ds * 1.0"),
    "no bend of the softcap": (" + ds * self.modifier.second(self.z) * self.z_dot", ""),
    "lse_dot forgotten": ("return s_dot.sub_(self.lse_dot[..., None])", "return s_dot"),
    "tangent of v forgotten": ("return found if v_dot is None else", "return found if True else"),
    "delta_dot forgotten": ("ds_dot = moved.sub_(delta_dot[..., None]).mul_(p)", "ds_dot = moved.mul_(p)"),
    "the move of the sink forgotten": ("delta_dot = delta_dot - delta * self._share() * self._sink_moves()", "pass"),
    "the mask of another block": ('self.block.origin(self.x["origin"])', 'self.x["origin"]'),
    "out of keys that a sink does not lower": ("inv_row_sum * lowered", "inv_row_sum"),
    "a sink left out of the sum": ("total = row_sum + (sigma - row_max).exp()", "total = row_sum"),
    "keys of another block": (
        "to = self.space.sums[name].narrow(-1, keys.start,",
        "to = self.space.sums[name].narrow(-1, 0,",
    ),
}


@pytest.mark.parametrize("change", PLANTED.values(), ids=PLANTED)
def test_a_planted_mistake_is_noticed(change, monkeypatch):
    old, new = change
    text = Path(formulas.__file__).read_text()
    assert text.count(old) >= 1
    module = {"__name__": "planted"}
    exec(text.replace(old, new), module)  # noqa: S102 - our own source with one change
    for name in ("Formulas", "Space", "finish_rows"):
        monkeypatch.setattr(f"attngrad.backends.blocked.passes.{name}", module[name])
    with pytest.raises(AssertionError):
        test_blocked.check_passes(("window left", "bias", "softcap", "sinks", "dropout"), "grouped", 1e-11)
