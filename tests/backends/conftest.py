"""The instruction sets that the kernels are tried on."""

from __future__ import annotations

import pytest

import instruction_sets
from attngrad import _native

ON_TILES = ("amx", "amx-always", "avx2-tiles")


@pytest.fixture(params=instruction_sets.params(name for name in instruction_sets.ALL if name not in ON_TILES))
def isa(request):
    """Sets with kernels of their own; those on matrix tiles have test_matrix_tiles.py."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
