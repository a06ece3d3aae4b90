"""The first-order passes over what lies at an address, for options that are numbers: no arrays are made.

``q, k, v`` and ``dout`` are read by their ``shape``, ``stride()`` and ``data_ptr()``; results are addresses of
contiguous memory. ``type`` is the number of the dtype in the table of dtypes.
"""

from __future__ import annotations

from typing import Any

from attngrad import _native
from attngrad.backends.cpu.call import static_fields
from attngrad.core.options import Options


def forward(type: int, q: Any, k: Any, v: Any, o: Options, out: int, lse: int, save: bool) -> Any:  # noqa: A002
    """What ``backward`` needs where ``save``, else None; False where shapes or strides do not fit."""
    return _native.forward_by_address(type, q, k, v, static_fields(o), out, lse, save)


def backward(
    saved: Any,
    type: int,  # noqa: A002
    q: Any,
    k: Any,
    v: Any,
    o: Options,
    dout: Any,
    dlse: int,
    dq: int,
    dk: int,
    dv: int,
) -> bool:
    """Whether the inputs fit what was ``saved``; ``dlse`` is 0 where there is none."""
    return _native.backward_by_address(saved, type, q, k, v, static_fields(o), dout, dlse, dq, dk, dv)


def residuals(saved: Any) -> tuple[Any, ...]:
    """Those of ``forward`` of this backend, as arrays."""
    return _native.residuals_of(saved)
