"""What a session tells those who follow it: events, numbered per key, and their subscribers.

| event               | when                                                                    |
| ------------------- | ----------------------------------------------------------------------- |
| `turn.queued`       | the message is durable and waits                                        |
| `turn.started`      | the turn's first rows are durable; the agent is called now              |
| `message.delta`     | pieces of a message that is being written: provisional                  |
| `message.committed` | the message is durable; carries its session id and seq                  |
| `withdrawn`         | something that was announced did not become durable                     |
| `rotated`           | the key has a new session; `compacted`: the same one, shortened         |
| `question.asked`    | the turn waits for a person; `question.ended`: it is answered, or over  |
| `turn.ended`        | the turn's outcome is durable                                           |
| `gap`               | events before this one are gone; read the transcript                    |
| `dropped`           | this subscriber was too slow and gets nothing more                      |

Keeps: numbers of one incarnation are 1, 2, 3, …; a window of the last events is kept, bounded, so
that `after=` resumes without gap or repeat inside it; a slow subscriber never slows the turn. Only
deltas are provisional; everything else is told after the commit that makes it true.

Pieces that come faster than anybody reads are gathered into one delta before it gets its number:
the first is told at once, the others when an interval is over, or when anything else is told.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias, final

import trio
from msgspec import Struct

from ..storage.identity import Incarnation, Seq, SessionId, SessionKey, TurnId, Uid
from ..storage.records import Message, Question, TurnOutcome
from .messages import size_of

EventKind: TypeAlias = Literal[
    "turn.queued",
    "turn.started",
    "message.delta",
    "message.committed",
    "withdrawn",
    "rotated",
    "compacted",
    "question.asked",
    "question.ended",
    "turn.ended",
    "gap",
    "dropped",
]
Position: TypeAlias = tuple[int, int]
_IDLE_EVENTS_KEPT = 64
_IDLE_BYTES_KEPT = 64 * 1024
_DELTA_LENGTH_MAX = 4096  # characters that are gathered at most, however fast they come


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened to a key. `position` is what `after=` takes."""

    kind: EventKind
    key: SessionKey
    position: tuple[Incarnation, int]
    session_id: SessionId | None = None
    turn_id: TurnId | None = None
    seq: Seq | None = None
    uid: Uid | None = None
    text: str | None = None
    message: Message | None = None
    outcome: TurnOutcome | None = None
    question: Question | None = None

    @property
    def provisional(self) -> bool:
        """Whether it may still turn out not to be stored."""
        return self.kind == "message.delta"


def _size_of(event: Event) -> int:
    size = 300 + (len(event.text) if event.text else 0)
    return size if event.message is None else size + size_of(event.message)


