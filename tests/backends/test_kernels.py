"""The compiled kernels: every instruction set, sizes across tiles, threads, forks, signals, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import attngrad
import instruction_sets
from attngrad import Gradients, _native, reference
from attngrad.backends import cpu
from attngrad.backends import reference as dense
from attngrad.backends.cpu import arrays
from attngrad.core.binding import bind
from attngrad.core.options import OPTION_NAMES
from attngrad.testing import relative_error
from cases import EVERYTHING, OPTIONS, PAIRS, SINGLES, Shape, label, make
from passes import all_passes, assert_equal_to_the_reference, assert_within_the_rounding_bound, redraw
from tiers import first

NARROW = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ACROSS_TILES = Shape((1,), 2, 1, 131, 203, 9, 20)
SHARED_BIAS = ("causal", "bias of a head", "dropout", "sinks")


ON_TILES = ("amx", "amx-always", "avx2-tiles")


@pytest.fixture(params=instruction_sets.params(name for name in instruction_sets.ALL if name not in ON_TILES))
def isa(request):
    """Sets with kernels of their own; those on matrix tiles have test_matrix_tiles.py."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture
def threads():
    """Set the number of threads; it is put back afterwards."""
    before = attngrad.get_num_threads()
    yield attngrad.set_num_threads
    attngrad.set_num_threads(before)


# --- every instruction set ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*SINGLES, EVERYTHING, SHARED_BIAS], ids=label)
def test_float64_equals_the_reference_across_tiles(isa, names):
    assert_equal_to_the_reference(make(names, ACROSS_TILES))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_softcap_that_is_reached_passes_nothing_on_however_large_the_tangent(isa, dtype):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 5, 8)).astype(dtype) for _ in range(4))
    q[...] = np.abs(q) + 1
    k[...] = (np.abs(k) + 1) * 1e6
    huge = np.full_like(q, 1e12)
    (_, pullback), (_, dots) = (
        attngrad.vjp(q, k, v, softcap=1.5),
        attngrad.jvp((q, k, v), (huge, None, None), softcap=1.5),
    )
    assert not pullback(dout).q.any()
    assert not dots.any()


