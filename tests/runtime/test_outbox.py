"""The outbox: replies, interim messages and posts, and what becomes of them on their way."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    DeliverLaterError,
    Delivery,
    DeliverySettings,
    Inbound,
    InvalidContentError,
    MissingError,
    Settings,
    SourcePolicy,
    StaleError,
    SystemClock,
    UndeliverableError,
    open_runtime,
)
from onepen.actors.sending import Sender
from onepen.testing import FakePlatform

from ..contract.agents import query, sound, texts
from .scripted import LoopClock, inline, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Runtime, Turn

KEY = "test:dm:1"
CHAT = "chat-1"
HELLO = Inbound("hello", reply_to=CHAT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


def sending(platform: FakePlatform, **policy: Any) -> dict[str, SourcePolicy]:
    return {"test": SourcePolicy(deliver=platform.deliver, **policy)}


async def states(runtime: Runtime, **wanted: Any) -> list[str]:
    """Of the deliveries, in the order of posting."""
    return [delivery.state for delivery in reversed(await runtime.deliveries.list(**wanted))]


# What is posted ------------------------------------------------------------------------------


async def test_a_reply_is_in_the_outbox_in_the_transaction_of_the_answer(path: Path) -> None:
    """INV-3: at no moment is there an answer without its delivery, or the other way round."""
    async with serving(path) as runtime:
        await runtime.ask(KEY, HELLO)
        (delivery,) = await runtime.deliveries.list()
        assert (delivery.text, delivery.kind, delivery.state) == ("re hello", "reply", "pending")
        assert (delivery.target, delivery.key, delivery.source) == ({"to": CHAT}, KEY, "test")
        assert delivery.body["outcome"] == "answered"
        assert (delivery.attempt, delivery.possibly_repeated) == (0, False)
        (answer,) = [m for m in await stored(runtime) if m.role == "assistant"]
        assert delivery.message_uid == answer.uid
    # One commit brought both: the turn's end has the time of the delivery.
    assert query(
        path, "SELECT t.ended_ms = d.posted_ms FROM turns t JOIN deliveries d ON d.turn = t.n"
    ) == [(1,)]
    sound(path)


async def stored(runtime: Runtime, key: str = KEY) -> Any:
    session_id = await runtime.sessions.current(key)
    assert session_id is not None
    return await runtime.sessions.transcript(session_id)


async def test_without_a_reply_target_nothing_is_posted(path: Path) -> None:
    async with serving(path) as runtime:
        await runtime.ask(KEY, "hello")
        assert len(await runtime.deliveries.list()) == 0


async def test_what_is_said_on_the_way_is_sent_once_and_the_answer_is_no_second_message(
    path: Path,
) -> None:
    """The last interim message is the answer if nothing is returned: then it was sent already."""

    async def agent(turn: Turn) -> str | None:
        await turn.say("looking")
        async with turn.streaming() as out:
            await out.write("fo")
            await out.write("und")
        return "found" if turn.text == "streamed" else None

    platform = FakePlatform()
    async with serving(path, agent, sources=sending(platform)) as runtime:
        for text in ("said", "streamed"):
            assert (await runtime.ask(KEY, Inbound(text, reply_to=CHAT))).text == "found"
        await until(lambda: len(platform.seen[CHAT]) == 4)
        assert platform.texts(CHAT) == ["looking", "found"] * 2
        assert platform.texts(CHAT, "interim") == ["looking", "found"] * 2
    sound(path)


async def test_an_answer_that_repeats_an_interim_message_is_a_message_of_its_own(
    path: Path,
) -> None:
    async def agent(turn: Turn) -> str:
        await turn.say("yes")
        return "yes"

    platform = FakePlatform()
    async with serving(path, agent, sources=sending(platform)) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: len(platform.seen[CHAT]) == 2)
        assert await texts(runtime, KEY) == ["hello", "yes", "yes"]


async def test_an_interim_message_is_sent_when_it_is_stored_and_not_before(path: Path) -> None:
    """While calls are open it waits behind their results, in the transcript and in the outbox."""
    called, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        await turn.append({"role": "assistant", "tool_calls": [{"id": "c1", "name": "look"}]})
        await turn.say("one moment")
        called.set()
        await go_on.wait()
        await turn.append({"role": "tool", "tool_call_id": "c1", "content": "found"})
        return "done"

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, HELLO)
        await called.wait()
        assert len(await runtime.deliveries.list()) == 0
        go_on.set()
        await submission.reply()
        posted = [d.text for d in reversed(await runtime.deliveries.list())]
        assert posted == ["one moment", "done"]


async def test_each_place_is_answered_once_whoever_spoke_from_there(path: Path) -> None:
    """Messages that were collected into one turn, or steered into it, are answered with it."""
    began, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await go_on.wait()
        await turn.steering()
        return f"re {turn.text}"

    async with serving(path, agent) as runtime:
        first = await runtime.submit(KEY, Inbound("slow", reply_to=CHAT))
        await began.wait()
        said = [
            Inbound("a", reply_to=CHAT),
            Inbound("b", reply_to="chat-2"),
            Inbound("c", reply_to={"to": "chat-2"}),
            Inbound("d", source="web", reply_to=CHAT),
        ]
        collected = [await runtime.submit(KEY, one, busy="collect") for one in said]
        steered = Inbound("hurry", source="web", reply_to={"socket": 1, "room": 2})
        await runtime.submit(KEY, steered, busy="steer")
        go_on.set()
        await first.reply()
        await collected[0].reply()
        posted = [(d.source, d.target, d.text) for d in reversed(await runtime.deliveries.list())]
        assert posted == [
            ("test", {"to": CHAT}, "re slow"),
            ("web", {"socket": 1, "room": 2}, "re slow"),
            ("test", {"to": CHAT}, "re a\nb\nc\nd"),
            ("test", {"to": "chat-2"}, "re a\nb\nc\nd"),
            ("web", {"to": CHAT}, "re a\nb\nc\nd"),
        ]
    sound(path)


async def test_an_answer_of_any_size_reaches_the_outbox(path: Path) -> None:
    """INV-20: what no platform could show is cut, and says so; the transcript has all of it."""

    async def agent(turn: Turn) -> str:
        return "\u20ac" * 349_000

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, HELLO)
        (delivery,) = await runtime.deliveries.list()
        assert delivery.body["cut"] is True
        assert 512 * 1024 - 4 < len(delivery.text.encode()) <= 512 * 1024
        assert reply.outcome.kind == "answered"
        assert (await stored(runtime))[-1].text == reply.text == "\u20ac" * 349_000
    sound(path)


# How it is sent ------------------------------------------------------------------------------


async def test_a_delivery_is_sent_with_its_own_id_and_the_platforms_is_kept(path: Path) -> None:
    """The id is the idempotency key: the same in every attempt."""
    platform = FakePlatform()
    async with serving(path, sources=sending(platform)) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        (delivery,) = await runtime.deliveries.list(state="sent")
        assert delivery.platform_id == f"platform-{delivery.id}"
        assert (delivery.attempt, platform.texts(CHAT)) == (1, ["re hello"])
    sound(path)


async def test_what_fails_is_tried_again_with_growing_pauses_and_given_up_at_last(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """An attempt is never the last but one for ever: it fails, and is listed."""
    tried: list[float] = []

    def deliver(delivery: Delivery) -> None:
        tried.append(trio.current_time())
        assert delivery.possibly_repeated == (len(tried) > 1)
        raise OSError("no route")

    limits = DeliverySettings(tries_max=5, backoff_s=1, backoff_max_s=4)
    sources = {"test": SourcePolicy(deliver=deliver)}
    async with inline(path, settings=Settings(deliveries=limits), sources=sources) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: runtime.statistics().deliveries.failed == 1)
        pauses = [round(after - before) for before, after in pairwise(tried)]
        assert pauses == [1, 2, 4, 4]
        (delivery,) = await runtime.deliveries.list(state="failed")
        assert (delivery.attempt, delivery.error) == (5, "OSError: no route")
    sound(path)


async def test_the_platform_may_say_never_or_later(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """`UndeliverableError` ends it at once, `DeliverLaterError` names the pause."""
    platform = FakePlatform()
    platform.blocked.add("gone")
    platform.down = True
    async with inline(path, sources=sending(platform)) as runtime:
        await runtime.ask(KEY, HELLO)
        await runtime.ask("test:dm:2", Inbound("hello", reply_to="gone"))
        start = trio.current_time()
        await until(lambda: platform.requests.total() >= 2)
        platform.down = False
        await until(lambda: runtime.statistics().deliveries.failed == 1)
        await until(lambda: bool(platform.texts(CHAT)))
        assert trio.current_time() - start > 0.99
        (failed,) = await runtime.deliveries.list(state="failed")
        assert failed.key == "test:dm:2"
        assert UndeliverableError.__name__ in str(failed.error)
    sound(path)


async def test_order_is_kept_within_a_key_and_a_stuck_one_holds_up_nobody_else(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: 40 chats, one of which hangs and one of which refuses."""
    platform = FakePlatform(refusing=0.3, losing=0.2, seed=3)
    platform.stuck.add("chat-0")
    platform.blocked.add("chat-1")
    limits = DeliverySettings(running_max=8, tries_max=50, backoff_s=0.1, backoff_max_s=0.2)
    settings = Settings(deliveries=limits)
    async with inline(path, settings=settings, sources=sending(platform)) as runtime:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(_talk, runtime, number)
        await until(lambda: sum(map(len, platform.seen.values())) == 38 * 3)
        assert trio.current_time() < 29, "somebody waited for the one that is stuck"
        for number in range(2, 40):
            assert platform.texts(f"chat-{number}") == ["re 0", "re 1", "re 2"]
        await until(lambda: runtime.statistics().deliveries.failed == 3)
    sound(path)


