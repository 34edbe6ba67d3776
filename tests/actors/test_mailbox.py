"""The mailbox, its answers and the loop: bounded, in order, and every message read is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from onepen.actors.mailbox import (
    Answer,
    Mailbox,
    MailboxClosedError,
    MailboxFullError,
    run_actor,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class CrashError(Exception):
    pass


def gone() -> Exception:
    return LookupError("gone")


class Echo:
    """Answers with what it was told; what it does first is the test's affair."""

    def __init__(self, before: Callable[[str], Awaitable[None]] | None = None) -> None:
        self.read: list[str] = []
        self.steps: list[str] = []
        self._before = before

    async def on_start(self) -> None:
        self.steps.append("start")

    async def on_message(self, message: str, answer: Answer[object] | None) -> None:
        self.read.append(message)
        if self._before is not None:
            await self._before(message)
        if answer is not None:
            answer.give(message.upper())

    async def on_stop(self) -> None:
        self.steps.append("stop")


async def test_messages_are_read_once_and_in_order() -> None:
    box: Mailbox[str] = Mailbox(10)
    for text in "abc":
        box.tell(text)
    box.close()
    actor = Echo()
    await run_actor(actor, box, gone)
    assert actor.read == ["a", "b", "c"]
    assert actor.steps == ["start", "stop"]


async def test_a_full_mailbox_refuses_and_keeps_what_it_has() -> None:
    """INV-14: nothing is dropped."""
    box: Mailbox[str] = Mailbox(2)
    box.tell("a")
    box.tell("b")
    with pytest.raises(MailboxFullError) as caught:
        box.tell("c")
    assert caught.value.size_max == 2
    with pytest.raises(MailboxFullError):
        await box.ask("c")
    assert len(box) == 2
    first = await box.get()
    assert first is not None
    assert first.message == "a"
    box.tell("c")
    assert len(box) == 2


async def test_a_closed_mailbox_refuses_and_is_read_to_its_end() -> None:
    box: Mailbox[str] = Mailbox(2)
    box.tell("a")
    box.close()
    with pytest.raises(MailboxClosedError):
        box.tell("b")
    envelope = await box.get()
    assert envelope is not None
    assert envelope.message == "a"
    assert await box.get() is None
    assert box.closed


async def test_closing_wakes_an_actor_that_waits(nursery: trio.Nursery) -> None:
    box: Mailbox[str] = Mailbox(2)
    actor = Echo()
    nursery.start_soon(run_actor, actor, box, gone)
    await trio.testing.wait_all_tasks_blocked()
    box.close()
    await trio.testing.wait_all_tasks_blocked()
    assert actor.steps == ["start", "stop"]


async def test_many_askers_get_each_their_own_answer(nursery: trio.Nursery) -> None:
    box: Mailbox[str] = Mailbox(10)
    answers: dict[str, object] = {}

    async def ask(text: str) -> None:
        answers[text] = await box.ask(text)

    for text in "abc":
        nursery.start_soon(ask, text)
    await trio.testing.wait_all_tasks_blocked()
    assert answers == {}
    box.close()
    await run_actor(Echo(), box, gone)
    await trio.testing.wait_all_tasks_blocked()
    assert answers == {"a": "A", "b": "B", "c": "C"}


async def test_cancelling_a_wait_for_an_answer_takes_nothing_back(nursery: trio.Nursery) -> None:
    """INV-10: the message is read and done whether or not somebody still waits."""
    box: Mailbox[str] = Mailbox(10)
    with trio.move_on_after(0) as scope:
        await box.ask("a")
    assert scope.cancelled_caught
    assert len(box) == 1
    actor = Echo()
    box.close()
    await run_actor(actor, box, gone)
    assert actor.read == ["a"]


async def test_one_of_two_waits_for_an_answer_can_be_cancelled(nursery: trio.Nursery) -> None:
    answer: Answer[int] = Answer()
    got: list[int] = []
    scope = trio.CancelScope()

    async def give_up() -> None:
        with scope:
            got.append(-await answer.wait())

    async def wait() -> None:
        got.append(await answer.wait())

    nursery.start_soon(give_up)
    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    answer.give(7)
    await trio.testing.wait_all_tasks_blocked()
    assert got == [7]
    assert scope.cancelled_caught


