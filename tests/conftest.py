"""Hypothesis runs the same examples on every machine, and never judges by the clock."""

import sys
from pathlib import Path

from hypothesis import settings

for folder in ("support", "robustness"):  # what other tests import
    sys.path.insert(0, str(Path(__file__).parent / folder))

settings.register_profile("attngrad", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("attngrad")
