"""The account of what was proved: a goal is met by what was counted, and by nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .proving import GOALS, Tally, add_soak, report_of, write_report

if TYPE_CHECKING:
    from pathlib import Path

PASSED = {"passed": 3, "failed": 0}


def whole() -> Tally:
    """As much as is asked for, of everything."""
    tally = Tally()
    for goal in GOALS:
        for kind, least in goal.least.items():
            if goal.name != "PROOF-8":
                tally.add("a test", [(kind, least)], 2.0)
    tally.add("a test", [("planted bug", f"bug {n}: a check") for n in range(15)], 1.0)
    return tally


def test_what_is_asked_for_and_counted_leaves_nothing_missing() -> None:
    report = report_of(whole(), 60.0, PASSED)
    assert report["missing"] == []
    assert all(goal["met"] for goal in report["goals"])


def test_one_too_few_is_missing() -> None:
    tally = whole()
    tally.counts["double-crash images"] -= 1
    assert tally.missing() == ["PROOF-4: 399 of 400 double-crash images"]
    (unmet,) = [g for g in report_of(tally, 60.0, PASSED)["goals"] if not g["met"]]
    assert unmet["name"] == "PROOF-4"


def test_what_no_goal_asks_for_is_not_counted() -> None:
    tally = Tally()
    assert tally.add("a test", [("kisses", 7), ("images", "430")], 4.0) == ["PROOF-4"]
    assert dict(tally.counts) == {"images": 430}
    assert tally.seconds["PROOF-4"] == 4.0


def test_a_soak_counts_if_it_was_sound(tmp_path: Path) -> None:
    for sound, counted in ((True, 60), (False, 0)):
        soak = {
            "sound": sound,
            "interrupted": False,
            "plan": {"duration_s": 60.0},
            "seconds": 70.0,
        }
        (tmp_path / "soak.json").write_text(json.dumps(soak))
        tally = Tally()
        add_soak(tally, tmp_path)
        assert tally.counts["seconds of sound soak"] == counted


def test_the_report_names_what_failed_and_which_check_caught_what(tmp_path: Path) -> None:
    tally = whole()
    tally.failed.append("tests/some.py::test_it")
    path = write_report(report_of(tally, 61.0, {"passed": 2, "failed": 1}), tmp_path)
    told = path.read_text()
    assert "tests/some.py::test_it" in told
    assert "bug 7: a check" in told
    assert json.loads((tmp_path / "report.json").read_text())["failed"] == tally.failed
