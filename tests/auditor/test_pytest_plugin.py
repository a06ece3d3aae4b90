"""The fixture ``attngrad_audit`` in the tests of others: a pytest of its own, in a process of its own."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from attngrad.auditor.report import AuditReport
from attngrad.testing import assert_attention_gradients, assert_right

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

TESTS = """
    import numpy as np
    import torch

    def attend(q, k, v, dout, row_term=True):
        z = q @ k.mT / np.sqrt(q.shape[-1])
        a = np.exp(z - z.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        da = dout @ v.mT
        ds = a * (da - row_term * (a * da).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return a @ v, ds @ k, ds.mT @ q, a.mT @ dout

    def forgets_the_row_term(q, k, v, dout):
        return attend(q, k, v, dout, row_term=False)

    def without_scale(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    def test_right(attngrad_audit):
        assert attngrad_audit(attend).ok

    def test_wrong(attngrad_audit):
        attngrad_audit(forgets_the_row_term, effort="quick")

    def test_torch(attngrad_audit):
        attngrad_audit(without_scale, framework="torch", effort="quick")

    def test_twice(attngrad_audit):
        attngrad_audit(attend)
        attngrad_audit(attend, dtype="float32")
"""


def run(pytester, *arguments):
    pytester.makepyfile(TESTS)
    return pytester.runpytest_subprocess("-p", "attngrad.pytest_plugin", "-p", "no:cacheprovider", *arguments)


def test_the_failure_message_is_the_report(pytester):
    result = run(pytester, "--attngrad-effort", "quick", "--attngrad-reports", "reports")
    result.assert_outcomes(passed=2, failed=2)
    text = result.stdout.str()
    assert "WRONG: dQ and dK are wrong" in text
    assert "row-term-missing" in text
    assert "scale-missing" in text
    assert "should be" in text
    assert "pytest_plugin.py" not in text  # the report alone, without the way to it
    written = sorted(path.name for path in Path(pytester.path, "reports").iterdir())
    assert len(written) == 10  # five audits, each as HTML and JSON
    reports = [AuditReport.from_json(p.read_text()) for p in Path(pytester.path, "reports").glob("*.json")]
    assert sorted(r.status for r in reports) == ["right", "right", "right", "wrong", "wrong"]
    assert {r.settings["effort"] for r in reports} == {"quick"}
    pages = [p.read_text() for p in Path(pytester.path, "reports").glob("*.html")]
    assert all(page.lower().startswith("<!doctype html") and "<script src" not in page for page in pages)


def test_the_options_are_told_and_checked(pytester):
    assert "--attngrad-effort" in run(pytester, "--help").stdout.str()
    assert run(pytester, "--attngrad-effort", "some").ret == pytest.ExitCode.USAGE_ERROR


def test_pytest_finds_the_plugin_by_its_entry_point():
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    ((name, module),) = entry.items()
    assert name == module  # else `-p` would register it a second time
    assert callable(import_module(module).pytest_addoption)


def test_one_function_has_both_names():
    assert assert_attention_gradients is assert_right
    with pytest.raises(ValueError, match="framework must be one of numpy, torch, jax"):
        assert_right(lambda q, k, v: q, framework="tensorflow")


def test_torch_and_jax_functions_are_audited_by_their_own_differentiation():
    jnp, torch = pytest.importorskip("jax.numpy"), pytest.importorskip("torch")

    def in_jax(q, k, v):
        s = jnp.einsum("...td,...sd->...ts", q, k) / q.shape[-1] ** 0.5
        a = jnp.exp(s - s.max(-1, keepdims=True))
        return a / a.sum(-1, keepdims=True) @ v

    def in_torch(q, k, v):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    assert assert_right(in_torch, framework="torch", effort="quick").ok
    assert assert_right(in_jax, framework="jax", effort="quick").ok
    with pytest.raises(AssertionError, match="scale-by-d"):
        assert_right(lambda q, k, v: in_torch(q / q.shape[-1] ** 0.5, k, v), framework="torch", effort="quick")


def test_the_json_of_the_command_is_for_machines(tmp_path):
    """Exit codes and keys as docs/audit_your_kernel.md says them."""
    import subprocess
    import sys

    (tmp_path / "kernel.py").write_text("def wrong(q, k, v): return v[..., :1, :] + 0 * q[..., :1]\n")
    said = (ROOT / "docs" / "audit_your_kernel.md").read_text()
    for target, code in (("kernel.py:wrong", 1), ("kernel.py:nothing", 2)):
        command = [sys.executable, "-m", "attngrad.cli", "audit", target, "--effort", "quick", "--json", "-"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
        assert done.returncode == code
        told = json.loads(done.stdout)
        for key in ("ok", "status", "mistakes", "first", "findings", "stages", "smallest", "settings"):
            assert key in told
            assert f"`{key}`" in said
