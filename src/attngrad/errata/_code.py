"""Document 001, self-attention gradients with NumPy code: what its two classes compute, line by line."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._case import AWKWARD, Layer, attend, complex_step, softmax, t
from attngrad.errata._claim import Cases, Claim, Entry, Finding, entry, relative_error
from attngrad.errata._self_attention import mean_ds, right_ds
from attngrad.formulas.report import figure

LEARNING_RATE = 0.001

# --- names -----------------------------------------------------------------------------------------------------------


class _Projections:
    """Stores a weight under one name and reads it under another."""

    def __init__(self, weight: Array) -> None:
        self.wQ = weight
        self.dWQ = np.zeros_like(self.WQ)  # type: ignore[attr-defined]


def _misnamed_cotangent(dO: Array) -> Array:  # noqa: N803
    """Takes dO, with the letter, and reshapes d0, with the digit."""
    d0 = d0.reshape(dO.shape[0], -1)  # type: ignore[misc] # noqa: F821
    return np.asarray(d0)


def _softmax_of_numpy(c: Layer) -> Array:
    return np.asarray(np.softmax(c.head.s, axis=-1))  # type: ignore[attr-defined]


# --- the examples below the classes ----------------------------------------------------------------------------------


def _printed(code: str, **names: Any) -> tuple[Array, ...]:
    """Run ``code`` with these names defined; give what it prints, without the labels."""
    found: list[Array] = []
    exec(code, {"print": lambda label, *values: found.extend(map(np.array, values)), **names})  # noqa: S102
    return tuple(found)


PRINTS_THE_COTANGENT = 'print("Output shape:", d0.shape)'
PRINTS_THE_OUTPUT = 'print("Output shape:", O.shape)'


def _outputs(c: Layer) -> tuple[Array, Array]:
    """What a forward pass may give the example: the output, and one from which a faulty pass has lost a feature."""
    return _forward(c), _forward(c)[..., :-1]


def _printed_for_each(c: Layer, line: str) -> tuple[Array, ...]:
    return tuple(shape for output in _outputs(c) for shape in _printed(line, O=output, d0=c.dy))


def _what_the_line_prints(c: Layer) -> str:
    pairs = zip(_outputs(c), _printed_for_each(c, PRINTS_THE_COTANGENT), strict=True)
    return ", ".join(f"an output of shape {o.shape} is printed as {tuple(map(int, shape))}" for o, shape in pairs)


_CLASS = """
class OptimizedSelfAttention:
    def __init__(self, d_model):
        self.W = np.eye(d_model)

    def forward(self, query):
        return np.dot(query, self.W)

