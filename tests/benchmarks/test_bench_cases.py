"""The grid of the benchmark: what its rows compute, and what is counted."""

import itertools
import math

import numpy as np
import pytest

from attngrad import reference
from attngrad.core.binding import bind
from bench_tools import FB, TINY, F, checked, ids
from benchmarks import grid, memory, peers, runner, verify
from benchmarks.cases import TANGENTS, Case, dims
from benchmarks.numpy_peer import NumPy
from benchmarks.passes import PASSES
from benchmarks.peers import OURS, Ours, OursInAnotherPass
from benchmarks.results import Row, geometric_mean


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_attngrad_and_numpy_agree_with_the_reference_on_every_case(case):
    assert checked(Ours(), case) <= verify.TOLERANCE[case.dtype]
    tolerance = verify.APPROXIMATION if PASSES[case.passes[0]].tangents else verify.TOLERANCE
    assert checked(NumPy(), case) <= tolerance.get(case.dtype, 0.0)


@pytest.mark.parametrize("case", [c for c in TINY if c.dtype in ("float32", "float64")], ids=ids)
def test_torch_agrees_with_the_reference_on_every_case(case):
    pytest.importorskip("torch")
    assert checked(peers.load("torch", 1), case) <= verify.TOLERANCE[case.dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("case", {(c.kind, c.dtype, c.n.t == c.n.s, c.passes): c for c in TINY}.values(), ids=ids)
def test_jax_agrees_with_the_reference_on_every_kind(case):
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    try:
        assert checked(peers.load("jax", 1), case) <= verify.TOLERANCE[case.dtype]
    finally:
        jax.config.update("jax_enable_x64", before)


def test_sixteen_bit_rows_are_held_against_float32_on_the_same_numbers():
    case = Case("bfloat16", dims(1, 2, 5, 3), dtype="bfloat16")
    ready = peers.OursInFloat32().prepare(case, F, case.inputs())
    assert ready.call().dtype == np.float32
    assert checked(peers.OursInFloat32(), case) < 1e-6


@pytest.mark.parametrize("name", [name for name, one in PASSES.items() if one.own])
def test_passes_with_tangents_are_held_against_our_own_without(name):
    case, own = Case("", dims(1, 2, 5, 3)), OursInAnotherPass()
    assert own.runs(name).name == (F if name.startswith("jvp") else FB)
    ready = own.prepare(case, name, case.inputs(TANGENTS))
    assert set(ready.arrays(ready.call())) == set(own.runs(name).outputs)
    assert checked(own, case, [name]) < 1e-6


def test_a_pass_along_one_tangent_gets_that_tangent_alone():
    seen = {}

    class Seeing(Ours):
        def __init__(self):
            super().__init__()
            self.passes = {name: lambda case, x, name=name: seen.update({name: x}) for name in self.passes}

    case = Case("", dims(1, 2, 5, 3))
    x = case.inputs(TANGENTS)
    for name, one in PASSES.items():
        Seeing().prepare(case, name, x)
        found = seen.pop(one.method)
        assert {f"{argument}_dot" for argument in found.given()} == set(one.tangents)
        assert all(getattr(found, tangent) is getattr(x, tangent) for tangent in one.tangents)


def test_tangents_are_drawn_where_they_are_asked_for_and_leave_the_rest_alone():
    case = Case("", dims(2, 4, 5, 3, key_heads=2, e=7), "bias HTS", "bfloat16")
    bare, x = case.inputs(), case.inputs(TANGENTS)
    assert bare.given() == {}
    for name in ("q", "k", "v", "dout"):
        own, tangent = getattr(x, name), getattr(x, f"{name}_dot")
        assert np.array_equal(own, getattr(bare, name))
        assert (tangent.shape, tangent.dtype) == (own.shape, own.dtype)
        assert not np.array_equal(tangent, own)
    assert np.array_equal(x.bias, bare.bias)


def test_the_grid_has_what_the_project_promises():
    default = grid.select(grid.DEFAULT)
    labels = {f"{case.group} {case.label} {name}" for case, name in default}
    for n, kind, name in itertools.product((10, 16, 64, 512, 2048, 16384), ("", "causal"), (F, FB)):
        assert any(c.group == "sizes" and c.n.t == n and c.kind == kind and p == name for c, p in default)
    for wanted in (
        "window 1,8,2048,64 window 256 forward",
        "masks and bias 4,8,512,64 mask 50% forward + backward",
        "masks and bias 2,8,1024,64 dbias HTS forward + backward",
        "grouped heads 2,8/2,1024,64 causal forward",
        "cross 4,8,128/1024,64 forward + backward",
        "decoding 8,32/8,1/16384,128 forward",
        "head sizes 4,8,512,80 causal forward",
        "float64 1,8,2048,64 causal f64 forward + backward",
        "bfloat16 8,12,128,64 bf16 forward",
        "jvp and hvp 32,4,10,32 causal hvp",
        "jvp and hvp 1,8,1024,64 jvp",
        "jvp and hvp 1,8,1024,64 f64 hvp",
        "jvp and hvp 4,8,256,64 causal bf16 jvp",
        "one tangent 1,8,1024,64 causal hvp v_dot",
    ):
        assert wanted in labels
    assert {c.dtype for c, _ in default} == {"float32", "float64", "bfloat16", "float16"}


def test_each_level_contains_the_one_before_and_no_row_stands_twice():
    rows = [set(grid.select(level)) for level in (grid.QUICK, grid.DEFAULT, grid.FULL)]
    assert rows[0] < rows[1] < rows[2]
    assert len({(c.group, c.label) for c in grid.CASES}) == len(grid.CASES)
    assert {c.group for c in grid.CASES} == set(grid.TITLES)


def test_only_and_dtype_narrow_the_selection():
    assert {c.kind for c, _ in grid.select(grid.FULL, ["causal"])} == {"causal"}
    assert {name for _, name in grid.select(grid.FULL, ["*+ backward"])} == {FB}
    assert {c.dtype for c, _ in grid.select(grid.FULL, (), ["float64"])} == {"float64"}
    assert runner.Settings(1, 1, only=("decoding",)).usages() == []
    assert runner.Settings(1, 1, dtypes=("float64",)).usages() == []
    usages = runner.Settings(1, 1, only=("memory",)).usages()
    assert {("torch", FB, 65536), (OURS, FB, 65536), (OURS, "hvp", 32768), ("torch", "hvp", 8192)} <= set(usages)
    assert ("torch", "hvp", 16384) not in usages  # n x n, ten times
    assert {work for _, work, _ in runner.Settings(0, 1, only=("hvp",)).usages()} == {"hvp"}


@pytest.mark.parametrize("case", TINY, ids=ids)
def test_pairs_are_those_that_causal_and_window_leave_in_the_reference(case):
    x = case.inputs()
    options = {"causal": case.options.causal}
    if case.options.window is not None:
        options["window"] = (case.options.window, 0)
    wide = [a.astype(np.float64) for a in (x.q, x.k, x.v)]
    operands, o, _ = bind("test", *wide, options, kernels=False)
    visible = np.broadcast_to(reference.forward(operands, o).visible, (*x.q.shape[:-1], case.n.s))
    assert case.pairs() == visible.sum()
    plane = case.visible(np.arange(case.n.t))
    assert plane is None or np.array_equal(plane, visible[0, 0])


def test_flops_are_the_formulas_of_the_readme():
    n = 2048
    assert Case("", dims(1, 8, n, 64)).flops() == 4 * 8 * n * n * 64
    assert Case("", dims(1, 8, n, 64), "causal").flops() == 4 * 8 * 64 * n * (n + 1) // 2
    assert Case("", dims(2, 3, 5, 7, e=11)).flops() == 2 * 2 * 3 * 5 * 5 * (7 + 11)
    full = Row(Case("", dims(1, 8, n, 64)), FB)
    assert full.flops == 3.5 * 4 * 8 * n * n * 64
    products = {name: one.cost * 2 for name, one in PASSES.items()}
    assert products == {
        F: 2,
        FB: 7,
        "jvp": 6,
        "hvp": 21,
        "jvp q_dot": 4,
        "jvp k_dot": 4,
        "jvp v_dot": 3,
        "hvp q_dot": 14,
        "hvp k_dot": 14,
        "hvp v_dot": 11,
    }


def test_causal_pairs_of_oblong_shapes_end_at_the_last_key():
    # T = 3, S = 5: the rows see 3, 4, 5 keys. T = 5, S = 3: 0, 0, 1, 2, 3.
    assert Case("", dims(1, 1, 3, 2, s=5), "causal").pairs() == 12
    assert Case("", dims(1, 1, 5, 2, s=3), "causal").pairs() == 6
    assert Case("", dims(1, 1, 5, 2), "window 2").pairs() == 1 + 2 + 3 + 3 + 3


def test_bytes_of_decoding_are_those_of_the_cache():
    case = Case("decoding", dims(8, 32, 1, 128, key_heads=8, s=4096))
    cache = 2 * 8 * 8 * 4096 * 128 * 4
    assert 1.0 < case.bytes() / cache < 1.01


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert geometric_mean([0.25, 4.0]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))


def test_the_exponent_of_a_power_law_is_its_power():
    sizes = [4096, 8192, 65536]
    assert memory.exponent(sizes, [3.0 * n**1.5 for n in sizes]) == pytest.approx(1.5)
