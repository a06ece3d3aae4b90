"""How smart are automatic differentiation systems? Count what each spends on the backward of attention.

The backward needs four matrix products, dA = dO V^T, dV = A^T dO, dQ = dS K and dK = dS^T Q, and the matrix dS (Omega)
serves two of them. For every system that is installed this script records what its backward really issues, and says:
how many products, whether dQ and dK read the same dS, how many arrays of T x S, how many bytes.

    eager PyTorch      every dispatched operation (TorchDispatchMode)
    fused PyTorch      its one operation; the products inside it from the log of MKL
    torch.compile      the graph given to Inductor, and Inductor's own count of bytes after fusion
    JAX                the jaxpr of the pullback, and the optimised HLO of XLA
    HIPS autograd      every NumPy call, by a subclass of ndarray

Run it: ``python examples/how_smart_is_autograd.py`` (``--json`` for the counts). A system that is missing is named.
It is one file, longer than others here, so that it can be taken along and run anywhere: it needs NumPy alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

# All sizes differ, so that the sizes of a product name it.
BATCH, HEADS, T, S, D, E = 2, 4, 256, 192, 64, 48
PRODUCTS = {(T * S, D): "S", (T * E, S): "O", (T * S, E): "dA", (S * E, T): "dV", (T * D, S): "dQ", (S * D, T): "dK"}
"""By the entries of the result of one head and the length of the sum."""


# --- what is recorded, the same for all ------------------------------------------------------------------------------


class Buffer(NamedTuple):
    """An array: what tells it from others (views of it share the key), how many numbers, how many bytes."""

    key: Hashable
    size: int
    bytes: int


class Operation(NamedTuple):
    """One operation that moves data. ``product`` has the operands of a matrix product, None where it is none."""

    name: str
    reads: list[Buffer]
    writes: list[Buffer]
    product: tuple[Buffer, Buffer] | None = None


class Count(NamedTuple):
    """What one backward spends. ``omega``: once, twice, or why it cannot be told."""

    system: str
    products: list[str]
    omega: str
    score_arrays_written: int
    score_arrays_kept: int
    megabytes: float


def name_product(op: Operation) -> str:
    """Which of the products of attention it is, by its sizes, whatever the layout."""
    assert op.product is not None
    heads, result = BATCH * HEADS, op.writes[0].size
    length = math.isqrt(op.product[0].size * op.product[1].size // (result * heads))
    return PRODUCTS.get((result // heads, length), f"{result // heads} entries over {length}")


def count(system: str, operations: Iterable[Operation], megabytes: float | None = None) -> Count:
    """Products, Omega, arrays of T x S and bytes of a recorded backward."""
    ops = list(operations)
    products = {name_product(op): op for op in ops if op.product is not None}
    names = [name_product(op) for op in ops if op.product is not None]
    scores = BATCH * HEADS * T * S
    omega = "not told: no product for dQ or dK was seen"
    if {"dQ", "dK"} <= products.keys():
        used = [{b.key for b in products[name].product or () if b.size == scores} for name in ("dQ", "dK")]
        omega = "once" if used[0] & used[1] else "twice"
    written = {b.key for op in ops for b in op.writes}
    whole = [b for op in ops for b in op.reads if b.size == scores <= b.bytes]  # a repeated column is none
    kept = {b.key for b in whole} - written
    formed = sum(b.size == scores for op in ops for b in op.writes)
    moved = sum(b.bytes for op in ops for b in (*op.reads, *op.writes)) / 1e6
    return Count(system, names, omega, formed, len(kept), moved if megabytes is None else megabytes)


def least_megabytes(features: int = E) -> float:
    """Q, K, V, O, dO and one number a row read once, dQ, dK, dV written once, in float32."""
    a_head = 2 * (T * D + S * D + S * features) + 2 * T * features + T
    return 4 * BATCH * HEADS * a_head / 1e6


def arrays(features: int = E) -> list[np.ndarray]:
    """q, k, v and dout in float32."""
    rng = np.random.default_rng(0)
    sizes = ((T, D), (S, D), (S, features), (T, features))
    return [rng.standard_normal((BATCH, HEADS, *size), dtype=np.float32) for size in sizes]


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_inputs(features: int = E) -> list[Any]:
    """The inputs as tensors, q, k and v with gradients."""
    import torch

    q, k, v, dout = (torch.from_numpy(x) for x in arrays(features))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def torch_buffer(x: Any) -> Buffer:
    """A tensor by its storage; what is repeated by a stride of zero is read once."""
    size = min(x.numel(), x.untyped_storage().nbytes() // x.element_size())
    return Buffer(x.untyped_storage().data_ptr(), x.numel(), size * x.element_size())


def torch_eager(attention: Callable[..., Any], features: int = E) -> list[Operation]:
    """Every operation that the backward dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import torch

    recorded: list[Operation] = []
    alive: list[Any] = []  # an address must not serve two tensors

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            alive.extend((*given, *made))
            reads, writes = [torch_buffer(x) for x in given], [torch_buffer(x) for x in made]
            is_view = not func._schema.is_mutable and {b.key for b in writes} <= {b.key for b in reads}
            name = func.overloadpacket.__name__
            if not is_view and not name.startswith("empty"):
                product = (reads[0], reads[1]) if name in ("mm", "bmm") else None
                recorded.append(Operation(name, reads, writes, product))
            return result

    q, k, v, dout = torch_inputs(features)
    out = attention(q, k, v)
    with Recorder():
        torch.autograd.grad(out, (q, k, v), dout)
    return recorded


