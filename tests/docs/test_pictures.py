"""The pictures in docs/ are what the scripts beside them draw now."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from chromium import CHROMIUM, MISSING

image = pytest.importorskip("PIL.Image")
DOCS = Path(__file__).parents[2] / "docs"
MOST = 0.02
"""Share of the pixels that may differ: another version of a browser or of a font draws edges of letters otherwise."""


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differing(stored: Path, drawn: Path) -> float:
    """The share of pixels that differ by more than a shade; 1 where the sizes differ."""
    one, other = (np.asarray(image.open(path).convert("RGB"), np.int16) for path in (stored, drawn))
    return float((np.abs(one - other).max(-1) > 32).mean()) if one.shape == other.shape else 1.0


@pytest.mark.thorough
def test_the_masks_are_current(tmp_path):
    load("figures/masks.py").draw(tmp_path / "masks.png")
    assert differing(DOCS / "figures" / "masks.png", tmp_path / "masks.png") < MOST


@pytest.mark.thorough
def test_the_plot_of_the_scale_is_current(tmp_path):
    scale = load("figures/scale.py")
    scale.draw(scale.table(), tmp_path / "scale.png")
    assert differing(DOCS / "figures" / "scale.png", tmp_path / "scale.png") < MOST


@pytest.mark.thorough
def test_the_plots_of_the_benchmark_are_of_its_results(tmp_path):
    from benchmarks.plots import draw
    from benchmarks.results import Results

    found = Results.from_json(json.loads((DOCS.parent / "benchmarks" / "results.json").read_text()))
    drawn = draw(found, tmp_path)
    assert {path.name for path in drawn} == {path.name for path in (DOCS / "benchmarks").glob("*.png")}
    for path in drawn:
        assert differing(DOCS / "benchmarks" / path.name, path) < MOST, path.name


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_screenshots_are_current(tmp_path):
    shots = load("explain/screenshots.py")
    shots.main(tmp_path)
    assert {path.stem for path in (DOCS / "explain").glob("*.png")} == set(shots.SHOTS)
    for name in shots.SHOTS:
        assert differing(DOCS / "explain" / f"{name}.png", tmp_path / f"{name}.png") < MOST, name


def test_another_picture_is_seen(tmp_path):
    stored = DOCS / "explain" / "page.png"
    shutil.copy(stored, tmp_path / "page.png")
    assert differing(stored, tmp_path / "page.png") == 0
    assert differing(stored, DOCS / "explain" / "step.png") > MOST
    assert differing(stored, DOCS / "explain" / "broken.png") > MOST
