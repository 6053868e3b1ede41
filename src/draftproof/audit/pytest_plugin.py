"""Pytest plug-in: `pytest --audit-url URL` and the fixture `audit_report`.

Tests that use the fixture are skipped without the option. The options are read once a session.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from draftproof.audit.report.verdict import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plug-in."""
    group = parser.getgroup("draftproof audit")
    group.addoption("--audit-url", help="OpenAI-compatible endpoint that the fixture audit_report audits")
    group.addoption("--audit-model", help="name of the model (default: the first of the endpoint)")
    group.addoption("--audit-key-env", help="environment variable that holds the API key")
    group.addoption("--audit-suite", default="quick", choices=("quick", "full"), help="size of the audit")


@pytest.fixture(scope="session")
def audit_report(pytestconfig: pytest.Config) -> Report:
    """Return the report of one audit of the endpoint given by --audit-url."""
    url = pytestconfig.getoption("--audit-url")
    if not url:
        pytest.skip("needs --audit-url")
    from draftproof.audit.runner import audit

    variable = pytestconfig.getoption("--audit-key-env")
    if variable and not os.environ.get(variable):
        pytest.fail(f"--audit-key-env: the environment has no {variable}")
    return audit(
        url,
        model=pytestconfig.getoption("--audit-model"),
        key=os.environ[variable] if variable else None,
        suite=pytestconfig.getoption("--audit-suite"),
    )
