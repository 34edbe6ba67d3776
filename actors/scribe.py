"""The write side of one session actor: it alone gives out seqs, posts units and takes receipts.

| the session does    | what is posted                                    | takes hold        |
| ------------------- | ------------------------------------------------- | ----------------- |
| `append`, `write`   | rows at the end, with what belongs to them        | in memory at once |
| `rotate`, `compact` | the move, and a hold on appends until its receipt | with the receipt  |
| `note`, `commit`    | something about the key, outside the chain        | the caller's part |

Keeps:
- Memory = durable prefix + posted tail. A refused unit breaks the chain: everything behind it is
  refused by storage as well, `broken` says so, and nothing more is posted until `reload`.
- Between finding room and posting there is no checkpoint, so no other message can get in between.
- While a rotation is under way appends are held, bounded; its receipt decides where they go: to the
  child, or to the parent if it was refused. The swap happens in the receipt, on nobody's task, so
  no interrupt can tear it.
- A ticket that is held is never posted again: only the Writer sends again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, final

import msgspec

from ..storage.commands import (
    AddUsage,
    AppendMessages,
    Compact,
    CreateSession,
    OpenIncarnation,
    PostDelivery,
    ReopenSession,
    Rotate,
    SetRoute,
    StartTurn,
)
from ..storage.errors import (
    InvariantError,
    OnepenError,
    StorageUnavailableError,
)
from ..storage.identity import Seq, SessionId, Uid
from ..storage.units import Durable, Guard, Refused, Unit
from .hold import Held, Hold
from .lot import Lot
from .page import Page, load, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import Clock, Ids, Incarnation, SessionKey, TurnId
    from ..storage.records import Draft, Message, Route, TitleOrigin
    from ..storage.units import Receipt
    from .limits import SessionSettings
    from .mailbox import Answer
    from .page import Loaded
    from .tickets import Ticket
    from .writer import WriterRef


T = TypeVar("T")


class ScribeEvents:
    """What a scribe tells its session. Called on the loop's own stack: must not wait or raise."""

    __slots__ = ()

    def on_committed(self, messages: Sequence[Message]) -> None:
        """These rows are durable."""

    def on_broken(self, refused: Refused, messages: Sequence[Message]) -> None:
        """A unit was refused that should have held; its rows, if any, are withdrawn."""

    def on_moved(self, page: Page) -> None:
        """The key has another session now, durably."""

    def on_posted(self, deliveries: Sequence[PostDelivery]) -> None:
        """These are durable, and may be sent."""


