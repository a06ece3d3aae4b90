"""Options and shapes: ``do(call)`` spoils a good call. Each is tried in every function that has the option."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from bad_inputs.row import Errors, Row

F = np.finfo(np.float64)


def option(name: str, error: Errors | None = None, words: str = "", /, **options: Any) -> Row:
    """These options, given."""
    return Row(name, lambda call: call.options.update(options), error, words)


def argument(name: str, error: Errors | None = None, words: str = "", /, **arguments: Any) -> Row:
    """These arguments in place of the good ones; where one is callable, of the good one."""

    def do(call: Any) -> None:
        for key, x in arguments.items():
            call[key] = x(call[key]) if callable(x) else x

    return Row(name, do, error, words)


NOT_REAL = "must be a real number; got "
OPTIONS = [
    option("an unknown option", TypeError, r"unknown option 'casual'\. Did you mean 'causal'\?", casual=True),
    option("an option unlike any", TypeError, r"unknown option 'zzz'\. Options are: scale, causal", zzz=1),
    option("scale: text", TypeError, rf"scale {NOT_REAL}'1' \(str\)", scale="1"),
    option("scale: True", TypeError, rf"scale {NOT_REAL}True", scale=True),
    option("scale: complex", TypeError, rf"scale {NOT_REAL}1j", scale=1j),
    option("scale: a list", TypeError, f"scale {NOT_REAL}list", scale=[1.0]),
    option("scale: an array of one number", TypeError, f"scale {NOT_REAL}(ndarray|Tensor|ArrayImpl)", scale=np.ones(1)),
    option("scale: a Decimal", TypeError, f"scale {NOT_REAL}Decimal", scale=Decimal(1)),
    option("scale: nan", ValueError, "scale must be finite; got nan", scale=float("nan")),
    option("scale: inf", ValueError, "scale must be finite; got inf", scale=float("inf")),
    option("scale: an int beyond float64", ValueError, "scale must be finite", scale=10**400),
    option("scale: so large that it overflows", ValueError, "scale must be finite in float64", scale=1.7e308),
    option("causal: 1", TypeError, r"causal must be True or False; got 1 \(int\)", causal=1),
    option("causal: 1.5", TypeError, r"causal must be True or False; got 1\.5", causal=1.5),
    option("causal: None", TypeError, "causal must be True or False; got None", causal=None),
    option("causal: text", TypeError, "causal must be True or False; got 'yes'", causal="yes"),
    option("window: an int", TypeError, r"window must be a pair \(left, right\); got 3", window=3),
    option("window: text", TypeError, r"window must be a pair \(left, right\); got '11'", window="11"),
    option("window: an array", TypeError, "window must be a pair .*; got (ndarray|Tensor|ArrayImpl)", window=np.ones(2, int)),
    option("window: three sides", ValueError, "window must be a pair .*; got 3 values", window=(1, 2, 3)),
    option("window: no sides", ValueError, "window must be a pair .*; got 0 values", window=()),
    option("window: negative", ValueError, r"window must have sides >= 0; got \(-1, 0\)\. None on a side", window=(-1, 0)),
    option("window: floats", TypeError, r"window must be an integer; got 1\.5", window=(1.5, 0)),
    option("window: a float that is whole", TypeError, r"window must be an integer; got 1\.0", window=(1.0, 0)),
    option("window: booleans", TypeError, "window must be an integer; got True", window=(True, 0)),
    option("window: nan", TypeError, "window must be an integer; got nan", window=(float("nan"), 0)),
    option("offset: a float", TypeError, r"offset must be an integer.*; got 1\.5", offset=1.5),
    option("offset: True", TypeError, "offset must be an integer; got True", offset=True),
    option("offset: text", TypeError, "offset must be an integer.*; got '1'", offset="1"),
    option("offset: beyond 2**61", ValueError, r"offset must be within 2\*\*61 of zero", offset=2**61, causal=True),
    option("offset: below -2**61", ValueError, r"offset must be within 2\*\*61 of zero", offset=-(2**61), causal=True),
    option("offset: beyond 64 bits", ValueError, r"offset must be within 2\*\*61 of zero", offset=2**70, causal=True),
    option("softcap: 0", ValueError, r"softcap must be positive; got 0\.0\. None means no cap", softcap=0.0),
    option("softcap: negative", ValueError, "softcap must be positive", softcap=-1.0),
    option("softcap: nan", ValueError, "softcap must be finite", softcap=float("nan")),
    option("softcap: inf", ValueError, "softcap must be finite", softcap=float("inf")),
    option("softcap: text", TypeError, f"softcap {NOT_REAL}'2'", softcap="2"),
    option("softcap: True", TypeError, f"softcap {NOT_REAL}True", softcap=True),
    option("softcap: subnormal", ValueError, r"softcap must be from 2\*\*-1000 to 2\*\*1000 in float64", softcap=5e-324),
    option("softcap: nearly infinite", ValueError, r"softcap must be from 2\*\*-1000 to", softcap=float(F.max)),
    option("scale over softcap: beyond float64", ValueError, "scale must be finite", scale=1e200, softcap=1e-200),
    option("dropout: 1", ValueError, r"dropout must be in \[0, 1\); got 1\.0", dropout=1.0, seed=0),
    option("dropout: above 1", ValueError, r"dropout must be in \[0, 1\)", dropout=2, seed=0),
    option("dropout: negative", ValueError, r"dropout must be in \[0, 1\)", dropout=-0.1, seed=0),
    option("dropout: nan", ValueError, "dropout must be finite", dropout=float("nan"), seed=0),
    option("dropout: text", TypeError, f"dropout {NOT_REAL}'0.1'", dropout="0.1", seed=0),
    option("dropout: None", TypeError, f"dropout {NOT_REAL}None", dropout=None, seed=0),
    option("dropout: True", TypeError, f"dropout {NOT_REAL}True", dropout=True, seed=0),
    option("dropout without a seed", ValueError, r"seed must be given where dropout is; got None\. Pass", dropout=0.1),
    option("seed: a float", TypeError, r"seed must be an integer.*; got 1\.0", dropout=0.1, seed=1.0),
    option("seed: text", TypeError, "seed must be an integer.*; got '1'", dropout=0.1, seed="1"),
    option("seed: True", TypeError, "seed must be an integer.*; got True", dropout=0.1, seed=True),
    option("seed: negative", ValueError, r"seed must be in \[0, 2\*\*64\); got -1", dropout=0.1, seed=-1),
    option("seed: 2**64", ValueError, r"seed must be in \[0, 2\*\*64\)", dropout=0.1, seed=2**64),
    option("return_lse: text", TypeError, "return_lse must be True or False; got 'yes'", return_lse="yes"),
    option("return_lse: None", TypeError, "return_lse must be True or False; got None", return_lse=None),
    # what is right, if unusual
    option("scale: 0", scale=0.0),
    option("scale: negative", scale=-2),
    option("scale: subnormal", scale=5e-324),
    option("scale: huge, so that one key wins", scale=1e150),
    option("scale: a NumPy scalar", scale=np.float32(0.5)),
    option("scale: a Fraction", scale=Fraction(1, 3)),
    option("causal: a NumPy bool", causal=np.True_),
    option("window: a list", window=[1, 1]),
    option("window: NumPy integers", window=(np.int8(1), np.uint64(1))),
    option("window: no side bounded", window=(None, None)),
    option("window: of zero width", window=(0, 0)),
    option("window: at the limit of 32 bits", window=(2**31 - 1, 2**31)),
    option("window: at the limit of 64 bits", window=(2**63 - 1, 2**63)),
    option("window: beyond 64 bits", window=(2**100, 2**100)),
    option("offset: NumPy integer", offset=np.int8(1), causal=True),
    option("offset: at its limit", offset=2**61 - 1, causal=True),
    option("offset: at its lower limit", offset=-(2**61) + 1, causal=True),
    option("offset and window: both far", offset=2**61 - 1, window=(2**61, 0)),
    option("offset and window: both far, the other way", offset=-(2**61) + 1, window=(0, 2**61)),
    option("offset and window: the farthest", offset=-(2**61) + 1, window=(2**62 - 1, 2**62 - 1), causal=True),
    option("offset without causal or window", offset=3),
    option("softcap: small", softcap=2.0**-1000, scale=2.0**-998),
    option("softcap: large", softcap=2.0**1000),
    option("dropout: tiny", dropout=5e-324, seed=0),
    option("dropout: nearly 1", dropout=1 - 2.0**-53, seed=0),
    option("dropout: 0 with a seed", dropout=0.0, seed=7),
    option("dropout: an int", dropout=0, seed=7),
    option("seed: 0", dropout=0.5, seed=0),
    option("seed: 2**64 - 1", dropout=0.5, seed=2**64 - 1),
    option("seed: a NumPy integer", dropout=0.5, seed=np.uint64(2**63)),
]  # fmt: skip


def ones(*shape: int, dtype: Any = np.float64) -> Any:
    return np.ones(shape, dtype)


BROADCAST = r"must broadcast to .*\(2, 4, 3, 5\)"
ARRAYS = [
    argument("mask: floats", TypeError, "mask must be boolean; got dtype float64.*use bias", mask=ones(3, 5)),
    argument("mask: integers", TypeError, "mask must be boolean; got dtype int64", mask=ones(3, 5, dtype=np.int64)),
    argument("mask: bytes of 0 and 1", TypeError, "mask must be boolean; got dtype uint8", mask=ones(5, dtype=np.uint8)),
    argument("mask: objects", TypeError, "mask must (be boolean; got dtype|have a dtype that JAX has; got) object", mask=ones(3, 5, dtype=object)),
    argument("mask: too many queries", ValueError, f"mask {BROADCAST}", mask=ones(4, 5, dtype=bool)),
    argument("mask: too many axes", ValueError, f"mask {BROADCAST}", mask=ones(1, 2, 4, 3, 5, dtype=bool)),
    argument("mask: a padding mask (B, S) as it is", ValueError, f"mask {BROADCAST}", mask=ones(2, 5, dtype=bool)),
    argument("mask: empty", ValueError, f"mask {BROADCAST}", mask=ones(3, 0, dtype=bool)),
    argument("bias: too few keys", ValueError, f"bias {BROADCAST}.*got shape \\(5, 3\\)", bias=ones(5, 3)),
    argument("bias: too many axes", ValueError, f"bias {BROADCAST}", bias=ones(1, 1, 1, 1, 5)),
    argument("bias: key heads", ValueError, f"bias {BROADCAST}", bias=ones(2, 2, 3, 5)),
    argument("bias: empty", ValueError, f"bias {BROADCAST}", bias=ones(0)),
    argument("sinks: one per key head", ValueError, r"sinks must have shape \(4,\), one logit per query head", sinks=ones(2)),
    argument("sinks: a number", ValueError, r"sinks must have shape \(4,\)", sinks=ones()),
    argument("sinks: with a batch", ValueError, r"sinks must have shape \(4,\)", sinks=ones(2, 4)),
    option("segments: one array", TypeError, r"segments must be a pair", segments=ones(5, dtype=int)),
    option("segments: text", TypeError, "segments must be a pair", segments="ab"),
    option("segments: three", ValueError, "segments must be a pair .*3 values", segments=(ones(3, dtype=int),) * 3),
    argument("segments: floats", TypeError, "q_segments must have an integer dtype", q_segments=ones(3), k_segments=ones(5)),
    argument(
        "segments: booleans",
        TypeError,
        "q_segments must have an integer dtype; got bool",
        q_segments=ones(3, dtype=bool),
        k_segments=ones(5, dtype=bool),
    ),
    argument(
        "segments: too short",
        ValueError,
        r"k_segments must have 5 ids along axis -1, one per token; got shape \(4,\)",
        q_segments=ones(3, dtype=int),
        k_segments=ones(4, dtype=int),
    ),
    argument(
        "segments: a number",
        ValueError,
        "q_segments must have 3 ids along axis -1",
        q_segments=ones(dtype=int),
        k_segments=ones(5, dtype=int),
    ),
    argument(
        "segments: another batch",
        ValueError,
        "q_segments must broadcast to",
        q_segments=ones(3, 3, dtype=int),
        k_segments=ones(5, dtype=int),
    ),
    argument("offset: an array of floats", TypeError, "offset must have an integer dtype; got float64", offset=ones(2)),
    argument("offset: an array of bools", TypeError, "offset must have an integer dtype; got bool", offset=ones(2, dtype=bool)),
    argument("offset: another batch", ValueError, r"offset must broadcast to the leading axes.*\(2,\)", offset=ones(3, dtype=int)),
    argument("offset: an array beyond 2**61", ValueError, r"offset must be within 2\*\*61", offset=np.array([0, 2**62])),
    argument(
        "offset: an unsigned array beyond 2**61",
        ValueError,
        r"offset must be within 2\*\*61",
        offset=np.array([0, 2**64 - 1], np.uint64),
    ),
    # what is right, if unusual
    argument("mask: one number", mask=ones(dtype=bool)),
    argument("mask: all hidden", mask=~ones(3, 5, dtype=bool)),
    argument("mask: bytes that are neither 0 nor 1", mask=np.array([0, 1, 2, 128, 255], np.uint8).view(bool)),
    argument("bias: one number", bias=ones(), sinks=ones(4)),
    argument("bias: one per key", bias=np.linspace(-1, 1, 5)),
    argument("offset: an array of one number", offset=np.array(2), q_segments=None),
    Row("offset: int8", lambda c: (c.options.update(causal=True), c.arguments.update(offset=np.array([-128, 1], np.int8)))),
    Row("offset: uint8", lambda c: (c.options.update(causal=True), c.arguments.update(offset=np.array([255, 1], np.uint8)))),
    Row("offset: uint64", lambda c: (c.options.update(causal=True), c.arguments.update(offset=np.array([2, 1], np.uint64)))),
    Row("offset: big-endian", lambda c: (c.options.update(causal=True), c.arguments.update(offset=np.array([2, 1], ">i8")))),
    Row(
        "offset: an array at its limits",
        lambda c: (c.options.update(causal=True), c.arguments.update(offset=np.array([2**61 - 1, 1 - 2**61]))),
    ),
    argument(
        "segments: ids at the limits of int64",
        q_segments=np.array([-(2**63), 0, 2**63 - 1]),
        k_segments=np.array([2**63 - 1, -(2**63), 0, 1, -1]),
    ),
    argument(
        "segments: ids that agree in their low 32 bits",
        q_segments=np.array([0, 2**32, 2**33]),
        k_segments=np.array([0, 2**32, 0, 2**33, 5]),
    ),
    argument(
        "segments: uint64 beside int64",
        q_segments=np.array([2**64 - 1, 0, 1], np.uint64),
        k_segments=np.array([-1, 0, 1, 1, 0]),
    ),
    argument(
        "segments: big-endian beside int8",
        q_segments=np.array([1, 0, -1], ">i4"),
        k_segments=np.array([1, 0, -1, -128, 127], np.int8),
    ),
]  # fmt: skip

SHAPES = [
    argument("q: a number", ValueError, "q must have at least 2 axes", q=np.array(3.0)),
    argument("q: one axis", ValueError, r"q must have at least 2 axes.*got shape \(8,\)", q=ones(8)),
    argument("k: fewer axes than q", ValueError, "k must have as many axes as q", k=lambda k: k[0]),
    argument("v: fewer axes than q", ValueError, "v must have as many axes as q", v=lambda v: v[0]),
    argument("k: another batch", ValueError, r"k must have .*leading axes \(2,\).*do not broadcast", k=lambda k: k[:1]),
    argument("k: heads that do not divide", ValueError, r"k must have 4 or a divisor of 4 heads \(axis -3\), like q; got 3\. Repeat or regroup", k=ones(2, 3, 5, 4), v=ones(2, 3, 5, 6)),
    argument("k: more heads than q", ValueError, "k must have 4 or a divisor of 4 heads", k=ones(2, 8, 5, 4), v=ones(2, 8, 5, 6)),
    argument("k: no heads", ValueError, "k must have 4 or a divisor of 4 heads", k=lambda k: k[:, :0], v=lambda v: v[:, :0]),
    argument("v: other heads than k", ValueError, r"v must have 2 heads \(axis -3\), like k; got 4", v=ones(2, 4, 5, 6)),
    argument("k: other features than q", ValueError, r"k must have 4 features \(axis -1\), like q", k=lambda k: k[..., :3]),
    argument("v: other tokens than k", ValueError, r"v must have 5 tokens \(axis -2\), like k", v=lambda v: v[..., :4, :]),
]  # fmt: skip
COTANGENTS = [
    argument("dout: another shape", ValueError, r"dout must have the shape of out, \(2, 4, 3, 6\)", dout=lambda x: x[:1]),
    argument("dout: the shape of q", ValueError, "dout must have the shape of out", dout=ones(2, 4, 3, 4)),
    argument("dout: would broadcast", ValueError, "dout must have the shape of out", dout=ones(1, 1, 1, 6)),
    argument("dlse: the shape of out", ValueError, r"dlse must have the shape of lse, \(2, 4, 3\)", dlse=ones(2, 4, 3, 6)),
    argument("dout_dot: another shape", ValueError, "dout_dot must have the shape of out", dout_dot=lambda x: x[:1]),
    argument("q_dot: another shape", ValueError, "q_dot must have the shape of q", q_dot=lambda x: x[:, :1]),
    argument("k_dot: the shape of q", ValueError, "k_dot must have the shape of k", k_dot=ones(2, 4, 3, 4)),
    argument("bias_dot without bias", ValueError, "bias_dot was given without bias. Pass bias=", bias_dot=ones(3, 5)),
    argument("sinks_dot without sinks", ValueError, "sinks_dot was given without sinks. Pass sinks=", sinks_dot=ones(4)),
]  # fmt: skip
