"""``torch.compile``: the graph given to Inductor, and what Inductor counts after fusion."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

from autograd_counts.pytorch import torch_inputs, torch_softmax
from autograd_counts.record import BATCH, HEADS, Buffer, Count, D, E, Operation, S, T, count


def torch_compiled(features: int = E) -> tuple[list[Operation], int, float]:
    """The backward graph as Inductor gets it; arrays of T x S and megabytes as Inductor counts them after fusing."""
    import torch
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

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


def torch_compiled_count(features: int = E) -> Count:
    """torch.compile of attention as written by hand. Where it becomes the fused operation, that is said."""
    ops, written, megabytes = torch_compiled(features)
    counted = count("torch.compile" + " (E = D)" * (features == D), ops, megabytes)
    counted = counted._replace(score_arrays_written=written)
    if fused := [op.name for op in ops if "attention" in op.name]:
        counted = counted._replace(omega=f"inside: the graph became {fused[0]}")
    return counted
