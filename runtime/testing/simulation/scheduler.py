"""The scheduler of a simulated run: it takes the place of trio's random source, for one run.

Keeps:
- One task goes one step at a time, and which one is a choice from the schedule. So everything that
  can happen between two checkpoints of the program's tasks can be asked for, by numbers.
- Choice 0 is the task that ran last, if it can go on; the others follow by age. A schedule of zeros
  preempts nobody.
- Whatever the schedule, every task that can run does run in the end: behind the budget, whoever has
  waited longest is next. A run that can't end is given up, never waited for.
- Trio's private names are as they were before when the run is over, however it ended.

Trio's own tasks (`<init>` and the one behind `run_sync_soon`) go first, are no choice and leave no
trace: to interleave them would multiply the schedules and show nothing about the program.

Must never raise into trio's loop while the program can still be ended in order.
"""

from __future__ import annotations

import importlib
import random
import re
import threading
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, final

import trio

from ....storage.errors import InvariantError, OnepenError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, MutableSequence

# A jump of the mock clock takes one pass without a task; several in a row mean that no deadline is
# left to jump to.
_IDLE_PASSES_MAX = 10

# A second or two for the usual budget: a program that is still going then is one that never ends.
_STEPS_MAX = 10_000
_STEPS_PER_CHOICE_MAX = 4

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

# Trio's names are there once for the whole process. Reentrant, so that a run inside a run gets
# trio's own clear error and not a deadlock.
_TAKING_OVER = threading.RLock()


class SimulationUnsupportedError(OnepenError):
    """This trio does not let its scheduling be chosen."""

    hint = "simulate with a version of trio that onepen was tested with"

    def __init__(self, problem: str) -> None:
        super().__init__(f"trio {trio.__version__} can't be simulated: {problem}")
        self.problem = problem
        self.trio_version = trio.__version__


class SimulationStuckError(OnepenError):
    """A simulated program does not come to its end under this schedule."""

    hint = "a wake-up is missing, or a loop never ends; a long program needs a larger budget"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@final
class Scheduler(random.Random):
    """Makes the choices of one run and records them. Use it once, on the thread that made it."""

    def __init__(self, schedule: Iterable[int], budget: int) -> None:
        super().__init__(0)
        self.trace: list[str] = []
        self.taken: list[int] = []
        self.candidates: list[tuple[str, ...]] = []
        """Of each choice: the steps that it was between, in the order of their numbers."""
        self.preempting: list[bool] = []
        """Of each choice: whether anything but 0 takes the turn from a task that could go on."""
        self.scope = trio.CancelScope()
        """Around the program; cancelled when the run is given up."""
        self.gave_up: str | None = None
        # Looked at before the run: an error inside trio's loop would take the loop down.
        self._schedule = iter([index(choice) for choice in schedule])
        self._budget = budget
        self._steps_max = max(_STEPS_MAX, budget * _STEPS_PER_CHOICE_MAX)
        self._idle_passes = 0
        # Tasks are kept by their numbers: a reference would keep their frames alive.
        self._last = -1
        self._waiting_since: dict[int, int] = {}
        self._thread = threading.get_ident()
        self._context = _internals()[0].GLOBAL_RUN_CONTEXT

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Leave one task in the batch, and put the others back to where trio took them from.

        Trio calls it once for each pass, with the tasks that can run, sorted by age.
        """
        if threading.get_ident() != self._thread:
            super().shuffle(x)  # a loop in another thread, which has nothing to do with the run
            return
        if not x:
            self._idle_passes += 1
            if self._idle_passes >= _IDLE_PASSES_MAX:
                self._give_up("every task waits, and nothing is left that would wake one")
            return
        self._idle_passes = 0
        runner = self._context.runner
        chosen = next((task for task in x if task.name.startswith("<")), None)
        if chosen is None:
            chosen = x[0] if len(x) == 1 else self._choose(x)
            self._last = chosen._counter
            self._waiting_since.pop(self._last, None)
            self.trace.append(self._step_of(chosen))
        runner.runq.extend(task for task in x if task is not chosen)
        x[:] = [chosen]
        if len(self.trace) >= self._steps_max:
            self._give_up(f"the program has not ended after {len(self.trace)} steps")

    def _choose(self, batch: MutableSequence[Any]) -> Any:
        order = sorted(batch, key=lambda task: task._counter != self._last)  # stable: by age
        if len(self.taken) < self._budget:
            taken = next(self._schedule, 0) % len(order)
        else:
            for task in order:
                self._waiting_since.setdefault(task._counter, len(self.trace))
            waits = [self._waiting_since[task._counter] for task in order]
            taken = waits.index(min(waits))
        self.taken.append(taken)
        self.candidates.append(tuple(self._step_of(task) for task in order))
        self.preempting.append(order[0]._counter == self._last)
        return order[taken]

    def _step_of(self, task: Any) -> str:
        # Relative to the run's first task: trio counts tasks through the life of the process.
        number = task._counter - self._context.runner.init_task._counter
        return f"{_ADDRESS.sub('', task.name)}#{number}"

    def _give_up(self, reason: str) -> None:
        """Cancel the program; what is not even ended by that stops the loop itself."""
        if self.gave_up is not None:
            raise InvariantError(
                f"{reason}, although the run was cancelled",
                hint="a shield holds something that never ends",
            )
        self.gave_up = reason
        self._idle_passes = 0
        self._steps_max += len(self.trace)
        self.scope.cancel()

    def replaying(self) -> list[int]:
        """The shortest schedule that makes the same choices."""
        choices = self.taken[: self._budget]
        while choices and choices[-1] == 0:
            choices.pop()
        return choices


class _NoThreads:
    """Stands for trio's threads: a result that comes from one would come at any time."""

    def __init__(self, threads: Any) -> None:
        self._threads = threads
        self._thread = threading.get_ident()

    def start_thread_soon(self, *arguments: Any) -> None:
        if threading.get_ident() != self._thread:
            self._threads.start_thread_soon(*arguments)
            return
        raise InvariantError(
            "a thread was asked for inside a simulated run",
            hint="run it inline: what a thread does is in no schedule",
        )


def _internals() -> tuple[Any, Any]:
    """The two modules of trio whose names are replaced, if they still have them."""
    needed = (
        ("trio._core._run", ("_r", "_ALLOW_DETERMINISTIC_SCHEDULING", "GLOBAL_RUN_CONTEXT")),
        ("trio._core._thread_cache", ("THREAD_CACHE",)),
    )
    modules: list[Any] = []
    for path, names in needed:
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            raise SimulationUnsupportedError(f"it has no module {path}") from error
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise SimulationUnsupportedError(f"{path} has no {', '.join(missing)}")
        modules.append(module)
    run, threads = modules
    return run, threads


@contextmanager
def in_charge(scheduler: Scheduler) -> Generator[None]:
    """Let trio ask this scheduler, for as long as the block lasts, and have no threads."""
    run, threads = _internals()
    with _TAKING_OVER:
        before = run._r, run._ALLOW_DETERMINISTIC_SCHEDULING, threads.THREAD_CACHE
        run._r, run._ALLOW_DETERMINISTIC_SCHEDULING = scheduler, True
        threads.THREAD_CACHE = _NoThreads(threads.THREAD_CACHE)
        try:
            yield
        finally:
            run._r, run._ALLOW_DETERMINISTIC_SCHEDULING, threads.THREAD_CACHE = before
