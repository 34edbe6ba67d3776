"""The Timetable: what is due at some time, whoever is in memory then.

Owns timers (inbound messages for later) and the expiry of questions. Both are rows; this actor only
wakes up in time and hands them to the session of their key.

Keeps:
- A timer fires once: resolving it and accepting its message are one unit, under an inbound id of
  its own. What was due while nobody served is late, and run or left out as its source says.
- A question expires by the wall clock, with its session in memory or not.
- What can't be done just now (a full line, storage that is down) is tried again, and holds up
  nothing else.

The wall clock may jump: it is looked at again at the latest after a while.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, final
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
from .sources import SourcePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..storage.engine import Reader
    from ..storage.identity import Clock, SessionKey
    from ..storage.records import Question
    from .directory import Directory
    from .line import Accepted
    from .replies import Reply
    from .sources import Busy
    from .writer import WriterRef

logger = logging.getLogger(__name__)

_LOOKED_FOR_S = 30.0  # the wall clock may have been set
_TRIED_AGAIN_S = 1.0
_AT_ONCE = 64
_QUEUE = SourcePolicy()


def digest_of(body: object) -> str:
    """What an inbound message says, in short: the same for the same content."""
    return blake2b(msgspec.json.encode(body), digest_size=16).hexdigest()


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
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._clock = clock
        self._sources = sources
        self._poked = trio.Event()
        # Only for as long as somebody waits for them.
        self._replies: WeakValueDictionary[str, Answer[Reply]] = WeakValueDictionary()
        self.fired = self.skipped = self.expired = 0

    # Setting -------------------------------------------------------------------------------------

    async def set(self, timer: Timer) -> tuple[Timer, Answer[Reply]]:
        """Store a timer; what is stored of it, and the promise of its turn's reply.

        The same timer again is the same one, whatever has become of it. Raises `ConflictError` for
        another one of this id.
        """
        stored = await self._writer.read(lambda reader: reader.timer(timer.id))
        if stored is not None:
            if _content_of(stored) != _content_of(timer):
                raise ConflictError(f"timer {timer.id}", stored.due_ms, timer.due_ms)
            promise = self._promise(timer.id)
            if stored.state == "cancelled":
                self._fail(timer.id, "the timer was cancelled")
            return stored, promise
        command = SetTimer(
            timer_id=timer.id,
            key=timer.key,
            source=timer.source,
            due_ms=timer.due_ms,
            inbound=timer.inbound,
            at_ms=self._clock.now(),
            busy=timer.busy,
        )
        promise = self._promise(timer.id)
        await self._writer.write(Unit((command,)))
        self._poked.set()
        return timer, promise

    def _promise(self, timer_id: str) -> Answer[Reply]:
        return self._replies.setdefault(timer_id, Answer())

    async def cancel(self, timer_id: str) -> bool:
        """It will not fire; false if it has fired, or was cancelled before."""
        timer = await self._writer.read(lambda reader: reader.timer(timer_id))
        if timer is None:
            raise MissingError(f"timer {timer_id}")
        if timer.state != "set":
            return False
        try:
            await self._writer.write(Unit((self._resolved(timer, "cancelled"),)))
        except ConflictError:
            return False  # it fired meanwhile
        self._fail(timer_id, "the timer was cancelled")
        return True

    def _fail(self, timer_id: str, why: str) -> None:
        promise = self._replies.get(timer_id)
        if promise is not None:
            promise.fail(MissingError(f"a turn of {timer_id}: {why}"))

    def _resolved(self, timer: Timer, resolution: str) -> ResolveTimer:
        fired = resolution == "fired"
        return ResolveTimer(
            timer_id=timer.id,
            resolution="fired" if fired else "cancelled",
            at_ms=self._clock.now(),
        )

    def wake(self) -> None:
        """Something may be due sooner than it was."""
        self._poked.set()

    # Running -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look, do what is due, and sleep until the next time."""
        try:
            while True:
                self._poked = trio.Event()
                wait_s = await self._round()
                with trio.move_on_after(wait_s):
                    await self._poked.wait()
        finally:
            for promise in list(self._replies.values()):
                promise.fail(TurnPendingError("the runtime has ended before the timer"))

    async def _round(self) -> float:
        """Do what is due; how long there is nothing to do."""
        now = self._clock.now()

        def look(reader: Reader) -> tuple[tuple[Timer, ...], tuple[Question, ...], int | None]:
            return (
                reader.timers(now, limit=_AT_ONCE),
                reader.expired_questions(now, limit=_AT_ONCE),
                reader.next_due_ms(),
            )

        try:
            timers, questions, next_ms = await self._writer.read(look)
        except OnepenError as error:
            logger.warning("the timetable can't be read: %s", error)
            return _TRIED_AGAIN_S
        if not timers and not questions:
            if next_ms is None:
                return _LOOKED_FOR_S
            return min(max((next_ms - self._clock.now()) / 1000, 0.0), _LOOKED_FOR_S)
        failed: list[str] = []
        async with trio.open_nursery() as nursery:
            for timer in timers:
                nursery.start_soon(self._try, timer, failed)
            for question in questions:
                nursery.start_soon(self._try, question, failed)
        return _TRIED_AGAIN_S if failed else 0.0

    async def _try(self, what: Timer | Question, failed: list[str]) -> None:
        name = what.id if isinstance(what, Timer) else what.question_key
        try:
            if isinstance(what, Timer):
                await self._fire(what)
            else:
                await self._expire(what)
        except RuntimeClosedError:
            failed.append(name)  # it is due at the next start
        except OnepenError as error:
            failed.append(name)
            logger.warning("%s: what is due is tried again: %s", what.key, error)

    async def _fire(self, timer: Timer) -> None:
        policy = self._sources.get(timer.source, _QUEUE)
        late_ms = self._clock.now() - timer.due_ms
        if policy.on_late == "skip" and late_ms > policy.late_after_s * 1000:
            await self._writer.write(Unit((self._resolved(timer, "cancelled"),)))
            self.skipped += 1
            self._fail(timer.id, f"it was {late_ms // 1000} s late, and left out")
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
        accepted = await self._directory.ask(timer.key, timer.key.partition(":")[0], submit)
        await accepted.durable()
        self.fired += 1
        promise = self._replies.get(timer.id)
        if promise is not None:
            self._directory.spawn(self._follow, accepted, promise)

    async def _follow(self, accepted: Accepted, promise: Answer[Reply]) -> None:
        try:
            promise.give(await accepted.reply.wait())
        except OnepenError as error:
            promise.fail(error)

    async def _expire(self, question: Question) -> None:
        key: SessionKey = question.key
        settled = Settle(question.question_key, "expired")
        try:
            await self._directory.ask(key, key.partition(":")[0], settled)
            self.expired += 1
        except ConflictError:
            pass  # it was answered in the last moment


def _content_of(timer: Timer) -> tuple[object, ...]:
    return (timer.key, timer.source, timer.due_ms, timer.inbound, timer.busy)
