"""Whole steps in models: what is counted as kept and lost, and that both variants of a model are what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.in_model import Row, interval, verify
from benchmarks.models import blocks


def row(theirs: float, ours: float, gain: float, spread: float = 0.0) -> Row:
    ratio = theirs / ours
    return Row("m", "training", theirs, ours, ratio, ratio - spread, ratio + spread, 5.0 + gain, 5.0)


def test_kept_is_the_share_of_what_attention_alone_gains():
    assert row(100.0, 92.0, 10.0).kept == pytest.approx(0.8)
    assert row(100.0, 99.9, 1.0).kept is None  # less than the noise


def test_a_gain_is_lost_where_less_than_four_fifths_is_kept_beyond_the_interval():
    assert row(100.0, 97.0, 10.0).lost
    assert not row(100.0, 91.0, 10.0).lost
    assert not row(100.0, 97.0, 10.0, spread=0.1).lost
    assert not row(100.0, 101.0, -2.0).lost


def test_the_interval_holds_the_ratio_and_narrows_with_the_spread():
    low, high = interval([2.0, 2.1, 1.9] * 20, [1.0] * 60)
    assert low <= 2.0 <= high < 2.2
    assert interval([2.0] * 60, [1.0] * 60) == (2.0, 2.0)


def test_models_that_differ_are_not_timed():
    with pytest.raises(SystemExit, match="must be the same with both"):
        verify("m", [torch.ones(3), torch.ones(3) * 1.1])


@pytest.mark.parametrize("layers", [2, 0])
def test_both_variants_of_a_model_are_equal_and_so_is_their_attention(layers):
    model = blocks(2, 9, 32, 4, causal=True, layers=layers)
    theirs, ours = model.build("torch"), model.build("attngrad")
    ours.load_state_dict(theirs.state_dict())
    x = model.inputs()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    alone = model.attention("attngrad")
    torch.testing.assert_close(
        alone.run(*alone.inputs), model.attention("torch").run(*alone.inputs), rtol=1e-4, atol=1e-5
    )
