"""The end of a turn: its outcome, its last rows, and what leaves with them.

Keeps:
- A turn ends once, with an outcome, whatever the agent did: returned, raised, was interrupted, took
  too long, returned something that can't be stored, or had a unit refused.
- Its rows and its end are one unit; before the answer every tool call has a result (A10). So are
  the replies that are to be sent, and the end of what it left open: effects, questions.
- The reply leaves only with the receipt of that unit.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from ..storage.commands import EndTurn
from ..storage.errors import InvalidContentError, InvariantError, OnepenError, StorageError
from ..storage.records import Draft, TurnOutcome
from ..storage.units import Durable
from .outbox import posting
from .pausing import withdrawing
from .raised import causes_of, is_theirs, said_by, sole_cause
from .replies import Reply, reply_text, storable, with_facts, with_storable_facts
from .reports import dropping, take_report, unsaved_of

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.units import Receipt
    from .results import Result
    from .running import RunningTurn
    from .session import Session
    from .turn import Turn

logger = logging.getLogger(__name__)

_ENDS_TRIED_MAX = 8

# What it came to -------------------------------------------------------------------------------


def as_stopped(running: RunningTurn, result: Result) -> Result:
    """What an agent says that was told to stop, and came to an end by itself.

    If it has finished its answer, that is the answer. Otherwise the turn was interrupted by whoever
    did it, however the agent puts that: as nothing, as an interrupt, as an error of its own.
    """
    outcome = result.outcome
    answered = outcome.kind in ("answered", "partial") and (outcome.text or "").strip()
    if running.cause in (None, "refused") or answered or outcome.kind == "silent":
        return result
    stopped = msgspec.structs.replace(outcome, kind="interrupted", cause=running.cause)
    return result._replace(outcome=stopped)


def failure(running: RunningTurn, error: BaseException) -> TurnOutcome:
    """What an agent has raised; out of a nursery too, and from whatever it came."""
    if running.cause == "refused" or any(isinstance(e, StorageError) for e in causes_of(error)):
        return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="storage")
    if isinstance(error := sole_cause(error), InvalidContentError):
        return _unstorable(error)
    return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="agent")


def _unstorable(error: OnepenError) -> TurnOutcome:
    """The agent gave something that can't be stored; that is no word of its model's."""
    detail = {"refused": getattr(error, "field", "")}
    return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="agent", detail=detail)


def refused_outcome(session: Session) -> TurnOutcome:
    """For a turn that has written what does not hold."""
    refused = session.scribe.broken
    reason = refused.reason if refused is not None else "unknown"
    return TurnOutcome(
        kind="failed", error=f"storage refused what the turn wrote: {reason}", cause="storage"
    )


# Storing it ------------------------------------------------------------------------------------


async def finish(session: Session, running: RunningTurn, result: Result) -> TurnOutcome:
    """Store what the turn still has to say and its end, in one unit; then the reply leaves."""
    scribe, turn = session.scribe, running.turn
    outcome, answer, report = result.outcome, result.answer, result.report
    new: tuple[Draft, ...] = ()
    if report is None and outcome.kind in ("interrupted", "failed"):
        try:
            report = await unsaved_of(session, running.agent)
        except BaseException as error:
            if not is_theirs(error):
                raise
            # The turn has failed as it is; it ends with what it has stored.
            logger.error("unsaved() of the agent of %s failed", session.key, exc_info=error)
    if report is None and result.session_id is not None:
        report = ()  # it moves on without saying what it takes along: this turn goes with it
    if report is not None:
        try:
            outcome, new = await take_report(session, running, result, report)
        except OnepenError as error:
            outcome, answer = _unstorable(error), None
    outcome = with_storable_facts(outcome)
    if outcome.kind == "answered" and not (outcome.text or "").strip():
        # It has said its answer without calling it that.
        outcome = msgspec.structs.replace(outcome, text=_last_words(turn, new) or outcome.text)
    for _ in range(_ENDS_TRIED_MAX):
        await scribe.room()
        if scribe.broken is not None:
            refused = refused_outcome(session)
            await session.reload()
            await _steer_back(session, running)
            # What was posted behind the refused unit is not stored; the turn says so.
            outcome, new, answer = refused, (), None
            continue
        if not (outcome.text or "").strip():
            outcome = with_facts(outcome, len(turn.history), turn.model_calls)
        try:
            rows = _last_rows(session, turn, new, answer, outcome)
            ticket = scribe.write(
                rows,
                turn_id=turn.id,
                after=_closing(session, running, outcome, rows, answer),
                then=_releasing(session, running, outcome),
            )
        except InvalidContentError as error:
            outcome, new, answer = _unstorable(error), (), None
            continue
        reply = session.line.reply_of(turn.id)
        if isinstance(await scribe.receipt_of(ticket, reply), Durable):
            return outcome
    raise InvariantError(f"the end of a turn of {session.key} is refused again and again")


async def _steer_back(session: Session, running: RunningTurn) -> None:
    """What was steered into the turn by a unit that was refused is still waiting."""
    steered = list(running.steered)
    if not steered:
        return
    ids = [waiting.turn_id for waiting in steered]
    turns = await session.scribe.read(lambda reader: [reader.turn(turn_id) for turn_id in ids])
    back = [w for w, turn in zip(steered, turns, strict=True) if turn and turn.state == "queued"]
    running.steered[:] = [waiting for waiting in steered if waiting not in back]
    running.steering[:0] = back


def _last_words(turn: Turn, new: tuple[Draft, ...]) -> str | None:
    """What the assistant said last in this turn, if nothing came behind it."""
    for draft in reversed([*turn.messages, *new]):
        if draft.role == "assistant" and not draft.tool_calls and draft.text:
            return draft.text
        if draft.role in ("user", "tool"):
            break
    return None


def _closing(
    session: Session,
    running: RunningTurn,
    outcome: TurnOutcome,
    rows: tuple[Draft, ...],
    answer: str | None,
) -> tuple[AnyCommand, ...]:
    """What ends with the turn, and what leaves with it: one unit with its last rows."""
    scribe, turn, text = session.scribe, running.turn, reply_text(outcome)
    now = scribe.now()
    end = EndTurn(turn_id=turn.id, attempt=running.waiting.attempt, outcome=outcome, at_ms=now)
    answers = [d.uid for d in rows if d.role == "assistant" and d.text == text]
    interim = turn.sending(rows)
    fresh = answer is not None and not turn.is_streamed_answer(answer)
    have_it = () if fresh else turn.sent_to(text)
    replies = posting(
        scribe,
        [target for target in running.targets if target not in have_it],
        text,
        "reply",
        turn_id=turn.id,
        uid=answers[-1] if answers else None,
        more={"outcome": outcome.kind},
    )
    return (
        *turn.take_usage(),
        *turn.effects_left(),
        *withdrawing(scribe.key, tuple(running.pause.open), now),
        end,
        *interim,
        *replies,
    )


def _last_rows(
    session: Session, turn: Turn, new: tuple[Draft, ...], answer: str | None, outcome: TurnOutcome
) -> tuple[Draft, ...]:
    """Reported rows and the answer, with whatever the turn has left open."""
    scribe = session.scribe
    why = "the turn ended without one"
    if outcome.kind in ("interrupted", "failed"):
        why = f"the turn was {outcome.kind}" + (f" ({outcome.cause})" if outcome.cause else "")
    rows = [*new]
    if answer is not None and answer.strip() and not turn.is_streamed_answer(answer):
        rows.append(
            Draft(uid=scribe.fresh_uid(), role="assistant", text=answer, created_ms=scribe.now())
        )
    return turn.last_rows(rows, why, dropping(session))


def _releasing(session: Session, running: RunningTurn, outcome: TurnOutcome) -> Any:
    """The output gate: called with the receipt of the turn's end."""
    turn, scribe = running.turn, session.scribe
    text = reply_text(outcome)

    def received(receipt: Receipt) -> None:
        if not isinstance(receipt, Durable):
            return
        session.line.stream.publish(
            "turn.ended", session_id=turn.session_id, turn_id=turn.id, text=text, outcome=outcome
        )
        running.release.durable(
            Reply(
                text=text,
                outcome=outcome,
                turn_id=turn.id,
                session_id=turn.session_id,
                messages=turn.messages,
                usage=turn.tokens,
                durable=scribe.writer.durable,
            )
        )

    return received
