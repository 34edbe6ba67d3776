"""The end of a session, step by step; each step guarded alone (contract I).

    no new turns → stop the turn → store → on_session_end → commit_memory → on_session_finalize
    → end the row → close the agent

Keeps: what fails in one step is reported and the others still run; the *current* session is ended,
never one that was rotated away; the first boundary wins, closing twice changes nothing, and a lazy
session gets no row.

The session's work loop has seen to the first two steps: an operation runs when no turn does, and
one that interrupts has stopped and stored the turn before.
"""

from __future__ import annotations

import logging
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Literal

import trio
from msgspec import Struct

from ..storage.commands import EndSession
from ..storage.edge import check_draft
from ..storage.identity import SessionId
from ..storage.units import Refused
from .exchanges import open_calls
from .raised import is_theirs, said_by
from .reports import unsaved_of, with_results
from .results import Attempt, align

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..storage.commands import AnyCommand
    from .session import Session

logger = logging.getLogger(__name__)


class Finalized(Struct, frozen=True, kw_only=True):
    """What closing a session came to. `failures` names the steps that did not work, and why."""

    session_id: SessionId
    ended: bool
    failures: dict[str, str]


async def finalize(
    session: Session,
    reason: str,
    kind: Literal["suspension", "boundary"],
    along: tuple[AnyCommand, ...] = (),
) -> Finalized:
    """Close the current session. `along` is committed with its end, or alone if it has no row."""
    scribe, failures = session.scribe, dict[str, str]()
    session_id, agent = scribe.page.session_id, session.slot.agent
    ends = _ends(session, kind)

    async def step(name: str, run: Callable[[], Awaitable[object]]) -> object:
        try:
            with trio.fail_after(session.settings.finalize_deadline_s):
                return await run()
        except trio.TooSlowError as error:
            limit_s = session.settings.finalize_deadline_s
            failures[name] = str(error) or f"took longer than {limit_s:g} s"
        except BaseException as error:
            if not is_theirs(error):
                raise
            failures[name] = said_by(error)
        logger.error("closing %s: %s failed: %s", session.key, name, failures[name])
        return None

    async def hook(name: str, **arguments: object) -> None:
        problem = await session.hooks.call(name, **arguments)
        if problem is not None:
            failures[name] = problem

    if ends:
        await step("store", lambda: _store_unsaved(session, agent))
        session_id = scribe.page.session_id
        await hook(
            "on_session_end",
            session_id=session_id,
            completed=False,
            interrupted=True,
            model=getattr(agent, "model", None),
            platform=getattr(agent, "platform", None),
        )
        await step("commit_memory", lambda: _commit_memory(session, agent))
        await hook(
            "on_session_finalize", session_id=session_id, key=session.line.key, reason=reason
        )
    ended = await step("end", lambda: _end(session, reason, kind, along))
    await step("close", session.slot.close)
    if failures:
        session.doubtful = True  # perhaps a step was done after all
    return Finalized(session_id=session_id, ended=bool(ended), failures=failures)


def _ends(session: Session, kind: Literal["suspension", "boundary"]) -> bool:
    """Whether this close ends the row: it is open, or a boundary replaces a suspension."""
    page = session.scribe.page
    if not page.stored or page.end_kind == "boundary":
        return False
    return page.end_kind is None or kind == "boundary"


async def _store_unsaved(session: Session, agent: Any) -> None:
    """What an agent that reports at the end of its turns still has: it goes into the transcript."""
    scribe = session.scribe
    if scribe.broken is not None:
        await session.reload()
    messages = scribe.page.messages
    last = messages[-1].turn_id if messages else None
    if last is None or last != session.last_turn_id:
        return  # what the agent has left over is of another session, or was rewound
    report = await unsaved_of(session, agent)
    if not report:
        return
    start = scribe.page.tail_of(last)
    aligned = align(report, Attempt(last, 1, messages[:start], messages[start:], scribe.now()))
    if not aligned.sure:
        return  # nothing in it says that it is this conversation's
    for draft in aligned.new:
        check_draft(draft)
    await scribe.room()
    new = [draft for draft in aligned.new if not scribe.page.has(draft.uid)]
    rows = with_results(session, new, open_calls(messages[start:]), "the session was closed")
    if rows:
        receipt = await scribe.receipt_of(scribe.write(rows, turn_id=last))
        if isinstance(receipt, Refused):
            raise receipt.error()


async def _commit_memory(session: Session, agent: Any) -> None:
    commit = getattr(agent, "commit_memory", None)
    if not callable(commit):
        return
    result = commit(tuple(session.scribe.page.messages))
    if isawaitable(result):
        await result


async def _end(
    session: Session,
    reason: str,
    kind: Literal["suspension", "boundary"],
    along: tuple[AnyCommand, ...],
) -> bool:
    """End the row, if there is one that is still open; true if this did."""
    scribe = session.scribe
    if scribe.broken is not None:
        await session.reload()
    page, ends = scribe.page, _ends(session, kind)
    commands: tuple[AnyCommand, ...] = along
    if ends:
        end = EndSession(
            session_id=page.session_id,
            reason=reason,
            kind=kind,
            replaces=page.end_version,
            at_ms=scribe.now(),
        )
        commands = (end, *along)
    if not commands:
        return False
    await scribe.room()
    receipt = await scribe.receipt_of(scribe.note(commands))
    if isinstance(receipt, Refused):
        raise receipt.error()
    if ends:
        page.end_kind, page.end_version = kind, page.end_version + 1
    return ends
