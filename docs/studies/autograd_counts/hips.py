"""HIPS autograd: every NumPy call, by a subclass of ndarray."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from autograd_counts.record import Buffer, D, Operation, arrays


class Recording(np.ndarray):
    """An ndarray that records what NumPy does with it; results are of the same kind."""

    log: list[Operation] | None = None
    alive: list[np.ndarray] = []  # noqa: RUF012

    @classmethod
    def note(cls, name: str, given: Iterable[Any], made: np.ndarray, product: bool) -> None:
        """Record an operation, unless what it made is a view of what it was given."""
        if cls.log is None:
            return
        inputs = [x for x in given if isinstance(x, np.ndarray)]
        reads, writes = [numpy_buffer(x) for x in inputs], [numpy_buffer(made)]
        cls.alive += [*inputs, made]
        cls.log.append(Operation(name, reads, writes, (reads[0], reads[1]) if product else None))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **settings: Any) -> Any:
        ordinary = [x.view(np.ndarray) if isinstance(x, Recording) else x for x in inputs]
        if out is not None:
            settings["out"] = tuple(x.view(np.ndarray) for x in out)
        result = np.asarray(getattr(ufunc, method)(*ordinary, **settings))
        self.note(ufunc.__name__, ordinary, result, product=ufunc is np.matmul)
        return out[0] if out is not None else result.view(Recording)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.log or ())
        result = super().__array_function__(func, types, args, kwargs)
        if self.log is not None and len(self.log) == before and isinstance(result, np.ndarray):
            given = [x for x in args if isinstance(x, np.ndarray)]
            if not any(np.may_share_memory(result, x) for x in given):
                self.note(func.__name__, given, result, product=func in (np.dot, np.einsum, np.tensordot))
        return result


def numpy_buffer(x: np.ndarray) -> Buffer:
    """An array by the memory it lies in; what is repeated by a stride of zero is read once."""
    root = x
    while isinstance(root.base, np.ndarray):
        root = root.base
    distinct = math.prod(n for n, stride in zip(x.shape, x.strides, strict=True) if stride)
    return Buffer(root.__array_interface__["data"][0], x.size, distinct * x.itemsize)


def hips_operations() -> list[Operation]:
    """Every NumPy operation of the backward of HIPS autograd."""
    import autograd.numpy as anp
    from autograd import make_vjp
    from autograd.numpy.numpy_boxes import ArrayBox
    from autograd.numpy.numpy_vspaces import ArrayVSpace

    ArrayBox.register(Recording)
    ArrayVSpace.register(Recording)

    def attention(qkv: Any) -> Any:
        q, k, v = qkv
        scores = anp.matmul(q, anp.swapaxes(k, -1, -2)) / math.sqrt(D)
        e = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        return anp.matmul(e / anp.sum(e, axis=-1, keepdims=True), v)

    q, k, v, dout = (x.view(Recording) for x in arrays())
    Recording.alive = []
    before: list[Operation] = []
    recorded: list[Operation] = []
    try:
        Recording.log = before
        pullback, _ = make_vjp(attention)((q, k, v))
        Recording.log = recorded
        pullback(dout)
    finally:
        Recording.log = None
    # np.zeros takes no array, so it is not seen when it is called, but when its result is read for the first time.
    known = {b.key for op in before for b in (*op.reads, *op.writes)} | {numpy_buffer(dout).key}
    complete = []
    for op in recorded:
        for b in (b for b in op.reads if b.key not in known):
            known.add(b.key)
            complete.append(Operation("zeros", [], [b]))
        known |= {b.key for b in op.writes}
        complete.append(op)
    return complete
