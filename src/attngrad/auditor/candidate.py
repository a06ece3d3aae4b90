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
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attngrad.auditor.cases import Caller, Case
from attngrad.auditor.pipeline import RESULTS
from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import KERNEL_DTYPES

_FRAMES = 50
_OURS = str(Path(__file__).parent)


def error_text(error: BaseException) -> str:
    """The kind of an error and the first line of its message, which may itself fail."""
    try:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
    except Exception:
        return f"{type(error).__name__}, whose message cannot be printed"
    return lines[0].removesuffix(":")


def their_frames(error: BaseException, *others: str, least: int = 1) -> str:
    """The traceback without the frames of the auditor, and of files with one of ``others`` in their path.

    Where none is left, the last ``least`` of ours.
    """
    frames = traceback.extract_tb(error.__traceback__, limit=_FRAMES)
    if len(frames) == _FRAMES:  # of a recursion: the others would take minutes to print
        frames += traceback.extract_tb(error.__traceback__, limit=-_FRAMES)
    theirs = [f for f in frames if not any(name in f.filename for name in (_OURS, *others))]
    lines = traceback.format_list(theirs or frames[len(frames) - least :]) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)


@dataclass
class Call:
    """What came of one call."""

    results: dict[str, Any] = field(default_factory=dict)
    crash: str | None = None
    """The candidate's traceback, from its first frame on."""
    error: str | None = None
    """The last line of it."""
    exited: bool = False
    timeout: bool = False
    mutated: tuple[str, ...] = ()
    printed: str = ""
    strange: tuple[str, ...] = ()
    """What it returned that cannot be read."""
    unknown: tuple[str, ...] = ()
    """Names that it returned and the auditor does not know."""


def array_of(x: Any) -> NDArray | str:
    """``x`` as a NumPy array of real numbers, whatever library it is of; or what is the matter with it."""
    try:
        if hasattr(x, "detach"):
            x = x.detach().cpu()
            if str(x.dtype) == "torch.bfloat16":
                x = x.float()
            x = x.numpy()
        if isinstance(x, np.ma.MaskedArray) and np.any(x.mask):
            return "is a masked array with entries masked"
        found = np.array(x)
    except Exception as error:
        return f"cannot be read as an array ({error_text(error)})"
    if found.dtype.kind not in "biuf" and found.dtype not in KERNEL_DTYPES:  # bfloat16 is of another kind
        return f"is no array of real numbers ({type(x).__name__}, dtype {found.dtype})"
    if found.dtype.kind not in "biu":  # memory that nobody wrote may hold a NaN that signals: every cast of it warns
        with np.errstate(invalid="ignore"):
            found[np.isnan(found)] = np.nan
    return found


_FIELDS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


def _flat(value: Any) -> list[Any]:
    """Nested tuples and lists flattened, down to arrays; a list of numbers, up to four deep, is an array too."""
    if not isinstance(value, (tuple, list)) or 0 < _depth(value) <= 4:
        return [value]
    return [y for x in value for y in _flat(x)]


def _depth(value: Any) -> int:
    """How deep lists of numbers are nested; 0 for what is none."""
    depth = 0
    while isinstance(value, list) and value and depth < 5:
        value, depth = value[0], depth + 1
    return depth if isinstance(value, (bool, int, float)) else 0


def named_results(value: Any, case: Case, level: str, tangents: bool) -> dict[str, Any]:
    """What was returned, by name."""
    if isinstance(value, Mapping):
        return {str(name): x for name, x in value.items()}
    if hasattr(value, "_asdict") and {"q", "k", "v"} <= set(value._fields):
        return {_FIELDS.get(n, n): x for n, x in value._asdict().items() if x is not None}
    if isinstance(value, (tuple, list)):
        if any(hasattr(x, "_asdict") for x in value):
            value = [[y for y in x if y is not None] if hasattr(x, "_asdict") else x for x in value]
        flat = _flat(value)
        return dict(zip(_names_of(flat, case, level, tangents), flat, strict=True))
    return {"y" if level == "layer" else "out": value}


