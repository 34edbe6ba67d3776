"""A case: a program, a schedule and what else a run depends on, as one line of JSON.

Whatever fails here can be written down, run again exactly, and kept: `python -m
tests.simulation.replay CASE` runs one, `corpus.jsonl` holds those that are run for ever.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .world import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Case(NamedTuple):
    """One run, or one power cut and what follows it."""

    world: str
    """Who runs it: a name in `RUNS`."""
    program: Sequence[Sequence[Step]]
    schedule: Sequence[int] = ()
    seed: int = 0
    """Of the world outside, and of what a torn write leaves."""
    cut: float | None = None
    """Where on the log of the disk the power goes, from 0 to 1."""

    def encoded(self) -> str:
        program = [[list(step) for step in lane] for lane in self.program]
        schedule = list(self.schedule)
        while schedule and schedule[-1] == 0:
            schedule.pop()  # what a schedule that has run out says anyway
        fields: dict[str, Any] = {
            "world": self.world,
            "program": program,
            "schedule": schedule,
            "seed": self.seed,
        }
        if self.cut is not None:
            fields["cut"] = self.cut
        return json.dumps(fields, separators=(",", ":"))


def decoded(line: str) -> Case:
    fields: dict[str, Any] = json.loads(line)
    program = [[Step(*step) for step in lane] for lane in fields["program"]]
    return Case(fields["world"], program, fields["schedule"], fields["seed"], fields.get("cut"))


class Ran(NamedTuple):
    """What a case came to that holds."""

    digest: str
    """Of the steps: the same for the same case, in every process."""
    disks: int = 0
    """That a power cut may have left, and that were recovered."""


RUNS: dict[str, Callable[[Case], Ran]] = {}
"""By world: runs a case, and raises what is wrong with it."""


def runs(world: str) -> Callable[[Callable[[Case], Ran]], Callable[[Case], Ran]]:
    """The function that runs the cases of a world."""

    def register(run: Callable[[Case], Ran]) -> Callable[[Case], Ran]:
        RUNS[world] = run
        return run

    return register


def hold(case: Case) -> Ran:
    """Run a case; a failure says what runs it again."""
    try:
        return RUNS[case.world](case)
    except BaseException as error:
        command = f"python -m tests.simulation.replay '{case.encoded()}'"
        error.add_note(f"replay it with: {command}")
        raise
