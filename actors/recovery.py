"""Turns that were cut off, turns that wait for a person, and messages that will have no turn.

Keeps: a turn that was running when its actor or the process died is marked, with results for the
tool calls that it left open and a notice for whoever waits for the answer, in one unit; or resumed
from the stored transcript; nothing is ever replayed (contract I7, F7). A turn that keeps dying is
set aside, whatever the policy: perhaps it is what kills us. One that waits for a person is left
alone until it is answered. Idempotent: what is marked is marked, and killed half-way it is done
again by the key's next actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ..storage.commands import EndTurn, SetAside, TakeInbound
from ..storage.records import Inbound, TurnOutcome, TurnUsage
from ..storage.units import Durable, Refused
from .effects import fates_of, unknown_effects
from .exchanges import closing_results, open_calls
from .line import Said, Waiting
from .outbox import posting, targets_in, targets_of
from .pausing import withdrawing
from .raised import said_by
from .replies import Reply, reply_text, storable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.errors import OnepenError
    from ..storage.identity import SessionId, TurnId
    from ..storage.records import Effect, InboxEntry, Message
    from ..storage.records import Turn as StoredTurn
    from .page import Loaded
    from .session import Session


@final
class Parked:
    """A turn that an earlier actor left waiting, and the questions that it waits for."""

    __slots__ = ("asks", "turn")

    def __init__(self, turn: StoredTurn, asks: set[str]) -> None:
        self.turn = turn
        self.asks = asks


# Messages that will have no turn -------------------------------------------------------------


async def drop_queued(session: Session, waiting: Waiting, error: OnepenError) -> None:
    """A waiting message whose start was refused for good must not be tried for ever."""
    if waiting.ticket is None and waiting.attempt == 1 and not waiting.stored:
        return  # it was to be accepted by the very unit that was refused: nothing is stored
    outcome = TurnOutcome(kind="failed", error=storable(str(error)), cause="storage")
    await end_waiting(session, waiting, outcome)


async def end_waiting(session: Session, waiting: Waiting, outcome: TurnOutcome) -> None:
    """A turn that waits ends before it begins, or goes on.

    The message of one that has never begun stays out of the transcript.
    """
    scribe = session.scribe
    if waiting.attempt > 1:
        await end_begun(session, waiting.turn_id, outcome)
        return
    for said in waiting.said:
        receipt = None if said.ticket is None else await scribe.receipt_of(said.ticket)
        if isinstance(receipt, Refused):
            waiting = waiting.without(said)
            if not waiting.said:  # nothing of it is stored
                session.line.fail_reply(waiting.turn_id, receipt.error())
                return
    await scribe.room()
    receipt = await scribe.receipt_of(scribe.note(ending(session, waiting, outcome)))
    if not isinstance(receipt, Durable):
        raise receipt.error()
    has_ended(session, waiting, outcome)


def ending(session: Session, waiting: Waiting, outcome: TurnOutcome) -> tuple[AnyCommand, ...]:
    """The end of a turn that has never begun, and what is told to whoever sent its messages."""
    scribe, targets = session.scribe, targets_of(waiting.said)
    end = EndTurn(turn_id=waiting.turn_id, attempt=0, outcome=outcome, at_ms=scribe.now())
    told = posting(scribe, targets, reply_text(outcome), "reply", turn_id=waiting.turn_id)
    return (*taking(waiting), end, *told)


def has_ended(session: Session, waiting: Waiting, outcome: TurnOutcome) -> None:
    """That is durable."""
    _tell(session, waiting.turn_id, session.scribe.page.session_id, outcome, TurnUsage())


async def end_begun(session: Session, turn_id: TurnId, outcome: TurnOutcome) -> None:
    """A turn that nobody runs, as it is stored now: rotations have carried it along."""
    look = session.scribe.read
    turn, usage = await look(lambda reader: (reader.turn(turn_id), reader.turn_usage(turn_id)))
    if turn is None:
        return
    if turn.state == "ended":  # it was marked before its repeat came: as it ended, it stays
        assert turn.outcome is not None
        session_id = turn.session_id or session.scribe.page.session_id
        _tell(session, turn.id, session_id, turn.outcome, usage)
        return
    await _end(session, turn, outcome)


def _tell(
    session: Session,
    turn_id: TurnId,
    session_id: SessionId,
    outcome: TurnOutcome,
    usage: TurnUsage,
) -> None:
    """Those who follow a turn hear of its end, now that it is durable."""
    scribe, text = session.scribe, reply_text(outcome)
    page = scribe.page
    session.line.stream.publish(
        "turn.ended", session_id=session_id, turn_id=turn_id, text=text, outcome=outcome
    )
    session.line.give_reply(
        Reply(
            text=text,
            outcome=outcome,
            turn_id=turn_id,
            session_id=session_id,
            messages=tuple(m for m in page.messages if m.turn_id == turn_id),
            usage=usage.tokens,
            durable=scribe.writer.durable,
        )
    )


def taking(waiting: Waiting, into: TurnId | None = None) -> tuple[AnyCommand, ...]:
    """Its messages leave the inbox: for the transcript, or for good."""
    return tuple(
        TakeInbound(
            source=said.source, inbound_id=said.inbound_id, turn_id=waiting.turn_id, into=into
        )
        for said in waiting.said
    )


# Turns that were cut off -----------------------------------------------------------------------


async def recover(session: Session, loaded: Loaded) -> None:
    """Take over what the key's last actor left: cut-off turns first, then what waits."""
    said: dict[TurnId, list[Said]] = {}
    for entry in loaded.waiting:
        assert entry.body is not None
        one = Said(entry.source, entry.inbound_id, entry.body)
        said.setdefault(entry.turn_id, []).append(one)
    for turn in loaded.turns:
        if turn.state == "running":
            may_resume = session.settings.recovery == "resume" and session.crash is None
            again = await another_attempt(session, turn) if may_resume else None
            if again is not None:
                session.waiting.append(again)
            else:
                await _mark(session, turn)
        elif turn.state == "waiting":
            await _park(session, turn)
        elif turn.state == "queued" and turn.id in said:
            session.waiting.append(Waiting(turn.id, tuple(said[turn.id]), stored=True))
        elif turn.state == "queued":
            # Nobody could ever begin it, and whoever sent it would wait for ever.
            error = "its message is no longer in the inbox"
            await _end(session, turn, TurnOutcome(kind="failed", error=error, cause="storage"))


