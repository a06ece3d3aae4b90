"""A backend's passes over tensors: no copy in, no copy out, no autograd.

Each pass gives tensors in the dtype that autograd expects: out and its tangent in the dtype of q, lse and its tangent
in float32 beside 16-bit inputs, else in that of q; gradients in the dtype of their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from attngrad.backends.protocol import Backend
from attngrad.core import option_checks
from attngrad.core.binding import bind
from attngrad.core.checks import check_integer, fail
from attngrad.core.operands import DIFFERENTIABLE, SEEDS, Gradients, Operands, Tangents, assemble, flatten
from attngrad.core.options import ARRAYS, NOT_FLAT, OPTIONS, STATIC, Kind, Options, reject_not_flat
from attngrad.core.spec import Spec
from attngrad.torch._choice import choose, forced
from attngrad.torch._tensors import Inputs, check_additive, check_tensor, numpy_dtype, to_array, to_tensor
from attngrad.torch._threads import lent

Tensors = Sequence[Tensor | None]
BOTH = ("grads", "grads_dot")
"""The VJP and its tangent: of the fields of ``SecondOrder``, what the HVP is."""
_FUNCTION = "attention"

# --- options --------------------------------------------------------------------------------------------------------

NUMBERS = frozenset(row.name for row in STATIC if row.name not in SEEDS)
"""The options that are numbers here; a seed may be a tensor."""
_PAIRS = [row.name for row in STATIC if row.kind is Kind.PAIR]
_ONE = np.dtype(np.float64)
_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""How code in C reads tensors: of DLPack, in PyTorch 2.10 and later."""


@lru_cache(maxsize=1024, typed=True)  # True is not 1
def _passes(
    function: str, device: str, name: str | None, features: int, names: tuple[str, ...] = (), *values: Any
) -> Passes:
    one = Spec((1, features), _ONE)
    o = bind(function, one, one, one, {**dict(zip(names, values, strict=True)), **dict.fromkeys(SEEDS, 0)})[1]
    o, backend = replace(o, **dict.fromkeys(SEEDS)), choose(device, name)
    tensors = backend.tensors if _EXCHANGE is not None else None
    if tensors is None or not tensors.reads(_EXCHANGE):
        return Passes(o, backend)
    return Passes(o, backend, tensors, tensors.prepare(o))


def passes_of(function: str, q: Tensor, options: Any, backend: str | None = None) -> Passes:
    """The passes for the device of ``q``, with the options that are numbers, checked; the others are left alone.

    ``backend`` is the name of one, in place of that which the user has named.
    """
    where = (q.device.type, backend or forced(), q.shape[-1] if q.ndim else 0)
    if not options:
        return _passes(function, *where)
    if NOT_FLAT:
        reject_not_flat(function, options)
    given = {name: value for name, value in options.items() if name in NUMBERS}
    for name in _PAIRS:
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    arguments = (function, *where, tuple(given), *given.values())
    try:
        return _passes(*arguments)
    except TypeError:  # what does not hash is not valid, nor is what the checks refuse: let them say so, uncached
        return _passes.__wrapped__(*arguments)


def plain_passes(function: str, q: Tensor, scale: Any, causal: Any) -> Passes | None:
    """The same for a tensor on the CPU and these options alone, in fewer steps; None where they are not valid."""
    try:
        return _passes(function, "cpu", forced(), q.shape[-1], ("scale", "causal"), scale, causal)
    except TypeError:
        return None


def bind_inputs(function: str, q: Tensor, k: Tensor, v: Tensor, o: Options, options: Any) -> Inputs:
    """The flat list. Shapes and dtypes are checked where the arrays are bare, by ``Passes``: vmap changes both."""
    for name, value in options.items():
        row = OPTIONS.get(name)
        if value is None or row is None:
            continue
        if row.kind is Kind.IDS:
            if isinstance(value, (tuple, list)) and len(value) == 2:
                for side, ids in zip("qk", value, strict=True):
                    check_tensor(function, f"{side}_{name}", ids, q)
            else:
                one = Spec((1, 1), _ONE)
                row.check(function, value, Operands(one, one, one))
        elif row.kind is Kind.OFFSET and not isinstance(value, Tensor):
            check_integer(function, name, value)
        elif row.is_array:
            check_tensor(function, name, value, q)
            if row.differentiable:
                check_additive(function, name, value, q)
        elif row.kind is Kind.SEED:
            check_seed(function, value)
    option_checks.seed_beside(function, o.dropout, options.get("seed"))
    return Inputs(q, k, v, **flatten(options))


