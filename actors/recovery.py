"""Turns that were cut off, and messages that will have no turn.

Keeps: a turn that was running when its actor or the process died is marked, with results for the
tool calls that it left open, or resumed from the stored transcript; nothing is ever replayed
(contract I7). A turn that keeps dying is marked, whatever the policy: perhaps it is what kills us.
Idempotent: what is marked is marked, and killed half-way it is done again by the key's next actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.commands import EndTurn, TakeInbound
from ..storage.records import Inbound, TurnOutcome
from ..storage.units import Durable
from .exchanges import closing_results, open_calls
from .line import Said, Waiting
from .raised import said_by
from .replies import Reply, reply_text, storable

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.errors import OnepenError
    from ..storage.identity import TurnId
    from ..storage.records import Turn as StoredTurn
    from .page import Loaded
    from .session import Session

ATTEMPTS_MAX = 3


async def drop_queued(session: Session, waiting: Waiting, error: OnepenError) -> None:
    """A waiting message whose start was refused for good must not be tried for ever."""
    if waiting.ticket is None and waiting.attempt == 1 and not waiting.stored:
        return  # it was to be accepted by the very unit that was refused: nothing is stored
    outcome = TurnOutcome(kind="failed", error=storable(str(error)), cause="storage")
    await end_waiting(session, waiting, outcome)


async def end_waiting(session: Session, waiting: Waiting, outcome: TurnOutcome) -> None:
    """A turn that has not begun ends; its message stays out of the transcript."""
    scribe = session.scribe
    if waiting.ticket is not None:
        await scribe.receipt_of(waiting.ticket)
    end = EndTurn(
        turn_id=waiting.turn_id, attempt=waiting.attempt - 1, outcome=outcome, at_ms=scribe.now()
    )
    commands: tuple[AnyCommand, ...] = (end,)
    if waiting.attempt == 1:
        commands = (*taking(waiting), end)
    await scribe.room()
    receipt = await scribe.receipt_of(scribe.note(commands))
    if not isinstance(receipt, Durable):
        raise receipt.error()
    session_id = scribe.page.session_id
    session.line.stream.publish(
        "turn.ended", session_id=session_id, turn_id=waiting.turn_id, outcome=outcome
    )
    session.line.give_reply(
        Reply(
            text=reply_text(outcome),
            outcome=outcome,
            turn_id=waiting.turn_id,
            session_id=session_id,
            durable=scribe.writer.durable,
        )
    )


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
            again = going_on(session, turn) if may_resume else None
            if again is not None:
                session.waiting.append(again)
            else:
                await _mark(session, turn)
        elif turn.state == "queued" and turn.id in said:
            session.waiting.append(Waiting(turn.id, tuple(said[turn.id]), stored=True))


def taking(waiting: Waiting) -> tuple[AnyCommand, ...]:
    """Its messages leave the inbox: for the transcript, or for good."""
    return tuple(
        TakeInbound(source=said.source, inbound_id=said.inbound_id) for said in waiting.said
    )


def going_on(session: Session, turn: StoredTurn) -> Waiting | None:
    """A turn that was cut, for one more attempt; not too often, and only where its messages are."""
    said = tuple(
        Said(
            "",
            "",
            Inbound(text=m.text, parts=m.parts, user=m.user, meta=m.meta, blobs=m.blobs),
        )
        for m in session.scribe.page.messages
        if m.turn_id == turn.id and m.role == "user"
    )
    if not said or turn.attempt >= ATTEMPTS_MAX:
        return None
    return Waiting(turn.id, said, attempt=turn.attempt + 1, stored=True)


async def _mark(session: Session, turn: StoredTurn) -> None:
    """Store the end of a turn whose actor died, and results for the calls that it left open."""
    scribe = session.scribe
    if session.crash is not None:
        text = f"the session's actor crashed: {said_by(session.crash)}"
        outcome = TurnOutcome(kind="failed", error=storable(text), cause="crash")
    else:
        outcome = TurnOutcome(kind="interrupted", cause="crash")
    end = EndTurn(turn_id=turn.id, attempt=turn.attempt, outcome=outcome, at_ms=scribe.now())
    page = scribe.page
    here = turn.session_id == page.session_id and page.stored and page.end_kind is None
    await scribe.room()
    if here:
        calls = open_calls(m for m in page.messages if m.turn_id == turn.id)
        why = "the process died before there was one"
        rows = closing_results(calls.values(), why, scribe.fresh_uid, scribe.now())
        ticket = scribe.write(rows, turn_id=turn.id, after=(end,))
    else:
        ticket = scribe.note((end,))
    receipt = await scribe.receipt_of(ticket)
    if not isinstance(receipt, Durable):
        raise receipt.error()
    session.surroundings.counters.turns_recovered += 1
    session.line.stream.publish(
        "turn.ended", session_id=turn.session_id, turn_id=turn.id, outcome=outcome
    )
    session.line.give_reply(
        Reply(
            text=reply_text(outcome),
            outcome=outcome,
            turn_id=turn.id,
            session_id=turn.session_id or page.session_id,
            messages=tuple(m for m in page.messages if m.turn_id == turn.id),
            durable=scribe.writer.durable,
        )
    )
