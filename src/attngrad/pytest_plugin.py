"""The pytest plugin: the fixture ``attngrad_audit``, whose failure message is the auditor's report.

Installed with attngrad, through the entry point ``pytest11``; nothing is imported before a test asks for the fixture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attngrad.auditor.report import AuditReport

EFFORTS = ("quick", "default", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options of the plugin."""
    group = parser.getgroup("attngrad", "the auditor of attention gradients")
    group.addoption("--attngrad-effort", choices=EFFORTS, help="effort of every attngrad_audit that names none")
    group.addoption("--attngrad-reports", metavar="FOLDER", help="write each report here, as HTML and JSON")


@pytest.fixture
def attngrad_audit(request: pytest.FixtureRequest) -> Callable[..., AuditReport]:
    """``attngrad_audit(candidate, **keywords)``: fails with the report unless the candidate is right.

    Keywords as of ``attngrad.testing.assert_right``. The report of a right candidate comes back.
    """
    effort: str | None = request.config.getoption("--attngrad-effort")
    folder: str | None = request.config.getoption("--attngrad-reports")
    count = 0

    def check(candidate: Any, *, framework: str = "numpy", **keywords: Any) -> AuditReport:
        from attngrad.core import files
        from attngrad.testing import audit_by

        nonlocal count
        __tracebackhide__ = True
        if effort is not None:
            keywords.setdefault("effort", effort)
        report = audit_by(framework)(candidate, **keywords)
        if folder is not None:
            count += 1
            name = re.sub(r"\W+", "_", request.node.nodeid) + (f"_{count}" if count > 1 else "")
            Path(folder).mkdir(parents=True, exist_ok=True)
            files.replace(str(Path(folder) / f"{name}.html"), report.to_html().encode())
            files.replace(str(Path(folder) / f"{name}.json"), report.to_json().encode())
        if not report.ok:
            pytest.fail(f"\n{report}", pytrace=False)
        return report

    return check
