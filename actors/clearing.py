"""Taking away what may go, slice by slice: deleted sessions, blobs, what is only history.

Used by the runtime, by the retention actor and by the command line: all they need is a Writer.

Keeps: each step is a unit of its own and small, so that no batch waits long behind it; whoever is
cancelled or killed half-way leaves nothing that the next start, or doing the same again, does not
finish. What a look has found may have changed when the step is written: a step that is refused for
that is left out, and never forced.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..storage.commands import (
    DeleteSession,
    DropBlob,
    EndOrphan,
    GiveOriginals,
    PruneSession,
    PruneWork,
    PurgeSession,
    SetMark,
)
from ..storage.errors import StaleError
from ..storage.identity import TurnId
from ..storage.units import Durable, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..storage.engine import Reader
    from ..storage.identity import BlobId, Clock, SessionId
    from ..storage.records import Blob, PurgeSlice, Session, WorkKind
    from .writer import WriterRef

ORPHANED_AFTER_MS = 7 * 24 * 3600 * 1000
EMPTY_AFTER_MS = 24 * 3600 * 1000
ORPHANS_MARK = "finalize_orphaned_rotations"
PIECES_AT_ONCE = 4  # of a blob: a megabyte
SHORT_ROWS = 500  # of a session whose tombstone needs no slices before it
_WORK_AT_ONCE = 100
_TRIES_MAX = 5

# Contract G --------------------------------------------------------------------------------------


async def finalize_orphans(writer: WriterRef, clock: Clock) -> int:
    """End what nobody can reach any more behind a rotation; how many there were. Contract G1."""
    now, count, place = clock.now(), 0, 0
    while True:
        look = partial(_orphans, now - ORPHANED_AFTER_MS, place)
        sessions, following = await writer.read(look)
        for session in sessions:
            command = EndOrphan(
                session_id=session.id,
                before_ms=now - ORPHANED_AFTER_MS,
                replaces=session.end_version,
                at_ms=now,
            )
            count += await was_done(writer, command)
        if following is None:
            break
        place = following
    return count


async def finalize_orphans_once(writer: WriterRef, clock: Clock) -> None:
    """The same once per database; cut off before its mark is set, it is done again."""
    await finalize_orphans(writer, clock)
    await writer.write(Unit((SetMark(name=ORPHANS_MARK, value="done"),)))


async def prune_empty(writer: WriterRef, clock: Clock) -> int:
    """Remove the rows of sessions in which nothing was said; how many. Contract G3.

    In several rounds: what the row of another one referred to is free when that is gone.
    """
    before_ms, count = clock.now() - EMPTY_AFTER_MS, 0
    while True:
        pruned, place = 0, 0
        while True:
            sessions, following = await writer.read(partial(_empty, before_ms, place))
            for session in sessions:
                command = PruneSession(session_id=session.id, before_ms=before_ms)
                pruned += await was_done(writer, command)
            if following is None:
                break
            place = following
        count += pruned
        if not pruned:
            return count


def _orphans(before_ms: int, place: int, reader: Reader) -> tuple[tuple[Session, ...], int | None]:
    return reader.orphaned_rotations(before_ms, after=place)


def _empty(before_ms: int, place: int, reader: Reader) -> tuple[tuple[Session, ...], int | None]:
    return reader.empty_sessions(before_ms, after=place)


async def was_done(writer: WriterRef, command: EndOrphan | PruneSession) -> bool:
    """Whether it was done by this; what was refused is no longer so, or still needed."""
    receipt = await writer.commit(Unit((command,)))
    return isinstance(receipt, Durable) and not receipt.again


# Deletion ----------------------------------------------------------------------------------------


async def delete_session(
    writer: WriterRef, clock: Clock, session_id: SessionId, *, quiet_since_ms: int | None = None
) -> bool:
    """Delete a session that no key has; false if it was deleted before. Nothing is left on return.

    Raises `RouteConflictError` for a key's current session, and what the Writer raises.
    """
    await hand_originals_on(writer, session_id)
    command = DeleteSession(session_id=session_id, at_ms=clock.now(), quiet_since_ms=quiet_since_ms)
    receipt = await writer.write(Unit((command,)))
    await purge(writer, session_id)
    return not receipt.again


async def hand_originals_on(writer: WriterRef, session_id: SessionId) -> None:
    """What was carried on belongs to those who have it: all of it but what is little."""
    for _ in range(_TRIES_MAX):
        try:
            while True:
                part = await writer.read(lambda reader: reader.originals_slice(session_id))
                if part is None:
                    return
                command = GiveOriginals(session_id=session_id, first_seq=part[0], last_seq=part[1])
                await writer.write(Unit((command,)))
        except StaleError:
            continue  # somebody else does the same at this moment


async def purge(
    writer: WriterRef, session_id: SessionId, told: Callable[[int], object] | None = None
) -> None:
    """Take away what is left of a deleted session, and the blobs that only it referred to."""
    blobs: dict[BlobId, None] = {}
    tries = 0
    while True:
        part = await writer.read(lambda reader: reader.purge_slice(session_id))
        if part is None:
            break
        blobs |= dict.fromkeys(part.blob_ids)
        try:
            await writer.write(Unit((purging_of(part),)))
        except StaleError:
            tries += 1
            if tries == _TRIES_MAX:
                raise
            continue  # somebody else has taken this slice
        if told is not None:
            told(part.before_seq)
    await drop_blobs(writer, blobs)


def purging_of(part: PurgeSlice) -> PurgeSession:
    return PurgeSession(
        session_id=part.session_id,
        step=part.step,
        before_seq=part.before_seq,
        turn_ids=part.turn_ids,
        last=part.last,
    )


async def finish_purges(writer: WriterRef) -> None:
    """Go on with what a process that died has left half-way."""
    while session_ids := await writer.read(lambda reader: reader.purges()):
        for session_id in session_ids:
            await purge(writer, session_id)


# Blobs -------------------------------------------------------------------------------------------


async def drop_blobs(writer: WriterRef, blob_ids: Iterable[BlobId]) -> int:
    """Drop those of these that nothing refers to, from their last piece on; how many."""
    count = 0
    for blob_id in blob_ids:
        blob = await writer.read(partial(_unused, blob_id))
        if blob is not None:
            count += await drop_blob(writer, blob, blob.chunk_count)
    return count


def _unused(blob_id: BlobId, reader: Reader) -> Blob | None:
    return None if reader.blob_in_use(blob_id) else reader.blob(blob_id)


async def drop_blob(writer: WriterRef, blob: Blob, pieces: int) -> bool:
    """Drop one in slices; false if something refers to it after all.

    Cut off half-way it is a blob that is not sealed, and goes as such.
    """
    for keeping in (*range(pieces - PIECES_AT_ONCE, 0, -PIECES_AT_ONCE), 0):
        command = DropBlob(blob_id=blob.id, keeping=keeping)
        if not isinstance(await writer.commit(Unit((command,))), Durable):
            return False
    return True


# History -----------------------------------------------------------------------------------------


async def prune_work(writer: WriterRef, before_ms: int) -> int:
    """Remove what came to its end before this time and is only history; how many things."""
    count = 0
    kinds: tuple[WorkKind, ...] = ("deliveries", "timers", "turns")
    for kind in kinds:
        place: str | None = None
        while True:
            names, following = await writer.read(partial(_old_work, kind, before_ms, place))
            if names:
                await writer.write(Unit((_pruning(kind, names, before_ms),)))
                count += len(names)
            if following is None:
                break
            place = following
    return count


def _old_work(
    kind: WorkKind, before_ms: int, place: str | None, reader: Reader
) -> tuple[tuple[str, ...], str | None]:
    return reader.old_work(kind, before_ms, after=place, limit=_WORK_AT_ONCE)


def _pruning(kind: WorkKind, names: tuple[str, ...], before_ms: int) -> PruneWork:
    if kind == "deliveries":
        return PruneWork(before_ms=before_ms, delivery_ids=names)
    if kind == "timers":
        return PruneWork(before_ms=before_ms, timer_ids=names)
    return PruneWork(before_ms=before_ms, turn_ids=tuple(map(TurnId, names)))
