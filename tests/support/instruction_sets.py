"""The instruction sets that tests run on: those of this machine, and the test-only ones where they were built.

Importing this module makes the test-only sets known to the kernels. ``make test`` runs the shipped sets, of which a
machine has one per family of processors; ``make test-all`` builds the test-only ones and runs them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attngrad import _native
from tiers import thorough

SHIPPED: list[str] = _native.isa_names()
try:
    from attngrad import _test_only
except ImportError:
    pass  # make test-all builds it
else:
    _native.add_isas(_test_only.isas)
ALL: list[str] = _native.isa_names()


def params(names: Iterable[str]) -> list[Any]:
    """Parameters for those of the sets that are here; what ``make test`` leaves out is marked."""
    here = [name for name in names if name in ALL]
    return [n for n in here if n in SHIPPED] + thorough(n for n in here if n not in SHIPPED)
