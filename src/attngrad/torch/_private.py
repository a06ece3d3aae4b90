"""Every private interface of PyTorch that attngrad uses: what for, and what happens where it is missing.

Read from PyTorch 2.13.0. They answer questions that have no public form; where one is gone, the answer is the cautious
one, which costs speed or memory and no result. ``MISSING`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

READ_FROM = "2.13.0"
MISSING: list[str] = []


def _find(path: str, otherwise: Any) -> Any:
    """``torch.<path>``, or ``otherwise`` where this PyTorch has no such thing."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            MISSING.append(f"torch.{path}")
            return otherwise
    return found


_functorch_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", lambda: True)
_saved_hooks: Callable[[bool], Any] = _find("_C._autograd._top_saved_tensors_default_hooks", lambda _: True)
_dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)
_is_legacy_batched: Callable[[Tensor], bool] = _find("_C._functorch.is_legacy_batchedtensor", lambda _: False)
_keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
_is_zero_tensor: Callable[[Tensor], bool] = _find("Tensor._is_zerotensor", lambda _: True)
if not hasattr(forward_ad, "_current_level"):
    MISSING.append("torch.autograd.forward_ad._current_level")


def forward_mode_active() -> bool:
    """Whether a level of forward-mode AD is entered; without the interface: yes, so that tangents are looked for."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


def transforms_active() -> bool:
    """Whether torch.func or forward-mode AD may be looking at what is computed."""
    return forward_mode_active() or _functorch_active()


def watched() -> bool:
    """Whether anything but autograd looks on: a transform, hooks on what is saved, or a mode that sees operators.

    Hooks on what is saved are how activation checkpointing works.
    """
    return (
        getattr(forward_ad, "_current_level", 0) >= 0
        or _functorch_active()
        or _saved_hooks(False) is not None
        or _dispatch_modes() > 0
    )


def mapped_by_dispatcher(tensors: Any) -> bool:
    """Whether a tensor is of the older vmap, of ``is_grads_batched``, which sees operators only, not functions.

    It hides the mapped axis from Python; the dispatcher's loop over samples is the one way through. Without the
    interface ``is_grads_batched=True`` is an error of PyTorch's.
    """
    return any(x is not None and _is_legacy_batched(x) for x in tensors)


def graph_is_kept() -> bool:
    """Within a backward pass: whether it may run again, so that what was saved has to stay."""
    return _keeps_graph()


def has_no_memory(x: Tensor) -> bool:
    """Whether ``x`` is a zero that takes no memory, as forward mode makes them."""
    return _is_zero_tensor(x)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without ``Function.apply``, which inspects the signature of forward at every call.

    Only where no transform of torch.func is active. Below it is the C++ one.
    """
    quick: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return quick


@contextmanager
def without_transforms() -> Iterator[None]:
    """Hide what is computed within from torch.func: messages of a ring are not part of what is transformed."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def store_of(group: Any) -> Any:
    """The key-value store of a process group, which the ranks of a ring leave notes in."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)