def _names_of(values: list[Any], case: Case, level: str, tangents: bool) -> tuple[str, ...]:
    n = len(values)
    if level == "layer":
        inputs, weights = ("dquery", "dkey", "dvalue"), ("dw_q", "dw_k", "dw_v", "dw_o")
        orders = (inputs, ("y", *inputs), (*inputs, *weights), ("y", *inputs, *weights))
        known: dict[int, tuple[str, ...]] = {len(names): names for names in orders}
    elif tangents:
        second = ("dq_dot", "dk_dot", "dv_dot")
        known = {1: ("out_dot",), 2: ("out", "out_dot"), 3: second, 6: ("dq", "dk", "dv", *second)}
        known |= {7: ("out", *known[6]), 4: ("out", "lse", "out_dot", "lse_dot"), 8: ("out", "out_dot", *known[6])}
    else:
        known = {1: ("out",), 2: ("out", "lse"), 3: ("dq", "dk", "dv"), 4: ("out", "dq", "dk", "dv")}
        extra = tuple(f"d{x}" for x in ("bias", "sinks") if x in case.options)
        if extra:
            known[4 + len(extra)] = ("out", "dq", "dk", "dv", *extra)
            # Four arrays beside a bias: out first, or dbias last? The shapes tell.
            shapes = [np.shape(x) for x in values[:4]]
            q, k, v, dout = (case.arrays[name].shape for name in ("q", "k", "v", "dout"))
            if n == 3 + len(extra) and (n != 4 or (shapes[:3] == [q, k, v] and shapes != [dout, q, k, v])):
                known[n] = ("dq", "dk", "dv", *extra)
    if n not in known:
        sizes = ", ".join(map(str, sorted(known)))
        raise ValueError(f"returned {n} arrays; {sizes} are understood. Return a mapping from names to arrays.")
    return known[n]


def read(value: Any, case: Case, level: str, tangents: bool, call: Call) -> None:
    """Fill ``call`` with the results of a return value."""
    if value is None:
        call.strange = ("it returned None; return (out, dq, dk, dv), or a mapping of results",)
        return
    try:
        named = named_results(value, case, level, tangents)
    except ValueError as error:
        call.strange = (str(error),)
        return
    strange, unknown = [], []
    for name, x in named.items():
        if name not in RESULTS:
            unknown.append(name)
        elif x is None:
            strange.append(f"{name} is None")
        elif isinstance(array := array_of(x), str):
            strange.append(f"{name} {array}")
        else:
            call.results[name] = array
    if not call.results and not strange:
        strange.append(f"returned nothing that the auditor knows ({', '.join(unknown) or 'an empty mapping'})")
    call.strange, call.unknown = tuple(strange), tuple(unknown)


def guarded(work: Callable[[], Any], seconds: float) -> tuple[Any, BaseException | None, str | None]:
    """What ``work`` gives, in a thread of its own; what it raised; what it printed, or None where it did not return."""
    printed = io.StringIO()
    outcome: list[Any] = []
    failed: list[BaseException] = []

    def run_it() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run_it,), daemon=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _settings_kept():
        thread.start()
        thread.join(seconds)
        if thread.is_alive():  # ask it to end: the exception reaches it at its next bytecode
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(1.0)
            return None, TimeoutError(), None
    # Out of their lists: an error holds its frames, these hold the lists, and what a candidate hoarded would stay.
    return outcome.pop() if outcome else None, failed.pop() if failed else None, printed.getvalue()


def run(prepare: Caller, case: Case, level: str, tangents: bool, seconds: float) -> Call:
    """Call the candidate on one case. Whatever it does, this returns."""
    call, outcome = Call(), Call()  # one that runs on may write to its own outcome, when nobody looks any more
    action, watched = prepare(case)
    before = {name: np.array(x) for name, x in watched.items()}
    _, failed, printed = guarded(lambda: read(action(), case, level, tangents, outcome), seconds)
    if printed is None:
        call.timeout = True
        return call
    call.printed = printed
    call.mutated = tuple(
        name for name, x in watched.items() if not np.array_equal(_bits(before[name]), _bits(np.asarray(x)))
    )
    if failed is not None:
        call.crash, call.error = their_frames(failed), error_text(failed)
        call.exited = isinstance(failed, SystemExit)
        if partial := getattr(failed, "attngrad_partial", None):
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
