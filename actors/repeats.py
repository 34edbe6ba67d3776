"""A message that comes again: a webhook's retry, a reconnect's replay (contract A7).

Keeps: the same source and inbound id start no second turn. The repeat follows the turn while it
waits or runs, and gets its outcome when it has ended, also after a restart. A turn that a crash cut
goes on from the stored transcript, one attempt further. Other content, or another key, under the
same id is a conflict.

What this actor has accepted itself is remembered until it is durable, so that a repeat right behind
the first finds it; for everything else storage is asked. Nothing here accepts anything.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, final

import trio

from ..storage.errors import ConflictError, MissingError
from ..storage.identity import TurnId
from .line import Accepted, SessionBusyError
from .mailbox import Answer
from .recovery import another_attempt
from .replies import Reply, reply_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..storage.engine import Reader
    from ..storage.records import Message, Turn, TurnUsage
    from .line import Submit
    from .session import Session

_REMEMBERED_MAX = 256
_TAKEN_BACK_S = 0.01
_LOOKS_MAX = 100  # meanwhile nothing else is read


class _Known(NamedTuple):
    key: str
    digest: str
    turn_id: TurnId


@final
class Accepting:
    """The inbound ids that one actor has accepted lately."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] | None = None  # most keys have no ids

    def note(self, key: str, submit: Submit) -> None:
        if self._known is None:
            self._known = OrderedDict()
        name = (submit.source, submit.inbound_id)
        self._known[name] = _Known(key, submit.digest, submit.turn_id)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)

    def forget(self, source: str, inbound_id: str) -> None:
        """It was refused after all."""
        if self._known is not None:
            self._known.pop((source, inbound_id), None)

    def find(self, submit: Submit) -> _Known | None:
        if self._known is None:
            return None
        return self._known.get((submit.source, submit.inbound_id))


async def follow_repeat(session: Session, submit: Submit) -> Accepted | None:
    """What became of a message that was here before; `None` if it is new."""
    known = session.accepting.find(submit)
    if known is None:
        entry = await session.scribe.writer.read(
            lambda reader: reader.inbound(submit.source, submit.inbound_id)
        )
        if entry is None and submit.follows:
            return await _forgotten(session, submit.turn_id)
        if entry is None:
            return None
        known = _Known(entry.key, entry.digest, entry.turn_id)
    if (known.key, known.digest) != (session.key, submit.digest):
        raise ConflictError(
            f"inbound {submit.source}/{submit.inbound_id}",
            {"key": known.key, "digest": known.digest},
            {"key": session.key, "digest": submit.digest},
        )
    session.surroundings.counters.repeats += 1
    return _alive(session, known.turn_id) or await _stored(session, known.turn_id)


def _alive(session: Session, turn_id: TurnId) -> Accepted | None:
    """The turn, if it runs or waits here."""
    reply = session.line.reply_of
    running = session.turn
    if running is not None and running.release.done:
        running = None  # it has ended, and is about to make room
    if running is not None and running.waiting.turn_id == turn_id:
        wait = running.accepted.wait
        return Accepted(turn_id, "started", 0, wait, reply(turn_id), repeated=True)
    for one in () if running is None else (*running.steering, *running.steered):
        if one.turn_id == turn_id and one.ticket is not None:
            durable = one.ticket.durable
            return Accepted(turn_id, "steered", 0, durable, reply(turn_id), repeated=True)
    if turn_id in session.parked:
        return Accepted(turn_id, "started", 0, _at_once, reply(turn_id), repeated=True)
    for position, waiting in enumerate(session.waiting, 1):
        if waiting.turn_id == turn_id:
            ticket = waiting.ticket
            wait_for: Callable[[], Awaitable[object]] = ticket.durable if ticket else _at_once
            return Accepted(turn_id, "queued", position, wait_for, reply(turn_id), repeated=True)
    return None


async def _forgotten(session: Session, turn_id: TurnId) -> Accepted:
    """The turn of a message whose inbound id is no longer known, as far as that is stored."""
    found = _alive(session, turn_id) or await _stored(session, turn_id, resume=False)
    if found is None:  # it had become part of another turn
        answer: Answer[Reply] = Answer()
        answer.fail(MissingError(f"what became of turn {turn_id}"))
        found = Accepted(turn_id, "started", 0, _at_once, answer, repeated=True)
    return found


async def _stored(session: Session, turn_id: TurnId, *, resume: bool = True) -> Accepted | None:
    """The turn as it has ended, or as it goes on."""

    def look(reader: Reader) -> tuple[Turn | None, tuple[Message, ...], TurnUsage]:
        return reader.turn(turn_id), reader.turn_messages(turn_id), reader.turn_usage(turn_id)

    for _ in range(_LOOKS_MAX):
        turn, messages, usage = await session.scribe.read(look)
        alive = _alive(session, turn_id)  # it may have begun while we looked
        if alive is not None or turn is None:
            return alive
        if turn.state == "ended" or turn_id in session.line.replies:
            break
        await trio.sleep(_TAKEN_BACK_S)  # it is being taken back, or has ended since we looked
    else:
        raise SessionBusyError(session.key, 1.0, why=f"turn {turn_id} is just ending")
    if turn.outcome is not None and turn.outcome.cause == "steered":
        # It was answered with the turn that it was steered into.
        into = TurnId(str((turn.outcome.detail or {}).get("into")))
        return _alive(session, into) or await _stored(session, into, resume=resume)
    again = await another_attempt(session, turn) if resume and _was_cut(turn) else None
    alive = _alive(session, turn_id)  # or another repeat has begun it meanwhile
    if alive is not None:
        return alive
    if again is not None:
        session.wait_in_line(again)
        position = len(session.waiting)
        reply = session.line.reply_of(turn_id)
        return Accepted(turn_id, "queued", position, _at_once, reply, repeated=True)
    answer: Answer[Reply] = Answer()
    if turn.outcome is None:  # it is being taken back: the promise is kept when that is stored
        answer = session.line.reply_of(turn_id)
    else:
        answer.give(
            Reply(
                text=reply_text(turn.outcome),
                outcome=turn.outcome,
                turn_id=turn_id,
                session_id=turn.session_id or session.scribe.page.session_id,
                messages=messages,
                usage=usage.tokens,
                durable=session.scribe.writer.durable,
            )
        )
    return Accepted(turn_id, "started", 0, _at_once, answer, repeated=True)


def _was_cut(turn: Turn) -> bool:
    """Whether a crash has ended it."""
    outcome = turn.outcome
    return outcome is not None and (outcome.kind, outcome.cause) == ("interrupted", "crash")


async def _at_once() -> None:
    """It is durable already."""
    await trio.lowlevel.checkpoint()