@pytest.mark.thorough
@pytest.mark.parametrize("names", PAIRS, ids=label)
def test_pairs_of_options_equal_the_reference(isa, names):
    assert_equal_to_the_reference(make(names))


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", [(), ("causal",), ("window", "bias"), EVERYTHING], ids=label)
def test_low_precision_keeps_the_rounding_bound_across_tiles(isa, names, dtype):
    c = make(names, Shape((1,), 2, 1, 61, 150, 24, 20)).cast(dtype)
    assert_within_the_rounding_bound(c, dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("names", [(), ("causal",), ("window", "bias"), EVERYTHING], ids=label)
def test_results_in_16_bits_are_those_in_float32_rounded_once(isa, names, dtype):
    c = make(names, Shape((1,), 2, 1, 500, 70, 33, 16)).cast(dtype)  # several chunks of queries are summed
    wide = all_passes(c.cast(np.float32))
    for name, x in all_passes(c).items():
        assert np.array_equal(x, wide[name].astype(x.dtype), equal_nan=True), name


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", first(1, [(), ("causal",), ("softcap", "bias")]), ids=label)
def test_large_logits_and_values_with_a_mean_keep_the_rounding_bound(names, dtype):
    large, shifted = (make(names, Shape((1,), 2, 2, 40, 110, 16, 16)) for _ in range(2))
    large.q = large.q * 2.5e3  # logits up to about 1e4
    shifted.v = shifted.v + 100.0
    rng = np.random.default_rng(0)
    for c in (large.cast(dtype), shifted.cast(dtype)):  # few scores matter: one draw might miss the rule by chance
        assert_within_the_rounding_bound(c, dtype, *(redraw(c, dtype, rng) for _ in range(11)))


@pytest.mark.parametrize("names", [(), ("causal ragged", "sinks"), ("bias", "masked rows")], ids=label)
def test_few_queries_with_large_logits_keep_the_rounding_bound(isa, names):
    c = make(names, Shape((2,), 4, 2, 2, 300, 16, 16))
    c.q = c.q * 300.0
    c.v = c.v + 100.0
    assert_within_the_rounding_bound(c.cast(np.float32), np.float32)
    out, lse = attngrad.attention(*c.qkv, return_lse=True, **c.options)  # the decoding path
    expected, expected_lse = reference.attention(*c.qkv, return_lse=True, **c.options)
    finite = np.isfinite(expected_lse)
    assert relative_error(out, expected) < 1e-12
    assert relative_error(lse[finite], expected_lse[finite]) < 1e-12


@pytest.mark.parametrize("d", [1, 3, 8, 17, 33, 80, 257, 512])
def test_any_number_of_features(isa, d):
    e = {1: 5, 3: 1, 17: 16, 512: 31}.get(d, d)
    assert_equal_to_the_reference(make(("causal",), Shape((1,), 2, 1, 29, 37, d, e)))


@pytest.mark.parametrize("t", [1, 2, 7, 16, 47, 48, 49, 96, 97, 145])
@pytest.mark.parametrize("s", [1, 15, 63, 64, 65, 96, 193])
@pytest.mark.parametrize("names", [("causal",), ("window", "masked rows", "softcap")], ids=label)
def test_sizes_around_the_tiles(t, s, names):
    assert_equal_to_the_reference(make(names, Shape((2,), 2, 1, t, s, 4, 3)))


SHORT = [
    Shape((2,), 2, 2, 10, 10, 16, 16),
    Shape((2,), 4, 2, 9, 33, 32, 48),
    Shape((1,), 2, 1, 40, 61, 64, 16),
    Shape((2,), 1, 1, 47, 64, 160, 160),
    Shape((1,), 2, 1, 96, 96, 64, 64),
]
NOTHING_SEEN = ("causal ragged", "masked rows", "window")


@pytest.mark.parametrize("shape", first(2, SHORT), ids=lambda n: f"{n.t}x{n.s}x{n.d}")
@pytest.mark.parametrize("names", [(), *SINGLES, EVERYTHING, NOTHING_SEEN], ids=label)
def test_short_heads_of_whole_vectors_are_written_in_place_rightly(isa, shape, names):
    c = make(names, shape)
    assert_equal_to_the_reference(c)
    for start in (-20, 20):  # vectors of queries that see nothing; queries that all see everything
        c.options |= {"causal": True, "offset": start}
        assert_equal_to_the_reference(c)


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("names", first(1, [NOTHING_SEEN, (), ("causal",)]), ids=label)
def test_short_heads_in_low_precision_keep_the_rounding_bound(isa, dtype, names):
    for shape in SHORT[:3]:
        c = make(names, shape).cast(dtype)
        assert_within_the_rounding_bound(c, dtype, *(redraw(c, dtype, np.random.default_rng(i)) for i in range(3)))


def test_a_short_head_whose_mask_hides_everything_is_zero(isa):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 3, 2, 40, 32)).astype(np.float32)
    mask = np.ones((3, 1, 40, 40), bool)
    mask[1] = False
    out, pullback = attngrad.vjp(q, q, q, mask=mask)
    for x in (out, *pullback(dout)[:3]):
        assert not x[1].any()
        assert x[::2].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("d", [16, 24, 160])
def test_what_a_query_of_a_short_head_that_sees_nothing_holds_is_harmless(isa, d):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 20, d)).astype(np.float32)
    mask = np.arange(20)[:, None] != 3
    found = []
    for x in (np.nan, np.inf, 0.0):
        q[:, 3], dout[:, 3] = x, x
        out, pullback = attngrad.vjp(q, k, v, mask=mask)
        found.append((out, *pullback(dout)[:3]))
        assert not out[:, 3].any()
    for other in found[:2]:
        assert all(np.array_equal(a, b) for a, b in zip(other, found[2], strict=True))


@pytest.mark.parametrize("t", [1, 3, 5])
@pytest.mark.parametrize("names", [(), ("causal ragged", "sinks"), EVERYTHING], ids=label)
def test_few_queries_of_many_heads_against_many_keys(isa, t, names):
    c = make(names, Shape((2,), 8, 2, t, 3300, 16, 7))
    assert_equal_to_the_reference(c)
    for x in (c, c.cast(np.float32)):
        out, lse = attngrad.attention(*x.qkv, return_lse=True, **x.options)  # the decoding path
        expected, expected_lse = reference.attention(*c.qkv, return_lse=True, **c.options)
        finite = np.isfinite(expected_lse)
        tolerance = 1e-12 if x is c else 1e-5
        assert relative_error(out, expected) < tolerance
        assert relative_error(lse[finite], expected_lse[finite]) < tolerance


