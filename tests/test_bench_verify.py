"""A wrong result is refused before it is timed."""

import numpy as np
import pytest

from attngrad.bench import verify
from attngrad.bench.cases import KINDS, Case, dims
from attngrad.bench.peers import Ours
from bench_tools import FB, F, checked, spoiled


@pytest.mark.parametrize("output", ["out", "dq", "dk", "dv", "dbias"])
def test_a_wrong_output_is_refused(output):
    case = Case("", dims(2, 4, 6, 3, key_heads=2), "bias HTS")

    def change(arrays):
        arrays[output] = arrays[output].copy()
        arrays[output].flat[-1] *= 1.01
        return arrays

    with pytest.raises(verify.VerificationError, match=rf"{output} is off by .* Not timed"):
        checked(spoiled(change), case, [FB])


def test_nan_and_missing_outputs_are_refused():
    case = Case("", dims(1, 2, 6, 3))
    with pytest.raises(verify.VerificationError, match="dk is off by nan"):
        checked(spoiled(lambda arrays: arrays | {"dk": arrays["dk"] * np.nan}), case, [FB])
    with pytest.raises(verify.VerificationError, match="returned no dv"):
        checked(spoiled(lambda arrays: {k: v for k, v in arrays.items() if k != "dv"}), case, [FB])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "window 256"])
def test_a_sample_of_rows_is_verified_where_the_dense_scores_do_not_fit(kind, monkeypatch):
    monkeypatch.setattr(verify, "MOST_PAIRS", 1)
    case = Case("", dims(2, 4, 40, 3, key_heads=2), kind)
    sample = verify.choose(case)
    assert not sample.whole
    assert len(sample.rows) == 16
    assert {0, 39} <= set(sample.rows)
    assert checked(Ours(), case) < 1e-5

    def change(arrays):
        arrays["dk"] = arrays["dk"].copy()
        arrays["dk"][1, 1, 0] += 1.0
        return arrays

    with pytest.raises(verify.VerificationError, match="dk is off"):
        checked(spoiled(change), case, [FB])


def test_long_caches_are_verified_on_a_part_of_the_heads(monkeypatch):
    monkeypatch.setattr(verify, "MOST_NUMBERS", 3 * 2 * 50 * 8)
    case = Case("decoding", dims(2, 4, 1, 4, key_heads=2, s=50), passes=(F,))
    sample = verify.choose(case)
    assert sample.units == ((0, 0), (1, 0), (1, 1))
    assert checked(Ours(), case) < 1e-5
