"""The dropout mask: Philox4x32-10, a counter-based generator (Salmon et al., 2011).

Every entry of the mask is a function of its position and the seed alone, so that the backward pass, a tile, a thread
or a shard regenerates its part of the mask without the rest. This is the readable version and the oracle of the one
in ``csrc/runtime/philox.hpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counter: Sequence[npt.NDArray[np.uint64]], key: tuple[int, int]) -> tuple[npt.NDArray[np.uint64], ...]:
    """Four 32-bit words (held in uint64) for each counter of four words, ten rounds.

    >>> c = [np.zeros(1, np.uint64)] * 4
    >>> [hex(int(w[0])) for w in philox(c, (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> _WORD) ^ c1 ^ np.uint64(k0),
            right & _LOW,
            (left >> _WORD) ^ c3 ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(
    shape: tuple[int, ...], rate: float, seed: int, origin: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> npt.NDArray[np.bool_]:
    """The keep mask of scores of ``shape`` (..., Hq, T, S) whose first entry stands at ``origin`` = (b0, h0, i0, j0).

    The word of entry (b, h, i, j) is number j % 4 of philox(counter=(j // 4, i, h, b), key=seed); it is kept where
    the word is at least floor(rate * 2^32).
    """
    b0, h0, i0, j0 = origin
    tokens, keys = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    batches = math.prod(shape[:-3])
    j = np.arange(j0, j0 + keys, dtype=np.uint64)
    blocks = np.arange(j0 // 4, (j0 + keys + 3) // 4, dtype=np.uint64)
    counter = np.broadcast_arrays(
        blocks,
        np.arange(i0, i0 + tokens, dtype=np.uint64)[:, None],
        np.arange(h0, h0 + heads, dtype=np.uint64)[:, None, None],
        np.arange(b0, b0 + batches, dtype=np.uint64)[:, None, None, None],
    )
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    words = words.reshape(batches, heads, tokens, 4 * len(blocks))
    picked = words[..., (j - np.uint64(j0 // 4 * 4)).astype(np.intp)]
    return (picked >= np.uint64(math.floor(rate * 2.0**32))).reshape(shape)
