"""What is written of a database: session by session, each as it stood at one moment.

Keeps: each session is read in one snapshot, together with the list of its children, so that no
session is written as rotated away without its child, or the other way round; parents come before
their children, a child by rotation right behind its parent; the order and the bytes follow from the
content alone. Memory does not grow with the database.

Not written: what waits (inbox, outbox, timers, questions), what a hidden session holds, and what is
this database's own business (versions, revisions, row numbers). A turn that has not ended is
written as cut off, because nobody goes on with it elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgspec import Struct

from ..errors import InvalidContentError, MissingError, StorageError
from ..identity import SessionId, SessionKey
from ..records import TurnOutcome
from ..sqlite.scratch import Scratch
from .format import (
    VERSION,
    BlobLine,
    ChunkLine,
    EndLine,
    Header,
    SessionLine,
    TurnLine,
    message_line,
    usage_line,
)

if TYPE_CHECKING:
    from ..engine import Reader
    from ..identity import BlobId
    from ..records import Session, Turn
    from .files import Output

_ROWS_PER_STEP = 2_000  # so long is a snapshot held for small sessions; a large one has its own
_PAGE = 500
_CUT_OFF = TurnOutcome(kind="interrupted", cause="exported")
_OF_ROW = tuple(n for n in SessionLine.__struct_fields__ if n not in ("current", "messages"))


class Selection(Struct, frozen=True, kw_only=True):
    """What is exported: one session, its lineage, all of a key, or everything."""

    session_id: SessionId | None = None
    lineage: SessionId | None = None
    key: SessionKey | None = None
    everything: bool = False

    def check(self) -> None:
        """Raise unless it says one thing."""
        said = [self.session_id, self.lineage, self.key, self.everything or None]
        if sum(one is not None for one in said) != 1:
            raise InvalidContentError(
                "what to export",
                "it is not exactly one of session_id, lineage, key and everything",
                hint="say everything=True for all of it",
            )


class ExportReport(Struct, frozen=True, kw_only=True):
    """What was written. `damaged` rows could not be read as they were stored."""

    sessions: int = 0
    messages: int = 0
    blobs: int = 0
    bytes: int = 0
    damaged: int = 0


class ExportInterruptedError(StorageError):
    """Storage was reopened while a session was being exported."""

    hint = "nothing was written under the file's name; export again"


@final
class Exporter:
    """Writes a selection in steps, each of which needs a reader for a moment."""

    def __init__(self, out: Output, what: Selection) -> None:
        what.check()
        self._out = out
        self._what = what
        self._scratch = Scratch()
        self._ahead: list[SessionId] = []  # the next one last
        self._root = ""
        self._begun = self._in_step = self._rooted = False
        self.cancelled = False
        self.rows_total = 0
        self._sessions = self._messages = self._blobs = self._damaged = 0

    def close(self) -> None:
        """Forget what was remembered; a step that is still under way ends with an error."""
        self.cancelled = True
        if not self._in_step:
            self._scratch.close()

    @property
    def report(self) -> ExportReport:
        return ExportReport(
            sessions=self._sessions,
            messages=self._messages,
            blobs=self._blobs,
            bytes=self._out.bytes_written,
            damaged=self._damaged,
        )

    def step(self, reader: Reader) -> bool:
        """Write some sessions; false when everything is written.

        Raises `MissingError` when what was asked for is not there.
        """
        if self._in_step:  # a read that failed half-way is tried again by whoever reads
            raise ExportInterruptedError("storage was reopened in the middle of a session")
        self._in_step = True
        if not self._begun:
            self._begin(reader)
        enough = self._messages + _ROWS_PER_STEP
        sessions = self._sessions + _ROWS_PER_STEP // 10
        while self._messages < enough and self._sessions < sessions:
            session_id = self._next(reader)
            if session_id is None:
                end = EndLine(
                    sessions=self._sessions, messages=self._messages, sha256=self._out.sha256
                )
                self._out.line(end)
                self._in_step = False
                return False
            self._write(reader, session_id)
        self._in_step = False
        return True

    # What comes next -------------------------------------------------------------------------

    def _begin(self, reader: Reader) -> None:
        what = self._what
        self._begun = True
        self.rows_total = reader.stored_rows()
        for wanted in (what.session_id, what.lineage):
            if wanted is None:
                continue
            found = reader.session(wanted)
            if found is None or found.hidden:
                raise MissingError(f"session {wanted}")
            line = reader.lineage(wanted) if what.lineage is not None else (found,)
            self._ahead = [session.id for session in reversed(line)]
            self.rows_total = sum(session.next_seq for session in line)
        if what.key is not None and not reader.root_sessions(limit=1, key=what.key):
            raise MissingError(f"a session of key {what.key}")
        self._out.line(Header(version=VERSION))

    def _next(self, reader: Reader) -> SessionId | None:
        if self.cancelled:
            raise ExportInterruptedError("the export was given up")
        rooted = self._what.key is not None or self._what.everything
        if not self._ahead and rooted:
            roots = reader.root_sessions(self._root, key=self._what.key)
            if roots:
                self._root = roots[-1]
            self._ahead = list(reversed(roots))
        return self._ahead.pop() if self._ahead else None

    # One session -----------------------------------------------------------------------------

    def _write(self, reader: Reader, session_id: SessionId) -> None:
        session = reader.session(session_id)
        if session is None or session.hidden:
            return
        if self._what.key is not None or self._what.everything:
            children = reader.child_sessions(session_id, key=self._what.key)
            self._ahead.extend(reversed(children))
        current = reader.holder(session_id) is not None
        given = {name: getattr(session, name) for name in _OF_ROW}
        self._out.line(SessionLine(**given, current=current, messages=session.next_seq))
        self._sessions += 1
        self._write_turns(reader, session)
        self._write_usage(reader, session)
        if not session.deleted:
            self._write_blobs(reader, session)
            self._write_messages(reader, session)

    def _write_turns(self, reader: Reader, session: Session) -> None:
        after: tuple[int, str] | None = None
        while True:
            page = reader.turns_of(session.id, after, _PAGE)
            for turn in page:
                self._out.line(_turn_line(turn, session))
            if len(page) < _PAGE:
                return
            after = (page[-1].opened_ms, page[-1].id)

    def _write_usage(self, reader: Reader, session: Session) -> None:
        page = reader.usage_of(session.id, None, _PAGE)
        while page:
            for usage in page:
                self._out.line(usage_line(usage))
            page = reader.usage_of(session.id, page[-1].call_id, _PAGE)

    def _write_blobs(self, reader: Reader, session: Session) -> None:
        page = reader.blobs_of(session.id, "", _PAGE)
        while page:
            for blob_id in page:
                if self._scratch.see("blob", blob_id):
                    self._write_blob(reader, blob_id)
            page = reader.blobs_of(session.id, page[-1], _PAGE)

    def _write_blob(self, reader: Reader, blob_id: BlobId) -> None:
        blob = reader.blob(blob_id)
        if blob is None or blob.sealed_ms is None:
            return
        self._out.line(
            BlobLine(
                id=blob.id,
                size_bytes=blob.size_bytes,
                chunk_count=blob.chunk_count,
                media_type=blob.media_type,
                sealed_ms=blob.sealed_ms,
            )
        )
        for index in range(blob.chunk_count):
            data = reader.blob_chunk(blob_id, index)
            if data is None:
                raise MissingError(f"piece {index} of blob {blob_id}")
            self._out.line(ChunkLine(index=index, data=data))
        self._blobs += 1

    def _write_messages(self, reader: Reader, session: Session) -> None:
        first = 0
        while first < session.next_seq:
            if self.cancelled:
                raise ExportInterruptedError("the export was given up")
            page = reader.rows_of(session.id, first, _PAGE)
            if [message.seq for message in page] != list(
                range(first, first + len(page))
            ) or not page:
                raise MissingError(f"message {first} of session {session.id}, or one behind it,")
            for message in page:
                self._out.line(message_line(message))
                self._damaged += message.damaged
            first += len(page)
            self._messages += len(page)


def _turn_line(turn: Turn, session: Session) -> TurnLine:
    outcome, ended_ms = turn.outcome, turn.ended_ms
    if turn.state != "ended" or outcome is None or ended_ms is None:
        outcome = _CUT_OFF
        ended_ms = turn.opened_ms if turn.started_ms is None else turn.started_ms
    return TurnLine(
        id=turn.id,
        key=None if turn.key == session.key else turn.key,
        attempt=turn.attempt,
        outcome=outcome,
        opened_ms=turn.opened_ms,
        started_ms=turn.started_ms,
        ended_ms=ended_ms,
    )


__all__ = ["ExportInterruptedError", "ExportReport", "Exporter", "Selection"]
