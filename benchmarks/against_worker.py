"""The rows of ``against.py``, and one of its three processes: it runs the call of a row whenever it is its turn.

It reads a line of JSON and answers with one, and waits without using the processor in between. The public functions of
attngrad are all that it needs, so that it runs with older revisions too:

    {"do": "start", "threads": 2}       which attngrad this is, and with what it was built
    {"do": "row", "row": {...}}         draw the arrays of a row, call once, and sum up the results; or say why not
    {"do": "turn", "seconds": 0.04}     call for so long; the median of the seconds per call

All draw the same numbers. The arrays begin at multiples of 64 bytes: by chance, they would cross lines of the cache in
one process and not in the other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, NoReturn, cast

import numpy as np

import attngrad

Call = Callable[[], Any]

# --- rows -----------------------------------------------------------------------------------------------------------

F, FB, JVP, HVP = PASSES = ("forward", "forward + backward", "jvp", "hvp")
SHORT_DTYPES = {"float32": "", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}

KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"causal": True},
    "window 256": {"window": (256, 0)},
    "mask 50%": {"mask": 0.5},
    "bias": {"bias": True},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout": 0.1, "seed": 7},
    "sinks": {"sinks": True},
    "segments": {"segments": 4, "causal": True},
    "all options": {"causal": True, "window": (64, 0), "mask": 0.5, "bias": True, "softcap": 20.0, "sinks": True},
}
"""The options of a row, as ``prepare`` reads them. Bias and sinks are differentiated too."""


@dataclass(frozen=True)
class Row:
    """One call: shape, options, dtype and pass. Heads, tokens and features are those of queries and of keys or values.

    >>> Row(8, (32, 8), (1, 4096), (128, 128), "causal", "bfloat16", "hvp").label
    '8,32/8,1/4096,128 causal bf16 hvp'
    """

    batch: int
    heads: tuple[int, int]
    tokens: tuple[int, int]
    features: tuple[int, int]
    kind: str = ""
    dtype: str = "float32"
    name: str = F

    @property
    def label(self) -> str:
        """Shape, options, dtype and pass, as the table shows them."""
        sides = (self.heads, self.tokens, self.features)
        shape = ",".join([str(self.batch), *(str(a) if a == b else f"{a}/{b}" for a, b in sides)])
        return " ".join(part for part in (shape, self.kind, SHORT_DTYPES[self.dtype], self.name) if part)

    @property
    def group(self) -> str:
        """What it is judged with: float32, or the other dtypes."""
        return "float32" if self.dtype == "float32" else "other dtypes"


def square(batch: int, heads: int, tokens: int, features: int) -> Row:
    """As many keys as queries, and so on."""
    return Row(batch, (heads, heads), (tokens, tokens), (features, features))


def _rows() -> Iterator[Row]:
    def of(row: Row, *passes: str, **changes: Any) -> Iterator[Row]:
        return (replace(row, name=name, **changes) for name in passes)

    small, batch, short = square(1, 1, 10, 32), square(32, 4, 10, 32), square(8, 12, 128, 64)
    middle, long, options = square(4, 8, 512, 64), square(1, 8, 2048, 64), square(4, 8, 256, 64)
    for row in (small, batch, short, middle, long):
        yield from of(row, *PASSES)
    for row in (short, middle):
        yield from of(row, *PASSES, kind="causal")
    for row in (small, batch, long):
        yield from of(row, F, FB, kind="causal")
    for kind in ("mask 50%", "bias", "softcap", "dropout", "sinks"):
        yield from of(options, FB, HVP, kind=kind)
    yield from of(options, FB, kind="segments")
    yield from of(long, F, FB, kind="window 256")
    yield from of(small, F, HVP, kind="all options")
    yield from of(options, FB, HVP, heads=(8, 2))
    yield from of(options, FB, tokens=(64, 512))
    yield from of(Row(1, (32, 8), (1, 4096), (128, 128)), F)
    yield from of(options, F, FB, features=(128, 128))
    yield from of(options, F, FB, features=(64, 128))
    yield from of(square(2, 3, 77, 40), F, FB, HVP)
    for dtype in ("float64", "bfloat16", "float16"):
        yield from of(options, *PASSES, dtype=dtype)
        yield from of(options, FB, dtype=dtype, kind="causal")
        yield from of(batch, FB, dtype=dtype)


ROWS = tuple(_rows())

# --- the call of a row ----------------------------------------------------------------------------------------------

LINE = 64
SAMPLE = 64
"""Entries of each result that are compared one by one."""

TOLERANCE = {"float32": 6e-5, "float64": 2e-11, "bfloat16": 4e-2, "float16": 6e-3}
"""How far results may differ, of the largest entry: two revisions may round in another order."""

WARM_UP = 0.003
"""Seconds of calls before the clock starts; longer calls than SLOW need none."""
SLOW = 0.02


def _aligned(x: Any) -> Any:
    memory = np.empty(x.nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def prepare(row: Row) -> Call:
    """The call of a row: its pass, with everything that can be differentiated, along all tangents."""
    (heads, key_heads), (t, s), (d, e) = row.heads, row.tokens, row.features
    rng, dtype = np.random.default_rng(0), _dtype(row.dtype)
    wide = np.float64 if row.dtype == "float64" else np.float32

    def draw(*shape: int) -> Any:
        return _aligned(rng.standard_normal(shape, dtype=wide).astype(dtype))

    def inputs() -> tuple[Any, Any, Any]:
        return draw(row.batch, heads, t, d), draw(row.batch, key_heads, s, d), draw(row.batch, key_heads, s, e)

    primals, tangents = inputs(), inputs()
    dout, dout_dot = draw(row.batch, heads, t, e), draw(row.batch, heads, t, e)
    options = dict(KINDS[row.kind])
    along: dict[str, Any] = {}
    if "mask" in options:  # the share of keys that a query sees
        mask = rng.random((1, 1, t, s)) < options["mask"]
        mask[..., 0] = True
        options["mask"] = _aligned(mask)
    if "bias" in options:
        options["bias"], along["bias_dot"] = draw(1, heads, t, s), draw(1, heads, t, s)
    if "sinks" in options:
        options["sinks"], along["sinks_dot"] = draw(heads), draw(heads)
    if "segments" in options:  # how many
        ids = np.arange(t, dtype=np.int32) * options["segments"] // t
        options["segments"] = (_aligned(ids), _aligned(ids))

    attention, vjp, jvp, hvp = attngrad.attention, attngrad.vjp, attngrad.jvp, attngrad.hvp

    def forward_and_backward() -> Any:
        out, pullback = vjp(*primals, **options)
        return out, pullback(dout)

    calls: dict[str, Call] = {
        F: lambda: attention(*primals, **options),
        FB: forward_and_backward,
        JVP: lambda: jvp(primals, tangents, **along, **options),
        HVP: lambda: hvp(primals, tangents, dout, dout_dot, **along, **options),
    }
    return calls[row.name]


def _named(name: str, result: Any) -> Iterator[tuple[str, Any]]:
    """Every array of a result, with its name."""
    if name == F:
        yield "out", result
    elif name == JVP:
        yield from zip(("out", "out_dot"), result, strict=True)
    else:
        first, second = result
        if name == FB:
            yield "out", first
            parts = [("", second)]
        else:
            parts = [("", first), ("_dot", second)]
        for suffix, grads in parts:
            yield from ((f"d{field}{suffix}", x) for field, x in grads._asdict().items() if x is not None)


def sums(name: str, result: Any) -> dict[str, dict[str, Any]]:
    """What two processes compare: of each array its shape, norm and largest entry, and some entries evenly spread."""
    found = {}
    for key, array in _named(name, result):
        flat = np.asarray(array).astype(np.float64).ravel()
        some = flat[np.linspace(0, flat.size - 1, min(SAMPLE, flat.size)).astype(int)]
        found[key] = {
            "shape": list(array.shape),
            "norm": float(np.linalg.norm(flat)),
            "largest": float(np.abs(flat).max()),
            "entries": some.tolist(),
        }
    return found


def difference(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> str | None:
    """In what the results of two processes differ (``sums``); None where in nothing."""
    if found.keys() != expected.keys():
        return f"gives {', '.join(found)}; the working tree gives {', '.join(expected)}"
    for name, x in found.items():
        y = expected[name]
        if x["shape"] != y["shape"]:
            return f"gives {name} of shape {x['shape']}; the working tree {y['shape']}"
        off = [(abs(x["norm"] - y["norm"]), y["norm"])]
        off += [(abs(a - b), y["largest"]) for a, b in zip(x["entries"], y["entries"], strict=True)]
        for distance, scale in off:
            if not distance <= TOLERANCE[dtype] * scale:  # a NaN differs too
                share = distance / scale if scale else math.inf
                return f"gives another {name}: off by {share:.1e}; {dtype} allows {TOLERANCE[dtype]:.0e}"
    return None


# --- the process ----------------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Which attngrad, built with what. Names that an older revision does not have are None."""
    try:
        from attngrad import _native
    except ImportError:
        native: Any = None
    else:
        native = _native
    isa, threads = getattr(native, "isa", None), getattr(attngrad, "get_num_threads", None)
    return {
        "file": attngrad.__file__,
        "native": getattr(native, "__file__", None),
        "version": getattr(attngrad, "__version__", None),
        "isa": isa() if isa else None,
        "compiler": getattr(native, "compiler", None),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "threads": threads() if threads else None,
    }


