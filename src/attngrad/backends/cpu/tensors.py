"""The first-order passes over a framework's tensors, read by DLPack's C exchange API, for options that are numbers.

No arrays are made. ``fields`` is what ``prepare(o)`` gives, ``threads`` how many workers of the process's OpenMP
runtime may be borrowed.

- ``reads(api)``: whether tensors can be read by ``__dlpack_c_exchange_api__`` of their type; asked before the others.
- ``forward(q, k, v, fields, out, lse, save, threads)``: what ``backward`` needs where ``save``, else None; False where
  dtypes, shapes or strides do not fit. ``out`` has contiguous features, ``lse`` is contiguous or None.
- ``backward(saved, q, k, v, fields, dout, dlse, dq, dk, dv, threads)``: whether the inputs fit what was saved. All
  after ``dout`` are contiguous.
- ``residuals(saved)``: those of ``forward`` of this backend, as arrays.
"""

from __future__ import annotations

from attngrad import _native
from attngrad.backends.cpu.call import static_fields

prepare = static_fields
reads = _native.set_exchange
forward = _native.forward_of_tensors
backward = _native.backward_of_tensors
residuals = _native.residuals_of
