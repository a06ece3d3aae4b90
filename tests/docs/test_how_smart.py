"""The counts of docs/studies/how_smart_is_autograd.py: the page says what is found, for all that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

# One process counts for all of them.
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("how_smart")]

DOCS = Path(__file__).parents[2] / "docs"
PAGE, STUDIES = DOCS / "how_smart_is_autograd.md", DOCS / "studies"
ROW = re.compile(r"^\| ([^|]+) \| (?:\d: )?([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", re.M)


@pytest.fixture(scope="module")
def smart() -> SimpleNamespace:
    """What the recorders define, under one name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDIES)
        modules = [importlib.import_module(f"autograd_counts.{name}") for name in ("record", "pytorch", "xla", "hips")]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


@pytest.fixture(scope="module")
def counts() -> dict[str, dict]:
    """All counts, by system, from a process of its own: torch.compile and MKL's log leave traces in theirs."""
    command = [sys.executable, STUDIES / "how_smart_is_autograd.py", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    found = json.loads(found.stdout.splitlines()[-1])
    assert found["counts"]
    assert found["missing"] == [name for name in ("torch", "jax", "autograd") if not importlib.util.find_spec(name)]
    return {count["system"]: count for count in found["counts"]}


def test_what_is_installed_is_counted(counts):
    assert "PyTorch, eager" in counts  # the tests install torch
    assert ("JAX, jaxpr" in counts) == bool(importlib.util.find_spec("jax"))
    assert ("HIPS autograd" in counts) == bool(importlib.util.find_spec("autograd"))


def test_every_system_makes_the_four_products_and_one_omega(counts):
    for name, count in counts.items():
        if "E = D" not in name:
            assert sorted(count["products"]) == ["dA", "dK", "dQ", "dV"], name
            assert count["omega"] == "once", name
        assert count["megabytes"] >= 3.2, name


def test_the_fused_backward_makes_five_products_and_moves_the_least(counts, smart):
    fused = counts["PyTorch, fused (E = D)"]
    assert fused["megabytes"] == pytest.approx(smart.least_megabytes(smart.D), rel=0.01)
    if not fused["omega"].startswith("not told"):
        assert (fused["products"], fused["omega"]) == (["S", "dV", "dA", "dQ", "dK"], "once")


PACKAGES = {
    "PyTorch, eager": "torch",
    "PyTorch, eager, softmax written out": "torch",
    "torch.compile": "torch",
    "JAX, jaxpr": "jax",
    "HIPS autograd": "autograd",
}


def test_the_page_is_about_the_torch_of_the_tests():
    assert f"torch {version('torch').split('+')[0]}" in PAGE.read_text()


@pytest.mark.parametrize("name", PACKAGES)
def test_the_page_has_the_numbers_that_are_found(counts, name):
    page, package = PAGE.read_text(), PACKAGES[name]
    products, omega, kept, written, megabytes = {row[0]: row[1:] for row in ROW.findall(page)}[name]
    if package != "torch":  # whose version is pinned
        if name not in counts:
            pytest.skip(f"{package} is not installed")
        if (installed := f"{package} {version(package).split('+')[0]}") not in page:
            pytest.skip(f"the page is about another version than {installed}")
    found = counts[name]
    assert (products, omega) == (" ".join(found["products"]), found["omega"])
    assert (int(kept), int(written)) == (found["score_arrays_kept"], found["score_arrays_written"])
    assert float(megabytes) == pytest.approx(found["megabytes"], abs=0.006)


# --- the counting itself, fed with backwards that are not smart ------------------------------------------------------


def test_a_torch_backward_that_forms_omega_twice_is_found_out(smart):
    import torch

    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            weights = torch.softmax(q @ k.mT / smart.D**0.5, dim=-1)
            ctx.save_for_backward(q, k, v, weights)
            return weights @ v

        @staticmethod
        def backward(ctx, dout):
            q, k, v, weights = ctx.saved_tensors

            def omega():
                dweights = dout @ v.mT
                return weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) / smart.D**0.5

            return omega() @ k, omega().mT @ q, weights.mT @ dout

    count = smart.count("wasteful", smart.torch_eager(Wasteful.apply))
    assert count.omega == "twice"
    assert sorted(count.products) == ["dA", "dA", "dK", "dQ", "dV"]


