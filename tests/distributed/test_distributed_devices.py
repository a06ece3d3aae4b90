"""A ring of any backend, on any device that its group sends from: what it gives, what travels, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import distributed as dist

from attngrad import reference
from attngrad.backends import blocked
from attngrad.distributed import _transport, ring_attention, unshard
from attngrad.distributed._transport import Ring, check_device, header_device
from attngrad.torch import use_backend
from cases import EVERYTHING, OPTIONS, SINGLES, Shape, label, make
from ring_checks import LAYOUTS, SHAPE, assert_equal, assert_within_rounding, expected, joined
from ring_workers import run_case

HIDDEN = [0, 5, 8]


# --- blocked, forced on the CPU, gives what one process gives ---------------------------------------------------------


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_every_option_by_torch_operations(pool, names):
    for ranks, layout in ((2, "zigzag"), (2, "contiguous"), (3, "zigzag"), (3, "contiguous")):
        assert_equal(pool, make(names, SHAPE), ranks, layout, backend="blocked")


@pytest.mark.thorough
@pytest.mark.parametrize("names", list(itertools.combinations(sorted(OPTIONS), 2)), ids=label)
def test_pairs_of_options_by_torch_operations(pool, names):
    for layout in LAYOUTS:
        assert_equal(pool, make(names, SHAPE), 3, layout, backend="blocked")


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (Shape((2,), 2, 2, 2, 3, 3, 2), (None, None)),
        (Shape((), 3, 1, 7, 8, 3, 2), (None, None)),
        (Shape((2, 2), 2, 1, 7, 6, 2, 3), (None, None)),
        (SHAPE, ((7, 1, 1), (2, 0, 9))),
        (SHAPE, ((0, 9, 0), (5, 0, 6))),
    ],
    ids=["fewer tokens than ranks", "no batch", "two leading axes", "no keys on a rank", "no queries on two"],
)
def test_awkward_shapes_by_torch_operations(pool, shape, lengths):
    for names, layout in ((("causal", "bias", "dropout"), "zigzag"), (("window", "sinks", "segments"), "contiguous")):
        assert_equal(pool, make(names, shape), 3, layout, lengths, "blocked")


def in_small_tiles(group: Any, rank: int, *args: Any) -> Any:
    """Tiles of one token, so that keys travel in pieces; and blocks of a row or a few."""
    from attngrad.backends.blocked import blocks
    from attngrad.distributed import _travel

    before = _travel.TILE, blocks.BUDGET, blocks._TIMES_Q
    _travel.TILE, blocks.BUDGET, blocks._TIMES_Q = 1, 600, 0
    try:
        return run_case(group, rank, *args)
    finally:
        _travel.TILE, blocks.BUDGET, blocks._TIMES_Q = before


@pytest.mark.parametrize(("ranks", "lengths"), [(2, (None, None)), (3, ((7, 1, 1), (2, 0, 9)))])
def test_pieces_and_blocks_by_torch_operations(pool, ranks, lengths):
    for names in ((), EVERYTHING):
        c = make(names, SHAPE)
        got = joined(pool.run(ranks, in_small_tiles, c, "zigzag", lengths, "blocked"), c, "zigzag", lengths)
        for name, x in expected(c).items():
            finite = np.isfinite(x)
            assert np.allclose(got[name][finite], x[finite], rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("names", [(), ("bias", "sinks", "softcap", "dropout")], ids=label)
@pytest.mark.parametrize("by", ["mask", "segments"])
def test_what_a_query_that_sees_nothing_holds_reaches_nothing(pool, by, names):
    hidden = np.isin(np.arange(SHAPE.t), HIDDEN)
    c, found = make(names, SHAPE), []
    if by == "mask":
        c.options["mask"] = ~hidden[:, None] & (np.random.default_rng(0).random((SHAPE.t, SHAPE.s)) > 0.3)
    else:
        c.options["segments"] = (np.tile(hidden.astype(int), (2, 1)), np.zeros((2, SHAPE.s), int))
    for value in (0.0, np.nan, np.inf):
        c.q[..., HIDDEN, :] = c.dout[..., HIDDEN, :] = c.t.q[..., HIDDEN, :] = value
        assert_equal(pool, c, 2, "zigzag", backend="blocked")
        found.append(joined(pool.run(3, run_case, c, "zigzag", (None, None), "blocked"), c, "zigzag"))
    for got in found:
        assert all(np.array_equal(x, found[0][name]) for name, x in got.items())
        assert not any(got[name][..., HIDDEN, :].any() for name in ("out", "out_dot", "dq"))


@pytest.mark.parametrize("sigma", [60.0, 900.0])
def test_a_sink_that_outweighs_every_key(pool, sigma):
    c = make(("bias", "sinks"), SHAPE)
    c.options["sinks"][...] = sigma
    assert_equal(pool, c, 2, "zigzag", backend="blocked")
    c.dout[0, 0, 5, 0] = np.nan  # which reaches what the row sees while exp(s - sigma) is not zero
    got = joined(pool.run(2, run_case, c, "zigzag", (None, None), "blocked"), c, "zigzag")
    want = expected(c, reference)
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        assert np.array_equal(np.isnan(got[name]), np.isnan(want[name]) & (sigma == 60.0)), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_low_precision_keeps_the_rounding_bound_by_torch_operations(pool, dtype):
    c = make(("causal", "bias", "sinks", "dropout"), Shape((1,), 4, 2, 40, 40, 8, 8)).cast(dtype)
    assert_within_rounding(pool, c, 3, "zigzag", "blocked")


def test_results_by_torch_operations_repeat_bit_for_bit(pool):
    first, second = (
        pool.run(3, run_case, make(EVERYTHING, SHAPE), "zigzag", (None, None), "blocked") for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_headers_and_probes_are_on_the_cpu_whatever_the_default_device(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    probes: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "irecv", lambda x, *to: probes.append(x))
    try:
        ring = Ring("ring_attention", "forward", dist.group.WORLD, 1.0, torch.device("cpu"))
        with torch.device("meta"):
            assert ring.exchange({"tokens": [3, 4]}) == [{"pass": "forward", "number": 0, "tokens": [3, 4]}]
            assert not ring._is_closed(0)
        assert [x.device.type for x in probes] == ["cpu"]
    finally:
        dist.destroy_process_group()


# --- other devices: traced, with messages that go nowhere -------------------------------------------------------------


@pytest.fixture
def three_ranks(monkeypatch):
    """Rank 1 of 3, whose peers say what it says; gives the messages that it begins to send."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,meta:nccl")
    monkeypatch.setattr(Ring, "exchange", lambda self, record: [{"pass": 0, "number": 0, **record}] * 3)
    monkeypatch.setattr(Ring, "start", lambda self, sends, receives: sent.extend((*sends, *receives)))
    yield sent
    monkeypatch.undo()
    dist.destroy_process_group()