async def test_the_first_answer_stands() -> None:
    answer: Answer[int] = Answer()
    given = [answer.given]
    answer.give(1)
    answer.fail(CrashError())
    answer.give(2)
    assert [*given, answer.given] == [False, True]
    assert await answer.wait() == 1
    assert await answer.wait() == 1


async def test_a_wait_can_be_ended_with_an_error_while_the_answer_stays_open(
    nursery: trio.Nursery,
) -> None:
    answer: Answer[int] = Answer()
    errors: list[BaseException] = []

    async def wait() -> None:
        try:
            await answer.wait()
        except CrashError as error:
            errors.append(error)

    nursery.start_soon(wait)
    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    answer.wake(CrashError())
    await trio.testing.wait_all_tasks_blocked()
    assert len(errors) == 2
    assert not answer.given
    answer.give(3)
    assert await answer.wait() == 3


async def test_what_a_crashed_actor_had_read_fails_and_the_rest_waits_for_its_successor() -> None:
    box: Mailbox[str] = Mailbox(10)
    read, unread = box.ask_nowait("bad"), box.ask_nowait("good")

    async def crash(message: str) -> None:
        if message == "bad":
            raise CrashError

    first = Echo(crash)
    with pytest.raises(CrashError):
        await run_actor(first, box, gone)
    assert first.steps == ["start", "stop"]
    with pytest.raises(LookupError, match="gone"):
        await read.wait()
    assert not unread.given
    box.close()
    await run_actor(Echo(crash), box, gone)
    assert await unread.wait() == "GOOD"


async def test_a_message_that_is_answered_later_than_read_is_no_longer_owed() -> None:
    box: Mailbox[str] = Mailbox(10)
    answer = box.ask_nowait("a")
    envelope = await box.get()
    assert envelope is not None
    assert list(box.unanswered) == [answer]
    answer.give("late")
    assert not box.unanswered
    box.fail_unanswered(CrashError())
    assert await answer.wait() == "late"


async def test_an_actor_that_ends_by_cancellation_answers_what_it_had_read(
    nursery: trio.Nursery,
) -> None:
    """INV-15: every request ends."""
    box: Mailbox[str] = Mailbox(10)
    answer = box.ask_nowait("a")

    async def hang(_: str) -> None:
        await trio.sleep_forever()

    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            await run_actor(Echo(hang), box, gone)

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()
    assert not answer.given
    scope.cancel()
    with pytest.raises(LookupError, match="gone"):
        await answer.wait()


async def test_an_actor_that_fails_to_stop_still_answers() -> None:
    box: Mailbox[str] = Mailbox(10)
    answer = box.ask_nowait("a")

    class BadStop(Echo):
        async def on_message(self, message: str, answer: Answer[object] | None) -> None:
            pass

        async def on_stop(self) -> None:
            raise CrashError

    box.close()
    with pytest.raises(CrashError):
        await run_actor(BadStop(), box, gone)
    with pytest.raises(LookupError, match="gone"):
        await answer.wait()


async def test_the_end_of_a_mailbox_answers_what_was_read_and_what_was_not() -> None:
    """INV-15: every request ends."""
    box: Mailbox[str] = Mailbox(10)
    read, unread = box.ask_nowait("a"), box.ask_nowait("b")
    box.tell("c")
    await box.get()
    box.end(CrashError())
    for answer in (read, unread):
        with pytest.raises(CrashError):
            await answer.wait()
    assert len(box) == 0
    with pytest.raises(MailboxClosedError):
        box.tell("d")


async def test_a_reader_that_is_cancelled_loses_no_message() -> None:
    box: Mailbox[str] = Mailbox(10)
    with trio.move_on_after(0):
        await box.get()
    box.tell("a")
    envelope = await box.get()
    assert envelope is not None
    assert envelope.message == "a"