BIAS_SHAPES = [
    (1, 1, 1, 203),
    (1, 1, 131, 1),
    (1, 2, 1, 1),
    (2, 1, 1, 203),
    (1, 1, 131, 203),
    (2, 2, 131, 203),
    (203,),
    (1,),
]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("batch", first(1, [(2,), (1, 2), (2, 1)]), ids=str)
def test_a_bias_may_broadcast_along_any_axes(shape, batch):
    c = make(("causal",), ACROSS_TILES._replace(batch=batch))
    shape = (1,) * (len(batch) - 1) + shape if len(shape) == 4 else shape
    c.options["bias"] = np.random.default_rng(1).standard_normal(shape)
    if np.broadcast_shapes(shape, c.shape.scores) != c.shape.scores:
        c.options["bias"] = c.options["bias"][..., :1, :, :, :]
    assert_equal_to_the_reference(c)


def test_tiles_that_are_wholly_masked_are_skipped_rightly():
    c = make((), Shape((1,), 2, 1, 200, 400, 5, 6))
    mask = np.zeros((200, 400), bool)
    mask[:, 100:110] = True
    mask[150:, 300:] = True
    c.options["mask"] = mask
    assert_equal_to_the_reference(c)
    ids = attngrad.segments_from_lengths([120, 80])
    key_ids = attngrad.segments_from_lengths([250, 150])
    c.options = {"segments": (ids, key_ids), "causal": True}
    assert_equal_to_the_reference(c)


def test_a_mask_of_odd_bytes_is_still_a_mask():
    c = make((), ACROSS_TILES)
    raw = np.random.default_rng(0).integers(0, 3, (131, 203), np.uint8)
    c.options["mask"] = (raw * 100).view(np.bool_)
    expected = attngrad.attention(*c.qkv, mask=raw > 0)
    assert np.array_equal(attngrad.attention(*c.qkv, **c.options), expected)


# --- threads ----------------------------------------------------------------------------------------------------------


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


# --- in a process of its own ------------------------------------------------------------------------------------------


