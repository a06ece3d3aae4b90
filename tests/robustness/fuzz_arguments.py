"""Random arguments for the functions of attention: small cases with something wrong or odd in them.

A call gives what the reference gives for the same arguments, or a TypeError or ValueError that begins with the name of
the function. What a NaN or an infinity does to the rest is checked too: groups of heads that it is not in come out bit
for bit as they were, and the number of threads changes no bit. A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

import attngrad
from attngrad import reference
from attngrad.core.dtypes import BFLOAT16
from attngrad.core.operands import Tangents
from cases import OPTIONS, SHAPES, Case, make
from fuzz_tools import refused
from passes import all_passes

WHAT = "calls"
NUMBERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 0.5, -0.0, 1e-320, 1e308,
           np.nan, np.inf, -np.inf, True, None, "1", 1j, (), b"x", np.float32(2), np.int8(-3))  # fmt: skip
DTYPES = ("f8", "f4", "f2", ml_dtypes.bfloat16, ">f8", "i8", "u1", "?", "c16", "O", "U3", "longdouble", "m8[s]")
FUNCTIONS = ("attention", "vjp", "jvp", "hvp", "attention_weights", "jacobian")
FLOATS = (np.float64, np.float32, np.float16)
VALUES = (np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, -0.0, 1e200)


class Lying:
    """Says that it is an array, and is something else each time."""

    def __init__(self, x: Any) -> None:
        self.x, self.asked = x, 0

    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: self.x.dtype)
    ndim = property(lambda self: self.x.ndim)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.asked += 1
        return self.x[..., : self.asked]


class Subclass(np.ndarray):
    """An array of another class."""


def odd(x: Any, rng: np.random.Generator) -> Any:
    """An array with something about it that is not as it should be, or only unusual."""
    if not isinstance(x, np.ndarray):
        return NUMBERS[int(rng.integers(len(NUMBERS)))]
    axis = int(rng.integers(x.ndim)) if x.ndim else 0
    with np.errstate(all="ignore"):
        changes: list[Any] = [
            lambda: x.astype(DTYPES[int(rng.integers(len(DTYPES)))]),
            lambda: np.take(x, [], axis) if x.ndim else x,
            lambda: np.repeat(x, 2, axis) if x.ndim else x,
            lambda: x[None],
            lambda: x[0] if x.ndim and len(x) else x,
            lambda: x.swapaxes(axis, -1) if x.ndim else x,
            lambda: np.broadcast_to(x[..., :1], x.shape) if x.ndim else x,
            lambda: x[..., ::-1] if x.ndim else x,
            lambda: np.asfortranarray(x),
            lambda: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
            lambda: np.ma.masked_array(x, np.zeros(x.shape, bool)),
            lambda: x.view(Subclass),
            lambda: Lying(x),
            lambda: x.tolist(),
            lambda: spotted(x, rng),
            lambda: np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim),
            lambda: NUMBERS[int(rng.integers(len(NUMBERS)))],
        ]
        try:
            return changes[int(rng.integers(len(changes)))]()
        except (TypeError, ValueError, Warning):  # changed before, into what this change does not know
            return x


def spotted(x: Any, rng: np.random.Generator) -> Any:
    """``x`` with some of its numbers replaced; it may have become an array of strings by then, or of records."""
    y = x.copy()
    if y.dtype.kind in "fiub" or y.dtype == BFLOAT16:
        y[rng.random(y.shape) < 0.2] = np.array(VALUES[int(rng.integers(len(VALUES)))]).astype(y.dtype)
    return y


def draw(number: int) -> tuple[str, Case, dict[str, Any]]:
    """The function, the case with its changes, and the options of this number."""
    rng = np.random.default_rng([number, 5])
    shape = SHAPES[str(rng.choice(list(SHAPES)))]
    c = make(tuple(rng.choice(list(OPTIONS), rng.integers(0, 4), replace=False)), shape, number)
    c = c.cast(np.float64 if rng.random() < 0.6 else np.float32)
    name = str(rng.choice(FUNCTIONS))
    arrays = ["q", "k", "v", "dout", "dlse", "dout_dot", "dlse_dot"]
    for _ in range(int(rng.integers(0, 3))):
        at = str(rng.choice([*arrays, "t", *c.options, *c.options, "new"]))
        if at in arrays:
            setattr(c, at, odd(getattr(c, at), rng))
        elif at == "t":
            i = int(rng.integers(len(c.t)))
            c.t = Tangents(*(odd(x, rng) if j == i else x for j, x in enumerate(c.t)))
        elif at == "new":
            names = ["scale", "causal", "window", "offset", "softcap", "dropout", "seed", "return_lse", "sclae", "mask"]
            value = NUMBERS[int(rng.integers(len(NUMBERS)))]
            c.options[str(rng.choice(names))] = (value, 1) if rng.random() < 0.2 else value
        else:
            c.options[at] = odd(c.options[at], rng)
    return name, c, c.options


def call(module: Any, name: str, c: Case) -> dict[str, Any]:
    """Every array that the function gives, by a name."""
    if name == "attention":
        given = module.attention(*c.qkv, **c.options)
    elif name == "vjp":
        given, pullback = module.vjp(*c.qkv, **c.options)
        given = (given, pullback(c.dout, c.dlse))
    elif name == "jvp":
        given = module.jvp(c.qkv, c.t[:3], **c.tangents, **c.options)
    elif name == "hvp":
        given = module.hvp(
            c.qkv, c.t[:3], c.dout, c.dout_dot, dlse=c.dlse, dlse_dot=c.dlse_dot, **c.tangents, **c.options
        )
    elif name == "attention_weights":
        given = module.attention_weights(c.q, c.k, **c.options)
    else:
        given = module.jacobian(*c.qkv, **c.options)
    flat: dict[str, Any] = {}

    def collect(x: Any, path: str) -> None:
        if isinstance(x, tuple):
            for i, part in enumerate(x):
                collect(part, f"{path}.{i}")
        elif x is not None:
            flat[path] = x

    collect(given, name)
    return flat


def describe(number: int) -> str:
    """What the call of this number is given."""
    name, c, options = draw(number)

    def told(x: Any) -> str:
        return f"{type(x).__name__} {x.dtype} {x.shape} {x.strides}" if isinstance(x, np.ndarray) else repr(x)

    arrays = {n: told(getattr(c, n)) for n in ("q", "k", "v", "dout", "dlse", "dout_dot", "dlse_dot")}
    return f"{name} {arrays} {[told(x) for x in c.t]} { {n: told(x) for n, x in options.items()} }"


def judge(number: int) -> str:
    """The call of this number: "right", "refused", or "huge" or "not finite", and then alike for any threads."""
    if number % 8 == 0:
        return spread(number)
    name, c, _ = draw(number)
    attngrad.set_num_threads(1)
    try:
        got = call(attngrad, name, c)
    except (TypeError, ValueError) as error:
        return refused(error, *(f"{n}: " for n in (*FUNCTIONS, "pullback")))
    attngrad.set_num_threads(3)
    for path, x in call(attngrad, name, c).items():
        assert np.array_equal(x, got[path], equal_nan=True), f"{path} depends on the number of threads"
    c = converted(c)
    with np.errstate(all="ignore"):
        expected = call(reference, name, c)
    assert got.keys() == expected.keys()
    finite = all(np.isfinite(np.asarray(x)).all() for x in expected.values())
    if finite and largest(c) > (1e15 if c.q.dtype == np.float32 else 1e100):  # where products may leave the range
        return "huge"
    for path, x in got.items():
        want = np.asarray(expected[path])
        assert x.shape == want.shape, (path, x.shape, want.shape)
        tolerance = 1e-10 if x.dtype == np.float64 else 1e-3
        scale = np.abs(want).max(initial=0.0)
        if finite and x.dtype.itemsize > 2 and scale < 1e30:
            off = np.abs(x - want).max(initial=0.0)
            meets = min(max(1.0, largest(c)), 1e100)
            lost = np.finfo(x.dtype).eps + 100 * np.finfo(x.dtype).tiny  # where terms cancel, and what underflows
            least = lost * meets**2  # times what it meets
            assert off <= tolerance * scale + least, (path, off, scale)
    return "right" if finite else "not finite"


def converted(c: Case) -> Case:
    """What the kernels make of lists, integers and narrow cotangents, which the reference does not take."""
    dtypes = [x.dtype for x in c.qkv if isinstance(x, np.ndarray) and x.dtype.kind not in "iu"]
    dtype = dtypes[0] if dtypes else np.dtype(np.float64)

    def one(x: Any) -> Any:
        array = np.asarray(x) if isinstance(x, list) else x
        floats = isinstance(array, np.ndarray) and (array.dtype.kind in "iuf" or array.dtype == BFLOAT16)
        return array.astype(dtype) if floats else array

    arrays = {n: one(getattr(c, n)) for n in ("q", "k", "v", "dout", "dlse", "dout_dot", "dlse_dot")}
    options = {n: one(x) if n in ("bias", "sinks") or isinstance(x, list) else x for n, x in c.options.items()}
    if isinstance(c.options.get("offset"), list | tuple):
        options["offset"] = np.asarray(c.options["offset"])
    return replace(c, **arrays, t=Tangents(*map(one, c.t)), options=options)


def largest(c: Case) -> float:
    """The largest finite number of the arguments."""
    options = [c.options.get(name) for name in ("scale", "softcap", "bias", "sinks")]
    given = [*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot, *c.t, *options]
    real = [x for x in given if isinstance(x, float | int) or getattr(x, "dtype", "O") in FLOATS]
    arrays = [np.asarray(x, np.float64) for x in real]
    return max((float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in arrays), default=0.0)


def spread(number: int) -> str:
    """A bad number in one group of heads leaves the others as they were."""
    rng = np.random.default_rng([number, 6])
    names = ("causal", "mask", "softcap", "dropout", "window left", "scale")
    c = make(tuple(rng.choice(names, 2, replace=False)), SHAPES["grouped"]._replace(t=int(rng.integers(1, 70))), number)
    c = c.cast((np.float64, np.float32, np.float16)[int(rng.integers(3))])
    before = all_passes(c)
    batch, group, per = int(rng.integers(2)), int(rng.integers(2)), c.shape.heads // c.shape.key_heads
    where = str(rng.choice(["q", "k", "v", "dout"]))
    x = getattr(c, where).copy()
    head = group if where in "kv" else group * per + int(rng.integers(per))
    x[batch, head, int(rng.integers(x.shape[2]))] = rng.choice([np.nan, np.inf, -np.inf])
    setattr(c, where, x)
    for name, after in all_passes(c).items():
        heads = after.shape[1] // 2  # of one group
        clean = np.ones(after.shape[:2], bool)
        clean[batch, group * heads : (group + 1) * heads] = False
        assert np.array_equal(after[clean], before[name][clean], equal_nan=True), f"{where} reaches {name} elsewhere"
    return "contained"
