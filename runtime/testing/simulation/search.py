"""All schedules of a small program, up to a number of preemptions.

Most bugs of concurrency need few preemptions, in the right places. With at most one or two of them
the schedules of a small program can be run completely, and that no run fails is then a statement
about all of them, not about a sample.

Keeps:
- Each schedule is run once. A switch away from a task that could go on is a preemption; the choice
  of who follows a task that waits or has ended is free.
- Fewer preemptions come first, so the first failure is one of the simplest.
- The search is complete only if nothing was left out: no limit of runs was hit, and no run went
  beyond its budget, behind which there are no choices to vary. With `only_at` it is complete for
  the choices of those steps, and says nothing about others.

Free choices multiply: ten of them between two tasks are a thousand schedules without a preemption.
A search with `free_switches=False` counts each choice other than 0, so that it comes to an end for
a whole runtime as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ....storage.errors import InvariantError
from .runs import BUDGET, digest_of, execute, probe
from .scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(frozen=True, slots=True)
class Exploration:
    """What a search that found no failure looked at."""

    runs: int
    traces: int
    """Different ones: two schedules may come to the same steps."""
    complete: bool


class _Branch(NamedTuple):
    """A run to make: like an earlier one up to a choice, then differently."""

    choices: list[int]
    candidates: list[tuple[str, ...]]
    position: int
    instead: int

    def prefix(self) -> list[int]:
        return [*self.choices[: self.position], self.instead]


def explore(
    main_factory: Callable[[], Callable[[], Awaitable[object]]],
    *,
    preemptions_max: int = 2,
    runs_max: int | None = None,
    budget: int = BUDGET,
    only_at: Callable[[str], bool] | None = None,
    free_switches: bool = True,
) -> Exploration:
    """Run every schedule with at most this many preemptions, each on a fresh `main_factory()`.

    The first failure is raised as `simulate` would raise it, with the schedule in its note. The
    number of runs grows with the steps to the power of the preemptions, and every free switch
    multiplies it: with five tasks, tens of thousands even without a preemption. Keep the program
    small, or give `runs_max` and look at `complete`.

    `budget` is that of `simulate`; a program that polls needs a small one. `only_at` is asked about
    steps as they stand in a trace: a choice other than 0 is tried only for those that it accepts,
    so that helper tasks don't multiply the schedules. Without `free_switches` every choice other
    than 0 counts, also where the task that ran last waits.
    """
    if preemptions_max < 0:
        raise ValueError("preemptions_max must not be negative")
    probe()
    pending: list[list[_Branch]] = [[] for _ in range(preemptions_max + 1)]
    pending[0].append(_Branch([], [], -1, 0))
    runs, traces, within_budget = 0, set[str](), True
    while (preemptions := next((n for n, left in enumerate(pending) if left), None)) is not None:
        if runs == runs_max:
            return Exploration(runs=runs, traces=len(traces), complete=False)
        branch = pending[preemptions].pop()
        # The first run has no choice to vary, and an empty prefix.
        prefix = branch.prefix() if branch.position >= 0 else []
        scheduler = Scheduler(prefix, budget)
        runs += 1
        try:
            execute(main_factory(), (), scheduler)
        except BaseException as error:
            error.add_note(f"found by run {runs} of a search, with {preemptions} preemptions")
            raise
        _check_replay(branch, prefix, scheduler)
        traces.add(digest_of(scheduler.trace))
        within_budget = within_budget and len(scheduler.taken) <= budget
        for position in range(len(prefix), min(len(scheduler.taken), budget)):
            # Behind its prefix a run takes 0 everywhere, so nothing is spent there.
            spent = preemptions + (not free_switches or scheduler.preempting[position])
            if spent <= preemptions_max:
                pending[spent] += [
                    _Branch(scheduler.taken, scheduler.candidates, position, instead)
                    for instead, step in enumerate(scheduler.candidates[position])
                    if instead > 0 and (only_at is None or only_at(step))
                ]
    return Exploration(runs=runs, traces=len(traces), complete=within_budget)


def _check_replay(branch: _Branch, prefix: list[int], scheduler: Scheduler) -> None:
    """Up to where it was to differ, a run must be like the one that it was derived from."""
    size = len(prefix)
    if scheduler.taken[:size] != prefix or scheduler.candidates[:size] != branch.candidates[:size]:
        raise InvariantError(
            f"the schedule {prefix} did not come to the same choices when it was replayed",
            hint="the program takes something that is in no schedule: a clock, chance, the order "
            "of a set, or state of an earlier run",
        )
