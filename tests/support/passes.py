"""Every pass of a case at once, and how to judge the results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import attngrad
from attngrad import reference
from attngrad.core.operands import Tangents
from attngrad.testing import relative_error, rms_error, rounding_bound
from cases import Case


def all_passes(c: Case, module: Any = attngrad) -> dict[str, Any]:
    """Every result of every pass by name; None left out."""
    (out, lse), pullback = module.vjp(*c.qkv, return_lse=True, **c.options)
    grads = pullback(c.dout, c.dlse)
    (same, same_lse), moved = module.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    again, grads_dot = module.hvp(
        c.qkv, c.t[:3], c.dout, c.dout_dot, dlse=c.dlse, dlse_dot=c.dlse_dot, **c.tangents, **c.options
    )
    named = {
        "out": out,
        "lse": lse,
        "out of jvp": same,
        "lse of jvp": same_lse,
        "out_dot": moved[0],
        "lse_dot": moved[1],
    }
    named |= {f"d{name}": g for name, g in grads._asdict().items()}
    named |= {f"d{name} of hvp": g for name, g in again._asdict().items()}
    named |= {f"d{name}_dot": g for name, g in grads_dot._asdict().items()}
    return {name: x for name, x in named.items() if x is not None}


def assert_equal_to_the_reference(c: Case) -> None:
    """Every pass, in float64, to 1e-12 of its largest number."""
    got, expected = all_passes(c), all_passes(c, reference)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.shape == expected[name].shape, name
        finite = np.isfinite(expected[name])
        assert np.array_equal(finite, np.isfinite(x)), name
        assert relative_error(x[finite], expected[name][finite]) < 1e-12, name


def rounding_errors(c: Case, dtype: Any, module: Any = attngrad) -> dict[str, tuple[float, float]]:
    """The RMS error of every result of ``c`` by a module, which is of ``dtype``, and its bound."""
    naive = c.cast(dtype)
    naive.dlse, naive.dlse_dot = c.dlse.astype(dtype), c.dlse_dot.astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = all_passes(naive, reference)
    truth = all_passes(c.cast(np.longdouble), reference)
    eps = float(ml_dtypes.finfo(dtype).eps)
    errors = {}
    for name, x in all_passes(c, module).items():
        finite = np.isfinite(truth[name])
        bound = rounding_bound(rounded[name][finite], truth[name][finite], eps)
        errors[name] = rms_error(x[finite], truth[name][finite]), bound
    return errors


def redraw(c: Case, dtype: Any, rng: np.random.Generator) -> Case:
    """The case with every number moved by a few eps of itself."""
    eps = float(ml_dtypes.finfo(dtype).eps)

    def jitter(x: Any) -> Any:
        if x is None:
            return None
        return (x.astype(np.longdouble) * (1 + 4 * eps * rng.uniform(-1, 1, x.shape))).astype(x.dtype)

    options = {n: jitter(a) if n in ("bias", "sinks") else a for n, a in c.options.items()}
    arrays = (*c.qkv, c.dout, c.dlse, c.dout_dot, c.dlse_dot)
    return Case(c.shape, options, *map(jitter, arrays), Tangents(*map(jitter, c.t)))


def assert_within_the_rounding_bound(c: Case, dtype: Any, *more: Case, module: Any = attngrad) -> None:
    """Twice the naive error plus 8 eps times the largest result, for every pass; by the RMS over several cases."""
    found = [rounding_errors(x, dtype, module) for x in (c, *more)]
    for name in found[0]:
        error, bound = np.sqrt(np.mean(np.square([x[name] for x in found]), axis=0))
        assert error <= bound, (name, error, bound)