def torch_softmax(q: Any, k: Any, v: Any) -> Any:
    """Attention with torch.softmax."""
    import torch

    return torch.softmax(q @ k.mT / math.sqrt(D), dim=-1) @ v


def torch_written_out(q: Any, k: Any, v: Any) -> Any:
    """Attention with the softmax written out."""
    scores = q @ k.mT / math.sqrt(D)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def torch_fused(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's own attention."""
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@contextmanager
def standard_output() -> Iterator[list[str]]:
    """What is printed meanwhile, by C code too, as lines."""
    lines: list[str] = []
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            lines += file.read().splitlines()


GEMM = re.compile(r"SGEMM\(.,.,(\d+),(\d+),(\d+),\w+,(\w+),\d+,(\w+),\d+,\w+,(\w+),\d+\)")


def torch_fused_products() -> tuple[list[str], str]:
    """The products inside the fused backward, by the calls of MKL, and whether dQ and dK read the same dS.

    The kernel works on tiles, and a product of attention takes T S D multiplications a head: those of all calls,
    divided by that, are the number of products. dS is made where dA was written: addresses tell what dQ and dK read.
    """
    import torch

    if not torch.backends.mkl.is_available():
        return [], "not told: this PyTorch is built without MKL, whose log shows the products"
    q, k, v, dout = torch_inputs(D)
    out = torch_fused(q, k, v)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # calls in order
    try:
        with standard_output() as lines, torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
            torch.autograd.grad(out, (q, k, v), dout)
    finally:
        torch.set_num_threads(threads)
    calls = [match.groups() for line in lines if (match := GEMM.search(line))]
    if not calls:
        return [], "not told: MKL logged no product"
    work = sum(int(m) * int(n) * int(k) for m, n, k, *_ in calls)
    number, rest = divmod(work, BATCH * HEADS * T * S * D)
    assert rest == 0, "the calls are not whole products"
    if number != 5:
        return ["?"] * number, "not told: MKL logged other than five products a tile"
    # A tile: S again, dV from A, dA, then dQ and dK.
    tiles = [calls[i : i + 5] for i in range(0, len(calls), 5)]
    reused = all(dv[5] != da[5] and da[5] in dq[3:5] and da[5] in dk[3:5] for _, dv, da, dq, dk in tiles)
    return ["S", "dV", "dA", "dQ", "dK"], "once" if reused else "twice"


def torch_compiled(features: int = E) -> tuple[list[Operation], int, float]:
    """The backward graph as Inductor gets it; arrays of T x S and megabytes as Inductor counts them after fusing."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    import torch

    found: list[tuple[Any, int, float]] = []

    def inner(graph: Any, inputs: Any, **settings: Any) -> Any:
        if settings.get("is_backward"):
            record_original_output_strides(graph)
            lowered = GraphLowering(graph, example_inputs=inputs, is_backward=True)
            handlers = V.set_graph_handler(lowered), V.set_debug_handler(DebugContext())
            with handlers[0], handlers[1], V.set_fake_mode(detect_fake_mode(inputs)):
                lowered.run(*inputs)
                lowered._update_scheduler()
                found.append((graph, written_scores(lowered.scheduler), lowered.count_bytes()[0] / 1e6))

        def boxed(args: list[Any]) -> Any:
            return graph(*args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    torch._dynamo.reset()
    q, k, v, dout = torch_inputs(features)
    compiled = torch.compile(
        torch_softmax, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)
    )
    torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    [(graph, written, megabytes)] = found
    return list(graph_operations(graph)), written, megabytes


def written_scores(scheduler: Any) -> int:
    """The arrays of T x S that Inductor's kernels write for others: what only one kernel uses stays inside it."""
    found = 0
    for kernel in scheduler.nodes:
        for made in kernel.get_outputs():
            outside = {use.node for use in made.users} - {*kernel.get_nodes()}
            size = made.node.maybe_get_size() if outside else None  # None too for what stands for several
            found += size is not None and math.prod(map(int, size)) == BATCH * HEADS * T * S
    return found


FX_VIEWS = ("view", "permute", "expand", "reshape", "transpose", "unsqueeze", "squeeze", "_unsafe_view", "t", "getitem")


def graph_operations(graph: Any) -> Iterator[Operation]:
    """The nodes of an FX graph that make something new."""
    import torch

    keys: dict[Any, Hashable] = {}

    def buffers(node: Any) -> list[Buffer]:
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        return [Buffer(keys.get(node, node.name), x.numel(), x.numel() * x.element_size()) for x in tensors]

    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = node.target.__name__.split(".")[0]
        if name in FX_VIEWS:
            keys[node] = keys.get(node.args[0], node.args[0].name)
            continue
        reads = [b for x in node.all_input_nodes for b in buffers(x)]
        product = (reads[0], reads[-1]) if name in ("mm", "bmm") else None
        yield Operation(name, reads, buffers(node), product)


# --- JAX -------------------------------------------------------------------------------------------------------------


def jax_pullback() -> tuple[Any, Any]:
    """The pullback of attention as JAX makes it, and dout."""
    import jax

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(D), axis=-1) @ v

    q, k, v, dout = arrays()
    _, pullback = jax.vjp(attention, q, k, v)
    return pullback, dout


