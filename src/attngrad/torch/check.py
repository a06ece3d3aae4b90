"""Every pass and every option on a device, against the float64 reference on the CPU: ``attngrad check --device``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attngrad import reference
from attngrad.backends.blocked.blocks import small_blocks
from attngrad.core.dtypes import TABLE
from attngrad.core.options import OPTIONS
from attngrad.torch._attention import attention
from attngrad.torch._choice import backend_of, forced, use_backend

if TYPE_CHECKING:
    from rich.console import Console

_B, _HQ, _HK, _T, _S, _D, _E = 2, 4, 2, 19, 23, 8, 6
_SLACK = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1.6e-2, torch.bfloat16: 1.3e-1}
"""Errors, relative to the largest number of a result, that rounding explains; of 16 bits, 16 times their precision."""
_OPTIONAL = (torch.float64,)
"""Dtypes that a device need not have: MPS has no float64, nor have some XPUs."""
_CUT = ("causal", "all")
"""The options under which ``blocked`` cuts also these short sequences: keys by position, and all else by masks."""


class Row(NamedTuple):
    """The largest error of each pass, or the message of the error that a device gave.

    Without an option: the device lacks the dtype, which is no mistake.
    """

    dtype: str
    option: str
    errors: dict[str, float]
    bound: float
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether every pass is within the bound."""
        return not self.option or (not self.message and all(e <= self.bound for e in self.errors.values()))


def options(generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Options by name: each alone, and all of them."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.arange(_S) // 9
    single: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "window": {"window": (5, 2)},
        "offset": {"offset": torch.tensor([1, 4]), "causal": True},
        "mask": {"mask": torch.rand(_B, 1, _T, _S, generator=generator) > 0.3},
        "bias": {"bias": numbers(_HQ, 1, _S)},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": numbers(_HQ)},
        "dropout": {"dropout": 0.2, "seed": 7},
        "segments": {"segments": (ids[:_T], ids)},
    }
    everything = {name: value for option in single.values() for name, value in option.items()}
    return {"none": {}, **single, "all": everything}


def check(device: str) -> Iterator[Row]:
    """One row per dtype and option; one per dtype that the device lacks."""
    for d in TABLE:
        dtype: torch.dtype = getattr(torch, d.name)
        if dtype in _OPTIONAL and (said := _lacks(device, dtype)):
            yield Row(d.name, "", {}, _SLACK[dtype], f"not on this device: {said}")
            continue
        generator = torch.Generator().manual_seed(0)
        shapes = ((_HQ, _T, _D), (_HK, _S, _D), (_HK, _S, _E))
        inputs = [torch.randn(_B, *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
        for name, given in options(generator).items():
            given = {k: y.to(dtype) if OPTIONS[k].differentiable else y for k, y in given.items()}
            truth = _passes(reference.attention, [x.double() for x in inputs], _moved(given, "cpu", torch.float64))
            try:
                with _in_float32(), small_blocks() if name in _CUT else nullcontext():
                    found = _passes(attention, [x.to(device) for x in inputs], _moved(given, device, None))
                errors = {key: _error(found[key], truth[key]) for key in truth}
                yield Row(d.name, name, errors, _SLACK[dtype])
            except (RuntimeError, TypeError, NotImplementedError) as error:
                yield Row(d.name, name, {}, _SLACK[dtype], _line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _lacks(device: str, dtype: torch.dtype) -> str:
    """Empty, or what the device says where it cannot compute in the dtype."""
    try:
        torch.ones(2, dtype=dtype, device=device).add(1.0).cpu()
    except (RuntimeError, TypeError) as error:
        return _line(error)
    return ""


@contextmanager
def _in_float32() -> Iterator[None]:
    """Products of float32 in float32: TF32, which a process or a container may have chosen, is not wrong."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class NoDeviceError(RuntimeError):
    """PyTorch has no such device here."""


def report(device: str, console: Console, backend: str | None = None) -> bool:
    """Print the table, row by row; True where a row is wrong. ``backend`` is as in ``use_backend``."""
    try:
        x = torch.empty(0, device=device)
        with use_backend(backend or forced()):
            name = backend_of(x)
    except (RuntimeError, AssertionError) as error:  # the latter: PyTorch without CUDA
        said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise NoDeviceError(f"check: device must be one that PyTorch has here; got {device!r}. {said}.") from error
    except ValueError as error:
        raise NoDeviceError(f"check: {error}") from error
    if x.is_meta:
        raise NoDeviceError("check: device must be one that computes; got 'meta'.")
    console.print(
        f"torch {torch.__version__}, device {x.device}, backend {name}: largest errors by pass", soft_wrap=True
    )
    rows = []
    with use_backend(name):
        for row in check(device):
            if not row.option:
                console.print(f"{'-':7}{row.dtype:10}{row.message}", soft_wrap=True, markup=False)
                continue
            rows.append(row)
            if len(rows) == 1 and row.errors:
                heads = "  ".join(f"{key:>15}" for key in row.errors)
                console.print(f"{'':7}{'dtype':10}{'option':10}{heads}", soft_wrap=True)
            told = row.message or "  ".join(f"{error:15.1e}" for error in row.errors.values())
            mark = "ok" if row.ok else "WRONG"
            console.print(f"{mark:7}{row.dtype:10}{row.option:10}{told}", soft_wrap=True, markup=False)
    wrong = sum(not row.ok for row in rows)
    console.print(
        f"{len(rows) - wrong} of {len(rows)} rows agree with the float64 reference on the CPU.", soft_wrap=True
    )
    return wrong > 0


def _moved(given: dict[str, Any], device: str, dtype: torch.dtype | None) -> dict[str, Any]:
    def one(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(one, x))
        return x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x

    return {name: one(x) for name, x in given.items()}


def _passes(function: Callable[..., Tensor], inputs: list[Tensor], given: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The forward pass, backward, double backward, a third derivative, and forward mode."""
    learned = {name: x for name, x in given.items() if OPTIONS[name].differentiable}
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *learned.values())]

    def run(*x: Tensor) -> Tensor:
        moving: dict[str, Any] = dict(zip(learned, x[3:], strict=True))
        return function(*x[:3], **given | moving)

    found: dict[str, list[Tensor]] = {"forward": [run(*leaves)]}
    for order in ("backward", "double backward", "third order"):
        value = sum(x.sin().sum() for x in list(found.values())[-1])
        grads: Any = torch.autograd.grad(value, leaves, create_graph=True)  # type: ignore[arg-type]
        found[order] = list(grads)
    primals = tuple(x.detach() for x in leaves)
    found["forward mode"] = [torch.func.jvp(run, primals, tuple(torch.sin(x) for x in primals))[1]]
    return found


def _error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error, relative to the largest number of its result; NaN is an infinite one."""
    worst = 0.0
    for a, b in zip(found, truth, strict=True):
        size = float(b.detach().abs().max())
        error = float((a.detach().cpu().double() - b.detach()).abs().max()) / (size or 1.0)
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst
