"""What is recorded, the same for all systems, and the count."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

# All sizes differ, so that the sizes of a product name it.
BATCH, HEADS, T, S, D, E = 2, 4, 256, 192, 64, 48
PRODUCTS = {(T * S, D): "S", (T * E, S): "O", (T * S, E): "dA", (S * E, T): "dV", (T * D, S): "dQ", (S * D, T): "dK"}
"""By the entries of the result of one head and the length of the sum."""


class Buffer(NamedTuple):
    """An array: what tells it from others (views of it share the key), how many numbers, how many bytes."""

    key: Hashable
    size: int
    bytes: int


class Operation(NamedTuple):
    """One operation that moves data. ``product`` has the operands of a matrix product, None where it is none."""

    name: str
    reads: list[Buffer]
    writes: list[Buffer]
    product: tuple[Buffer, Buffer] | None = None


class Count(NamedTuple):
    """What one backward spends. ``omega``: once, twice, or why it cannot be told."""

    system: str
    products: list[str]
    omega: str
    score_arrays_written: int
    score_arrays_kept: int
    megabytes: float


def name_product(op: Operation) -> str:
    """Which of the products of attention it is, by its sizes, whatever the layout."""
    assert op.product is not None
    heads, result = BATCH * HEADS, op.writes[0].size
    length = math.isqrt(op.product[0].size * op.product[1].size // (result * heads))
    return PRODUCTS.get((result // heads, length), f"{result // heads} entries over {length}")


def count(system: str, operations: Iterable[Operation], megabytes: float | None = None) -> Count:
    """Products, Omega, arrays of T x S and bytes of a recorded backward."""
    ops = list(operations)
    products = {name_product(op): op for op in ops if op.product is not None}
    names = [name_product(op) for op in ops if op.product is not None]
    scores = BATCH * HEADS * T * S
    omega = "not told: no product for dQ or dK was seen"
    if {"dQ", "dK"} <= products.keys():
        used = [{b.key for b in products[name].product or () if b.size == scores} for name in ("dQ", "dK")]
        omega = "once" if used[0] & used[1] else "twice"
    written = {b.key for op in ops for b in op.writes}
    whole = [b for op in ops for b in op.reads if b.size == scores <= b.bytes]  # a repeated column is none
    kept = {b.key for b in whole} - written
    formed = sum(b.size == scores for op in ops for b in op.writes)
    moved = sum(b.bytes for op in ops for b in (*op.reads, *op.writes)) / 1e6
    return Count(system, names, omega, formed, len(kept), moved if megabytes is None else megabytes)


def least_megabytes(features: int = E) -> float:
    """Q, K, V, O, dO and one number per row read once, dQ, dK, dV written once, in float32."""
    per_head = 2 * (T * D + S * D + S * features) + 2 * T * features + T
    return 4 * BATCH * HEADS * per_head / 1e6


def arrays(features: int = E) -> list[np.ndarray]:
    """q, k, v and dout in float32."""
    rng = np.random.default_rng(0)
    sizes = ((T, D), (S, D), (S, features), (T, features))
    return [rng.standard_normal((BATCH, HEADS, *size), dtype=np.float32) for size in sizes]
