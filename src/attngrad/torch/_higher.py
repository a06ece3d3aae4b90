"""Derivatives beyond the passes, to any order: what a block computes, differentiated by torch.func, block by block.

``Blockwise`` is a sum over blocks. Its derivative in either mode is the sum over blocks of the derivative of its
function, so it is a ``Blockwise`` again: nothing of one block is stored for another, and there is no last order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngrad.backends.blocked.blocks import Block, Layout, Result, cut, run
from attngrad.backends.blocked.passes import named
from attngrad.backends.blocked.programs import LAYOUTS, Program, result_of, widen
from attngrad.core.operands import Operands
from attngrad.core.options import Options

_MATRICES = 48
"""About how many matrices of queries by keys a third derivative has at a time."""


@dataclass(frozen=True, eq=False)
class _Derivative:
    """A function of blocks, its inputs that move, and its results that count."""

    function: Callable[..., Sequence[Tensor]]
    moving: tuple[int, ...]
    counting: tuple[int, ...]

    def of(
        self, block: Block, tensors: Sequence[Tensor]
    ) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """The function of what moves, and where it is."""

        def moved(*values: Tensor) -> tuple[Tensor, ...]:
            given = list(tensors)
            for i, x in zip(self.moving, values, strict=True):
                given[i] = x
            found = self.function(block, *given)
            return tuple(found[i] for i in self.counting)

        return moved, tuple(tensors[i] for i in self.moving)


class _Pullback(_Derivative):
    """The VJP of a function of blocks: cotangents follow its inputs."""

    def __call__(self, block: Block, *args: Tensor) -> Sequence[Tensor]:
        n = len(args) - len(self.counting)
        function, at = self.of(block, args[:n])
        pull: Any = torch.func.vjp(function, *at)[1]
        found: Sequence[Tensor] = pull(args[n:])
        return found


class _Pushforward(_Derivative):
    """The JVP of a function of blocks: tangents follow its inputs."""

    def __call__(self, block: Block, *args: Tensor) -> Sequence[Tensor]:
        n = len(args) - len(self.moving)
        function, at = self.of(block, args[:n])
        found: Sequence[Tensor] = torch.func.jvp(function, at, args[n:])[1]
        return found


class Sum(NamedTuple):
    """What ``Blockwise`` adds up: a function of blocks, and how its inputs are cut and its results put together."""

    function: Callable[..., Sequence[Tensor]]
    blocks: tuple[Block, ...]
    layouts: tuple[Layout, ...]
    results: tuple[Result, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = Blockwise.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return found

    def pullback(self, tensors: Sequence[Tensor], u: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Any]:
        """The gradients of the tensors that are ``needed``, None for the others; ``u`` are cotangents."""
        moving = tuple(i for i, need in enumerate(needed) if need)
        counting = tuple(i for i, c in enumerate(u) if c is not None)
        found: list[Any] = [None] * len(tensors)
        if not moving or not counting:
            return found
        layouts = (*self.layouts, *(self.results[i].layout for i in counting))
        results = tuple(Result(self.layouts[i], tuple(tensors[i].shape)) for i in moving)
        step = Sum(_Pullback(self.function, moving, counting), self.blocks, layouts, results)
        grads = step(*tensors, *(c for c in u if c is not None))
        for i, g in zip(moving, grads, strict=True):
            found[i] = g
        return found

    def pushforward(self, tensors: Sequence[Tensor], dots: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The tangents of the results, along ``dots``."""
        moving = tuple(i for i, dot in enumerate(dots) if dot is not None)
        layouts = (*self.layouts, *(self.layouts[i] for i in moving))
        function = _Pushforward(self.function, moving, tuple(range(len(self.results))))
        step = Sum(function, self.blocks, layouts, self.results)
        return step(*tensors, *(d for d in dots if d is not None))


class Blockwise(torch.autograd.Function):
    """A ``Sum`` of tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(step: Sum, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*step, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.step, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *u: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        needed = [need and x.is_floating_point() for need, x in zip(ctx.needs_input_grad[1:], tensors, strict=True)]
        return None, *ctx.step.pullback(tensors, u, needed)

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Tensor | None) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = ctx.step.pushforward(ctx.saved_tensors, dots)
        return found


class Named:
    """A sum over blocks of what the reference's steps give: ``given`` and ``wanted`` by name."""

    def __init__(self, x: Operands, o: Options, given: Mapping[str, Tensor | None], wanted: Sequence[str]) -> None:
        tensors, numbers = named(x, o, **given)
        self.wanted, self.dtypes = tuple(wanted), {name: y.dtype for name, y in tensors.items()}
        self.tensors = {name: widen(y) for name, y in tensors.items()}
        self.sum = Sum(
            Program(o, numbers, tuple(tensors), self.wanted),
            cut(x.q, x.k.shape[-2], x.offset, o, _MATRICES),
            tuple(LAYOUTS[name] for name in tensors),
            tuple(result_of(name, tensors) for name in self.wanted),
        )

    def pullback(self, u: Sequence[Tensor | None], needed: Sequence[str]) -> dict[str, Tensor]:
        """The gradients of the inputs ``needed``, in their dtypes."""
        needs = [name in needed for name in self.tensors]
        wide = [None if c is None else widen(c) for c in u]
        found = self.sum.pullback(tuple(self.tensors.values()), wide, needs)
        return {name: g.to(self.dtypes[name]) for name, g in zip(self.tensors, found, strict=True) if g is not None}

    def pushforward(self, dots: Mapping[str, Tensor | None]) -> tuple[Tensor, ...]:
        """The tangents of what is wanted, along ``dots`` of the inputs."""
        moves = [dots.get(name) for name in self.tensors]
        return self.sum.pushforward(tuple(self.tensors.values()), [None if d is None else widen(d) for d in moves])
