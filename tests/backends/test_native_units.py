"""The parts of the kernels without Python: native/units.cpp, for each instruction set, and with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import instruction_sets
from tiers import first

ROOT = Path(__file__).parents[2]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
FLAGS = {"avx2": (32, AVX2), "avx512": (64, AVX512), "baseline": (16, [])}
"""Bytes of a vector and flags, as CMakeLists.txt has them."""
SETS = [name for name in FLAGS if name in instruction_sets.SHIPPED]


def run_units(tmp_path: Path, isa: str, *options: str, source: str = "") -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    size, flags = FLAGS[isa]
    file = Path(__file__).parent / "native" / "units.cpp"
    if source:
        file = tmp_path / "units.cpp"
        file.write_text(source)
    program = tmp_path / "units"
    defined = [f"-DATTNGRAD_ISA={isa}", f"-DATTNGRAD_VECTOR_BYTES={size}", f"-I{ROOT / 'csrc'}"]
    command = [compiler, "-std=c++20", "-ffp-contract=fast", "-Wno-psabi", *options, *flags, *defined]
    subprocess.run([*command, str(file), "-o", str(program)], check=True)  # noqa: S603
    return subprocess.run([str(program)], capture_output=True, text=True, check=False)  # noqa: S603


@pytest.mark.parametrize("isa", first(1, SETS))
def test_functions_conversions_and_products_are_as_exact_as_they_should_be(tmp_path, isa):
    found = run_units(tmp_path, isa, "-O2")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("\n") >= 45  # so many things were looked at
    assert "BROKEN" not in found.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("isa", SETS[:1])
def test_they_are_clean_under_sanitizers(tmp_path, isa):
    found = run_units(tmp_path, isa, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return exp2<T>(x); }", "return exp2<T>(x) * static_cast<T>(1.000001); }"),
        ("next.slope * slope, next.bend * slope", "next.slope * slope, next.bend"),
        ("back.bits == x.bits", "back.bits + 1 == x.bits"),
        ("if constexpr (std::is_same_v<To, ToC>) to += sum;", "if constexpr (std::is_same_v<To, ToC>) to = sum;"),
    ],
)
def test_a_wrong_result_is_told(tmp_path, right, wrong):
    source = (Path(__file__).parent / "native" / "units.cpp").read_text()
    assert source.count(right) == 1
    found = run_units(tmp_path, SETS[0], "-O1", source=source.replace(right, wrong))
    assert found.returncode == 1
    assert "BROKEN" in found.stdout