@pytest.mark.parametrize("names", [(), ("causal ragged", "bias", "sinks"), EVERYTHING], ids=label)
def test_a_ring_on_a_device_reads_no_number_of_it_and_sends_its_memory(three_ranks, names):
    case = make(names, SHAPE)

    def move(x: Any) -> Any:
        return torch.from_numpy(x).to("meta") if isinstance(x, np.ndarray) else x

    options = {name: tuple(map(move, x)) if name == "segments" else move(x) for name, x in case.options.items()}
    for name in ("mask", "bias"):
        if name in options:  # all columns
            options[name] = options[name].new_empty(*options[name].shape[:-1], 3 * SHAPE.s)
    if isinstance(case.options.get("offset"), np.ndarray):  # whose numbers all ranks compare: they are read
        options["offset"] = 2
    q, k, v = (move(x).requires_grad_() for x in case.qkv)
    out, lse = ring_attention(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    _, moved = torch.func.jvp(
        lambda x: ring_attention(x, k.detach(), v.detach(), **options), (q.detach(),), (q.detach(),)
    )
    assert (out.shape, out.device.type, lse.shape) == (case.dout.shape, "meta", case.dlse.shape)
    assert [(g.shape, g.device.type) for g in grads] == [(x.shape, "meta") for x in (q, k, v)]
    assert moved.shape == out.shape
    assert {x.device.type for x in three_ranks} == {"meta"}


def test_headers_go_by_the_cpu_where_the_group_sends_from_there(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, x = dist.group.WORLD, torch.zeros(1, device="meta")
        assert header_device(group, x).type == "cpu"
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "meta:nccl")
        assert header_device(group, x).type == header_device(group, 3.0).type == "meta"
    finally:
        dist.destroy_process_group()


# --- what is refused --------------------------------------------------------------------------------------------------


def by_different_backends(group: Any, rank: int, odd: int) -> None:
    x = torch.zeros(1, 2, 4, 3)
    with use_backend("blocked" if rank == odd else None):
        ring_attention(x, x, x, group=group)


def test_ranks_must_agree_on_the_backend(pool):
    for ranks, odd in ((2, 1), (3, 0)):
        for kind, message in pool.errors(ranks, by_different_backends, odd):
            assert kind is ValueError
            assert f"backend must be the same on every rank; got blocked on rank {odd}, but cpu on rank" in message


def on_a_device(group: Any, rank: int, odd: int, where: str) -> None:
    x = torch.zeros(1, 2, 4, 3)
    y = x.to("meta") if rank == odd else x
    if where == "unshard":
        unshard(y, group=group)
    ring_attention(y if where != "k" else x, y, y if where != "k" else x, group=group)


@pytest.mark.parametrize("where", ["q", "unshard"])
def test_a_device_that_the_group_does_not_send_from_is_an_error_on_every_rank(pool, where):
    for kind, message in pool.errors(2, on_a_device, 1, where):
        assert kind is ValueError
        assert f"on rank 1, {'q' if where == 'q' else 'x'} must be on a device that the group sends from" in message
        assert 'cpu by gloo); got meta. Make the group with init_process_group("cpu:gloo,meta:...").' in message


def test_tensors_on_different_devices_are_an_error_on_every_rank(pool):
    for kind, message in pool.errors(2, on_a_device, 0, "k"):
        assert kind is ValueError
        assert "on rank 0, k must be on the device of q, cpu; got meta" in message


def test_gloo_is_not_asked_to_send_from_a_gpu(monkeypatch):
    """It is registered for CUDA, but sends from rank to rank the memory of CPUs alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _transport._transports(dist.group.WORLD) == {"cpu": "gloo"}
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)

        class OnGpu:
            device = torch.device("cuda", 0)

        with pytest.raises(ValueError, match=r'got cuda:0. Make the group with .*"cpu:gloo,cuda:nccl"'):
            check_device("ring_attention", "q", OnGpu(), dist.group.WORLD)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        check_device("ring_attention", "q", OnGpu(), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def refused(group: Any, rank: int) -> None:
    before, blocked.refuses = blocked.refuses, lambda x, o: "no such thing here." if rank else None
    try:
        by_different_backends(group, 0, 0)
    finally:
        blocked.refuses = before


def test_what_the_backend_of_one_rank_refuses_is_an_error_on_every_rank(pool):
    for kind, message in pool.errors(2, refused):
        assert kind is NotImplementedError
        assert "on rank 1, no such thing here." in message


# --- second order: refused, never cut off in silence ------------------------------------------------------------------


def second_order(group: Any, rank: int, way: str, backend: str) -> Any:
    func = torch.func
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    y = torch.randn(2, 5, 3, dtype=torch.float64)

    def f(a: torch.Tensor, b: torch.Tensor = y) -> torch.Tensor:
        with use_backend(backend):
            return ring_attention(a, b, b, group=group, causal=True)

    def loss(a: torch.Tensor) -> torch.Tensor:
        return f(a).square().sum()

    if way == "create_graph":
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        assert g.requires_grad  # so that what follows is asked for
        return torch.autograd.grad(g.sum(), leaf)
    if way == "backward of the cotangent":  # linear in dout, which alone requires grad
        leaf, dout = x.clone().requires_grad_(), y.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf, dout, create_graph=True)
        assert g.requires_grad
        return torch.autograd.grad(g.sum(), dout)
    ways = {
        "grad of grad": lambda: func.grad(lambda a: func.grad(loss)(a).sum())(x),
        "jvp of grad": lambda: func.jvp(func.grad(loss), (x,), (y,)),
        "grad of jvp": lambda: func.grad(lambda a: func.jvp(f, (a,), (y,))[1].square().sum())(x),
        "jvp of jvp": lambda: func.jvp(lambda a: func.jvp(f, (a,), (y,))[1], (x,), (y,)),
        "hessian": lambda: func.hessian(loss)(x),
        "vmap": lambda: func.vmap(f)(x[None]),
        "batched gradients": lambda: _batched(f, x),
    }
    return ways[way]()


def _batched(f: Any, x: torch.Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    out = f(leaf)
    return torch.autograd.grad(out, leaf, torch.stack([out.detach()] * 2), is_grads_batched=True)


WAYS = [
    "create_graph",
    "backward of the cotangent",
    "grad of grad",
    "jvp of grad",
    "grad of jvp",
    "jvp of jvp",
    "hessian",
    "vmap",
    "batched gradients",
]


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_is_refused_and_never_cut_off(pool, way, backend):
    for kind, message in pool.errors(2, second_order, way, backend):
        assert kind is NotImplementedError, message
        assert "not available: the ring has first derivatives" in message


def first_gradient_again(group: Any, rank: int) -> Any:
    return run_case(group, rank, make((), SHAPE), "zigzag")["dq"].shape


def test_a_group_goes_on_after_a_refusal(pool):
    pool.errors(2, second_order, "create_graph", "cpu")
    assert all(pool.run(2, first_gradient_again))
