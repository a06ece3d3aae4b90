"""The first-order passes over what lies at an address, for options that are numbers: no arrays are made.

``q, k, v`` and ``dout`` are read by their ``shape``, ``stride()`` and ``data_ptr()``; results are addresses of
contiguous memory, 0 where there is none. ``type`` is the number of the dtype in the table of dtypes, ``fields`` what
``prepare(o)`` gives.

- ``forward(type, q, k, v, fields, out, lse, save)``: what ``backward`` needs where ``save``, else None; False where
  shapes or strides do not fit. ``out`` is ``(address, *strides)``, without strides where it is contiguous, too.
- ``backward(saved, type, q, k, v, fields, dout, dlse, dq, dk, dv)``: whether the inputs fit what was saved.
- ``residuals(saved)``: those of ``forward`` of this backend, as arrays.
"""

from __future__ import annotations

from attngrad import _native
from attngrad.backends.cpu.call import static_fields

prepare = static_fields
forward = _native.forward_by_address
backward = _native.backward_by_address
residuals = _native.residuals_of