def check_seed(function: str, seed: Any) -> None:
    """A number, or a tensor that holds one."""
    if not isinstance(seed, Tensor):
        option_checks.seed(function, seed, None)
    elif seed.dtype is not torch.int64:
        fail(TypeError, function, "seed", "be an integer or an int64 tensor", seed.dtype)
    elif seed.numel() != 1:
        fail(ValueError, function, "seed", "be one number", f"shape {tuple(seed.shape)}")


def draw_seed(x: Tensor) -> Tensor:
    """A seed from PyTorch's generator for the device of ``x``: a CUDA graph draws another at every replay.

    For MPS it is drawn on the CPU: the generator there has 32 bits.
    """
    return torch.randint(2**63 - 1, (), device="cpu" if x.device.type == "mps" else x.device)


# --- passes ---------------------------------------------------------------------------------------------------------


def refuse_replaced() -> NoReturn:
    """The error where the backward pass meets other inputs than the forward pass."""
    raise RuntimeError(
        "attngrad.torch.attention: q, k and v must be the same in the backward pass as in the forward pass; got "
        "others (.data, .set_ or .resize_ replaced them). Replace a copy."
    )


class AnyPasses(Protocol):
    """What the autograd functions call: ``Passes``, or those of a ring."""

    @property
    def options(self) -> Options:
        """Those of the call."""

    @property
    def out_is_residual(self) -> bool:
        """Whether out is the first residual, and is not given twice."""

    def permit(self, what: str) -> None:
        """Raise where ``what`` is not available."""

    def forward(self, x: Inputs) -> tuple[Tensor, ...]:
        """``out, lse``, and the residuals."""

    def backward(self, x: Inputs, residuals: Sequence[Tensor], dout: Any, dlse: Any) -> tuple[Tensor, ...]:
        """The gradients of the inputs that are given; without residuals the forward pass runs again."""

    def forward_tangent(self, x: Inputs, t: Tensors) -> tuple[Tensor, Tensor]:
        """``out_dot, lse_dot`` along ``t``, the tangents of the differentiable inputs."""

    def backward_tangent(
        self, x: Inputs, t: Tensors, cotangents: Tensors, wanted: Sequence[str] = BOTH
    ) -> tuple[Tensor, ...]:
        """Fields of ``SecondOrder``, along ``t``; ``cotangents`` are dout, dlse, dout_dot, dlse_dot."""


