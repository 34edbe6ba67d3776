"""Tests of the tests: a bug that is planted in a hand-over is caught by the checks of this folder.

Each is planted from here, by replacing a function; the shipped code is not changed. The same check
without the bug finds nothing.
"""

# pyright: reportPrivateUsage=false
# To plant a bug is to reach inside.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from onepen.actors import effects, ending, recovery
from onepen.actors.courier import Courier
from onepen.actors.effects import Effects
from onepen.actors.outbox import posting
from onepen.actors.replies import reply_text
from onepen.actors.sending import Sender
from onepen.actors.turn import Turn
from onepen.storage.errors import InvariantError
from onepen.testing import SimulationStuckError, images, simulate

from .test_hand_overs import Exchange, Outside, check_exchange, check_recovery
from .world import Step, recorded, scratch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Program = list[list[Step]]
SUBMIT = Step("submit")


Property = Callable[[str, object], None]
_ran: Counter[str] = Counter()


def simulated(*arguments: Any) -> None:
    _ran["runs"] += 1
    simulate(*arguments)


# The checks ----------------------------------------------------------------------------------


def every_schedule(program: Program) -> None:
    """A few dozen, always the same ones; one of them never takes a task off."""
    chance = Random(len(repr(program)))
    drawn = ([chance.choice((0, 0, 1, 2, 3)) for _ in range(250)] for _ in range(30))
    for number, schedule in enumerate([[], *drawn]):
        with scratch() as directory:
            outside = Outside(number, refusing=0.3)
            simulated(Exchange(directory, outside).run, schedule, program)
            check_exchange(directory, outside)


def every_power_cut(program: Program) -> None:
    """At every point of the disk's log, with what the world outside had seen until then."""
    with scratch() as directory:
        outside = Outside()
        with recorded(directory, outside.account) as disk:
            simulated(Exchange(directory, outside, disk.name).run, [], program)
            log = disk.log
        for image in images(log, torn=0, seed=1):
            with scratch() as left:
                image.write_to(left / "disk")
                check_recovery(left / "disk", outside, image)


# The bugs ------------------------------------------------------------------------------------


def the_reply_is_posted_behind_the_end() -> AbstractContextManager[object]:
    releasing = ending._releasing

    def later(session: Any, running: Any, outcome: Any) -> Any:
        received = releasing(session, running, outcome)

        def then(receipt: Any) -> None:
            received(receipt)
            text = reply_text(outcome)
            turn_id = running.turn.id
            session.scribe.note(
                posting(session.scribe, running.targets, text, "reply", turn_id=turn_id)
            )

        return then

    def nothing(*_: object, **__: object) -> tuple[()]:
        return ()

    return patch.multiple(ending, posting=nothing, _releasing=later)


def what_was_sent_is_not_marked() -> AbstractContextManager[object]:
    store = Sender.store

    async def forgetful(self: Sender, delivery: Any, command: Any) -> Any:
        return None if command.state == "sent" else await store(self, delivery, command)

    return patch.object(Sender, "store", forgetful)


def nobody_waits_for_the_one_before() -> AbstractContextManager[object]:
    put = Courier._put

    def each_alone(self: Courier, delivery: Any) -> None:
        self._channel(delivery.source).lanes.pop(delivery.key, None)
        put(self, delivery)

    return patch.object(Courier, "_put", each_alone)


def the_effect_comes_before_its_intent() -> AbstractContextManager[object]:
    do = Effects._do

    async def eager(self: Effects, function: Any, arguments: Any, *rest: Any) -> Any:
        value = await effects._call(function, arguments, rest[-1] or self._scribe.fresh_uid())
        return await do(self, lambda *_: value, arguments, *rest)

    return patch.object(Effects, "_do", eager)


def the_result_is_not_recorded() -> AbstractContextManager[object]:
    async def nothing(self: Effects, effect: Any, state: Any, result: Any) -> Any:
        return replace(effect, state=state, result=result)

    return patch.object(Effects, "_finish", nothing)


def the_last_interim_message_is_sent_again() -> AbstractContextManager[object]:
    def nobody(_self: Turn, _text: str) -> tuple[()]:
        return ()

    return patch.object(Turn, "sent_to", nobody)


def a_question_outlives_its_turn() -> AbstractContextManager[object]:
    def nothing(*_: object) -> tuple[()]:
        return ()

    return patch.object(ending, "withdrawing", nothing)


def a_turn_that_was_cut_does_not_know_whom_it_answers() -> AbstractContextManager[object]:
    def nobody(_: object) -> tuple[()]:
        return ()

    return patch.object(recovery, "targets_in", nobody)


def a_turn_that_waits_is_taken_for_one_that_was_cut() -> AbstractContextManager[object]:
    return patch.object(recovery, "_park", recovery._mark)


class Planted(NamedTuple):
    bug: Callable[[], AbstractContextManager[object]]
    check: Callable[[Program], None]
    program: Program


EFFECT, QUESTION = Step("submit", kind="effect"), Step("submit", kind="question")
BUGS = [
    Planted(the_reply_is_posted_behind_the_end, every_power_cut, [[SUBMIT]]),
    Planted(what_was_sent_is_not_marked, every_schedule, [[SUBMIT]]),
    Planted(nobody_waits_for_the_one_before, every_schedule, [[SUBMIT, SUBMIT, SUBMIT]]),
    Planted(the_effect_comes_before_its_intent, every_power_cut, [[EFFECT]]),
    Planted(the_result_is_not_recorded, every_schedule, [[EFFECT]]),
    Planted(the_last_interim_message_is_sent_again, every_schedule, [[Step("submit", kind="say")]]),
    Planted(a_question_outlives_its_turn, every_schedule, [[QUESTION, *[Step("interrupt")] * 3]]),
    Planted(a_turn_that_was_cut_does_not_know_whom_it_answers, every_power_cut, [[SUBMIT]]),
    Planted(a_turn_that_waits_is_taken_for_one_that_was_cut, every_power_cut, [[QUESTION]]),
]


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.bug.__name__)
def test_a_planted_bug_is_caught(planted: Planted, record_property: Property) -> None:
    """PROOF-8."""
    _ran.clear()
    caught = (AssertionError, ExceptionGroup, InvariantError, SimulationStuckError)
    with planted.bug(), pytest.raises(caught):
        planted.check(planted.program)
    told = f"{planted.bug.__name__}: {planted.check.__name__}, after {_ran['runs']} runs"
    record_property("planted bug", told)


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.bug.__name__)
def test_without_the_bug_the_same_check_finds_nothing(planted: Planted) -> None:
    """PROOF-8."""
    planted.check(planted.program)
