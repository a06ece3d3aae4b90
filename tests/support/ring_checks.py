"""What ranks give beside what one process gives."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import attngrad
from attngrad import reference
from attngrad.testing import relative_error, rms_error, rounding_bound
from cases import Case, Shape
from ring_workers import Pool, positions, run_case

LAYOUTS = ("zigzag", "contiguous")
SHAPE = Shape((2,), 4, 2, 9, 11, 3, 2)


def expected(c: Case, module: Any = attngrad) -> dict[str, Any]:
    """What one process gives, by the names of ``run_case``."""
    (out, lse), pullback = module.vjp(*c.qkv, return_lse=True, **c.options)
    _, (out_dot, lse_dot) = module.jvp(c.qkv, c.t[:3], return_lse=True, **c.tangents, **c.options)
    named = {"out": out, "lse": lse, "out_dot": out_dot, "lse_dot": lse_dot}
    named |= {f"d{name}": g for name, g in pullback(c.dout, c.dlse)._asdict().items()}
    return {name: x for name, x in named.items() if x is not None}


def joined(parts: list[dict[str, Any]], c: Case, layout: str, lengths: Any = (None, None)) -> dict[str, Any]:
    """The results of ranks as one: tokens in their places, shares of what ranks share added up."""
    whole = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        if name == "dsinks" or (name == "dbias" and (each[0].ndim < 2 or c.options["bias"].shape[-2] == 1)):
            whole[name] = sum(x.astype(np.float64) for x in each)
            continue
        side = int(name in ("dk", "dv"))
        n = (c.k if side else c.q).shape[-2]
        places = np.concatenate(positions(n, len(parts), layout, lengths[side]))
        axis = -1 if name in ("lse", "lse_dot") else -2
        whole[name] = np.take(np.concatenate(each, axis), np.argsort(places), axis)
    return whole


def assert_equal(
    pool: Pool, c: Case, ranks: int, layout: str, lengths: Any = (None, None), backend: str | None = None
) -> None:
    """The results of ranks, by a backend, are those of one process, by the kernels."""
    want = expected(c)
    got = joined(pool.run(ranks, run_case, c, layout, lengths, backend), c, layout, lengths)
    assert got.keys() == want.keys()
    for name, x in want.items():
        finite = np.isfinite(x)
        assert np.array_equal(finite, np.isfinite(got[name])), name
        assert relative_error(got[name][finite], x[finite]) < 1e-12, name


def assert_within_rounding(pool: Pool, c: Case, ranks: int, layout: str, backend: str | None = None) -> None:
    """``c`` is of a low precision; the rule is twice the error of the naive computation, and 8 eps."""
    dtype = c.q.dtype
    got = joined(pool.run(ranks, run_case, c, layout, (None, None), backend), c, layout)
    naive = c.cast(dtype)
    naive.dlse = c.dlse.astype(dtype)
    rounded, truth = expected(naive, reference), expected(c.cast(np.longdouble), reference)
    assert got.keys() == truth.keys()
    for name, x in got.items():
        bound = rounding_bound(rounded[name], truth[name], float(ml_dtypes.finfo(dtype).eps))
        assert rms_error(x, truth[name]) <= bound, name
