"""The look through a whole file before anything of it is believed.

Keeps: every line is of a known shape, stands where it may stand, and holds nothing that storage
would refuse; sessions are there once, behind their parents; rows are numbered without a gap, and
what they refer to in the file is there; blobs are what their names say. The first thing that is
wrong ends it, with the number of its line. Memory does not grow with the file.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn, final

import msgspec

from ..commands import AddUsage, CreateSession, SealBlob, StageTurns
from ..edge import (
    CHUNK_BYTES_MAX,
    check_integer,
    check_message,
    check_name,
    check_session_id,
    check_title,
    check_uid,
    check_unit,
)
from ..errors import InvalidContentError, NewerExportError
from ..units import Unit
from .format import (
    VERSION,
    BlobLine,
    ChunkLine,
    EndLine,
    Header,
    MessageLine,
    SessionLine,
    TurnLine,
    UsageLine,
    decoded,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..sqlite.scratch import Scratch
    from .files import Source

_TOLD_EACH = 1_000  # lines
_DAMAGED = "export again; if it was edited by hand, look at this line"


class Counted(msgspec.Struct):
    """What a file has in it."""

    sessions: int = 0
    messages: int = 0
    blobs: int = 0


@final
class Checker:
    """Takes the lines of a file in their order."""

    def __init__(self, source: Source, scratch: Scratch) -> None:
        self._source = source
        self._scratch = scratch
        self._digest = sha256()
        self._number = 0
        self._offset = 0
        self._session: SessionLine | None = None
        self._rotated = False
        self._rank = 0  # how far within its block: turns, usage, blobs, messages
        self._rows = 0
        self._awaited: dict[int, int] = {}  # seq of a summary that must come -> line that needs it
        self._blob: BlobLine | None = None
        self._chunks = self._blob_bytes = 0
        self._blob_digest = sha256()
        self.ended = False
        self.counted = Counted()

    def check(self) -> Iterator[None]:
        """All of it; yields now and then, so that it can be told how far it is."""
        for number, offset, data in self._source.lines():
            self._number, self._offset = number, offset
            self._take(number, data)
            if number % _TOLD_EACH == 0:
                yield
        self._number += 1
        if not self.ended:
            problem = "it is empty" if self._number == 1 else "the file breaks off before it"
            self._fail(problem, "copy the file again, or export again")

    def _fail(self, problem: str, hint: str = _DAMAGED) -> NoReturn:
        raise self._source.error(self._number, problem, hint)

    def _take(self, number: int, data: bytes) -> None:
        if number == 1:
            self._check_header(data)
        try:
            line: Any = decoded(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(f"it can't be read: {error}")
        if self.ended:
            self._fail("there is something behind the end")
        try:
            self._dispatch(line, data)
        except InvalidContentError as error:
            self._fail(error.message, error.hint)
        if not isinstance(line, EndLine):
            self._digest.update(data)

    def _check_header(self, data: bytes) -> None:
        version = version_of(data)
        if version is None:
            self._fail("it is not an export of onepen's", "give a file that `onepen export` made")
        if version > VERSION:
            raise NewerExportError(self._source.path, version, VERSION)

    def _dispatch(self, line: Any, data: bytes) -> None:
        match line:
            case Header():
                if self._number != 1:
                    self._fail("a second export begins here", "import one after the other")
            case SessionLine():
                self._end_session()
                self._begin_session(line, data)
            case TurnLine():
                self._check_turn(self._inside(1), line)
            case UsageLine():
                self._check_usage(self._inside(2), line)
            case BlobLine():
                self._inside(3)
                self._begin_blob(line)
            case ChunkLine():
                self._inside(3, in_blob=True)
                self._check_chunk(line)
            case MessageLine():
                self._check_message(self._inside(4), line)
            case _:
                self._check_end(line)

    def _inside(self, rank: int, *, in_blob: bool = False) -> SessionLine:
        """The session that the line is in; raises unless it may stand here."""
        if self._session is None:
            self._fail("it is in no session")
        if self._blob is not None and not in_blob:
            self._fail(f"pieces of blob {self._blob.id} are missing before it")
        if rank < self._rank:
            self._fail("it stands behind what it should be in front of")
        self._rank = rank
        return self._session

    # Sessions --------------------------------------------------------------------------------

    def _begin_session(self, line: SessionLine, data: bytes) -> None:
        self._session, self._rank, self._rows = line, 0, 0
        self._scratch.forget_uids()
        self.counted.sessions += 1
        if self.counted.sessions > self._source.limits.sessions_max:
            hint = "raise sessions_max if that is meant"
            self._fail(f"there are more than {self._source.limits.sessions_max} sessions", hint)
        check_session_id(line.id)
        check_name("key", line.key)
        if not line.key.strip():
            self._fail("key: it is blank")
        row = CreateSession(
            session_id=line.id,
            key=line.key,
            at_ms=line.started_ms,
            parent_id=line.parent_id,
            source=line.source,
            user=line.user,
            model=line.model,
            meta=line.meta,
        )
        check_unit(Unit((row,)))
        check_integer("last_ms", line.last_ms)
        check_integer("compaction_count", line.compaction_count)
        self._check_end_of(line)
        if line.title is not None:
            check_title(line.title)
        if (line.title is None) != (line.title_origin is None):
            self._fail("title: it comes with its origin, or not at all")
        told = (line.title, line.user, line.meta)
        if line.deleted and (line.current or any(one is not None for one in told)):
            self._fail("a deleted session has no title, no user, no meta and no key")
        if line.current and line.end_kind == "rotation":
            self._fail("current: it was rotated away")
        most = self._source.limits.messages_max
        if not 0 <= line.messages <= most:
            hint = "raise messages_max if that is meant"
            self._fail(f"messages: {line.messages} is not from 0 to {most}", hint)
        self._place_session(line, data)

    def _check_end_of(self, line: SessionLine) -> None:
        given = [one is not None for one in (line.ended_ms, line.end_reason, line.end_kind)]
        if len(set(given)) > 1:
            self._fail("ended_ms, end_reason and end_kind: they come together, or not at all")
        if line.ended_ms is not None:
            check_integer("ended_ms", line.ended_ms)
        if line.end_reason is not None:
            check_name("end_reason", line.end_reason or "-")
        if line.end_kind == "rotation" and line.end_reason != "compression":
            self._fail("end_reason: a rotation's is compression")

    def _place_session(self, line: SessionLine, data: bytes) -> None:
        scratch = self._scratch
        child_line = scratch.expected(line.id)
        if child_line is not None:
            self._fail(f"session {line.id} comes behind its child in line {child_line}")
        if line.parent_id == line.id:
            self._fail("parent_id: a session is not its own parent")
        if not scratch.add_session(line.id, self._number, self._offset, data):
            self._fail(f"session {line.id} is here for the second time")
        if line.edge is not None and line.edge == "rotation" and line.parent_id is None:
            self._fail("edge: a rotation has a parent")
        if line.current and not scratch.see("key", line.key):
            self._fail("current: the key has another session already")
        if line.parent_id is None:
            return
        parent = scratch.line_of(line.parent_id)
        if parent is None:
            scratch.expect_parent(line.parent_id, self._number)
        elif line.edge == "rotation" and decoded(parent).end_kind != "rotation":
            self._fail(f"edge: its parent {line.parent_id} was not rotated away")
        if line.edge == "rotation" and not scratch.rotate(line.parent_id):
            self._fail(f"edge: its parent {line.parent_id} has another child by rotation")

    def _end_session(self) -> None:
        session = self._session
        if self._blob is not None:
            self._fail(f"pieces of blob {self._blob.id} are missing before it")
        if session is None:
            return
        if not session.deleted and self._rows != session.messages:
            missing = f"it ends with {self._rows} of {session.messages} messages"
            self._fail(f"session {session.id}: {missing}")
        for seq, number in self._awaited.items():
            problem = f"message {seq} of session {session.id} is missing, or was rewound"
            raise self._source.error(number, problem, _DAMAGED)

    # What is in them -------------------------------------------------------------------------

    def _check_turn(self, session: SessionLine, line: TurnLine) -> None:
        check_name("id", line.id)
        if line.key is not None:
            check_name("key", line.key)
        for field in ("attempt", "opened_ms", "ended_ms"):
            check_integer(field, getattr(line, field))
        check_unit(Unit((StageTurns(session_id=session.id, turns=(line.turn(session),)),)))
        if not self._scratch.see("turn", line.id):
            self._fail(f"turn {line.id} is here for the second time")

    def _check_usage(self, session: SessionLine, line: UsageLine) -> None:
        check_uid("call_id", line.call_id)
        given = {name: getattr(line, name) for name in UsageLine.__struct_fields__}
        check_unit(Unit((AddUsage(session_id=session.id, **given),)))
        if not self._scratch.see("call", line.call_id):
            self._fail(f"call {line.call_id} is here for the second time")

    def _check_message(self, session: SessionLine, line: MessageLine) -> None:
        if session.deleted:
            self._fail("a deleted session has no messages")
        if line.seq != self._rows or self._rows >= session.messages:
            self._fail(f"seq: {line.seq} stands where {self._rows} of {session.messages} should")
        self._rows += 1
        self.counted.messages += 1
        check_message(line.message(session.id))
        if not self._scratch.see_uid(line.uid):
            self._fail(f"message {line.uid} is in session {session.id} for the second time")
        if line.covers is not None and not (
            line.summary and 0 <= line.covers[0] <= line.covers[1] < line.seq
        ):
            self._fail("covers: only a summary covers what stands before it")
        by = line.summarised_by
        if (line.state == "summarised") != (by is not None):
            self._fail("summarised_by: it goes with the state, or not at all")
        if by is not None:
            if not line.seq < by < session.messages:
                self._fail("summarised_by: it is no message behind this one")
            self._awaited.setdefault(by, self._number)
        if line.state != "rewound":
            self._awaited.pop(line.seq, None)
        for blob_id in line.blobs:
            if not self._scratch.has_seen("blob", blob_id):
                self._fail(f"blobs: {blob_id} is not in the file before it")

    def _begin_blob(self, line: BlobLine) -> None:
        check_unit(
            Unit(
                (
                    SealBlob(
                        blob_id=line.id,
                        size_bytes=line.size_bytes,
                        chunk_count=line.chunk_count,
                        media_type=line.media_type,
                        at_ms=line.sealed_ms,
                    ),
                )
            )
        )
        if line.chunk_count < 1:
            self._fail("chunk_count: it has no pieces")
        if not self._scratch.see("blob", line.id):
            self._fail(f"blob {line.id} is here for the second time")
        self._blob, self._chunks, self._blob_bytes = line, 0, 0
        self._blob_digest = sha256()
        self.counted.blobs += 1

    def _check_chunk(self, line: ChunkLine) -> None:
        blob = self._blob
        if blob is None:
            self._fail("it is a piece of nothing")
        if line.index != self._chunks:
            self._fail(f"index: {line.index} stands where {self._chunks} should")
        if len(line.data) > CHUNK_BYTES_MAX:
            self._fail(f"data: a piece has {CHUNK_BYTES_MAX} bytes at most")
        self._chunks += 1
        self._blob_bytes += len(line.data)
        self._blob_digest.update(line.data)
        if self._chunks < blob.chunk_count:
            return
        if self._blob_bytes != blob.size_bytes or self._blob_digest.hexdigest() != blob.id:
            self._fail(f"blob {blob.id} is not what its name says")
        self._blob = None

    def _check_end(self, line: EndLine) -> None:
        self._end_session()
        self.ended = True
        counted = (self.counted.sessions, self.counted.messages)
        if (line.sessions, line.messages) != counted:
            self._fail(
                f"it tells of {line.sessions} sessions and {line.messages} messages, not of "
                f"{counted[0]} and {counted[1]}"
            )
        if line.sha256 is not None and line.sha256 != self._digest.hexdigest():
            hint = "copy the file again; if it was edited, take sha256 out of its last line"
            self._fail("the lines before it are not as they were written", hint)