class Passes(NamedTuple):
    """The passes of a backend, in one process."""

    options: Options
    backend: Backend
    tensors: Any = None
    """The passes of the backend over tensors as they are, where it has them, and the options as they take them."""
    fields: Any = None

    @property
    def out_is_residual(self) -> bool:
        """Residuals are memory of their own: out may be written to."""
        return False

    def permit(self, what: str) -> None:
        """Nothing is refused here."""

    @property
    def on_arrays(self) -> bool:
        """Whether the backend takes NumPy arrays, which share the memory of the tensors."""
        return self.backend.LIBRARY == "numpy"

    def taken(self, x: Any) -> Any:
        """A tensor as the backend takes it."""
        return to_array(x) if self.on_arrays else x

    def operands(self, x: Inputs) -> tuple[Operands, Options]:
        """As the backend takes them."""
        flat = x._asdict()
        if self.on_arrays:
            return assemble(self.options, {name: to_array(y) for name, y in flat.items()})
        seeds = {name: flat.pop(name) for name in SEEDS}  # no number leaves the device
        operands, o = assemble(self.options, flat)
        return operands, replace(o, **seeds)

    def checked(self, x: Inputs) -> tuple[Operands, Options]:
        """The operands, their shapes and dtypes checked by the rules of the NumPy functions."""
        seen = x
        if not self.on_arrays:
            flat = x._asdict().items()
            seen = Inputs(**{n: _spec(y) if isinstance(y, Tensor) else y for n, y in flat if n not in SEEDS})
        if min(x.q.ndim, x.k.ndim) < 2:  # an error
            bind(_FUNCTION, to_array(seen.q), to_array(seen.k), to_array(seen.v), {})
        read, o = assemble(self.options, {name: to_array(y) for name, y in seen._asdict().items()})
        arrays: Any = {row.name: getattr(read, row.name) for row in ARRAYS}
        bind(_FUNCTION, read.q, read.k, read.v, arrays)
        option_checks.magnitudes(_FUNCTION, o, read.q.dtype)
        operands, o = (read, o) if self.on_arrays else self.operands(x)
        if (reason := self.backend.refuses(operands, o)) is not None:
            raise NotImplementedError(f"{_FUNCTION}: {reason}")
        return operands, o

    def forward(self, x: Inputs, save: bool = True) -> tuple[Tensor, ...]:
        """``out, lse``, and the residuals; checks what it is given."""
        out, lse, residuals = lent(self.backend, self.backend.forward, *self.checked(x), save=save)
        return tuple(map(to_tensor, (out, lse, *residuals)))

    def backward(self, x: Inputs, residuals: Sequence[Tensor], dout: Any, dlse: Any) -> tuple[Tensor, ...]:
        """The gradients of the inputs that are given, of <dout, out> + <dlse, lse>."""
        operands, o = self.checked(x)  # again: .data of an input may have been replaced since
        kept = [self.taken(y) for y in residuals] or lent(self.backend, self.backend.forward, operands, o)[2]
        if kept[0].shape != self.backend.residual_specs(operands, o)[0].shape:
            refuse_replaced()
        arguments = (operands, o, kept, self.taken(dout), self.taken(dlse))
        return given(lent(self.backend, self.backend.backward, *arguments))

    def forward_tangent(self, x: Inputs, t: Tensors) -> tuple[Tensor, Tensor]:
        """``out_dot, lse_dot``."""
        arguments = (*self.operands(x), Tangents(*map(self.taken, t)))
        run = self.backend.forward_tangent
        _, _, out_dot, lse_dot = lent(self.backend, run, *arguments, wanted=("out_dot", "lse_dot"))
        return to_tensor(out_dot), to_tensor(lse_dot)

    def backward_tangent(
        self, x: Inputs, t: Tensors, cotangents: Tensors, wanted: Sequence[str] = BOTH
    ) -> tuple[Tensor, ...]:
        """What is ``wanted``, in that order."""
        dout, dlse, dout_dot, dlse_dot = map(self.taken, cotangents)
        arguments = (*self.operands(x), Tangents(*map(self.taken, t)), dout, dout_dot, dlse, dlse_dot)
        found = lent(self.backend, self.backend.backward_tangent, *arguments, wanted=wanted)
        results: list[Tensor] = []
        for name in wanted:
            value = getattr(found, name)
            results += given(value) if isinstance(value, Gradients) else [to_tensor(value)]
            if name == "out_dot":
                results[-1] = results[-1].to(x.q.dtype)
        return tuple(results)


def given(grads: Gradients) -> tuple[Tensor, ...]:
    """The gradients that are there."""
    return tuple(to_tensor(g) for g in grads if g is not None)


def _spec(x: Tensor) -> Spec:
    return Spec(tuple(x.shape), numpy_dtype(_FUNCTION, x))


class KeptArrays(NamedTuple):
    """A forward pass, for its backward pass: the arrays of the backend."""

    passes: Passes
    operands: Operands
    options: Options
    saved: Sequence[Any]

    @classmethod
    def forward(cls, passes: Passes, x: Inputs) -> tuple[KeptArrays, tuple[Tensor, Tensor]]:
        """It, and ``out, lse``; checks what it is given."""
        operands, o = passes.checked(x)
        out, lse, saved = lent(passes.backend, passes.backend.forward, operands, o)
        return cls(passes, operands, o, saved), (to_tensor(out), to_tensor(lse))

    def residuals(self) -> tuple[Tensor, ...]:
        """As tensors."""
        return tuple(map(to_tensor, self.saved))

    def backward(self, inputs: Tensors, dout: Any, dlse: Any, wanted: Sequence[bool]) -> tuple[Any, ...]:
        """The differentiable inputs' gradients, None for one that is not given or not ``wanted``."""
        names = tuple(compress(DIFFERENTIABLE, wanted))
        arrays = (self.operands, self.options, self.saved, to_array(dout), to_array(dlse))
        backend = self.passes.backend
        grads = lent(backend, backend.backward, *arrays, wanted=names)
        return tuple(None if g is None else to_tensor(g) for g in grads)
