"""Random files for every loader: npz (``attngrad explain --input``), safetensors, JSON of traces and of benchmarks.

Each is a sound file with something wrong in it: bytes, headers, names, lengths, a pickle that would leave a trace if it
were loaded. What comes back is the content or the documented error, never anything else; nothing is unpickled or
started, and a loaded layer works and survives another save. A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import attngrad
from attngrad.explain.examples import LARGEST
from benchmarks.cli import command as benchmark
from fuzz_tools import ODD, Watch, command, refused, spoil, spoil_json

WHAT = "files"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results.json"
_DESCRIPTIONS = "<f8 >f8 <f4 <f2 |O |V8 <U3 <M8[s] |b1 <c16 <i8 <u1 <f16 f8,f4 O"
DESCRIPTIONS = [*_DESCRIPTIONS.split(), ""]
SHAPES = [
    (),
    (0,),
    (3, 4),
    (2, 3, 4),
    (2, 0, 4),
    (2**40, 3),
    (2**62, 2, 4),
    (-1, 3),
    (3, -4),
    (2.5,),
    "x",
    None,
    [3, 4],
]
TEXTS = [
    "__import__('os').system('x')",
    "{}",
    "{'descr': '<f8'}",
    "[" * 300,
    "\x00",
    "9" * 5000,
    "{'shape': " + "(" * 90,
]


@cache
def place() -> Path:
    """A folder of this process's own."""
    return Path(tempfile.mkdtemp(prefix="attngrad-fuzz-"))


@cache
def watching() -> Watch:
    """The watch of this process, with everything imported that is imported late."""
    for kind in KINDS.values():
        kind[1](kind[0](random.Random(0)))  # noqa: S311
    return Watch()


