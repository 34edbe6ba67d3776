"""The Directory: which actor serves which key. It starts sessions, tends them and evicts them.

| a caller does             | what happens                                            |
| ------------------------- | ------------------------------------------------------- |
| `await ask(key, message)` | the key's actor answers; it is started if there is none |
| `interrupt(key, …)`       | at once, past every queue                               |
| `await take_over(…)`      | one key's session goes to another, in one transaction   |
| `await shut_down(…)`      | every live session is finalized                         |

Keeps:
- One actor per key: a stampede starts one, and what comes meanwhile waits in its mailbox.
- A message that meets an actor that is just leaving is sent again, not refused.
- A session that crashes is rebuilt from storage and nobody else notices; one that keeps crashing is
  left alone for a while, with a typed error for whoever asks, and takes nobody along.
- Live actors are bounded by count, by the bytes of their transcripts and by idle time; only an idle
  one is evicted, and it costs no memory afterwards.
- Actors start from a clean context: nothing of the turn that caused the start is inherited.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar, cast, final, overload

import trio
from msgspec import Struct

from ..storage.errors import OnepenError, StaleIncarnationError, StorageError
from ..storage.identity import Incarnation
from . import moves, operations
from .line import (
    Interrupt,
    Line,
    Operate,
    RuntimeClosedError,
    SessionBusyError,
    SessionCrashedError,
    Settle,
    Submit,
    TurnPendingError,
)
from .lot import Lot
from .mailbox import Answer, MailboxClosedError, MailboxFullError
from .policy import Backoff, Crashes, Intensity
from .raised import sole_cause
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..storage.identity import SessionId, SessionKey, TurnId
    from ..storage.records import Question
    from .events import Position, Subscription
    from .line import Accepted, Letter, Surroundings
    from .page import LazyPage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOUSEKEEPING_S = 1.0


class DirectoryStatistics(Struct, frozen=True, kw_only=True):
    """A look at the live sessions."""

    live: int
    live_max: int
    running: int
    waiting: int
    bytes_live: int


@final
class _Entry:
    """A key that is served."""

    __slots__ = ("_leaving", "crashes", "gone", "idle_since_s", "line", "session", "suspended")

    def __init__(self, line: Line, now_s: float) -> None:
        self.line = line
        self.session: Session | None = None
        self.gone = False
        self._leaving = Lot()
        self.idle_since_s: float = now_s
        self.crashes: Crashes | None = None
        self.suspended: Answer[object] | None = None

    def leave(self) -> None:
        """Nobody serves the key any more."""
        self.gone = True
        self._leaving.unpark_all()

    async def wait_gone(self) -> None:
        while not self.gone:
            await self._leaving.park()


@final
class Directory:
    """Key → Session. One for a runtime; runs in the runtime's nursery."""

    def __init__(self, surroundings: Surroundings, nursery: trio.Nursery) -> None:
        self._surroundings = surroundings._replace(on_idle=self._on_idle)
        self._settings = surroundings.settings
        self._nursery = nursery
        # From the one that was used longest ago to the one used last.
        self._entries: OrderedDict[SessionKey, _Entry] = OrderedDict()
        self._resting: dict[SessionKey, float] = {}
        self._lazy: OrderedDict[SessionKey, LazyPage] = OrderedDict()
        self._claimed: dict[SessionKey, trio.Event] = {}
        self._taking_over = trio.Lock()
        self._incarnations = 0
        self._closed: str | None = None

    # Asking ------------------------------------------------------------------------------------

    @overload
    async def ask(self, key: SessionKey, source: str, message: Submit) -> Accepted: ...
    @overload
    async def ask(self, key: SessionKey, source: str, message: Interrupt) -> bool: ...
    @overload
    async def ask(self, key: SessionKey, source: str, message: Settle) -> Question: ...
    @overload
    async def ask(self, key: SessionKey, source: str, message: Operate[T]) -> T: ...
    async def ask(self, key: SessionKey, source: str, message: Letter) -> Any:
        """The answer of the key's actor, which is started if there is none.

        Raises what the actor raises, `SessionBusyError`, `SessionCrashedError` and
        `RuntimeClosedError`. Cancelling takes nothing back but an operation that still waits for
        the running turn.
        """
        while True:
            entry = await self._entry(key, source)
            self._entries.move_to_end(key)
            try:
                return await entry.line.mailbox.ask(message)
            except MailboxClosedError:
                continue  # it was leaving, and had not begun with the message
            except MailboxFullError as error:
                raise SessionBusyError(key, 1.0, why=str(error.message)) from error

    async def _entry(self, key: SessionKey, source: str) -> _Entry:
        """The key, served by somebody who takes messages; no checkpoint behind the last look."""
        while True:
            entry = self._entries.get(key)
            if entry is None:
                if len(self._entries) < self._settings.live_actors_max:
                    return self._start(key, source)
                entry = self._evict_oldest()
                if entry is None:
                    why = f"{len(self._entries)} sessions are live and none of them is idle"
                    raise SessionBusyError(key, 1.0, why=why)
            elif not entry.line.mailbox.closed:
                return entry
            await entry.wait_gone()

    def has(self, key: SessionKey) -> bool:
        """Whether an actor serves the key at this moment, or is about to leave it."""
        return key in self._entries

    def interrupt(self, key: SessionKey, cause: str, turn_id: TurnId | None = None) -> bool:
        """Stop the key's running turn, or this turn though it waits; past every queue.

        True if there was one.
        """
        entry = self._entries.get(key)
        if entry is None or entry.session is None:
            return False
        session = entry.session
        return session.interrupt(cause, turn_id) or (
            turn_id is not None and session.take_back(turn_id, cause)
        )

    def interrupt_stored(
        self, key: SessionKey, source: str, cause: str, turn_id: TurnId | None = None
    ) -> Answer[bool] | None:
        """The same for a turn that nobody here knows of: it waits for a person since before its
        actor left memory. `None` if there is none for sure.
        """
        entry = self._entries.get(key)
        served = entry is not None and entry.session is not None and entry.session.ready
        if served or self._closed is not None:
            return None
        answer: Answer[bool] = Answer()
        self.spawn(self._interrupt_stored, key, source, cause, turn_id, answer)
        return answer

    async def _interrupt_stored(
        self,
        key: SessionKey,
        source: str,
        cause: str,
        turn_id: TurnId | None,
        answer: Answer[bool],
    ) -> None:
        done = False
        try:
            read = self._surroundings.writer.read
            for turn in await read(lambda reader: reader.unfinished_turns(key)):
                wanted = turn.state != "queued" if turn_id is None else turn.id == turn_id
                if wanted:  # by its id: another may have begun meanwhile
                    done = await self.ask(key, source, Interrupt(turn.id, cause)) or done
            answer.give(done)
        except OnepenError as error:
            answer.fail(error)
        finally:
            answer.fail(RuntimeClosedError("the runtime has ended"))  # unless it was answered

    async def subscribe(
        self,
        key: SessionKey,
        source: str,
        turn_id: TurnId | None,
        after: Position | None,
        *,
        over: bool = False,
    ) -> Subscription:
        """Follow a key's events; it is served for as long as somebody does.

        `over` says that the turn has ended: nothing of it is still to come.
        """
        entry = await self._entry(key, source)
        return entry.line.stream.subscribe(turn_id, after, over=over)

    def end_turn(self, key: SessionKey, turn_id: TurnId) -> None:
        """Whoever follows this turn is told nothing more: it never was, or is part of another."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.line.stream.end_turn(turn_id)

    # Starting ----------------------------------------------------------------------------------

    def _start(self, key: SessionKey, source: str) -> _Entry:
        self._check_open()
        resting = self._resting.get(key)
        if resting is not None:
            left_s = resting - trio.current_time()
            if left_s > 0:
                raise SessionBusyError(key, left_s, why="its actor keeps crashing")
            del self._resting[key]
        entry = _Entry(Line(key, source, self._settings), trio.current_time())
        self._entries[key] = entry
        self._surroundings.context.run(self._nursery.start_soon, self._serve, entry)
        return entry

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RuntimeClosedError(self._closed)

    def _next_incarnation(self) -> Incarnation:
        self._incarnations += 1
        return Incarnation((self._surroundings.writer.epoch << 32) + self._incarnations)

    # Serving: the supervision of one key -------------------------------------------------------

    async def _serve(self, entry: _Entry) -> None:
        """Sessions for one key, one after the other, until one ends as it should."""
        line, crash = entry.line, None
        # Whatever ends this, whoever waits on the line is told.
        parting: OnepenError = RuntimeClosedError("the runtime has ended")
        stranded = False
        try:
            while True:
                await self._wait_unclaimed(line)
                lazy = self._lazy.pop(line.key, None)
                session = Session(line, self._next_incarnation(), self._surroundings, crash, lazy)
                entry.session = session
                try:
                    await session.run()
                except Exception as error:
                    crash = cast("Exception", sole_cause(error))
                    entry.session = None
                    if (left := await self._survives(entry, crash)) is not None:
                        parting, stranded = left, bool(session.waiting)
                        return
                else:
                    entry.session = crash = None
                    self._remember(line.key, session.lazy)
                    if line.mailbox.closed:
                        parting = MailboxClosedError("the actor has left")
                        return
                    # It rests, so that another key can take its session; the next actor begins
                    # behind that.
        finally:
            entry.session = None
            self._entries.pop(line.key, None)
            self._leave(line, parting)
            entry.leave()
            if stranded and self._closed is None:
                self.spawn(self._wake_later, line.key, line.source)

    async def _wait_unclaimed(self, line: Line) -> None:
        """While another key takes this one's session, nobody serves it."""
        while (claimed := self._claimed.get(line.key)) is not None:
            line.mailbox.answer_unread(_is_rest, None)  # nobody is here, so nobody is in the way
            await claimed.wait()

    def _remember(self, key: SessionKey, lazy: LazyPage | None) -> None:
        """What only memory knew of a session without a row; bounded like the actors."""
        if lazy is not None:
            self._lazy[key] = lazy
            if len(self._lazy) > self._settings.live_actors_max:
                self._lazy.popitem(last=False)

    async def _wake_later(self, key: SessionKey, source: str) -> None:
        """Messages are waiting in storage, and their actor is gone: let the next one come."""
        await self._surroundings.writer.wait_up()
        await trio.sleep(self._settings.crash_backoff_s)
        try:
            await self.ask(key, source, Operate("wake", _nothing, interrupts=False, beside=True))
        except OnepenError as error:
            logger.error("%s has waiting messages and can't be served: %s", key, error)

    async def _survives(self, entry: _Entry, crash: Exception) -> OnepenError | None:
        """After a crash: wait a little and go on; or what is said to everybody, if it ends here."""
        line, settings = entry.line, self._settings
        self._surroundings.counters.crashes += 1
        if isinstance(crash, StaleIncarnationError | StorageError):
            # A predecessor, or no storage: another actor would fare no better just now.
            logger.error("the session actor of %s ends: %s", line.key, crash)
            return crash
        logger.error("the session actor of %s crashed", line.key, exc_info=crash)
        line.mailbox.fail_unanswered(SessionCrashedError(line.key, crash))
        if entry.crashes is None:
            entry.crashes = Crashes(
                Intensity(restarts_max=settings.crashes_max, period_s=settings.crash_period_s)
            )
        now = trio.current_time()
        backoff = Backoff(first_s=settings.crash_backoff_s, max_s=settings.crash_backoff_max_s)
        if entry.crashes.note(now):
            self._resting[line.key] = now + settings.crash_period_s
            return SessionCrashedError(line.key, crash)
        await trio.sleep(backoff.wait_s(entry.crashes.count(now)))
        return None

    def _leave(self, line: Line, error: OnepenError) -> None:
        """Nobody serves this line any more: whoever waits on it is told."""
        line.mailbox.end(error)
        if isinstance(error, MailboxClosedError | RuntimeClosedError):
            error = TurnPendingError("the runtime has ended before the turn did")
        for turn_id in list(line.replies):
            line.fail_reply(turn_id, error)
        line.stream.end()

    # Evicting ----------------------------------------------------------------------------------

    def _on_idle(self, key: SessionKey) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.idle_since_s = trio.current_time()

    def _evict_oldest(self) -> _Entry | None:
        """The session that was idle longest leaves, unless one is leaving already."""
        for entry in self._entries.values():
            if entry.line.mailbox.closed or self._evict(entry):
                return entry
        return None

    def evict_idle(self) -> int:
        """Let every idle session go now; how many did."""
        return sum(self._evict(entry) for entry in list(self._entries.values()))

    def _evict(self, entry: _Entry) -> bool:
        """Let an idle session go: its mailbox closes, it reads nothing more, and it is gone."""
        session = entry.session
        if session is None or entry.line.mailbox.closed or not session.idle:
            return False
        entry.line.mailbox.close()
        self._surroundings.counters.evicted += 1
        return True

    async def keep_house(self) -> None:
        """Evict what was idle for too long or is too much, and report agents that don't stop."""
        while True:
            await trio.sleep(min(_HOUSEKEEPING_S, self._settings.idle_evict_s / 2))
            self.tidy()

    def tidy(self) -> None:
        """One round of housekeeping."""
        now, settings = trio.current_time(), self._settings
        size = 0
        for entry in list(self._entries.values()):
            session = entry.session
            if session is None:
                continue
            if session.turn is not None:
                if session.turn.report_if_stuck(session.key, now, settings.interrupt_grace_s):
                    self._surroundings.counters.agents_stuck += 1
            elif now - entry.idle_since_s >= settings.idle_evict_s and self._evict(entry):
                continue
            size += session.size_bytes
        for entry in list(self._entries.values()):
            if size <= settings.live_bytes_max:
                break
            if entry.session is not None and self._evict(entry):
                size -= entry.session.size_bytes
        for key, until_s in list(self._resting.items()):
            if until_s <= now:
                del self._resting[key]

    def spawn(self, function: Any, *arguments: Any) -> None:
        """A task beside the sessions, in a clean context."""
        self._surroundings.context.run(self._nursery.start_soon, function, *arguments)

    # Two keys ----------------------------------------------------------------------------------

    async def take_over(
        self, key: SessionKey, source: str, session_id: SessionId, holder: SessionKey
    ) -> SessionId:
        """The session goes from its holder to this key; the holder gets a fresh one.

        One at a time in the whole runtime: two keys that take from each other must not wait for
        each other.
        """
        answer: Answer[SessionId] = Answer()
        # In a task of its own: a caller who is cancelled must not let go of it half-way.
        self.spawn(self._take_over, key, source, session_id, holder, answer)
        return await answer.wait()

    async def _take_over(
        self,
        key: SessionKey,
        source: str,
        session_id: SessionId,
        holder: SessionKey,
        answer: Answer[SessionId],
    ) -> None:
        try:
            async with self._taking_over:
                released = self._claimed[holder] = trio.Event()
                try:
                    held = await self._surroundings.writer.read(lambda r: r.holder(session_id))
                    if held == holder:
                        await self._rest(holder)
                    take = moves.TakeOver(holder, self._next_incarnation())
                    answer.give(await self.ask(key, source, moves.switch(session_id, take)))
                finally:
                    del self._claimed[holder]
                    released.set()
        except Exception as error:
            answer.fail(error)
        finally:
            answer.fail(RuntimeClosedError("the runtime has ended"))  # unless it was answered

    async def _rest(self, holder: SessionKey) -> None:
        """The holder's turn is stopped and stored; what waits there stays with the key."""
        entry = self._entries.get(holder)
        if entry is None or entry.session is None or entry.line.mailbox.closed:
            return
        try:
            await entry.line.mailbox.ask(operations.rest())
        except OnepenError as error:
            # Its actor is gone, and the next one waits for us.
            logger.info("%s is taken over behind: %s", holder, error)

    # The end -----------------------------------------------------------------------------------

    async def shut_down(self, reason: str) -> None:
        """Finalize every live session, all at once. Whoever calls this sets the deadline."""
        self._closed = f"the runtime is closed: {reason}"
        async with trio.open_nursery() as nursery:
            for entry in list(self._entries.values()):
                nursery.start_soon(self._suspend, entry, reason)

    async def _suspend(self, entry: _Entry, reason: str) -> None:
        if not entry.line.mailbox.closed:
            try:
                if entry.suspended is None:  # else a shutdown that was cut off has asked already
                    entry.suspended = entry.line.mailbox.ask_nowait(operations.suspend(reason))
                await entry.suspended.wait()
            except OnepenError as error:
                logger.error("%s could not be finalized: %s", entry.line.key, error)
            entry.line.mailbox.close()
        await entry.wait_gone()

    @property
    def live(self) -> int:
        """How many keys are served."""
        return len(self._entries)

    # Looking -----------------------------------------------------------------------------------

    def sessions(self) -> Iterator[Session]:
        return (e.session for e in self._entries.values() if e.session is not None)

    def statistics(self) -> DirectoryStatistics:
        sessions = list(self.sessions())
        return DirectoryStatistics(
            live=len(self._entries),
            live_max=self._settings.live_actors_max,
            running=sum(session.turn is not None for session in sessions),
            waiting=sum(len(session.waiting) for session in sessions),
            bytes_live=sum(session.size_bytes for session in sessions),
        )


def _is_rest(message: Letter) -> bool:
    return isinstance(message, Operate) and message.name == operations.REST


async def _nothing(_: Any) -> None:
    """Starting the actor is all there is to do: it recovers its key by itself."""
