"""The Timetable: what is due at some time, whoever is in memory then.

Owns timers (inbound messages for later) and the expiry of questions. Both are rows; this actor only
wakes up in time and hands them to the session of their key.

Keeps:
- A timer fires once: resolving it and accepting its message are one unit, under an inbound id of
  its own. What was due while nobody served is late, and run or left out as its source says.
- A question expires by the wall clock, with its session in memory or not.
- One thing at a time for each key, in order. What can't be done just now (a full line, a session
  that crashes) lets its key rest for a moment, and holds up nobody else's.

The wall clock may jump: it is looked at again at the latest after a while.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, final
from weakref import WeakValueDictionary

import msgspec
import trio

from ..storage.commands import ResolveTimer, SetTimer
from ..storage.errors import ConflictError, MissingError, OnepenError
from ..storage.identity import TurnId
from ..storage.records import Timer
from ..storage.units import Unit
from .line import RuntimeClosedError, Settle, Submit, TurnPendingError
from .mailbox import Answer
from .messages import digest_of
from .sources import PLAIN, source_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..storage.engine import Reader
    from ..storage.identity import Clock, SessionKey
    from ..storage.records import Question
    from .directory import Directory
    from .line import Accepted
    from .replies import Reply
    from .sources import Busy, SourcePolicy
    from .writer import WriterRef

logger = logging.getLogger(__name__)

PREFIX = "timer:"  # of timer ids, and of the inbound ids under which they fire
_LOOKED_FOR_S = 30.0  # the wall clock may have been set
_RESTS_S = 1.0  # a key for which something could not be done
_UNDER_WAY_MAX = 64


@final
class Bell:
    """Rung by whoever stores something that is due some time, perhaps sooner than all else."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, seconds: float) -> None:
        """Until it rings, or so long; a ring from before counts."""
        with trio.move_on_after(seconds):
            await self._rung.wait()
        self._rung = trio.Event()


def turn_of(timer_id: str, due_ms: int) -> TurnId:
    """The turn that a timer will start, known beforehand."""
    digest = blake2b(timer_id.encode(), digest_size=10).hexdigest()
    return TurnId(f"{due_ms & (2**48 - 1):012x}{digest}")


