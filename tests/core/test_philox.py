"""The dropout generator: the published vectors, and native and readable versions alike."""

import numpy as np
import pytest

import attngrad
from attngrad.backends import cpu
from attngrad.core.philox import keep_mask, philox

# Counter, key, words: the known-answer vectors of the generator's authors.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_the_published_vectors(counter, key, words):
    got = philox([np.array([c], np.uint64) for c in counter], key)
    assert tuple(int(w[0]) for w in got) == words


@pytest.mark.parametrize(
    "shape", [(3, 5), (2, 3, 7), (2, 2, 3, 9), (2, 3, 1, 2, 4), (2, 2, 0, 3), (0, 2, 3, 3), (4, 0)]
)
@pytest.mark.parametrize("origin", [(0, 0, 0, 0), (3, 1, 17, 6)])
def test_native_and_readable_masks_are_equal(shape, origin):
    seed = 0x0123456789ABCDEF
    assert np.array_equal(cpu.keep_mask(shape, 0.3, seed, origin), keep_mask(shape, 0.3, seed, origin))


def test_a_shard_sees_its_part_of_the_whole_mask():
    whole = cpu.keep_mask((4, 6, 20, 30), 0.5, 99)
    part = cpu.keep_mask((2, 3, 7, 11), 0.5, 99, (1, 2, 5, 9))
    assert np.array_equal(part, whole[1:3, 2:5, 5:12, 9:20])


def test_words_follow_the_contract():
    b, h, i, j, seed = 1, 2, 3, 6, 5 + (7 << 32)
    words = philox([np.array([c], np.uint64) for c in (j // 4, i, h, b)], (5, 7))
    rate = 0.25
    keep = attngrad.dropout_mask((2, 3, 4, 8), rate, seed)
    assert keep[b, h, i, j] == (int(words[j % 4][0]) >= int(rate * 2**32))


def test_the_rate_is_kept_and_rows_differ():
    keep = attngrad.dropout_mask((64, 1024), 0.3, seed=1)
    assert abs(keep.mean() - 0.7) < 0.01
    assert len({row.tobytes() for row in keep}) == 64
    assert attngrad.dropout_mask((8, 8), 0.0, 1).all()
    assert not np.array_equal(keep, attngrad.dropout_mask((64, 1024), 0.3, seed=2))
