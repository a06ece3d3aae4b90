"""The ranks that the tests of a worker share."""

from __future__ import annotations

from typing import Any

import pytest

from ring_workers import Pool


@pytest.fixture(scope="session")
def pool() -> Any:
    ranks = Pool()
    yield ranks
    ranks.close()
