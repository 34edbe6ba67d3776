"""Units of an import: what stands in front of a session's rows, and the rows, in slices.

Keeps: a unit is small; what a command refers to is in a unit before it, or in front of it in the
same; a message has one original. Rows that refer to a turn of which the file knows nothing more get
a stand-in for it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, final

from msgspec.structs import replace

from ..commands import AddUsage, PutChunk, SealBlob, StageMessages, StageTurns
from ..edge import check_unit
from ..errors import ConflictError
from ..records import Turn, TurnOutcome
from ..units import Unit
from . import looking
from .asking import BYTES_PER_UNIT, ROWS_PER_UNIT, slices, write
from .comparing import content_digest, same_message
from .format import BlobLine, ChunkLine, MessageLine, TurnLine, UsageLine

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from ..commands import AnyCommand
    from ..records import Message
    from .asking import Ask, Asking
    from .format import SessionLine

_TURNS_PER_COMMAND = 20
_STAND_IN = TurnOutcome(kind="interrupted", cause="imported")


@final
class Staging:
    """Gathers commands into units."""

    def __init__(self) -> None:
        self._commands: list[AnyCommand] = []
        self._size = 0
        self._pending_uids: set[str] = set()
        self.rows = 0
        self.blobs = 0

    # Units -----------------------------------------------------------------------------------

    def add(self, command: AnyCommand, rows: int = 1) -> Asking:
        """Into the next unit, which is written before it gets too large."""
        size = check_unit(Unit((command,))) + rows * (BYTES_PER_UNIT // ROWS_PER_UNIT)
        if self._commands and self._size + size > BYTES_PER_UNIT:
            yield from self.flush()
        self._commands.append(command)
        self._size += size

    def flush(self) -> Asking:
        commands, self._commands, self._size = self._commands, [], 0
        self._pending_uids = set()
        if commands:
            yield write(*commands)

    # A session ---------------------------------------------------------------------------------

    def surroundings(self, line: SessionLine, block: Iterator[Any]) -> Asking:
        """The turns, usage and blobs that stand in front of a session's rows."""
        turns: list[Turn] = []
        for one in block:
            if isinstance(one, TurnLine):
                turns.append(one.turn(line))
                if len(turns) < _TURNS_PER_COMMAND:
                    continue
            if turns:
                yield from self.add(_staged(line, turns), len(turns))
                turns = []
            if isinstance(one, UsageLine):
                yield from self._stand_ins(line, [one.turn_id])
                given = {name: getattr(one, name) for name in UsageLine.__struct_fields__}
                yield from self.add(AddUsage(session_id=line.id, **given))
            elif isinstance(one, BlobLine):
                yield from self._import_blob(one, block)
            elif isinstance(one, MessageLine):
                break
        if turns:
            yield from self.add(_staged(line, turns), len(turns))

    def _stand_ins(self, line: SessionLine, turn_ids: Sequence[Any]) -> Asking:
        """Turns that rows refer to are there, if only as a name."""
        wanted = [turn_id for turn_id in dict.fromkeys(turn_ids) if turn_id is not None]
        if wanted:
            turns = tuple(
                Turn(
                    id=turn_id,
                    key=line.key,
                    state="ended",
                    outcome=_STAND_IN,
                    opened_ms=line.started_ms,
                    ended_ms=line.started_ms,
                )
                for turn_id in wanted
            )
            yield from self.add(StageTurns(session_id=line.id, turns=turns), rows=0)

    def _import_blob(self, blob: BlobLine, block: Iterator[Any]) -> Asking:
        found = yield looking.blob_of(blob.id)
        here = found is not None and found.sealed
        for one in islice(block, blob.chunk_count):
            if not here and isinstance(one, ChunkLine):
                put = PutChunk(blob_id=blob.id, index=one.index, data=one.data)
                yield from self.add(put)
        if here:
            return
        self.blobs += 1
        yield from self.add(
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
            yield from self.flush()
        found = yield looking.originals_of(uids)
        elsewhere = {m.uid: m for m in found if m.session_id != page[0].session_id}
        if not elsewhere:
            return page
        given: list[Message] = []
        for message in page:
            original = elsewhere.get(message.uid)
            if original is None or message.carried:
                given.append(message)
                continue
            if not same_message(original, message):
                raise ConflictError(
                    f"message {message.seq} of session {message.session_id}, which is message "
                    f"{original.seq} of session {original.session_id},",
                    stored=content_digest(original),
                    given=content_digest(message),
                )
            given.append(replace(message, carried=True))
        return given

    def prepared(
        self, line: SessionLine, page: list[Message]
    ) -> Generator[Ask, Any, list[Message]]:
        """Rows as they can be stored: their turns are there, and each has one original."""
        yield from self._stand_ins(line, [message.turn_id for message in page])
        given = yield from self._as_copies(page)
        yield from self.flush()
        return given

    def stage_rows(self, line: SessionLine, rows: Iterator[Message]) -> Asking:
        """Rows of a hidden session."""
        for page in slices(rows):
            yield from self._stand_ins(line, [message.turn_id for message in page])
            given = yield from self._as_copies(page)
            self._pending_uids |= {message.uid for message in given}
            staged = StageMessages(session_id=line.id, messages=tuple(given))
            yield from self.add(staged, rows=len(page))
            self.rows += len(page)


def _staged(line: SessionLine, turns: list[Turn]) -> StageTurns:
    return StageTurns(session_id=line.id, turns=tuple(turns))
