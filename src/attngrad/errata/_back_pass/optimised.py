"""The class that is called optimised: its results, its operations, its time."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._back_pass.layer import Layer
from attngrad.errata._claim import Cases, Finding, relative_error
from attngrad.errata._heads import right_ds
from attngrad.formulas.case import AWKWARD, softmax, t

Backward = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array, Array]]


def _finish(ds: Array, dv: Array, q: Array, k: Array) -> tuple[Array, Array, Array]:
    root = np.sqrt(q.shape[-1])
    return np.matmul(ds, k) / root, np.matmul(ds.transpose(0, 1, 3, 2), q) / root, dv


def _class_1(q: Array, k: Array, v: Array, a: Array, dout: Array) -> tuple[Array, Array, Array]:
    """The arithmetic of the first class."""
    da, dv = np.matmul(dout, v.transpose(0, 1, 3, 2)), np.matmul(a, dout)
    ds = da * a
    ds = ds - np.mean(ds, axis=-1, keepdims=True)
    return _finish(ds, dv, q, k)


def _class_2(q: Array, k: Array, v: Array, a: Array, dout: Array) -> tuple[Array, Array, Array]:
    """The arithmetic of the second class: the factors change places, and the mean is subtracted in place."""
    da, dv = np.matmul(dout, v.transpose(0, 1, 3, 2)), np.matmul(a, dout)
    ds = a * da
    ds -= np.mean(ds, axis=-1, keepdims=True)
    return _finish(ds, dv, q, k)


class _Counting(np.ndarray[Any, Any]):
    """An array that counts the operations on it, by name and size of the result."""

    counts: Counter[tuple[str, str, int]]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [np.asarray(x) for x in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(np.asarray(x) for x in kwargs["out"])
        result = np.asarray(getattr(ufunc, method)(*arrays, **kwargs))
        self.counts[ufunc.__name__, method, result.size] += 1
        return result.view(type(self))


def operations(backward: Backward, *arrays: Array) -> Counter[tuple[str, str, int]]:
    """The array operations that ``backward`` does, with their sizes."""
    counts: Counter[tuple[str, str, int]] = Counter()
    counting = type("Counting", (_Counting,), {"counts": counts})
    backward(*(np.asarray(x).view(counting) for x in arrays))
    return counts


def _medians(*functions: Callable[[], object], rounds: int = 15) -> list[float]:
    """Median seconds of each, run in turn."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for spent, f in zip(seconds, functions, strict=True):
            start = time.perf_counter()
            f()
            spent.append(time.perf_counter() - start)
    return [statistics.median(x) for x in seconds]


def _is_optimised(cases: Cases) -> Finding:
    """Whether the second class does less work: by its results and operations. The time is shown, and judges nothing."""
    batch, heads, tokens, depth = 32, 4, 10, 32  # the sizes of the document's example
    rng = np.random.default_rng(cases.seed)
    q, k, v, dout = rng.standard_normal((4, batch, heads, tokens, depth))
    arrays = (q, k, v, softmax(q @ t(k) / np.sqrt(depth)), dout)
    first, second = _class_1(*arrays), _class_2(*arrays)
    identical = all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
    counts, others = operations(_class_1, *arrays), operations(_class_2, *arrays)
    before, after = _medians(lambda: _class_1(*arrays), lambda: _class_2(*arrays))
    head = cases.get(Layer, AWKWARD).head
    evidence = (
        f"results {'bit-identical' if identical else 'different'}; {counts.total()} array operations in class 1, "
        f"{'the same' if counts == others else 'others'} in class 2"
    )
    timing = f"class 2 over class 1, now: {after / before:.2f}"
    holds = not (identical and counts == others)
    return Finding(holds, None, relative_error(right_ds(head), head.ds), evidence, timing)


CHECKS = {"back-pass-23": _is_optimised}
