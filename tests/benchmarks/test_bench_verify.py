"""A wrong result is refused before it is timed."""

import numpy as np
import pytest

from bench_tools import FB, F, checked, spoiled
from benchmarks import passes, verify
from benchmarks.cases import KINDS, TANGENTS, Case, dims
from benchmarks.numpy_peer import NumPy, central
from benchmarks.peers import Ours


@pytest.mark.parametrize(
    ("name", "output"),
    [
        *((FB, output) for output in ("out", "dq", "dk", "dv", "dbias")),
        *(("jvp", output) for output in ("out", "out_dot")),
        *(("hvp", f"d{argument}{end}") for argument in ("q", "k", "v", "bias") for end in ("", "_dot")),
        *((name, "out_dot") for name in ("jvp q_dot", "jvp k_dot", "jvp v_dot")),
        *((name, "dk_dot") for name in ("hvp q_dot", "hvp k_dot", "hvp v_dot")),
    ],
)
def test_a_wrong_output_is_refused(name, output):
    case = Case("", dims(2, 4, 6, 3, key_heads=2), "dbias HTS")

    def change(arrays):
        arrays[output] = arrays[output].copy()
        arrays[output].flat[-1] *= 1.01
        return arrays

    with pytest.raises(verify.VerificationError, match=rf"{output} is off by .* Not timed"):
        checked(spoiled(change), case, [name])


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
    assert checked(Ours(), case, [F, FB, "jvp", "hvp", "hvp v_dot"]) < 1e-5

    def change(output):
        def changed(arrays):
            arrays[output] = arrays[output].copy()
            arrays[output][1, 1, 0] += 1.0
            return arrays

        return changed

    for name, output in ((FB, "dk"), ("hvp", "dk_dot"), ("hvp q_dot", "dv_dot")):
        with pytest.raises(verify.VerificationError, match=f"{output} is off"):
            checked(spoiled(change(output)), case, [name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["jvp", "hvp"])
def test_central_differences_are_held_to_a_tolerance_of_their_own(name, dtype):
    case = Case("", dims(2, 3, 9, 8), "causal", dtype)
    assert verify.TOLERANCE[dtype] < checked(NumPy(), case, [name]) <= verify.APPROXIMATION[dtype]

    class Careless(NumPy):
        def prepare(self, case, name, x):
            ready = super().prepare(case, name, x)
            return ready._replace(arrays=lambda f: {o: a * (1 + 1e-2) for o, a in ready.arrays(f).items()})

    with pytest.raises(verify.VerificationError, match=f"an approximation in {dtype} may be off by"):
        checked(Careless(), case, [name])


def test_central_differences_are_exact_of_a_quadratic():
    case = Case("", dims(1, 1, 4, 3), dtype="float64")
    x = case.inputs(TANGENTS)
    ((value, slope),) = central(lambda y: (y.q * y.k,), x, 2.0**-10)
    assert np.allclose(value, x.q * x.k + 2.0**-20 * x.q_dot * x.k_dot, rtol=0, atol=1e-15)
    assert np.allclose(slope, x.q_dot * x.k + x.q * x.k_dot, rtol=0, atol=1e-12)
    ((_, slope),) = central(lambda y: (y.q * y.k,), x.along(["k_dot"]), 2.0**-10)
    assert np.allclose(slope, x.q * x.k_dot, rtol=0, atol=1e-12)


def test_every_pass_is_expected_along_its_own_tangents():
    case = Case("", dims(1, 2, 5, 3))
    sample = verify.choose(case)
    expected = verify.expect(case, case.inputs(TANGENTS), sample, list(passes.PASSES))
    assert expected[F] is expected[FB]  # computed once
    slopes = [expected[name]["out_dot"][0][1] for name in ("jvp", "jvp q_dot", "jvp k_dot", "jvp v_dot")]
    assert np.allclose(slopes[0], sum(slopes[1:]), rtol=0, atol=1e-14)
    assert not np.allclose(slopes[0], slopes[1])


def test_long_caches_are_verified_on_a_part_of_the_heads(monkeypatch):
    monkeypatch.setattr(verify, "MOST_NUMBERS", 3 * 2 * 50 * 8)
    case = Case("decoding", dims(2, 4, 1, 4, key_heads=2, s=50), passes=(F,))
    sample = verify.choose(case)
    assert sample.units == ((0, 0), (1, 0), (1, 1))
    assert checked(Ours(), case) < 1e-5