class Trap:
    """Unpickled, it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (place() / "trapped",)


# --- npz --------------------------------------------------------------------------------------------------------------


def member(rng: random.Random, array: Any) -> bytes:
    """The .npy file of an array, at times with a header that lies."""
    stream = io.BytesIO()
    np.save(stream, array)
    data = stream.getvalue()
    if rng.random() < 0.92:
        return data
    header: dict[str, Any] = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*header, "descr", "shape", "extra"])
        choices: dict[str, list[Any]] = {"descr": DESCRIPTIONS, "shape": SHAPES}
        header[name] = rng.choice(choices.get(name, ODD))
    text = rng.choice(TEXTS) if rng.random() < 0.1 else repr(header)
    encoded = text.encode("utf-8", "replace") + b"\n"
    version = rng.choice([(1, 0), (2, 0), (3, 0), (1, 0), (9, 9)])
    length = struct.pack("<H" if version[0] == 1 else "<I", min(len(encoded), 65535))
    body = pickle.dumps(Trap()) if rng.random() < 0.2 else array.tobytes()
    return b"\x93NUMPY" + bytes(version) + length + encoded + body


def npz(rng: random.Random) -> bytes:
    """An archive of inputs of attention, some missing, some too many, some of the wrong shape."""
    values = np.random.default_rng(rng.getrandbits(32))
    dtype = rng.choice([np.float64, np.float64, np.float32, np.float16])
    lead, t, s, d, e = rng.choice([(), (2,), (1, 2)]), *(rng.choice([1, 2, 3]) for _ in range(4))
    scores = (*lead, t, s)
    shapes: dict[str, tuple[int, ...]] = {"q": (*lead, t, d), "k": (*lead, s, d), "v": (*lead, s, e)}
    rows, out, sinks = (*lead, t), (*lead, t, e), scores[-3:-2] or (1,)
    more = {"dout": out, "dlse": rows, "bias": scores, "sinks": sinks, "scale": (), "softcap": (), "odd": ()}
    more |= {f"{name}_dot": shape for name, shape in (more | shapes).items()}
    shapes |= {name: more[name] for name in rng.sample(list(more), rng.choice([0, 0, 1, 2, 4]))}
    arrays: dict[str, Any] = {name: values.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    if rng.random() < 0.2:
        arrays["mask"] = values.random(scores) > 0.4
    if rng.random() < 0.1:
        arrays |= {
            "q_segments": np.zeros(t, int),
            "k_segments": np.zeros(s, int),
            "offset": np.array(rng.choice([0, 2**62])),
        }
    for name in [n for n in arrays if rng.random() < 0.04]:
        arrays[name] = odd_array(rng, arrays[name])
    if rng.random() < 0.1:
        del arrays[rng.choice(list(arrays))]
    stream = io.BytesIO()
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            path = name + rng.choice([".npy"] * 30 + ["", ".txt", "/../q.npy", ".npy.npy"])
            archive.writestr(path, member(rng, array))
    return stream.getvalue()


def odd_array(rng: random.Random, x: Any) -> Any:
    """The array with another dtype, shape or content."""
    changes: list[Callable[[], Any]] = [
        lambda: x.astype(rng.choice(["<i4", ">f8", "bool", "c16", "U5", "S3", "f2", "longdouble", "m8[s]"])),
        lambda: x.reshape(-1),
        lambda: x[None],
        lambda: x[..., :0] if x.ndim else x,
        lambda: np.full_like(x, rng.choice([np.nan, np.inf, -np.inf, 0, 1e300])) if x.dtype.itemsize == 8 else x,
        lambda: np.zeros((LARGEST, 1)) if rng.random() < 0.1 else x.T,
        lambda: np.asfortranarray(x),
    ]
    return rng.choice(changes)()


def read_npz(data: bytes) -> str:
    """Through the command; what was read must be a trace."""
    path = place() / "file.npz"
    path.write_bytes(data)
    status, out, errors = command("explain", "--input", str(path), "--format", "json")
    if status == 0:
        attngrad.Trace.from_json(out)
        return "read"
    assert status == 2, (status, errors)
    assert errors.startswith("Error: "), errors
    assert errors.count("\n") == 1, errors
    return "refused"


# --- safetensors ------------------------------------------------------------------------------------------------------


@cache
def layers() -> list[bytes]:
    """Sound files."""
    found = []
    for dtype, options in (
        (np.float32, {"bias": True}),
        (np.float64, {"num_kv_heads": 1, "rope": 100.0}),
        (ml_dtypes.bfloat16, {"d_head": 2}),
        (np.float16, {}),
    ):
        attngrad.MultiHeadAttention(4, 2, dtype=dtype, **options).save(place() / "layer")
        found.append((place() / "layer").read_bytes())
    return found


def safetensors(rng: random.Random) -> bytes:
    """A layer, with its header changed or not."""
    data = rng.choice(layers())
    n = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        return data
    header = json.loads(data[8 : 8 + n])
    for _ in range(rng.choice([1, 1, 1, 2])):
        if rng.random() < 0.3:
            config = json.loads(header["__metadata__"]["attngrad"]) if "__metadata__" in header else {}
            header["__metadata__"] = {"attngrad": json.dumps(spoil_json(rng, config))}
        else:
            spoiled = spoil_json(rng, header)
            header = spoiled if isinstance(spoiled, dict) else header
            if not isinstance(header.get("__metadata__"), dict) or "attngrad" not in header["__metadata__"]:
                break
            if not isinstance(header["__metadata__"]["attngrad"], str):
                break
            try:
                json.loads(header["__metadata__"]["attngrad"])
            except ValueError:
                break
    text = json.dumps(header).encode("utf-8", "replace")
    length = rng.choice([len(text)] * 12 + [0, 1, n, len(text) + 1, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + text + data[8 + n :]


def read_layer(data: bytes) -> str:
    """Through ``MultiHeadAttention.load``; what was read must compute, and survive another save."""
    path = place() / "layer.safetensors"
    path.write_bytes(data)
    try:
        layer = attngrad.MultiHeadAttention.load(path)
    except (TypeError, ValueError) as error:
        return refused(error, "MultiHeadAttention.load(")
    x = np.ones((3, layer.d_model), layer.dtype)
    key, value = np.ones((2, layer.kdim), layer.dtype), np.ones((2, layer.vdim), layer.dtype)
    y = layer(x, key, value)
    layer.backward(y)
    layer.save(path)
    again = attngrad.MultiHeadAttention.load(path)
    assert again.params.keys() == layer.params.keys()
    assert all(p.tobytes() == again.params[name].tobytes() for name, p in layer.params.items())
    assert repr(again) == repr(layer)
    return "read"


# --- JSON -------------------------------------------------------------------------------------------------------------


@cache
def trace_text() -> str:
    q = np.random.default_rng(0).standard_normal((1, 2, 2))
    return attngrad.trace(q, q, q, q, causal=True).to_json()


def trace(rng: random.Random) -> bytes:
    """A trace as JSON."""
    return json.dumps(spoil_json(rng, json.loads(trace_text()))).encode()


def read_trace(data: bytes) -> str:
    """Through ``Trace.from_json``; what was read must render."""
    try:
        found = attngrad.Trace.from_json(data.decode("utf-8", "replace"))
    except (TypeError, ValueError) as error:
        return refused(error, "Trace.from_json: ")
    found.to_json(), found.to_latex()
    return "read"


@cache
def results_value() -> Any:
    found = json.loads(RESULTS.read_text())
    found["rows"] = found["rows"][:3]
    return found


def results(rng: random.Random) -> bytes:
    """Results of a benchmark."""
    return json.dumps(spoil_json(rng, results_value())).encode()


def read_results(data: bytes) -> str:
    """Through ``python -m benchmarks --load``."""
    path = place() / "results.json"
    path.write_bytes(data)
    status, _, errors = command("--load", str(path), of=benchmark)
    if status == 0 or not errors:  # 1 without a word: a row of the results tells of a failure
        return "read"
    assert status == 2, (status, errors)
    assert errors.startswith("Error: bench: --load must name results"), errors
    return "refused"


KINDS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], str]]] = {
    "npz": (npz, read_npz),
    "safetensors": (safetensors, read_layer),
    "trace": (trace, read_trace),
    "results": (results, read_results),
}


def draw(number: int) -> tuple[str, bytes]:
    """The kind and the bytes of the file of this number."""
    rng = random.Random(number)  # noqa: S311
    kind = rng.choices(list(KINDS), (12, 12, 4, 1))[0]
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        data = KINDS[kind][0](rng)
    return kind, spoil(rng, data) if rng.random() < 0.25 else data


def describe(number: int) -> str:
    """Kind and bytes of the file of this number."""
    kind, data = draw(number)
    return f"{kind}: {data!r}"


def judge(number: int) -> str:
    """Whether the file of this number was "read" or "refused"."""
    watch = watching()
    kind, data = draw(number)
    with watch:
        word = KINDS[kind][1](data)
    assert not (place() / "trapped").exists()
    return f"{kind} {word}"
