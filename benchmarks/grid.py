"""The table of cases, group by group. Levels: what --quick, the default and --full run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from benchmarks.cases import Case, dims
from benchmarks.passes import PASSES

QUICK, DEFAULT, FULL = 0, 1, 2
LEVELS = ("quick", "default", "full")
BOTH = ("", "causal")
FORWARD = ("forward",)
BACKWARD = ("forward + backward",)
TANGENTS = ("jvp", "hvp")

TITLES = {
    "sizes": "Sizes, full and causal, float32",
    "window": "Sliding window: each query sees the keys up to w to its left",
    "masks and bias": "Boolean masks and bias (dbias: the bias is differentiated too)",
    "grouped heads": "Grouped query heads",
    "cross": "Cross-attention and chunked prefill: T != S",
    "decoding": "Decoding: one query against the cache, bound by memory",
    "head sizes": "Head sizes",
    "float64": "float64",
    "bfloat16": "bfloat16 (f32: attngrad in float32, interleaved)",
    "float16": "float16 (f32: attngrad in float32, interleaved)",
    "overhead": "Overhead of a call",
    "jvp and hvp": "JVP and HVP, all tangents given (own: our fwd, for hvp fwd+bwd; NumPy approximates by differences)",
    "one tangent": "JVP and HVP along q_dot, k_dot or v_dot alone (own and NumPy as above)",
}
"""The groups, in the order in which they run."""


def _sizes() -> Iterator[Case]:
    shapes = {
        (32, 4, 10, 32): QUICK,
        (8, 12, 16, 64): DEFAULT,
        (8, 12, 32, 64): DEFAULT,
        (8, 12, 64, 64): QUICK,
        (8, 12, 128, 64): DEFAULT,
        (4, 8, 256, 64): DEFAULT,
        (4, 8, 512, 64): QUICK,
        (4, 8, 777, 64): FULL,
        (2, 8, 1024, 64): DEFAULT,
        (1, 8, 2048, 64): QUICK,
        (1, 4, 4096, 64): DEFAULT,
        (1, 4, 8192, 128): DEFAULT,
        (1, 1, 16384, 64): DEFAULT,
    }
    for shape, level in shapes.items():
        for kind in BOTH:
            long = kind == "causal" and shape[2] > 1000
            yield Case("sizes", dims(*shape), kind, level=max(level, DEFAULT) if long else level)


def _options() -> Iterator[Case]:
    yield Case("window", dims(1, 8, 2048, 64), "window 256", level=QUICK)
    yield Case("window", dims(1, 8, 2048, 64), "window 64", level=FULL)
    yield Case("window", dims(1, 4, 8192, 64), "window 256", level=FULL)
    for batch, t in ((4, 512), (2, 1024)):
        for kind in ("mask 50%", "padding", "bias BHTS", "bias HTS"):
            quick = t == 512 and kind in ("padding", "bias HTS")
            yield Case("masks and bias", dims(batch, 8, t, 64), kind, level=QUICK if quick else DEFAULT)
        for kind in ("dbias BHTS", "dbias HTS"):
            yield Case("masks and bias", dims(batch, 8, t, 64), kind, passes=BACKWARD)


def _heads() -> Iterator[Case]:
    for batch, t, level in ((4, 512, QUICK), (2, 1024, DEFAULT)):
        for kind in BOTH:
            yield Case("grouped heads", dims(batch, 8, t, 64, key_heads=2), kind, level=DEFAULT if kind else level)
    yield Case("grouped heads", dims(4, 8, 512, 64, key_heads=1), level=FULL)
    yield Case("cross", dims(4, 8, 128, 64, s=1024), level=QUICK)
    yield Case("cross", dims(4, 8, 128, 64, s=1024), "causal")
    yield Case("cross", dims(4, 8, 1024, 64, s=128))
    yield Case("cross", dims(4, 8, 16, 64, s=2048), level=FULL)
    for batch, s, level in ((1, 4096, QUICK), (1, 16384, DEFAULT), (8, 4096, DEFAULT), (8, 16384, DEFAULT)):
        yield Case("decoding", dims(batch, 32, 1, 128, key_heads=8, s=s), passes=FORWARD, level=level)
    for batch, s in ((1, 4096), (8, 4096)):
        yield Case("decoding", dims(batch, 8, 1, 64, s=s), passes=FORWARD, level=FULL)
    for d in (32, 80, 96, 128, 256):
        for kind in BOTH:
            quick = d == 80 and not kind
            yield Case("head sizes", dims(4, 8, 512, d), kind, level=QUICK if quick else DEFAULT)
    for d in (37, 160, 512):
        yield Case("head sizes", dims(4, 8, 512, d), level=FULL)
    for d, e in ((64, 128), (128, 64)):
        yield Case("head sizes", dims(4, 8, 512, d, e=e), level=DEFAULT if e == 128 else FULL)


def _dtypes() -> Iterator[Case]:
    for dtype in ("float64", "bfloat16", "float16"):
        for batch, heads, t in ((8, 12, 128), (4, 8, 512), (1, 8, 2048)):
            for kind in BOTH:
                quick = t == 512 and not kind and dtype != "float16"
                yield Case(dtype, dims(batch, heads, t, 64), kind, dtype, level=QUICK if quick else DEFAULT)
        yield Case(dtype, dims(32, 4, 10, 32), dtype=dtype, level=FULL)
    yield Case("overhead", dims(1, 1, 10, 32), level=QUICK)


def _tangents() -> Iterator[Case]:
    shapes = {
        (1, 1, 10, 32): DEFAULT,
        (32, 4, 10, 32): QUICK,
        (1, 8, 16, 64): DEFAULT,
        (1, 1, 128, 64): FULL,
        (8, 12, 64, 64): QUICK,
        (4, 8, 256, 64): DEFAULT,
        (1, 8, 777, 64): FULL,
        (1, 8, 1024, 64): QUICK,
        (1, 8, 2048, 64): DEFAULT,
    }
    for shape, level in shapes.items():
        for kind in BOTH:
            yield Case("jvp and hvp", dims(*shape), kind, passes=TANGENTS, level=level)
    for dtype in ("float64", "bfloat16"):
        for kind in BOTH:
            yield Case("jvp and hvp", dims(4, 8, 256, 64), kind, dtype, TANGENTS)
        yield Case("jvp and hvp", dims(1, 8, 1024, 64), dtype=dtype, passes=TANGENTS)
    alone = tuple(name for name, one in PASSES.items() if one.whole)
    for shape in ((4, 8, 256, 64), (1, 8, 1024, 64)):
        for kind in BOTH:
            yield Case("one tangent", dims(*shape), kind, passes=alone)


CASES: tuple[Case, ...] = (*_sizes(), *_options(), *_heads(), *_dtypes(), *_tangents())


def matches(text: str, pattern: str) -> bool:
    """Whether ``pattern`` is part of ``text``, or, where it has * or ?, matches all of it. Case does not matter.

    >>> matches("sizes 8,12,64,64 causal forward", "causal"), matches("sizes 8,12,64,64", "sizes*64")
    (True, True)
    """
    text, pattern = text.lower(), pattern.lower()
    return fnmatch(text, pattern) if set("*?") & set(pattern) else pattern in text


def select(level: int, only: Sequence[str] = (), dtypes: Sequence[str] = ()) -> list[tuple[Case, str]]:
    """The (case, pass) pairs of a run; ``only`` holds patterns for "group case pass", of which one must match."""
    return [
        (case, name)
        for case in CASES
        for name in case.passes
        if case.level <= level
        and (not only or any(matches(f"{case.group} {case.label} {name}", pattern) for pattern in only))
        and (not dtypes or case.dtype in dtypes)
    ]