@final
class Scribe:
    """One per session actor."""

    __slots__ = (
        "_clock",
        "_hold",
        "_ids",
        "_posted",
        "_received",
        "_settings",
        "_settled",
        "_told",
        "broken",
        "incarnation",
        "key",
        "page",
        "route",
        "source",
        "uncounted",
        "writer",
    )

    def __init__(
        self,
        key: SessionKey,
        source: str,
        incarnation: Incarnation,
        writer: WriterRef,
        clock: Clock,
        ids: Ids,
        settings: SessionSettings,
        told: ScribeEvents,
    ) -> None:
        self.key = key
        self.source = source
        self.incarnation = incarnation
        self.writer = writer
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._told = told
        self._posted = self._received = 0  # units, and receipts, which come in the same order
        self._settled = Lot()
        self._hold = Hold(settings)
        self.broken: Refused | None = None
        self.uncounted: list[AddUsage] = []  # of refused units; a turn's end counts it after all
        self.page: Page
        self.route: Route

    # Opening and reloading ---------------------------------------------------------------------

    async def open(self) -> Loaded:
        """Take the key over, then load it: nothing of a predecessor can come in between."""
        unit = Unit((OpenIncarnation(key=self.key, incarnation=self.incarnation),))
        await self.writer.write(unit)
        return await self._load()

    async def reload(self) -> Loaded:
        """Forget the posted tail and look at what is stored."""
        await self.wait_settled()
        loaded = await self._load()
        self.broken = None
        return loaded

    async def _load(self) -> Loaded:
        size = self._settings.load_messages_page
        loaded = await self.writer.read(lambda reader: load(reader, self.key, size))
        self.route = loaded.route
        if loaded.session is not None:
            self.page = Page.of(loaded.session, loaded.messages)
            self.source = loaded.session.source or self.source
        else:
            self.page = Page(loaded.route.session_id or self.fresh_session_id())
        return loaded

    def fresh_session_id(self) -> SessionId:
        return SessionId(self._ids.fresh())

    def fresh_uid(self) -> Uid:
        return Uid(self._ids.fresh())

    def now(self) -> int:
        return self._clock.now()

    @property
    def turn_deadline_s(self) -> float:
        return self._settings.turn_deadline_s

    # Waiting -----------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether every posted unit has its receipt."""
        return self._received == self._posted

    async def wait_settled(self) -> None:
        """Until every posted unit has its receipt, however long storage is down."""
        while not self.settled:
            await self._settled.park()

    async def wait_released(self) -> None:
        """Until no rotation or compaction is under way."""
        while self._hold.on:
            await self._hold.wait_released()

    async def receipt_of(self, ticket: Ticket, *told: Answer[Any]) -> Durable | Refused:
        """The receipt, waiting out a storage that is down.

        Those who wait for the answers are told that it is; the answers themselves stay open.
        """
        return await self.writer.receipt_of(ticket, *told)

    async def room(self) -> None:
        """Until something may be posted in order; with no checkpoint behind it.

        Waits out a storage that is down.
        """
        while True:
            await self.wait_released()
            try:
                await self.writer.room()
            except StorageUnavailableError:
                await self.writer.wait_up()
                continue
            if not self._hold.on:
                return

    # Posting -----------------------------------------------------------------------------------

    def guard(self, *, base: bool = False, revision: bool = False) -> Guard:
        page = self.page
        return Guard(
            key=self.key,
            incarnation=self.incarnation,
            session_id=page.session_id,
            base_seq=Seq(page.next_seq) if base else None,
            behind=page.last_uid if base else None,
            revision=page.revision if revision else None,
        )

    def note(
        self,
        commands: tuple[AnyCommand, ...],
        guards: tuple[Guard, ...] | None = None,
        *,
        then: Callable[[Receipt], None] | None = None,
    ) -> Ticket:
        """Post something that is no row of the transcript. A refusal is the caller's affair."""
        if guards is None:
            guards = (Guard(key=self.key, incarnation=self.incarnation),)

        def received(receipt: Receipt) -> None:
            self._resolved()
            if isinstance(receipt, Durable):
                self._announce(commands)
            stale = isinstance(receipt, Refused) and receipt.reason == "stale_incarnation"
            if isinstance(receipt, Refused) and stale and receipt.what == self.key:
                self._break(receipt, ())  # and not another key's, which a take-over names as well
            if then is not None:
                then(receipt)

        ticket = self.writer.post(Unit(commands, guards), received)
        self._posted += 1
        return ticket

    async def commit(
        self, commands: tuple[AnyCommand, ...], guards: tuple[Guard, ...] | None = None
    ) -> Durable:
        """Post something that is no row and wait for it; a refusal is raised."""
        await self.room()
        receipt = await self.receipt_of(self.note(commands, guards))
        if isinstance(receipt, Refused):
            raise receipt.error()
        return receipt

    async def read(self, view: Callable[[Reader], T]) -> T:
        """Read behind everything that was posted until now.

        And not behind what is posted meanwhile: an agent that writes without end holds up nobody.
        """
        posted = self._posted
        while self._received < posted:
            await self._settled.park()
        return await self.writer.read(view)

    def write(
        self,
        drafts: tuple[Draft, ...],
        *,
        turn_id: TurnId | None = None,
        before: tuple[AnyCommand, ...] = (),
        after: tuple[AnyCommand, ...] = (),
        first: bool = False,
        past_bounds: bool = False,
        then: Callable[[Receipt], None] | None = None,
    ) -> Ticket:
        """Post rows at the end of the transcript, with the commands that belong to them.

        `first` is for a turn's first unit: it names the revision that it expects, and its refusal
        breaks nothing, since nothing is posted behind it. Raises before anything changes.
        """
        if self.broken is not None:
            raise InvariantError(f"posting behind a refused unit: {self.broken.reason}")
        page = self.page
        commands: tuple[AnyCommand, ...] = (*before, *after)
        if drafts:
            append = AppendMessages(
                session_id=page.session_id,
                base_seq=Seq(page.next_seq),
                messages=drafts,
                turn_id=turn_id,
            )
            commands = (*before, append, *after)
        added: list[Message] = []

        def received(receipt: Receipt) -> None:
            self._resolved()
            if isinstance(receipt, Durable):
                if added:
                    self._told.on_committed(added)
                self._announce(after)
            elif isinstance(receipt, Refused) and not first:
                self.uncounted += [c for c in after if isinstance(c, AddUsage)]
                self._break(receipt, added)
            if then is not None:
                then(receipt)

        # A first unit names the revision instead of the base, which follows from it: then a foreign
        # row is refused as what it is, and not as a broken chain of our own.
        # What has no rows is chained as well: the end of a turn must not outlive a refused row.
        guard = self.guard(base=not first, revision=first)
        ticket = self.writer.post(Unit(commands, (guard,)), received, past_bounds=past_bounds)
        self._posted += 1
        if drafts:
            added.extend(page.append(drafts, turn_id))
        return ticket

    def write_late(
        self, drafts: tuple[Draft, ...], turn_id: TurnId, after: tuple[AnyCommand, ...]
    ) -> Ticket:
        """The same for a turn that nobody runs: a suspended session is open again with it."""
        with self._all_or_nothing():
            return self.write(drafts, turn_id=turn_id, before=self._reopened(), after=after)

    def start(
        self,
        drafts: tuple[Draft, ...],
        before: tuple[AnyCommand, ...],
        turn_id: TurnId,
        attempt: int,
        then: Callable[[Receipt], None],
    ) -> tuple[Ticket, bool]:
        """Post a turn's first unit, and tell whether it makes a new session.

        It brings along what is needed for an open session to write to: a route, a row, a reopening.
        Memory changes at once; should the unit be refused, `reload` puts it right.
        """
        created = not self.page.stored or self.page.end_kind == "boundary"
        with self._all_or_nothing():
            opening = self._opening()
            start = StartTurn(
                turn_id=turn_id, session_id=self.page.session_id, attempt=attempt, at_ms=self.now()
            )
            commands = (*before, *opening, start)
            ticket = self.write(drafts, turn_id=turn_id, before=commands, first=True, then=then)
        return ticket, created

    def say(
        self, draft: Draft, commands: Callable[[], tuple[PostDelivery, ...]]
    ) -> tuple[Ticket, PostDelivery]:
        """Post a row of no turn, with what it takes to have an open session to write to.

        `commands` gives the delivery that belongs to it, when its session is known.
        """
        with self._all_or_nothing():
            opening = self._opening()
            (posted,) = commands()
            ticket = self.write((draft,), before=opening, after=(posted,))
        return ticket, posted

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """What fails before it is posted has changed nothing."""
        page, route = self.page, self.route
        was = (page.stored, page.end_kind, page.end_version)
        try:
            yield
        except BaseException:
            self.page, self.route = page, route
            page.stored, page.end_kind, page.end_version = was
            raise

    def _opening(self) -> tuple[AnyCommand, ...]:
        page, now = self.page, self.now()
        if page.end_kind == "boundary":
            user, model = page.user, page.model
            page = self.page = Page(self.fresh_session_id())
            page.user, page.model = user, model
        commands: list[AnyCommand] = []
        if self.route.session_id != page.session_id:
            commands.append(self._moving_to(page.session_id, now))
        if not page.stored:
            commands.append(
                CreateSession(
                    session_id=page.session_id,
                    key=self.key,
                    at_ms=now,
                    parent_id=page.parent_id,
                    edge=page.edge,
                    source=self.source,
                    user=page.user,
                    model=page.model,
                )
            )
            page.stored = True
        return (*commands, *self._reopened())

    def _reopened(self) -> tuple[AnyCommand, ...]:
        """It is, in memory, with what is posted now."""
        reopening = self.reopening()
        if reopening:
            self.page.end_kind, self.page.end_version = None, self.page.end_version + 1
        return reopening

    def reopening(self) -> tuple[AnyCommand, ...]:
        """A suspended session is opened by whoever changes it, in the same unit."""
        page = self.page
        if page.end_kind != "suspension":
            return ()
        return (
            ReopenSession(session_id=page.session_id, replaces=page.end_version, at_ms=self.now()),
        )

    def _moving_to(self, session_id: SessionId, now_ms: int) -> SetRoute:
        version = self.route.route_version
        self.move_route(session_id)
        return SetRoute(key=self.key, session_id=session_id, replaces=version, at_ms=now_ms)

    def move_route(self, session_id: SessionId) -> None:
        """The key's route as it will be, or is."""
        self.route = msgspec.structs.replace(
            self.route, session_id=session_id, route_version=self.route.route_version + 1
        )

    def counted_useless(self, count: int) -> None:
        """The key's brake as it will be, or is."""
        self.route = msgspec.structs.replace(
            self.route,
            useless_compressions=count,
            compression_version=self.route.compression_version + 1,
        )

    def pended(self, title: str | None, origin: TitleOrigin | None) -> None:
        """The key's pending title as it is now."""
        self.route = msgspec.structs.replace(
            self.route,
            pending_title=title,
            pending_title_origin=origin,
            pending_title_version=self.route.pending_title_version + 1,
        )

    # Appending, with the hold --------------------------------------------------------------------

    async def append(
        self,
        build: Callable[[], tuple[tuple[Draft, ...], tuple[AnyCommand, ...]]],
        turn_id: TurnId | None,
    ) -> None:
        """Post rows as soon as there is room; during a rotation they are held instead.

        `build` gives rows and commands in the very moment of posting, so that what it decides by is
        what is posted. Cancelling before this returns means: not built, not posted. Raises
        `StorageUnavailableError` while storage is down.
        """
        while True:
            if self.broken is not None:
                raise self.broken.error()
            if not self._hold.on:
                await self.writer.room()  # does not yield if there is room
                if not self._may_post():
                    continue
                drafts, after = build()
                if drafts or after:
                    self.write(drafts, turn_id=turn_id, after=after)
                return
            if self._hold.has_room():
                drafts, after = build()
                if drafts or after:
                    self._hold.keep(Held(drafts, turn_id, after))
                return
            await self._hold.wait_released()

    def _may_post(self) -> bool:
        return not self._hold.on and self.broken is None

    def _release(self) -> None:
        """The receipt is here: what was held goes where the key is now."""
        for held in self._hold.release():
            if self.broken is not None:
                return
            try:
                self.write(held.drafts, turn_id=held.turn_id, after=held.after, past_bounds=True)
            except OnepenError as error:
                # The Writer takes nothing more. Whoever appended it has not been told that it is
                # stored; the turn ends as refused, or with the runtime.
                self._break(Refused(reason="invalid", what="held rows", given=str(error)), ())

    # Moving ------------------------------------------------------------------------------------

    def rotate(
        self,
        child_id: SessionId,
        summary: tuple[Draft, ...],
        carried: Sequence[Message],
        *,
        turn_id: TurnId | None,
        force: bool,
        after: tuple[AnyCommand, ...] = (),
    ) -> Ticket:
        """Post the rotation and hold appends until its receipt. Not while another one is held."""
        page = self.page
        command = Rotate(
            key=self.key,
            parent_id=page.session_id,
            parent_base_seq=Seq(page.next_seq),
            child_id=child_id,
            summary=summary,
            carried=tuple(message.seq for message in carried),
            replaces=self.route.route_version,
            at_ms=self.now(),
            turn_id=turn_id,
            force=force,
        )
        child = page.child(child_id, summary, carried)

        def durable() -> None:
            self.page = child
            self.move_route(child_id)
            self._told.on_moved(child)

        return self._post_held((command, *after), durable, resets=bool(after))

    def compact(
        self,
        summary: Draft,
        covered: Sequence[Message],
        *,
        turn_id: TurnId | None,
        force: bool,
        after: tuple[AnyCommand, ...] = (),
    ) -> Ticket:
        """The same in place: `covered` become inactive behind their summary."""
        page = self.page
        # What a summary covers, whoever summarises it covers as well.
        ranges = [m.covers or (m.seq, m.seq) for m in covered]
        first, last = Seq(min(r[0] for r in ranges)), Seq(max(r[1] for r in ranges))
        command = Compact(
            session_id=page.session_id,
            base_seq=Seq(page.next_seq),
            first_seq=first,
            last_seq=last,
            summary=summary,
            at_ms=self.now(),
            turn_id=turn_id,
            force=force,
        )
        gone = {message.seq for message in covered}
        row = message_of(
            summary, page.session_id, page.next_seq, summary=True, covers=(first, last)
        )

        reopening = self.reopening()

        def durable() -> None:
            if reopening:
                page.end_kind, page.end_version = None, page.end_version + 1
            at = next(n for n, message in enumerate(page.messages) if message.seq in gone)
            rest = [message for message in page.messages if message.seq not in gone]
            page.replace([*rest[:at], row, *rest[at:]])
            page.next_seq += 1
            page.last_uid = row.uid
            page.revision += 1
            self._told.on_committed((row,))

        return self._post_held((*reopening, command, *after), durable, resets=bool(after))

    def _post_held(
        self, commands: tuple[AnyCommand, ...], durable: Callable[[], None], *, resets: bool
    ) -> Ticket:
        if self._hold.on:
            raise InvariantError("two moves of one session at a time")

        def received(receipt: Receipt) -> None:
            self._resolved()
            if isinstance(receipt, Durable):
                durable()
                if resets:
                    self.counted_useless(0)
            elif isinstance(receipt, Refused) and receipt.reason not in _MOVE_REFUSALS:
                self._break(receipt, ())
            self._release()

        ticket = self.writer.post(Unit(commands, (self.guard(base=True),)), received)
        self._posted += 1
        self._hold.on = True
        return ticket

    # Receipts ----------------------------------------------------------------------------------

    def _announce(self, commands: Iterable[AnyCommand]) -> None:
        posted = [command for command in commands if type(command) is PostDelivery]
        if posted:
            self._told.on_posted(posted)

    def _resolved(self) -> None:
        self._received += 1
        self._settled.unpark_all()

    def _break(self, refused: Refused, messages: Sequence[Message]) -> None:
        if self.broken is None:
            self.broken = refused
        self._told.on_broken(refused, messages)


# The move fails, the session goes on: nothing behind it was posted, because appends were held.
_MOVE_REFUSALS = frozenset(("route_conflict", "no_gain", "stale", "invalid", "conflict", "missing"))
