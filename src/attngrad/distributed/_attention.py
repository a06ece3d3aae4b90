"""``ring_attention``: check here, agree with the other ranks, then run a pass; and its place in autograd."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngrad.backends.protocol import Backend
from attngrad.core.arrays import Array
from attngrad.core.binding import bind
from attngrad.core.checks import check_integer, fail
from attngrad.core.operands import DIFFERENTIABLE, INPUTS, NUMBERS, QKV, SEEDS, Input, Operands, Tangents, unflatten
from attngrad.core.options import ARRAYS, OPTIONS, STATIC, Kind, Option, OptionArguments, Options, reject_unknown
from attngrad.core.spec import Spec
from attngrad.distributed import _ring
from attngrad.distributed._agreement import Record, agree, failed
from attngrad.distributed._layout import Layout, check_layout
from attngrad.distributed._transport import TIMEOUT, Ring, check_device, check_timeout, find_group, header_device
from attngrad.torch._functions import N_DIFFERENTIABLE, Attention, recorded
from attngrad.torch._passes import bind_inputs, given, passes_of
from attngrad.torch._private import forward_mode_active
from attngrad.torch._tensors import Inputs, check_tensor, numpy_dtype, to_array, wide_dtype
from attngrad.torch._threads import lent

NAME = "ring_attention"


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str = "zigzag",
    timeout: float = TIMEOUT,
    **options: Unpack[OptionArguments],
) -> Any:
    """Attention of the own queries over the keys of all ranks, as one process would have it.

    ::

        out = softmax(cap(scale * q k^T) + bias, masked) v        k, v of all ranks, one after the other

    Every rank calls it with its ``shard`` of q, k and v; keys and values travel, and nothing grows with the whole
    sequence. Backward and forward mode; every rank must take part in them too. Ranks may hold different numbers of
    tokens. Tensors may be on any device whose memory the group sends; the backend is that of ``attngrad.torch``.

    Args:
        q, k, v: ``(..., Hq, T, D)``, ``(..., Hk, S, D)``, ``(..., Hk, S, E)``: the tokens of this rank.
        group: a process group of torch.distributed; by default that of all ranks.
        layout: "zigzag", which balances causal work, or "contiguous".
        timeout: how many seconds a wait for another rank may take before it is an error.
        options: those of ``attngrad.attention``, the same on every rank. ``bias`` and ``mask`` have the rows of this
            rank, in the order of its shard, and all columns, in the order of the whole. ``segments`` are the ids of
            the own queries and of the own keys (or of all, in the order of the whole). ``offset`` is that of the whole.

    Returns:
        out ``(..., Hq, T, E)``; with ``return_lse=True`` the pair ``(out, lse)``.

    Gradients of q, k and v are those of one process, sharded. ``sinks``, and a ``bias`` whose rows broadcast, stand on
    every rank: there each rank's gradient is the share of its own rows, as that of any parameter that ranks share, and
    an all-reduce adds them up.

    Raises:
        TypeError, ValueError: the same on every rank, where arguments are wrong or differ between ranks.
        RingError: a rank is gone or has not answered in time.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)     # under torchrun: "gloo" alone
    >>> q, k, v = torch.randn(3, 2, 8, 4)
    >>> ring_attention(q, k, v, causal=True).shape
    torch.Size([2, 8, 4])
    >>> dist.destroy_process_group()
    """
    group = find_group(NAME, group)
    local, seconds, record = None, TIMEOUT, {}
    try:
        seconds = check_timeout(NAME, timeout)
        local = _Local.check(q, k, v, layout, options, group)
        record = local.record()
    except (TypeError, ValueError, NotImplementedError) as error:
        record = failed(error)
    ring = Ring(NAME, "forward", group, seconds, header_device(group, q))
    records = agree(ring, record, _SAME)
    assert local is not None  # noqa: S101 for mypy: agree has raised
    passes = _settle(local, records, ring)
    x = local.inputs(any(r["tangents"] for r in records))
    out, lse, *_ = Attention.apply(passes, *x) if recorded(x) else passes.forward(x)
    if q.ndim == 2:
        out, lse = out[0], lse[0]
    return (out, lse) if options.get("return_lse", False) else out


# --- agreement ------------------------------------------------------------------------------------------------------


def _given(row: Option) -> str:
    """What records call the question of whether an array is given, or of which dtype."""
    if row.differentiable:
        return f"the dtype of {row.name}"
    return f"whether {row.name} {'are' if row.kind is Kind.IDS else 'is'} given"


_SHAPES = ("number of axes", "leading axes", "query heads", "key heads", "features of q and k", "features of v")
_SAME: tuple[tuple[str, type[Exception]], ...] = (
    ("backend", ValueError),
    ("device", ValueError),
    ("layout", ValueError),
    ("dtype", TypeError),
    *((name, ValueError) for name in _SHAPES),
    *((row.name, ValueError) for row in (*STATIC, *ARRAYS) if not row.is_array or row.kind is Kind.OFFSET),
    ("return_lse", ValueError),
    *((_given(row), TypeError if row.differentiable else ValueError) for row in ARRAYS if row.kind is not Kind.OFFSET),
    ("whether a gradient is asked for", ValueError),
    ("whether forward mode is on", ValueError),
)
"""What records must agree on, and the error where they do not."""


class _Local(NamedTuple):
    """The arguments of this rank, checked as far as one rank can; q, k and v with a heads axis."""

    x: Inputs
    options: Options
    return_lse: bool
    layout: str
    backend: Backend

    @classmethod
    def check(cls, q: Tensor, k: Tensor, v: Tensor, layout: object, options: Any, group: Any) -> _Local:
        """By the rules of the NumPy functions, on shapes and dtypes alone: values may belong to a transform."""
        reject_unknown(NAME, options)
        name = check_layout(NAME, layout)
        given = {key: x for key, x in options.items() if x is not None or key not in _OPTIONAL}
        for key, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(NAME, key, x, q if isinstance(q, Tensor) else None)
        check_device(NAME, "q", q, group)
        passes = passes_of(NAME, q, given)
        flat = bind_inputs(NAME, q, k, v, passes.options, given)._asdict()
        for key in NUMBERS:
            if isinstance(flat[key], Tensor):
                flat[key] = to_array(flat[key])
                if key in SEEDS:
                    flat[key] = check_integer(NAME, key, flat[key].item())
        for i in INPUTS:
            ids = flat[i.name]
            if i.kind is Kind.IDS and ids is not None and ids.dtype == torch.uint64 and (to_array(ids) >= 2**63).any():
                fail(ValueError, NAME, i.name, "have ids below 2**63", f"{to_array(ids).max()}")
        specs = {i.name: _spec(i, flat[i.name], k) for i in INPUTS}
        bound, o, return_lse = bind(NAME, specs["q"], specs["k"], specs["v"], {**given, **unflatten(specs)})
        if (reason := passes.backend.refuses(bound, o)) is not None:
            raise NotImplementedError(f"{NAME}: {reason}")
        if q.ndim == 2:
            flat |= {n: flat[n][None] for n in QKV}
        flat |= {i.name: _plane(flat[i.name]) for i in INPUTS if i.kind is Kind.PLANE}
        return cls(Inputs(**flat), o, return_lse, name, passes.backend)

    def record(self) -> Record:
        """What the other ranks are told."""
        x = self.x
        found: Record = {
            "backend": self.backend.NAME,
            "device": x.q.device.type,
            "layout": self.layout,
            "dtype": str(x.q.dtype),
            "number of axes": x.q.ndim,
            "leading axes": list(x.q.shape[:-3]),
            "query heads": x.q.shape[-3],
            "key heads": x.k.shape[-3],
            "features of q and k": x.q.shape[-1],
            "features of v": x.v.shape[-1],
            "return_lse": self.return_lse,
            "tokens": [x.q.shape[-2], x.k.shape[-2]],
            "planes": {i.name: list(getattr(x, i.name).shape) for i in INPUTS if self._has(i, Kind.PLANE)},
            "ids": {i.name: list(getattr(x, i.name).shape) for i in INPUTS if self._has(i, Kind.IDS)},
        }
        found |= {row.name: getattr(self.options, row.name) for row in STATIC}
        arrays = unflatten(x._asdict())
        for row in ARRAYS:
            value = arrays.get(row.name)
            if row.kind is Kind.OFFSET:
                found[row.name] = _offset_record(value)
            elif row.differentiable:
                found[_given(row)] = None if value is None else str(value.dtype)
            else:
                found[_given(row)] = value is not None
        differentiable = [y for y in x[:N_DIFFERENTIABLE] if y is not None]
        wanted = torch.is_grad_enabled() and any(y.requires_grad for y in differentiable)
        return found | {
            "whether a gradient is asked for": wanted,
            "whether forward mode is on": forward_mode_active(),
            "tangents": any(_moves(y) for y in differentiable),
        }

    def _has(self, i: Input, kind: Kind) -> bool:
        return i.kind is kind and getattr(self.x, i.name) is not None

    def inputs(self, moving: bool) -> Inputs:
        """The differentiable inputs; where another rank's move and none of these does, with a tangent of zero."""
        x = Inputs(*self.x[:N_DIFFERENTIABLE])
        if moving and not any(_moves(y) for y in x[:N_DIFFERENTIABLE] if y is not None):
            zero = forward_ad.make_dual(x.q, torch.zeros_like(x.q))  # type: ignore[no-untyped-call]
            x = x._replace(q=zero)
        return x


