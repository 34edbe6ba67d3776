"""One simulated run: a program, a schedule, and what happened.

A run is a function of the program and the schedule: the clock jumps by itself, no thread can be
started, no garbage is collected meanwhile, and every choice between tasks that could go on is taken
from the schedule. What the program takes from elsewhere (a wall clock, chance, the order of a set,
real I/O) is not covered, and makes the same schedule mean different things.

A failure leaves as the program raised it, with a note that says what replays it.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Generic, TypeVar, TypeVarTuple

import trio
import trio.testing

from ....storage.errors import InvariantError
from .scheduler import Scheduler, SimulationStuckError, SimulationUnsupportedError, in_charge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Arguments = TypeVarTuple("Arguments")

BUDGET = 5000
_TAIL = 20  # steps in a note: enough to see the last few turns of each task


@dataclass(frozen=True, slots=True)
class Run(Generic[T_co]):
    """What a run came to. Equal digests mean that the same tasks went the same steps."""

    value: T_co
    trace: tuple[str, ...]
    """The steps in their order, each as the task's name and its number within the run."""
    choices: tuple[int, ...]
    """What was chosen wherever more than one task could go on; as a schedule, it replays the run.
    """
    widths: tuple[int, ...]
    """Of each choice, between how many tasks."""
    digest: str


def simulate(
    main: Callable[[*Arguments], Awaitable[T]],
    schedule: Sequence[int] = (),
    *args: *Arguments,
    budget: int = BUDGET,
) -> Run[T]:
    """Run `main(*args)` under this schedule, on a mock clock that jumps.

    Each number of the schedule is one choice between the tasks that can go on, modulo their number:
    0 is the one that ran last, and what a schedule that has run out says. Behind `budget` choices
    the tasks take turns, so that no schedule can starve one.

    Blocks until `main` has ended; call it outside of any trio run. Raises what `main` raises, with
    a note that holds the schedule; `SimulationStuckError` if `main` can't end; `InvariantError`
    if a thread was asked for or is left behind; `SimulationUnsupportedError`.
    """
    probe()
    scheduler = Scheduler(schedule, budget)
    value = execute(main, args, scheduler)
    return Run(
        value=value,
        trace=tuple(scheduler.trace),
        choices=tuple(scheduler.taken),
        widths=tuple(map(len, scheduler.candidates)),
        digest=digest_of(scheduler.trace),
    )


def execute(
    main: Callable[[*Arguments], Awaitable[T]], args: tuple[*Arguments], scheduler: Scheduler
) -> T:
    """The run itself, with the scheduler's records left to the caller."""
    threads = set(threading.enumerate())
    collecting = gc.isenabled()

    @wraps(main)  # the trace shows the task under the program's own name
    async def watched() -> T:
        with scheduler.scope:
            value = await main(*args)
            if scheduler.gave_up is None:
                return value
        raise SimulationStuckError(scheduler.gave_up or "the run was cancelled")

    # A collector runs when it likes, and what it finalizes may do things: an asyncio task that
    # failed and that nobody awaited is reported then.
    gc.disable()
    try:
        with in_charge(scheduler):
            value = trio.run(watched, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(_note(scheduler))
        raise
    finally:
        if collecting:
            gc.enable()
    left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    if left:
        raise InvariantError(
            f"a simulated run left threads behind: {', '.join(left)}",
            hint="run it inline: what a thread does is in no schedule",
        )
    return value


def digest_of(trace: Sequence[str]) -> str:
    """The same for the same steps, in every process."""
    return hashlib.blake2b("\n".join(trace).encode(), digest_size=16).hexdigest()


def _note(scheduler: Scheduler) -> str:
    lines = [f"replay it with: simulate(main, {scheduler.replaying()})"]
    if scheduler.gave_up is not None:
        lines.append(f"the run was given up: {scheduler.gave_up}")
    lines.append(f"the last of {len(scheduler.trace)} steps:")
    lines += [f"  {step}" for step in scheduler.trace[-_TAIL:]]
    return "\n".join(lines)


@cache
def probe() -> None:
    """Make sure, once, that this trio asks the scheduler and does what it says.

    Raises `SimulationUnsupportedError`.
    """
    orders: list[list[str]] = []
    for choice in (0, 1):
        scheduler = Scheduler([choice], 1)
        try:
            orders.append(execute(_two_tasks, (), scheduler))
        except (trio.TrioInternalError, AttributeError) as error:
            raise SimulationUnsupportedError("its run loop has changed") from error
        if len(scheduler.taken) != 1:
            raise SimulationUnsupportedError("its run loop does not ask the scheduler")
    if orders != [["first", "second"], ["second", "first"]]:
        raise SimulationUnsupportedError("its run loop does not follow the scheduler")


async def _two_tasks() -> list[str]:
    order: list[str] = []

    async def step(name: str) -> None:
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(step, "first")
        nursery.start_soon(step, "second")
    return order


def schedules(size_max: int = 80) -> SearchStrategy[list[int]]:
    """A Hypothesis strategy of schedules, which shrink towards fewer preemptions.

    Needs the `testing` extra. Draw a schedule as one list before the run: to draw inside it
    would raise Hypothesis's own exceptions through trio's loop.
    """
    from hypothesis import strategies as st

    return st.lists(st.one_of(st.just(0), st.integers(0, 7)), max_size=size_max)
