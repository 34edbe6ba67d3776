"""`runtime.turns` and `runtime.dead_letters`: what is to be answered, and what could not be.

Whatever is told here is stored, and asks no session: a turn that runs for an hour holds up nobody
who looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, final

from msgspec import Struct

from ..actors.line import Interrupt, Said, Submit
from ..actors.messages import digest_of
from ..actors.recovery import said_before
from ..actors.sources import source_of
from ..storage.commands import ResolveDeadLetter
from ..storage.edge import check_count, check_name
from ..storage.errors import ConflictError, MissingError
from ..storage.identity import SessionId, SessionKey, TurnId
from ..storage.records import InboxEntry, Question, Turn
from ..storage.units import Unit
from .submission import Submission

if TYPE_CHECKING:
    from ..actors.directory import Directory
    from ..actors.line import Surroundings
    from ..storage.engine import Reader
    from ..storage.records import DeadLetter, DeadLetterState, Message


class KeyStatus(Struct, frozen=True, kw_only=True):
    """Where a conversation stands."""

    key: SessionKey
    state: Literal["idle", "queued", "running", "waiting"]
    session_id: SessionId | None
    """The current session; it may have no row yet."""
    turn_id: TurnId | None
    """Of the turn that runs, or waits for a person."""
    queued: int
    questions: tuple[Question, ...]
    """What a person is asked."""


def status_of(reader: Reader, key: SessionKey) -> KeyStatus:
    """A key as it is stored."""
    route, turns = reader.route(key), reader.unfinished_turns(key)
    begun = next((turn for turn in turns if turn.state in ("running", "waiting")), None)
    state: Literal["idle", "queued", "running", "waiting"] = "queued" if turns else "idle"
    if begun is not None:
        state = "running" if begun.state == "running" else "waiting"
    return KeyStatus(
        key=key,
        state=state,
        session_id=None if route is None else route.session_id,
        turn_id=None if begun is None else begun.id,
        queued=sum(turn.state == "queued" for turn in turns),
        questions=reader.questions(key, open_only=True),
    )


class UnfinishedTurn(Struct, frozen=True, kw_only=True):
    """A turn that has not ended, with the messages that it is to answer."""

    turn: Turn
    messages: tuple[InboxEntry, ...]

    @property
    def id(self) -> TurnId:
        return self.turn.id

    @property
    def key(self) -> SessionKey:
        return self.turn.key

    @property
    def state(self) -> str:
        return self.turn.state


@final
class Turns:
    """The turns of a runtime."""

    def __init__(self, directory: Directory, surroundings: Surroundings) -> None:
        self._directory = directory
        self._writer = surroundings.writer

    async def list(self, key: str | None = None, *, limit: int = 500) -> tuple[UnfinishedTurn, ...]:
        """What is queued, runs or waits for a person, in the order of acceptance."""
        if key is not None:
            check_name("key", key)
        check_count("limit", limit)
        wanted = None if key is None else SessionKey(key)

        def look(reader: Reader) -> tuple[UnfinishedTurn, ...]:
            return tuple(
                UnfinishedTurn(turn=turn, messages=reader.inbound_of_turn(turn.id))
                for turn in reader.unfinished_turns(wanted)[:limit]
            )

        return await self._writer.read(look)

    async def get(self, turn_id: str) -> Turn:
        """What is stored of a turn. Raises `MissingError`."""
        check_name("turn_id", turn_id)
        turn = await self._writer.read(lambda reader: reader.turn(TurnId(turn_id)))
        if turn is None:
            raise MissingError(f"turn {turn_id}")
        return turn

    async def cancel(self, turn_id: str) -> bool:
        """Stop a turn, or take its message back if it is queued; false if it has ended.

        What became of it is stored when its reply is there. Raises `MissingError`.
        """
        turn = await self.get(turn_id)
        if turn.state == "ended":
            return False
        if self._directory.interrupt(turn.key, "person", turn.id):
            return True
        source = source_of(turn.key)
        return await self._directory.ask(turn.key, source, Interrupt(turn.id, "person"))


class _Opened(NamedTuple):
    letter: DeadLetter
    entries: tuple[InboxEntry, ...]
    rows: tuple[Message, ...]


@final
class DeadLetters:
    """Messages whose turns kept being cut off, set aside until a person decides."""

    def __init__(self, directory: Directory, surroundings: Surroundings) -> None:
        self._directory = directory
        self._surroundings = surroundings

    async def list(self, state: DeadLetterState | None = "open") -> tuple[DeadLetter, ...]:
        """Those that are open, or of another state; all of them for `None`."""
        letters = await self._surroundings.writer.read(lambda reader: reader.dead_letters())
        return tuple(letter for letter in letters if state in (None, letter.state))

    async def retry(self, turn_id: str) -> Submission:
        """Say the same once more, as a new turn; the letter is resolved in the same transaction.

        Raises `MissingError`, and `ConflictError` if somebody has decided before.
        """
        letter, entries, rows = await self._open(turn_id)
        said = [row for row in rows if row.role == "user" and not row.erased]
        if not said:
            raise MissingError(f"the messages of turn {turn_id}")
        name, source = f"retry:{turn_id}:{letter.tries}", source_of(letter.key)
        first, *more = (
            Said(source if entry is None else entry.source, f"{name}:{number}", body)
            for number, (entry, body) in enumerate(said_before(entries, said))
        )
        submit = Submit(
            first.body,
            first.inbound_id,
            first.source,
            digest_of(first.body),
            TurnId(self._surroundings.ids.fresh()),
            repeatable=True,
            along=(self._resolving(letter, "retried"),),
            more=tuple(more),
        )
        accepted = await self._directory.ask(letter.key, source, submit)
        await accepted.durable()
        return Submission(self._directory, letter.key, accepted)

    async def drop(self, turn_id: str) -> None:
        """Nobody will answer it. Raises as `retry` does."""
        letter, _, _ = await self._open(turn_id)
        await self._surroundings.writer.write(Unit((self._resolving(letter, "dropped"),)))

    def _resolving(
        self, letter: DeadLetter, resolution: Literal["retried", "dropped"]
    ) -> ResolveDeadLetter:
        return ResolveDeadLetter(
            turn_id=letter.turn_id,
            tries=letter.tries,
            resolution=resolution,
            at_ms=self._surroundings.clock.now(),
        )

    async def _open(self, turn_id: str) -> _Opened:
        check_name("turn_id", turn_id)
        wanted = TurnId(turn_id)

        def look(reader: Reader) -> _Opened:
            letters = {letter.turn_id: letter for letter in reader.dead_letters()}
            if wanted not in letters:
                raise MissingError(f"dead letter {turn_id}")
            messages = reader.turn_messages(wanted)
            return _Opened(letters[wanted], reader.inbound_of_turn(wanted), messages)

        found = await self._surroundings.writer.read(look)
        if found.letter.state != "open":
            raise ConflictError(f"dead letter {turn_id}", found.letter.state)
        return found
