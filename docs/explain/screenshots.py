"""Take the screenshots of docs/explain.md again; needs playwright, Pillow and Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

import attngrad
from attngrad.explain import examples

HERE = Path(__file__).parent
SHOTS = {  # name: width, height, theme, link
    "page": (1440, 780, "light", "#cell=dK,1,0"),
    "step": (1440, 780, "dark", "#step=dS&cell=dS,2,1"),
    "broken": (1440, 780, "light", "#break=mean&cell=dS,3,1"),
    "phone": (375, 760, "light", "#cell=Q,2,1"),
}


def main(target: Path = HERE) -> None:
    """Write one small PNG per shot."""
    arrays, tokens = examples.make(None, None, None, 0)
    dout = np.random.default_rng([0, 1]).standard_normal(arrays["q"].shape)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder) / "page.html"
        attngrad.trace(arrays["q"], arrays["k"], arrays["v"], dout, tokens=tokens, causal=True).save(page)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, theme, link) in SHOTS.items():
            size = {"width": width, "height": height}
            tab = browser.new_page(viewport=size, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
            tab.goto(page.as_uri() + link)
            image = Image.open(io.BytesIO(tab.screenshot()))
            small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            small.save(target / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
