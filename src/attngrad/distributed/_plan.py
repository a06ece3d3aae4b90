"""What a job of some size needs: memory, bytes and time, before it runs."""

from __future__ import annotations

from typing import NamedTuple

from attngrad.core.checks import check_flag, check_integer, check_real, fail
from attngrad.distributed._travel import TILE, pieces


class Plan(NamedTuple):
    """Bytes and seconds of one rank; a step is the keys of one rank, all pieces. ``time`` is forward and backward.

    >>> found = plan(1_000_000, 8, heads=32, dim=128, bandwidth=1e9, flops=1e12)
    >>> found.tokens, found.bound
    (125000, 'compute')
    """

    tokens: int
    """n / ranks, rounded up."""
    memory: int
    """At the height of the backward pass: ``held``, ``travelling`` and ``tile`` together."""
    forward_bytes: int
    """Sent by each rank in a step of the forward pass: k and v."""
    backward_bytes: int
    """The same of the backward pass: k and v, and the sums for dk and dv."""
    total_bytes: int
    """Sent by each rank in both passes."""
    compute_time: float
    """Of a step of both passes, in seconds, if nothing but arithmetic took time."""
    transfer_time: float
    """Of a step of both passes, if nothing but messages took time."""
    step_time: float
    """The larger of the two, pass by pass, for they overlap."""
    time: float
    """Of both passes, all steps and the last hop of dk and dv."""
    efficiency: float
    """The time of the arithmetic over the whole."""
    held: int
    """Of the memory: q, k, v, out, dout, dq, dk, dv and the statistics of the rows; falls as 1 / ranks."""
    travelling: int
    """Of the memory: two pieces of k and v, and three (of two ranks, two) of the sums for dk and dv."""
    tile: int
    """Of the memory: what one call of the kernels gives; the same for any number of ranks."""

    @property
    def bound(self) -> str:
        """What a step waits for: "compute" or "transfer"."""
        return "compute" if self.compute_time >= self.transfer_time else "transfer"


def plan(
    n: int,
    ranks: int,
    heads: int,
    dim: int,
    bandwidth: float,
    flops: float,
    *,
    batch: int = 1,
    key_heads: int | None = None,
    itemsize: int = 4,
    causal: bool = False,
) -> Plan:
    """Memory, bytes and the time bound of ``ring_attention``, forward and backward, on each of ``ranks`` ranks.

    ::

        time of a step = max(2 (D + D) B H (n / ranks)^2 / flops, bytes / bandwidth)    backward: 2.5 times the FLOPs
        memory         = 8 tensors of a shard + 5 pairs of them / pieces + a tile      pieces: 8, of 2048 tokens or more

    ``bandwidth`` is what a rank sends in bytes per second while it receives as much; ``flops`` what its kernels reach
    (the benchmark measures it). ``itemsize`` is 2 for 16-bit inputs, whose sums are float32. ``causal`` halves the
    arithmetic, which zigzag deals out evenly. Latency, and work in steps that one neighbour waits for, are not counted.

    >>> p = plan(1_000_000, 64, heads=32, dim=128, bandwidth=10e9, flops=2e12, key_heads=8, itemsize=2, causal=True)
    >>> f"{p.memory / 1e9:.1f} GB, {p.time:.0f} s, {p.bound}, {p.efficiency:.2f}"
    '1.4 GB, 224 s, compute, 1.00'
    """
    name = "plan"
    sizes = {"n": n, "ranks": ranks, "heads": heads, "dim": dim, "batch": batch, "itemsize": itemsize}
    if key_heads is not None:
        sizes["key_heads"] = key_heads
    for argument, size in sizes.items():
        if check_integer(name, argument, size) < 1:
            fail(ValueError, name, argument, "be at least 1", size)
    if itemsize not in (2, 4, 8):
        fail(ValueError, name, "itemsize", "be 2, 4 or 8 bytes", itemsize)
    for argument, rate in (("bandwidth", bandwidth), ("flops", flops)):
        if check_real(name, argument, rate) <= 0.0:
            fail(ValueError, name, argument, "be positive", rate)
    key_heads = heads if key_heads is None else key_heads
    if heads % key_heads:
        fail(ValueError, name, "key_heads", f"divide heads, {heads}", key_heads)
    check_flag(name, "causal", causal)

    tokens = -(-n // ranks)
    rows, keys = batch * heads * tokens, batch * key_heads * tokens  # vectors of dim numbers
    count, wide = pieces(tokens), max(itemsize, 4)
    block, sums = 2 * keys * dim * itemsize, 2 * keys * dim * wide
    held = 4 * rows * dim * itemsize + 2 * block + 4 * rows * wide  # q, out, dout, dq; k, v, dk, dv; statistics
    if itemsize == 2:
        held += 2 * rows * dim * wide + sums  # out, dq, dk and dv in float32
    travelling = (2 * block + min(ranks, 3) * sums) // count if ranks > 1 else 0
    tile = 2 * batch * (heads + key_heads) * min(tokens, TILE) * dim * wide  # q, out; dq; k, v; dk, dv
    forward_flops = 4.0 * dim * batch * heads * float(tokens) ** 2 * (0.5 if causal else 1.0)
    computes = (forward_flops / flops, 2.5 * forward_flops / flops)
    sends = (block, block + sums) if ranks > 1 else (0, 0)
    transfers = tuple(size / bandwidth for size in sends)
    total_bytes = (ranks - 1) * (2 * block + sums)
    # k and v travel in all steps but the last; the sums in all but the first two, and once more, while others compute
    step_time = sum(map(max, computes, transfers))
    hop = sums / bandwidth if ranks > 1 else 0.0
    time = (ranks - 1) * step_time + sum(computes) + hop / count
    arithmetic = ranks * sum(computes)
    return Plan(
        tokens,
        held + travelling + tile,
        *sends,
        total_bytes,
        sum(computes),
        sum(transfers),
        step_time,
        time,
        arithmetic / time if time else 1.0,
        held,
        travelling,
        tile,
    )
