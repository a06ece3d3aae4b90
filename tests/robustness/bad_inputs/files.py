"""Files: ``do(path)`` writes one. Layers are loaded from it, or ``attngrad explain --input`` reads it."""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attngrad import MultiHeadAttention
from bad_inputs.row import Row

Write = Callable[[Path], Any]

# --- safetensors: 8 bytes of length, a header of JSON, the numbers --------------------------------------------------------

LAYER = MultiHeadAttention(8, 2, bias=True, rng=3)
OURS = {"layer": "MultiHeadAttention", "num_heads": 2, "num_kv_heads": 2, "rope": None}
SAFETENSORS = "the file must be safetensors, and complete"
OTHER = "the file must be of a MultiHeadAttention, by its metadata 'attngrad'"


@cache
def whole() -> bytes:
    """A good file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good"
        LAYER.save(path)
        return path.read_bytes()


def assemble(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def parts() -> tuple[dict[str, Any], bytes]:
    """Header and numbers of the good file."""
    good = whole()
    n = int.from_bytes(good[:8], "little")
    return json.loads(good[8 : 8 + n]), good[8 + n :]


def header(change: Callable[[dict[str, Any]], Any]) -> Write:
    """The good file, but for its header."""

    def write(path: Path) -> None:
        head, data = parts()
        change(head)
        path.write_bytes(assemble(json.dumps(head).encode(), data))

    return write


def config(**changes: Any) -> Write:
    """The good file, but for the configuration in its metadata."""
    return header(lambda head: head["__metadata__"].update(attngrad=json.dumps(OURS | changes)))


def metadata(value: Any) -> Write:
    return header(lambda head: head.update(__metadata__=value))


def text_header(make: Callable[[str], str]) -> Write:
    """The good file, but for the text of its header."""

    def write(path: Path) -> None:
        head, data = parts()
        path.write_bytes(assemble(make(json.dumps(head)).encode(), data))

    return write


def cut(size: Callable[[int], int]) -> Write:
    def write(path: Path) -> None:
        good = whole()
        path.write_bytes(good[: size(len(good))])

    return write


def duplicate(text: str) -> str:
    """The first tensor twice, by the same name."""
    head = json.loads(text)
    name = next(n for n in head if n != "__metadata__")
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(head[name])}}}"


def bytes_of(data: bytes) -> Write:
    return lambda path: path.write_bytes(data)


def shape_of(name: str, shape: list[int]) -> Write:
    return header(lambda head: head[name].update(shape=shape))


def offsets_of(name: str, offsets: list[int]) -> Write:
    return header(lambda head: head[name].update(data_offsets=offsets))


def overlap(head: dict[str, Any]) -> None:
    head["w_k"]["data_offsets"] = list(head["w_q"]["data_offsets"])


LAYER_FILES = [
    Row("empty", bytes_of(b""), ValueError, SAFETENSORS),
    Row("text", bytes_of(b"not a checkpoint at all"), ValueError, SAFETENSORS),
    Row("a pickle", bytes_of(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00K\x01."), ValueError, SAFETENSORS),
    Row("seven bytes", cut(lambda n: 7), ValueError, SAFETENSORS),
    Row("eight bytes", cut(lambda n: 8), ValueError, SAFETENSORS),
    Row("cut in the header", cut(lambda n: 100), ValueError, SAFETENSORS),
    Row("cut in the numbers", cut(lambda n: n // 2), ValueError, SAFETENSORS),
    Row("one byte short", cut(lambda n: n - 1), ValueError, SAFETENSORS),
    Row("one byte too many", lambda path: path.write_bytes(whole() + b"x"), ValueError, SAFETENSORS),
    Row("a header of 2**64 - 1 bytes", bytes_of(assemble(b"{}", b"", 2**64 - 1)), ValueError, SAFETENSORS),
    Row("a header of 2**63 bytes", bytes_of(assemble(b"{}", b"", 2**63)), ValueError, SAFETENSORS),
    Row("a header of 2**40 bytes", bytes_of(assemble(b"{}", b"", 2**40)), ValueError, SAFETENSORS),
    Row("a header of one byte more", bytes_of(assemble(b"{}", b"", 3)), ValueError, SAFETENSORS),
    Row("a header of no bytes", bytes_of(assemble(b"", b"")), ValueError, SAFETENSORS),
    Row("a header that is no JSON", bytes_of(assemble(b"{'w': 1}", b"")), ValueError, SAFETENSORS),
    Row("a header that is a list", bytes_of(assemble(b"[1, 2]", b"")), ValueError, SAFETENSORS),
    Row("a header nested without end", bytes_of(assemble(b'{"a":' * 50_000, b"")), ValueError, SAFETENSORS),
    Row("a header that is no UTF-8", bytes_of(assemble(b'{"\xff": 1}', b"")), ValueError, SAFETENSORS),
    Row("a header of no tensors", bytes_of(assemble(b"{}", b"")), ValueError, OTHER),
    Row("offsets that overlap", header(overlap), ValueError, SAFETENSORS),
    Row("offsets past the end", offsets_of("w_q", [0, 2**40]), ValueError, SAFETENSORS),
    Row("offsets backwards", offsets_of("w_q", [256, 0]), ValueError, SAFETENSORS),
    Row("offsets negative", offsets_of("w_q", [-256, 0]), ValueError, SAFETENSORS),
    Row("offsets beyond 64 bits", offsets_of("w_q", [2**64, 2**65]), ValueError, SAFETENSORS),
    Row("a shape of more numbers", shape_of("w_q", [8, 9]), ValueError, SAFETENSORS),
    Row("a shape that overflows", shape_of("w_q", [2**32, 2**32]), ValueError, SAFETENSORS),
    Row("a shape that wraps to the right size", shape_of("w_q", [2**62 + 16, 4]), ValueError, SAFETENSORS),
    Row("a negative shape", shape_of("w_q", [-8, -8]), ValueError, SAFETENSORS),
    Row("a shape of another rank", shape_of("w_q", [64]), ValueError, "w_q must have 2 axes"),
    Row("a shape that does not fit", shape_of("w_q", [4, 16]), ValueError, "must have"),
    Row("an unknown dtype", header(lambda head: head["w_q"].update(dtype="F31")), ValueError, SAFETENSORS),
    Row("integers", header(lambda head: head["w_q"].update(dtype="I32")), ValueError, "tensor 'w_q' must be float64, .*; got I32"),
    Row("another dtype of the same size", header(lambda head: head["w_q"].update(dtype="BF16", shape=[8, 16])), TypeError, "the parameters must be .* all of them the same"),
    Row("a dtype of another size", header(lambda head: head["w_q"].update(dtype="F64")), ValueError, SAFETENSORS),
    Row("a tensor missing", header(lambda head: (head.pop("w_q"), None)), ValueError, SAFETENSORS),
    Row("a tensor of another name", header(lambda head: head.update(w_x=head.pop("w_q"))), ValueError, "'w_q' is missing or unknown"),
    Row("a tensor twice", text_header(duplicate), ValueError, SAFETENSORS),
    Row("metadata of null", metadata(None), ValueError, OTHER),
    Row("metadata that is text", metadata("attngrad"), ValueError, SAFETENSORS),
    Row("metadata of numbers", metadata({"attngrad": 1}), ValueError, SAFETENSORS),
    Row("no metadata", header(lambda head: (head.pop("__metadata__"), None)), ValueError, OTHER),
    Row("metadata of another library", metadata({"format": "pt"}), ValueError, OTHER),
    Row("configuration: no JSON", metadata({"attngrad": "}"}), ValueError, OTHER),
    Row("configuration: a list", metadata({"attngrad": "[1]"}), ValueError, OTHER),
    Row("configuration: nested without end", metadata({"attngrad": "[" * 100_000}), ValueError, OTHER),
    Row("configuration: a number of 5000 digits", metadata({"attngrad": "1" * 5000}), ValueError, OTHER),
    Row("configuration: another layer", config(layer="MLP"), ValueError, OTHER),
    Row("configuration: heads of text", config(num_heads="2"), TypeError, "num_heads must be an integer; got '2'"),
    Row("configuration: heads of 0", config(num_heads=0), ValueError, "num_heads must be positive"),
    Row("configuration: heads that do not divide", config(num_heads=3, num_kv_heads=3), ValueError, "num_heads must divide the 8 columns"),
    Row("configuration: heads of 10**30", config(num_heads=10**30, num_kv_heads=1), ValueError, "num_heads must divide the 8 columns"),
    Row("configuration: rope of nan", config(rope=float("nan")), ValueError, "rope must be finite"),
    Row("configuration: rope of a list", config(rope=[1e4]), TypeError, "rope must be a real number"),
    Row("a folder", lambda path: path.mkdir(), OSError, "x.safetensors"),
    Row("no file", lambda path: None, OSError, "x.safetensors"),
    Row("a pipe", lambda path: os.mkfifo(path), ValueError, "the file must be a regular file"),
    Row("unknown words in the configuration", config(colour="red")),
    Row("spaces before and after the header", text_header(lambda text: text + " " * 64)),
]  # fmt: skip

# --- npz: a zip of npy, each a line that Python reads and the numbers -----------------------------------------------------

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, 4))
GOOD = {"q": Q, "k": K, "v": V}
PLAIN = r"--input must be an \.npz file of plain arrays; .* Write one"
ZIP = r"--input must be a whole \.npz file; .* Write one"


def arrays(**changes: Any) -> Write:
    """A file of q, k and v, with these changed; None: left out."""
    return lambda path: np.savez(path, **{n: x for n, x in (GOOD | changes).items() if x is not None})


def npy(x: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, x)
    return stream.getvalue()


def members(compression: int = zipfile.ZIP_STORED, **changes: bytes) -> Write:
    """A file whose members are these bytes."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, data in ({n: npy(x) for n, x in GOOD.items()} | changes).items():
                file.writestr(f"{name}.npy", data)

    return write


