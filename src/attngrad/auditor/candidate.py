"""Calling somebody's code: how its arguments are found, what comes back, and what it must not do to us.

A candidate runs in a thread of its own, with fresh copies of the inputs and its printing caught, and what it returns is
read there too: a lazy array may compute, raise or run on when it is looked at. Whatever it does comes back as a
``Call``. What no thread can stop (os._exit, a segmentation fault) the process of ``child`` survives.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import io
import sys
import threading
import warnings
from collections.abc import Iterator

import numpy as np

from attngrad.auditor.arguments import Caller
from attngrad.auditor.cases import Case
from attngrad.auditor.returned import Call, read
from attngrad.auditor.tracebacks import error_text, their_frames
from attngrad.core.arrays import NDArray


def _stop(thread: threading.Thread) -> None:
    """Ask a thread that runs on to end: the exception reaches it at its next bytecode."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def run(prepare: Caller, case: Case, level: str, tangents: bool, seconds: float) -> Call:
    """Call the candidate on one case. Whatever it does, this returns."""
    call, outcome = Call(), Call()  # one that runs on may write to its own outcome, when nobody looks any more
    printed = io.StringIO()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            value = action()
            read(value, case, level, tangents, outcome)
        except BaseException as error:
            failed.append(error)

    action, watched = prepare(case)
    before = {name: np.array(x) for name, x in watched.items()}
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _settings_kept():
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            _stop(thread)
            thread.join(1.0)
            call.timeout = True
    call.printed = printed.getvalue()
    if call.timeout:
        return call
    call.mutated = tuple(
        name for name, x in watched.items() if not np.array_equal(_bits(before[name]), _bits(np.asarray(x)))
    )
    if failed:
        call.crash, call.error = their_frames(failed[0]), error_text(failed[0])
        call.exited = isinstance(failed[0], SystemExit)
        partial = getattr(failed[0], "attngrad_partial", None)
        if partial:
            read(partial, case, level, tangents, call)
        return call
    call.results, call.strange, call.unknown = outcome.results, outcome.strange, outcome.unknown
    return call


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Restores afterwards the process-wide settings that a candidate may change and we depend on."""
    depth = sys.getrecursionlimit()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            sys.setrecursionlimit(depth)


def _bits(x: NDArray) -> NDArray:
    return np.ascontiguousarray(x).view(np.uint8) if x.ndim and x.size else x
