"""The command attngrad audit: exit status, limits, and what it prints."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngrad.cli import main

CODE = """
import numpy as np

def right(q, k, v, dout, causal=False):
    import attngrad
    out, pullback = attngrad.vjp(q, k, v, causal=causal)
    return (out, *pullback(dout)[:3])

def biased(q, k, v, dout, bias=None):
    return right(q, k, v, dout) if bias is None else 1 / 0

def plain(q, k, v, dout):
    return right(q, k, v, dout)

def wrong(q, k, v, dout):
    out, dq, dk, dv = right(q, k, v, dout)
    return out, dk, dq, dv

def crash(q, k, v, dout):
    return np.softmax(q)

def loops(q, k, v, dout):
    while True:
        pass

def dies(q, k, v, dout):
    import os
    os._exit(7)

def faults(q, k, v, dout):
    import ctypes
    ctypes.string_at(0)

def closes(q, k, v, dout):
    import os
    os.closerange(3, 256)
    return right(q, k, v, dout)

def breaks_numpy(q, k, v, dout):
    results = right(q, k, v, dout)
    np.exp = None
    return results

def threads(q, k, v, dout):
    import threading, time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return right(q, k, v, dout)

def eats(q, k, v, dout):
    return np.ones(1 << 36)

def hoards(q, k, v, dout):
    hoard = []
    while True:
        hoard.append(np.empty(1 << 22))

def holds(q, k, v, dout):
    import itertools
    return sum(itertools.repeat(0))  # never gives the lock of the interpreter back

def scribbles(q, k, v, dout):
    import os
    for descriptor in range(1, 16):
        try:
            os.write(descriptor, b"\\xff\\xfe{}\\n[1]\\n")
        except OSError:
            pass
    return right(q, k, v, dout)

def babbles(q, k, v, dout):
    import os, sys
    os.write(int(sys.argv[1]), b"no JSON\\n")
    return np.softmax(q)

def forks(q, k, v, dout):
    import os, pathlib, subprocess, time
    other = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {other.pid}")
    while True:
        time.sleep(0.01)

class Layer:
    def __init__(self, d_model, num_heads):
        raise RuntimeError("not today")
    def forward(self, query, key, value): ...
    def backward(self, dO, query, key, value, learning_rate): ...
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("candidates") / "mine.py"
    path.write_text(CODE)
    return path


def audit(file, name, *arguments):
    return CliRunner().invoke(main, ["audit", f"{file}:{name}", "--effort", "quick", *arguments])


