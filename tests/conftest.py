"""What all tests share. Hypothesis runs the same examples on every machine, and never judges by the clock."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import attngrad

for folder in ("support", "robustness"):  # what other tests import
    sys.path.insert(0, str(Path(__file__).parent / folder))
pytest.register_assert_rewrite("jax_tools", "torch_tools")  # what they find unequal is shown as in a test

settings.register_profile("attngrad", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("attngrad")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window. Where there is none, the test is skipped; under CI=true it fails."""
    from chromium import CHROMIUM, MISSING

    if CHROMIUM is None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def threads() -> Iterator[Any]:
    """Set the number of threads; it is put back afterwards."""
    before = attngrad.get_num_threads()
    yield attngrad.set_num_threads
    attngrad.set_num_threads(before)