async def another_attempt(session: Session, turn: StoredTurn) -> Waiting | None:
    """A turn that was cut, for one more attempt; not too often, and only where its messages are."""
    if turn.tries >= session.settings.turn_tries_max:
        return None
    return await _again(session, turn)


async def _again(session: Session, turn: StoredTurn) -> Waiting | None:
    entries, effects, asks, usage = await _what_belongs(session, turn.id)
    if not is_here(session, turn.id):
        return None
    rows = [m for m in session.scribe.page.messages if m.turn_id == turn.id and m.role == "user"]
    said = tuple(
        Said("" if entry is None else entry.source, "", body)
        for entry, body in said_before(entries, rows)
    )
    return Waiting(
        turn.id,
        said,
        attempt=turn.attempt + 1,
        stored=True,
        targets=targets_in(entries),
        effects=effects,
        asks=asks,
        usage=usage,
    )


def said_before(
    entries: Sequence[InboxEntry], rows: Sequence[Message]
) -> tuple[tuple[InboxEntry | None, Inbound], ...]:
    """The messages of a turn that has begun, as they came in: their bodies are rows by now."""
    said: list[tuple[InboxEntry | None, Inbound]] = []
    for number, row in enumerate(rows):
        # The rows stand in the order in which their messages were accepted.
        entry = entries[min(number, len(entries) - 1)] if entries else None
        body = Inbound(
            text=row.text,
            parts=row.parts,
            user=row.user,
            reply_to=None if entry is None else entry.reply_to,
            platform_id=row.platform_id,
            blobs=row.blobs,
            meta=row.meta,
        )
        said.append((entry, body))
    return tuple(said)


def is_here(session: Session, turn_id: TurnId) -> bool:
    """Whether a turn that has begun can go on: its messages are in the key's open session."""
    page = session.scribe.page
    return page.end_kind != "boundary" and any(
        m.turn_id == turn_id and m.role == "user" for m in page.messages
    )


class _Belongings(NamedTuple):
    """What is stored of a turn beside its rows: whom it answers, what it did, what it asks."""

    entries: tuple[InboxEntry, ...]
    effects: tuple[Effect, ...]
    asks: tuple[str, ...]
    usage: TurnUsage


async def _what_belongs(session: Session, turn_id: TurnId) -> _Belongings:
    key = session.line.key

    def look(reader: Reader) -> _Belongings:
        opened = reader.questions(key, open_only=True)
        return _Belongings(
            reader.inbound_of_turn(turn_id),
            reader.effects(turn_id),
            tuple(question.question_key for question in opened if question.turn_id == turn_id),
            reader.turn_usage(turn_id),
        )

    # Behind what is posted: an answer that is under way must not be taken for an open question.
    return await session.scribe.read(look)