def test_a_right_candidate_exits_0(file):
    result = audit(file, "right", "--option", "causal=true", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "RIGHT" in result.output


def test_the_verdict_says_how_to_ask_for_an_option_that_was_not_tried(file):
    result = audit(file, "biased")
    assert result.exit_code == 0, result.output
    assert "bias was not tried: --option bias=true." in " ".join(result.output.split())


def test_an_option_that_it_does_not_take_is_wrong_usage(file):
    result = audit(file, "plain", "--option", "causal=true")
    assert result.exit_code == 2, result.output
    told = " ".join(result.output.split())
    assert told.startswith("NOT AUDITED: audit: candidate must take causal; it takes (q, k, v, dout)")
    assert "WRONG" not in told


def test_a_wrong_candidate_exits_1_and_writes_both_files(file, tmp_path):
    html, js = tmp_path / "out.html", tmp_path / "out.json"
    result = audit(file, "wrong", "--html", str(html), "--json", str(js))
    assert result.exit_code == 1, result.output
    assert "dq-dk-exchanged" in result.output
    assert json.loads(js.read_text())["mistakes"] == ["dq-dk-exchanged"]
    assert "dq-dk-exchanged" in html.read_text()


@pytest.mark.parametrize(
    ("name", "words", "arguments"),
    [
        ("crash", "module 'numpy' has no attribute 'softmax'", ()),
        ("loops", "did not return within 0.3 s", ("--time-limit", "0.3")),
        ("dies", "ended by itself (exit status 7)", ()),
        ("faults", "ended by SIGSEGV", ()),
        ("closes", "closed the descriptors of its process", ()),
        ("breaks_numpy", "the auditor failed: TypeError: 'NoneType' object is not callable", ()),
        ("eats", "MemoryError", ("--memory", "1")),
        (
            "hoards",
            "It wanted more than the 0.5 GB of memory that it may take",
            ("--memory", "0.5", "--time-limit", "60"),
        ),
        ("babbles", "it wrote into the channel that its report comes through", ()),
        ("scribbles", "it wrote into the channel that its report comes through", ()),
        ("absent", "has no 'absent'", ()),
        ("Layer", "not today", ()),
    ],
)
def test_what_cannot_be_audited_exits_2_without_our_traceback(file, name, words, arguments):
    result = audit(file, name, *arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "auditor/" not in result.output


def test_threads_left_behind_do_no_harm(file):
    result = audit(file, "threads")
    assert result.exit_code == 0, result.output
    assert "RIGHT" in result.output


def test_a_module_that_eats_memory_when_it_is_imported_is_limited_too(tmp_path):
    path = tmp_path / "greedy.py"
    path.write_text("hoard = []\nwhile True:\n    hoard.append(bytes(1 << 25))\n")
    result = audit(path, "f", "--memory", "0.5")
    assert result.exit_code == 2, result.output
    assert "cannot be imported: MemoryError" in " ".join(result.output.split())


def test_a_candidate_that_gives_no_sign_is_ended(file, monkeypatch):
    monkeypatch.setattr("attngrad.auditor.process.patience", lambda time_limit, effort: 6.0)
    result = audit(file, "holds", "--time-limit", "0.1")
    assert result.exit_code == 2, result.output
    assert "it was ended after 6 s without a sign" in " ".join(result.output.split())


def alive(pid):
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_that_a_candidate_starts_stays_behind(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = audit(file, "forks", "--time-limit", "0.5")
    assert result.exit_code == 2, result.output
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_candidate_ends_with_the_command_even_where_that_is_killed(file, tmp_path):
    command = [sys.executable, "-m", "attngrad", "audit", f"{file}:forks", "--time-limit", "1000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    pids = wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split())
    process.kill()
    process.wait()
    child, grandchild = pids
    try:
        assert wait_for(lambda: not alive(child))
    finally:
        os.kill(int(grandchild), signal.SIGKILL)  # nobody is left to end it: SECURITY.md says so


def test_a_bad_path_and_a_bad_option_are_told(file, tmp_path):
    result = CliRunner().invoke(main, ["audit", str(tmp_path / "none.py:f")])
    assert result.exit_code == 2
    assert "there is no file" in " ".join(result.output.split())
    assert audit(file, "right", "--option", "causal").exit_code == 2
    assert "options must have only the names" in " ".join(
        audit(file, "right", "--option", "is_causal=true").output.split()
    )
    assert CliRunner().invoke(main, ["audit"]).exit_code == 2


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_folder_that_is_not_there_is_told_before_the_candidate_runs(file, tmp_path, monkeypatch, option):
    monkeypatch.setattr("attngrad.auditor.process.run_in_child", None)
    result = audit(file, "right", option, str(tmp_path / "none" / "report"))
    assert result.exit_code == 2
    assert f"audit: {option} must be in a folder that exists" in result.output


def test_a_file_that_cannot_be_written_after_all_is_told(file, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("attngrad.core.files.replace", full)
    result = audit(file, "right", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 2
    assert "report.json: No space left on device." in result.output


def test_the_nearest_name_is_told(file):
    assert "Did you mean 'right'?" in audit(file, "rihgt").output


def test_a_file_that_cannot_be_imported_is_told_with_its_own_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import numpy as np\nnp.nothing_here\n")
    result = audit(path, "f")
    assert result.exit_code == 2
    assert "nothing_here" in result.output
    assert "child.py" not in result.output


def test_json_to_standard_output_is_json_alone(file):
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "attngrad", "audit", f"{file}:right", "--effort", "quick", "--json", "-"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("dS = A * (dA - rowsum(A * dA))", 0, "holds"),
        ("dS = dA*A - A @ dA.T @ A", 1, "correct"),
        (r"\frac{\partial L}{\partial K} = \frac{1}{\sqrt{d_k}} Q^T \frac{\partial L}{\partial S}", 1, "wrong shape"),
        ("dS = __import__('os')", 2, "^"),
    ],
)
def test_a_formula_is_judged_on_the_command_line(text, code, words):
    result = CliRunner().invoke(main, ["audit", "--formula", text])
    assert result.exit_code == code, result.output
    assert words in result.output


def test_a_formula_goes_with_json_alone(file):
    told = CliRunner().invoke(main, ["audit", "--formula", "dV = A.T @ dO", "--json", "-"])
    assert json.loads(told.output)["ok"] is True
    for extra in ([f"{file}:right"], ["--effort", "quick"], ["--json", "out.json"]):
        result = CliRunner().invoke(main, ["audit", "--formula", "dV = A.T @ dO", *extra])
        assert result.exit_code == 2
        assert "audit:" in result.output