def timed(call: Call) -> float:
    """Seconds of one call; freeing its results counts."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Worker:
    """Answers one question after the other; keeps the call of the row between them."""

    def __init__(self) -> None:
        self.call: Call = lambda: None
        self.estimate = 0.0

    def start(self, question: dict[str, Any]) -> dict[str, Any]:
        """Set the number of threads, if one is given."""
        if question.get("threads"):
            attngrad.set_num_threads(question["threads"])
        return describe()

    def row(self, question: dict[str, Any]) -> dict[str, Any]:
        """The next row. An option or a function that this revision does not have is an answer, not the end."""
        self.call = lambda: None  # frees the arrays of the last row
        gc.collect()
        try:
            row = Row(**question["row"])
            self.call = prepare(row)
            found = sums(row.name, self.call())
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self.estimate = timed(self.call)
        return {"sums": found, "seconds": self.estimate}

    def turn(self, question: dict[str, Any]) -> dict[str, Any]:
        """Warm up, then call for so many seconds, once at least."""
        call, warm = self.call, 0.0
        while self.estimate < SLOW and warm < WARM_UP:
            warm += timed(call)
        times, left = [timed(call)], question["seconds"]
        while (left := left - times[-1]) > 0.0:
            times.append(timed(call))
        return {"seconds": statistics.median(times), "calls": len(times)}


def main() -> None:
    """Answer until the questions end. What else is printed must not come between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    gc.disable()
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(worker, question["do"])(question)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# --- its other end --------------------------------------------------------------------------------------------------


