"""Pytest plug-in: `--cpu-times N` prints the N test files that used most CPU time, child processes included.

CPU seconds do not depend on what else runs on the machine. Fixtures count for the first test that uses them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """CPU seconds by test file: measured where tests run, added up where reports arrive."""

    def __init__(self, num_files: int) -> None:
        self._num_files = num_files
        self._by_file: Counter[str] = Counter()
        self._last = cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self._last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self._last = now - self._last, now  # sent to the controller with the report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.nodeid.split("::")[0]] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CPU seconds of tests: {sum(self._by_file.values()):.0f}")
        for name, seconds in self._by_file.most_common(self._num_files):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "print the CPU seconds of the N test files that used most"
    parser.addoption("--cpu-times", type=int, metavar="N", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_times:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))
