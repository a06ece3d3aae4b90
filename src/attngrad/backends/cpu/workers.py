"""Workers that the process already has: an OpenMP runtime's for the kernels, and the kernels' for NumPy's OpenBLAS.

A framework's workers spin for milliseconds after its own work, ready for more. A second thread pool would fight them
for the cores; so the kernels borrow them. Who runs a task changes no bit of the result.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from attngrad import _native
from attngrad.core.checks import check_flag

VARIABLE, SHARE = "ATTNGRAD_THREADS", "ATTNGRAD_SHARE_THREADS"
_NAMES = ("own", "openmp")


class OpenMP(NamedTuple):
    """A runtime: the addresses of its functions, 0 for one that it lacks; and the file it was loaded from."""

    parallel: int
    fork_call: int
    in_parallel: int
    max_threads: int
    file: str

    @classmethod
    def of(cls, library: ctypes.CDLL) -> OpenMP | None:
        """The one that ``library`` finds, itself or among what it needs; None where there is none."""
        names = ("GOMP_parallel", "__kmpc_fork_call", "omp_in_parallel", "omp_get_max_threads")
        parallel, fork_call, in_parallel, most = (_address(library, name) for name in names)
        found = parallel or fork_call
        return cls(parallel, fork_call, in_parallel, most, _file_of(found)) if found and in_parallel and most else None


class _Info(ctypes.Structure):
    """Dl_info, of dladdr."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _address(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def _file_of(address: int) -> str:
    info = _Info()
    known = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.fsdecode(info.file) if known and info.file else ""


_runtime: OpenMP | None = None


def use_openmp(libraries: Iterable[ctypes.CDLL]) -> None:
    """Borrow from the first OpenMP runtime that one of ``libraries`` finds."""
    global _runtime
    _runtime = next(filter(None, map(OpenMP.of, libraries)), None)
    if _runtime is not None:
        _native.set_openmp(*_runtime[:-1])


def choose_workers() -> None:
    """What ATTNGRAD_THREADS and ATTNGRAD_SHARE_THREADS say; called before a pass runs."""
    name = os.environ.get(VARIABLE)
    if name is not None:
        if name not in _NAMES:
            raise ImportError(f"attngrad: {VARIABLE} must be one of {', '.join(_NAMES)}; got {name!r}.")
        if name == "openmp":
            use_openmp(_loaded())
            if _runtime is None:
                raise ImportError(
                    f"attngrad: {VARIABLE}=openmp needs an OpenMP runtime; got a process without one, and a system "
                    "without libgomp.so.1. Import torch first, or install libgomp."
                )
        _native.force_workers(name)
    if os.environ.get(SHARE, "0") not in ("", "0"):
        share_threads()


def _loaded() -> Iterable[ctypes.CDLL]:
    """The process, then libgomp, which is loaded where nobody has done so."""
    yield ctypes.CDLL(None)
    try:
        yield ctypes.CDLL("libgomp.so.1")
    except OSError:
        return


def describe() -> str:
    """Who runs the tasks of a call, for ``attngrad info``."""
    forced = os.environ.get(VARIABLE)
    runtime = "" if _runtime is None else f" ({os.path.basename(_runtime.file)})"
    if forced == "own":
        return f"their own ({VARIABLE}=own)"
    if forced == "openmp":
        return f"OpenMP's{runtime} ({VARIABLE}=openmp)"
    return f"their own; in attngrad.torch OpenMP's{runtime}"


# --- for NumPy --------------------------------------------------------------------------------------------------------


def share_threads(on: bool = True) -> None:
    """Let NumPy's OpenBLAS run its work on the workers of the kernels, or no longer.

    After a matrix product OpenBLAS' own workers spin, and those of the kernels have to fight them for the cores. With
    one set of workers, attention right after a product takes no longer than after attention. It concerns the whole
    process, so it is off unless asked for; ``ATTNGRAD_SHARE_THREADS=1`` asks for it from the start.

    >>> share_threads()
    >>> share_threads(False)
    """
    _set_callback()(_native.blas_callback() if check_flag("share_threads", "on", on) else None)


def _set_callback() -> Any:
    """``openblas_set_threads_callback_function`` of the OpenBLAS that NumPy computes with."""
    library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
        function = getattr(library, f"{prefix}openblas_set_threads_callback_function{suffix}", None)
        if function is not None:
            function.argtypes, function.restype = [ctypes.c_void_p], None
            return function
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    raise RuntimeError(
        "share_threads: NumPy must compute with OpenBLAS 0.3.27 or newer, which takes workers from others; got "
        f"{blas.get('name')} {blas.get('version')}. NumPy's wheels from PyPI have it."
    )
