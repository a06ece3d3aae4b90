"""JAX: the jaxpr of the pullback, and the optimised HLO of XLA."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

from autograd_counts.record import Buffer, D, Operation, arrays


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
    """What the entry computation runs, one operation per fusion; a product inside one is seen with its operands."""
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