@final
class Subscription(trio.abc.ReceiveChannel[Event]):
    """Events for one subscriber, from when it subscribed (or from `after`) on."""

    def __init__(self, stream: Stream, turn_id: TurnId | None, size_max: int) -> None:
        self._stream = stream
        self.turn_id = turn_id
        self._size_max = size_max
        self._events: deque[Event] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._ended = False

    def offer(self, event: Event) -> None:
        """For the stream: one more event."""
        if self._ended or (self.turn_id is not None and event.turn_id not in (self.turn_id, None)):
            return
        if len(self._events) >= self._size_max:
            # From here on `after=` goes on: behind the last event that this subscriber gets.
            event = Event(kind="dropped", key=event.key, position=self._events[-1].position)
        self._events.append(event)
        if event.kind == "dropped" or (event.kind == "turn.ended" and self.turn_id is not None):
            self._ended = True
            self._stream.unsubscribe(self)
        self._lot.unpark_all()

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        """Nothing comes any more; what is there can still be read."""
        self._ended = True
        self._lot.unpark_all()

    async def receive(self) -> Event:
        """The next event. Raises `trio.EndOfChannel` behind the last one."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            while not self._events:
                if self._ended:
                    raise trio.EndOfChannel
                await self._lot.park()
            await trio.lowlevel.cancel_shielded_checkpoint()
            if self._events:  # there may be others who receive
                return self._events.popleft()

    async def aclose(self) -> None:
        self._stream.unsubscribe(self)
        self.end()
        await trio.lowlevel.checkpoint()


@final
class _Gathered:
    """Pieces of one message that are not told yet."""

    __slots__ = ("length", "pieces", "session_id", "timed", "told_s", "turn_id", "uid")

    def __init__(self, session_id: SessionId, turn_id: TurnId, uid: Uid) -> None:
        self.session_id = session_id
        self.turn_id = turn_id
        self.uid = uid
        self.pieces: list[str] = []
        self.length = 0
        self.told_s = float("-inf")  # when the last delta of this message was
        self.timed = False  # somebody looks when the interval is over


@final
class Stream:
    """The events of one key. Outlives the actor's incarnations."""

    __slots__ = (
        "_bytes_max",
        "_events",
        "_gathered",
        "_incarnation",
        "_key",
        "_number",
        "_subscriptions",
        "_window_max",
        "size_bytes",
    )

    def __init__(self, key: SessionKey, window_max: int, bytes_max: int = 1024 * 1024) -> None:
        self._key = key
        self._window_max = window_max
        self._bytes_max = bytes_max
        self.size_bytes = 0
        self._incarnation: Incarnation | None = None
        self._number = 0
        self._events: deque[Event] | None = None
        self._gathered: _Gathered | None = None
        self._subscriptions: list[Subscription] = []

    @property
    def watched(self) -> bool:
        return bool(self._subscriptions)

    def begin(self, incarnation: Incarnation) -> None:
        """A new actor: its events are numbered from 1."""
        self._incarnation, self._number = incarnation, 0
        self._events, self.size_bytes, self._gathered = None, 0, None

    def delta(
        self, session_id: SessionId, turn_id: TurnId, uid: Uid, piece: str, interval_s: float
    ) -> bool:
        """One more piece of a message; true if somebody must `keep_flushing` from now on."""
        gathered = self._gathered
        if gathered is None or gathered.uid != uid:
            self.flush()
            gathered = self._gathered = _Gathered(session_id, turn_id, uid)
        gathered.pieces.append(piece)
        gathered.length += len(piece)
        over = trio.current_time() >= gathered.told_s + interval_s
        if over or gathered.length >= _DELTA_LENGTH_MAX:
            self.flush()
            return False
        if gathered.timed or not self.watched:
            return False
        gathered.timed = True
        return True

    async def keep_flushing(self, interval_s: float) -> None:
        """Tell what was gathered whenever the interval is over, as long as there is something."""
        gathered = self._gathered
        assert gathered is not None
        while gathered is self._gathered and gathered.pieces:
            if trio.current_time() >= gathered.told_s + interval_s:
                self.flush()
            await trio.sleep_until(gathered.told_s + interval_s)
        gathered.timed = False

    def flush(self) -> None:
        """Tell what was gathered."""
        gathered = self._gathered
        if gathered is None or not gathered.pieces:
            return
        text, gathered.pieces, gathered.length = "".join(gathered.pieces), [], 0
        gathered.told_s = trio.current_time()
        self._publish(
            "message.delta",
            session_id=gathered.session_id,
            turn_id=gathered.turn_id,
            uid=gathered.uid,
            text=text,
        )

    def publish(
        self,
        kind: EventKind,
        *,
        session_id: SessionId | None = None,
        turn_id: TurnId | None = None,
        text: str | None = None,
        uid: Uid | None = None,
        message: Message | None = None,
        outcome: TurnOutcome | None = None,
        question: Question | None = None,
    ) -> None:
        """Tell something, behind what was gathered before it."""
        self.flush()
        self._publish(
            kind,
            session_id=session_id,
            turn_id=turn_id,
            text=text,
            uid=uid,
            message=message,
            outcome=outcome,
            question=question,
        )

    def _publish(
        self,
        kind: EventKind,
        *,
        session_id: SessionId | None,
        turn_id: TurnId | None,
        text: str | None,
        uid: Uid | None = None,
        message: Message | None = None,
        outcome: TurnOutcome | None = None,
        question: Question | None = None,
    ) -> None:
        assert self._incarnation is not None
        self._number += 1
        event = Event(
            kind=kind,
            key=self._key,
            position=(self._incarnation, self._number),
            session_id=message.session_id if message is not None else session_id,
            turn_id=message.turn_id if message is not None else turn_id,
            seq=message.seq if message is not None else None,
            uid=message.uid if message is not None else uid,
            text=text,
            message=message,
            outcome=outcome,
            question=question,
        )
        if self._events is None:
            self._events = deque()
        self._events.append(event)
        self.size_bytes += _size_of(event)
        self._forget(self._window_max, self._bytes_max)
        for subscription in list(self._subscriptions):
            subscription.offer(event)

    def subscribe(
        self, turn_id: TurnId | None, after: Position | None, *, over: bool = False
    ) -> Subscription:
        """Everything after `after`, as far as it is kept, then what comes.

        Without `after`, a turn's own events from its beginning, or a key's from now on. A turn that
        is `over` has an end, even if its last event is gone: then it is a gap.
        """
        self.flush()
        kept = self._events or ()
        first = kept[0].position[1] if kept else self._number + 1
        replayed = list(kept)
        if after is None:
            replayed = replayed if turn_id is not None else []
        elif after[0] == self._incarnation and after[1] >= first - 1:
            replayed = [event for event in kept if event.position[1] > after[1]]
        else:
            replayed.insert(0, self._gap(first - 1))
        # What is replayed must not count as slowness.
        subscription = Subscription(self, turn_id, self._window_max + len(replayed))
        self._subscriptions.append(subscription)
        for event in replayed:
            subscription.offer(event)
        if over:
            self._finish(subscription)
        return subscription

    def end_turn(self, turn_id: TurnId) -> None:
        """Nothing of this turn is still to come, and nothing will say so."""
        for subscription in list(self._subscriptions):
            if subscription.turn_id == turn_id:
                self._finish(subscription)

    def _finish(self, subscription: Subscription) -> None:
        if not subscription.ended:
            subscription.offer(self._gap(self._number))
            subscription.end()
            self.unsubscribe(subscription)

    def _gap(self, number: int) -> Event:
        position = (self._incarnation or Incarnation(0), number)
        return Event(kind="gap", key=self._key, position=position)

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def forget(self) -> None:
        """What was told is told to nobody again: who asks for it finds a gap."""
        self._events, self.size_bytes, self._gathered = None, 0, None

    def rest(self) -> None:
        """The session is idle: keep only a few events, unless somebody listens."""
        if not self.watched:
            self._forget(_IDLE_EVENTS_KEPT, _IDLE_BYTES_KEPT)

    def _forget(self, count: int, size_bytes: int) -> None:
        """Keep the newest so many events and bytes; one at least."""
        events = self._events
        while events and len(events) > 1 and (len(events) > count or self.size_bytes > size_bytes):
            self.size_bytes -= _size_of(events.popleft())

    def end(self) -> None:
        """The runtime ends: every subscriber reads to its end."""
        for subscription in list(self._subscriptions):
            subscription.end()
        self._subscriptions.clear()
