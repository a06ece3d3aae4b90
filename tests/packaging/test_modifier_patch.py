"""The worked example of CONTRIBUTING: a new score modifier, as a patch that is applied, built and checked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "docs" / "patches" / "score_modifier.patch"
TREE = ("CMakeLists.txt", "LICENSE", "README.md", "csrc", "pyproject.toml", "src")

CHECKS = r"""
import itertools
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # an editable install
sys.path[:0] = sys.argv[1:]
import jax
import numpy as np
import torch

jax.config.update("jax_enable_x64", True)
import attngrad, attngrad.distributed, attngrad.jax, attngrad.torch
from attngrad import _native, reference, testing
from attngrad.core.dtypes import TABLE
from passes import assert_equal_to_the_reference, assert_within_the_rounding_bound
from cases import EVERYTHING, SHAPES, Shape, make

assert attngrad.__file__.startswith(sys.argv[1]), attngrad.__file__
NAMES = [(), ("softcap",), ("bias", "sinks"), ("causal", "dropout"), EVERYTHING]


def case(names, shape="grouped"):
    c = make(names, SHAPES[shape] if isinstance(shape, str) else shape)
    c.options["softsign"] = 0.8
    return c


# the formula: complex step against the reference, alone and after softcap
for names in ((), ("softcap", "bias")):
    c = case(names)
    out_dot, lse_dot = testing.complex_step_jvp(*c.qkv, c.t, **c.options)
    _, moved = reference.jvp(c.qkv, c.t[:3], **c.tangents, **c.options, return_lse=True)
    assert testing.relative_error(moved[0], out_dot) < 1e-13
    expected = testing.complex_step_hvp(*c.qkv, c.t, c.dout, c.dout_dot, c.dlse, c.dlse_dot, **c.options)
    cotangents = {"dlse": c.dlse, "dlse_dot": c.dlse_dot}
    _, found = reference.hvp(c.qkv, c.t[:3], c.dout, c.dout_dot, **cotangents, **c.tangents, **c.options)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None) and (a is None or testing.relative_error(a, b) < 1e-13)

# all four passes of the kernels, on every instruction set, in every dtype
for isa in _native.isa_names():
    _native.set_isa(isa)
    for names, shape in itertools.product(NAMES, ["grouped", Shape((1,), 2, 1, 70, 131, 9, 20)]):
        assert_equal_to_the_reference(case(names, shape))
    for dtype in TABLE[1:]:
        assert_within_the_rounding_bound(case(("causal", "bias")), dtype.numpy)
print("kernels")

# torch: first and second derivatives, forward mode, compile
q, k, v = (torch.tensor(x, requires_grad=True) for x in case(()).qkv)
f = lambda q, k, v: attngrad.torch.attention(q, k, v, softsign=0.8, causal=True)
assert torch.autograd.gradcheck(f, (q, k, v), check_forward_ad=True, check_batched_grad=True)
assert torch.autograd.gradgradcheck(f, (q, k, v), check_fwd_over_rev=True)
expected = reference.attention(*case(()).qkv, softsign=0.8, causal=True)
for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
    assert testing.relative_error(g(q, k, v).detach().numpy(), expected) < 1e-12
print("torch")

# jax: jit, grad, hessian-vector product
x = [jax.numpy.asarray(a) for a in case(()).qkv]
g = lambda module, **o: lambda q: (module.attention(q, *x[1:], softsign=0.8, causal=True) ** 2).sum()
for d in (jax.grad, lambda f: lambda q: jax.jvp(jax.grad(f), (q,), (q,))[1]):
    ours, dense = (jax.jit(d(g(m)))(x[0]) for m in (attngrad.jax, reference))
    assert testing.relative_error(np.asarray(ours), np.asarray(dense)) < 1e-12
print("jax")

# a ring of one rank
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ring = lambda q, k, v: attngrad.distributed.ring_attention(q, k, v, softsign=0.8, causal=True)
assert torch.autograd.gradcheck(ring, (q, k, v), check_forward_ad=True)
print("ring")

# the layer, the trace with its checks, the auditor's truth
layer = attngrad.MultiHeadAttention(8, 2, dtype=np.float64)
layer(np.ones((3, 8)), softsign=0.8)
trace = attngrad.trace(*case(()).qkv, dout=case(()).dout, tangents=case(()).t[:3], softsign=0.8)
assert trace.holds


def candidate(q, k, v, dout, **options):
    out, pullback = attngrad.vjp(q, k, v, **options)
    return out, *pullback(dout)[:3]


assert attngrad.audit(candidate, options={"softsign": 0.8}, effort="quick").ok
assert not attngrad.audit(
    lambda q, k, v, dout, **o: candidate(q, k, v, dout, softsign=0.9), options={"softsign": 0.8}, effort="quick"
).ok
print("explained and audited")

for bad in (-1.0, 0.0, float("nan"), "x"):
    try:
        attngrad.attention(*case(()).qkv, softsign=bad)
    except (TypeError, ValueError) as error:
        assert "softsign must" in str(error), error
    else:
        raise AssertionError(bad)
print("checked")
"""


def test_a_modifier_touches_six_files():
    files = re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), re.M)
    assert len(files) == 6
    assert all(name.startswith(("src/attngrad/core/", "src/attngrad/reference/", "csrc/")) for name in files)


def test_the_patch_of_a_modifier_applies(tmp_path):
    copy = patched(tmp_path)
    assert "softsign" in (copy / "csrc" / "tile" / "modifiers.hpp").read_text()


@pytest.mark.full
def test_a_modifier_works_in_every_pass_and_bridge(tmp_path):
    copy, site = patched(tmp_path), tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    where = ["--target", str(site), "-C", f"build-dir={tmp_path / 'build'}", str(copy)]
    done = subprocess.run([*install, *where], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr[-3000:]
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)
    found = subprocess.run(  # noqa: S603
        [sys.executable, str(script), str(site), str(ROOT / "tests" / "support")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.split("\n") == ["kernels", "torch", "jax", "ring", "explained and audited", "checked", ""]


def patched(tmp_path: Path) -> Path:
    """A copy of the sources with the patch applied."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("no git on this machine")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(  # noqa: S603
        [git, "apply", "--whitespace=nowarn", str(PATCH)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return copy