@final
class Timetable:
    """One for a runtime; runs beside the Directory."""

    def __init__(
        self,
        directory: Directory,
        writer: WriterRef,
        clock: Clock,
        sources: Mapping[str, SourcePolicy],
        bell: Bell,
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._clock = clock
        self._sources = sources
        self._bell = bell
        self._closed = False
        self._busy: set[SessionKey] = set()
        self._resting: dict[SessionKey, float] = {}
        # Only for as long as somebody waits for them.
        self._replies: WeakValueDictionary[str, Answer[Reply]] = WeakValueDictionary()

    # Setting -------------------------------------------------------------------------------------

    async def set(self, timer: Timer) -> tuple[Timer, Answer[Reply]]:
        """Store a timer; what is stored of it, and the promise of its turn's reply.

        The same timer again is the same one, also when it has fired. Raises `ConflictError` for
        another one of this id, and for one that was cancelled; `RuntimeClosedError`.
        """
        if self._closed:
            raise RuntimeClosedError("the runtime is closed")
        promise = self._replies.setdefault(timer.id, Answer())  # before anybody could fire it
        stored = await self._stored(timer.id)
        if stored is None:
            command = SetTimer(
                timer_id=timer.id,
                key=timer.key,
                source=timer.source,
                due_ms=timer.due_ms,
                inbound=timer.inbound,
                at_ms=self._clock.now(),
                busy=timer.busy,
            )
            try:
                await self._writer.write(Unit((command,)))
            except ConflictError:
                stored = await self._stored(timer.id)  # somebody has set it at the same time
                if stored is None:
                    raise
            else:
                self._bell.ring()
                return timer, promise
        if _content_of(stored) != _content_of(timer):
            raise ConflictError(f"timer {timer.id}", stored.due_ms, timer.due_ms)
        if stored.state == "cancelled":
            raise ConflictError(f"timer {timer.id}", "cancelled", "set")
        return stored, promise

    async def _stored(self, timer_id: str) -> Timer | None:
        return await self._writer.read(lambda reader: reader.timer(timer_id))

    async def cancel(self, timer_id: str) -> bool:
        """It will not fire; false if it has fired, or was cancelled before."""
        timer = await self._stored(timer_id)
        if timer is None:
            raise MissingError(f"timer {timer_id}")
        if timer.state != "set":
            return False
        try:
            await self._writer.write(Unit((self._resolved(timer, "cancelled"),)))
        except ConflictError:
            return False  # it fired meanwhile
        self._fail(timer, "the timer was cancelled")
        return True

    def cancel_soon(self, timer_id: str) -> Answer[bool]:
        """The same for whoever can't wait for it."""
        answer: Answer[bool] = Answer()
        self._directory.spawn(self._cancel_soon, timer_id, answer)
        return answer

    async def _cancel_soon(self, timer_id: str, answer: Answer[bool]) -> None:
        try:
            answer.give(await self.cancel(timer_id))
        except OnepenError as error:
            answer.fail(error)
        finally:
            answer.fail(RuntimeClosedError("the runtime has ended"))  # unless it was answered

    def _fail(self, timer: Timer, why: str) -> None:
        promise = self._replies.get(timer.id)
        if promise is not None:
            promise.fail(MissingError(f"a turn of {timer.id}: {why}"))
        self._directory.end_turn(timer.key, turn_of(timer.id, timer.due_ms))

    def _resolved(self, timer: Timer, resolution: Literal["fired", "cancelled"]) -> ResolveTimer:
        return ResolveTimer(timer_id=timer.id, resolution=resolution, at_ms=self._clock.now())

    def close(self) -> None:
        """The runtime ends: whoever waits for a timer is told, and none is set any more."""
        self._closed = True
        for promise in list(self._replies.values()):
            promise.fail(TurnPendingError("the runtime has ended before the timer"))

    # Running -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look, begin what is due, and sleep until the next time."""
        self._busy.clear()
        async with trio.open_nursery() as nursery:
            while True:
                await self._bell.wait(await self._round(nursery))

    async def _round(self, nursery: trio.Nursery) -> float:
        """Begin what is due and not held up; how long there is nothing to look for."""
        now_s = trio.current_time()
        self._resting = {key: s for key, s in self._resting.items() if s > now_s}
        # One of each key: those that are held up leave room for the others.
        limit = _UNDER_WAY_MAX + len(self._busy) + len(self._resting)
        try:
            due, next_ms = await self._due(limit)
        except OnepenError as error:
            logger.warning("the timetable can't be read: %s", error)
            return _RESTS_S
        begun = [self._begin(nursery, one) for one in due]
        if any(begun) and len(self._busy) < _UNDER_WAY_MAX:
            return 0.0  # perhaps there is more
        waits = [_LOOKED_FOR_S, *(until_s - now_s for until_s in self._resting.values())]
        if next_ms is not None:
            waits.append((next_ms - self._clock.now()) / 1000)
        return max(min(waits), 0.0)  # whatever ends sooner rings

    async def _due(self, limit: int) -> tuple[list[Timer | Question], int | None]:
        now_ms = self._clock.now()

        def look(reader: Reader) -> tuple[list[Timer | Question], int | None]:
            questions = reader.expired_questions(now_ms, limit=limit)
            return [*questions, *reader.due_timers(now_ms, limit=limit)], reader.next_due_ms(now_ms)

        return await self._writer.read(look)

    def _begin(self, nursery: trio.Nursery, one: Timer | Question) -> bool:
        """Start on it, unless its key is at work or at rest."""
        full = len(self._busy) >= _UNDER_WAY_MAX
        if full or one.key in self._busy or one.key in self._resting:
            return False
        self._busy.add(one.key)
        nursery.start_soon(self._try, one)
        return True

    async def _try(self, one: Timer | Question) -> None:
        try:
            if isinstance(one, Timer):
                await self._fire(one)
            else:
                await self._expire(one)
        except RuntimeClosedError:
            self._rest(one.key)  # it is due at the next start
        except OnepenError as error:
            self._rest(one.key)
            logger.warning("%s: what is due is tried again: %s", one.key, error)
        finally:
            self._busy.discard(one.key)
            self._bell.ring()

    def _rest(self, key: SessionKey) -> None:
        self._resting[key] = trio.current_time() + _RESTS_S

    async def _fire(self, timer: Timer) -> None:
        policy = self._sources.get(timer.source, PLAIN)
        late_ms = self._clock.now() - timer.due_ms
        if policy.on_late == "skip" and late_ms > policy.late_after_s * 1000:
            await self._writer.write(Unit((self._resolved(timer, "cancelled"),)))
            self._fail(timer, f"it was {late_ms // 1000} s late, and left out")
            logger.warning("%s: timer %s was late and is left out", timer.key, timer.id)
            return
        busy: Busy = policy.busy if timer.busy is None else timer.busy  # type: ignore[assignment]
        submit = Submit(
            timer.inbound,
            timer.id,
            timer.source,
            digest_of(timer.inbound),
            turn_of(timer.id, timer.due_ms),
            repeatable=True,
            busy="queue" if busy == "reject" else busy,  # it may wait: it has waited before
            debounce_s=policy.debounce_s,
            reset=policy.reset,
            along=(self._resolved(timer, "fired"),),
        )
        accepted = await self._directory.ask(timer.key, source_of(timer.key), submit)
        await accepted.durable()
        promise = self._replies.get(timer.id)
        if promise is not None:
            self._directory.spawn(self._follow, timer, accepted, promise)

    async def _follow(self, timer: Timer, accepted: Accepted, promise: Answer[Reply]) -> None:
        try:
            promise.give(await accepted.reply.wait())
        except OnepenError as error:
            promise.fail(error)
        # It may have become part of another turn, whose end is not told as its own.
        self._directory.end_turn(timer.key, turn_of(timer.id, timer.due_ms))

    async def _expire(self, question: Question) -> None:
        settled = Settle(question.question_key, "expired")
        try:
            await self._directory.ask(question.key, source_of(question.key), settled)
        except ConflictError:
            pass  # it was answered in the last moment


def _content_of(timer: Timer) -> tuple[object, ...]:
    inbound = msgspec.json.encode(timer.inbound, order="sorted")
    return (timer.key, timer.source, timer.due_ms, inbound, timer.busy)
