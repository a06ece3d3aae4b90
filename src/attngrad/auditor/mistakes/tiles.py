"""Mistakes of computations in tiles and chunks, and in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attngrad.auditor.mistakes import Base, Variant, Wild, need, way, weights_from_lse
from attngrad.auditor.pipeline import Override, Pipeline
from attngrad.reference.dense import rowsum, zero_hidden

TILES = (2, 3, 4, 8, 16, 32, 64, 128, 256)
RARE = (12, 20, 24, 40, 48, 56, 80, 96, 112, 160, 192, 224, 320, 384)
"""Lengths of tiles that are tried only where the lengths of wrong and right cases leave room for them."""


def _overwritten(tile: int, first: bool = False) -> dict[str, Override]:
    """The gradients by the last tile alone (or the first) of the keys, for dQ, or of the queries, for dK and dV."""

    def last(length: int) -> slice:
        need(length > tile)
        return slice(tile) if first else slice((length - 1) // tile * tile, length)

    def dq(p: Pipeline, base: Base) -> Any:
        keys = last(p.k.shape[-2])
        return p.redo("dq_made", dz=p.dz[..., keys], k_heads=p.k_heads[..., keys, :])

    def dk(p: Pipeline, base: Base) -> Any:
        rows = last(p.q.shape[-2])
        return p.redo("dk_heads", dz=p.dz[..., rows, :], q_seen=p.q[..., rows, :])

    def dv(p: Pipeline, base: Base) -> Any:
        rows = last(p.q.shape[-2])
        given = {"weights_back": p.weights_back, "keep_back": p.keep_back, "dout_seen": p.dout}
        return p.redo("dv_heads", **{name: x if x is None else x[..., rows, :] for name, x in given.items()})

    return {"dq_made": dq, "dk_heads": dk, "dv_heads": dv}


def _overwritten_variants(tile: int) -> tuple[Variant, ...]:
    last, first = _overwritten(tile), _overwritten(tile, first=True)
    return (
        way(f"dQ, tiles of {tile} keys", dq_made=last["dq_made"]),
        way(f"dQ, the first of tiles of {tile} keys", dq_made=first["dq_made"]),
        way(f"dK, tiles of {tile} queries", dk_heads=last["dk_heads"]),
        way(f"dV, tiles of {tile} queries", dv_heads=last["dv_heads"]),
        way(f"dK and dV, tiles of {tile} queries", dk_heads=last["dk_heads"], dv_heads=last["dv_heads"]),
    )


Chunks = Callable[[Pipeline], list[slice]]


def _chunked(step: Callable[[int], int]) -> Chunks:
    """The keys in chunks, as long as ``step`` says of their number."""

    def chunks(p: Pipeline) -> list[slice]:
        keys = p.k.shape[-2]
        size = step(keys)
        need(keys > size)
        return [slice(start, min(start + size, keys)) for start in range(0, keys, size)]

    return chunks


def _delta_by_chunk(chunks: Chunks, local: bool) -> Override:
    """Each chunk of keys subtracts its own part of delta; ``local``: that of its own softmax."""

    def dscores(p: Pipeline, base: Base) -> Any:
        a, dp = p.weights_back, p.dweights
        ds = np.empty_like(a)
        for keys in chunks(p):
            part = rowsum(a[..., keys] * dp[..., keys])
            if local:
                mass = rowsum(a[..., keys])
                part = part / np.where(mass == 0, p.c(1.0), mass)
            ds[..., keys] = a[..., keys] * (dp[..., keys] - part[..., None])
        return zero_hidden(ds, p.visible_back)

    return dscores


def _delta_of_one(chunks: Chunks, which: int) -> Override:
    """The delta of the first or last chunk, for all keys."""

    def delta(p: Pipeline, base: Base) -> Any:
        keys = chunks(p)[which]
        return rowsum(p.weights_back[..., keys] * p.dweights[..., keys])

    return delta


def _delta_variants(name: str, chunks: Chunks) -> tuple[Variant, ...]:
    return (
        way(f"{name}, each its own part", dscores=_delta_by_chunk(chunks, False)),
        way(f"{name}, each its own softmax", dscores=_delta_by_chunk(chunks, True)),
        way(f"the first of {name}", delta=_delta_of_one(chunks, 0)),
        way(f"the last of {name}", delta=_delta_of_one(chunks, -1)),
    )


_CHUNKS = {f"{n} chunks": (1, _chunked(lambda keys, n=n: -(-keys // n))) for n in (2, 4)}  # type: ignore[misc]
_CHUNKS |= {f"chunks of {n} keys": (n, _chunked(lambda keys, n=n: n)) for n in (*TILES, *RARE)}  # type: ignore[misc]
"""The longest that is one chunk, and how more keys are split."""


def _beyond(tile: int, variants: Iterable[Variant]) -> Iterator[Variant]:
    """These, which change nothing up to one tile."""
    return (replace(variant, beyond=tile, rare=tile in RARE) for variant in variants)


def _by_block(chunks: Chunks, mean: bool) -> Override:
    """A of each block of keys by itself; ``mean``: over their number."""

    def weights(p: Pipeline, base: Base) -> Any:
        e, blocks = p.normaliser[0], chunks(p)
        found = np.empty_like(e)
        for keys in blocks:
            total = rowsum(e[..., keys])[..., None]
            found[..., keys] = e[..., keys] / np.where(total == 0, p.c(1.0), total)
        return found / p.c(len(blocks)) if mean else found

    return weights


def _running(p: Pipeline, chunks: Chunks) -> tuple[Any, Any]:
    """exp(S - m) with the maximum m so far, block by block, and its sum over the row: nothing is rescaled."""
    s = np.where(p.visible, p.scores_unmasked, p.c(-np.inf))
    e, top = np.empty_like(s), p.c(np.full((*s.shape[:-1], 1), -np.inf))
    for keys in chunks(p):
        top = np.maximum(top, np.max(s[..., keys], axis=-1, keepdims=True))
        e[..., keys] = np.exp(s[..., keys] - np.where(np.isneginf(top), p.c(0.0), top))
    return e, rowsum(e)


def _unscaled(chunks: Chunks, out: bool, total: bool) -> dict[str, Override]:
    """An online softmax that does not rescale what came before: the output, the sum, or both.

    The backward computes the weights again, from the log-sum-exp that this sum gives.
    """

    def divisor(p: Pipeline) -> Any:
        found = _running(p, chunks)[1] if total else p.divisor
        return np.where(found == 0, p.c(1.0), found)

    def weights(p: Pipeline, base: Base) -> Any:
        return (_running(p, chunks)[0] if out else p.normaliser[0]) / divisor(p)[..., None]

    def lse(p: Pipeline, base: Base) -> Any:
        chunks(p)
        return np.where(np.isneginf(base()), base(), p.normaliser[3] + np.log(divisor(p)))

    steps: dict[str, Override] = {
        "weights": weights,
        "weights_back": lambda p, base: weights_from_lse(p, p.visible_back),
    }
    return {**steps, "lse": lse} if total else steps


def _block_variants(name: str, chunks: Chunks) -> tuple[Variant, ...]:
    derivative = _delta_by_chunk(chunks, True)
    return (
        way(f"{name}, summed", weights=_by_block(chunks, False), dscores=derivative),
        way(f"{name}, averaged", weights=_by_block(chunks, True), dscores=derivative),
        way(f"{name}, summed, delta from out", weights=_by_block(chunks, False)),
        way(f"{name}, averaged, delta from out", weights=_by_block(chunks, True)),
        way(f"{name}, the output not rescaled", **_unscaled(chunks, True, False)),
        way(f"{name}, the sum not rescaled", **_unscaled(chunks, False, True)),
        way(f"{name}, neither rescaled", **_unscaled(chunks, True, True)),
    )


def _whole(length: int, tile: int, least: int = 0) -> int:
    """How many are in whole tiles, where the last tile is partial, and is not among the ``least`` first ones."""
    need(length % tile and length > least * tile)
    return length // tile * tile


def _tail(tile: int, fill: float, least: int = 0) -> Override:
    """The rows of the last, partial tile: zero, or whatever stood in memory."""

    def step(p: Pipeline, base: Base) -> Any:
        x = np.array(base())
        x[..., _whole(x.shape[-2], tile, least) :, :] = fill
        return x

    return step


def _unseen_tail(tile: int, least: int) -> Override:
    return lambda p, base: base() & (np.arange(p.k.shape[-2]) < _whole(p.k.shape[-2], tile, least))


def _query_tail_dropped(tile: int, least: int) -> Override:
    """The last queries add nothing to dK and dV, and get no dQ."""

    def dout(p: Pipeline, base: Base) -> Any:
        tokens = p.q.shape[-2]
        return np.where((np.arange(tokens) < _whole(tokens, tile, least))[:, None], base(), p.c(0.0))

    return dout


_PLACES = {
    "out": ("out",),
    "dQ": ("dq",),
    "out and dQ": ("out", "dq"),
    "dK and dV": ("dk", "dv"),
    "dK": ("dk",),
    "dV": ("dv",),
    "dQ, dK and dV": ("dq", "dk", "dv"),
}


_LEAST = ("", "at least one of ")
"""Fewer rows than a tile: none is whole, or they are a tile of their own."""


def _tails(fill: float, least: int = 0) -> list[Variant]:
    wild = fill != 0.0
    how = f"{'stale' if wild else 'zero'}, {_LEAST[least]}tiles of"
    return [
        Variant(
            dict.fromkeys(places, _tail(tile, fill, least)), f"{where}, {how} {tile}", wild, least * tile, tile in RARE
        )
        for tile in (TILES, (*TILES, *RARE))[least]
        for where, places in _PLACES.items()
        if not (wild and "out" in where)  # the backward reads out: stale values there would leave everything open
    ]


VARIANTS = {
    "delta-from-chunk": tuple(
        v for name, (tile, chunks) in _CHUNKS.items() for v in _beyond(tile, _delta_variants(name, chunks))
    ),
    "softmax-within-block": tuple(
        v for name, (tile, chunks) in _CHUNKS.items() for v in _beyond(tile, _block_variants(name, chunks))
    ),
    "tile-tail": (
        *_tails(0.0),
        *_tails(0.0, 1),
        *(
            Variant({step: made(tile, least)}, f"{what}, {said}tiles of {tile}", False, least * tile, tile in RARE)
            for what, step, made in (
                ("keys not seen", "visible", _unseen_tail),
                ("queries dropped in the backward", "dout", _query_tail_dropped),
            )
            for least, said in enumerate(_LEAST)
            for tile in (TILES, (*TILES, *RARE))[least]
        ),
        *_tails(Wild),
    ),
    "overwritten-not-accumulated": tuple(v for n in (1, *TILES, *RARE) for v in _beyond(n, _overwritten_variants(n))),
    "low-precision": (),
    "uninitialised-tail": (),
    "not-deterministic": (),
}
