"""Flags of the command that say what a candidate takes: layout, sizes, inputs, device, root; pairs and packages."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from attngrad.cli import main

KERNEL = """
import numpy as np, torch, attngrad

def _t(x):
    return x.swapaxes(1, 2)

def tiled(q, k, v, dout):
    assert q.shape[1] % 16 == 0 and k.shape[1] % 16 == 0, "tiles of 16"
    assert q.shape[3] in (32, 64), "no such width"
    out, pullback = attngrad.vjp(_t(q), _t(k), _t(v))
    return tuple(map(_t, (out, *pullback(_t(dout))[:3])))

def loud(q, k, v, dout):
    out, pullback = attngrad.vjp(q, k, v)
    dq, dk, dv = pullback(dout)[:3]
    return out, dq, dk, dv * np.where(np.abs(v).max(-1, keepdims=True) > 60.0, 1.5, 1.0).astype(v.dtype)

def moved(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

def forward(q, k, v):
    z = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    a = np.exp(z - z.max(-1, keepdims=True))
    a = a / a.sum(-1, keepdims=True)
    return a @ v, (q, k, v, a)

def backward(dout, cache):
    q, k, v, a = cache
    da = dout @ v.swapaxes(-1, -2)
    ds = a * da / q.shape[-1] ** 0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ dout
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text(KERNEL)
    inner = tmp_path / "src" / "package" / "inner"
    inner.mkdir(parents=True)
    for place in (inner, inner.parent):
        (place / "__init__.py").touch()
    (inner.parent / "scales.py").write_text("def scale(q):\n    return q.shape[-1] ** -0.5\n")
    code = "from ..scales import scale\nimport attngrad\n\ndef attend(q, k, v, dout):\n"
    code += "    out, pullback = attngrad.vjp(q, k, v, scale=scale(q))\n    return (out, *pullback(dout)[:3])\n"
    (inner / "attention.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*arguments):
    """The exit status, and the report, or what was printed in its place."""
    result = CliRunner().invoke(main, ["audit", *arguments, "--effort", "quick", "--json", "-"])
    try:
        return result.exit_code, json.loads(result.stdout)
    except ValueError:
        return result.exit_code, {"printed": result.output}


def test_layout_and_sizes_are_what_the_candidate_is_called_with(folder):
    sizes = ("--sizes", "tokens=multiple of 16", "--sizes", "features=32,64")
    status, found = report("kernel.py:tiled", "--layout", "BTHD", *sizes)
    assert status == 0, found
    assert any("up to 320 tokens and 64 features" in text for text in found["tried"])
    assert report("kernel.py:tiled", *sizes)[0] == 0  # the layout is found out
    status, found = report("kernel.py:tiled", "--layout", "BTHD")
    assert (status, found["status"]) == (2, "not audited")
    assert "tiles of 16" in found["findings"][0]["text"]
    status, found = report("kernel.py:tiled", "--sizes", "words=3")
    assert status == 2
    assert "sizes must have only the names tokens" in str(found)


def test_recorded_inputs_are_read_and_told_by_a_slice(folder):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 24, 8)).astype(np.float32)
    v[0, 1, 7] *= 100.0
    save_file({"q": q, "k": k, "v": v, "dout": dout}, folder / "step.safetensors")
    assert report("kernel.py:loud")[0] == 0
    status, found = report("kernel.py:loud", "--inputs", "step.safetensors")
    assert (status, found["first"], found["settings"]["dtype"]) == (1, "dv", "float32")
    assert 'v = inputs["v"][0:1, 1:2, 7:8, :]' in found["smallest"]
    (folder / "other.safetensors").write_bytes(b"no tensors")
    status, found = report("kernel.py:loud", "--inputs", "other.safetensors")
    assert status == 2
    assert "be a safetensors file, and complete" in str(found)


def test_tensors_are_on_the_device_that_is_named(folder):
    assert report("kernel.py:moved", "--device", "cpu")[0] == 0
    status, found = report("kernel.py:moved", "--device", "meta")
    assert status == 2
    assert "device must be a device of PyTorch that computes here" in str(found)
    assert "be left out for a candidate that is not of PyTorch" in str(report("kernel.py:loud", "--device", "cpu")[1])


def test_a_pair_and_files_of_a_package_are_found(folder):
    assert report("kernel.py:forward,backward")[1]["mistakes"] == ["row-term-missing"]
    assert report("src/package/inner/attention.py:attend")[0] == 0  # its relative imports
    assert report("package.inner.attention:attend", "--root", "src")[0] == 0
    status, found = report("package.inner.attention:attend")
    assert status == 2
    assert "there is no file and no module" in str(found)
