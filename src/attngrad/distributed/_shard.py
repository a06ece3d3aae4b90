"""``shard`` and ``unshard``: from the whole sequence to the tokens of a rank, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from attngrad.core.checks import check_integer, fail
from attngrad.distributed._agreement import Record, agree, failed
from attngrad.distributed._layout import Layout, check_layout, even
from attngrad.distributed._transport import TIMEOUT, Ring, check_device, check_timeout, find_group, header_device
from attngrad.torch._tensors import check_tensor


def shard(
    x: Tensor,
    *,
    group: Any = None,
    layout: str = "zigzag",
    dim: int = -2,
    lengths: Sequence[int] | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> Tensor:
    """The tokens of this rank, along ``dim`` of the whole ``x``; a copy, through which gradients flow.

    ``dim`` is -2 for q, k, v and for the rows of a bias or mask, -1 for segment ids and lse. Ranks get equally many
    tokens, or one more; ``lengths`` (one number per rank) says otherwise. ``rank`` and ``ranks`` replace the group.

    >>> shard(torch.arange(7), rank=0, ranks=2, dim=-1)
    tensor([0, 1, 6])
    >>> shard(torch.arange(7), rank=0, ranks=2, dim=-1, layout="contiguous")
    tensor([0, 1, 2, 3])
    """
    name = check_layout("shard", layout)
    check_tensor("shard", "x", x)
    if rank is None and ranks is None:
        group = find_group("shard", group)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rank, ranks = check_integer("shard", "rank", rank), check_integer("shard", "ranks", ranks)
    if not 0 <= rank < ranks:
        fail(ValueError, "shard", "rank", f"be from 0 to {ranks - 1}, as ranks is {ranks}", rank)
    axis = _axis("shard", x, dim)
    n = x.shape[axis]
    each = even(n, ranks, name) if lengths is None else tuple(check_integer("shard", "lengths", m) for m in lengths)
    if len(each) != ranks or sum(each) != n or min(each) < 0:
        fail(ValueError, "shard", "lengths", f"be {ranks} numbers >= 0 that add up to {n}", each)
    parts = [x.narrow(axis, run.start, run.length) for run in Layout(name, each).runs(rank)]
    return torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0).clone()


def unshard(x: Tensor, *, group: Any = None, layout: str = "zigzag", dim: int = -2, timeout: float = TIMEOUT) -> Tensor:
    """The whole sequence, on every rank, from what each rank holds; without gradient. All ranks call it together.

    The inverse of ``shard`` with the same ``layout`` and ``dim``, whatever the lengths: each rank's own are exchanged.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)     # under torchrun: "gloo" alone
    >>> unshard(shard(torch.arange(7), dim=-1), dim=-1)
    tensor([0, 1, 2, 3, 4, 5, 6])
    >>> dist.destroy_process_group()
    """
    group = find_group("unshard", group)
    seconds = check_timeout("unshard", timeout)
    ring = Ring("unshard", "gathering", group, seconds, header_device(group, x))
    axis = 0
    try:
        name = check_layout("unshard", layout)
        check_tensor("unshard", "x", x)
        check_device("unshard", "x", x, group)
        axis = _axis("unshard", x, dim)
        others = [int(m) for i, m in enumerate(x.shape) if i != axis]
        record: Record = {
            "device": x.device.type,
            "layout": name,
            "dtype": str(x.dtype),
            "axis": axis,
            "other axes": others,
            "tokens": x.shape[axis],
        }
    except (TypeError, ValueError) as error:
        record = failed(error)
    same = [(name, ValueError) for name in ("device", "layout", "axis", "other axes")] + [("dtype", TypeError)]
    records = agree(ring, record, same)
    where = Layout(layout, tuple(r["tokens"] for r in records))
    shape = list(x.shape)
    shape[axis] = where.total
    whole = x.new_empty(shape)
    with ring.guarded():
        here = x.detach().contiguous()
        for step in range(ring.size):
            ring.step = step + 1
            if step + 1 < ring.size:
                shape[axis] = where.lengths[ring.source(step + 1)]
                there = x.new_empty(shape)
                ring.start([here], [there])
            for run in where.runs(ring.source(step)):
                whole.narrow(axis, run.start, run.length).copy_(here.narrow(axis, run.local, run.length))
            if step + 1 < ring.size:
                ring.wait()
                here = there
    return whole


def _axis(function: str, x: Tensor, dim: object) -> int:
    axis = check_integer(function, "dim", dim)
    if not -x.ndim <= axis < x.ndim:
        fail(ValueError, function, "dim", f"be an axis of x, which has {x.ndim}", axis)
    return axis % x.ndim
