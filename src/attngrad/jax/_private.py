"""What attngrad uses of JAX beyond its stable interface: the parts that custom primitives are made of.

``jax.extend`` and ``jax.interpreters`` are what JAX offers to those who add primitives; their names are public and may
change between minor versions. Read from JAX 0.10, and tried with 0.6 to 0.10. Where one is gone, importing attngrad.jax
is an error that says which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from attngrad.core.checks import fail

try:
    from jax.core import ShapedArray as ShapedArray
    from jax.core import Tracer as Tracer
    from jax.extend.core import Primitive as Primitive
    from jax.interpreters import ad, batching, mlir
except (ImportError, AttributeError) as error:
    rule = "have jax.core, jax.extend.core and jax.interpreters, which custom primitives are made of"
    got = f"jax {jax.__version__} without one of them ({error})"
    fail(ImportError, "attngrad.jax", "jax", rule, got, "Install jax 0.6 to 0.10, or a newer attngrad.")

Zero: Any = ad.Zero
"""A symbolic zero: a tangent or cotangent that costs nothing."""
is_undefined: Callable[[Any], bool] = ad.is_undefined_primal
"""Whether an argument of a transpose rule is what it is linear in."""
jvps: dict[Any, Any] = ad.primitive_jvps
transposes: dict[Any, Any] = ad.primitive_transposes
batchers: Any = batching.primitive_batchers
register_lowering: Callable[..., Any] = mlir.register_lowering
