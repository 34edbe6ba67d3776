"""Running a turn, from its first gate to its reply.

Keeps:
- The agent is called only when the user's message is durable (contract A1), under a deadline and a
  cancel scope of its own, in a context that names its session.
- A turn ends once, whatever the agent did; what comes behind its end (a title, a hook) can hold the
  reply up for a moment, and never loses it.
- One that waits for a person when the runtime shuts down is left as it is.
"""

from __future__ import annotations

import logging
from inspect import isawaitable
from typing import TYPE_CHECKING

import trio

from ..storage.errors import OnepenError
from ..storage.records import TurnOutcome
from .binding import Inside, current_binding, inside_turn
from .ending import as_stopped, failure, finish, refused_outcome
from .line import TurnPendingError
from .raised import ours_of
from .results import Result, result_of
from .titles import apply_pending_title
from .warm import runner_of

if TYPE_CHECKING:
    from .running import RunningTurn
    from .session import Session

logger = logging.getLogger(__name__)

_HOOK_HOLDS_REPLY_S = 0.1  # a slow observer must not slow the conversation


async def run_turn(session: Session, running: RunningTurn) -> None:
    """From the first gate to the reply."""
    if not await session.pass_first_gate(running):
        session.claim.give_back()
        return
    turn = running.turn
    session.surroundings.counters.turns_started += 1
    session.line.stream.publish("turn.started", session_id=turn.session_id, turn_id=turn.id)
    session.slot.compare(running.session_id, running.revision)
    hooks = session.hooks
    if running.created:
        await session.tell_session_start()
    if hooks.has("on_turn_start"):
        await hooks.call(
            "on_turn_start",
            session_id=turn.session_id,
            key=turn.key,
            turn_id=turn.id,
            attempt=turn.attempt,
        )
    result = await _call_agent(session, running)
    session.claim.give_back()
    if running.left:
        pending = TurnPendingError("its turn waits for a person; it goes on at the next start")
        for waiting in (running.waiting, *running.steered):
            session.line.fail_reply(waiting.turn_id, pending)
        return
    # What is still to be done behind the turn's end is done when the reply is there.
    release = running.release
    release.held = session.scribe.route.pending_title is not None or hooks.has("on_turn_end")
    outcome = await finish(session, running, result)
    session.last_turn_id = turn.id
    session.slot.seen(session.scribe.page.session_id, session.scribe.page.revision)
    session.surroundings.counters.turns_ended += 1
    try:
        if session.scribe.route.pending_title is not None:
            await _apply_pending_title(session)
        if hooks.has("on_turn_end"):
            arguments = {
                "session_id": turn.session_id,
                "key": turn.key,
                "turn_id": turn.id,
                "outcome": outcome,
            }
            async with trio.open_nursery() as nursery:
                nursery.start_soon(release.after, _HOOK_HOLDS_REPLY_S)
                await hooks.call("on_turn_end", **arguments)
                nursery.cancel_scope.cancel()
    finally:
        release.now()


async def _apply_pending_title(session: Session) -> None:
    try:
        await apply_pending_title(session.scribe)
    except OnepenError as error:
        # The turn is stored and answered; the title stays pending and is tried after the next one.
        logger.warning("%s: the pending title could not be set: %s", session.key, error)


async def _call_agent(session: Session, running: RunningTurn) -> Result:
    turn, scope = running.turn, running.scope
    limit_s = session.settings.turn_deadline_s
    turn.deadline = scope.deadline = trio.current_time() + limit_s
    running.task = trio.lowlevel.current_task()
    token = current_binding.set(session.binding)
    inside = Inside(session.line.key, session.surroundings.writer)
    inside_token = inside_turn.set(inside)
    result: Result | None = None
    agents = session.surroundings.agents
    agents.running += 1
    agents.last_key = session.line.key
    try:
        with scope:
            if running.cause is None:  # else it was interrupted before it began
                agent = running.agent = await session.slot.ready(session.info())
                returned = runner_of(agent)(turn)
                if isawaitable(returned):
                    returned = await returned
                result = result_of(returned, session.scribe.now(), said=turn.said)
    except BaseException as error:
        if (ours := ours_of(error)) is not None:
            if ours is not error:
                logger.warning("the agent of %s failed as it ended", session.key, exc_info=error)
            raise ours  # noqa: B904 - it is a part of the same error
        result = Result(failure(running, error))
        if result.outcome.cause == "agent":
            logger.warning("the agent of %s failed", session.key, exc_info=error)
    finally:
        current_binding.reset(token)
        inside_turn.reset(inside_token)
        inside.over = True
        agents.running -= 1
        turn.over = running.done = True
        running.pause.end()
        running.task = None
    if result is not None:
        return as_stopped(running, result)
    if running.cause is None:
        message = f"the turn took longer than {limit_s:g} s"
        return Result(TurnOutcome(kind="failed", error=message, cause="deadline"))
    if running.cause == "refused":
        return Result(refused_outcome(session))
    return Result(TurnOutcome(kind="interrupted", cause=running.cause))