def script(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    import os

    result = subprocess.run(  # noqa: S603
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_environment_chooses_threads_and_instruction_set():
    code = "import attngrad, attngrad.backends.cpu, attngrad._native as n; print(attngrad.get_num_threads(), n.isa())"
    assert script(code, ATTNGRAD_NUM_THREADS="5", ATTNGRAD_ISA="baseline") == "5 baseline"


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5", "5000"])
def test_a_number_of_threads_that_is_none_is_an_error(text):
    code = """
        import attngrad
        try:
            attngrad.get_num_threads
        except ImportError as error:
            print(error)
    """
    expected = f"attngrad: ATTNGRAD_NUM_THREADS must be an integer from 1 to 4096; got {text!r}."
    assert script(code, ATTNGRAD_NUM_THREADS=text) == expected


def test_an_unknown_instruction_set_is_an_error_that_names_those_there_are():
    code = """
        import attngrad
        try:
            attngrad.attention
        except ImportError as error:
            print(error)
    """
    assert "ATTNGRAD_ISA must be one of" in script(code, ATTNGRAD_ISA="mmx")


def test_affinity_is_respected():
    code = """
        import os
        os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})
        import attngrad
        print(attngrad.get_num_threads())
    """
    assert script(code) == "1"


def test_a_forked_child_computes_the_same():
    code = """
        import os, numpy as np, attngrad
        attngrad.set_num_threads(2)
        q = np.random.default_rng(0).standard_normal((2, 4, 300, 32))
        expected = attngrad.attention(q, q, q)
        pid = os.fork()
        if pid == 0:
            same = np.array_equal(attngrad.attention(q, q, q), expected)
            os._exit(0 if same else 1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), np.array_equal(attngrad.attention(q, q, q), expected))
    """
    assert script(code) == "0 True"


def test_ctrl_c_interrupts_long_calls():
    """Each call would take many seconds; the script's own time limit is what a hang would meet."""
    code = """
        import os, signal, threading, numpy as np, attngrad
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
        q = np.zeros((1, 16, 30000, 64), np.float32)
        _, pullback = attngrad.vjp(q, q, q, window=(0, 0))
        calls = {
            "attention": lambda: attngrad.attention(q, q, q),
            "pullback": lambda: [pullback(q) for _ in range(10**6)],
            "jvp": lambda: attngrad.jvp((q, q, q), (q, None, None)),
            "hvp": lambda: [attngrad.hvp((q, q, q), (q, None, None), q, window=(0, 0)) for _ in range(10**6)],
        }
        for name, call in calls.items():
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                call()
                print("finished")
            except KeyboardInterrupt:
                print(name, "interrupted")
        print(attngrad.attention(q[:, :, :8], q[:, :, :8], q[:, :, :8]).any())
    """
    assert script(code) == "\n".join(
        [*(f"{name} interrupted" for name in ("attention", "pullback", "jvp", "hvp")), "False"]
    )


LONG = """
    import resource, numpy as np, attngrad
    n, d = 16384, 64
    rng = np.random.default_rng(0)
    q, k, v, dout, q_dot, k_dot, v_dot, dout_dot = (
        rng.standard_normal((1, 1, n, d), dtype=np.float32) for _ in range(8)
    )

    def pullback(n, **options):
        out, pullback = attngrad.vjp(q[:, :, :n], k[:, :, :n], v[:, :, :n], **options)
        return out, pullback(dout[:, :, :n])

    def hvp(n, **options):
        primals, tangents = ([x[:, :, :n] for x in xs] for xs in ((q, k, v), (q_dot, k_dot, v_dot)))
        return attngrad.hvp(tuple(primals), tuple(tangents), dout[:, :, :n], dout_dot[:, :, :n], **options)

    def growth(call):
        call(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = call(n, window=(100, 100))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print((after - before) * 1024 / q.nbytes)

"""


@pytest.mark.parametrize(("call", "limit"), [("pullback", 12), ("hvp", 16)])
def test_a_long_sequence_takes_linear_memory(call, limit):
    """In multiples of the size of q, beyond the inputs."""
    assert float(script(LONG + f"    growth({call})")) < limit


def test_results_that_are_alive_are_never_reused():
    c = make(("causal",), Shape((2,), 4, 2, 150, 160, 32, 16))
    first = all_passes(c)
    copies = {name: x.copy() for name, x in first.items()}
    view = first["out"][0, 0]
    for seed in range(4):
        all_passes(make(("causal",), c.shape, seed))
    assert all(np.array_equal(first[name], copies[name]) for name in first)
    del first["out"]
    all_passes(make((), c.shape))
    assert np.array_equal(view, copies["out"][0, 0])  # a view keeps its memory


def test_out_may_be_overwritten_before_the_pullback():
    c = make(("causal",))
    out, pullback = attngrad.vjp(*c.qkv, **c.options)
    expected = pullback(c.dout)
    out[...] = 7.0
    again = pullback(c.dout)
    assert all(np.array_equal(getattr(again, name), getattr(expected, name)) for name in Gradients._fields[:3])


def test_all_options_are_in_the_table():
    """A new option must enter the table that feeds these tests."""
    covered = set().union(*(builder(np.random.default_rng(0), Shape()) for builder in OPTIONS.values()))
    assert covered | {"return_lse"} == set(OPTION_NAMES)


def test_what_the_kernels_are_given_is_aligned():
    """x86 forgives an unaligned read, so the results alone would not tell."""
    raw = np.zeros(2 * 3 * 4 * 8 + 1, np.uint8)[1:].view(np.float64).reshape(1, 2, 3, 4)
    assert not raw.flags.aligned
    for prepared in (arrays.rows(raw), arrays.contiguous(raw)):
        assert prepared.flags.aligned


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
def test_a_shard_sees_its_part_of_the_global_dropout_mask(dtype):
    c = make(("dropout",), Shape((3,), 4, 2, 40, 60, 8, 6)).cast(dtype)
    x, o, _ = bind("test", *c.qkv, c.options)
    whole, _ = dense.weights(x, o)
    keep = attngrad.dropout_mask(whole.shape, o.dropout, o.seed) / (1 - o.dropout)
    b, h, i, j = slice(1, 3), slice(2, 4), slice(7, 31), slice(13, 58)
    part = x._replace(q=c.q[b, h, i], k=c.k[b, 1:2, j], v=c.v[b, 1:2, j], origin=(1, 2, 7, 13))
    weights, _ = dense.weights(part, o)
    expected = (weights * keep[b, h, i, j]) @ part.v
    assert relative_error(cpu.forward(part, o)[0], expected) < (1e-12 if dtype is np.float64 else 1e-5)
    assert relative_error(reference.forward(part, o).out, expected) < (1e-12 if dtype is np.float64 else 1e-5)
