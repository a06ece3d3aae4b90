"""Self-contained pages: a template, and a Content-Security-Policy that allows its own style and script alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources


@lru_cache
def text(package: str, name: str) -> str:
    """A file of the folder ``page`` of a package."""
    return (resources.files(package) / "page" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def policy(style: str, script: str | None = None) -> str:
    """What the page may use: this style and this script, and nothing else."""
    allowed = "" if script is None else f"script-src '{_hash(script)}'; "
    return f"default-src 'none'; {allowed}style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"


def fill(template: str, parts: Mapping[str, str]) -> str:
    """The template, which is text and names in turn: @CSP@ and the like."""
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(template.split("@")))
