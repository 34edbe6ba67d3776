"""The runtime that a gateway embeds: conversations by key, on one database.

Owns the public calls. Each is checked at the edge and then handed to the key's session actor
through the Directory; nothing here writes. Whatever a call returns is durable when it returns,
unless its docstring says otherwise. Use it on the trio thread that opened it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import trio
from msgspec import Struct

from ..actors import moves, operations
from ..actors.binding import inside_turn
from ..actors.clearing import finalize_orphans, prune_empty, prune_work
from ..actors.compression import Compression
from ..actors.courier import CourierStatistics
from ..actors.directory import DirectoryStatistics
from ..actors.line import Accepted, Interrupt, RuntimeClosedError, Submit
from ..actors.messages import Inbound, digest_of, user_draft
from ..actors.outbox import Target
from ..actors.owned import own_inbound, own_json
from ..actors.reception import acceptance
from ..actors.slots import SlotStatistics
from ..actors.sources import PLAIN, check_busy, name_of, source_of
from ..actors.timetable import PREFIX, turn_of
from ..actors.writer import WriterStatistics
from ..storage.edge import (
    check_count,
    check_draft,
    check_json,
    check_name,
    check_place,
    check_session_id,
    check_unit,
)
from ..storage.errors import InvalidContentError, OnepenError, SessionHeldError
from ..storage.identity import SessionId, SessionKey, TurnId, Uid
from ..storage.records import Draft, Timer
from ..storage.units import Unit
from .approvals import Approvals
from .cleanup import Pruned, before_of, delete, deleting, prune, set_flags
from .deliveries import Deliveries
from .forgetting import Erased, erase
from .reading import Sessions
from .searching import rebuild_search
from .submission import Interruption, Submission
from .timers import Timers, due_ms
from .transfer import ActorKeys
from .turns import DeadLetters, KeyStatus, Turns, status_of
from .upkeep import make_backup, make_check
from .visiting import DirectoryVisitor

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping
    from datetime import datetime

    from ..actors.compression import Summarise
    from ..actors.courier import Courier
    from ..actors.directory import Directory
    from ..actors.events import Position, Subscription
    from ..actors.finalize import Finalized
    from ..actors.line import Operate, Surroundings
    from ..actors.replies import Reply
    from ..actors.sources import Busy, SourcePolicy
    from ..actors.timetable import Timetable
    from ..storage.records import Delivery, JsonObject
    from ..storage.upkeep import Copied, Finding
    from .settings import Settings

T = TypeVar("T")

_KEY_BYTES_MAX = 1024
_ANY_UID = Uid("0" * 32)


class RuntimeStatistics(Struct, frozen=True, kw_only=True):
    """A look at the runtime; counters count from its opening."""

    sessions: DirectoryStatistics
    slots: SlotStatistics
    writer: WriterStatistics
    deliveries: CourierStatistics
    counters: dict[str, int]
    agents_built: int
    agents_rebuilt: int
    hook_failures: int

    @property
    def route_writes(self) -> int:
        """How often a key was given another session."""
        return self.writer.engine.route_writes

    @property
    def busy(self) -> bool:
        """Whether a turn runs, a message waits, or something is to be sent."""
        sessions = self.sessions
        return bool(sessions.running or sessions.waiting or self.deliveries.waiting)


@final
class Ending:
    """How a runtime comes to its end, whoever asks for it."""

    def __init__(self, directory: Directory, timetable: Timetable, courier: Courier) -> None:
        self._directory = directory
        self._timetable = timetable
        self._courier = courier
        self.sent_by_s = float("inf")
        """Until when it waits for what is being sent: whoever gave a deadline gets no second."""

    async def within(self, limit_s: float) -> bool:
        """Finalize and send; true if everything was in time."""
        with trio.move_on_after(limit_s):
            try:
                await self._directory.shut_down("shutdown")
            finally:
                self._timetable.close()  # nothing fires any more, and those who wait are told
            with trio.move_on_at(self.sent_by_s) as sending:
                await self._courier.drain()
            return self._directory.live == 0 and not sending.cancelled_caught
        return False


@final
class Runtime:
    """Many sessions, one pen. Made by `open_runtime`."""

    def __init__(
        self,
        directory: Directory,
        timetable: Timetable,
        surroundings: Surroundings,
        settings: Settings,
        sources: Mapping[str, SourcePolicy],
        ending: Ending,
    ) -> None:
        writer, courier = surroundings.writer, surroundings.courier
        self._directory = directory
        self._timetable = timetable
        self._courier: Courier = courier
        self._sources = sources
        self._surroundings = surroundings
        self._settings = settings
        self._ending = ending
        self.sessions = Sessions(writer, ActorKeys(directory))
        self.turns = Turns(directory, surroundings)
        self.dead_letters = DeadLetters(directory, surroundings)
        self.deliveries = Deliveries(courier, writer)
        self.approvals = Approvals(directory, writer)
        self.timers = Timers(timetable, writer)

    # Messages ----------------------------------------------------------------------------------

    async def submit(
        self,
        key: str,
        message: str | Inbound,
        *,
        busy: Busy | None = None,
        debounce_s: float | None = None,
        at: datetime | float | None = None,
    ) -> Submission:
        """Hand a message to a conversation; it is durable when this returns.

        A busy session does with it what `busy` says, or the policy of its source: `queue`,
        `collect`, `steer`, `interrupt`, `latest` or `reject`; `disposition` tells. A message that
        was here before (same source and inbound id) starts no second turn: the submission follows
        the first one's, also after a restart; a turn that a crash cut is resumed. With `at`, an
        aware datetime or a timestamp, it is a durable timer: the message arrives then, once, and
        the submission is `scheduled` until it does.

        Raises `InvalidContentError`, `SessionBusyError` when too many wait, `ConflictError` for a
        known inbound id with other content or another key, `StorageUnavailableError` and
        `RuntimeClosedError`. Cancelled, the message may be stored or not: send it again under the
        same inbound id.
        """
        turn_id = self._fresh_turn_id()
        if at is not None:
            return await self._schedule(key, message, turn_id, busy, debounce_s, due_ms(at))
        accepted = await self._submit(key, message, turn_id, busy, debounce_s)
        await accepted.durable()
        return Submission(self._directory, SessionKey(key), accepted)

    async def _schedule(
        self,
        key: str,
        message: str | Inbound,
        turn_id: TurnId,
        busy: Busy | None,
        debounce_s: float | None,
        due_ms: int,
    ) -> Submission:
        submit = self._prepared(key, message, turn_id, busy, debounce_s)
        if busy == "reject" or debounce_s is not None:
            what = "busy" if busy == "reject" else "debounce_s"
            hint = "a timer's message may wait: use another policy, or that of its source"
            raise InvalidContentError(what, "it does not go with at=", hint=hint)
        checked = SessionKey(key)
        name = submit.inbound_id
        if submit.repeatable:
            name = name_of(submit.source, name)
        timer_id = f"{PREFIX}{name}"
        check_name("id", timer_id)
        # What could not wait in the line must not wait for its time either: it would be tried for
        # ever.
        check_unit(Unit((acceptance(checked, submit, submit.turn_id, "queued", keep=True),)))
        given = Timer(
            id=timer_id,
            key=checked,
            source=submit.source,
            due_ms=due_ms,
            inbound=submit.body,
            busy=busy,
        )
        stored, promise = await self._timetable.set(given)
        if stored.state == "fired":
            # Its inbound id may be forgotten by now: that must not begin a second turn.
            again = submit._replace(
                inbound_id=timer_id,
                turn_id=turn_of(timer_id, due_ms),
                repeatable=True,
                follows=True,
            )
            accepted = await self._directory.ask(checked, source_of(key), again)
            await accepted.durable()
            return Submission(self._directory, checked, accepted)
        turn = turn_of(timer_id, due_ms)
        accepted = Accepted(turn, "scheduled", 0, trio.lowlevel.checkpoint, promise)
        return Submission(
            self._directory, checked, accepted, timer_id=timer_id, timetable=self._timetable
        )

    async def _submit(
        self,
        key: str,
        message: str | Inbound,
        turn_id: TurnId,
        busy: Busy | None = None,
        debounce_s: float | None = None,
    ) -> Accepted:
        submit = self._prepared(key, message, turn_id, busy, debounce_s)
        return await self._directory.ask(SessionKey(key), source_of(key), submit)

    def _prepared(
        self,
        key: str,
        message: str | Inbound,
        turn_id: TurnId,
        busy: Busy | None,
        debounce_s: float | None,
    ) -> Submit:
        """The message, checked, with the policy of its source."""
        inbound = Inbound(text=message) if isinstance(message, str) else message
        check_key(key)
        submit = _checked(inbound, source_of(key), self._surroundings.ids.fresh, turn_id)
        policy = self._sources.get(submit.source, PLAIN)
        submit = submit._replace(
            busy=policy.busy if busy is None else busy,
            debounce_s=policy.debounce_s if debounce_s is None else debounce_s,
            reset=policy.reset,
        )
        check_busy(submit.busy, submit.debounce_s)
        return submit

    async def ask(
        self,
        key: str,
        message: str | Inbound,
        *,
        busy: Busy | None = None,
        debounce_s: float | None = None,
        on_cancel: Literal["leave", "interrupt"] = "leave",
    ) -> Reply:
        """Submit and wait for the reply. Raises `SessionBusyError` if the message was rejected.

        Cancelling it leaves the turn running, unless `on_cancel` says that it is interrupted.
        """
        self._check_outside(key, "ask")
        turn_id = self._fresh_turn_id()
        try:
            accepted = await self._submit(key, message, turn_id, busy, debounce_s)
            turn_id = accepted.turn_id  # another one's, for a repeat or what joins others
            # The reply of a started turn stands behind its acceptance: one wait is enough.
            if accepted.disposition != "started":
                await accepted.durable()
            return await accepted.reply.wait()
        except trio.Cancelled:
            if on_cancel == "interrupt":
                self._interrupt(SessionKey(key), turn_id)
            raise

    def _fresh_turn_id(self) -> TurnId:
        return TurnId(self._surroundings.ids.fresh())

    def _interrupt(self, key: SessionKey, turn_id: TurnId) -> None:
        """Stop a turn whose message may still be on its way to the actor."""
        if not self._directory.interrupt(key, "person", turn_id):
            self._directory.spawn(self._interrupt_later, key, turn_id)

    async def _interrupt_later(self, key: SessionKey, turn_id: TurnId) -> None:
        try:
            await self._directory.ask(key, source_of(key), Interrupt(turn_id, "person"))
        except OnepenError:
            pass  # it has ended, or will with the runtime: there is nobody to tell

    def interrupt(self, key: str) -> Interruption:
        """Stop the key's running turn, at once; true if there was one.

        Waiting messages stay: the next of them starts. A turn that waits for a person is stopped
        too, though its key is not served just now; awaiting the result tells whether there was one.
        """
        checked = SessionKey(check_key(key))
        if self._directory.interrupt(checked, "person"):
            return Interruption(done=True)
        later = self._directory.interrupt_stored(checked, source_of(key), "person")
        return Interruption(done=False, later=later)

    @asynccontextmanager
    async def events(self, key: str, after: Position | None = None) -> AsyncGenerator[Subscription]:
        """Everything that happens to a key, as a channel, from now on or from `after` on."""
        check_place("after", after)
        subscription = await self._directory.subscribe(
            SessionKey(check_key(key)), source_of(key), None, after
        )
        try:
            yield subscription
        finally:
            await subscription.aclose()

    async def post(
        self,
        key: str,
        text: str,
        *,
        reply_to: str | JsonObject | None = None,
        source: str | None = None,
        id: str | None = None,
    ) -> Delivery:
        """Say something on the runtime's own initiative, behind the running turn.

        An assistant's message in the transcript, and a delivery: to `reply_to`, or else to where
        this key was last answered, or else to an empty target, and the key must do. Under an `id`
        of yours the same post is made once, however often you call. Both are durable on return.

        Raises `StorageUnavailableError` while storage is down; it may be made all the same.
        """
        check_key(key)
        name = source_of(key) if source is None else source
        for field, value in (("source", name), ("id", id)):
            if value is not None:
                check_name(field, value)
        check_draft(Draft(uid=_ANY_UID, role="assistant", text=text))
        if not (text or "").strip():  # nor may it be None, which a draft may
            raise InvalidContentError("text", "it is empty", hint="say something")
        target = None
        if reply_to is not None:
            place = {"to": reply_to} if isinstance(reply_to, str) else reply_to
            check_json("reply_to", place)
            target = Target(name, own_json(place))
        operation = operations.post(text, target, name, id)
        return await self._surroundings.writer.while_up(lambda: self._ask(key, operation))

    async def status(self, key: str) -> KeyStatus:
        """Where a conversation stands, at once: nothing waits for its turn."""
        wanted = SessionKey(check_key(key))
        return await self._surroundings.writer.read(lambda reader: status_of(reader, wanted))

    # Sessions ----------------------------------------------------------------------------------

    async def open_session(
        self,
        key: str,
        session_id: str | None = None,
        *,
        title: str | None = None,
        user: str | None = None,
        model: str | None = None,
    ) -> SessionId:
        """The key's session, or the one that is asked for; writes a route, but no session row.

        User and model are kept in memory until the first message brings the row. Raises
        `SessionHeldError` for a session of another key.
        """
        wanted = None if session_id is None else _checked_id(session_id)
        return await self._ask(key, moves.open_session(wanted, title, user, model))

    async def resume(self, key: str, given: str, *, take_over: bool = False) -> SessionId:
        """Switch to a session by id, prefix or title: to the tip of its lineage.

        Raises `MissingError`, `AmbiguousError` and what `switch` raises.
        """
        check_key(key)
        found = await self.sessions.find(given)
        tip = await self._surroundings.writer.read(lambda reader: reader.tip(found.id))
        return await self.switch(key, (tip or found).id, take_over=take_over)

    async def switch(self, key: str, session_id: str, *, take_over: bool = False) -> SessionId:
        """The key gets this session; the running turn is interrupted and stored first.

        An id without a row is reserved for the key. A session of another key is a
        `SessionHeldError`; with `take_over` that key's turn is stopped, and it gets a fresh session
        in the same transaction.
        """
        wanted = _checked_id(session_id)
        try:
            return await self._ask(key, moves.switch(wanted, None))
        except SessionHeldError as error:
            if not take_over:
                raise
            holder = SessionKey(error.holder_key)
        return await self._directory.take_over(SessionKey(key), source_of(key), wanted, holder)

    async def rotate(
        self, key: str, summary: Summarise, *, upto: str | None = None, force: bool = False
    ) -> SessionId:
        """Move the conversation to a child that begins with a summary; after the running turn.

        `summary` is text, or a function of the history. Returns the child's id. Raises
        `NoGainError` if it would not shrink the transcript, unless forced.
        """
        return await self._ask(key, operations.rotate(_compression(summary, upto, force)))

    async def compact(
        self, key: str, summary: Summarise, *, upto: str | None = None, force: bool = False
    ) -> SessionId:
        """The same in place: the session stays, what is summarised becomes inactive."""
        return await self._ask(key, operations.compact(_compression(summary, upto, force)))

    async def reset(self, key: str, *, reason: str = "reset") -> SessionId:
        """End the session behind a boundary; returns the new session's id."""
        check_name("reason", reason)
        return await self._ask(key, moves.reset(reason))

    async def branch(self, key: str, *, upto: str | None = None) -> SessionId:
        """Move the key to a copy of its transcript; after the running turn."""
        return await self._ask(key, moves.branch(None if upto is None else Uid(upto)))

    async def rewind(self, key: str, *, to: str | None = None, turns: int = 1) -> int:
        """Take back everything from a message on, or the last turns; how many messages went."""
        check_count("turns", turns)
        return await self._ask(key, operations.rewind(None if to is None else Uid(to), turns))

    async def restore(self, key: str) -> SessionId:
        """Undo the last rewind. Raises `StaleError` if something came after it."""
        return await self._ask(key, operations.restore())

    async def set_title(self, key: str, title: str, *, automatic: bool = False) -> bool:
        """Give the session a title, now or when it has a row.

        False if a person's title stands against an automatic one. Raises `TitleTakenError` and
        `InvalidContentError`.
        """
        origin: Literal["person", "automatic"] = "automatic" if automatic else "person"
        return await self._ask(key, operations.set_title(title, origin))

    async def close_session(self, key: str, *, reason: str = "closed") -> Finalized:
        """Store everything, run the hooks, end the row, close the agent. Twice is harmless."""
        check_name("reason", reason)
        return await self._ask(key, operations.close(reason))

    async def reopen(self, key: str) -> SessionId:
        """The key's session, if it has ended, is open again."""
        return await self._ask(key, operations.reopen())

    async def _ask(self, key: str, operation: Operate[T]) -> T:
        checked = SessionKey(check_key(key))
        if not operation.interrupts:
            self._check_outside(key, operation.name)
        return await self._directory.ask(checked, source_of(key), operation)

    def _check_outside(self, key: str, what: str) -> None:
        """Raise where waiting would be for ever: the turn would wait for its own end."""
        inside = inside_turn.get()
        mine = inside is not None and inside.writer is self._surroundings.writer
        if inside is not None and mine and inside.key == key and not inside.over:
            raise InvalidContentError(
                "key",
                f"{what} is called from inside a turn of {key}, for whose end it would wait",
                hint="use what `turn` offers, or do it when the turn is over",
            )

    # Clean-up ------------------------------------------------------------------------------------

    async def delete(self, session_id: str) -> bool:
        """Delete a session: its text, and all that surrounds it; false if that was done before.

        If it is a key's current one, its running turn is interrupted, its hooks run, and the key
        gets a new session. A tombstone stays, so that lineages hold; what was carried on into other
        sessions stays there. Raises `MissingError`. See `docs/clean-up.md`.
        """
        keys = self._visitor()
        wanted = _checked_id(session_id)
        return await delete(self._surroundings.writer, self._surroundings.clock, keys, wanted)

    async def erase(
        self, user: str, *, progress: Callable[[str, int], object] | None = None
    ) -> Erased:
        """Erase what a user has said, wherever it is; a report, when it is durable.

        Sessions that are only this user's are deleted; in those that others share the user's rows
        are blanked and keep their places. Called again after a crash it finishes.
        """
        surroundings = self._surroundings
        parts = (surroundings.writer, surroundings.clock, self._visitor())
        return await erase(*parts, user, progress)

    async def prune(
        self,
        older_than_s: float | None = None,
        *,
        before_ms: int | None = None,
        source: str | None = None,
        key: str | None = None,
        archived_only: bool = False,
        ended_only: bool = False,
        dry_run: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Pruned:
        """Delete sessions in which nothing has happened for so long, the oldest first.

        Never a key's current session, one that is pinned, or one of which anything is unfinished.
        With `dry_run` nothing is deleted, and the report says what would be.
        """
        writer, clock = self._surroundings.writer, self._surroundings.clock
        since_ms = before_of(clock, older_than_s, before_ms)
        return await prune(
            writer,
            since_ms,
            source=source,
            key=key,
            archived_only=archived_only,
            ended_only=ended_only,
            delete=None if dry_run else deleting(writer, clock, since_ms),
            told=progress,
        )

    async def prune_history(self) -> int:
        """Remove now what `history_kept_s` would remove within the hour; how many things."""
        kept_ms = int(self._settings.sessions.history_kept_s * 1000)
        before_ms = self._surroundings.clock.now() - kept_ms
        return await prune_work(self._surroundings.writer, before_ms)

    async def finalize_orphaned_rotations(self) -> int:
        """End children of rotations that no key leads to; how many. Deletes nothing."""
        return await finalize_orphans(self._surroundings.writer, self._surroundings.clock)

    async def prune_empty_sessions(self) -> int:
        """Remove rows of sessions that ended more than a day ago and hold nothing; how many."""
        return await prune_empty(self._surroundings.writer, self._surroundings.clock)

    async def archive(self, session_id: str, archived: bool = True) -> bool:  # noqa: FBT001, FBT002
        """Leave a session out of listings, or no longer; false if it is so already."""
        return await self._set_flags(session_id, archived=archived)

    async def pin(self, session_id: str, pinned: bool = True) -> bool:  # noqa: FBT001, FBT002
        """Keep a session from pruning, or no longer; false if it is so already."""
        return await self._set_flags(session_id, pinned=pinned)

    async def _set_flags(self, session_id: str, **flags: bool) -> bool:
        surroundings, wanted = self._surroundings, _checked_id(session_id)
        return await set_flags(surroundings.writer, surroundings.clock, wanted, **flags)

    def _visitor(self) -> DirectoryVisitor:
        return DirectoryVisitor(self._directory, self._timetable, self._surroundings.writer)

    # The runtime itself --------------------------------------------------------------------------

    async def rebuild_search(self) -> None:
        """Make the search index again, beside everything else that goes on.

        Returns once it is asked for. Until it is done searches read the messages themselves, say
        so (`Hits.index`) and find the same; `statistics().writer.engine` tells how far it is.
        """
        await rebuild_search(self._surroundings.writer, self._surroundings.clock)

    async def backup(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Copied:
        """A copy of the database under another name, as of now, made while everything goes on.

        It is looked through before it gets its name, so there is never a part of one. It delays no
        commit; `engine.backup_pages_step` and `backup_pause_s` say how hurried it is. Cancelled, it
        leaves nothing. `progress` is told the stage, and how much of how much.

        Raises `CopyError`, also for a name that is taken unless it may `replace` that file, and
        `DamagedFileError` for a database that is damaged.
        """
        pause_s = self._settings.engine.backup_pause_s
        writer = self._surroundings.writer
        return await make_backup(writer, path, pause_s, replace=replace, progress=progress)

    async def check(
        self,
        *,
        full: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> list[Finding]:
        """Everything that is wrong with what is stored; empty for a sound database.

        It reads beside everything that goes on, and a large database takes a while. `full` has
        SQLite compare its indices with their tables as well. Nothing is changed:
        `onepen doctor --repair` does that, when nobody has the file open.
        """
        return await make_check(self._surroundings.writer, full=full, progress=progress)

    def statistics(self) -> RuntimeStatistics:
        surroundings = self._surroundings
        return RuntimeStatistics(
            sessions=self._directory.statistics(),
            slots=surroundings.slots.statistics(),
            writer=surroundings.writer.statistics(),
            deliveries=self._courier.statistics(),
            counters=surroundings.counters.as_dict(),
            agents_built=surroundings.agents.built,
            agents_rebuilt=surroundings.agents.rebuilt,
            hook_failures=surroundings.hooks.failures,
        )

    @property
    def durable(self) -> bool:
        """Whether a file is behind it."""
        return self._surroundings.writer.durable

    async def shutdown(self, deadline: float | None = None) -> bool:
        """Finalize every live session and take nothing new; true if all were in time.

        What is to be sent is sent, as far as that is possible at once: a delivery under way is work
        like any other. `deadline` is in seconds from now. The block of `open_runtime` goes on and
        should end. Calling it again goes on with what is left.
        """
        limit_s = self._settings.shutdown_s if deadline is None else deadline
        self._ending.sent_by_s = trio.current_time() + limit_s
        return await self._ending.within(limit_s)


# The edge ------------------------------------------------------------------------------------


def check_key(key: str) -> str:
    """Raise unless it can address a conversation."""
    # A subclass of str would pass for the same key here, and be refused by storage.
    if type(key) is not str or not key.strip():
        raise InvalidContentError("key", "it is empty or not text", hint="like telegram:dm:42")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        hint = "use text that UTF-8 can hold"
        raise InvalidContentError("key", "it holds half a character", hint=hint) from None
    if size > _KEY_BYTES_MAX:
        raise InvalidContentError("key", f"{size} bytes are too many", hint="keep it under 1 KiB")
    return key


def _checked_id(session_id: str) -> SessionId:
    check_session_id(session_id)
    return SessionId(session_id)


def _compression(summary: Summarise, upto: str | None, force: bool) -> Compression:  # noqa: FBT001
    return Compression(summary, None if upto is None else Uid(upto), force)


def _checked(inbound: Inbound, source: str, fresh_id: Any, turn_id: TurnId) -> Submit:
    """What goes to the actor: content that can be stored, under an identity."""
    if not isinstance(inbound, Inbound):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidContentError(
            "message", f"{type(inbound).__name__} is no message", hint="give text or an Inbound"
        )
    if inbound.text is None and not inbound.parts:
        raise InvalidContentError("message", "it has no content", hint="give text or parts")
    if inbound.parts is not None and not isinstance(inbound.parts, list | tuple):
        problem = f"{type(inbound.parts).__name__} is no list of parts"
        raise InvalidContentError("parts", problem, hint="give a list of JSON objects")
    body = inbound.body()
    check_draft(user_draft(body, _ANY_UID, 0))
    if inbound.source is not None:
        check_name("source", inbound.source)
    if inbound.id is not None:
        check_name("id", inbound.id)
        if inbound.id.startswith(PREFIX):
            problem = f"{inbound.id!r} begins with {PREFIX}, which is kept for timers"
            raise InvalidContentError("id", problem, hint="put something before it")
    if body.reply_to is not None:
        check_json("reply_to", body.reply_to)
    body = own_inbound(body)  # whoever gave it may use the same mappings for the next one
    return Submit(
        body,
        inbound.id or fresh_id(),
        inbound.source or source,
        digest_of(body),
        turn_id,
        repeatable=inbound.id is not None,
    )


__all__ = ["Runtime", "RuntimeClosedError", "RuntimeStatistics", "check_key"]