async def _talk(runtime: Runtime, number: int) -> None:
    for text in "012":
        await runtime.ask(f"test:dm:{number}", Inbound(text, reply_to=f"chat-{number}"))


async def test_a_failed_one_lets_the_next_of_its_key_go(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    refused: list[str] = []

    def deliver(delivery: Delivery) -> None:
        if delivery.text == "re bad":
            refused.append(delivery.id)
            raise UndeliverableError("not that")
        refused.append(delivery.text)

    sources = {"test": SourcePolicy(deliver=deliver)}
    async with inline(path, sources=sources) as runtime:
        for text in ("good", "bad", "better"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        await until(lambda: len(refused) == 3)
        assert refused[0::2] == ["re good", "re better"]
        assert await states(runtime) == ["sent", "failed", "sent"]


@pytest.mark.parametrize(
    ("on_unknown", "state"), [("resend", "sent"), ("hold", "unknown")], ids=["resend", "hold"]
)
async def test_one_that_took_too_long_is_unknown_and_its_source_says_what_follows(
    path: Path, autojump_clock: trio.testing.MockClock, on_unknown: Any, state: str
) -> None:
    """Sent again, marked as possibly repeated; or left to a person, and the next one goes."""
    attempts: list[tuple[str, bool]] = []

    async def deliver(delivery: Delivery) -> None:
        attempts.append((delivery.text, delivery.possibly_repeated))
        if len(attempts) == 1:
            await trio.sleep_forever()

    sources = {"test": SourcePolicy(deliver=deliver, on_unknown=on_unknown)}
    async with inline(path, sources=sources) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        await until(lambda: len(attempts) == (3 if on_unknown == "resend" else 2))
        await until(lambda: runtime.statistics().deliveries.under_way == 0)
        assert await states(runtime) == [state, "sent"]
        if on_unknown == "resend":
            assert attempts == [("re one", False), ("re one", True), ("re two", False)]
        else:
            (unknown,) = await runtime.deliveries.list(state="unknown")
            assert unknown.error is not None
            decided = await runtime.deliveries.acknowledge(unknown.id, "seen by a person")
            assert decided.state == "sent"
    sound(path)


@pytest.mark.parametrize("whose", ["its own", "an outer one"])
@pytest.mark.parametrize(("on_unknown", "state"), [("resend", "pending"), ("hold", "unknown")])
async def test_an_error_out_of_a_cancelled_attempt_does_not_tell_what_arrived(
    path: Path, on_unknown: Any, state: str, whose: str
) -> None:
    """Its source says what follows, as from any cancelled attempt."""
    began = trio.Event()

    async def deliver(delivery: Delivery) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("the connection was closed")

    deadline_s = 0.05 if whose == "its own" else 30.0
    limits = DeliverySettings(deadline_s=deadline_s, backoff_s=30.0)
    sources = {"test": SourcePolicy(deliver=deliver, on_unknown=on_unknown)}
    async with serving(path, settings=Settings(deliveries=limits), sources=sources) as runtime:
        await runtime.ask(KEY, HELLO)
        await began.wait()
        if whose == "its own":
            await until(lambda: not runtime.statistics().deliveries.under_way)
        await runtime.shutdown(0.05)
    ((stored, error),) = query(path, "SELECT state, error FROM deliveries")
    assert stored == state
    assert "not known" in error


async def test_a_person_sends_what_had_failed(path: Path) -> None:
    broken = True

    def deliver(delivery: Delivery) -> str:
        if broken:
            raise UndeliverableError("wrong token")
        return "p1"

    async with serving(path, sources={"test": SourcePolicy(deliver=deliver)}) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: runtime.statistics().deliveries.failed == 1)
        (failed,) = await runtime.deliveries.list(state="failed")
        broken = False
        assert (await runtime.deliveries.retry(failed.id)).state == "pending"
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        assert (await states(runtime)) == ["sent"]
        with pytest.raises(StaleError):
            await runtime.deliveries.retry(failed.id)
        with pytest.raises(MissingError):
            await runtime.deliveries.retry("nothing")
    sound(path)


async def test_a_gateway_that_comes_later_gets_what_has_waited_for_it(path: Path) -> None:
    """Also across a restart, in order, and with what was posted while it was being read."""
    async with serving(path) as runtime:
        for text in "abc":
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
    platform = FakePlatform()
    async with serving(path) as runtime:
        await runtime.ask(KEY, Inbound("d", reply_to=CHAT))
        runtime.deliveries.register("test", platform.deliver)
        await runtime.ask(KEY, Inbound("e", reply_to=CHAT))
        await until(lambda: len(platform.seen[CHAT]) == 5)
        assert platform.texts(CHAT) == [f"re {text}" for text in "abcde"]
        runtime.deliveries.unregister("test")
        await runtime.ask(KEY, Inbound("f", reply_to=CHAT))
        assert (await states(runtime))[-1] == "pending"
    sound(path)


async def test_more_than_memory_may_hold_is_sent_in_order_all_the_same(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-14: what is beyond the bound stays in storage until there is room."""
    platform = FakePlatform(delay_s=0.01)
    limits = DeliverySettings(waiting_max=4, running_max=2)
    settings = Settings(deliveries=limits)
    async with inline(path, settings=settings, sources=sending(platform)) as runtime:
        for number in range(30):
            key = f"test:dm:{number % 3}"
            inbound = Inbound(f"{number:02d}", reply_to=f"chat-{number % 3}")
            await runtime.ask(key, inbound)
            assert runtime.statistics().deliveries.waiting <= 4 + 1
        await until(lambda: sum(map(len, platform.seen.values())) == 30)
        for chat in range(3):
            shown = platform.texts(f"chat-{chat}")
            assert shown == sorted(shown)
    sound(path)


class Refusing:
    """A platform where one chat is down; what the others are shown, and when it was tried."""

    def __init__(self, chat: str = CHAT, later_s: float = 3600.0) -> None:
        self.chat: str | None = chat
        self.later_s = later_s
        self.shown: list[str] = []
        self.tried = trio.Event()

    def deliver(self, delivery: Delivery) -> None:
        self.tried.set()
        if delivery.target["to"] == self.chat:
            raise DeliverLaterError(self.later_s)
        self.shown.append(delivery.text)


@pytest.mark.parametrize("decided", ["acknowledge", "fail", "unregister"])
async def test_what_a_person_has_decided_about_holds_its_lane_no_longer(
    path: Path, autojump_clock: trio.testing.MockClock, decided: str
) -> None:
    """Nor the end of the runtime: the next one of its key goes at once."""
    platform = Refusing()
    sources = {"test": SourcePolicy(deliver=platform.deliver)}
    async with inline(path, sources=sources) as runtime:
        await runtime.ask(KEY, HELLO)
        await platform.tried.wait()
        (resting,) = await runtime.deliveries.list()
        await until(lambda: not runtime.statistics().deliveries.under_way)
        await runtime.post(KEY, "next", reply_to="chat-2")
        start = trio.current_time()
        if decided == "acknowledge":
            await runtime.deliveries.acknowledge(resting.id)
        elif decided == "fail":
            await runtime.deliveries.fail(resting.id, "never", retry=False)
        else:
            runtime.deliveries.unregister("test")
            await runtime.deliveries.acknowledge(resting.id)
            runtime.deliveries.register("test", platform.deliver)
        assert await runtime.shutdown()
        assert trio.current_time() - start < 1
        assert platform.shown == ["next"]
    sound(path)


async def test_what_a_person_wants_to_be_sent_again_while_it_is_under_way_is(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It is put back; the attempt that fails afterwards takes nothing of that away."""
    began = [trio.Event(), trio.Event()]
    attempts: list[int] = []

    async def deliver(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        began[len(attempts) - 1].set()
        if len(attempts) == 1:
            await trio.sleep(10)
            raise OSError("no route")

    async with inline(path, sources={"test": SourcePolicy(deliver=deliver)}) as runtime:
        await runtime.ask(KEY, HELLO)
        await began[0].wait()
        (delivery,) = await runtime.deliveries.list()
        await runtime.deliveries.fail(delivery.id, "the proxy says so", retry_after_s=0)
        await began[1].wait()
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        assert attempts == [1, 2]
    sound(path)


async def test_after_a_restart_a_stuck_chat_with_a_long_backlog_silences_no_other(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: nor one that is stuck now, whatever memory may hold."""
    limits = DeliverySettings(waiting_max=8, running_max=4, tries_max=100)
    async with inline(path) as runtime:
        for number in range(600):
            await runtime.post(KEY, f"{number:03d}", reply_to=CHAT)
        for number in range(40):
            await runtime.post(f"test:other:{number}", "first", reply_to="other")
    platform = Refusing()
    sources = {"test": SourcePolicy(deliver=platform.deliver)}
    async with inline(path, settings=Settings(deliveries=limits), sources=sources) as runtime:
        start = trio.current_time()
        await until(lambda: len(platform.shown) == 40)
        for number in range(40):
            await runtime.post(f"test:other:{number}", "second", reply_to="other")
        await until(lambda: len(platform.shown) == 80)
        assert trio.current_time() - start < 60
        assert runtime.statistics().deliveries.waiting <= 8 * 2
        platform.chat = None
        await until(lambda: len(platform.shown) == 680)
        assert platform.shown[80:] == [f"{number:03d}" for number in range(600)]
        assert runtime.statistics().deliveries.waiting == 0
    sound(path)


# Taking and acknowledging --------------------------------------------------------------------


async def test_a_gateway_may_take_and_acknowledge(path: Path) -> None:
    """The first of each key, marked as being sent before it is handed over."""
    async with serving(path) as runtime:
        for text in ("one", "two"):
            for number in (1, 2):
                await runtime.ask(f"test:dm:{number}", Inbound(text, reply_to=f"chat-{number}"))
        taken = await runtime.deliveries.take("test")
        assert [(d.key, d.text, d.state) for d in taken] == [
            ("test:dm:1", "re one", "sending"),
            ("test:dm:2", "re one", "sending"),
        ]
        assert await runtime.deliveries.take("test") == ()
        first, second = taken
        assert (await runtime.deliveries.acknowledge(first.id, "p1")).platform_id == "p1"
        await runtime.deliveries.acknowledge(first.id, "p1")
        (third,) = await runtime.deliveries.take("test")
        assert (third.key, third.text) == ("test:dm:1", "re two")
        await runtime.deliveries.fail(second.id, "blocked", retry=False)
        (fourth,) = await runtime.deliveries.take("test")
        assert (fourth.key, fourth.text) == ("test:dm:2", "re two")
        failed = await runtime.deliveries.fail(third.id, "try again", retry_after_s=0)
        assert (failed.state, failed.error) == ("pending", "try again")
        (again,) = await runtime.deliveries.take("test")
        assert (again.id, again.attempt, again.possibly_repeated) == (third.id, 2, True)
    sound(path)


async def test_a_failure_that_is_told_twice_or_late_gives_nothing_up(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Only attempts that are used up do, or whoever says so."""
    limits = DeliverySettings(tries_max=2)
    sources = {"test": SourcePolicy(on_unknown="hold")}
    async with inline(path, settings=Settings(deliveries=limits), sources=sources) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        first = await runtime.deliveries.fail(taken.id, "slow", retry_after_s=0)
        assert await runtime.deliveries.fail(taken.id, "slow again") == first
        assert (first.state, first.attempt) == ("pending", 1)
        (taken,) = await runtime.deliveries.take("test")
        assert (await runtime.deliveries.fail(taken.id, "slow")).state == "failed"
        assert (await runtime.deliveries.fail(taken.id, "slow")).attempt == 2

        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        await trio.sleep(31)
        assert await runtime.deliveries.take("test") == ()
        assert (await runtime.deliveries.list())[0].state == "unknown"
        late = await runtime.deliveries.fail(taken.id, "it has not arrived", retry_after_s=0)
        assert (late.state, late.attempt) == ("pending", 1)
        assert [one.attempt for one in await runtime.deliveries.take("test")] == [2]
        assert (await runtime.deliveries.fail(taken.id, "blocked", retry=False)).state == "failed"
    sound(path)


async def test_takers_who_come_at_once_never_get_the_same(path: Path) -> None:
    """Two of them would show a message twice."""
    async with serving(path) as runtime:
        for number in range(10):
            await runtime.ask(f"test:dm:{number}", Inbound("hello", reply_to=f"chat-{number}"))
        got: list[str] = []

        async def take() -> None:
            got.extend([delivery.id for delivery in await runtime.deliveries.take("test", 3)])

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(take)
        assert len(got) == len(set(got)) == 10


async def test_what_was_taken_and_never_acknowledged_is_taken_again(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """By the next taker once its time is over, or after a restart at once."""
    async with inline(path) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        await trio.sleep(31)
        assert await runtime.deliveries.take("test") == ()  # now it pauses, as behind any failure
    async with inline(path) as runtime:
        waits = await runtime.deliveries.get(taken.id)
        assert waits is not None
        assert waits.state == "pending"
        await until_taken(runtime, taken.id, 2)
    async with inline(path) as runtime:
        await until_taken(runtime, taken.id, 3)
        with pytest.raises(InvalidContentError):
            runtime.deliveries.register("test", FakePlatform().deliver)
            await runtime.deliveries.take("test")
    sound(path)


async def until_taken(runtime: Runtime, delivery_id: str, attempt: int) -> None:
    while not (taken := await runtime.deliveries.take("test")):  # noqa: ASYNC110 - no event says so
        await trio.sleep(0.01)
    assert [(one.id, one.attempt) for one in taken] == [(delivery_id, attempt)]


# The end -------------------------------------------------------------------------------------


async def test_a_delivery_under_way_is_work_when_the_runtime_drains(path: Path) -> None:
    """So is the reply of the very turn that the end has stopped."""
    began, go_on = trio.Event(), trio.Event()
    sent: list[str] = []

    async def deliver(delivery: Delivery) -> None:
        began.set()
        await go_on.wait()
        sent.append(delivery.text)

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            await trio.sleep_forever()
        return "quick"

    async with trio.open_nursery() as nursery:
        sources = {"test": SourcePolicy(deliver=deliver)}
        async with open_runtime(path, agent=agent, sources=sources) as runtime:
            await runtime.ask(KEY, HELLO)
            await runtime.submit("test:dm:2", Inbound("slow", reply_to="chat-2"))
            await began.wait()

            async def let_go() -> None:
                await until(lambda: not runtime.statistics().sessions.live)
                go_on.set()

            nursery.start_soon(let_go)
            assert await runtime.shutdown()
    cut_off, quick = sorted(sent)  # two keys: in any order
    assert quick == "quick"
    assert "cut off" in cut_off
    assert query(path, "SELECT DISTINCT state FROM deliveries") == [("sent",)]
    sound(path)


@pytest.mark.parametrize(("on_unknown", "state"), [("resend", "pending"), ("hold", "unknown")])
async def test_a_stuck_delivery_does_not_keep_the_runtime_alive(
    path: Path, on_unknown: Any, state: str
) -> None:
    """INV-15: at the deadline it is left as what it is, and the next start goes on from that."""
    platform = FakePlatform()
    platform.stuck.add(CHAT)
    async with serving(path, sources=sending(platform, on_unknown=on_unknown)) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: runtime.statistics().deliveries.under_way == 1)
        assert not await runtime.shutdown(0.1)
    assert query(path, "SELECT state, attempt FROM deliveries") == [(state, 1)]
    platform.stuck.clear()
    async with serving(path, sources=sending(platform, on_unknown=on_unknown)) as runtime:
        if on_unknown == "resend":
            await until(lambda: bool(platform.texts(CHAT)))
        assert len(platform.texts(CHAT)) == (on_unknown == "resend")
    sound(path)


# On the runtime's own initiative ---------------------------------------------------------------


async def test_a_post_is_a_message_and_a_delivery_behind_the_running_turn(path: Path) -> None:
    """To where the key was last answered, unless it says where to."""
    began, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        began.set()
        await go_on.wait()
        return "answer"

    async with serving(path, agent) as runtime, trio.open_nursery() as nursery:
        submission = await runtime.submit(KEY, HELLO)
        await began.wait()
        nursery.start_soon(runtime.post, KEY, "your parcel is here")
        go_on.set()
        await submission.reply()
        second = await runtime.post(KEY, "and another", reply_to="chat-9")
        assert await texts(runtime, KEY) == [
            "hello",
            "answer",
            "your parcel is here",
            "and another",
        ]
        posted = list(reversed(await runtime.deliveries.list()))
        assert [(d.kind, d.target) for d in posted] == [
            ("reply", {"to": CHAT}),
            ("post", {"to": CHAT}),
            ("post", {"to": "chat-9"}),
        ]
        assert second == posted[-1]
        reply = await runtime.ask(KEY, "thanks")
        assert reply.outcome.kind == "answered"
    sound(path)


async def test_a_post_opens_the_conversation_if_there_is_none(path: Path) -> None:
    """A new key, a suspended session and one behind a boundary; the key says where to."""
    async with serving(path) as runtime:
        delivery = await runtime.post(KEY, "good morning")
        assert delivery.target == {}
        session_id = await runtime.sessions.current(KEY)
    async with serving(path) as runtime:
        await runtime.post(KEY, "still here")
        assert await runtime.sessions.current(KEY) == session_id
        await runtime.close_session(KEY)
        await runtime.post(KEY, "a new day")
        assert await runtime.sessions.current(KEY) != session_id
        assert await texts(runtime, KEY) == ["a new day"]
    sound(path)


async def test_a_post_with_an_id_is_made_once(path: Path) -> None:
    """INV-1: however often, also after a restart; other words under the id are a conflict."""
    for _ in range(2):
        async with serving(path) as runtime:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(_post_report, runtime)
            with pytest.raises(ConflictError):
                await runtime.post(KEY, "other words", id="report-7")
            with pytest.raises(ConflictError):
                await runtime.post(KEY, "the report", id="report-7", reply_to="elsewhere")
            assert await texts(runtime, KEY) == ["the report"]
            assert len(await runtime.deliveries.list()) == 1
    sound(path)


async def _post_report(runtime: Runtime) -> None:
    await runtime.post(KEY, "the report", id="report-7")


async def test_bad_posts_and_bad_listings_are_refused_with_a_type(path: Path) -> None:
    """INV-20."""
    async with serving(path) as runtime:
        bad: list[dict[str, Any]] = [
            {"text": ""},
            {"text": 5},
            {"text": "half \ud800"},
            {"text": "x", "reply_to": {"n": float("nan")}},
            {"text": "x", "id": ""},
            {"text": "x", "source": 7},
        ]
        for arguments in bad:
            with pytest.raises(InvalidContentError):
                await runtime.post(KEY, **arguments)
        listings: list[dict[str, Any]] = [
            {"state": "lost"},
            {"limit": 0},
            {"key": 5},
            {"after": "x"},
        ]
        for arguments in listings:
            with pytest.raises(InvalidContentError):
                await runtime.deliveries.list(**arguments)
        with pytest.raises(InvalidContentError):
            runtime.deliveries.register("test", "nothing that can be called")  # type: ignore[arg-type]
        assert len(await runtime.deliveries.list()) == 0


# What a review found -----------------------------------------------------------------------------


async def test_a_platform_that_is_down_holds_up_no_other(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: also with more waiting for it than memory may hold, and once it is back."""
    dead, alive = FakePlatform(), FakePlatform()
    dead.down = True
    limits = DeliverySettings(waiting_max=4, running_max=2, tries_max=100)
    sources = {"dead": SourcePolicy(deliver=dead.deliver), "x": SourcePolicy(deliver=alive.deliver)}
    settings = Settings(deliveries=limits)
    async with inline(path, settings=settings, sources=sources) as runtime:
        for number in range(12):
            await runtime.ask(f"dead:{number}", Inbound("hello", reply_to=f"dead {number}"))
        for number in range(12):
            await runtime.ask(f"x:{number}", Inbound("hello", reply_to=f"x {number}"))
        start = trio.current_time()
        await until(lambda: sum(map(len, alive.seen.values())) == 12)
        assert trio.current_time() - start < 1
        dead.down = False
        await until(lambda: sum(map(len, dead.seen.values())) == 12)
    sound(path)


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("not even that")


ODD: list[Any] = [
    DeliverLaterError,  # raised by its class: there is no time in it
    lambda: DeliverLaterError("soon"),  # type: ignore[arg-type]
    lambda: DeliverLaterError(float("nan")),
    lambda: SystemExit(3),
    lambda: ExceptionGroup("", [ValueError("a")]),
    lambda: Unshowable(),
    lambda: b"bytes",
    lambda: "half \ud800",
    lambda: 5,
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
async def test_whatever_a_gateway_does_it_fails_one_delivery(
    path: Path, autojump_clock: trio.testing.MockClock, odd: Any
) -> None:
    """INV-13: the next one goes, and the runtime stays."""
    sent: list[str] = []

    def deliver(delivery: Delivery) -> Any:
        if delivery.text == "re odd":
            made = odd()
            if isinstance(made, BaseException):
                raise made
            return made
        sent.append(delivery.text)
        return None

    settings = Settings(deliveries=DeliverySettings(tries_max=3))
    sources = {"test": SourcePolicy(deliver=deliver)}
    async with inline(path, settings=settings, sources=sources) as runtime:
        for text in ("odd", "fine"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        await until(lambda: sent == ["re fine"])
        assert (await states(runtime))[0] in ("failed", "sent")
        assert (await states(runtime))[1] == "sent"
    sound(path)


async def test_a_platform_id_is_cut_by_bytes(path: Path) -> None:
    """Whatever is returned, the message is shown once; no character is cut in half."""
    shown: list[str] = []

    def deliver(delivery: Delivery) -> dict[str, str]:
        shown.append(delivery.text)
        return {"result": "\u20ac\U0001f600" * 300}

    async with serving(path, sources={"test": SourcePolicy(deliver=deliver)}) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        await until(lambda: runtime.statistics().deliveries.sent == 2)
        assert shown == ["re one", "re two"]
        platform_id = str((await runtime.deliveries.list())[0].platform_id)
        assert 1024 - 4 < len(platform_id.encode()) <= 1024
        assert str(deliver((await runtime.deliveries.list())[0])).startswith(platform_id)
    sound(path)


async def test_an_end_that_cannot_be_stored_is_stored_without_its_details(path: Path) -> None:
    """INV-13: what a delivery came to never depends on what was said about it."""
    async with serving(path) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        writer = runtime._surroundings.writer  # pyright: ignore[reportPrivateUsage]
        sender = Sender(writer, SystemClock(), DeliverySettings())
        await sender.store(taken, sender.marking(taken, "sent", platform_id="\ud800" * 2000))
        (delivery,) = await runtime.deliveries.list()
        assert (delivery.state, delivery.platform_id) == ("sent", None)


async def test_a_refusal_for_good_counts_out_of_a_nursery_as_well(path: Path) -> None:
    async def deliver(delivery: Delivery) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)

    async def refuse() -> None:
        raise UndeliverableError("blocked")

    async with serving(path, sources={"test": SourcePolicy(deliver=deliver)}) as runtime:
        await runtime.ask(KEY, HELLO)
        await until(lambda: runtime.statistics().deliveries.failed == 1)
        assert (await runtime.deliveries.list())[0].attempt == 1


async def test_a_time_to_wait_may_be_as_a_header_has_it(path: Path) -> None:
    assert DeliverLaterError("1.5").retry_after_s == 1.5  # type: ignore[arg-type]
    for bad in ("soon", None, -1, float("inf")):
        with pytest.raises(InvalidContentError):
            DeliverLaterError(bad)  # type: ignore[arg-type]
    async with serving(path) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        for bad in ("soon", -1, float("nan")):
            with pytest.raises(InvalidContentError):
                await runtime.deliveries.fail(taken.id, "no", retry_after_s=bad)  # type: ignore[arg-type]


async def test_only_what_came_to_nothing_is_sent_again_by_hand(path: Path) -> None:
    """What is under way, waits or has arrived is left alone."""
    began, go_on = trio.Event(), trio.Event()

    async def deliver(delivery: Delivery) -> None:
        began.set()
        await go_on.wait()

    async with serving(path, sources={"test": SourcePolicy(deliver=deliver)}) as runtime:
        await runtime.ask(KEY, HELLO)
        await began.wait()
        (delivery,) = await runtime.deliveries.list()
        with pytest.raises(StaleError):
            await runtime.deliveries.retry(delivery.id)
        go_on.set()
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        with pytest.raises(StaleError):
            await runtime.deliveries.retry(delivery.id)
    assert query(path, "SELECT state, attempt FROM deliveries") == [("sent", 1)]


async def test_an_attempt_that_outlives_its_gateway_keeps_its_place(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Unregistered and registered again under way: it fails, is tried again, and goes first."""
    began, go_on = trio.Event(), trio.Event()
    shown: list[str] = []

    async def first(delivery: Delivery) -> None:
        began.set()
        await go_on.wait()
        raise OSError("no route")

    async def second(delivery: Delivery) -> None:
        shown.append(delivery.text)

    async with inline(path) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        runtime.deliveries.register("test", first)
        await began.wait()
        runtime.deliveries.unregister("test")
        assert await runtime.deliveries.take("test") == (), "it is still under way"
        runtime.deliveries.register("test", second)
        go_on.set()
        await until(lambda: len(shown) == 2)
        assert shown == ["re one", "re two"]
        await until(lambda: runtime.statistics().deliveries.waiting == 0)
    assert query(path, "SELECT state FROM deliveries") == [("sent",)] * 2
    sound(path)


async def test_what_a_taker_has_is_not_sent_by_a_gateway_that_comes_meanwhile(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Until its time is over; then it is unknown, and sent again behind nobody's back."""
    platform = FakePlatform()
    async with inline(path) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, Inbound(text, reply_to=CHAT))
        (first,) = await runtime.deliveries.take("test")
        runtime.deliveries.register("test", platform.deliver)
        await trio.sleep(10)
        assert platform.texts(CHAT) == []
        await runtime.deliveries.acknowledge(first.id)
        await until(lambda: platform.texts(CHAT) == ["re two"])
    sound(path)


async def test_a_late_acknowledgement_of_what_was_put_back_counts(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with inline(path) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        await trio.sleep(31)
        assert await runtime.deliveries.take("test") == ()
        assert (await runtime.deliveries.acknowledge(taken.id, "p1")).state == "sent"
        await trio.sleep(60)
        assert await runtime.deliveries.take("test") == ()
    sound(path)


async def test_a_key_with_a_long_backlog_hides_no_other_from_takers(path: Path) -> None:
    """INV-13: whatever waits behind its first delivery."""
    async with serving(path) as runtime:
        for number in range(600):
            await runtime.post(KEY, f"{number}", reply_to=CHAT)
        await runtime.post("test:dm:2", "hello", reply_to="chat-2")
        assert [d.key for d in await runtime.deliveries.take("test")] == [KEY, "test:dm:2"]
        assert [d.key for d in await runtime.deliveries.take("test")] == []


async def test_keys_that_rest_hide_no_other_from_takers(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: more of them than anybody asks for."""
    async with inline(path, clock=LoopClock()) as runtime:
        for number in range(1_005):
            await runtime.post(f"test:dm:{number}", "hello", reply_to="chat")
        while resting := await runtime.deliveries.take("test", 500):
            for one in resting:
                await runtime.deliveries.fail(one.id, "down", retry_after_s=600)
        await runtime.post("test:dm:last", "hello", reply_to="chat")
        assert [d.key for d in await runtime.deliveries.take("test", 1)] == ["test:dm:last"]
        await trio.sleep(601)
        assert len(await runtime.deliveries.take("test", 2)) == 2


@pytest.mark.parametrize("pulled", [True, False], ids=["pulled", "sent after a restart"])
async def test_a_clock_that_is_set_back_makes_no_rest_longer(
    path: Path, autojump_clock: trio.testing.MockClock, *, pulled: bool
) -> None:
    clock, platform = LoopClock(), FakePlatform()
    clock.ahead_s = 86_400
    async with inline(path, clock=clock) as runtime:
        await runtime.ask(KEY, HELLO)
        (taken,) = await runtime.deliveries.take("test")
        await runtime.deliveries.fail(taken.id, "later", retry_after_s=20)
        assert await runtime.deliveries.take("test") == ()
        clock.ahead_s = 0
        if pulled:
            await trio.sleep(21)
            assert [one.id for one in await runtime.deliveries.take("test")] == [taken.id]
    if not pulled:
        async with inline(path, clock=clock, sources=sending(platform)) as runtime:
            with trio.fail_after(21):
                await until(lambda: platform.texts(CHAT) == ["re hello"])
    sound(path)


async def test_whoever_joined_behind_the_last_word_gets_it_as_well(path: Path) -> None:
    """A message that was steered in from another place, behind what was said on the way."""
    said, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> None:
        await turn.say("the answer")
        said.set()
        await go_on.wait()
        await turn.steering()

    async with serving(path, agent) as runtime:
        first = await runtime.submit(KEY, HELLO)
        await said.wait()
        await runtime.submit(KEY, Inbound("me too", reply_to="chat-2"), busy="steer")
        go_on.set()
        assert (await first.reply()).text == "the answer"
        posted = [(d.target["to"], d.kind) for d in reversed(await runtime.deliveries.list())]
        assert posted == [(CHAT, "interim"), ("chat-2", "reply")]
    sound(path)


async def test_a_long_post_with_an_id_is_made_once(path: Path) -> None:
    async with serving(path) as runtime:
        text = "x" * 600_000
        first = await runtime.post(KEY, text, id="p")
        assert (await runtime.post(KEY, text, id="p")).id == first.id
        assert first.body["cut"] is True
