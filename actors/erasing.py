"""Erasing what a user has said in sessions that others share, slice by slice.

Keeps: rows keep their seq and uid and lose their content; what their turns came to, sent, did and
asked goes in the same unit as the rows, so that nothing is left without a name to find it by. What
others said stays, and so do the answers of the agent. Done again it finds nothing more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..storage.commands import EndTurn, EraseMessages, EraseWork, SetDetails, TakeInbound
from ..storage.errors import StaleError
from ..storage.records import TurnOutcome
from ..storage.units import Durable, Unit
from .clearing import drop_blobs

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import SessionId, TurnId
    from ..storage.records import InboxEntry, PartOfUser, Turn
    from .writer import WriterRef

ERASED = TurnOutcome(kind="interrupted", cause="erased")
_TRIES_MAX = 5


class Blanked(NamedTuple):
    """How much was blanked."""

    rows: int
    turns: int

    def __add__(self, other: object) -> Blanked:
        assert isinstance(other, Blanked)
        return Blanked(self.rows + other.rows, self.turns + other.turns)


class _Part(NamedTuple):
    part: PartOfUser
    turns: tuple[Turn, ...]


async def blank_user(writer: WriterRef, now_ms: int, session_id: SessionId, user: str) -> Blanked:
    """Blank a user's rows of a session and what surrounds their turns, which nobody may be running.

    Durable on return.
    """
    blanked, after = Blanked(0, 0), -1
    while True:
        found = await writer.read(partial(_look, session_id, user, after))
        seqs = found.part.seqs
        if not seqs:
            break
        commands: list[AnyCommand] = []
        for turn in found.turns:
            if turn.state != "ended":  # a process that died has left it, and nobody took it up
                end = EndTurn(turn_id=turn.id, attempt=turn.attempt, outcome=ERASED, at_ms=now_ms)
                commands.append(end)
        if found.turns:
            commands.append(EraseWork(turn_ids=tuple(turn.id for turn in found.turns)))
        commands.append(EraseMessages(session_id=session_id, seqs=seqs))
        await writer.write(Unit(tuple(commands)))
        await drop_blobs(writer, found.part.blob_ids)
        blanked, after = blanked + Blanked(len(seqs), len(found.turns)), seqs[-1]
    await _forget_user(writer, now_ms, session_id, user)
    return blanked


def _look(session_id: SessionId, user: str, after: int, reader: Reader) -> _Part:
    part = reader.part_of_user(session_id, user, after=after)
    turns = (reader.turn(turn_id) for turn_id in part.turn_ids)
    return _Part(part, tuple(t for t in turns if t is not None))


async def _forget_user(writer: WriterRef, now_ms: int, session_id: SessionId, user: str) -> None:
    """Last of all: by the session's user it is known whose its rows without a name are."""
    for _ in range(_TRIES_MAX):
        row = await writer.read(lambda reader: reader.session(session_id))
        if row is None or row.user != user:
            return
        command = SetDetails(
            session_id=session_id,
            user=None,
            model=row.model,
            meta=None,
            replaces=row.details_version,
            at_ms=now_ms,
        )
        try:
            await writer.write(Unit((command,)))
        except StaleError:
            continue  # somebody else has set them meanwhile


async def withdraw(writer: WriterRef, now_ms: int, turn_id: TurnId) -> bool:
    """A turn that waits, and that no actor holds, ends without its messages; true if there was."""

    def look(reader: Reader) -> tuple[Turn | None, tuple[InboxEntry, ...]]:
        return reader.turn(turn_id), reader.inbound_of_turn(turn_id)

    turn, entries = await writer.read(look)
    if turn is None or turn.state == "ended":
        return False
    taking = tuple(
        TakeInbound(source=entry.source, inbound_id=entry.inbound_id, turn_id=entry.turn_id)
        for entry in entries
        if entry.turn_id == turn_id
    )
    end = EndTurn(turn_id=turn_id, attempt=turn.attempt, outcome=ERASED, at_ms=now_ms)
    receipt = await writer.commit(Unit((*taking, end)))
    return isinstance(receipt, Durable)
