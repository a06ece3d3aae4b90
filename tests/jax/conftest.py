"""The tests of the bridge compile quickly and compute in float64."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield
