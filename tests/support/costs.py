"""Record the CPU seconds of each test; `--durations=N` lists the files that take most at the end of the run."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the child processes it has waited for."""
    return sum(os.times()[:4])


class Costs:
    """Plugin that adds `cpu_seconds` to each report; pytest-xdist sends the field to the process that prints."""

    def __init__(self) -> None:
        self.mark = cpu_seconds()
        self.by_file, self.cases = Counter[str](), Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.mark = now - self.mark, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.by_file[file] += getattr(report, "cpu_seconds", 0.0)
        self.cases[file] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        most = config.option.durations
        if most is None:
            return
        terminalreporter.section(f"CPU seconds by file: {self.by_file.total():.0f} in all")
        for file, seconds in self.by_file.most_common(most or None):
            terminalreporter.write_line(f"{seconds:8.1f} {self.cases[file]:5} {file}")
