"""Rotary positions: distance is all that matters, and offsets say where a query stands."""

from __future__ import annotations

import numpy as np

from attngrad import MultiHeadAttention
from attngrad.layers.rope import rotation
from attngrad.testing import relative_error
from layer_tools import randomise


def test_rope_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8))
    scores = [
        rotation(100.0, 8, 1, m, np.float64).apply(q) @ rotation(100.0, 8, 1, m - 5, np.float64).apply(k).swapaxes(1, 2)
        for m in (0, 3, 1000)
    ]
    assert np.ptp(scores) < 1e-12
    assert abs(scores[0] - q @ k.T) > 1e-3


def test_rope_turns_back_by_invert():
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 6))
    turn = rotation(10000.0, 6, 5, np.array([3, -2]), np.float64)
    assert relative_error(turn.invert(turn.apply(x)), x) < 1e-14
    assert relative_error(np.linalg.norm(turn.apply(x), axis=-1), np.linalg.norm(x, axis=-1)) < 1e-14


def test_a_query_at_its_offset_equals_its_row_of_the_whole_sequence():
    layer = randomise(MultiHeadAttention(8, 2, rope=50.0, dtype=np.float64))
    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    whole = layer(x, causal=True)
    assert relative_error(layer(x[:, 5:], x, causal=True), whole[:, 5:]) < 1e-13
    assert relative_error(layer(x[:, 2:4], x, causal=True, offset=2), whole[:, 2:4]) < 1e-13
    rows = np.stack([x[0, 1:3], x[1, 4:6]])
    ragged = layer(rows, x, causal=True, offset=np.array([1, 4]))
    assert relative_error(ragged, np.stack([whole[0, 1:3], whole[1, 4:6]])) < 1e-13


def test_without_rope_the_order_of_the_keys_does_not_matter_and_with_rope_it_does():
    x = np.random.default_rng(0).standard_normal((4, 8))
    plain, turned = (randomise(MultiHeadAttention(8, 2, rope=rope, dtype=np.float64)) for rope in (None, 50.0))
    assert relative_error(plain(x, x[::-1]), plain(x)) < 1e-13
    assert relative_error(turned(x, x[::-1]), turned(x)) > 1e-3
