"""Reads the index and loads a candidate as its user would import it."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INDEX: list[dict[str, Any]] = tomllib.loads((HERE / "index.toml").read_text())["candidate"]
VARIATIONS: list[dict[str, Any]] = tomllib.loads((HERE / "variations.toml").read_text())["candidate"]


def label(entry: dict[str, Any]) -> str:
    """file:name, as on the command line."""
    return f"{entry['file']}:{entry['name']}"


def load(entry: dict[str, Any]) -> Any:
    """The function, the class, the instance made with ``arguments``, or the (forward, backward) pair."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    module = importlib.import_module(entry["file"].removesuffix(".py").replace("/", "."))
    found = getattr(module, entry["name"])
    if "backward" in entry:
        return found, getattr(module, entry["backward"])
    return found(**entry["arguments"]) if "arguments" in entry else found
