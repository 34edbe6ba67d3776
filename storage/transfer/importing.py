"""How a file becomes units: checked, compared, staged, published. A generator of what it needs.

| stage   | what is done                                                        | written     |
| ------- | ------------------------------------------------------------------- | ----------- |
| check   | every line of the file (`checking.py`)                              | nothing     |
| compare | with what is stored under the same ids                              | nothing     |
| stage   | rows of new sessions, hidden, in slices                             | unseen      |
| publish | a lineage at a time, in one unit; what goes on is gone on with      | what is new |

Keeps: whoever drives it does what it asks for, in order, and hands back the answer: `Read` a view,
`Write` a unit and wait until it is durable, `Hold` a key so that nobody else writes to it until
`Release`. Everything that it asks for can be asked for again: an import that was cut off is begun
again and goes on where it was. Slices are small, so that nobody waits behind one.

Must never know who drives it: it opens nothing but the file, and takes no lock.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

from msgspec import Struct
from msgspec.structs import replace

from ..commands import (
    AddUsage,
    CreateSession,
    DropStaged,
    OpenIncarnation,
    PublishSession,
    PutChunk,
    SealBlob,
    SetRoute,
    StageMessages,
    StageTurns,
)
from ..edge import check_unit
from ..errors import ConflictError
from ..identity import Incarnation, Seq, SessionId
from ..records import Draft, TurnOutcome
from ..records import Turn as TurnRecord
from ..sqlite.rows import canonical, digest
from ..units import Unit
from .asking import (
    BYTES_PER_UNIT,
    ROWS_PER_UNIT,
    Ask,
    Asking,
    Hold,
    Read,
    Release,
    Told,
    slices,
    write,
)
from .checking import Checker
from .extending import extending
from .format import (
    BlobLine,
    ChunkLine,
    EndLine,
    MessageLine,
    SessionLine,
    TurnLine,
    UsageLine,
    decoded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from ..commands import AnyCommand
    from ..engine import Reader
    from ..identity import SessionKey
    from ..records import Message, Session, SessionFacts, Turn
    from ..sqlite.scratch import Planned, Scratch, Status
    from .files import Source

SESSIONS_PER_UNIT = 64
_PAGE = 200
_DROPPED_PER_UNIT = 500
_TITLES_TOLD_MAX = 100
_FIRST = Incarnation(1)  # below that of every actor


class ImportReport(Struct, frozen=True, kw_only=True):
    """What was imported, or what would be.

    `deleted` sessions are tombstones here and stay so. `titles` tells, for a hundred sessions at
    most, which title they were to have and which they got, because it was taken. `reopened` ones
    had ended by a compression whose child is nowhere.
    """

    sessions_new: int = 0
    sessions_extended: int = 0
    sessions_unchanged: int = 0
    sessions_deleted: int = 0
    messages: int = 0
    blobs: int = 0
    reopened: int = 0
    routes: int = 0
    titles_changed: int = 0
    titles: tuple[tuple[SessionId, str, str | None], ...] = ()
    left_over: int = 0


class _Counts(Struct):
    sessions_new: int = 0
    sessions_extended: int = 0
    sessions_unchanged: int = 0
    sessions_deleted: int = 0
    messages: int = 0
    blobs: int = 0
    reopened: int = 0
    routes: int = 0
    titles_changed: int = 0
    left_over: int = 0


class Standing(NamedTuple):
    """What is stored under a session's id, and around it."""

    session: Session | None
    holder: SessionKey | None
    parent: Session | None
    parent_successor: SessionId | None


def importing(
    source: Source,
    scratch: Scratch,
    *,
    now_ms: int,
    dry_run: bool = False,
    is_live: Callable[[SessionKey], bool] = lambda _: False,
) -> Generator[Ask, Any, ImportReport]:
    """Import a file. `is_live` tells whether somebody serves a key at this moment.

    Raises `ImportFileError` and `ConflictError` before anything is written.
    """
    steps = _Import(source, scratch, now_ms, is_live)
    yield from steps.check()
    yield from steps.compare()
    if not dry_run:
        yield from steps.drop_left_overs()
        yield from steps.import_all()
    return steps.report()


def content_digest(draft: Draft) -> str:
    """What two rows are compared by when they are told apart."""
    return digest(_as_given(draft)).hex()


def _as_given(draft: Draft) -> Draft:
    return Draft(**{name: getattr(draft, name) for name in Draft.__struct_fields__})


def _same_message(stored: Message, given: Message) -> bool:
    """By uid and content; of an erased row, on either side, nothing but the uid is left."""
    if stored.uid != given.uid:
        return False
    if stored.erased or given.erased:
        return True
    return canonical(_as_given(stored)) == canonical(_as_given(given))


