"""The book: attention and its derivatives, dense, one small function per formula.

Read ``steps`` for the forward and the backward pass, ``tangent_steps`` for forward mode and second order. Both fill one
table, which the four passes evaluate, the auditor overrides and the explainer prints.

It runs in any precision (float16 to longdouble, complex128 for the complex step) and on any array-API namespace, and
it is the oracle of every test. ``attention``, ``vjp``, ``jvp``, ``hvp``, ``jacobian``, ``attention_weights`` and
``softmax_jacobian`` have the signatures of the public functions; ``forward``, ``backward``, ``forward_tangent`` and
``backward_tangent`` give every intermediate by name. Formulas carry the numbers of docs/notation.md: F forward,
R reverse, T tangent (forward mode), H second order.

Precision: every named intermediate is rounded to the dtype of q; sums and products accumulate as the array library
has it, and 16-bit ones in float32. This is what "the naive computation in that dtype" means in the tests.

Letters: T queries, S keys, D features of q and k, E of v, Hq query heads, Hk key heads.
"""

from __future__ import annotations

from attngrad.reference.forms import block_trace_form, omega_rows, per_row_gradients
from attngrad.reference.functions import attention, attention_weights, hvp, jvp, vjp
from attngrad.reference.jacobians import jacobian, softmax_jacobian
from attngrad.reference.passes import backward, backward_tangent, forward, forward_tangent

__all__ = [
    "attention",
    "attention_weights",
    "backward",
    "backward_tangent",
    "block_trace_form",
    "forward",
    "forward_tangent",
    "hvp",
    "jacobian",
    "jvp",
    "omega_rows",
    "per_row_gradients",
    "softmax_jacobian",
    "vjp",
]