async def _mark(session: Session, turn: StoredTurn) -> None:
    """Store the end of a turn whose actor died."""
    aside: tuple[AnyCommand, ...] = ()
    if session.crash is not None:
        text = f"the session's actor crashed: {said_by(session.crash)}"
        outcome = TurnOutcome(kind="failed", error=storable(text), cause="crash")
    elif turn.tries >= session.settings.turn_tries_max:
        reason = f"it was cut off {turn.tries} times, and is set aside"
        outcome = TurnOutcome(kind="failed", error=reason, cause="dead_letter")
        letter = SetAside(
            turn_id=turn.id, reason=reason, tries=turn.tries, at_ms=session.scribe.now()
        )
        aside = (letter,)
        session.surroundings.counters.dead_letters += 1
    else:
        outcome = TurnOutcome(kind="interrupted", cause="crash")
    await _end(session, turn, outcome, aside)
    session.surroundings.counters.turns_recovered += 1


async def _end(
    session: Session,
    turn: StoredTurn,
    outcome: TurnOutcome,
    more: tuple[AnyCommand, ...] = (),
) -> None:
    """The end of a turn that nobody runs: results for its open calls, and a word to the user."""
    scribe = session.scribe
    entries, effects, asks, usage = await _what_belongs(session, turn.id)
    text = reply_text(outcome)
    await scribe.room()
    page, now = scribe.page, scribe.now()
    closing: tuple[AnyCommand, ...] = (
        *unknown_effects(effects, now),
        *withdrawing(scribe.key, asks, now),
        EndTurn(turn_id=turn.id, attempt=turn.attempt, outcome=outcome, at_ms=now),
        *more,
        *posting(scribe, targets_in(entries), text, "reply", turn_id=turn.id),
    )
    calls = open_calls(m for m in page.messages if m.turn_id == turn.id)
    if calls and page.end_kind != "boundary":
        why = "the process died before there was one"
        if outcome.cause not in ("crash", "dead_letter"):
            why = f"the turn was {outcome.kind}"
        fates = fates_of(effects)
        rows = closing_results(calls.values(), why, scribe.fresh_uid, now, fates)
        ticket = scribe.write_late(rows, turn.id, closing)
    else:
        ticket = scribe.note(closing)
    receipt = await scribe.receipt_of(ticket)
    if not isinstance(receipt, Durable):
        raise receipt.error()
    _tell(session, turn.id, turn.session_id or page.session_id, outcome, usage)


# Turns that wait for a person ----------------------------------------------------------------


async def _park(session: Session, turn: StoredTurn) -> None:
    """Leave it alone until it is answered; if that has happened, it goes on."""
    if not is_here(session, turn.id):
        # Another key has taken its session over while nobody served this one.
        await _end(session, turn, TurnOutcome(kind="interrupted", cause="moved"))
        return
    asks = (await _what_belongs(session, turn.id)).asks
    parked = session.parked[turn.id] = Parked(turn, set(asks))
    if not asks:
        await unpark(session, parked)


async def unpark(session: Session, parked: Parked) -> None:
    """Everything that it asked has an answer: its next attempt is the next turn."""
    again = await _again(session, parked.turn)
    if session.parked.get(parked.turn.id) is not parked:
        return  # it was stopped meanwhile
    if again is None:
        # Its session is no longer the key's: there is nothing that it could go on with.
        session.interrupt("moved", parked.turn.id)
        return
    del session.parked[parked.turn.id]
    session.waiting.insert(0, again)
    session.go_on()


# Turns of another key ------------------------------------------------------------------------


async def close_brought(session: Session) -> None:
    """Results for the calls that a session brings along whose turn belongs to its last key."""
    scribe, messages = session.scribe, session.scribe.page.messages
    calls = open_calls(messages)
    if not calls:
        return
    turn_id = messages[-1].turn_id
    effects = () if turn_id is None else (await _what_belongs(session, turn_id)).effects
    await scribe.room()
    why = "another key has taken the session over"
    rows = closing_results(calls.values(), why, scribe.fresh_uid, scribe.now(), fates_of(effects))
    receipt = await scribe.receipt_of(scribe.write(rows, turn_id=turn_id))
    if isinstance(receipt, Refused):
        raise receipt.error()
