"""Recorded inputs: an audit with the activations of a real step, and the smallest slice of them that still fails.

The candidate is called once on the whole. Its results are judged by batch and key head, which attention does not mix,
so that the dense truth fits in memory. Where they are wrong, ever smaller parts of the tokens are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attngrad.auditor.candidate import array_of
from attngrad.auditor.cases import Case
from attngrad.auditor.layouts import Layout
from attngrad.auditor.plans import AXES, Dims
from attngrad.auditor.report import symbol
from attngrad.auditor.sizes import Adapt
from attngrad.auditor.truth import Observation, Truth
from attngrad.core.arrays import NDArray
from attngrad.core.checks import fail
from attngrad.core.dtypes import BFLOAT16, KERNEL_DTYPES, SENTENCE, TABLE

ARRAYS = ("q", "k", "v", "dout")
OPTIONS = ("mask", "bias", "sinks")
LARGEST = 1 << 20
"""Scores of one head, the most that the truth is computed for."""
SMALL = 1 << 14
_TELLING = 6
_CALLS = {"quick": 60, "default": 200, "full": 400}
Ranges = dict[str, tuple[int, int]]
"""First and last + 1, along the axes b (batch), g (key head), t (queries), s (keys)."""


def read(path: str) -> dict[str, NDArray]:
    """The arrays of a safetensors file."""
    import safetensors

    kinds = {d.safetensors: d.numpy for d in TABLE} | {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
    kinds["BOOL"] = np.dtype(bool)
    deserialize: Any = safetensors.deserialize
    try:
        found = deserialize(Path(path).read_bytes())
    except safetensors.SafetensorError as error:
        fail(ValueError, "audit", "inputs", "be a safetensors file, and complete", f"{path!r} ({error})")
    arrays = {}
    for name, x in found:
        if x["dtype"] not in kinds:
            fail(TypeError, "audit", f"inputs[{name!r}]", f"be {SENTENCE}", x["dtype"])
        arrays[name] = np.frombuffer(x["data"], kinds[x["dtype"]]).reshape(x["shape"])
    return arrays


def checked(inputs: object) -> dict[str, NDArray] | None:
    """Recorded inputs as arrays of one dtype that the auditor knows; None where there are none."""
    if inputs is None:
        return None
    if not isinstance(inputs, Mapping):
        fail(
            TypeError,
            "audit",
            "inputs",
            "be a mapping of arrays",
            type(inputs).__name__,
            'Use {"q": q, "k": k, "v": v}.',
        )
    known = (*ARRAYS, *OPTIONS, "cu_seqlens_q", "cu_seqlens_k")
    for name in inputs:
        if name not in known:
            fail(ValueError, "audit", "inputs", f"have only the names {', '.join(known)}", repr(name))
    if missing := [name for name in ("q", "k", "v") if name not in inputs]:
        fail(ValueError, "audit", "inputs", "have q, k and v", f"none for {', '.join(missing)}")
    found = {}
    for name, x in inputs.items():
        array = _bfloat16(x) if str(getattr(x, "dtype", "")) == "torch.bfloat16" else array_of(x)
        if isinstance(array, str):
            fail(TypeError, "audit", f"inputs[{name!r}]", "be an array", array)
        found[name] = array
    for name in ("k", "v", "dout"):
        if name in found and found[name].dtype != found["q"].dtype:
            fail(
                TypeError, "audit", f"inputs[{name!r}]", f"be of the dtype of q, {found['q'].dtype}", found[name].dtype
            )
    if found["q"].dtype not in KERNEL_DTYPES:
        fail(TypeError, "audit", "inputs", f"be {SENTENCE}", found["q"].dtype)
    return found


def _bfloat16(x: Any) -> NDArray:
    import torch

    found: NDArray = x.detach().cpu().contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return found


def case_of(inputs: Mapping[str, NDArray], layout: Layout, options: Mapping[str, Any], seed: int) -> Case:
    """The case that the inputs are, in the shapes of the auditor; dout and tangents are made where none are given."""
    axes = layout.axes if not layout.merged else ""
    for name in ("q", "k", "v"):
        if layout.merged or layout.stack is not None or inputs[name].ndim != len(axes):
            rule = f"have the axes ({layout.words}), as its layout has"
            fail(ValueError, "audit", f"inputs[{name!r}]", rule, f"shape {inputs[name].shape}", "Give the layout.")
    q, k, v = (dict(zip(axes, inputs[name].shape, strict=True)) for name in ("q", "k", "v"))
    n = Dims(q.get("b", 1), q.get("h", 1), k.get("h", 1), q["t"], k["t"], q["d"], v["d"])
    if n.t * n.s > LARGEST:
        got = f"{n.t} x {n.s}"
        fail(ValueError, "audit", "inputs", "have at most 1024 x 1024 scores per head", got, "Record fewer tokens.")
    shape = Case("recorded", n, {})
    arrays = {name: layout.read(name, inputs[name], shape) for name in ARRAYS if name in inputs}
    for name, x in arrays.items():
        expected = tuple(getattr(n, axis) for axis in AXES[name])
        if x.shape != expected:
            fail(ValueError, "audit", f"inputs[{name!r}]", f"be {expected} beside q, k and v", f"shape {x.shape}")
    rng = np.random.default_rng(seed)
    arrays.setdefault("dout", rng.standard_normal((n.b, n.hq, n.t, n.e)).astype(inputs["q"].dtype))
    given = {**options, **{name: inputs[name] for name in OPTIONS if name in inputs}}
    moved = arrays | {name: given[name] for name in ("bias", "sinks") if name in given}
    arrays |= {f"{name}_dot": rng.standard_normal(x.shape).astype(x.dtype) for name, x in moved.items()}
    if layout.name == "packed":
        lengths = [np.diff(inputs.get(f"cu_seqlens_{x}", [0, size])) for x, size in (("q", n.t), ("k", n.s))]
        given["segments"] = tuple(np.repeat(np.arange(len(x)), x)[None] for x in lengths)
    held = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return Case("recorded", n, held, given, by_sequence=layout.name == "packed")


def sizes_in(inputs: Mapping[str, NDArray], layout: Layout) -> Adapt:
    """The lengths and widths of recorded inputs in a layout, which a candidate takes; None where it has other axes."""

    def adapt(n: Dims) -> Dims | None:
        if any(inputs[name].ndim != len(layout.axes) for name in ("q", "k", "v")):
            return None
        q, k, v = (dict(zip(layout.axes, inputs[name].shape, strict=True)) for name in ("q", "k", "v"))
        return replace(n, t=q["t"], s=k["t"], d=q["d"], e=v["d"])

    return adapt


def part(case: Case, at: Ranges) -> Case:
    """A slice of a case."""
    n, group = case.dims, case.dims.hq // case.dims.hk
    (b0, b1), (g0, g1), (t0, t1), (s0, s1) = (at[axis] for axis in "bgts")
    span = {"b": (b0, b1), "hk": (g0, g1), "hq": (g0 * group, g1 * group), "t": (t0, t1), "s": (s0, s1)}

    def cut(name: str, x: Any) -> Any:
        if name == "segments":
            return tuple(y[:, slice(*span[axis])] for y, axis in zip(x, "ts", strict=True))
        axes = AXES.get(name.removesuffix("_dot"))
        if axes is None or not isinstance(x, np.ndarray):
            return x
        own = zip(axes[len(axes) - x.ndim :], x.shape, strict=True)
        return np.ascontiguousarray(x[tuple(slice(*span[a]) if a in span and m != 1 else slice(None) for a, m in own)])

    small = replace(n, b=b1 - b0, hk=g1 - g0, hq=(g1 - g0) * group, t=t1 - t0, s=s1 - s0)
    return Case(
        case.name, small,
        {name: cut(name, x) for name, x in case.arrays.items()},
        {name: cut(name, x) for name, x in case.options.items()},
        by_sequence=case.by_sequence,
    )  # fmt: skip


def whole(n: Dims) -> Ranges:
    """All of a case."""
    return {"b": (0, n.b), "g": (0, n.hk), "t": (0, n.t), "s": (0, n.s)}


def parts(case: Case, results: Mapping[str, NDArray]) -> Iterator[tuple[Ranges, Case, dict[str, NDArray]]]:
    """A recorded case and its results by batch and key head."""
    n, group = case.dims, case.dims.hq // case.dims.hk
    for b in range(n.b):
        for g in range(n.hk):
            at = {**whole(n), "b": (b, b + 1), "g": (g, g + 1)}
            heads = {n.hk: slice(g, g + 1), n.hq: slice(g * group, (g + 1) * group)}
            own = {
                name: x[b : b + 1, heads[x.shape[1]]]
                for name, x in results.items()
                if x.ndim > 2 and x.shape[0] == n.b and x.shape[1] in heads
            }
            yield at, part(case, at), own


@dataclass
class Recorded:
    """The audit of one recorded case; ``told`` is the smallest slice that fails, as code."""

    case: Case
    layout: Layout
    effort: str
    told: str = ""

    def observe(self, session: Any, results: Mapping[str, NDArray]) -> None:
        """Judge the results of the whole; of what is right, one part stands for all."""
        wrong: list[tuple[Ranges, Observation]] = []
        right: Observation | None = None
        for at, case, own in parts(self.case, results):
            truth = Truth(case, session.dtype)
            kept = {name: x for name, x in own.items() if truth.value(name) is not None}
            o = Observation(truth, kept)
            if all(j.right for j in o.judgements.values()):
                right = right or o
            else:
                wrong.append((at, o))
                if len(wrong) == 2:
                    break
        session.observations += [o for _, o in wrong] or ([right] if right is not None else [])
        if wrong:
            self._narrow(session, *wrong[0], _CALLS[self.effort])

    def _narrow(self, session: Any, at: Ranges, o: Observation, calls: int) -> None:
        """Ever smaller slices in which the first wrong result still is; the small ones tell the mistake."""
        name = next(n for n, j in o.judgements.items() if not j.right)
        last, telling = o, []
        while calls > 0:
            for smaller in self._smaller(at, last.judgements[name].where):
                calls -= 1
                found = self._fails(session, smaller, name)
                if found is not None:
                    at, last = smaller, found
                    telling += [found] if found.size <= SMALL else []
                    break
                if calls <= 0:
                    break
            else:
                break
        session.observations += [x for x in telling[-_TELLING:] if x is not o]
        self.told = self._code(session, at, last, name)

    def _fails(self, session: Any, at: Ranges, name: str) -> Observation | None:
        case = part(self.case, at)
        case = replace(case, name=f"recorded{self._index(at)}")
        adapt = session.target.adapt
        if adapt is not None and adapt(case.dims) != case.dims:
            return None
        results = session.call(case).results
        truth = Truth(case, session.dtype)
        kept = {n: x for n, x in results.items() if truth.value(n) is not None}
        if name not in kept:
            return None
        found = Observation(truth, kept)
        return None if found.judgements[name].right else found

    def _smaller(self, at: Ranges, where: tuple[int, ...] | None) -> Iterator[Ranges]:
        """Parts of a slice, the smallest first: around the worst entry, halves, one less at either end."""
        tied = bool(self.case.options.get("causal") or self.case.options.get("window"))
        if tied:  # a slice elsewhere would be another mask
            (_, t1), (_, s1) = at["t"], at["s"]
            for cut in sorted({t1 // 2, t1 // 4, t1 - t1 // 4, t1 - 1}):
                if 0 < cut < t1 and s1 - (t1 - cut) > 0:
                    yield {**at, "t": (0, cut), "s": (0, s1 - (t1 - cut))}
            return
        for axis in "ts":
            first, end = at[axis]
            size = end - first
            spans = {(first, first + half) for half in (size // 8, size // 2)} | {
                (end - half, end) for half in (size // 8, size // 2)
            }
            if where is not None and len(where) == 4 and size > 4:
                middle = first + min(where[2], size - 1)
                spans.add((max(first, middle - size // 16), min(end, middle + size // 16 + 1)))
            spans |= (
                {(first + 1, end), (first, end - 1)}
                if size <= 32
                else {(first + size // 8, end), (first, end - size // 8)}
            )
            for span in sorted(spans, key=lambda x: x[1] - x[0]):
                if 0 < span[1] - span[0] < size:
                    yield {**at, axis: span}

    def _index(self, at: Ranges) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in (at[axis] for axis in "bgt")) + "]"

    def _code(self, session: Any, at: Ranges, o: Observation, name: str) -> str:
        """The slice as code, in the layout of the candidate."""
        group = self.case.dims.hq // self.case.dims.hk
        lines = [f"# {symbol(name)} is wrong in this slice of the recorded inputs, the smallest found."]
        got, truth = o.results[name].astype(np.float64), np.asarray(o.truth.value(name), np.float64)
        with np.printoptions(precision=6, threshold=24, linewidth=100):
            lines += [f"# {line}" for line in f"{name} should be\n{truth}\nbut it is\n{got}".splitlines()]
        for array in ARRAYS:
            keys = array in ("k", "v")
            heads = at["g"] if keys else (at["g"][0] * group, at["g"][1] * group)
            span = {"b": at["b"], "h": heads, "t": at["s" if keys else "t"], "d": (None, None)}
            index = ", ".join(":" if span[a][0] is None else f"{span[a][0]}:{span[a][1]}" for a in self.layout.axes)
            lines.append(f'{array} = inputs["{array}"][{index}]')
        called: str = session.target.code.replace("{heads}", str(o.truth.case.dims.hq)).replace("{options}", "")
        return "\n".join([*lines, called]) + "\n"
