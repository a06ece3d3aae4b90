"""What a backend offers: four passes over Operands and Options, and the same over parts of the keys.

A backend is a module. Bridges, the ring and the public functions call these functions and nothing else of it. Residuals
are opaque: only the backend that made them reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from attngrad.core.arrays import Array
from attngrad.core.operands import DIFFERENTIABLE, Gradients, Operands, Tangents
from attngrad.core.options import Options
from attngrad.core.spec import Spec


class SecondOrder(NamedTuple):
    """out and out_dot in the accumulation dtype, the gradients, and their tangents; lse_dot."""

    out: Array
    out_dot: Array
    grads: Gradients
    grads_dot: Gradients
    lse_dot: Array


FIRST_ORDER = ("out", "lse", "out_dot", "lse_dot")
"""What the tangent of a forward pass gives."""


class ForwardParts(Protocol):
    """A forward pass over parts of the keys, one after the other."""

    def add(self, rows: slice, part: Operands) -> None:
        """The keys of ``part`` for some of the queries, which are ``rows`` of the whole."""

    def finish(self) -> tuple[Array, Array, Sequence[Array]]:
        """``out, lse, residuals`` of the whole; once."""


class BackwardParts(Protocol):
    """A backward pass over parts of the keys, from the residuals of the whole."""

    def add(self, rows: slice, part: Operands) -> Gradients:
        """The gradients of the part; that of q is added up here, too."""

    def finish(self) -> tuple[Array, Array | None]:
        """The gradients of q and of the sinks; once."""


class TangentParts(Protocol):
    """The tangent of a forward pass over parts of the keys."""

    def add(self, rows: slice, part: Operands, t: Tangents) -> None:
        """The keys of ``part`` for ``rows``, which move along ``t``."""

    def finish(self) -> tuple[Array, Array]:
        """``out_dot, lse_dot``; once."""


class Backend(Protocol):
    """The members of a backend's module."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a constant of the module
        """How users name it."""

    @property
    def LIBRARY(self) -> str:  # noqa: N802
        """Whose arrays its passes take and give: "numpy" or "torch"."""

    @property
    def tensors(self) -> Any:
        """The first-order passes over tensors as they are, as ``cpu.tensors`` has them; None where there are none."""

    @property
    def borrow(self) -> Callable[[int], None] | None:
        """Lets the passes of this thread use so many workers of the process's OpenMP runtime from now on; 0: none.

        None where the backend has no threads of its own.
        """

    def refuses(self, x: Operands, o: Options) -> str | None:
        """None; or what stands in the way of operands or options that it cannot compute, as an error says it."""

    def residual_specs(self, x: Operands, o: Options) -> tuple[Spec, ...]:
        """The residuals, for frameworks that must know shapes before anything runs.

        The first holds out, in the dtype of its Spec: where that is the dtype of out, it may be out itself.
        """

    def forward(
        self, x: Operands, o: Options, *, save: bool = True, into: Sequence[Array] | None = None
    ) -> tuple[Array, Array, Sequence[Array]]:
        """``out, lse, residuals``, the last empty unless ``save``; in new arrays, or in those of ``into``."""

    def backward(
        self,
        x: Operands,
        o: Options,
        residuals: Sequence[Array],
        dout: Array | None,
        dlse: Array | None = None,
        *,
        wanted: Collection[str] = DIFFERENTIABLE,
        into: Sequence[Array] = (),
    ) -> Gradients:
        """The VJP of <dout, out> + <dlse, lse>, of the inputs that are given and ``wanted``; dq, dk, dv ``into``."""

    def forward_tangent(
        self,
        x: Operands,
        o: Options,
        t: Tangents,
        into: Sequence[Array] | None = None,
        *,
        wanted: Collection[str] = FIRST_ORDER,
    ) -> tuple[Array, Array, Array, Array]:
        """``out, lse, out_dot, lse_dot``; ``into`` are arrays for the last two. What is not ``wanted`` may be None."""

    def backward_tangent(
        self,
        x: Operands,
        o: Options,
        t: Tangents,
        dout: Array | None,
        dout_dot: Array | None = None,
        dlse: Array | None = None,
        dlse_dot: Array | None = None,
        *,
        wanted: Collection[str] = SecondOrder._fields,
    ) -> SecondOrder:
        """The VJP and its tangent along ``t``, ``dout_dot`` and ``dlse_dot``. What is not ``wanted`` may be None."""

    def forward_parts(self, x: Operands, o: Options) -> ForwardParts:
        """A forward pass of the queries of ``x``, whose keys are not read."""

    def backward_parts(
        self, x: Operands, o: Options, residuals: Sequence[Array], dout: Array | None, dlse: Array | None
    ) -> BackwardParts:
        """A backward pass of the queries of ``x``."""

    def tangent_parts(self, x: Operands, o: Options, t: Tangents) -> TangentParts:
        """The tangent of a forward pass of the queries of ``x`` along ``t``, of which the sinks' is read."""