def hlo(first: str, second: str) -> str:
    """A backward of two products, dQ from ``first`` and dK from ``second``; dQ inside a fusion."""
    b, t, s, d = "2,4", 256, 192, 64
    scores, query, key = f"f32[{b},{t},{s}]", f"f32[{b},{t},{d}]", f"f32[{b},{s},{d}]"
    return f"""
%inner (p0: {scores}, p1: {key}) -> {query} {{
  %p1 = {key}{{3,2,1,0}} parameter(1)
  %p0 = {scores}{{3,2,1,0}} parameter(0)
  ROOT %dot.1 = {query}{{3,2,1,0}} dot(%p0, %p1), lhs_contracting_dims={{3}}, rhs_contracting_dims={{2}}
}}

ENTRY %main (a: {scores}, q: {query}, k: {key}) -> ({query}, {key}) {{
  %a = {scores}{{3,2,1,0}} parameter(0)
  %q = {query}{{3,2,1,0}} parameter(1)
  %k = {key}{{3,2,1,0}} parameter(2)
  %omega.1 = {scores}{{3,2,1,0}} multiply(%a, %a)
  %omega.2 = {scores}{{3,2,1,0}} multiply(%a, %a)
  %copied = {scores}{{3,2,1,0}} copy(%{second})
  %dq = {query}{{3,2,1,0}} fusion(%{first}, %k), kind=kCustom, calls=%inner
  %dk = {key}{{3,2,1,0}} dot(%copied, %q), lhs_contracting_dims={{2}}, rhs_contracting_dims={{2}}
  ROOT %tuple = ({query}{{3,2,1,0}}, {key}{{3,2,1,0}}) tuple(%dq, %dk)
}}
"""


@pytest.mark.parametrize(("second", "omega"), [("omega.1", "once"), ("omega.2", "twice")])
def test_optimised_hlo_is_read_through_fusions_and_copies(smart, second, omega):
    count = smart.count("hlo", smart.hlo_operations(hlo("omega.1", second)))
    assert (count.products, count.omega) == (["dQ", "dK"], omega)
    scores, query, key = (4 * 8 * n for n in (256 * 192, 256 * 64, 192 * 64))
    expected = 2 * 3 * scores + 2 * scores + (scores + key + query) + (scores + query + key)
    assert count.megabytes == pytest.approx(expected / 1e6)


def test_numpy_calls_are_seen_and_views_are_not(smart):
    import numpy as np

    x = np.ones((3, 4)).view(smart.Recording)
    smart.Recording.log = seen = []
    try:
        y = np.matmul(x, np.swapaxes(x, -1, -2)[:, :2])
        np.sum(y, axis=0)
        y += 1.0
        np.repeat(y, 2)
    finally:
        smart.Recording.log = None
    assert [op.name for op in seen] == ["matmul", "add", "add", "repeat"]
    assert seen[0].product is not None
    assert seen[0].product[0].key == seen[0].product[1].key == smart.numpy_buffer(x).key
    assert sum(b.bytes for b in seen[0].reads) == 8 * (12 + 8)


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")
def test_bytes_of_the_hlo_are_those_that_xla_counts(smart):
    import jax

    pullback, dout = smart.jax_pullback()
    compiled = jax.jit(lambda back, dy: back(dy)).lower(pullback, dout).compile()
    found = smart.count("hlo", smart.hlo_operations(compiled.as_text())).megabytes
    assert found == pytest.approx(compiled.cost_analysis()["bytes accessed"] / 1e6, rel=0.02)