_OPTIONAL = {row.name for row in OPTIONS.values() if row.default is None}


def _spec(i: Input, x: Any, k: Tensor) -> Any:
    """What this rank can check of an input: a plane's columns, and how many ids keys have, depend on the others."""
    if not isinstance(x, Tensor):
        return x
    shape = () if i.kind is Kind.PLANE else tuple(x.shape)
    if i.kind is Kind.IDS and i.name.startswith("k_") and x.ndim and k.ndim > 1:
        shape = (*shape[:-1], k.shape[-2])
    return Spec(shape, numpy_dtype(NAME, x))


def _broadcasts(shape: list[int], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(n in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False))


def _plane(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape((1,) * (2 - x.ndim) + tuple(x.shape))


def _moves(x: Tensor) -> bool:
    return forward_mode_active() and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _offset_record(offset: Array | int | None) -> Any:
    """An array by its shape and a digest, for headers are short."""
    if offset is None or not isinstance(offset, np.ndarray):
        return None if offset is None else int(offset)
    if offset.size <= 16:
        return offset.tolist()
    values = np.ascontiguousarray(offset, np.int64)
    return f"an array of shape {offset.shape} with digest {hashlib.sha256(values.tobytes()).hexdigest()[:12]}"


@dataclass(frozen=True)
class RingPasses:
    """The passes of one call, for the functions of attngrad.torch; the backward pass looks it up again."""

    job: _ring.Job
    opening: Ring
    """That on which the ranks have agreed; the forward pass uses it up."""
    constants: dict[str, Any]
    """The operands without derivatives."""
    out_is_residual: bool
    """Where it is not rounded, for a shard is long."""

    @property
    def options(self) -> Options:
        """Those of the call."""
        return self.job.options

    def permit(self, what: str) -> NoReturn:
        """First derivatives alone."""
        raise NotImplementedError(
            f"{NAME}: {what} not available: the ring has first derivatives. "
            "attngrad.torch.attention has second ones, in one process."
        )

    def _ring(self, stage: str) -> Ring:
        return Ring(NAME, stage, self.opening.group, self.opening.timeout, self.opening.device)

    def _operands(self, x: Inputs) -> Operands:
        return Operands(**{n: getattr(x, n) for n in DIFFERENTIABLE}, **self.constants)

    def forward(self, x: Inputs) -> tuple[Tensor, ...]:
        """``out, lse``, and the residuals."""
        ring = self.opening
        with ring.guarded():
            out, lse, *residuals = lent(self.job.backend, _ring.forward, ring, self.job, self._operands(x))
        return out, lse, *residuals[self.out_is_residual :]

    def backward(self, x: Inputs, residuals: Sequence[Tensor], dout: Any, dlse: Any) -> tuple[Tensor, ...]:
        """The gradients of the inputs that are given, summed over ranks."""
        ring = self._ring("backward")
        agree(ring, {"call": self.opening.number}, [("call", RuntimeError)])
        with ring.guarded():
            arguments = (ring, self.job, self._operands(x), residuals, dout, dlse)
            return given(lent(self.job.backend, _ring.backward, *arguments))

    def forward_tangent(self, x: Inputs, t: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """``out_dot, lse_dot``."""
        dots = Tangents(*t)
        ring, operands = self._ring("tangent"), self._operands(x)
        moving = [dots.k is not None, dots.v is not None]
        records = agree(ring, {"call": self.opening.number, "moving": moving}, [("call", RuntimeError)])
        for i, name in enumerate(("k", "v")):
            if getattr(dots, name) is None and any(r["moving"][i] for r in records):
                dots = dots._replace(**{name: torch.zeros_like(getattr(operands, name))})
        with ring.guarded():
            return lent(self.job.backend, _ring.tangent, ring, self.job, operands, dots)


def _settle(local: _Local, records: list[Record], ring: Ring) -> RingPasses:
    """The layout of the whole; and the checks that need it, of every rank on every rank."""
    queries, keys = (Layout(local.layout, tuple(r["tokens"][i] for r in records)) for i in range(2))
    leading, heads = records[0]["leading axes"], records[0]["query heads"]
    for rank, r in enumerate(records):
        scores = (*leading, heads, queries.lengths[rank], keys.total)
        for name, shape in r["planes"].items():
            if not _broadcasts(shape, scores):
                what = f"(..., Hq, queries of the rank, keys of all ranks) on rank {rank}"
                fail(ValueError, NAME, name, f"broadcast to {what} = {scores}", f"shape {tuple(shape)}")
        for name, shape in r["ids"].items():
            if name.startswith("k_") and shape[-1] not in (keys.lengths[rank], keys.total):
                rule = f"have {keys.total} ids along axis -1, one per token"
                if len(records) > 1:
                    rule += f", or {keys.lengths[rank]}, one per key of rank {rank}"
                fail(ValueError, NAME, name, rule, f"shape {tuple(shape)}")
    arrays = unflatten(local.x._asdict())
    constants: dict[str, Any] = {}
    offset: Any = 0
    for row in ARRAYS:
        value = arrays.get(row.name)
        if row.kind is Kind.OFFSET:
            offset = keys.total - queries.total if value is None else value
            if np.ndim(offset):  # PyTorch adds no unsigned integers of 64 bits
                offset = np.asarray(offset, np.int64)
                constants[row.name] = torch.as_tensor(offset, device=local.x.q.device)
            else:
                constants[row.name] = offset
        elif row.kind is Kind.IDS and value is not None:
            constants[row.name] = _own_ids(value, leading, keys, ring.rank)
        elif not row.differentiable:
            constants[row.name] = value
    job = _ring.Job(local.options, local.backend, queries, keys, offset)
    rounds = wide_dtype(local.x.q.dtype) is not local.x.q.dtype
    return RingPasses(job, ring, constants, not rounds)


def _own_ids(ids: Any, leading: list[int], keys: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """The ids of the own queries and of the own keys, from those of all keys where these are given."""
    q_ids, k_ids = (x.to(torch.int64) for x in ids)
    if k_ids.shape[-1] != keys.lengths[rank]:
        runs = [k_ids[..., run.there] for run in keys.runs(rank)]
        k_ids = torch.cat(runs, -1) if runs else k_ids[..., :0]
    return q_ids, k_ids.expand(*leading, k_ids.shape[-1])