"""

_EXAMPLE = """
d_model = query.shape[-1]
attention = OptimizedSelfAttention(d_model)
O = attention.forward(query)
print("Output shape:", O.shape)
"""


def _example_in_the_class(c: Layer) -> tuple[Array, ...]:
    """The example stands inside the class body, by its indentation."""
    return _printed(_CLASS + textwrap.indent(_EXAMPLE, "    "), np=np, query=c.x_q)


def _example_after_the_class(c: Layer) -> tuple[Array, ...]:
    return _printed(_CLASS + _EXAMPLE, np=np, query=c.x_q)


# --- heads and projections -------------------------------------------------------------------------------------------


def _reshaped(c: Layer, x: Array) -> Array:
    return x.reshape(c.n.batch, -1, c.n.heads, c.n.depth).transpose(0, 2, 1, 3)


def _joined(c: Layer, x: Array, tokens: int = -1) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(c.n.batch, tokens, c.n.model)


def _forward(c: Layer) -> Array:
    q, k, v = (_reshaped(c, np.dot(x, w)) for x, w in zip(c.inputs, c.weights, strict=True))
    return _joined(c, softmax(np.matmul(q, k.transpose(0, 1, 3, 2)) / np.sqrt(c.n.depth)) @ v)


def _forward_by_slices(c: Layer) -> Array:
    q, k, v = (x @ w for x, w in zip(c.inputs, c.weights, strict=True))
    out = np.empty((c.n.batch, c.n.queries, c.n.model))
    for b in range(c.n.batch):
        for h in range(c.n.heads):
            own = slice(h * c.n.depth, (h + 1) * c.n.depth)
            out[b, :, own] = attend(q[b, :, own], k[b, :, own], v[b, :, own])
    return out


def _projections(c: Layer) -> tuple[Array, Array, Array]:
    """True dQ, dK, dV, heads merged."""
    return c.merge(c.head.dq), c.merge(c.head.dk), c.merge(c.head.dv)


def _weight_gradients(c: Layer) -> tuple[Array, ...]:
    return tuple(np.einsum("bni,bnj->ij", x, d) for x, d in zip(c.inputs, _projections(c), strict=True))


def _axes_where_batch_is_length(c: Layer) -> str:
    x = c.x_q[:, : c.n.batch]
    return f"where batch and length happen to agree the result has {np.dot(x.T, x).ndim} axes"


def _input_gradients(c: Layer, learning_rate: float) -> tuple[Array, ...]:
    """dX = dQ W^T with the weights as they are after a step of ``learning_rate``."""
    moved = [w - learning_rate * d for w, d in zip(c.weights, _weight_gradients(c), strict=True)]
    return tuple(d @ w.T for d, w in zip(_projections(c), moved, strict=True))


def _at_the_next_layer(c: Layer) -> tuple[Array, Array]:
    """Y = Concat(heads) W^O, and the gradient at Concat(heads)."""
    merged = c.merged(c.inputs, c.weights)
    return merged @ c.w_o, complex_step(lambda x: np.sum(c.dy * (x @ c.w_o)), merged)


def _uniform_weights(c: Layer) -> str:
    even = np.full_like(c.head.a, 1.0 / c.n.keys)
    ds = even * c.head.da
    mean, exact = ds - ds.mean(-1, keepdims=True), ds - even * ds.sum(-1, keepdims=True)
    return f"right only where every key weighs the same [{figure(relative_error(mean, exact))}]"


# --- the class that is called optimised ------------------------------------------------------------------------------

Backward = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array, Array]]


def _finish(ds: Array, dv: Array, q: Array, k: Array) -> tuple[Array, Array, Array]:
    root = np.sqrt(q.shape[-1])
    return np.matmul(ds, k) / root, np.matmul(ds.transpose(0, 1, 3, 2), q) / root, dv


def _plain(q: Array, k: Array, v: Array, a: Array, dout: Array) -> tuple[Array, Array, Array]:
    """The arithmetic of the first class."""
    da, dv = np.matmul(dout, v.transpose(0, 1, 3, 2)), np.matmul(a, dout)
    ds = da * a
    ds = ds - np.mean(ds, axis=-1, keepdims=True)
    return _finish(ds, dv, q, k)


def _optimised(q: Array, k: Array, v: Array, a: Array, dout: Array) -> tuple[Array, Array, Array]:
    """The arithmetic of the second class: the factors change places, and the mean is subtracted in place."""
    da, dv = np.matmul(dout, v.transpose(0, 1, 3, 2)), np.matmul(a, dout)
    ds = a * da
    ds -= np.mean(ds, axis=-1, keepdims=True)
    return _finish(ds, dv, q, k)


class _Counting(np.ndarray[Any, Any]):
    """An array that counts the operations on it, by name and size of the result."""

    counts: Counter[tuple[str, str, int]]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(x) for x in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(np.asarray(x) for x in kwargs["out"])
        result = np.asarray(getattr(ufunc, method)(*plain, **kwargs))
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
    first, second = _plain(*arrays), _optimised(*arrays)
    identical = all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
    counts, others = operations(_plain, *arrays), operations(_optimised, *arrays)
    before, after = _medians(lambda: _plain(*arrays), lambda: _optimised(*arrays))
    head = cases.get(Layer, AWKWARD).head
    evidence = (
        f"results {'bit-identical' if identical else 'different'}; {counts.total()} array operations in class 1, "
        f"{'the same' if counts == others else 'others'} in class 2"
    )
    timing = f"class 2 over class 1, now: {after / before:.2f}"
    holds = not (identical and counts == others)
    return Finding(holds, None, relative_error(right_ds(head), head.ds), evidence, timing)


CODE: tuple[Entry, ...] = (
    entry(
        "001-10",
        "class 1:10, 15",
        "a weight is stored as wQ and read as WQ",
        "self.wQ = ...; self.dWQ = zeros_like(self.WQ)",
        Claim(
            Layer,
            lambda c: _Projections(c.w_q).dWQ,
            lambda c: np.zeros((c.n.model, c.n.model)),
            lambda c: np.zeros_like(SimpleNamespace(WQ=c.w_q).WQ),
        ),
        wrong="The class cannot be constructed as printed. The second class spells the name right.",
        correct="self.WQ = ...",
    ),
    entry(
        "001-11",
        "classes 1 and 2",
        "heads split, scaled by 1/sqrt(depth), merged",
        "x.reshape(B, -1, H, depth).transpose(0, 2, 1, 3), and back",
        Claim(
            Layer,
            _forward,
            _forward_by_slices,
            evidence=lambda c: "with a softmax of our own; three inputs, so for cross-attention too",
        ),
    ),
    entry(
        "001-12",
        "class 1:48, 2:43",
        "NumPy has no softmax",
        "A = np.softmax(S, axis=-1)",
        Claim(Layer, _softmax_of_numpy, lambda c: c.head.a, lambda c: softmax(c.head.s)),
        wrong="Neither class can run its forward pass.",
        correct="e = np.exp(S - S.max(-1, keepdims=True)); A = e / e.sum(-1, keepdims=True)",
    ),
    entry(
        "001-13",
        "class 1:66-76",
        "the argument is dO, the body reads d0",
        "def backward(self, dO, ...): d0 = d0.reshape(...)",
        Claim(
            Layer,
            lambda c: _misnamed_cotangent(c.dy),
            lambda c: c.dy.reshape(c.n.batch, -1),
            lambda c: c.dy.reshape(c.dy.shape[0], -1),
        ),
        wrong="A letter O and a digit 0: the backward pass stops at its third line. The second class has dO.",
        correct="dO = dO.reshape(...)",
    ),
    entry(
        "001-14",
        "class 1:75, 2:65",
        "the gradient at the weights, in code",
        "dA = matmul(dO, V.transpose(0, 1, 3, 2))",
        Claim(Layer, lambda c: np.matmul(c.head.dout, c.head.v.transpose(0, 1, 3, 2)), lambda c: c.head.da),
    ),
    entry(
        "001-15",
        "class 1:76, 2:66",
        "the gradient at V, in code",
        "dV = matmul(A.transpose(0, 1, 2, 3), dO)",
        Claim(
            Layer,
            lambda c: np.matmul(c.head.a.transpose(0, 1, 2, 3), c.head.dout),
            lambda c: c.head.dv,
            lambda c: np.matmul(c.head.a.transpose(0, 1, 3, 2), c.head.dout),
        ),
        wrong="transpose(0, 1, 2, 3) leaves every axis where it is, so this is A dO; the formula has A^T dO.",
        correct="dV = matmul(A.transpose(0, 1, 3, 2), dO)",
    ),
    entry(
        "001-16",
        "class 1:79-80, 2:69-70",
        "the gradient at the scores, in code",
        "dS = dA * A; dS = dS - mean(dS, axis=-1, keepdims)",
        Claim(Layer, lambda c: mean_ds(c.head), lambda c: c.head.ds, lambda c: right_ds(c.head), _uniform_weights),
        wrong="No stability measure but another function: what is subtracted is A times the row sum.",
        correct="dS = dA * A; dS -= A * dS.sum(-1, keepdims=True)",
    ),
    entry(
        "001-17",
        "class 1:83-84, 2:73-74",
        "the gradients at Q and K, in code",
        "dQ = matmul(dS, K) / sqrt(depth), dK = matmul(dS^T, Q) / sqrt(depth)",
        Claim(
            Layer,
            lambda c: (
                np.matmul(c.head.ds, c.head.k) / np.sqrt(c.n.depth),
                np.matmul(c.head.ds.transpose(0, 1, 3, 2), c.head.q) / np.sqrt(c.n.depth),
            ),
            lambda c: (c.head.dq, c.head.dk),
            evidence=lambda c: "given a right dS, which the classes do not have; dK contradicts 001-8",
        ),
    ),
    entry(
        "001-18",
        "class 1:68, 87-89, 2:58, 77-79",
        "keys and values are given the length of the queries",
        "n = dO.shape[1]; dK.reshape(batch, n, d_model)",
        Claim(
            Layer,
            lambda c: (_joined(c, c.head.dk, c.dy.shape[1]), _joined(c, c.head.dv, c.dy.shape[1])),
            lambda c: (c.merge(c.head.dk), c.merge(c.head.dv)),
            lambda c: (_joined(c, c.head.dk, c.x_k.shape[1]), _joined(c, c.head.dv, c.x_v.shape[1])),
        ),
        wrong="The class takes a query and a key of its own; where they differ in length the backward stops.",
        correct="dK.reshape(batch, key.shape[1], d_model), and dV likewise",
    ),
    entry(
        "001-19",
        "class 1:92-94, 2:82-84",
        "the gradients at the weights, on arrays of three axes",
        "dWQ = np.dot(query.T, dQ), and dWK, dWV",
        Claim(
            Layer,
            lambda c: tuple(np.dot(x.T, d) for x, d in zip(c.inputs, _projections(c), strict=True)),
            lambda c: c.d_weights,
            _weight_gradients,
            _axes_where_batch_is_length,
        ),
        wrong="query.T turns all three axes round, so batch meets tokens. Both should be summed over.",
        correct='dWQ = einsum("bni,bnj->ij", query, dQ)',
    ),
    entry(
        "001-20",
        "class 1:97-104, 2:87-94",
        "the weights move before the input gradients are formed",
        "WQ -= lr * dWQ; ...; dQ_input = np.dot(dQ, WQ.T)",
        Claim(
            Layer,
            lambda c: _input_gradients(c, LEARNING_RATE),
            lambda c: c.d_inputs,
            lambda c: _input_gradients(c, 0.0),
            lambda c: (
                f"at the learning rate of the example, {LEARNING_RATE}; at 0.1 "
                f"[{figure(relative_error(_input_gradients(c, 0.1), c.d_inputs))}]"
            ),
        ),
        wrong="The input's gradient needs the weights of the forward pass, not those of the next step.",
        correct="form dQ_input, dK_input and dV_input first, then update",
    ),
    entry(
        "001-21",
        "class 1:132",
        "the printed output shape is that of the cotangent",
        PRINTS_THE_COTANGENT,
        Claim(
            Layer,
            lambda c: _printed_for_each(c, PRINTS_THE_COTANGENT),
            lambda c: tuple(np.array(output.shape) for output in _outputs(c)),
            lambda c: _printed_for_each(c, PRINTS_THE_OUTPUT),
            _what_the_line_prints,
        ),
        wrong="The cotangent is made from the sizes, never from O, so the line says nothing of the forward pass.",
        correct=PRINTS_THE_OUTPUT,
    ),
    entry(
        "001-22",
        "classes 1 and 2",
        "there is no output projection W^O",
        "output = the heads, merged; and dO enters the heads as it comes",
        Claim(
            Layer,
            lambda c: (c.merged(c.inputs, c.weights), c.dy),
            _at_the_next_layer,
            lambda c: (_forward(c) @ c.w_o, c.dy @ c.w_o.T),
        ),
        wrong="Multi-head attention ends with Y = Concat(heads) W^O. Without it the heads never mix, "
        "and there is one gradient too few.",
        correct="Y = O W^O; backward: dW^O = O^T dY, dO = dY (W^O)^T",
    ),
    entry(
        "001-23",
        "class 2",
        "the class that is called optimised",
        "class 2 is optimised: it does less work, by matmul and by forming no Jacobian",
        _is_optimised,
        wrong="Both classes use matmul, and neither forms a Jacobian. One subtraction is done in place, which saves "
        "a temporary and what time that takes; the arithmetic is the same, mistakes included.",
        correct="in either class: dS = A o (dA - rowsum(A o dA))",
    ),
)

EXAMPLE: tuple[Entry, ...] = (
    entry(
        "001-39",
        "class 2:98-115",
        "the example stands inside the class body",
        "attention = OptimizedSelfAttention(d_model, num_heads), indented as the methods are",
        Claim(
            Layer,
            _example_in_the_class,
            lambda c: (np.array(c.x_q.shape),),
            _example_after_the_class,
            lambda c: "run with a class of two methods in place of theirs",
        ),
        wrong="While its body runs the class has no name yet. The first class has its example at the margin.",
        correct="the example at the margin, after the class",
    ),
)
