"""Tests of the tests: a bug that is planted in sessions is caught by the checks of this folder.

Each is planted from here, by replacing a function; the shipped code is not changed. The same check
without the bug finds nothing: a check that always complains proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest

from onepen.actors import recovery, turn
from onepen.actors.hold import Hold
from onepen.actors.scribe import Scribe
from onepen.actors.session import Session
from onepen.storage.errors import InvariantError
from onepen.storage.units import Durable
from onepen.testing import images, simulate

from .test_sessions import check_recovery
from .world import (
    BESIDE,
    Account,
    Step,
    World,
    check_world,
    count_messages,
    recorded,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from onepen.storage.identity import SessionId

Program = list[list[Step]]
ASK = Step("ask")


Property = Callable[[str, object], None]
_ran: Counter[str] = Counter()


def simulated(*arguments: Any) -> None:
    _ran["runs"] += 1
    simulate(*arguments)


# The checks ----------------------------------------------------------------------------------


def schedules_of(program: Program) -> list[list[int]]:
    """A few dozen, always the same ones; one of them never takes a task off."""
    chance = Random(len(repr(program)))
    return [[], *([chance.choice((0, 0, 1, 2, 3)) for _ in range(250)] for _ in range(60))]


def every_schedule(program: Program) -> None:
    """What was told is stored and every actor's memory is true."""

    for schedule in schedules_of(program):
        with scratch() as directory:
            account = Account()
            world = World(directory, account)
            simulated(world.run, schedule, program)
            check_world(directory, account.accepted, account.answered, ended=True)
            assert len(program) > 1 or not world.refused, "with nobody in the way, nothing is"


def every_power_cut(program: Program) -> None:
    """Nothing that was told is lost at any point of the disk's log; recovery ends every turn."""
    cut_everywhere(program, [])


def every_power_cut_while_others_go_first(program: Program) -> None:
    """The same where somebody else is let go before the Writer: by default it is quick."""
    cut_everywhere(program, [0, 0, 0, 0, 1])


def cut_everywhere(program: Program, schedule: list[int]) -> None:
    with scratch() as directory:
        account = Account()
        with recorded(directory, account) as disk:
            simulated(World(directory, account, disk.name).run, schedule, program)
            log = disk.log
        for image in images(log, torn=0, start=0, stop=len(log.entries)):
            accepted = {str(t): account.accepted[str(t)] for t in image.payloads("accepted")}
            answered = dict(_pairs(image.payloads("answered")))
            with scratch() as left:
                image.write_to(left / "disk")
                check_recovery(left / "disk", accepted, answered, image.point)


def _pairs(payloads: Sequence[object]) -> list[Any]:
    return [payload for payload in payloads if isinstance(payload, tuple)]


def everything_said_is_stored(program: Program) -> None:
    """Whatever `append` has taken is in the transcript when the turn was answered."""

    for schedule in schedules_of(program):
        with scratch() as directory:
            account = Account()
            simulated(World(directory, account).run, schedule, program)
            check_world(directory, account.accepted, account.answered, ended=True)
            assert count_messages(directory, "answer to beside") == 1
            assert count_messages(directory, "beside ") == BESIDE + 1  # and the user's own


# The bugs ------------------------------------------------------------------------------------


def replies_before_the_commit() -> AbstractContextManager[object]:
    write = Scribe.write

    def early(self: Scribe, *arguments: Any, then: Any = None, **options: Any) -> Any:
        ticket = write(self, *arguments, **options)
        if then is not None:
            then(Durable(0))
        return ticket

    return patch.object(Scribe, "write", early)


def what_is_held_is_dropped() -> AbstractContextManager[object]:
    release = Hold.release

    def dropping(self: Hold) -> list[Any]:
        release(self)
        return []

    return patch.object(Hold, "release", dropping)


def open_calls_stay_open() -> AbstractContextManager[object]:
    def none(*_: object) -> tuple[()]:
        return ()

    return patch.object(turn, "closing_results", none)


def cut_off_turns_are_forgotten() -> AbstractContextManager[object]:
    async def nothing(*_: object) -> None: ...

    return patch.object(recovery, "_mark", nothing)


def a_refusal_is_not_looked_into() -> AbstractContextManager[object]:
    async def blind(self: Session) -> None:
        self.scribe.broken = None

    return patch.object(Session, "reload", blind)


def busy_sessions_are_evicted() -> AbstractContextManager[object]:
    def always(session: Session) -> bool:
        return session.size_bytes > 0

    return patch.object(Session, "idle", property(always))


def a_rotation_moves_the_transcript_but_not_the_route() -> AbstractContextManager[object]:
    def nothing(_self: Scribe, _session_id: SessionId) -> None: ...

    return patch.object(Scribe, "move_route", nothing)


def compaction_forgets_its_revision() -> AbstractContextManager[object]:
    compact = Scribe.compact

    def forgetful(self: Scribe, *arguments: Any, **options: Any) -> Any:
        ticket = compact(self, *arguments, **options)
        self.page.revision -= 1
        return ticket

    return patch.object(Scribe, "compact", forgetful)


class Planted(NamedTuple):
    bug: Callable[[], AbstractContextManager[object]]
    check: Callable[[Program], None]
    program: Program


BUGS = [
    Planted(replies_before_the_commit, every_power_cut_while_others_go_first, [[ASK, ASK]]),
    Planted(
        what_is_held_is_dropped, everything_said_is_stored, [[ASK, Step("ask", kind="beside")]]
    ),
    Planted(open_calls_stay_open, every_schedule, [[Step("ask", kind="open")]]),
    Planted(cut_off_turns_are_forgotten, every_power_cut, [[ASK]]),
    Planted(
        a_refusal_is_not_looked_into,
        every_schedule,
        [[ASK, Step("ask", kind="many")], [ASK, Step("foreign")]],
    ),
    Planted(busy_sessions_are_evicted, every_schedule, [[ASK, Step("evict")], [ASK]]),
    Planted(
        a_rotation_moves_the_transcript_but_not_the_route,
        every_schedule,
        [[ASK, ASK, Step("rotate")]],
    ),
    Planted(compaction_forgets_its_revision, every_schedule, [[ASK, Step("compact")]]),
]


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.bug.__name__)
def test_a_planted_bug_is_caught(planted: Planted, record_property: Property) -> None:
    """PROOF-8."""
    _ran.clear()
    with planted.bug(), pytest.raises((AssertionError, ExceptionGroup, InvariantError)):
        planted.check(planted.program)
    told = f"{planted.bug.__name__}: {planted.check.__name__}, after {_ran['runs']} runs"
    record_property("planted bug", told)


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.bug.__name__)
def test_without_the_bug_the_same_check_finds_nothing(planted: Planted) -> None:
    """PROOF-8."""
    planted.check(planted.program)
