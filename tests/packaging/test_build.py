"""What is compiled and installed: no more than belongs there, and a person is told what goes on meanwhile."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attngrad import _native

SHIPPED = {"amx", "avx512", "avx2", "baseline"}
ROOT = Path(__file__).parents[2]


def attngrad_info(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attngrad.cli", "info"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)  # noqa: S603


def test_only_instruction_sets_that_ship_are_named():
    (row,) = re.findall(r"^kernels .*\(of (.*)\)$", attngrad_info().stdout, re.M)
    names = set(row.split(", "))
    assert "baseline" in names
    assert names <= SHIPPED
    (row,) = re.findall(r"must be one of (.*) on this machine", attngrad_info(ATTNGRAD_ISA="avx2-512").stderr)
    assert set(row.split(", ")) == names


def test_the_shared_object_exports_nothing_of_ours():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm on this machine")
    command = [nm, "-D", "--defined-only", _native.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert "PyInit__native" in names
    assert [name for name in names if "attngrad" in name] == []
    assert len(names) < 20


# --- tools/install.py -------------------------------------------------------------------------------------------------


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("  [4/24] Building CXX object CMakeFiles/avx2.dir/csrc/targets/float32.cpp.o", "  4 of 24  avx2: float32"),
        ("  [24/24] Linking CXX shared module _native.cpython-311-x86_64-linux-gnu.so", "  24 of 24  _native: linked"),
        ("Collecting numpy>=2.0 (from attngrad==0.1)", "  package numpy>=2.0"),
        ("Installing collected packages: a, b", "  installing a, b"),
        ("Requirement already satisfied: numpy>=2.0", None),
        ("  -- Configuring done (2.1s)", None),
    ],
)
def test_units_and_packages_are_shown_as_they_come(install, line, told):
    assert install.shown(line) == told


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_fails_is_shown_in_full(install, capfd):
    assert install.run(python("print('an error of the compiler'); raise SystemExit(3)")) == 3
    assert "an error of the compiler" in capfd.readouterr().out


def test_what_succeeds_shows_its_units_alone(install, capfd):
    assert install.run(python("print('noise'); print('[1/2] Linking CXX static library libx.a')")) == 0
    assert capfd.readouterr().out == "  1 of 2  libx: linked\n"


def test_a_long_silence_is_broken(install, capfd, monkeypatch):
    monkeypatch.setattr(install, "SILENCE", 0.2)
    assert install.run(python("import time; time.sleep(1)")) == 0
    assert re.search(r"^  \.\.\. \d+ s$", capfd.readouterr().out, re.M)


def test_a_command_that_prints_no_text_is_no_trouble(install):
    assert install.run(python(r"import sys; sys.stdout.buffer.write(b'\xff\xfe\n')")) == 0
