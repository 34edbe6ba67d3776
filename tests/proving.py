"""What a run of the suite has proved: the goals of the campaign, what was counted, and the report.

A test that belongs to a goal says how much it has looked at: `record_property("interleavings",
2000)`. The sum of all tests, over all processes, is held against the goal. `make proof` asks for
the whole of each; `make test` has a share, which only shows that the counting works. A soak needs
the machine for itself: it runs before the tests, and leaves its report.

Must never change what a test finds: a run fails by a goal only where every test has passed and yet
too little was looked at.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PROFILE = os.environ.get("ONEPEN_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
PROOF = PROFILE in ("proof", "nightly")
FOLDER = Path("build/proof")


@dataclass(frozen=True, slots=True)
class Goal:
    """So much of each of these things, in a whole run of `make proof`."""

    name: str
    shows: str
    least: Mapping[str, int]


GOALS = (
    Goal(
        "PROOF-1",
        "random programs under random schedules, with cancelled and crashing tasks",
        {"interleavings": 20_000},
    ),
    Goal(
        "PROOF-2",
        "canonical programs, every schedule with at most two choices against the default",
        {"programs searched completely": 12, "schedules searched": 20_000},
    ),
    Goal(
        "PROOF-3",
        "whole runtimes on a disk that loses its power, recovered twice",
        {"power cuts of a runtime": 3_000},
    ),
    Goal(
        "PROOF-4",
        "every I/O operation of every kind of transaction as the last one, also in a recovery",
        {"images": 10_000, "double-crash images": 400},
    ),
    Goal("PROOF-5", "every I/O operation failing, once or for good", {"I/O error runs": 1_000}),
    Goal(
        "PROOF-6",
        "processes killed by SIGKILL at named points, then started again",
        {"kills": 1_000},
    ),
    Goal(
        "PROOF-7",
        "any text as a query, any content as a message",
        {"search queries": 100_000, "message bodies": 20_000},
    ),
    Goal("PROOF-8", "planted bugs, each caught by the check that is for it", {"planted bugs": 15}),
    Goal(
        "PROOF-9",
        "stored cases, replayed step by step in processes with other hash seeds",
        {"replays": 100},
    ),
    Goal(
        "PROOF-10",
        "a process under load with real threads, cancelled callers and signals",
        {"seconds of sound soak": 60},
    ),
    Goal(
        "protocol",
        "every state of the protocol in small scopes, and its runs on the real engine",
        {"protocol states": 500_000, "protocol traces replayed": 500},
    ),
)
KINDS = {kind: goal for goal in GOALS for kind in goal.least}


@dataclass(slots=True)
class Tally:
    """What the tests of a run have said."""

    counts: Counter[str] = field(default_factory=Counter[str])
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    caught: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])

    def add(self, test: str, properties: Iterable[tuple[str, object]], seconds: float) -> list[str]:
        """Count one test; returns which goals it has moved."""
        moved: dict[str, None] = {}
        for kind, value in properties:
            if kind == "planted bug":
                self.caught.append(str(value))
                self.counts["planted bugs"] += 1
                moved["PROOF-8"] = None
            elif kind in KINDS:
                self.counts[kind] += int(str(value))
                moved[KINDS[kind].name] = None
        for name in moved:
            self.seconds[name] += seconds / len(moved)
        return list(moved)

    def missing(self) -> list[str]:
        """What the goals ask for and was not looked at."""
        return [
            f"{goal.name}: {self.counts[kind]:,} of {least:,} {kind}"
            for goal in GOALS
            for kind, least in goal.least.items()
            if self.counts[kind] < least
        ]


def add_soak(tally: Tally, folder: Path = FOLDER) -> None:
    """What `onepen stress --profile soak` has left; one that was not sound counts for nothing."""
    path = folder / "soak.json"
    if not path.exists():
        return
    soak = json.loads(path.read_text())
    if soak["sound"] and not soak["interrupted"]:
        seconds = soak["plan"]["duration_s"]
        tally.add("soak", [("seconds of sound soak", int(seconds))], soak["seconds"])


def lines_of(tally: Tally, names: Iterable[str] = ()) -> list[str]:
    """One line for each goal, or for some of them; a share is not held against the whole."""
    wanted = set(names)
    lines: list[str] = []
    for goal in GOALS:
        if wanted and goal.name not in wanted:
            continue
        told = [
            f"{tally.counts[kind]:,}{f' of {least:,}' if PROOF else ''} {kind}"
            for kind, least in goal.least.items()
            if PROOF or tally.counts[kind]
        ]
        if told:
            lines.append(f"{goal.name:<9} {', '.join(told)}")
    return lines


def versions() -> dict[str, str]:
    found = {
        "onepen": version("onepen"),
        "Python": platform.python_version(),
        "SQLite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
        "trio": trio.__version__,
    }
    for name in ("hypothesis", "pytest", "trio-asyncio", "msgspec"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def report_of(tally: Tally, seconds: float, tests: Mapping[str, int]) -> dict[str, Any]:
    """Everything as one JSON value."""
    return {
        "profile": PROFILE,
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "tests": dict(tests),
        "goals": [
            {
                "name": goal.name,
                "shows": goal.shows,
                "counts": {kind: tally.counts[kind] for kind in goal.least},
                "least": dict(goal.least),
                "test_seconds": round(tally.seconds[goal.name], 1),
                "met": all(tally.counts[kind] >= n for kind, n in goal.least.items()),
            }
            for goal in GOALS
        ],
        "planted_bugs": sorted(tally.caught),
        "failed": sorted(tally.failed),
        "missing": tally.missing(),
    }


def markdown_of(report: Mapping[str, Any]) -> str:
    """The same for people."""
    tests = ", ".join(f"{count:,} {name}" for name, count in report["tests"].items())
    lines = [
        "# What was proved",
        "",
        f"`make proof`, profile `{report['profile']}`: {tests}, in {report['seconds']:,.0f} s on "
        f"{report['cores']} cores ({report['kernel']}).",
        "",
        "| goal | what | counted | asked for | a second |",
        "|---|---|---:|---:|---:|",
    ]
    for goal in report["goals"]:
        for kind, count in goal["counts"].items():
            rate = f"{count / goal['test_seconds']:,.0f}" if goal["test_seconds"] else ""
            lines.append(
                f"| {goal['name']} | {kind}: {goal['shows']} | {count:,} | "
                f"{goal['least'][kind]:,} | {rate} |"
            )
    lines += ["", "Violations: " + (", ".join(report["failed"]) or "none") + "."]
    if report["missing"]:
        lines += ["", "Too little was looked at: " + "; ".join(report["missing"]) + "."]
    lines += ["", "## Planted bugs, and what caught each", ""]
    lines += [f"- {line}" for line in report["planted_bugs"]]
    lines += ["", "## Versions", ""]
    lines += [f"- {name} {number}" for name, number in report["versions"].items()]
    return "\n".join(lines) + "\n"


def write_report(report: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    path = folder / "report.md"
    path.write_text(markdown_of(report))
    return path
