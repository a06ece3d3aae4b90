"""Ring attention on one to four ranks gives what one process gives; ranks that differ all raise the same error."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attngrad
from attngrad.backends import cpu
from attngrad.core.operands import Operands
from attngrad.core.options import Options
from attngrad.distributed import plan, shard
from attngrad.distributed._layout import Layout, even
from attngrad.distributed._ring import Job
from attngrad.testing import relative_error
from cases import EVERYTHING, OPTIONS, SINGLES, Shape, label, make
from ring_checks import LAYOUTS, SHAPE, assert_equal, assert_within_rounding, expected, joined
from ring_workers import Pool, positions, run_case

# --- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
def test_ranks_give_what_one_process_gives(pool, names, layout):
    for ranks in (1, 2, 3, 4):
        assert_equal(pool, make(names, SHAPE), ranks, layout)


@pytest.mark.thorough
@pytest.mark.parametrize("names", list(itertools.combinations(sorted(OPTIONS), 2)), ids=label)
def test_pairs_of_options_combine_across_ranks(pool, names):
    for layout in LAYOUTS:
        assert_equal(pool, make(names, SHAPE), 3, layout)


SHAPES = {
    "self-attention": Shape((1,), 2, 1, 16, 16, 4, 4),
    "fewer tokens than ranks": Shape((2,), 2, 2, 2, 3, 3, 2),
    "one query": Shape((1,), 2, 1, 1, 9, 3, 3),
    "no batch": Shape((), 3, 1, 7, 8, 3, 2),
    "two leading axes": Shape((2, 2), 2, 1, 7, 6, 2, 3),
    "longer than a tile": Shape((1,), 2, 1, 150, 230, 16, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_of_every_kind(pool, shape, layout):
    assert_equal(pool, make(("causal", "bias", "dropout"), shape), 4, layout)
    assert_equal(pool, make(("window", "sinks", "segments"), shape), 3, layout)


def run_case_in_pieces(group: Any, rank: int, *args: Any) -> Any:
    from attngrad.distributed import _travel

    before, _travel.TILE = _travel.TILE, 1
    try:
        return run_case(group, rank, *args)
    finally:
        _travel.TILE = before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "lengths"), [(1, (None, None)), (2, (None, None)), (3, ((7, 1, 1), (2, 0, 9)))])
def test_shards_that_travel_in_pieces(pool, ranks, lengths, layout):
    for names in ((), EVERYTHING):
        c = make(names, SHAPE)
        got = joined(pool.run(ranks, run_case_in_pieces, c, layout, lengths), c, layout, lengths)
        for name, x in expected(c).items():
            finite = np.isfinite(x)
            assert relative_error(got[name][finite], x[finite]) < 1e-12, name


@pytest.mark.thorough
def test_eight_ranks():
    lengths = ((1, 2, 0, 1, 0, 3, 1, 1), (2, 0, 3, 1, 1, 0, 2, 2))
    eight = Pool((8,))
    for layout in LAYOUTS:
        assert_equal(eight, make(("causal", "bias", "dropout"), Shape((1,), 2, 1, 19, 23, 3, 2)), 8, layout)
        assert_equal(eight, make(EVERYTHING, SHAPE), 8, layout, lengths)
    eight.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [((7, 1, 1), (2, 6, 3)), ((0, 9, 0), (5, 0, 6)), ((4, 0, 5), (0, 0, 11))])
def test_ranks_may_hold_any_number_of_tokens(pool, lengths, layout):
    for names in (("causal", "bias", "dropout"), EVERYTHING):
        assert_equal(pool, make(names, SHAPE), 3, layout, lengths)


LOW = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)


@pytest.mark.parametrize("layout", LAYOUTS)
@LOW
def test_low_precision_keeps_the_rounding_bound(pool, dtype, layout):
    c = make(("causal", "bias", "sinks", "dropout"), Shape((1,), 4, 2, 40, 40, 8, 8)).cast(dtype)
    assert_within_rounding(pool, c, 3, layout)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING], ids=label)
@LOW
def test_low_precision_keeps_the_rounding_bound_with_every_option(pool, dtype, names):
    for ranks in (1, 2, 3, 4):
        for layout in LAYOUTS:
            assert_within_rounding(pool, make(names, SHAPE).cast(dtype), ranks, layout)


def test_large_scores_keep_their_digits(pool):
    c = make((), SHAPE)
    c.q = 300.0 * c.q
    for layout in LAYOUTS:
        assert_equal(pool, c, 3, layout)


def hiding(rows: list[int], by: str) -> dict[str, Any]:
    """Options that let the queries of SHAPE see some keys, and these ``rows`` none."""
    hidden = np.isin(np.arange(SHAPE.t), rows)
    if by == "causal":
        return {"causal": True, "offset": -len(rows)}
    if by == "segments":
        return {"segments": (np.tile(hidden.astype(int), (2, 1)), np.zeros((2, SHAPE.s), int))}
    return {"mask": ~hidden[:, None] & (np.random.default_rng(0).random((SHAPE.t, SHAPE.s)) > 0.3)}


@pytest.mark.parametrize("names", [(), ("bias",), ("sinks",), ("bias", "sinks", "softcap", "dropout")], ids=label)
@pytest.mark.parametrize("by", ["causal", "mask", "segments"])
def test_what_a_query_that_sees_nothing_holds_reaches_nothing(pool, by, names):
    rows = [0, 1, 2, 3] if by == "causal" else [0, 5, 8]
    c = make(names, SHAPE)
    c.options |= hiding(rows, by)
    for layout in LAYOUTS:
        found = []
        for value in (0.0, np.nan, np.inf, -np.inf):
            c.q[..., rows, :] = c.dout[..., rows, :] = c.t.q[..., rows, :] = value
            assert_equal(pool, c, 2, layout)
            found.append(joined(pool.run(2, run_case, c, layout), c, layout))
        for got in found:
            assert all(np.array_equal(x, found[0][name]) for name, x in got.items())
            assert not any(got[name][..., rows, :].any() for name in ("out", "out_dot", "dq", "dbias") if name in got)
            sigma = c.options.get("sinks", np.full(SHAPE.heads, -np.inf))
            assert np.array_equal(got["lse"][..., rows], np.broadcast_to(sigma[:, None], (2, SHAPE.heads, len(rows))))


@pytest.mark.parametrize("sigma", [60.0, 900.0])
def test_a_sink_that_outweighs_every_key_gives_what_one_process_gives(pool, sigma):
    """The sum of such a row is that of a row that sees nothing, but its out is not zero while exp(s - sigma) is not."""
    c = make(("bias", "sinks"), SHAPE)
    c.options["sinks"][...] = sigma
    for value in (c.dout[0, 0, 5, 0], np.nan):
        c.dout[0, 0, 5, 0] = value
        for layout in LAYOUTS:
            assert_equal(pool, c, 2, layout)


def test_results_are_the_same_bit_for_bit_each_time(pool):
    c = make(EVERYTHING, SHAPE)
    first, second = (pool.run(4, run_case, c, "zigzag") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def bytes_sent(group: Any, rank: int) -> list[int]:
    """By a forward and a backward pass."""
    from attngrad.distributed import _ring, ring_attention

    sent, passes = [], {name: getattr(_ring, name) for name in ("forward", "backward")}

    def counting(name: str) -> Any:
        def run(ring: Any, *args: Any) -> Any:
            result = passes[name](ring, *args)
            sent.append(ring.sent)
            return result

        return run

    for name in passes:
        setattr(_ring, name, counting(name))
    x = torch.zeros(2, 4, 8, 16, requires_grad=True)
    k = torch.zeros(2, 2, 8, 16)
    ring_attention(x, k, k, group=group).sum().backward()
    for name, run in passes.items():
        setattr(_ring, name, run)
    return sent


def test_ranks_send_the_bytes_that_the_plan_says(pool):
    for ranks in (1, 3, 4):
        p = plan(8 * ranks, ranks, 4, 16, bandwidth=1e9, flops=1e9, batch=2, key_heads=2)
        for forward, backward in pool.run(ranks, bytes_sent):
            assert forward == (ranks - 1) * p.forward_bytes
            assert forward + backward == p.total_bytes


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_shards_hold_every_token_once_and_are_even(layout, ranks):
    for n in range(3 * ranks + 2):
        x = torch.arange(n)
        shards = [shard(x, rank=r, ranks=ranks, dim=-1, layout=layout) for r in range(ranks)]
        for mine, theirs in zip(shards, positions(n, ranks, layout), strict=True):
            assert mine.tolist() == theirs.tolist()
        assert sorted(torch.cat(shards).tolist()) == list(range(n))
        lengths = [len(s) for s in shards]
        assert max(lengths) - min(lengths) <= 1
        assert tuple(lengths) == even(n, ranks, layout)


def test_zigzag_balances_causal_work():
    n, ranks = 64, 4
    seen = {layout: [int(np.sum(p + 1)) for p in positions(n, ranks, layout)] for layout in LAYOUTS}
    assert len(set(seen["zigzag"])) == 1
    assert max(seen["contiguous"]) > 5 * min(seen["contiguous"])
    for layout in LAYOUTS:
        where, o = Layout(layout, even(n, ranks, layout)), Options(1.0, causal=True)
        job, x = Job(o, cpu, where, where), Operands(None, None, None)
        for rank in range(ranks):
            tiles = [tile for source in range(ranks) for tile in job.tiles(x, rank, where.runs(source))]
            assert (
                len(tiles) < len(where.runs(rank)) * sum(len(where.runs(r)) for r in range(ranks)) or rank == ranks - 1
            )
            pairs = sum(
                sum(min(max(i + tile.shift + 1, 0), tile.columns.length) for i in range(tile.rows.length))
                for tile in tiles
            )
            assert pairs == seen[layout][rank]  # nothing that is left out could be seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_hold_every_token_once_and_stand_in_their_places(layout):
    for lengths in ((8, 8, 8), (5, 0, 12), (1, 2, 3)):
        where = Layout(layout, lengths)
        for count in (1, 2, 5):
            for rank, places in enumerate(positions(sum(lengths), 3, layout, lengths)):
                runs = [run for piece in where.pieces(rank, count) for run in piece]
                found = {run.local + i: run.start + i for run in runs for i in range(run.length)}
                assert len(found) == sum(run.length for run in runs)
                assert found == dict(enumerate(places.tolist()))
                sizes = [sum(run.length for run in piece) for piece in where.pieces(rank, count)]
                assert max(sizes) - min(sizes) <= 2


def test_zigzag_balances_the_causal_work_of_every_piece():
    n, ranks, count = 96, 4, 3
    where, o = Layout("zigzag", even(n, ranks, "zigzag")), Options(1.0, causal=True)
    job, x = Job(o, cpu, where, where), Operands(None, None, None)
    for piece in range(count):
        pairs = [
            sum(
                min(max(i + tile.shift + 1, 0), tile.columns.length)
                for tile in job.tiles(x, rank, where.pieces((rank - hops) % ranks, count)[piece])
                for i in range(tile.rows.length)
            )
            for hops in range(ranks)
            for rank in range(ranks)
        ]
        assert max(pairs) - min(pairs) <= 4 + n // (2 * ranks)  # the diagonal


def gather(group: Any, rank: int, x: Any, layout: str, dim: int) -> Any:
    from attngrad.distributed import shard, unshard

    tensor = torch.from_numpy(x)
    return unshard(shard(tensor, group=group, layout=layout, dim=dim), group=group, layout=layout, dim=dim).numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.bool_])
def test_unshard_is_the_inverse_of_shard(pool, layout, dtype):
    x = np.random.default_rng(0).standard_normal((2, 11, 3)).astype(dtype)
    for dim in (1, -1, 0):
        for y in pool.run(3, gather, x, layout, dim):
            assert np.array_equal(x, y)


# --- autograd -------------------------------------------------------------------------------------------------------


def transforms(group: Any, rank: int) -> list[Any]:
    """torch.func.jvp and vjp; a tangent on one rank alone."""
    from torch.autograd import forward_ad

    from attngrad.distributed import ring_attention

    torch.manual_seed(rank)
    x, t = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)

    def f(y: Any) -> Any:
        return ring_attention(y, y, y, group=group, causal=True)

    _, moved = torch.func.jvp(f, (x,), (t,))
    out, pull = torch.func.vjp(f, x)
    (dx,) = pull(torch.ones_like(out))
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, t) if rank == 0 else x
        alone = forward_ad.unpack_dual(f(y)).tangent
    return [z.detach().numpy() for z in (x, t, moved, dx, alone)]


def test_torch_func_and_a_tangent_on_one_rank_alone(pool):
    found = pool.run(2, transforms)
    order = np.argsort(np.concatenate(positions(10, 2, "zigzag")))
    x, t, moved, dx, alone = (np.concatenate(parts, axis=-2)[..., order, :] for parts in zip(*found, strict=True))
    _, out_dot = attngrad.jvp((x, x, x), (t, t, t), causal=True)
    grads = attngrad.vjp(x, x, x, causal=True)[1](np.ones_like(x))
    assert relative_error(moved, out_dot) < 1e-12
    assert relative_error(dx, grads.q + grads.k + grads.v) < 1e-12
    still = t.copy()
    still[..., np.isin(np.arange(10), positions(10, 2, "zigzag")[1]), :] = 0.0
    assert relative_error(alone, attngrad.jvp((x, x, x), (still,) * 3, causal=True)[1]) < 1e-12


def twice(group: Any, rank: int) -> None:
    from attngrad.distributed import ring_attention

    x = torch.randn(2, 5, 3, requires_grad=True)
    out = ring_attention(x, x, x, group=group)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    dx.sum().backward()


def test_a_second_derivative_is_refused(pool):
    for kind, message in pool.errors(2, twice):
        assert kind is NotImplementedError
        assert "double backward is not available" in message


def test_segments_of_all_keys_may_be_given(pool):
    ids = np.repeat([0, 1, 2], [4, 3, 4])
    whole, parts = (pool.run(3, with_segments, ids, flag) for flag in (True, False))
    for a, b in zip(whole, parts, strict=True):
        assert np.array_equal(a, b)


def with_segments(group: Any, rank: int, ids: Any, whole: bool) -> Any:
    from attngrad.distributed import ring_attention, shard

    x = shard(torch.linspace(0, 1, 33).reshape(1, 11, 3), group=group)
    mine = shard(torch.from_numpy(ids), group=group, dim=-1)
    return ring_attention(x, x, x, group=group, segments=(mine, torch.from_numpy(ids) if whole else mine)).numpy()


# --- disagreement ---------------------------------------------------------------------------------------------------


def differ(group: Any, rank: int, odd: int, change: dict[str, Any]) -> None:
    """One rank calls with other arguments than the rest."""
    from attngrad.distributed import ring_attention

    q = k = v = torch.zeros(2, 4, 6, 3)
    options: dict[str, Any] = {"causal": True, "layout": "zigzag"}
    if rank == odd:
        q, k, v = (change.get(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        options |= {name: x for name, x in change.items() if name not in ("q", "k", "v")}
    ring_attention(q, k, v, group=group, **options)


WIDE, NARROW = torch.zeros(2, 4, 6, 3, dtype=torch.float64), torch.zeros(2, 4, 6, 2)
CHANGES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"q": WIDE, "k": WIDE, "v": WIDE}, TypeError, "dtype must be the same on every rank"),
    "features of v": ({"v": NARROW}, ValueError, "features of v must be the same"),
    "features of q": ({"q": NARROW, "k": NARROW}, ValueError, "features of q and k must be the same"),
    "batch": ({n: torch.zeros(3, 4, 6, 3) for n in "qkv"}, ValueError, "leading axes must be the same"),
    "heads": ({"k": NARROW[:, :2, :, :1], "v": NARROW[:, :2], "q": NARROW[..., :1]}, ValueError, "must be the same"),
    "causal": ({"causal": False}, ValueError, "causal must be the same on every rank; got False on rank"),
    "window": ({"window": (2, 0)}, ValueError, "window must be the same"),
    "scale": ({"scale": 1.0}, ValueError, "scale must be the same"),
    "seed": ({"dropout": 0.1, "seed": 3}, ValueError, "dropout must be the same"),
    "offset": ({"offset": 1}, ValueError, "offset must be the same"),
    "layout": ({"layout": "contiguous"}, ValueError, "layout must be the same"),
    "sinks": ({"sinks": torch.zeros(4)}, TypeError, "the dtype of sinks must be the same"),
    "gradient": ({"q": torch.zeros(2, 4, 6, 3, requires_grad=True)}, ValueError, "whether a gradient is asked for"),
    "k against q": ({"k": NARROW}, ValueError, "k must have 3 features"),
    "k against v": ({"k": torch.zeros(2, 4, 5, 3)}, ValueError, "v must have 5 tokens"),
    "kind": ({"q": 3.0}, TypeError, "q must be a torch.Tensor"),
    "integers": ({n: torch.zeros(2, 4, 6, 3, dtype=torch.int64) for n in "qkv"}, TypeError, "q must have dtype"),
    "unknown option": ({"casual": True}, TypeError, "unknown option 'casual'"),
    "unknown layout": ({"layout": "spiral"}, ValueError, "layout must be one of"),
    "timeout": ({"timeout": -1.0}, ValueError, "timeout must be"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_rank_raises_the_same_error_which_names_the_rank_that_differs(pool, name):
    change, kind, text = CHANGES[name]
    for ranks, odd in ((2, 1), (4, 2)):
        errors = pool.errors(ranks, differ, odd, change)
        assert len(set(errors)) == 1, errors
        assert errors[0][0] is kind
        assert errors[0][1].startswith("ring_attention: ")
        assert text in errors[0][1]
        assert f"on rank {odd}" in errors[0][1]


def wrong_columns(group: Any, rank: int, odd: int, name: str) -> None:
    from attngrad.distributed import ring_attention

    q = torch.zeros(4, 6, 3)
    columns = 18 if rank != odd else 6
    plane = torch.zeros(6, columns) if name == "bias" else torch.ones(6, columns, dtype=torch.bool)
    ring_attention(q, q, q, group=group, **{name: plane})


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_columns_are_those_of_all_ranks(pool, name):
    errors = pool.errors(3, wrong_columns, 1, name)
    assert len(set(errors)) == 1
    kind, message = errors[0]
    assert kind is ValueError
    assert f"ring_attention: {name} must broadcast to" in message
    assert "on rank 1 = (4, 6, 18); got shape (6, 6)" in message


def out_of_order(group: Any, rank: int) -> None:
    from attngrad.distributed import ring_attention

    x = torch.zeros(2, 4, 3, requires_grad=True)
    out = ring_attention(x, x, x, group=group)
    if rank == 0:
        out.sum().backward()
    else:
        ring_attention(x, x, x, group=group)


def test_passes_out_of_order_are_an_error_on_every_rank(pool):
    for kind, message in pool.errors(2, out_of_order):
        assert kind is RuntimeError
        assert "pass must be the same on every rank; got forward on rank 1, but backward on rank 0" in message


def group_outlives_its_end(group, rank):
    """Whether anything but the caller held a group of its own, after passes in both directions."""
    from torch import distributed as dist

    from attngrad.distributed import ring_attention

    own = dist.new_group()
    gc.disable()
    try:
        x = torch.ones(1, 3, 4, requires_grad=True)
        ring_attention(x, x, x, group=own).sum().backward()
        dist.destroy_process_group(own)
        held = weakref.ref(own)
        del own
        return held() is not None
    finally:
        gc.enable()


def test_a_group_ends_when_it_is_destroyed(pool):
    """Its threads would run on, and abort the process if it ends while they touch a tensor."""
    assert pool.run(4, group_outlives_its_end) == [False] * 4


def test_without_a_process_group_the_error_says_so():
    from attngrad.distributed import ring_attention

    x = torch.zeros(1, 2, 2)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ring_attention(x, x, x)
