"""What an agent reports at the end of its turn, taken into the transcript.

Keeps: only what is new is stored (contract A4); a rewrite of the past is never stored as new. A
report that names another session is a rotation (B6): it happens before the new rows, or is refused,
and then the turn's messages stay where they are.
"""

from __future__ import annotations

import logging
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ..storage.edge import check_draft, check_session_id
from ..storage.errors import OnepenError, StorageError
from . import compression
from .compression import Compression
from .exchanges import closing_results, ordered, whole_exchanges
from .owned import own_draft
from .raised import said_by
from .results import Aligned, Result, align, reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..storage.identity import SessionId
    from ..storage.records import Draft, ToolCall, TurnOutcome
    from .running import RunningTurn
    from .session import Session

logger = logging.getLogger(__name__)


async def unsaved_of(session: Session, agent: Any) -> tuple[Draft, ...] | None:
    """What an agent that reports at the end has not reported yet. Raises what it raises."""
    unsaved = getattr(agent, "unsaved", None)
    agents = session.surroundings.agents
    if not callable(unsaved):
        return None
    if agents.shared is not None and (agents.running or agents.last_key != session.line.key):
        return None  # everybody's agent: what it has may be another conversation's
    with trio.fail_after(session.settings.hook_deadline_s):
        messages: Any = unsaved()
        if isawaitable(messages):
            messages = await messages
    return reported(messages, session.scribe.now()) if messages else None


def dropping(session: Session) -> Callable[[Draft], None]:
    """For results of calls that nobody has made: no model takes them, so they are left out."""

    def drop(orphan: Draft) -> None:
        session.surroundings.counters.report_rows_dropped += 1
        logger.warning("%s: a result of no open call is dropped: %s", session.key, orphan.uid)

    return drop


def with_results(
    session: Session, drafts: Iterable[Draft], opened: dict[str, ToolCall], why: str
) -> tuple[Draft, ...]:
    """The drafts behind the calls that are open, with a result for every one of them."""
    scribe = session.scribe

    def close(calls: Iterable[ToolCall]) -> tuple[Draft, ...]:
        return closing_results(calls, why, scribe.fresh_uid, scribe.now())

    rows = ordered(drafts, opened, close, dropping(session))
    return (*rows, *close(opened.values()))


async def take_report(
    session: Session, running: RunningTurn, result: Result, report: tuple[Draft, ...]
) -> tuple[TurnOutcome, tuple[Draft, ...]]:
    """What of a report is new; and the rotation that it asks for, if it names another session."""
    turn, outcome = running.turn, result.outcome
    await session.scribe.wait_released()
    aligned = align(report, turn.as_attempt())
    if result.report is None and aligned.rewrite and not aligned.sure:
        # From `unsaved()`, and nothing in it says that it is this conversation's.
        session.surroundings.counters.report_rows_dropped += len(report)
        return outcome, ()
    for draft in aligned.new:
        check_draft(draft)
    new = tuple(map(own_draft, aligned.new))
    if result.session_id not in (None, turn.session_id, running.session_id):
        assert result.session_id is not None
        problem = await _rotate_by_result(session, running, result.session_id, aligned)
        if problem is not None:
            detail = {**(outcome.detail or {}), "rotation_refused": problem}
            outcome = msgspec.structs.replace(outcome, detail=detail)
    elif aligned.rewrite:
        session.surroundings.counters.report_rows_dropped += len(aligned.rewrite)
    return outcome, await turn.not_stored(new, aligned.known)


async def _rotate_by_result(
    session: Session, running: RunningTurn, child_id: SessionId, aligned: Aligned
) -> str | None:
    """An agent that compressed by itself says so with another session id: contract B6."""
    scribe, turn = session.scribe, running.turn
    try:
        check_session_id(child_id)
        # An agent may put what it keeps of the past into a system message at the front. Without
        # anything else it is that, and not only a prompt: better a prompt too many in the child.
        rewrite = aligned.rewrite or (() if aligned.kept else aligned.leading)
        past = [msgspec.structs.replace(d, uid=d.uid or scribe.fresh_uid()) for d in rewrite]
        summary = with_results(session, past, {}, "it was compressed away")
        await scribe.room()
        messages, start = scribe.page.messages, scribe.page.start_of(turn.id, turn.attempt)
        kept = set(aligned.kept)
        chosen = {n for n, m in enumerate(messages) if n >= start or m.uid in kept}
        carried = [messages[n] for n in sorted(whole_exchanges(messages, chosen))]
        await compression.move(
            scribe,
            child_id,
            summary,
            carried,
            Compression("", turn_id=turn.id, attempt=turn.attempt),
        )
    except StorageError:
        raise
    except OnepenError as error:
        logger.warning("%s: the agent's rotation was refused: %s", session.key, error)
        return said_by(error)
    return None
