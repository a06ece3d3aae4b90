"""Bad files and bad arguments of the command; and writes that fail, which leave the old file whole."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attngrad
from attngrad import MultiHeadAttention, cli
from attngrad.core import files
from bad_inputs.checks import rows
from bad_inputs.files import whole
from bad_inputs.row import Row, judge
from tests.docs.test_cli import python_m


@rows("layer files")
def test_layer_files_are_loaded_or_named(row: Row, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    row.do(path)
    loaded = judge(row, lambda: MultiHeadAttention.load(path))
    if row.error is None:
        loaded.save(path)
        assert path.read_bytes() == whole()


@rows("npz files")
def test_npz_files_are_explained_or_one_line_says_why_not(row: Row, tmp_path: Path):
    path = tmp_path / "x.npz"
    row.do(path)
    told("explain", "--input", str(path), row=row, folder=tmp_path)


@rows("command")
def test_bad_arguments_of_the_command_are_told(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    told(*row.do(), row=row, folder=tmp_path)


def told(*arguments: str, row: Row, folder: Path) -> None:
    """The command's exit status and what it says; and that no file was made."""
    before = sorted(os.listdir(folder))
    found = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, arguments)
    assert found.exception is None or isinstance(found.exception, SystemExit), repr(found.exception)
    assert sorted(os.listdir(folder)) == before
    assert "Traceback" not in found.output
    if row.error is None:
        assert found.exit_code == 0, found.output
        return
    assert found.exit_code == 2, found.output
    assert found.stdout == ""
    assert re.search(row.words, found.stderr), found.stderr
    if row.error is ValueError:
        assert found.stderr.startswith("Error: ")
        assert found.stderr.count("\n") == 1


def test_a_process_of_its_own_ends_with_the_status_and_no_traceback(tmp_path: Path):
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 and no more")
    for arguments in (
        ("explain", "--input", str(tmp_path / "bad.npz")),
        ("explain", "--shape", "9" * 5000 + ",3"),
    ):
        found = python_m(*arguments)
        assert found.returncode == 2
        assert found.stdout == ""
        assert "Traceback" not in found.stderr


FAULTS = ("open", "write", "fsync", "replace")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("writer", ["layer", "trace"])
def test_a_write_that_fails_leaves_the_old_file_whole(writer: str, fault: str, tmp_path: Path, monkeypatch: Any):
    x = np.eye(2)
    path = tmp_path / ("x.safetensors" if writer == "layer" else "x.json")
    save = {
        "layer": lambda n: MultiHeadAttention(8, 2, rng=n).save(path),
        "trace": lambda n: attngrad.trace(n * x, x, x).save(path),
    }[writer]
    save(1)
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    class Full:
        """A file on a disk that is full after the first half."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            fail()

    with monkeypatch.context() as patch:
        if fault == "write":
            real = Path.open
            patch.setattr(files.Path, "open", lambda self, mode: Full(real(self, mode)))
        else:
            patch.setattr(
                *{"open": (files.Path, "open"), "fsync": (os, "fsync"), "replace": (os, "replace")}[fault], fail
            )
        with pytest.raises(OSError, match="No space left"):
            save(2)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    save(2)
    assert path.read_bytes() != before
