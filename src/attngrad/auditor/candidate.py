"""Calling somebody's code: how its arguments are found, what comes back, and what it must not do to us.

A candidate runs in a thread of its own, with fresh copies of the inputs and its printing caught, and what it returns is
read there too: a lazy array may compute, raise or run on when it is looked at. Whatever it does comes back as a
``Call``. What no thread can stop (os._exit, a segmentation fault) the process of ``child`` survives.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import inspect
import io
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attngrad.auditor.cases import Case
from attngrad.auditor.pipeline import RESULTS
from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import KERNEL_DTYPES
from attngrad.core.options import OPTION_NAMES

_NAMES = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
    "dout": ("dout", "do", "d_out", "grad_out", "grad_output", "dy", "g", "cotangent"),
    "q_dot": ("q_dot", "qdot", "dot_q"),
    "k_dot": ("k_dot", "kdot", "dot_k"),
    "v_dot": ("v_dot", "vdot", "dot_v"),
    "dout_dot": ("dout_dot", "do_dot"),
}
_ALIASES = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
_BY_COUNT = {
    3: ("q", "k", "v"),
    4: ("q", "k", "v", "dout"),
    6: ("q", "k", "v", "q_dot", "k_dot", "v_dot"),
    7: ("q", "k", "v", "dout", "q_dot", "k_dot", "v_dot"),
    8: ("q", "k", "v", "dout", "q_dot", "k_dot", "v_dot", "dout_dot"),
}
LAYER_ARGUMENTS = ("query", "key", "value", "w_q", "w_k", "w_v", "w_o", "dy", "num_heads")


class BadCandidate(TypeError):  # noqa: N818
    """The candidate cannot be called in any way that the auditor knows."""


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


Caller = Callable[[Case], tuple[Callable[[], Any], dict[str, NDArray]]]


# --- arguments -------------------------------------------------------------------------------------------------------


def _fresh(x: NDArray) -> NDArray:
    """A writable copy with the same strides in kind: zero strides and axis order are part of the case."""
    if x.size and 0 in x.strides:
        shape = tuple(1 if s == 0 else n for n, s in zip(x.shape, x.strides, strict=True))
        small = np.array(x[tuple(slice(0, n) for n in shape)])
        strides = tuple(0 if s == 0 else t for s, t in zip(x.strides, small.strides, strict=True))
        return np.lib.stride_tricks.as_strided(small, x.shape, strides)
    return np.array(x, order="K")


def _signature(candidate: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(candidate)
    except (TypeError, ValueError):
        return None


def _positional(candidate: Any) -> tuple[list[str], set[str], bool]:
    """The required positional parameters, the names that can be passed by keyword, and whether there is **kwargs."""
    signature = _signature(candidate)
    if signature is None:
        return ["q", "k", "v", "dout"], set(), False
    kinds = inspect.Parameter
    required, keywords, everything = [], set(), False
    for p in signature.parameters.values():
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) and p.default is kinds.empty:
            required.append(p.name)
        elif p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            keywords.add(p.name)
        elif p.kind is kinds.VAR_POSITIONAL and not required:
            required = ["q", "k", "v", "dout"]
        elif p.kind is kinds.VAR_KEYWORD:
            everything = True
    return required, keywords, everything


def _taken(options: Mapping[str, Any], names: set[str], everything: bool) -> dict[str, Any]:
    """The options that a candidate takes, their arrays as copies of its own."""

    def own(x: Any) -> Any:
        return _fresh(x) if isinstance(x, np.ndarray) else tuple(map(own, x)) if isinstance(x, tuple) else x

    return {name: own(x) for name, x in options.items() if everything or name in names}


def _arrays_in(options: Mapping[str, Any]) -> dict[str, NDArray]:
    """The arrays among the options, those of a pair as ``segments[0]``."""
    found = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    pairs = ((name, x) for name, x in options.items() if isinstance(x, tuple))
    return found | {f"{name}[{i}]": y for name, x in pairs for i, y in enumerate(x) if isinstance(y, np.ndarray)}


def attention_caller(candidate: Any) -> tuple[Caller, tuple[str, ...]]:
    """How to call ``candidate(q, k, v[, dout][, tangents], **options)``, by its signature; and what it is given."""
    required, keywords, everything = _positional(candidate)
    taken = [name for name in required if name in ("primals", "tangents")]
    # Options may be required parameters too: def f(q, k, v, dout, causal).
    arrays = [name for name in required if name not in OPTION_NAMES]
    by_keyword = {name for name in required if name in OPTION_NAMES} | keywords
    known = [_ALIASES.get(name.lower()) for name in arrays]
    if taken:
        wanted: tuple[str, ...] = tuple(arrays)
    elif None not in known and len(set(known)) == len(known) and {"q", "k", "v"} <= set(known):
        wanted = tuple(name for name in known if name)
    elif len(arrays) in _BY_COUNT:
        wanted = _BY_COUNT[len(arrays)]
    else:
        raise BadCandidate(
            "audit: candidate must take (q, k, v, dout), or (q, k, v) for a forward alone; "
            f"it takes ({', '.join(required)})."
        )

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        fresh = {name: _fresh(x) for name, x in case.arrays.items()}
        values: list[Any] = []
        for name in wanted:
            if name == "primals":
                values.append((fresh["q"], fresh["k"], fresh["v"]))
            elif name == "tangents":
                values.append((fresh["q_dot"], fresh["k_dot"], fresh["v_dot"]))
            else:
                values.append(fresh[_ALIASES.get(name.lower(), name)])
        options = _taken(case.options, by_keyword, everything)
        for name in ("bias_dot", "sinks_dot"):
            if name in keywords and name in fresh:
                options[name] = fresh[name]
        watched = fresh | _arrays_in(options)
        return lambda: candidate(*values, **options), watched

    return prepare, wanted


def layer_caller(candidate: Any) -> Caller:
    """How to call ``candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, **options)``."""
    required, keywords, everything = _positional(candidate)
    by_keyword = keywords | {name for name in required if name in (*OPTION_NAMES, "num_kv_heads")}
    arrays = [name for name in required if name not in by_keyword]
    if len(arrays) != len(LAYER_ARGUMENTS) and _signature(candidate) is not None and arrays != ["q", "k", "v", "dout"]:
        raise BadCandidate(
            f"audit: a layer candidate must take ({', '.join(LAYER_ARGUMENTS)}); it takes ({', '.join(required)})."
        )

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        fresh = {name: _fresh(case.arrays[name]) for name in LAYER_ARGUMENTS[:-1]}
        options = _taken(case.options, by_keyword, everything)
        if "num_kv_heads" in by_keyword:
            options["num_kv_heads"] = case.dims.hk
        watched = fresh | _arrays_in(options)
        return lambda: candidate(*fresh.values(), case.dims.hq, **options), watched

    return prepare


# --- what comes back -------------------------------------------------------------------------------------------------


def _array(x: Any) -> NDArray | str:
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
        known: dict[int, tuple[str, ...]] = {
            8: ("y", "dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v", "dw_o"),
            7: ("dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v", "dw_o"),
            3: ("dquery", "dkey", "dvalue"),
            4: ("y", "dquery", "dkey", "dvalue"),
        }
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
            first = np.shape(values[0]) == case.arrays["q"].shape and np.shape(values[1]) == case.arrays["k"].shape
            if n == 3 + len(extra) and (n != 4 or (first and np.shape(values[2]) == case.arrays["v"].shape)):
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
        elif isinstance(array := _array(x), str):
            strange.append(f"{name} {array}")
        else:
            call.results[name] = array
    if not call.results and not strange:
        strange.append(f"returned nothing that the auditor knows ({', '.join(unknown) or 'an empty mapping'})")
    call.strange, call.unknown = tuple(strange), tuple(unknown)


# --- running ---------------------------------------------------------------------------------------------------------


def error_text(error: BaseException) -> str:
    """The kind of an error and the first line of its message, which may itself fail."""
    try:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
    except Exception:
        return f"{type(error).__name__}, whose message cannot be printed"
    return lines[0].removesuffix(":")


_FRAMES = 50
_OURS = ("candidate", "objects", "frameworks", "torch_candidate", "jax_candidate")


def _own_frames(error: BaseException) -> str:
    """The traceback without our own frames."""
    frames = traceback.extract_tb(error.__traceback__, limit=_FRAMES)
    last = traceback.extract_tb(error.__traceback__, limit=-_FRAMES)
    if len(frames) == _FRAMES:  # of a recursion: the others would take minutes to print
        frames += last
    ours = tuple(f"attngrad/auditor/{name}.py" for name in _OURS)
    theirs = [f for f in frames if not f.filename.replace("\\", "/").endswith(ours)]
    lines = traceback.format_list(theirs or frames[-1:]) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)


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
        call.crash, call.error = _own_frames(failed[0]), error_text(failed[0])
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
