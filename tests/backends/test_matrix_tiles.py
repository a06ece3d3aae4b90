"""16-bit numbers on matrix tiles give what multiply-adds in float32 give, but for a last bit here and there."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import attngrad
import instruction_sets
from attngrad import _native
from attngrad.testing import relative_error
from cases import EVERYTHING, PAIRS, SINGLES, Case, Shape, label, make
from passes import all_passes

pytestmark = pytest.mark.thorough  # on sets that only make test-all builds

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TILED = {"amx-always": "avx512", "avx2-tiles": "avx2-512"}
"""Sets that use the tiles at any length, and the sets that differ from them in that alone."""
ACROSS_TILES = Shape((1,), 2, 1, 131, 230, 40, 20)
BLIND = ("causal ragged", "masked rows", "window")
SIZES = [
    Shape((1,), 1, 1, 1, 1, 1, 1),
    Shape((2,), 2, 1, 9, 33, 32, 48),
    Shape((1,), 2, 2, 96, 192, 64, 64),
    Shape((1,), 2, 1, 97, 193, 33, 17),
    Shape((1,), 1, 1, 300, 31, 80, 128),
    Shape((1,), 1, 1, 16, 400, 7, 257),
    Shape((1,), 1, 1, 900, 500, 16, 16),
]


@pytest.fixture(params=instruction_sets.params(TILED))
def tiled(request):
    before = _native.isa()
    yield request.param
    _native.set_isa(before)


@pytest.fixture
def one_thread():
    before = attngrad.get_num_threads()
    attngrad.set_num_threads(1)
    yield
    attngrad.set_num_threads(before)


def differences(c: Case, tiled: str) -> dict[str, float]:
    """Of every result: how far the two are apart, RMS, in units of eps and of the RMS result."""
    results = []
    for name in (tiled, TILED[tiled]):
        _native.set_isa(name)
        (out, lse), pullback = attngrad.vjp(*c.qkv, return_lse=True, **c.options)
        grads = pullback(c.dout, c.dlse)._asdict()
        results.append({"out": out, "lse": lse, **{f"d{n}": g for n, g in grads.items() if g is not None}})
    found = {}
    for name, y in results[1].items():
        x, y = (z.astype(np.float64) for z in (results[0][name], y))
        finite = np.isfinite(y)
        assert np.array_equal(finite, np.isfinite(x)), name
        assert np.array_equal(x[~finite], y[~finite]), name
        x, y = x[finite], y[finite]
        size = np.linalg.norm(y) * float(ml_dtypes.finfo(c.q.dtype).eps)
        found[name] = float(np.linalg.norm(x - y) / (size or 1.0))
    return found


def assert_alike(c: Case, tiled: str) -> None:
    """One in thirty numbers may be rounded the other way; of a few numbers, any."""
    limit = 0.25 if c.q.size > 1 else 1.0
    for name, apart in differences(c, tiled).items():
        assert apart < (0.02 if name == "lse" else limit), name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("names", [(), *SINGLES, *PAIRS, EVERYTHING, BLIND], ids=label)
def test_every_option(tiled, names, dtype):
    assert_alike(make(names, ACROSS_TILES).cast(dtype), tiled)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("names", [(), ("causal",), BLIND, ("softcap", "bias", "dropout")], ids=label)
@pytest.mark.parametrize("shape", SIZES, ids=lambda n: f"{n.t}x{n.s}x{n.d}x{n.e}")
def test_sizes_around_the_tiles(tiled, shape, names, dtype):
    assert_alike(make(names, shape).cast(dtype), tiled)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strided_inputs(tiled, dtype):
    c = make(("causal",), Shape((2,), 3, 3, 200, 250, 64, 64)).cast(dtype)
    c.q, c.k, c.v, c.dout = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (*c.qkv, c.dout))
    assert_alike(c, tiled)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_nan_of_any_bits_reaches_the_gradients(tiled, dtype, bits):
    _native.set_isa(tiled)
    c = make((), ACROSS_TILES).cast(dtype)
    dlse = np.zeros(c.q.shape[:-1], np.float32)
    dlse.view(np.uint32)[0, 0, 5] = bits
    _, pullback = attngrad.vjp(*c.qkv, return_lse=True)
    found = pullback(c.dout, dlse)
    assert np.isnan(found.q[0, 0, 5]).all()
    assert np.isnan(found.q).any(axis=-1).sum() == 1
    assert np.isnan(found.k).all()  # every key is seen by that query
    assert np.isfinite(found.v).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gradients_that_are_not_wanted_are_not_computed(tiled, dtype):
    _native.set_isa(tiled)
    c = make(("bias",), ACROSS_TILES).cast(dtype)
    _, pullback = attngrad.vjp(*c.qkv, **c.options)
    all_of_them = pullback(c.dout)._asdict()
    for name in ("q", "k", "v", "bias"):
        one = pullback(c.dout, wrt=name)._asdict()
        assert [n for n, g in one.items() if g is not None] == [name]
        assert np.array_equal(one[name], all_of_them[name])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("names", [("causal",), ("window",)], ids=label)
def test_several_blocks_of_queries_at_once(tiled, names, dtype, one_thread):
    assert_alike(make(names, Shape((1,), 1, 1, 900, 900, 16, 16)).cast(dtype), tiled)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_an_infinity_stays_in_its_row_or_column(tiled, dtype):
    """Half is two parts; the lower one of an infinity is zero, not NaN."""
    _native.set_isa(tiled)
    c = make((), Shape((1,), 1, 1, 40, 50, 8, 8)).cast(dtype)
    expected = attngrad.attention(*c.qkv)
    c.q[0, 0, 3, 2] = np.inf
    c.v[0, 0, 7, 5] = np.inf
    found = attngrad.attention(*c.qkv)
    others = np.ix_(np.arange(40) != 3, np.arange(8) != 5)
    assert np.array_equal(found[0, 0][others], expected[0, 0][others])
    assert not np.isfinite(found[0, 0, 3]).any()
    assert (found[0, 0, np.arange(40) != 3, 5] == np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("names", [(), ("sinks",)], ids=label)
def test_what_a_query_that_sees_nothing_holds_is_harmless(tiled, names, dtype):
    _native.set_isa(tiled)
    c = make(names, Shape((1,), 2, 1, 40, 50, 8, 8)).cast(dtype)
    c.options |= {"causal": True, "offset": -5}
    expected = attngrad.vjp(*c.qkv, **c.options)[1](c.dout, c.dlse)
    c.q[..., :5, :] = np.nan
    c.dout[..., :5, :] = np.nan
    out, pullback = attngrad.vjp(*c.qkv, **c.options)
    assert not out[..., :5, :].any()
    for found, x in zip(pullback(c.dout, c.dlse), expected, strict=True):
        assert (found is None and x is None) or np.array_equal(found, x)


def test_a_long_head_takes_the_tiles_by_itself():
    if "amx" not in _native.isa_names():
        pytest.skip("this machine has no AMX")
    c = make((), Shape((1,), 1, 1, 300, 700, 64, 64)).cast(ml_dtypes.bfloat16)
    before = _native.isa()
    try:
        found = {}
        for name in ("amx", "amx-always", "avx512"):
            _native.set_isa(name)
            found[name] = attngrad.vjp(*c.qkv)[1](c.dout).q
        assert np.array_equal(found["amx"], found["amx-always"])
        assert not np.array_equal(found["amx"], found["avx512"])
    finally:
        _native.set_isa(before)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_other_passes_fit_to_those_on_tiles(tiled, dtype):
    """hvp rebuilds the weights with multiply-adds, from statistics of a forward pass on tiles."""
    _native.set_isa(tiled)
    c = make(("causal",), ACROSS_TILES).cast(dtype)
    found = all_passes(c)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for name in ("dq", "dk", "dv"):
        assert relative_error(found[f"{name} of hvp"].astype(float), found[name].astype(float)) < 2 * eps


def test_tiles_of_other_libraries_are_left_as_they_were():
    """Another library may have configured the tiles of this thread, and may rely on that."""
    if "amx" not in _native.isa_names():
        pytest.skip("this machine has no AMX")
    code = """
import ctypes, mmap, numpy as np, ml_dtypes, attngrad
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("c4e27849 07c3".replace(" ", "")))   # ldtilecfg [rdi]; ret
page.write(bytes.fromhex("c4e27949 07c3".replace(" ", "")))   # sttilecfg [rdi]; ret
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
load, store = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + at) for at in (0, 6))
config, found = (ctypes.create_string_buffer(64) for _ in range(2))
config[0] = 1
for tile in range(3):
    config[16 + 2 * tile], config[48 + tile] = 32, 8
load(config)
attngrad.set_num_threads(1)
x = np.ones((1, 1, 500, 64), ml_dtypes.bfloat16)
attngrad.vjp(x, x, x)[1](x)
store(found)
assert found.raw == config.raw, found.raw
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
