"""Where an error arises and another layout would fit, the error says so; where none would, it does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import attngrad
from attngrad import MultiHeadAttention, reference

modules = pytest.mark.parametrize("module", [attngrad, reference], ids=["kernels", "reference"])
SWAP = r"fit as \(batch, tokens, heads, features\): if q is that, pass q\.swapaxes\(-3, -2\)"
BATCH = r"A q of 3 axes is \(heads, tokens, features\): if it is \(batch, tokens, features\), pass q\[:, None\]"


def error(module: Any, q: Any, k: Any, v: Any = None, **options: Any) -> str:
    arrays = [np.zeros(shape) for shape in (q, k, k if v is None else v)]
    with pytest.raises(ValueError, match="attention: ") as caught:
        module.attention(*arrays, **options)
    return str(caught.value)


def told(text: str, note: str) -> None:
    assert re.search(note, text), text


@modules
def test_tokens_before_heads_are_noted_where_heads_do_not_divide(module: Any):
    text = error(module, (2, 10, 4, 8), (2, 7, 4, 8))
    assert "k must have 10 or a divisor of 10 heads" in text
    told(text, SWAP)
    told(error(module, (10, 4, 8), (7, 2, 8)), r"fit as \(tokens, heads, features\)")
    q, k = np.zeros((2, 10, 4, 8)), np.zeros((2, 7, 4, 8))
    assert module.attention(*(np.swapaxes(x, -3, -2) for x in (q, k, k))).shape == (2, 4, 10, 8)  # as it says


@modules
def test_nothing_is_noted_where_no_layout_fits(module: Any):
    for shapes in (((2, 4, 10, 8), (2, 4, 10, 6)), ((2, 4, 10, 8), (3, 4, 10, 8)), ((2, 5, 3, 8), (2, 2, 2, 8))):
        assert "fit as" not in error(module, *shapes)


@modules
def test_a_mask_that_fits_tokens_before_heads_is_noted(module: Any):
    mask = np.ones((10, 10), bool)
    text = error(module, (2, 10, 4, 8), (2, 10, 2, 8), mask=mask)
    assert "mask must broadcast to (..., Hq, T, S) = (2, 10, 4, 2); got shape (10, 10)" in text
    told(text, SWAP)
    told(error(module, (2, 10, 4, 8), (2, 10, 2, 8), bias=np.zeros((2, 4, 10, 10))), SWAP)
    assert "fit as" not in error(module, (2, 10, 4, 8), (2, 10, 2, 8), mask=np.ones((9, 9), bool))


@modules
def test_three_axes_beside_a_batch_are_noted(module: Any):
    q, k = (2, 10, 8), (2, 7, 8)
    for options in (
        {"mask": np.ones((2, 1, 10, 7), bool)},
        {"mask": np.ones((2, 4, 10, 7), bool)},
        {"bias": np.zeros((2, 7))},
        {"offset": np.array([0, 1])},
        {"segments": (np.zeros((2, 10), int), np.zeros((2, 7), int))},
    ):
        told(error(module, q, k, **options), BATCH)
    assert "3 axes" not in error(module, q, k, mask=np.ones((9, 9), bool))
    x = np.zeros((2, 1, 10, 8))  # as it says
    assert module.attention(x, x, x, mask=np.ones((2, 1, 10, 10), bool), offset=np.array([0, 1])).shape == x.shape


@modules
def test_sinks_and_ids_that_fit_tokens_before_heads_are_noted(module: Any):
    q, k, ids = (2, 10, 4, 8), (2, 10, 2, 8), np.zeros(10, int)
    told(error(module, q, k, sinks=np.zeros(4)), SWAP)
    told(error(module, q, k, segments=(ids, ids)), SWAP)
    told(error(module, q, (2, 5, 4, 8), segments=(np.zeros(4, int), ids[:5])), "k_segments .*" + SWAP)
    assert "fit as" not in error(module, q, k, sinks=np.zeros(3))
    assert "fit as" not in error(module, q, k, segments=(ids[:9], ids[:9]))
    arrays = [np.swapaxes(np.zeros(shape), -3, -2) for shape in (q, k, k)]  # as it says
    assert module.attention(*arrays, sinks=np.zeros(4), segments=(ids, ids)).shape == (2, 4, 10, 8)


@modules
def test_cotangents_and_tangents_with_tokens_before_heads_are_noted(module: Any):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 10, 8))
    swapped = q.swapaxes(1, 2)
    note = r"If its tokens come before its heads, pass {}\.swapaxes\(-3, -2\)\.$"
    with pytest.raises(ValueError, match=note.format("q_dot")):
        module.jvp((q, k, v), (swapped, None, None))
    with pytest.raises(ValueError, match=note.format("dout")):
        module.hvp((q, k, v), (q, None, None), swapped)
    with pytest.raises(ValueError, match=r"got shape \(2, 4, 9, 8\)\.$"):
        module.hvp((q, k, v), (q, None, None), q[:, :, 1:])


@modules
@pytest.mark.parametrize(("shape", "index"), [((2, 7), ":, None, None"), ((2, 10, 7), ":, None")], ids=str)
def test_a_mask_per_batch_entry_is_told_its_axes(module: Any, shape: tuple[int, ...], index: str):
    mask = np.ones(shape, bool)
    text = error(module, (2, 4, 10, 8), (2, 4, 7, 8), mask=mask)
    assert text.endswith(f"If its first axis is the batch, pass mask[{index}].")
    axes = mask[:, None, None] if index.count("None") == 2 else mask[:, None]
    q, k = np.zeros((2, 4, 10, 8)), np.zeros((2, 4, 7, 8))
    assert module.attention(q, k, k, mask=axes).shape == q.shape  # as it says


def test_the_layer_tells_of_a_padding_mask_too():
    with pytest.raises(ValueError, match=r"MultiHeadAttention: mask must broadcast .* pass mask\[:, None, None\]\."):
        MultiHeadAttention(8, 4)(np.ones((2, 3, 8), np.float32), mask=np.ones((2, 3), bool))


def test_a_trace_tells_which_axes_it_read():
    tokens_first = np.zeros((2, 10, 4, 8))
    assert attngrad.trace(*[tokens_first] * 3).summary().startswith("batch 2, 10 heads, 4 queries, 4 keys, D 8")
    assert attngrad.trace(*[tokens_first[:, :, 0]] * 3).summary().startswith("2 heads, 10 queries, 10 keys, D 8")
