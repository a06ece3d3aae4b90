"""The inputs of ``attngrad explain``: the built-in example, words, shapes and files."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.operands import DIFFERENTIABLE, INPUTS, QKV, unflatten
from attngrad.core.options import OPTIONS, STATIC, Kind, Option
from attngrad.explain.trace import Trace, trace

TOKENS = "the cat sat down"
SHAPE = (2, 4, 3)
BYTES = 2**30
"""What a file may hold, unpacked: a small one can claim to be endless."""
LARGEST = 4_000_000
"""Scores of all heads that a trace may have; each is a number of ten matrices."""
_COTANGENTS = ("dout", "dlse", "dout_dot", "dlse_dot")
_DOTS = tuple(f"{name}_dot" for name in DIFFERENTIABLE)
_ARRAYS = tuple(i.name for i in INPUTS if i.kind is not Kind.SEED)
_NUMBERS = tuple(row.name for row in STATIC if row.kind is Kind.NUMBER and row.default is None)
_KNOWN = {*_ARRAYS, *_NUMBERS, *_COTANGENTS, *_DOTS}
"""What a file may have. Dropout is by the command, as its seed is."""


def from_options(given: Mapping[str, Any]) -> Trace:
    """The trace that the options of the command ask for."""
    sources = [name for name in ("input_file", "shape") if given[name] is not None]
    if len(sources) > 1:
        raise ValueError("explain: --shape must come without --input; got both. The file has its shape.")
    tokens = None if given["tokens"] is None else given["tokens"].split()
    if tokens == []:
        raise ValueError("explain: --tokens must have at least one word; got none.")
    if given["input_file"] is not None:
        if given["kv_heads"] is not None:
            raise ValueError("explain: --kv-heads must come without --input; got both. The file has its heads.")
        arrays = read(given["input_file"])
    else:
        arrays, tokens = make(given["shape"], given["kv_heads"], tokens, given["seed"])
    options = _options(given, arrays)
    q, k, v = (arrays.pop(name) for name in "qkv")
    _refuse_large(q.shape, k.shape)
    rng = np.random.default_rng([given["seed"], 1])
    dots: Any = tuple(arrays.pop(name, None) for name in _DOTS)
    if given["tangents"] and all(d is None for d in dots):
        inputs = (q, k, v, *(options.get(name) for name in DIFFERENTIABLE[3:]))
        dots = tuple(None if a is None else rng.standard_normal(a.shape).astype(a.dtype) for a in inputs)
    if "dout" not in arrays and "dlse" not in arrays and q.ndim and v.ndim:  # numbers are refused by trace
        arrays["dout"] = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    tangents = None if all(d is None for d in dots) else dots
    return trace(q, k, v, tangents=tangents, tokens=tokens, **arrays, **options)


def make(
    shape: tuple[int, ...] | None, key_heads: int | None, tokens: list[str] | None, seed: int
) -> tuple[dict[str, NDArray], list[str] | None]:
    """Seeded Gaussian inputs; the embedding of a word depends on the word and the seed alone."""
    if shape is None and tokens is None:
        tokens = TOKENS.split()
    if shape is None:
        shape = (SHAPE[0], len(tokens or ()), SHAPE[2])
    heads, t, d = (1, *shape)[-3:]
    if tokens is not None and len(tokens) != t:
        raise ValueError(f"explain: --tokens must have {t} words, as --shape has tokens; got {len(tokens)}.")
    key_heads = heads if key_heads is None else key_heads
    if heads % key_heads:
        raise ValueError(f"explain: --kv-heads must divide the {heads} heads; got {key_heads}.")
    _refuse_large(shape, shape)
    rng = np.random.default_rng([seed, 0])
    keys = shape if len(shape) == 2 else (*shape[:-3], key_heads, t, d)
    sizes: dict[str, tuple[int, ...]] = {"q": shape, "k": keys, "v": keys}
    if tokens is None:
        return {name: rng.standard_normal(size) for name, size in sizes.items()}, None
    # X W: an embedding for each word, a projection for each head
    width = max(8, d)
    words = [np.random.default_rng([seed, zlib.crc32(word.encode())]) for word in tokens]
    embedded = np.stack([word.standard_normal(width) for word in words])
    arrays = {}
    for name, size in sizes.items():
        weight = rng.standard_normal((*size[:-2], width, d)) / np.sqrt(width)
        arrays[name] = embedded @ weight
    return arrays, tokens


def _options(given: Mapping[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """The options of attention, those of the command over those of the file."""
    q = arrays["q"]
    options = unflatten({name: arrays.pop(name) for name in _ARRAYS if name in arrays and name not in QKV})
    for name, row in OPTIONS.items():
        if row.kind is Kind.OFFSET and name in options and options[name].ndim == 0:
            options[name] = options[name][()]  # an integer, if it is one
        elif name in _NUMBERS and name in arrays:
            options[name] = _one_number(name, arrays.pop(name))
        if given[name] is not None and row.kind is not Kind.SEED:
            options[name] = _value(row, given[name], q)
    options.setdefault("causal", given["input_file"] is None)
    if options.get("dropout"):
        options["seed"] = given["seed"]
    return options


def _value(row: Option, given: Any, q: NDArray) -> Any:
    """What a flag of the command says, as ``attention`` takes it."""
    flag = f"explain: --{row.name}"
    if row.kind in (Kind.PER_HEAD, Kind.IDS) and len(given) != 1:
        raise ValueError(f"{flag} must be one row; got {len(given)}.")
    if row.kind is Kind.PER_HEAD:
        heads = q.shape[-3] if q.ndim > 2 else 1
        if len(given[0]) != heads:
            raise ValueError(f"{flag} must have {heads} numbers, one per head; got {len(given[0])}.")
        return np.array(given[0], q.dtype)
    if row.kind is Kind.IDS:
        ids = np.array(given[0])
        if not (np.abs(ids) < 2**53).all() or not np.array_equal(ids, ids.astype(int)):
            raise ValueError(f"{flag} must be integer ids, one per token; got other numbers.")
        return ids.astype(int), ids.astype(int)
    if row.kind is Kind.PLANE and row.differentiable:
        return np.array(given, q.dtype)
    if row.kind is Kind.PLANE:
        if not np.isin(given, (0.0, 1.0)).all():
            raise ValueError(f"{flag} must be of 0 and 1; got other numbers. For additive terms use --bias.")
        return np.array(given, bool)
    return given


def _one_number(name: str, x: NDArray) -> float:
    if x.size != 1 or x.dtype.kind not in "fiu":
        raise ValueError(f"explain: {name} must be one number; got shape {x.shape}, {x.dtype}. Save it as a float.")
    return float(x.reshape(-1)[0])


def _refuse_large(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    """By the shapes alone: before anything of that size is made."""
    if len(q) >= 2 and len(k) >= 2:
        scores = math.prod(q[:-1]) * k[-2]
        if scores > LARGEST:
            what = f"{scores:,} of q {q} and k {k}"
            raise ValueError(f"explain: a trace must have at most {LARGEST:,} scores; got {what}. Pass a part of it.")
        if max(math.prod(q), math.prod(k)) > 16 * LARGEST:
            what = f"q {q} and k {k}"
            raise ValueError(f"explain: q and k must have at most {16 * LARGEST:,} numbers; got {what}.")


def read(path: str) -> dict[str, Any]:
    """The arrays of an .npz file: q, k and v, and nothing that is not known or not finite."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"explain: --input must name an .npz file; got {path!r}, which is no file.")
    remedy = "Write one with numpy.savez(path, q=q, k=k, v=v, dout=dout)."
    try:
        with file.open("rb") as stream:  # which np.load leaves open where the file is bad
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError(f"explain: --input must be an .npz file; got one array in {path!r}. {remedy}")
            size = sum(member.file_size for member in archive.zip.infolist())
            if size > BYTES:
                raise ValueError(
                    f"explain: --input must hold at most {BYTES:,} bytes; got {size:,}. Pass a part of it."
                )
            arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"explain: --input must be a whole .npz file; got {path!r} ({error}). {remedy}") from error
    except OSError:
        raise
    except Exception as error:  # zipfile, its decompressors and NumPy's parser of headers raise a dozen kinds
        if str(error).startswith("explain:"):
            raise
        raise ValueError(f"explain: --input must be an .npz file of plain arrays; got {path!r}. {remedy}") from error
    missing = [name for name in "qkv" if name not in arrays]
    if missing:
        there = ", ".join(arrays) or "nothing"
        raise ValueError(f"explain: {path!r} must have q, k and v; {', '.join(missing)} missing, got {there}. {remedy}")
    unknown = [name for name in arrays if name not in _KNOWN]
    if unknown:
        raise ValueError(f"explain: {path!r} has an unknown array {unknown[0]!r}. Known: {', '.join(sorted(_KNOWN))}.")
    if ("q_segments" in arrays) != ("k_segments" in arrays):
        raise ValueError(f"explain: {path!r} must have both q_segments and k_segments; got one. Add the other.")
    for name, a in arrays.items():
        if not isinstance(a, np.ndarray):  # the file has a member that is no array: np.load gives its bytes
            raise ValueError(f"explain: {name} must be an array; got other bytes in {path!r}. {remedy}")
        if a.dtype.kind in "iu" and name in ("q", "k", "v", "dout"):
            raise ValueError(f"explain: {name} must be of a floating dtype; got {a.dtype}. Cast it with astype(float).")
        if a.dtype.kind in "fc" and not (np.isfinite(a) | ((name == "bias") & (a == -np.inf))).all():
            bad = "NaN" if np.isnan(a).any() else "infinities"
            raise ValueError(f"explain: {name} must be finite; got {bad} in {path!r}. Hide positions by mask.")
    return arrays