@final
class _Import:
    def __init__(
        self,
        source: Source,
        scratch: Scratch,
        now_ms: int,
        is_live: Callable[[SessionKey], bool],
    ) -> None:
        self._source = source
        self._scratch = scratch
        self._now_ms = now_ms
        self._is_live = is_live
        self._count = _Counts()
        self._titles: list[tuple[SessionId, str, str | None]] = []
        self._rows_total = 0
        self._rows_done = 0
        # What goes into the next unit
        self._commands: list[AnyCommand] = []
        self._size = 0
        self._pending_uids: set[str] = set()
        # What is published with it
        self._group: list[tuple[SessionLine, SessionFacts]] = []

    def report(self) -> ImportReport:
        counts = {name: getattr(self._count, name) for name in _Counts.__struct_fields__}
        return ImportReport(**counts, titles=tuple(self._titles))

    # Check -----------------------------------------------------------------------------------

    def check(self) -> Asking:
        checker = Checker(self._source, self._scratch)
        for _ in checker.check():
            yield Told("check", self._source.position, self._source.size_bytes)
        self._rows_total = checker.counted.messages
        self._source.check_unchanged()
        yield Told("check", self._source.size_bytes, self._source.size_bytes)

    # Compare ---------------------------------------------------------------------------------

    def compare(self) -> Asking:
        sessions = self._scratch.sessions()
        done = 0
        while page := list(islice(sessions, _PAGE)):
            lines = [decoded(planned.line) for planned in page]
            found = yield Read(partial(_standings, lines))
            for planned, line, standing in zip(page, lines, found, strict=True):
                status, start = yield from self._compare(planned, line, standing)
                self._scratch.plan(planned.place, status, start)
                self._count_session(line, status, start)
                done += line.messages
            yield Told("compare", min(done, self._rows_total), self._rows_total)

    def _count_session(self, line: SessionLine, status: Status, start: int) -> None:
        count = self._count
        count.sessions_new += status in ("new", "restart")
        count.sessions_extended += status == "extend"
        count.sessions_unchanged += status == "same"
        count.sessions_deleted += status == "kept"
        if status in ("new", "restart", "extend") and not line.deleted:
            count.messages += line.messages - (start if status == "extend" else 0)

    def _compare(
        self, planned: Planned, line: SessionLine, standing: Standing
    ) -> Generator[Ask, Any, tuple[Status, int]]:
        """What is to be done with a session, and from which row on. Raises `ConflictError`."""
        stored = standing.session
        if standing.holder is not None and standing.holder != line.key:
            raise ConflictError(f"session {line.id}", stored=standing.holder, given=line.key)
        if stored is None or (stored.hidden and not stored.deleted):
            self._check_edge(line, standing)
            if standing.holder is not None and (line.deleted or line.end_kind == "rotation"):
                what = f"the end of session {line.id}"
                raise ConflictError(what, stored="current", given=line.end_reason)
            if stored is None or stored.next_seq == 0:
                return "new", 0
            same = yield from self._begins_with(planned, line, stored)
            return ("new", stored.next_seq) if same else ("restart", 0)
        if stored.deleted:
            return ("same" if line.deleted else "kept"), 0
        if stored.key != line.key:
            raise ConflictError(f"session {line.id}", stored=stored.key, given=line.key)
        if stored.parent_id != line.parent_id and not line.deleted:
            what = f"the parent of session {line.id}"
            raise ConflictError(what, stored=stored.parent_id, given=line.parent_id)
        if line.deleted:
            return "same", 0
        yield from self._compare_rows(planned, line, stored)
        if stored.next_seq >= line.messages:
            return "same", 0
        if stored.end_kind == "rotation":
            what = f"the length of session {line.id}, which was rotated away,"
            raise ConflictError(what, stored=stored.next_seq, given=line.messages)
        return "extend", stored.next_seq

    def _check_edge(self, line: SessionLine, standing: Standing) -> None:
        """Whether a session that is here can have this one as its child by rotation."""
        parent = standing.parent
        if line.edge != "rotation" or parent is None or parent.hidden:
            return
        other = standing.parent_successor
        if other is not None and other != line.id:
            raise ConflictError(f"the child of session {parent.id}", stored=other, given=line.id)
        if parent.end_kind == "boundary" and not parent.deleted:
            what = f"the end of session {parent.id}"
            raise ConflictError(what, stored=parent.end_reason, given="compression")

    def _rows(self, planned: Planned, line: SessionLine) -> Iterator[Message]:
        for one in self._block(planned):
            if isinstance(one, MessageLine):
                yield one.message(line.id)

    def _block(self, planned: Planned) -> Iterator[Any]:
        """The lines of a session, behind its first."""
        lines = self._source.lines(planned.offset, planned.number)
        for place, (_, _, data) in enumerate(lines):
            one: Any = decoded(data)
            if isinstance(one, SessionLine | EndLine) and place > 0:
                return
            if place > 0:
                yield one

    def _compare_rows(self, planned: Planned, line: SessionLine, stored: Session) -> Asking:
        """What is stored and what is given are the same, as far as both go."""
        rows = islice(self._rows(planned, line), stored.next_seq)
        while page := list(islice(rows, _PAGE)):
            found = yield Read(_rows_view(line.id, page[0].seq, len(page)))
            for here, given in zip(found, page, strict=True):
                if not _same_message(here, given):
                    raise ConflictError(
                        f"message {given.seq} of session {line.id}",
                        stored=content_digest(here),
                        given=content_digest(given),
                    )

    def _begins_with(
        self, planned: Planned, line: SessionLine, stored: Session
    ) -> Generator[Ask, Any, bool]:
        """Whether what was staged by an import that was cut off is what this one would stage."""
        if line.deleted or stored.next_seq > line.messages:
            return False
        rows = islice(self._rows(planned, line), stored.next_seq)
        while page := list(islice(rows, _PAGE)):
            found = yield Read(_rows_view(line.id, page[0].seq, len(page)))
            # An original may have become a copy, because it is one elsewhere.
            wanted = [
                replace(m, carried=m.carried or here.carried)
                for m, here in zip(page, found, strict=False)
            ]
            if list(found) != wanted or len(wanted) != len(page):
                return False
        return True

    # Left-overs ------------------------------------------------------------------------------

    def drop_left_overs(self) -> Asking:
        """What an import has staged that nobody goes on with."""
        after = ""
        while page := (yield Read(lambda reader, after=after: reader.staged_sessions(after))):
            for staged in page:
                if not staged.is_parent and not self._scratch.has_session(staged.id):
                    yield from self._drop(staged.id, staged.next_seq, whole=True)
                    self._count.left_over += 1
            after = page[-1].id

    def _drop(self, session_id: SessionId, next_seq: int, *, whole: bool) -> Asking:
        while next_seq > 0:
            next_seq = max(0, next_seq - _DROPPED_PER_UNIT)
            yield write(DropStaged(session_id=session_id, from_seq=Seq(next_seq)))
        if not whole:
            return
        while True:
            usage, turns = yield Read(
                lambda reader: (reader.usage_of(session_id), reader.turns_of(session_id))
            )
            if not usage and not turns:
                break
            calls = tuple(one.call_id for one in usage)
            ids = tuple(turn.id for turn in turns)
            yield write(DropStaged(session_id=session_id, from_seq=Seq(0), calls=calls, turns=ids))
        yield write(DropStaged(session_id=session_id, from_seq=Seq(0), whole=True))

    # Stage and publish -----------------------------------------------------------------------

    def import_all(self) -> Asking:
        for planned in self._scratch.sessions():
            line: SessionLine = decoded(planned.line)
            if self._begins_group(line):
                yield from self._publish()
            if planned.status in ("new", "restart"):
                yield from self._stage(planned, line)
            elif planned.status == "extend":
                yield from self._publish()
                yield from self._extend(planned, line)
            yield Told("import", self._rows_done, self._rows_total)
        yield from self._publish()
        self._source.check_unchanged()

    def _begins_group(self, line: SessionLine) -> bool:
        """A lineage is published at once; only where nothing is rotated a long one may be cut."""
        if line.edge != "rotation" or line.parent_id is None:
            return len(self._group) >= SESSIONS_PER_UNIT
        return self._scratch.status_of(line.parent_id) not in ("new", "restart")

    def _stage(self, planned: Planned, line: SessionLine) -> Asking:
        facts = line.facts()
        if line.end_kind == "rotation" and not self._scratch.is_rotated(line.id):
            found = yield Read(partial(_successor, line.id))
            if found is None:
                ended = (None, None, None)
                if line.deleted:
                    ended = (line.ended_ms, "deleted", "boundary")
                self._count.reopened += not line.deleted
                facts = replace(facts, ended_ms=ended[0], end_reason=ended[1], end_kind=ended[2])
        stored = yield Read(partial(_session, line.id))
        if stored is None:
            yield from self._add(
                CreateSession(
                    session_id=line.id,
                    key=line.key,
                    at_ms=line.started_ms,
                    source=line.source,
                    hidden=True,
                )
            )
        elif planned.status == "restart":
            yield from self._drop(line.id, stored.next_seq, whole=False)
        yield from self._stage_block(planned, line)
        self._group.append((line, facts))

    def _stage_block(self, planned: Planned, line: SessionLine) -> Asking:
        yield from self._surroundings(line, self._block(planned))
        rows = self._rows(planned, line)
        for _ in islice(rows, planned.start):
            self._rows_done += 1
        for page in slices(rows):
            yield from self._stand_ins(line, [message.turn_id for message in page])
            given = yield from self._as_copies(page)
            staged = StageMessages(session_id=line.id, messages=tuple(given))
            self._pending_uids |= {message.uid for message in given}
            yield from self._add(staged, rows=len(page))
            self._rows_done += len(page)
            yield Told("import", self._rows_done, self._rows_total)

    def _surroundings(self, line: SessionLine, block: Iterator[Any]) -> Asking:
        """The turns, usage and blobs that stand in front of a session's rows."""
        turns: list[Turn] = []
        for one in block:
            if isinstance(one, TurnLine):
                turns.append(one.turn(line))
                if len(turns) >= 20:
                    yield from self._add(StageTurns(session_id=line.id, turns=tuple(turns)), 20)
                    turns = []
                continue
            if turns:
                yield from self._add(StageTurns(session_id=line.id, turns=tuple(turns)), len(turns))
                turns = []
            if isinstance(one, UsageLine):
                yield from self._stand_ins(line, [one.turn_id])
                given = {name: getattr(one, name) for name in UsageLine.__struct_fields__}
                yield from self._add(AddUsage(session_id=line.id, **given))
            elif isinstance(one, BlobLine):
                yield from self._import_blob(one, block)
            elif isinstance(one, MessageLine):
                break
        if turns:
            yield from self._add(StageTurns(session_id=line.id, turns=tuple(turns)), len(turns))

    def _stand_ins(self, line: SessionLine, turn_ids: Sequence[Any]) -> Asking:
        """Turns that rows refer to are there, if only as a name."""
        wanted = [turn_id for turn_id in dict.fromkeys(turn_ids) if turn_id is not None]
        if wanted:
            turns = tuple(
                TurnRecord(
                    id=turn_id,
                    key=line.key,
                    state="ended",
                    outcome=_STAND_IN,
                    opened_ms=line.started_ms,
                    ended_ms=line.started_ms,
                )
                for turn_id in wanted
            )
            yield from self._add(StageTurns(session_id=line.id, turns=turns), rows=0)

    def _import_blob(self, blob: BlobLine, block: Iterator[Any]) -> Asking:
        found = yield Read(lambda reader: reader.blob(blob.id))
        here = found is not None and found.sealed
        for one in islice(block, blob.chunk_count):
            if not here and isinstance(one, ChunkLine):
                put = PutChunk(blob_id=blob.id, index=one.index, data=one.data)
                yield from self._add(put)
        if here:
            return
        self._count.blobs += 1
        yield from self._add(
            SealBlob(
                blob_id=blob.id,
                size_bytes=blob.size_bytes,
                chunk_count=blob.chunk_count,
                media_type=blob.media_type,
                at_ms=blob.sealed_ms,
            )
        )

    def _as_copies(self, page: list[Message]) -> Generator[Ask, Any, list[Message]]:
        """A message has one original: what is one elsewhere already comes as a copy of it."""
        uids = [message.uid for message in page if not message.carried]
        if not self._pending_uids.isdisjoint(uids):
            yield from self._flush()
        found = yield Read(lambda reader: reader.originals(uids))
        elsewhere = {m.uid: m for m in found if m.session_id != page[0].session_id}
        if not elsewhere:
            return page
        given: list[Message] = []
        for message in page:
            original = elsewhere.get(message.uid)
            if original is None or message.carried:
                given.append(message)
                continue
            if not _same_message(original, message):
                raise ConflictError(
                    f"message {message.seq} of session {message.session_id}, which is message "
                    f"{original.seq} of session {original.session_id},",
                    stored=content_digest(original),
                    given=content_digest(message),
                )
            given.append(replace(message, carried=True))
        return given

    def _extend(self, planned: Planned, line: SessionLine) -> Asking:
        yield Hold(line.key)
        yield from self._surroundings(line, self._block(planned))
        yield from self._flush()
        rows = self._rows(planned, line)
        prepared = partial(self._prepared, line)
        yield from extending(line.id, rows, planned.start, line.messages, self._now_ms, prepared)
        self._rows_done += line.messages
        yield Release()

    def _prepared(
        self, line: SessionLine, page: list[Message]
    ) -> Generator[Ask, Any, list[Message]]:
        """Rows as they can be stored: their turns are there, and each has one original."""
        yield from self._stand_ins(line, [message.turn_id for message in page])
        given = yield from self._as_copies(page)
        yield from self._flush()
        return given

    # Publishing ------------------------------------------------------------------------------

    def _publish(self) -> Asking:
        """All that is staged of a few lineages, in one unit."""
        yield from self._flush()
        group, self._group = self._group, []
        if not group:
            return
        border = yield Read(partial(_border, [line for line, _ in group]))
        commands: list[AnyCommand] = []
        inside = {line.id for line, _ in group}
        for line, facts in group:
            if line.parent_id is not None and line.parent_id not in inside:
                parent = yield Read(partial(_session, line.parent_id))
                if parent is None and line.parent_id not in inside:
                    inside.add(line.parent_id)
                    commands.append(
                        CreateSession(
                            session_id=line.parent_id,
                            key=line.key,
                            at_ms=line.started_ms,
                            hidden=True,
                        )
                    )
            commands.append(PublishSession(session_id=line.id, facts=facts))
        if border is not None:
            yield Hold(border)
        commands += yield from self._routes([line for line, _ in group], border)
        yield write(*commands)
        if border is not None:
            yield Release()
        yield from self._look_at_titles([line for line, _ in group])

    def _routes(
        self, lines: list[SessionLine], border: SessionKey | None
    ) -> Generator[Ask, Any, list[AnyCommand]]:
        """A key that has no session, and that nobody serves, gets the one that it had."""
        wanted = [line for line in lines if line.current and line.key != border]
        routes = yield Read(lambda reader: [reader.route(line.key) for line in wanted])
        commands: list[AnyCommand] = []
        for line, route in zip(wanted, routes, strict=True):
            if (route is not None and route.session_id is not None) or self._is_live(line.key):
                continue
            if route is None:
                commands.append(OpenIncarnation(key=line.key, incarnation=_FIRST))
            commands.append(
                SetRoute(
                    key=line.key,
                    session_id=line.id,
                    replaces=0 if route is None else route.route_version,
                    at_ms=line.started_ms,
                )
            )
            self._count.routes += 1
        return commands

    def _look_at_titles(self, lines: list[SessionLine]) -> Asking:
        titled = [line for line in lines if line.title is not None]
        if not titled:
            return
        found = yield Read(lambda reader: [reader.session(line.id) for line in titled])
        for line, session in zip(titled, found, strict=True):
            given = None if session is None else session.title
            if line.title is not None and given != line.title:
                self._count.titles_changed += 1
                if len(self._titles) < _TITLES_TOLD_MAX:
                    self._titles.append((line.id, line.title, given))

    # Units -----------------------------------------------------------------------------------

    def _add(self, command: AnyCommand, rows: int = 1) -> Asking:
        """Into the next unit, which is written before it gets too large."""
        size = check_unit(Unit((command,))) + rows * (BYTES_PER_UNIT // ROWS_PER_UNIT)
        if self._commands and self._size + size > BYTES_PER_UNIT:
            yield from self._flush()
        self._commands.append(command)
        self._size += size

    def _flush(self) -> Asking:
        commands, self._commands, self._size = self._commands, [], 0
        self._pending_uids = set()
        if commands:
            yield write(*commands)


_STAND_IN = TurnOutcome(kind="interrupted", cause="imported")


# Views ---------------------------------------------------------------------------------------


def _rows_view(session_id: SessionId, first: int, limit: int) -> Callable[[Reader], Any]:
    return lambda reader: reader.rows_of(session_id, first, limit)


def _session(session_id: SessionId, reader: Reader) -> Session | None:
    return reader.session(session_id)


def _successor(session_id: SessionId, reader: Reader) -> SessionId | None:
    return reader.successor(session_id)


def _standings(lines: list[SessionLine], reader: Reader) -> list[Standing]:
    found: list[Standing] = []
    for line in lines:
        parent = successor = None
        if line.edge == "rotation" and line.parent_id is not None:
            parent = reader.session(line.parent_id)
            successor = reader.successor(line.parent_id)
        session, holder = reader.session(line.id), reader.holder(line.id)
        found.append(Standing(session, holder, parent, successor))
    return found


def _border(lines: list[SessionLine], reader: Reader) -> SessionKey | None:
    """The key whose current session is rotated away by what is published."""
    for line in lines:
        if line.edge != "rotation" or line.parent_id is None:
            continue
        parent = reader.session(line.parent_id)
        if parent is not None and not parent.hidden:
            holder = reader.holder(parent.id)
            return parent.key if holder is None else holder
    return None
