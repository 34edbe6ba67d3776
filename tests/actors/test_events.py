"""Events: numbered, resumed without gap or repeat, and a slow subscriber slows nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from onepen.actors.events import Event, Stream
from onepen.storage.identity import Incarnation, SessionKey, TurnId

if TYPE_CHECKING:
    from onepen.actors.events import Subscription

KEY = SessionKey("test:1")
TURN, OTHER = TurnId("turn-1"), TurnId("turn-2")


def stream(window_max: int = 100, incarnation: int = 1) -> Stream:
    made = Stream(KEY, window_max)
    made.begin(Incarnation(incarnation))
    return made


def delta(events: Stream, text: str, turn_id: TurnId = TURN) -> None:
    events.publish("message.delta", turn_id=turn_id, text=text)


async def taken(subscription: Subscription) -> list[Event]:
    """Everything that can be read now."""
    events: list[Event] = []
    while _ready(subscription):
        try:
            events.append(await subscription.receive())
        except trio.EndOfChannel:
            break
    return events


def _ready(subscription: Subscription) -> bool:
    return bool(subscription._events) or subscription._ended  # pyright: ignore[reportPrivateUsage]


def told(events: list[Event]) -> list[str]:
    return [event.text or event.kind for event in events]


async def test_events_are_numbered_from_one_and_arrive_in_order() -> None:
    events = stream(incarnation=7)
    subscription = events.subscribe(None, None)
    for text in "abc":
        delta(events, text)
    got = await taken(subscription)
    assert told(got) == ["a", "b", "c"]
    assert [event.position for event in got] == [(7, 1), (7, 2), (7, 3)]
    assert {event.key for event in got} == {KEY}


async def test_a_subscriber_of_a_key_hears_what_comes_and_not_what_was() -> None:
    events = stream()
    delta(events, "before")
    subscription = events.subscribe(None, None)
    delta(events, "after")
    assert told(await taken(subscription)) == ["after"]


async def test_a_subscriber_of_a_turn_hears_it_from_its_beginning_to_its_end_and_no_other() -> None:
    events = stream()
    delta(events, "a")
    delta(events, "not mine", OTHER)
    subscription = events.subscribe(TURN, None)
    delta(events, "b")
    events.publish("turn.ended", turn_id=OTHER)
    events.publish("turn.ended", turn_id=TURN)
    delta(events, "too late")
    assert told([await subscription.receive() for _ in range(3)]) == ["a", "b", "turn.ended"]
    with pytest.raises(trio.EndOfChannel):
        await subscription.receive()
    assert not events.watched


async def test_resuming_inside_the_window_has_neither_gap_nor_repeat() -> None:
    events = stream(window_max=3)
    for text in "abcd":
        delta(events, text)
    for number, expected in ((1, ["b", "c", "d"]), (3, ["d"]), (4, [])):
        subscription = events.subscribe(None, (1, number))
        assert told(await taken(subscription)) == expected


async def test_resuming_before_the_window_says_that_there_is_a_gap() -> None:
    events = stream(window_max=3)
    for text in "abcde":
        delta(events, text)
    got = await taken(events.subscribe(None, (1, 1)))
    assert got[0].kind == "gap"
    assert got[0].position == (1, 2)
    assert told(got[1:]) == ["c", "d", "e"]


async def test_resuming_a_former_actor_says_that_there_is_a_gap() -> None:
    events = stream()
    delta(events, "of the first")
    events.begin(Incarnation(2))
    delta(events, "of the second")
    got = await taken(events.subscribe(None, (1, 1)))
    assert told(got) == ["gap", "of the second"]
    assert got[-1].position == (2, 1)


async def test_a_subscriber_outlives_the_actor() -> None:
    events = stream()
    subscription = events.subscribe(None, None)
    delta(events, "a")
    events.begin(Incarnation(2))
    delta(events, "b")
    assert [event.position for event in await taken(subscription)] == [(1, 1), (2, 1)]


async def test_a_slow_subscriber_is_dropped_with_a_last_event_and_nobody_else() -> None:
    """INV-14: bounded, and said aloud."""
    events = stream(window_max=3)
    slow, quick = events.subscribe(None, None), events.subscribe(None, None)
    heard: list[str] = []
    for text in "abcde":
        delta(events, text)
        heard += told(await taken(quick))
    assert heard == ["a", "b", "c", "d", "e"]
    got = [await slow.receive() for _ in range(4)]
    assert told(got) == ["a", "b", "c", "dropped"]
    assert got[-1].position == got[-2].position == (1, 3)
    with pytest.raises(trio.EndOfChannel):
        await slow.receive()
    # What it missed it gets by resuming behind the last event that it has read.
    assert told(await taken(events.subscribe(None, got[-2].position))) == ["d", "e"]


async def test_the_end_lets_subscribers_read_what_is_there(nursery: trio.Nursery) -> None:
    events = stream()
    subscription = events.subscribe(None, None)
    heard: list[str] = []

    async def follow() -> None:
        heard.extend([event.text or "" async for event in subscription])

    nursery.start_soon(follow)
    await trio.testing.wait_all_tasks_blocked()
    delta(events, "a")
    events.end()
    await trio.testing.wait_all_tasks_blocked()
    assert heard == ["a"]
    assert not events.watched
    with pytest.raises(trio.EndOfChannel):
        await subscription.receive()


async def test_a_closed_subscription_is_no_longer_served() -> None:
    events = stream()
    subscription = events.subscribe(None, None)
    watched = [events.watched]
    await subscription.aclose()
    await subscription.aclose()
    assert [*watched, events.watched] == [True, False]
    delta(events, "a")
    with pytest.raises(trio.EndOfChannel):
        await subscription.receive()


async def test_a_cancelled_receive_loses_no_event() -> None:
    events = stream()
    subscription = events.subscribe(None, None)
    delta(events, "a")
    with trio.move_on_after(0) as scope:
        await subscription.receive()
    assert scope.cancelled_caught
    assert told(await taken(subscription)) == ["a"]


async def test_an_idle_stream_keeps_few_events_unless_somebody_listens() -> None:
    """INV-14."""
    events = stream(window_max=1000)
    for number in range(200):
        delta(events, str(number))
    subscription = events.subscribe(None, None)
    events.rest()
    assert len(await taken(events.subscribe(None, (1, 0)))) == 200
    await subscription.aclose()
    for other in list(events._subscriptions):  # pyright: ignore[reportPrivateUsage]
        await other.aclose()
    events.rest()
    got = await taken(events.subscribe(None, (1, 0)))
    assert got[0].kind == "gap"
    assert told(got[1:]) == [str(number) for number in range(136, 200)]


async def test_only_deltas_are_provisional() -> None:
    events = stream()
    subscription = events.subscribe(None, None)
    delta(events, "a")
    events.publish("turn.started", turn_id=TURN)
    events.publish("turn.ended", turn_id=TURN)
    got = await taken(subscription)
    assert [event.provisional for event in got] == [True, False, False]


@given(
    window_max=st.integers(1, 6), before=st.integers(0, 12), seen=st.data(), later=st.integers(0, 4)
)
def test_whoever_resumes_hears_everything_that_is_kept_once(
    window_max: int, before: int, seen: st.DataObject, later: int
) -> None:
    """Either every number behind `after`, or a gap and then everything that is kept."""
    after = seen.draw(st.integers(0, before))

    async def run() -> None:
        events = stream(window_max)
        for number in range(1, before + 1):
            delta(events, str(number))
        subscription = events.subscribe(None, (1, after))
        got = await taken(subscription)
        kept = [str(n) for n in range(max(1, before - window_max + 1), before + 1)]
        if after >= before - window_max:
            assert told(got) == [str(n) for n in range(after + 1, before + 1)]
        else:
            assert told(got) == ["gap", *kept]
        for number in range(before + 1, before + later + 1):
            delta(events, str(number))
            assert told(await taken(subscription)) == [str(number)]

    trio.run(run)
