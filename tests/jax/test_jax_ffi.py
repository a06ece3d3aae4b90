"""The version of XLA's foreign function interface, and the places in its structures that the handler reads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attngrad.jax import _ffi


def pretend(directory: Path, version: tuple[int, int]) -> str:
    """Where the header of a jaxlib of this version of the interface lies."""
    header = directory / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n".format(*version))
    return str(directory)


@pytest.mark.parametrize("version", [(0, 0), (1, 0), (1, 3)])
def test_another_version_of_the_interface_is_an_error_that_names_both(monkeypatch, tmp_path, version):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: pretend(tmp_path, version))
    with pytest.raises(ImportError) as error:
        _ffi.handler_version()
    assert str(error.value) == (
        "attngrad.jax: jaxlib must have XLA's foreign function interface 0.1 to 0.3, which attngrad was written for, "
        f"or a later 0.x; got {version[0]}.{version[1]}, in jaxlib {_ffi.jaxlib_version}. "
        "Install jax 0.6 to 0.10, or a newer attngrad."
    )


@pytest.mark.parametrize(("installed", "told"), [(1, 1), (2, 2), (3, 3), (4, 3), (20, 3)])
def test_xla_is_told_a_version_that_it_has_and_that_the_places_are_of(monkeypatch, tmp_path, installed, told):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: pretend(tmp_path, (0, installed)))
    assert _ffi.handler_version() == (0, told)


def test_without_a_header_xla_is_told_the_oldest_version(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert _ffi.handler_version() == (0, 1)


def test_another_version_of_the_interface_leaves_jax_as_it_was(tmp_path):
    code = f"""
import jax
jax.ffi.include_dir = lambda: {pretend(tmp_path, (1, 0))!r}
try:
    import attngrad.jax
except ImportError as error:
    print(error)
print(jax.numpy.ones(3).sum())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert "got 1.0, in jaxlib" in result.stdout
    assert result.stdout.endswith("3.0\n")


def test_the_handler_answers_from_a_frame_that_holds_the_question_alone():
    metadata = (ctypes.c_int64 * 6)(36)
    extension = (ctypes.c_int64 * 4)(32, _ffi._IS_METADATA, 0, ctypes.addressof(metadata))
    frame = (ctypes.c_int64 * 22)(168, ctypes.addressof(extension))
    assert _ffi._handle(ctypes.addressof(frame)) == 0
    assert tuple((ctypes.c_int * 2).from_buffer(metadata, 8 * _ffi._METADATA_VERSION)) == _ffi.handler_version()


PLACES = {
    "XLA_FFI_CallFrame, extension_start": _ffi._EXTENSION,
    "XLA_FFI_CallFrame, api": _ffi._API,
    "XLA_FFI_CallFrame, stage": _ffi._STAGE,
    "XLA_FFI_CallFrame, args.args": _ffi._ARGS,
    "XLA_FFI_CallFrame, rets.rets": _ffi._RETS,
    "XLA_FFI_CallFrame, attrs.attrs": _ffi._ATTRS,
    "XLA_FFI_Buffer, data": _ffi._BUFFER_DATA,
    "XLA_FFI_Metadata_Extension, metadata": _ffi._METADATA,
    "XLA_FFI_Metadata, api_version.major_version": _ffi._METADATA_VERSION,
    "XLA_FFI_Api, XLA_FFI_Error_Create": _ffi._API_ERROR_CREATE,
}
NUMBERS = {
    "XLA_FFI_ExecutionStage_EXECUTE": _ffi._EXECUTE,
    "XLA_FFI_Error_Code_INTERNAL": _ffi._INTERNAL,
    "XLA_FFI_Extension_Metadata": _ffi._IS_METADATA,
}


def test_the_places_are_those_of_the_installed_header(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a compiler")
    claims = [f"offsetof({place}) == 8 * {word}" for place, word in PLACES.items()]
    claims += [f"{name} == {value}" for name, value in NUMBERS.items()]
    source = tmp_path / "places.cpp"
    lines = ['#include "xla/ffi/api/c_api.h"', *(f'static_assert({claim}, "");' for claim in claims)]
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c++17", "-fsyntax-only", "-I", jax.ffi.include_dir(), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert result.returncode == 0, result.stderr