def npy_header(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """An npy file with this header, and few numbers."""
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(line)) + line + bytes(64)


def shape_claim(shape: str) -> bytes:
    return npy_header(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}")


def patched(old: bytes, new: bytes, count: int = -1) -> Write:
    """The good file with some bytes changed."""

    def write(path: Path) -> None:
        np.savez(path, **GOOD)
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, count))

    return write


def encrypted(path: Path) -> None:
    """The flag that says so is set in every header."""
    members()(path)
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(mark)
        while place >= 0:
            data[place + at] |= 1
            place = data.find(mark, place + 4)
    path.write_bytes(bytes(data))


def twice(path: Path) -> None:
    """q is there twice; the last one counts, as in any zip."""
    members()(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("q.npy", npy(Q))


def bomb(path: Path) -> None:
    """A small file that unpacks to much."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name in GOOD:
            file.writestr(f"{name}.npy", npy(GOOD[name]))
        with file.open("mask.npy", "w", force_zip64=True) as member:
            for _ in range(1025):
                member.write(bytes(1 << 20))


def nan(x: np.ndarray, value: float = np.nan) -> np.ndarray:
    x = x.copy()
    x[0, 0, 0] = value
    return x


ARCHIVES = [
    Row("npz: empty", bytes_of(b""), ValueError, ZIP),
    Row("npz: text", bytes_of(b"hello"), ValueError, PLAIN),
    Row("npz: a pickle", bytes_of(b"\x80\x04K\x01."), ValueError, PLAIN),
    Row("npz: cut", lambda path: (arrays()(path), path.write_bytes(path.read_bytes()[:200])), ValueError, ZIP),
    Row("npz: the directory cut", lambda path: (arrays()(path), path.write_bytes(path.read_bytes()[:-30])), ValueError, ZIP),
    Row("npz: one array", lambda path: path.write_bytes(npy(Q)), ValueError, r"must be an \.npz file; got one array in"),
    Row("npz: a member that is no array", members(q=b"hello"), ValueError, "q must be an array; got other bytes"),
    Row("npz: a member of nothing", members(q=b""), ValueError, "q must be an array; got other bytes"),
    Row("npz: a member cut in its header", members(q=npy(Q)[:20]), ValueError, PLAIN),
    Row("npz: a member cut in its numbers", members(q=npy(Q)[:-8]), ValueError, PLAIN),
    Row("npz: a wrong check sum", patched(Q.tobytes()[:8], bytes(8)), ValueError, ZIP),
    Row("npz: encrypted", encrypted, ValueError, PLAIN),
    Row("npz: a bomb", bomb, ValueError, r"--input must hold at most 1,073,741,824 bytes"),
    Row("npz: a shape beyond memory", members(q=shape_claim("(70368744177664,)")), ValueError, PLAIN),
    Row("npz: a shape beyond 64 bits", members(q=shape_claim("(9223372036854775807, 9)")), ValueError, PLAIN),
    Row("npz: a negative shape", members(q=shape_claim("(-8,)")), ValueError, PLAIN),
    Row("npz: a shape of text", members(q=shape_claim("'ab'")), ValueError, PLAIN),
    Row("npz: a header that calls a function", members(q=npy_header("__import__('os').getcwd()")), ValueError, PLAIN),
    Row("npz: a header that is no Python", members(q=npy_header("{'descr: ((((")), ValueError, PLAIN),
    Row("npz: a header nested deeply", members(q=npy_header("(" * 9000)), ValueError, PLAIN),
    Row("npz: a version that is none", members(q=npy_header("{}", (9, 9))), ValueError, PLAIN),
    Row("npz: objects", arrays(q=np.array([None])), ValueError, PLAIN),
    Row("npz: nothing in it", lambda path: np.savez(path), ValueError, "must have q, k and v; q, k, v missing, got nothing"),
    Row("npz: no q", arrays(q=None), ValueError, "must have q, k and v; q missing, got k, v"),
    Row("npz: an unknown array", arrays(kay=K), ValueError, "has an unknown array 'kay'"),
    Row("npz: a path for a name", members(**{"../q": npy(Q)}), ValueError, "has an unknown array '../q'"),
    Row("npz: integers", arrays(q=Q.astype(int)), ValueError, "q must be of a floating dtype; got int64"),
    Row("npz: text in q", arrays(q=np.array(["a"])), ValueError, "trace: q must have dtype"),
    Row("npz: a structured q", arrays(q=Q.view([("re", "f8")])), ValueError, "trace: q must have dtype"),
    Row("npz: complex", arrays(q=Q.astype(complex)), ValueError, "trace: q must have dtype"),
    Row("npz: big-endian", arrays(q=Q.astype(">f8")), ValueError, "trace: q must have dtype .*newbyteorder"),
    Row("npz: nan", arrays(q=nan(Q)), ValueError, "q must be finite; got NaN"),
    Row("npz: inf", arrays(v=nan(V, np.inf)), ValueError, "v must be finite; got infinities"),
    Row("npz: a number for q", arrays(q=np.array(1.0)), ValueError, "trace: q must have at least 2 axes"),
    Row("npz: shapes that do not fit", arrays(k=K[:, :, :2]), ValueError, r"trace: k must have 4 features"),
    Row("npz: no queries", arrays(q=Q[:, :0]), ValueError, r"there is nothing to show; got q of shape \(2, 0, 4\)"),
    Row("npz: too many scores", arrays(q=np.zeros((3000, 1)), k=np.zeros((3000, 1)), v=np.zeros((3000, 1))), ValueError, "at most 4,000,000 scores"),
    Row("npz: one of two segments", arrays(q_segments=np.zeros(3, int)), ValueError, "must have both q_segments and k_segments"),
    Row("npz: offset of a float", arrays(offset=np.array(1.5)), ValueError, "offset must be an integer"),
    Row("npz: scale of two numbers", arrays(scale=np.ones(2)), ValueError, "scale must be one number"),
    Row("npz: scale of none", arrays(scale=np.ones(0)), ValueError, "scale must be one number"),
    Row("npz: scale of text", arrays(scale=np.array("1")), ValueError, "scale must be one number"),
    Row("npz: softcap of a complex number", arrays(softcap=np.array(1j)), ValueError, "softcap must be one number"),
    Row("npz: mask of numbers", arrays(mask=np.ones((3, 3))), ValueError, "trace: mask must be boolean"),
    Row("npz: dout of another shape", arrays(dout=Q[:1]), ValueError, "trace: dout must have the shape of out"),
    Row("npz: a folder", lambda path: path.mkdir(), ValueError, "which is no file"),
    Row("npz: no file", lambda path: None, ValueError, "which is no file"),
    Row("npz: a pipe", lambda path: os.mkfifo(path), ValueError, "which is no file"),
    Row("npz: q twice", twice),
    Row("npz: compressed", members(zipfile.ZIP_LZMA)),
    Row("npz: Fortran order", arrays(q=np.asfortranarray(Q))),
    Row("npz: subnormal", arrays(q=Q * 1e-310)),
    Row("npz: -inf in the bias", arrays(bias=np.where(np.tri(3) > 0, 0.0, -np.inf))),
    Row("npz: float16", arrays(q=Q.astype("f2"), k=K.astype("f2"), v=V.astype("f2"))),
]  # fmt: skip
