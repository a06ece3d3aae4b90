"""How compiled programs reach the passes: one XLA custom call, whose handler is written in Python.

JAX's own callbacks copy every operand, and round results by the precision that happens to be set in the thread that
XLA runs them on. The foreign function interface hands over the buffers themselves. Its C structures
(xla/ffi/api/c_api.h, version 0) are read here as rows of 64-bit words. What to run is a string of literals within the
program, so that a program from a compilation cache runs as well.
"""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from attngrad._options import Options
from attngrad.jax import _passes
from attngrad.jax._passes import Call

TARGET = "attngrad"

# Places in the structures, in words.
_EXTENSION, _API, _STAGE, _ARGS, _RETS, _ATTRS = 1, 2, 4, 9, 14, 20  # XLA_FFI_CallFrame
_BUFFER_DATA = 3  # XLA_FFI_Buffer
_METADATA, _METADATA_VERSION = 3, 3  # XLA_FFI_Metadata_Extension; XLA_FFI_Metadata
_API_VERSION, _API_ERROR_CREATE = 4, 6  # XLA_FFI_Api
_EXECUTE, _INTERNAL = 3, 13  # XLA_FFI_ExecutionStage, XLA_FFI_Error_Code
_IS_METADATA = 1  # XLA_FFI_Extension_Type


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
    o = call.options
    options = (o.scale, o.causal, o.window, o.softcap, o.dropout, o.seed)
    rest = {key: value for key, value in params.items() if key != "call"}
    slots = [[(tuple(a.shape), str(a.dtype)) for a in avals] for avals in (avals_in, avals_out)]
    return repr((name, options, call.names, call.offset, rest, *slots))


@lru_cache(maxsize=4096)
def _decode(text: bytes) -> Plan:
    name, options, names, offset, rest, *slots = ast.literal_eval(text.decode())
    call = Call(Options(*options), names, offset)
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
            # XLA asks which version of the interface this was written for: 0, and its own minor one.
            minor = ctypes.c_int.from_address(_word(frame, _API) + 8 * _API_VERSION + 4).value
            version = _word(extension, _METADATA) + 8 * _METADATA_VERSION
            ctypes.c_int.from_address(version).value = 0
            ctypes.c_int.from_address(version + 4).value = minor
        elif ctypes.c_int.from_address(frame + 8 * _STAGE).value == _EXECUTE:
            _execute(frame)
    except BaseException as error:  # nothing may pass through the C frames above, not even Ctrl-C
        message = ctypes.create_string_buffer(f"{type(error).__name__}: {error}".encode())
        arguments = (ctypes.c_int64 * 4)(28, 0, ctypes.addressof(message), _INTERNAL)
        create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_word(_word(frame, _API), _API_ERROR_CREATE))
        return int(create(ctypes.addressof(arguments)))
    return 0


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle)
_CAPSULE: Any = jax.ffi.pycapsule(_HANDLER)  # type: ignore[no-untyped-call]
jax.ffi.register_ffi_target(TARGET, _CAPSULE, platform="cpu")


def lowering(name: str) -> Callable[..., Any]:
    """The lowering rule of the primitive that ``_passes.name`` computes."""
    rule = jax.ffi.ffi_lowering(TARGET)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        return rule(ctx, *operands, plan=encode(name, params, ctx.avals_in, ctx.avals_out))

    return lower
