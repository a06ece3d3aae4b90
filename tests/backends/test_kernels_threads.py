"""The compiled kernels on several threads: the same bits, whoever calls them and however many there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import attngrad
from attngrad import reference
from attngrad.testing import relative_error
from cases import EVERYTHING, NARROW, SHARED_BIAS, Shape, label, make
from passes import all_passes


@pytest.mark.parametrize("dtype", [np.float64, *NARROW.values()], ids=["float64", *NARROW])
@pytest.mark.parametrize("names", [(), ("causal",), EVERYTHING, SHARED_BIAS], ids=label)
@pytest.mark.parametrize("shape", [
    Shape((1,), 1, 1, 1500, 700, 32, 16), Shape((2,), 4, 2, 150, 330, 8, 8), Shape((200,), 4, 4, 10, 12, 16, 16),
], ids=str)  # fmt: skip
def test_results_do_not_depend_on_the_number_of_threads(threads, shape, names, dtype):
    c = make(names, shape).cast(dtype)
    threads(1)
    alone = all_passes(c)
    for n in (2, 3, 7):
        threads(n)
        for name, x in all_passes(c).items():
            assert np.array_equal(x, alone[name], equal_nan=True), (n, name)


@pytest.mark.parametrize(
    "bias", [(130, 1), (6, 130, 1), (6, 1, 1), (3, 1, 1, 1), (1,), (700,), (3, 1, 130, 700)], ids=str
)
def test_the_gradient_of_a_shared_bias_does_not_depend_on_the_number_of_threads(threads, bias):
    c = make((), Shape((3,), 6, 2, 130, 700, 16, 16))
    c.options["bias"] = np.random.default_rng(0).standard_normal(bias)

    def dbias(module=attngrad):
        return module.vjp(*c.qkv, return_lse=True, **c.options)[1](c.dout, c.dlse).bias

    threads(1)
    alone = dbias()
    assert relative_error(alone, dbias(reference)) < 1e-12
    for n in (2, 4, 4, 4):
        threads(n)
        assert np.array_equal(dbias(), alone)


def test_calls_that_want_different_numbers_of_workers_do_not_disturb_each_other(threads):
    threads(8)
    rng = np.random.default_rng(0)
    small, large = (rng.standard_normal((n, 1, 96, 64)).astype(np.float32) for n in (2, 9))
    expected = [attngrad.attention(x, x, x) for x in (small, large)]
    for _ in range(1500):
        for x, out in zip((small, large), expected, strict=True):
            assert np.array_equal(attngrad.attention(x, x, x), out)


def test_many_python_threads_may_call_at_once():
    cases = [make(("causal", "bias"), Shape((2,), 4, 2, 200, 150, 16, 8), seed) for seed in range(8)]
    alone = [all_passes(c) for c in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            together = list(pool.map(all_passes, cases))
            for a, b in zip(alone, together, strict=True):
                assert all(np.array_equal(a[name], b[name]) for name in a)


def test_the_number_of_threads_is_checked_and_kept(threads):
    threads(3)
    assert attngrad.get_num_threads() == 3
    with pytest.raises(ValueError, match="set_num_threads: n must be from 1 to 4096; got 0"):
        attngrad.set_num_threads(0)
    with pytest.raises(TypeError, match=r"set_num_threads: n must be an integer; got 1\.5"):
        attngrad.set_num_threads(1.5)
    assert attngrad.get_num_threads() == 3
