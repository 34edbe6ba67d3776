"""What a campaign has counted, at the end of the run: `record_property("images", 430)` and the
like.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

COUNTED = ("images", "double-crash images", "I/O error runs", "kills", "planted bugs caught")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name in COUNTED:
                    totals[name] += int(str(value))
    if totals:
        terminalreporter.section("crash campaign")
        for name in COUNTED:
            if name in totals:
                terminalreporter.write_line(f"{totals[name]:>8,} {name}")