JAX_VIEWS = ("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy")


def jaxpr_operations() -> list[Operation]:
    """The equations of the jaxpr of the pullback, inner ones in place; views are free."""
    import jax

    pullback, dout = jax_pullback()
    recorded: list[Operation] = []
    keys: dict[int, Hashable] = {}
    alive: list[Any] = []

    def buffer(x: Any) -> Buffer:
        alive.append(x)
        return Buffer(keys.get(id(x), id(x)), x.aval.size, x.aval.size * x.aval.dtype.itemsize)

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = [p for p in equation.params.values() if hasattr(p, "jaxpr") or hasattr(p, "eqns")]
            if inner:
                body = getattr(inner[0], "jaxpr", inner[0])
                for x, y in zip(body.invars, equation.invars, strict=True):
                    keys[id(x)] = buffer(y).key
                walk(body)
                for x, y in zip(equation.outvars, body.outvars, strict=True):
                    keys[id(x)] = buffer(y).key
                continue
            reads, writes = [buffer(x) for x in equation.invars], [buffer(x) for x in equation.outvars]
            name = equation.primitive.name
            if name in JAX_VIEWS:
                keys[id(equation.outvars[0])] = reads[0].key
                continue
            recorded.append(Operation(name, reads, writes, (reads[0], reads[1]) if name == "dot_general" else None))

    walk(jax.make_jaxpr(pullback)(dout).jaxpr)
    return recorded


def hlo_text() -> str:
    """The optimised HLO of the pullback, as XLA compiles it for this machine."""
    import jax

    pullback, dout = jax_pullback()
    return str(jax.jit(lambda back, dy: back(dy)).lower(pullback, dout).compile().as_text())


HLO_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$")
HLO_SHAPE = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")
HLO_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
HLO_VIEWS = ("bitcast", "transpose", "copy", "reshape", "get-tuple-element")


