"""Every command that a page prints in a block of its own runs, in the order printed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from attngrad import cli
from tests.docs.test_docs import PAGES, ROOT

COMMAND = re.compile(r"^(?:make|pip|attngrad|python|\.) \S.*")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHERS = ("triton",)
"""Packages of others that a page installs."""
FILE = """
import numpy as np, attngrad

def candidate(q, k, v, dout, causal=False):
    out, pullback = attngrad.vjp(q, k, v, causal=causal)
    return out, *pullback(dout)[:3]

def fn(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

class SelfAttention:
    def __init__(self, d_model, num_heads):
        self.layer = attngrad.MultiHeadAttention(d_model, num_heads, dtype=np.float64)
        self.WQ, self.WK, self.WV, self.WO = self.layer.params.values()

    def forward(self, query, key, value):
        for stored, mine in zip(self.layer.params.values(), (self.WQ, self.WK, self.WV, self.WO)):
            stored[...] = mine
        return self.layer(query, key, value)

    def backward(self, dO, query, key, value, learning_rate):
        self.layer.zero_grad()
        found = self.layer.backward(dO)
        self.dWQ, self.dWK, self.dWV, self.dWO = self.layer.grads.values()
        return found
"""

KERNEL = """
import torch

def fn(q, k, v):
    assert q.shape[1] % 16 == 0 and q.shape[3] in (32, 64, 128)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2)
"""


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page's blocks, without comments and descriptions, as words."""
    text = page.read_text()
    fenced = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).splitlines()
    indented = re.findall(r"^    (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    lines = [re.split(r"  +(?=[#A-Za-z])", line)[0] for line in [*fenced, *indented] if COMMAND.match(line)]
    return [shlex.split(line, comments=True) for line in lines]


WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader stands: with a file of their own, and numbers of their own."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "file.py").write_text(FILE)
    (tmp_path / "kernel.py").write_text(KERNEL)
    rng, names = np.random.default_rng(0), ("q", "k", "v", "dout")
    np.savez(tmp_path / "mine.npz", **dict(zip(names, rng.standard_normal((4, 4, 3)), strict=True)))
    step = rng.standard_normal((4, 2, 16, 1, 32)).astype(np.float32)
    save_file(dict(zip(names, step, strict=True)), tmp_path / "step.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    return tmp_path


def run(words: list[str]) -> None:
    """Run a command as far as a test may: nothing is installed, and no device is assumed."""
    if words[0] == "attngrad":
        found = CliRunner().invoke(cli.main, ["cpu" if word == "cuda" else word for word in words[1:]])
        assert found.exit_code == 0, found.output
    elif words[0] == "make":
        subprocess.run([shutil.which("make"), "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)  # noqa: S603
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), words
        if "--help" in words:
            subprocess.run([sys.executable, ROOT / words[1], "--help"], check=True, capture_output=True)  # noqa: S603
    elif words[0] == ".":
        assert words[1] == ".venv/bin/activate"
    elif words[2] not in OTHERS:
        [extras] = re.fullmatch(r"\.(?:\[(.*)\])?", words[2]).groups() if words[1] == "install" else [None]
        assert set((extras or "").split(",")) <= {"", *EXTRAS}, words


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_on_a_page_run(page, folder):
    for words in commands(page):
        run(words)


def test_wrong_commands_are_seen(folder):
    assert {"README", "start", "index", "explain", "audit", "devices"} <= {page.stem for page in WITH_COMMANDS}
    for line in ("attngrad explain --nonsense", "attngrad audit path/to/file.py:absent", "make nonsense",
                 "pip install .[nonsense]", "python examples/absent.py", ". env/bin/activate"):  # fmt: skip
        with pytest.raises((AssertionError, subprocess.CalledProcessError)):
            run(shlex.split(line))
