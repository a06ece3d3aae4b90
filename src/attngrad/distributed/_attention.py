"""``ring_attention``: check here, agree with the other ranks, then run a pass; and its place in autograd."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Unpack

import numpy as np
from torch.autograd import forward_ad

import torch
from attngrad.backends.cpu.kernels import Saved
from attngrad.core.arrays import Array
from attngrad.core.checks import check_integer, fail
from attngrad.core.options import Operands, OptionArguments, Options, Tangents, bind, reject_unknown
from attngrad.distributed import _ring
from attngrad.distributed._agreement import Record, agree, failed
from attngrad.distributed._layout import Layout, check_layout
from attngrad.distributed._transport import TIMEOUT, Ring, check_timeout, find_group
from attngrad.torch._functions import recorded, transforms_active
from attngrad.torch._passes import check_segments, check_tensor, to_array, to_tensor
from torch import Tensor

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
    tokens.

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
        local = _Local.check(q, k, v, layout, options)
        record = local.record()
    except (TypeError, ValueError) as error:
        record = failed(error)
    ring = Ring(NAME, "forward", group, seconds)
    records = agree(ring, record, _SAME)
    assert local is not None  # noqa: S101 for mypy: agree has raised
    call = _settle(local, records, ring)
    x = local.tensors(any(r["tangents"] for r in records))
    if recorded(x):
        out, lse, *_ = _Attention.apply(call, ring, *x)  # type: ignore[no-untyped-call]
    else:
        out, lse, *_ = _Attention.forward(call, ring, *x)
    if q.ndim == 2:
        out, lse = out[0], lse[0]
    return (out, lse) if options.get("return_lse", False) else out


# --- agreement ------------------------------------------------------------------------------------------------------

_SAME = (
    ("layout", ValueError),
    ("dtype", TypeError),
    ("number of axes", ValueError),
    ("leading axes", ValueError),
    ("query heads", ValueError),
    ("key heads", ValueError),
    ("features of q and k", ValueError),
    ("features of v", ValueError),
    ("scale", ValueError),
    ("causal", ValueError),
    ("window", ValueError),
    ("softcap", ValueError),
    ("dropout", ValueError),
    ("seed", ValueError),
    ("offset", ValueError),
    ("return_lse", ValueError),
    ("the dtype of bias", TypeError),
    ("the dtype of sinks", TypeError),
    ("whether mask is given", ValueError),
    ("whether segments are given", ValueError),
    ("whether a gradient is asked for", ValueError),
    ("whether forward mode is on", ValueError),
)
"""What records must agree on, and the error where they do not."""


class _Local(NamedTuple):
    """The arguments of this rank, checked as far as one rank can; q, k and v with a heads axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None
    segments: tuple[Tensor, Tensor] | None
    offset: Array | int | None
    options: Options
    return_lse: bool
    layout: str

    @classmethod
    def check(cls, q: Tensor, k: Tensor, v: Tensor, layout: object, options: Any) -> _Local:
        """By the rules of the NumPy functions, on shapes and dtypes alone: values may belong to a transform."""
        reject_unknown(NAME, options)
        name = check_layout(NAME, layout)
        given = {key: x for key, x in options.items() if x is not None or key in ("causal", "dropout", "return_lse")}
        for key, x in (("q", q), ("k", k), ("v", v), *((n, given[n]) for n in ("bias", "sinks", "mask") if n in given)):
            check_tensor(NAME, key, x)
        if "segments" in given:
            given["segments"] = check_segments(NAME, given["segments"])
            for key, ids in zip(("q_segments", "k_segments"), given["segments"], strict=True):
                if ids.dtype == torch.uint64 and (to_array(ids) >= 2**63).any():
                    fail(ValueError, NAME, key, "have ids below 2**63", f"{to_array(ids).max()}")
        offset = given.get("offset")
        if isinstance(offset, Tensor):
            check_tensor(NAME, "offset", offset)
            offset = given["offset"] = to_array(offset)
        if isinstance(given.get("seed"), Tensor):
            given["seed"] = check_integer(NAME, "seed", given["seed"].item())
        shapes = dict(given)
        for key in ("bias", "mask"):  # their columns depend on the other ranks
            if key in given:
                shapes[key] = _blank(given[key], ())
        if "sinks" in given:
            shapes["sinks"] = _blank(given["sinks"], given["sinks"].shape)
        if "segments" in given:
            q_ids, k_ids = given["segments"]
            k_shape = (*k_ids.shape[:-1], k.shape[-2]) if k_ids.ndim and k.ndim > 1 else k_ids.shape
            shapes["segments"] = (_blank(q_ids, q_ids.shape), _blank(k_ids, k_shape))
        _, o, return_lse = bind(NAME, _blank(q, q.shape), _blank(k, k.shape), _blank(v, v.shape), shapes)
        if q.ndim == 2:
            q, k, v = q[None], k[None], v[None]
        bias, mask = (_plane(given.get(key)) for key in ("bias", "mask"))
        return cls(q, k, v, bias, given.get("sinks"), mask, given.get("segments"), offset, o, return_lse, name)

    def record(self) -> Record:
        """What the other ranks are told."""
        o, differentiable = self.options, [x for x in (self.q, self.k, self.v, self.bias, self.sinks) if x is not None]
        return {
            "layout": self.layout,
            "dtype": str(self.q.dtype),
            "number of axes": self.q.ndim,
            "leading axes": list(self.q.shape[:-3]),
            "query heads": self.q.shape[-3],
            "key heads": self.k.shape[-3],
            "features of q and k": self.q.shape[-1],
            "features of v": self.v.shape[-1],
            "scale": o.scale,
            "causal": o.causal,
            "window": o.window,
            "softcap": o.softcap,
            "dropout": o.dropout,
            "seed": o.seed,
            "offset": _offset_record(self.offset),
            "return_lse": self.return_lse,
            "the dtype of bias": None if self.bias is None else str(self.bias.dtype),
            "the dtype of sinks": None if self.sinks is None else str(self.sinks.dtype),
            "whether mask is given": self.mask is not None,
            "whether segments are given": self.segments is not None,
            "whether a gradient is asked for": torch.is_grad_enabled() and any(x.requires_grad for x in differentiable),
            "whether forward mode is on": forward_ad._current_level >= 0,
            "tokens": [self.q.shape[-2], self.k.shape[-2]],
            "bias": None if self.bias is None else list(self.bias.shape),
            "mask": None if self.mask is None else list(self.mask.shape),
            "ids": None if self.segments is None else list(self.segments[1].shape),
            "tangents": any(_moves(x) for x in differentiable),
        }

    def tensors(self, moving: bool) -> list[Tensor | None]:
        """The differentiable inputs; where another rank's move and none of these does, with a tangent of zero."""
        x = [self.q, self.k, self.v, self.bias, self.sinks]
        if moving and not any(_moves(y) for y in x if y is not None):
            x[0] = forward_ad.make_dual(self.q, torch.zeros_like(self.q))  # type: ignore[no-untyped-call]
        return x


