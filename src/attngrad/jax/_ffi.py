"""How compiled programs reach the passes: one XLA custom call, whose handler is written in Python.

JAX's own callbacks copy every operand, and round results by the precision that happens to be set in the thread that
XLA runs them on. The foreign function interface hands over the buffers themselves. Its C structures
(xla/ffi/api/c_api.h) are read here as rows of 64-bit words. What to run is a string of literals within the program, so
that a program from a compilation cache runs as well.
"""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxlib.version import __version__ as jaxlib_version

from attngrad.core.checks import fail
from attngrad.core.options import Options
from attngrad.jax import _passes
from attngrad.jax._passes import Call

TARGET = "attngrad"

# The versions whose headers have the places below: 0.1 to 0.3. By c_api.h a minor version adds to structures, a major
# one may rearrange them, and XLA supports old versions for a year: it takes handlers from a minimum, now 0.1, to its
# own version (IsSupportedApiVersion in xla/ffi/ffi_registry.cc); up to jaxlib 0.8.0 of its own version alone, 0.1.
_MAJOR, _OLDEST, _NEWEST = 0, 1, 3

# Places in the structures, in words.
_EXTENSION, _API, _STAGE, _ARGS, _RETS, _ATTRS = 1, 2, 4, 9, 14, 20  # XLA_FFI_CallFrame
_BUFFER_DATA = 3  # XLA_FFI_Buffer
_METADATA, _METADATA_VERSION = 3, 3  # XLA_FFI_Metadata_Extension; XLA_FFI_Metadata
_API_ERROR_CREATE = 6  # XLA_FFI_Api
_EXECUTE, _INTERNAL = 3, 13  # XLA_FFI_ExecutionStage, XLA_FFI_Error_Code
_IS_METADATA = 1  # XLA_FFI_Extension_Type


def handler_version() -> tuple[int, int]:
    """The version that XLA is told: the newest that both this file and the installed jaxlib know."""
    # From jaxlib's header, before XLA asks: its own refusal comes as it starts, and leaves JAX without a CPU.
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text() if header.is_file() else ""
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    major, minor = int(found.get("MAJOR", _MAJOR)), int(found.get("MINOR", _OLDEST))
    if major != _MAJOR or minor < _OLDEST:
        known = f"{_MAJOR}.{_OLDEST} to {_MAJOR}.{_NEWEST}"
        rule = f"have XLA's foreign function interface {known}, which attngrad was written for, or a later {_MAJOR}.x"
        got = f"{major}.{minor}, in jaxlib {jaxlib_version}"
        fail(ImportError, "attngrad.jax", "jaxlib", rule, got, "Install jax 0.6 to 0.10, or a newer attngrad.")
    return _MAJOR, min(minor, _NEWEST)


def _word(address: int, index: int) -> int:
    return ctypes.c_int64.from_address(address + 8 * index).value


class Slot(NamedTuple):
    """An operand or a result: what the buffer holds."""

    shape: tuple[int, ...]
    dtype: Any
    size: int

    def view(self, address: int) -> Any:
        """The buffer at ``address`` as an array."""
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        memory: Any = (ctypes.c_char * self.size).from_address(address)
        return np.ndarray(self.shape, self.dtype, memory)


class Plan(NamedTuple):
    """One custom call: the pass, and its operands and results."""

    run: Callable[..., Any]
    operands: list[Slot]
    results: list[Slot]


def encode(name: str, params: dict[str, Any], avals_in: Any, avals_out: Any) -> str:
    """A plan as literals."""
    call: Call = params["call"]
    rest = {key: value for key, value in params.items() if key != "call"}
    slots = [[(tuple(a.shape), str(a.dtype)) for a in avals] for avals in (avals_in, avals_out)]
    return repr((name, asdict(call.options), call.names, call.numbers, rest, *slots))


@lru_cache(maxsize=4096)
def _decode(text: bytes) -> Plan:
    name, options, names, numbers, rest, *slots = ast.literal_eval(text.decode())
    call = Call(Options(**options), names, numbers)
    run: Callable[..., Any] = getattr(_passes, name)

    def slot(shape: tuple[int, ...], dtype: str) -> Slot:
        kind = np.dtype(jax.numpy.dtype(dtype))
        return Slot(shape, kind, int(np.prod(shape)) * kind.itemsize)

    operands, results = ([slot(*s) for s in part] for part in slots)
    return Plan(partial(run, call=call, **rest), operands, results)


def _execute(frame: int) -> None:
    span = _word(_word(frame, _ATTRS), 0)  # the one attribute
    plan = _decode(ctypes.string_at(_word(span, 0), _word(span, 1)))
    arrays, results = (
        [s.view(_word(_word(_word(frame, place), i), _BUFFER_DATA)) for i, s in enumerate(slots)]
        for place, slots in ((_ARGS, plan.operands), (_RETS, plan.results))
    )
    plan.run(*arrays, into=results)


def _handle(frame: int) -> int:
    """XLA_FFI_Handler: null, or an error that XLA then owns."""
    try:
        extension = _word(frame, _EXTENSION)
        if extension and ctypes.c_int.from_address(extension + 8).value == _IS_METADATA:
            # XLA asks for the version, perhaps with nothing else in the frame: up to jaxlib 0.8.0 the API is null.
            version = _word(extension, _METADATA) + 8 * _METADATA_VERSION
            (ctypes.c_int * 2).from_address(version)[:] = list(_VERSION)
        elif ctypes.c_int.from_address(frame + 8 * _STAGE).value == _EXECUTE:
            _execute(frame)
    except BaseException as error:  # nothing may pass through the C frames above, not even Ctrl-C
        message = ctypes.create_string_buffer(f"{type(error).__name__}: {error}".encode())
        arguments = (ctypes.c_int64 * 4)(28, 0, ctypes.addressof(message), _INTERNAL)
        create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_word(_word(frame, _API), _API_ERROR_CREATE))
        return int(create(ctypes.addressof(arguments)))
    return 0


_VERSION = handler_version()
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle)
_CAPSULE: Any = jax.ffi.pycapsule(_HANDLER)  # type: ignore[no-untyped-call]
jax.ffi.register_ffi_target(TARGET, _CAPSULE, platform="cpu")


def lowering(name: str) -> Callable[..., Any]:
    """The lowering rule of the primitive that ``_passes.name`` computes."""
    rule = jax.ffi.ffi_lowering(TARGET)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        return rule(ctx, *operands, plan=encode(name, params, ctx.avals_in, ctx.avals_out))

    return lower
