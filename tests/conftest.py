"""Hypothesis profiles, chosen by ONEPEN_PROFILE (`ci` where CI is set, `dev` otherwise).

Every profile runs without a deadline, because a busy machine is not a bug, and prints the blob that
reproduces a failure. Only `ci` is derandomised: a merge must not depend on luck.

What the tests say that they have looked at is counted here, over all processes, and held against
the goals of the campaign (`proving.py`).
"""

import time

import pytest
from hypothesis import HealthCheck, settings

from .proving import PROFILE, PROOF, Tally, add_soak, lines_of, report_of, write_report

# The conformance suite is library code; pytest shows what its assertions compared only if it is
# told before the first import.
pytest.register_assert_rewrite("onepen.runtime.testing.conformance")

_EXAMPLES_MAX = {
    "dev": 50,
    "ci": 200,  # keeps the whole suite well under ten minutes on two cores
    "proof": 2_000,
    "nightly": 20_000,
}

for _name, _examples_max in _EXAMPLES_MAX.items():
    settings.register_profile(
        _name,
        max_examples=_examples_max,
        deadline=None,
        derandomize=_name == "ci",
        print_blob=True,
        # Real files and real threads are slow to draw for; that says nothing about the code.
        suppress_health_check=[HealthCheck.too_slow],
    )

# An unknown name raises here, so that a misspelt profile never runs the wrong numbers.
settings.load_profile(PROFILE)


class Proving:
    """Counts what the tests have looked at; in the process that hears of all of them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tally = Tally()
        self._begun_s = time.monotonic()
        if PROOF:
            add_soak(self._tally, config.rootpath / "build" / "proof")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tally.failed.append(report.nodeid)
        if report.when != "call":
            return
        moved = self._tally.add(report.nodeid, report.user_properties, report.duration)
        if PROOF and moved:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            assert terminal is not None
            terminal.ensure_newline()
            for line in lines_of(self._tally, moved):
                terminal.write_line(f"{time.monotonic() - self._begun_s:>5.0f} s  {line}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if PROOF and exitstatus == pytest.ExitCode.OK and self._tally.missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tally.counts:
            return
        terminalreporter.section("what was looked at")
        for line in lines_of(self._tally):
            terminalreporter.write_line(line)
        if PROOF:
            tests = {
                name: len(terminalreporter.stats.get(name, ()))
                for name in ("passed", "failed", "error", "skipped")
            }
            report = report_of(self._tally, time.monotonic() - self._begun_s, tests)
            path = write_report(report, self._config.rootpath / "build" / "proof")
            for line in self._tally.missing():
                terminalreporter.write_line(f"too little: {line}", red=True)
            terminalreporter.write_line(f"the report: {path.relative_to(self._config.rootpath)}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist hears of its own tests only
        config.pluginmanager.register(Proving(config), "proving")
