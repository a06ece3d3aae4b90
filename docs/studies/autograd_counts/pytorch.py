"""PyTorch in eager mode, and its fused operation."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autograd_counts.record import BATCH, HEADS, Buffer, Count, D, E, Operation, S, T, arrays, count


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
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

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

    The kernel works on tiles, and a product of attention takes T S D multiplications per head: those of all calls,
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


def torch_fused_count() -> Count:
    """The fused backward: its one operation, and the products inside."""
    ops = torch_eager(torch_fused, D)
    names, omega = torch_fused_products()
    counted = count("PyTorch, fused (E = D)", [op for op in ops if "attention" in op.name])
    return counted._replace(products=names, omega=omega)