def hlo_computations(text: str) -> tuple[dict[str, list[Any]], str]:
    """The instructions of each computation, (name, type, operation, operands, attributes), and the entry's name."""
    found: dict[str, list[Any]] = {}
    name = entry = ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%(\S+) \(.*\{$", line):
            name = head.group(2)
            entry = name if head.group(1) else entry
            found[name] = []
        elif instruction := HLO_LINE.match(line):
            own, kind, operation, argument, attributes = instruction.groups()
            found[name].append((own, kind, operation, argument, attributes or ""))
    return found, entry


def hlo_operations(text: str) -> list[Operation]:
    """What the entry computation runs, one operation a fusion; a product inside a fusion is seen with its operands."""
    computations, entry = hlo_computations(text)
    recorded: list[Operation] = []

    def measured(kind: str) -> tuple[int, int]:
        shapes = [(int(bits), math.prod(map(int, re.findall(r"\d+", d)))) for bits, d in HLO_SHAPE.findall(kind)]
        return sum(n for _, n in shapes), sum(n * bits // 8 for bits, n in shapes)

    def walk(computation: str, outer: list[Buffer], top: bool) -> list[tuple[Buffer, Buffer, Buffer]]:
        """The products inside, as (operand, operand, result)."""
        seen: dict[str, Buffer] = {}
        products: list[tuple[Buffer, Buffer, Buffer]] = []
        for own, kind, operation, argument, attributes in computations[computation]:
            size, total = measured(kind)
            given = [seen[x] for x in re.findall(r"%([\w.\-]+)", argument) if x in seen]
            seen[own] = Buffer(f"{computation}:{own}", size, total)
            inside: list[tuple[Buffer, Buffer, Buffer]] = []
            if operation == "parameter" and not top:
                seen[own] = outer[int(argument)]
            elif operation in HLO_VIEWS and given:
                seen[own] = Buffer(given[0].key, size, total)
            elif operation == "dot":
                inside = [(given[0], given[1], seen[own])]
            called = re.search(r"(?:calls|to_apply)=%([\w.\-]+)", attributes)
            if called and operation in ("fusion", "call"):
                inside = walk(called.group(1), given, top=False)
            products += inside
            if top and operation not in HLO_FREE:
                writes = [seen[own]]
                if not inside:
                    recorded.append(Operation(operation, given, writes))
                for index, (a, b, result) in enumerate(inside):  # the traffic of a fusion is counted once
                    made = [Buffer(seen[own].key, result.size, total if index == 0 else 0)]
                    recorded.append(Operation(operation, given if index == 0 else [], made, (a, b)))
        return products

    walk(entry, [], top=True)
    return recorded


# --- HIPS autograd ---------------------------------------------------------------------------------------------------


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
        plain = [x.view(np.ndarray) if isinstance(x, Recording) else x for x in inputs]
        if out is not None:
            settings["out"] = tuple(x.view(np.ndarray) for x in out)
        result = np.asarray(getattr(ufunc, method)(*plain, **settings))
        self.note(ufunc.__name__, plain, result, product=ufunc is np.matmul)
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


# --- the table -------------------------------------------------------------------------------------------------------


def torch_fused_count() -> Count:
    """The fused backward: its one operation, and the products inside."""
    ops = torch_eager(torch_fused, D)
    names, omega = torch_fused_products()
    counted = count("PyTorch, fused (E = D)", [op for op in ops if "attention" in op.name])
    return counted._replace(products=names, omega=omega)


def torch_compiled_count(features: int = E) -> Count:
    """torch.compile of attention as written by hand. Where it becomes the fused operation, that is said."""
    ops, written, megabytes = torch_compiled(features)
    counted = count("torch.compile" + " (E = D)" * (features == D), ops, megabytes)
    counted = counted._replace(score_arrays_written=written)
    if fused := [op.name for op in ops if "attention" in op.name]:
        counted = counted._replace(omega=f"inside: the graph became {fused[0]}")
    return counted


SYSTEMS: dict[str, Callable[[], list[Count]]] = {
    "torch": lambda: [
        count("PyTorch, eager", torch_eager(torch_softmax)),
        count("PyTorch, eager, softmax written out", torch_eager(torch_written_out)),
        torch_fused_count(),
        torch_compiled_count(),
        torch_compiled_count(D),
    ],
    "jax": lambda: [count("JAX, jaxpr", jaxpr_operations()), count("JAX, optimised HLO", hlo_operations(hlo_text()))],
    "autograd": lambda: [count("HIPS autograd", hips_operations())],
}


def main() -> None:
    """Count for every system that is installed, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    as_json = parser.parse_args().json
    missing = [name for name in SYSTEMS if importlib.util.find_spec(name) is None]
    counts = [c for name, found in SYSTEMS.items() if name not in missing for c in found()]
    if as_json:
        print(json.dumps({"counts": [c._asdict() for c in counts], "missing": missing, "least": least_megabytes()}))
        return
    print(f"Backward of attention, float32, batch {BATCH}, heads {HEADS}, T {T}, S {S}, D {D}, E {E}.")
    print(f"Inputs once and gradients once are {least_megabytes():.2f} MB, or {least_megabytes(D):.2f} with E = {D}.\n")
    print(f"{'':<37}{'products':<23}{'Omega':<7}{'T x S arrays':<17}{'MB moved':>8}")
    print(f"{'':<37}{'':<23}{'formed':<7}{'kept  written':<17}")
    for c in counts:
        names = f"{len(c.products)}: {' '.join(c.products)}" if c.products else "not seen"
        arrays_ = f"{c.score_arrays_kept:>4}  {c.score_arrays_written:>7}"
        print(f"{c.system:<37}{names:<23}{c.omega.split(':')[0]:<7}{arrays_:<17}{c.megabytes:>8.2f}")
    for note in dict.fromkeys(f"{c.system}: {c.omega}." for c in counts if ":" in c.omega):
        print(note)
    for name in missing:
        print(f"{name} is not installed, so nothing is said of it: pip install {name}")


if __name__ == "__main__":
    main()
