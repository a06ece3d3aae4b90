"""The fuzzers run, see what is planted, and what they found once stays mended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import attngrad
import fuzz_arguments
import fuzz_commands
import fuzz_files
import fuzz_state
from attngrad import layers
from cases import Shape, make
from fuzz_tools import command

FUZZER = Path(__file__).with_name("fuzz.py")


def test_random_arguments_are_computed_rightly_or_refused():
    words = {fuzz_arguments.judge(number) for number in range(300)}
    assert {"right", "refused", "contained"} <= words


def test_random_files_are_read_or_refused():
    words = {fuzz_files.judge(number) for number in range(120)}
    assert {"npz read", "npz refused", "safetensors read", "safetensors refused", "trace refused"} <= words


def test_random_command_lines_end_with_a_result_or_an_error_of_their_own():
    numbers = [n for n in range(150) if fuzz_commands.draw(n)[:1] != ["audit"] or "--formula" in fuzz_commands.draw(n)]
    words = {fuzz_commands.judge(n) for n in numbers}
    assert {"explain 0", "explain 2", "audit 2"} <= words
    assert "explain 1" not in words


class TestState(fuzz_state.Layers.TestCase):
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None)

    def tearDown(self) -> None:
        attngrad.set_num_threads(2)
        attngrad._native.set_isa(attngrad._native.isa_names()[0])


# --- what is planted is seen ------------------------------------------------------------------------------------------


def test_the_fuzzers_see_planted_faults(monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(attngrad, "attention", lambda *a, **o: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            [fuzz_arguments.judge(n) for n in range(60)]
    with monkeypatch.context() as m:
        right = attngrad.attention
        m.setattr(attngrad, "attention", lambda *a, **o: np.asarray(right(*a, **o)) * (1 + 1e-9))
        with pytest.raises(AssertionError, match="attention"):
            [fuzz_arguments.judge(n) for n in range(60)]
    with monkeypatch.context() as m:
        m.setattr(attngrad.MultiHeadAttention, "load", lambda path: {}["no"])
        with pytest.raises(KeyError):
            [fuzz_files.judge(n) for n in range(20)]
    with monkeypatch.context() as m:
        m.setattr(layers.checkpoint, "replace", lambda path, data: Path(path).write_bytes(data[:-8]))
        with pytest.raises((AssertionError, ValueError)):
            [fuzz_files.judge(n) for n in range(60)]


FAULTS = {
    "copies lose their gradients": ("__getstate__", lambda self: {**self.__dict__, "_saved": None, "grads": {}}),
    "zero_grad does nothing": ("zero_grad", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_random_programs_see_planted_faults(monkeypatch, fault):
    monkeypatch.setattr(attngrad.MultiHeadAttention, *FAULTS[fault])
    with pytest.raises((AssertionError, ValueError)):
        [fuzz_state.judge(number, shorten=False) for number in range(3)]


PLANTED = """
import os, signal, time
WHAT = "numbers"
def describe(number): return str(number)
def judge(number):
    if number == 5:
        {fault}
    return "right"
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise AssertionError('wrong')", "planted 5: a finding"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "planted 5: ended by SIGSEGV"),
        ("time.sleep(1e6)", "planted 5: no answer in 2 s"),
        ("time.sleep(1e6) if False else None", "numbers in"),
    ],
    ids=["wrong", "crash", "hang", "nothing"],
)
def test_the_driver_tells_what_was_found_and_how_to_see_it_again(tmp_path, fault, told):
    (tmp_path / "fuzz_planted.py").write_text(PLANTED.format(fault=fault))
    run = f"import runpy, sys; sys.argv = [{str(FUZZER)!r}, 'planted', '--minutes', '0.02']; "
    run += f"sys.path.insert(0, {str(FUZZER.parent)!r}); import fuzz; fuzz.HANG = 2.0; fuzz.main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    found = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True)  # noqa: S603
    assert told in found.stdout, found.stdout + found.stderr
    assert found.returncode == (0 if told == "numbers in" else 1)
    assert ("again: python tests/robustness/fuzz.py planted --only 5" in found.stdout) == (found.returncode == 1)


# --- what was found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["explain", "--shape", "2000,2000,2000"], "a trace must have at most 4,000,000 scores"),
        (["explain", "--shape", "1,999999999"], "q and k must have at most 64,000,000 numbers"),
        (["explain", "--segments", "nan,0,0,0"], "--segments must be integer ids"),
        (["explain", "--segments", "1e300,0,0,0"], "--segments must be integer ids"),
        (["audit", "x.py:f", "--time-limit", "nan"], "must be finite; got nan"),
        (["audit", "x.py:f", "--memory", "nan"], "must be finite; got nan"),
    ],
)
def test_hostile_options_get_an_error_of_one_line(words, rule):
    status, _, errors = command(*words)
    assert status == 2
    assert rule in errors


def npz(path: Path, header: bytes, **arrays: Any) -> str:
    """An archive whose q has this header."""
    import zipfile

    np.savez(path, **arrays)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("q.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    return str(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (3298534883328,)}\n",  # 24 TiB
        b"{'descr': '<f8', 'fortran_order': False, 'shape': ((((((((\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n",
        b"__import__('os').system('x')\n",
    ],
    ids=["huge", "open", "objects", "code"],
)
def test_hostile_archives_get_an_error_of_one_line(tmp_path, header):
    x = np.ones((2, 2))
    status, _, errors = command("explain", "--input", npz(tmp_path / "x.npz", header, k=x, v=x))
    assert status == 2
    assert errors.startswith("Error: explain: --input must be")
    assert errors.count("\n") == 1


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    x = np.ones((2, 2))
    np.savez(tmp_path / "x.npz", q=x, k=x, v=x, scale=np.ones(0))
    status, _, errors = command("explain", "--input", str(tmp_path / "x.npz"))
    assert (status, "scale must be one number" in errors) == (2, True)


def test_a_layer_whose_metadata_is_null_is_refused(tmp_path):
    layer = attngrad.MultiHeadAttention(2, 1)
    layer.save(tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    n = int.from_bytes(data[:8], "little")
    end = data.index(b"}", 8) + 1  # of the metadata, which come first
    header = b'{"__metadata__":null' + data[end : 8 + n]
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + n :])
    with pytest.raises(ValueError, match="the file must be"):
        attngrad.MultiHeadAttention.load(tmp_path / "x")


def test_gradients_beyond_float16_are_infinite_without_a_warning():
    layer = attngrad.MultiHeadAttention(2, 1, dtype=np.float16)
    layer.params["w_v"][...] = layer.params["w_o"][...] = 200.0
    y = layer(np.ones((1, 2), np.float16))
    assert np.isinf(layer.backward(np.full_like(y, 100.0))).any()


@pytest.mark.parametrize(("dtype", "cap"), [(np.float64, 1e-320), (np.float32, 1e-320), (np.float16, 1e-40)])
def test_a_softcap_whose_inverse_is_infinite_is_refused(dtype, cap):
    q = np.ones((2, 2), dtype)
    with pytest.raises(ValueError, match=r"attention: softcap must be from"):
        attngrad.attention(q, q, q, softcap=cap)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_weights_below_the_smallest_number_leave_no_tangent(dtype):
    """Each query sees one key alone, to every digit: the gradients do not move, not even by 2^-126 of anything."""
    c = make(("causal top-left",), Shape((), 1, 1, 2, 47, 17, 80), 3)
    c.q = c.q * 1e4
    x = c.cast(dtype)
    _, moved = attngrad.hvp(x.qkv, x.t[:3], x.dout, **x.options)
    assert np.abs(moved.v).max() == 0.0
