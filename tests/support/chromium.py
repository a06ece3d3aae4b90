"""Where the Chromium of this machine is."""

from __future__ import annotations

import shutil

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "no Chromium on this machine: what it shows was NOT tested. Install it: apt-get install chromium"
