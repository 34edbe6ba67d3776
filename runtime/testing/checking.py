"""`check_agent`: many lives of a runtime with somebody's agent, under drawn schedules and crashes.

Each run has a number, and is a function of it: the schedule, what goes wrong and where. In run 0
nobody is preempted and nothing goes wrong. What can go wrong:

- `session`: the actor of a conversation crashes, at any step;
- `writer`: the storage actor crashes at one of its four points, and is started again;
- `power`: the power is cut at any operation on the disk, and what was not synced survives or not,
  wholly or in parts; the next life opens what is left, and gateways send again what they got no
  answer for.

Must never draw from anything but the run's number and the seed: a failure says what replays it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import trio

from .disk import Disk, images
from .failpoints import failpoint
from .simulation import simulate
from .trial import DATABASE, Trial, scratch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from ...storage.records import Message
    from ..settings import Settings

Crash: TypeAlias = Literal["session", "writer", "power"]
"""What may go wrong in a run."""

_SCHEDULE_SIZE = 400
_CHOICES = (0, 0, 0, 1, 2, 3)  # mostly nobody is preempted: a schedule of noise hides the deep bugs
_POINTS = ("taken", "before commit", "committed", "acked")
_STEPS_MAX = 120  # of the saboteur, before it strikes
_BATCHES_MAX = 8
_IMAGES = 3  # of a power cut: nothing of what was unsynced survives, all, a part


@dataclass(frozen=True, slots=True)
class Checked:
    """What was looked at, and found to hold."""

    runs: int
    lives: int
    """Runtimes that were opened: a power cut makes several of one run."""
    crashes: int
    """Of these, how often something went wrong in them."""
    schedules: int
    """Different ones, by the steps that were made."""


class PlannedCrash(Exception):  # noqa: N818, RUF100 - nobody catches it by name
    """The crash of a session that a run has asked for."""


def check_agent(
    agent: Any = None,
    messages: Mapping[str, Sequence[str]] | Sequence[str] = ("hello", "and again"),
    *,
    factory: Callable[..., Any] | None = None,
    runs: int | Iterable[int] = 100,
    crashes: Collection[Crash] = ("session", "writer", "power"),
    seed: int = 0,
    settings: Settings | None = None,
    expect: Callable[[dict[str, list[Message]]], object] | None = None,
    may_fail: bool = False,
) -> Checked:
    """Show that with this agent no message is lost, doubled or out of order, and no reply is a lie.

    `messages` are what people say, by key; without keys it is one conversation. An agent that keeps
    something in memory is given by `factory`, as to `open_runtime`, so that each life begins anew.
    `expect` gets the messages of every key at the end of each life, and asserts what it likes.

    Blocks; call it outside of any trio run. Raises `CheckFailedError`, or what `expect` raises,
    with a note that replays the run. What is not shown: inputs that no schedule holds, such as a
    wall clock, chance, or a network.
    """
    unknown = set(crashes) - set(get_args(Crash))
    if unknown:
        raise ValueError(f"crashes are of {', '.join(get_args(Crash))}, not {unknown}")
    numbers = range(runs) if isinstance(runs, int) else runs
    kinds: tuple[Crash | None, ...] = (None, *(one for one in get_args(Crash) if one in crashes))
    tally = _Tally()
    for number in numbers:
        trial = Trial(
            agent, messages, factory=factory, settings=settings, expect=expect, may_fail=may_fail
        )
        _Run(trial, number, seed, kinds[number % len(kinds)], tally).go()
    return Checked(tally.runs, tally.lives, tally.crashes, len(tally.digests))


class _Tally:
    def __init__(self) -> None:
        self.runs = self.lives = self.crashes = 0
        self.digests = set[str]()


class _Run:
    """One run, by its number."""

    def __init__(
        self, trial: Trial, number: int, seed: int, crash: Crash | None, tally: _Tally
    ) -> None:
        self._trial = trial
        self._number = number
        self._seed = seed
        self._crash: Crash | None = crash
        self._tally = tally
        self._chance = Random(f"{seed}/{number}")
        self._where = "nothing goes wrong"
        self._schedule = self._drawn() if number else []

    def _drawn(self) -> list[int]:
        return [self._chance.choice(_CHOICES) for _ in range(_SCHEDULE_SIZE)]

    def go(self) -> None:
        self._tally.runs += 1
        try:
            with scratch() as folder:
                if self._crash == "power":
                    self._with_power_cut(folder)
                else:
                    self._with_crash(folder)
        except BaseException as error:
            again = f", seed={self._seed}" if self._seed else ""
            error.add_note(
                f"in run {self._number} ({self._where}); "
                f"replay it with: check_agent(…, runs=[{self._number}]{again})"
            )
            raise

    def _live(self, main: Callable[[], Awaitable[object]], schedule: Sequence[int]) -> None:
        self._tally.lives += 1
        self._tally.digests.add(simulate(main, schedule).digest)

    def _with_crash(self, folder: Path) -> None:
        trial, chance = self._trial, self._chance
        key, steps = chance.choice(list(trial.lanes)), chance.randint(1, _STEPS_MAX)

        async def undisturbed() -> None:
            await trial.live(folder)

        async def disturbed() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sabotage, key, steps)
                await trial.live(folder)
                nursery.cancel_scope.cancel()

        main = undisturbed
        with ExitStack() as stack:
            if self._crash == "writer":
                point, nth = chance.choice(_POINTS), chance.randint(1, _BATCHES_MAX)
                self._where = f"the writer crashes at {point!r}, the {nth}. time"
                armed = stack.enter_context(failpoint(point, nth=nth))
                stack.callback(lambda: self._count(happened=armed.fired))
            elif self._crash == "session":
                self._where = f"the session of {key} crashes after {steps} steps"
                main = disturbed
            self._live(main, self._schedule)
        trial.check(folder)

    async def _sabotage(self, key: str, steps: int) -> None:
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        for session in self._trial.sessions():
            if session.line.key == key:
                self._count(happened=True)
                session.spawn(_crash)

    def _count(self, *, happened: bool) -> None:
        self._tally.crashes += happened

    def _with_power_cut(self, folder: Path) -> None:
        trial, chance = self._trial, self._chance
        home = folder / "disk"
        home.mkdir()
        with Disk(home, skip=(f"{DATABASE}.lock",)) as disk:
            trial.mark = disk.mark
            self._live(lambda: trial.live(home, disk.name), self._schedule)
            log = disk.log
        point = chance.randint(0, len(log.entries))
        found = images(log, torn=1, seed=self._number, start=point, stop=point + 1)
        for image in list(found)[:_IMAGES]:
            self._where = f"the power is cut, image {image.name}"
            accepted, replied = image.payloads("accepted"), image.payloads("replied")
            left = image.write_to(folder / image.name)
            self._count(happened=True)
            again = trial.before(accepted, replied)
            self._live(lambda: again.live(left), self._drawn())  # noqa: B023 - called at once
            again.check(left)


async def _crash() -> None:
    raise PlannedCrash("the session crashes because this run wants it to")