LONGEST_ANSWER = 180.0
"""Seconds after which a process that does not answer is given up."""


class MeasurementError(Exception):
    """It cannot be measured; the message says why."""


class Process:
    """The other end: a worker, that is a process that answers one line of JSON with another, and waits in between.

    It imports nothing from the current folder, PYTHONPATH or the user's packages, and has the others' hash seed, which
    moves a small call by a percent. Ctrl-C does not reach it, in a session of its own: it ends with this process.
    """

    def __init__(self, name: str, command: Sequence[str], patience: float = LONGEST_ANSWER) -> None:
        self.name, self.patience, self.left = name, patience, b""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 closed by close()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        self.process = subprocess.Popen(  # noqa: S603 our own worker
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=tempfile.gettempdir(),
            env=environment | {"PYTHONHASHSEED": "0"},
            bufsize=0,
            start_new_session=True,
        )
        self.questions, self.answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """The answer; MeasurementError where the process has died, or takes too long."""
        with contextlib.suppress(BrokenPipeError):  # read what it said before it died
            self.questions.write(json.dumps({"do": do, **question}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> bytes:
        pipe, end = self.answers.fileno(), time.monotonic() + self.patience
        while b"\n" not in self.left:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._fail(f"did not answer within {self.patience:g} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5.0)
                self._fail(f"ended with status {self.process.poll()}")
            self.left += part
        line, self.left = self.left.split(b"\n", 1)
        return line

    def _fail(self, what: str) -> NoReturn:
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip()
        raise MeasurementError(f"the process of {self.name} {what}" + (f". It said:\n{said}" if said else ""))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.questions, self.answers, self.errors):
            pipe.close()


if __name__ == "__main__":
    main()
