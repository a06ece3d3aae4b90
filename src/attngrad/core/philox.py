"""The dropout mask: Philox4x32-10, a counter-based generator (Salmon et al., 2011).

Every entry of the mask is a function of its position and the seed alone, so that the backward pass, a tile, a thread
or a shard regenerates its part of the mask without the rest. This is the readable version and the oracle of the one
in ``csrc/runtime/philox.hpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_torch_array

from attngrad.core.arrays import Array, namespace

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: Sequence[Array], key: tuple[Any, Any]) -> tuple[Array, ...]:
    """Four 32-bit words for each counter of four words, ten rounds; words are held in 64 bits, with or without a sign.

    >>> c = [np.zeros(1, np.int64)] * 4
    >>> [hex(int(w[0])) for w in philox(c, (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # modulo 2^64
        c0, c1, c2, c3 = (
            ((right >> 32) & _LOW) ^ c1 ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(
    shape: tuple[int, ...], rate: float, seed: Any, origin: tuple[int, int, int, int] = (0, 0, 0, 0), like: Any = None
) -> Array:
    """The keep mask of scores of ``shape`` (..., Hq, T, S) whose first entry stands at ``origin`` = (b0, h0, i0, j0).

    The word of entry (b, h, i, j) is number j % 4 of philox(counter=(j // 4, i, h, b), key=seed); it is kept where
    the word is at least floor(rate * 2^32). The mask is an array of NumPy; beside a tensor ``like`` it is one on its
    device, and no number leaves that.
    """
    xp: Any = np
    where: dict[str, Any] = {}
    if is_torch_array(like):  # of the others, JAX need not have integers of 64 bits
        xp, where = namespace(like), {"device": like.device}
    b0, h0, i0, j0 = origin
    tokens, keys = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    batches = math.prod(shape[:-3])

    def count(first: int, end: int) -> Array:
        return xp.arange(first, end, dtype=xp.int64, **where)

    first, end = j0 // 4, (j0 + keys + 3) // 4
    counter = (
        count(first, end),
        count(i0, i0 + tokens)[:, None],
        count(h0, h0 + heads)[:, None, None],
        count(b0, b0 + batches)[:, None, None, None],
    )
    words = xp.stack(xp.broadcast_arrays(*philox(counter, (seed & _LOW, (seed >> 32) & _LOW))), axis=-1)
    kept = xp.reshape(words, (batches, heads, tokens, 4 * (end - first))) >= math.floor(rate * 2.0**32)
    return xp.reshape(kept[..., j0 - 4 * first : j0 - 4 * first + keys], shape)
