"""With CI=true or EPSIM_NO_SKIPS=1, a test that is skipped fails the session, except for a reason in ALLOWED."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

ALLOWED = ("needs a GPU", "needs recordings that are not part of the repository")


def forbidden() -> bool:
    return os.environ.get("CI") == "true" or os.environ.get("EPSIM_NO_SKIPS") == "1"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def wrongly_skipped(reporter: pytest.TerminalReporter) -> list[str]:
    """One line a test: its name and the reason. Expected failures are not skips."""
    reports: Iterable[pytest.TestReport | pytest.CollectReport] = reporter.stats.get("skipped", [])
    reasons = {report.nodeid: reason_of(report) for report in reports}
    return sorted(f"{name}: {reason}" for name, reason in reasons.items() if not reason.startswith(ALLOWED))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if forbidden() and reporter is not None and session.exitstatus == 0 and wrongly_skipped(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    wrong = wrongly_skipped(terminalreporter) if forbidden() else []
    if wrong:
        terminalreporter.section("tests that must not be skipped here")
        for line in wrong:
            terminalreporter.write_line(line)
