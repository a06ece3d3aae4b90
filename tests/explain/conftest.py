"""A page of a trace in the browser; what it says unasked fails the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import attngrad
from page_tools import Page


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Any]:
    """Open a page of a trace; whatever it says on the console, or asks of the network, fails the test."""
    pages: list[Page] = []

    def open_page(
        trace: attngrad.Trace, fragment: str = "", place: dict[str, int] | None = None, **context: Any
    ) -> Page:
        path = tmp_path / f"page{len(pages)}.html"
        trace.save(path, **(place or {}))
        pages.append(Page(browser, path, fragment, **context))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.said == []
        assert len(page.requests) == 1, page.requests