_DTYPES = {
    dtype: to_array(torch.empty(0, dtype=dtype)).dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
}


def _blank(x: Tensor, shape: Any) -> Array:
    """An array of this shape and of the dtype of ``x``, without its values."""
    if x.dtype not in _DTYPES:
        fail(TypeError, NAME, "every input", "have a dtype that NumPy knows, or bfloat16", x.dtype)
    return np.broadcast_to(np.zeros((), _DTYPES[x.dtype]), tuple(shape))


def _broadcasts(shape: list[int], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(n in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False))


def _plane(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape((1,) * (2 - x.ndim) + tuple(x.shape))


def _moves(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _offset_record(offset: Array | int | None) -> Any:
    """An array by its shape and a digest, for headers are short."""
    if offset is None or not isinstance(offset, np.ndarray):
        return None if offset is None else int(offset)
    if offset.size <= 16:
        return offset.tolist()
    values = np.ascontiguousarray(offset, np.int64)
    return f"an array of shape {offset.shape} with digest {hashlib.sha256(values.tobytes()).hexdigest()[:12]}"


@dataclass(frozen=True)
class _Call:
    """What the passes of one call share, and what the backward pass looks up again."""

    job: _ring.Job
    group: Any
    timeout: float
    number: int
    constants: dict[str, Any]
    """mask, segments, offset: the operands without derivatives."""

    def ring(self, stage: str) -> Ring:
        return Ring(NAME, stage, self.group, self.timeout)

    def operands(self, tensors: Any) -> Operands:
        return Operands(*map(to_array, tensors), **self.constants)


def _settle(local: _Local, records: list[Record], ring: Ring) -> _Call:
    """The layout of the whole; and the checks that need it, of every rank on every rank."""
    queries, keys = (Layout(local.layout, tuple(r["tokens"][i] for r in records)) for i in range(2))
    leading, heads = records[0]["leading axes"], records[0]["query heads"]
    for rank, r in enumerate(records):
        scores = (*leading, heads, queries.lengths[rank], keys.total)
        for name in ("bias", "mask"):
            if r[name] is not None:
                what = f"(..., Hq, queries of the rank, keys of all ranks) on rank {rank}"
                if not _broadcasts(r[name], scores):
                    fail(ValueError, NAME, name, f"broadcast to {what} = {scores}", f"shape {tuple(r[name])}")
        if r["ids"] is not None and r["ids"][-1] not in (keys.lengths[rank], keys.total):
            rule = f"have {keys.total} ids along axis -1, one a token"
            if len(records) > 1:
                rule += f", or {keys.lengths[rank]}, one a key of rank {rank}"
            fail(ValueError, NAME, "k_segments", rule, f"shape {tuple(r['ids'])}")
    segments = None
    if local.segments is not None:
        q_ids, k_ids = (to_array(ids).astype(np.int64, copy=False) for ids in local.segments)
        if k_ids.shape[-1] != keys.lengths[ring.rank]:
            runs = [k_ids[..., run.there] for run in keys.runs(ring.rank)]
            k_ids = np.concatenate(runs, axis=-1) if runs else k_ids[..., :0]
        segments = q_ids, np.broadcast_to(k_ids, (*leading, k_ids.shape[-1]))
    offset = keys.total - queries.total if local.offset is None else local.offset
    constants = {"mask": to_array(local.mask), "segments": segments, "offset": offset}
    return _Call(_ring.Job(local.options, queries, keys), ring.group, ring.timeout, ring.number, constants)


# --- autograd -------------------------------------------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{NAME}: {what} not available: the ring has first derivatives. "
        "attngrad.torch.attention has second ones, in one process."
    )


class _Attention(torch.autograd.Function):
    """``out, lse``, and what the backward pass needs: out in the wider dtype where that is another, top, inverse."""

    @staticmethod
    def forward(call: _Call, ring: Ring, *x: Tensor | None) -> tuple[Tensor, ...]:
        with ring.guarded():
            out, lse, saved = _ring.forward(ring, call.job, call.operands(x))
        kept = saved.out if out.dtype != saved.out.dtype else np.empty(0, saved.out.dtype)
        return to_tensor(out), to_tensor(lse), to_tensor(kept), to_tensor(saved.top), to_tensor(saved.inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, _, *x = inputs
        out, _, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x, out if saved[0].numel() == 0 else saved[0], *saved[1:])
        if transforms_active():
            ctx.save_for_forward(*x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        grads = _Gradient.apply(ctx.call, dout, dlse, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, _call: None, _: None, *dots: Tensor | None) -> tuple[Any, ...]:
        moved = _Tangent.apply(ctx.call, *ctx.saved_tensors[:5], *dots)  # type: ignore[no-untyped-call]
        return *moved, None, None, None


class _Gradient(torch.autograd.Function):
    """The five gradients of <dout, out> + <dlse, lse>, summed over ranks."""

    @staticmethod
    def forward(call: _Call, dout: Tensor | None, dlse: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
        x, saved = call.operands(tensors[:5]), Saved(*(t.numpy(force=True) for t in tensors[5:]))
        ring = call.ring("backward")
        agree(ring, {"call": call.number}, [("call", RuntimeError)])
        with ring.guarded():
            grads = _ring.backward(ring, call.job, x, saved, to_array(dout), to_array(dlse))
        return tuple(None if g is None else to_tensor(g) for g in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *u: Tensor) -> tuple[Any, ...]:
        _refuse("double backward is")

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, ...]:
        _refuse("forward mode over the backward pass is")


class _Tangent(torch.autograd.Function):
    """``out_dot, lse_dot``."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        x, dots = call.operands(tensors[:5]), [to_array(t) for t in tensors[5:]]
        ring = call.ring("tangent")
        moving = [d is not None for d in dots[1:3]]
        records = agree(ring, {"call": call.number, "moving": moving}, [("call", RuntimeError)])
        for i, primal in ((0, x.k), (1, x.v)):
            if dots[1 + i] is None and any(r["moving"][i] for r in records):
                dots[1 + i] = np.zeros_like(primal)
        with ring.guarded():
            out_dot, lse_dot = _ring.tangent(ring, call.job, x, Tangents(*dots))
        return to_tensor(out_dot), to_tensor(lse_dot)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *u: Tensor) -> tuple[Any, ...]:
        _refuse("a gradient of the tangent is")

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Any, ...]:
        _refuse("forward mode over forward mode is")
