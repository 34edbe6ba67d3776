"""Running a turn, from its first gate to its reply.

Keeps:
- The agent is called only when the user's message is durable (contract A1), and the reply leaves
  only when the turn's end is.
- A turn ends once, with an outcome, whatever the agent did: returned, raised, was interrupted, took
  too long, returned something that can't be stored, or had a unit refused.
- Its rows and its end are one unit; before the answer every tool call has a result (A10). So are
  the replies that are to be sent, and the end of what it left open: effects, questions.
- While it waits for a person it holds no slot, and its deadline stands still.
"""

from __future__ import annotations

import logging
import traceback
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, final

import msgspec
import trio

from ..storage.commands import EndTurn
from ..storage.errors import InvalidContentError, InvariantError, OnepenError, StorageError
from ..storage.records import Draft, TurnOutcome
from ..storage.units import Durable
from . import questions
from .binding import Inside, current_binding, inside_turn
from .line import SHUTDOWN, TurnPendingError
from .mailbox import Answer
from .outbox import distinct, posting, targets_of
from .pausing import Pause, withdrawing
from .raised import causes_of, is_theirs, ours_of, said_by, sole_cause
from .replies import Reply, reply_text, storable, with_facts, with_storable_facts
from .reports import dropping, take_report, unsaved_of
from .results import Result, result_of
from .titles import apply_pending_title
from .warm import runner_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.commands import AnyCommand
    from ..storage.identity import SessionId, Uid
    from ..storage.units import Receipt
    from .line import Line, Waiting
    from .outbox import Target
    from .session import Session
    from .tickets import Ticket
    from .turn import Turn

logger = logging.getLogger(__name__)

_ENDS_TRIED_MAX = 8
_HOOK_HOLDS_REPLY_S = 0.1  # a slow observer must not slow the conversation


@final
class Release:
    """The output gate of a turn: the reply leaves when it is durable, and not held back."""

    __slots__ = ("_line", "_reply", "_steered", "held")

    def __init__(self, line: Line, steered: list[Waiting]) -> None:
        self._line = line
        self._steered = steered
        self._reply: Reply | None = None
        self.held = False

    @property
    def done(self) -> bool:
        """Whether the reply has left: a promise that is made now would never be kept."""
        return self._reply is not None and not self.held

    def durable(self, reply: Reply) -> None:
        self._reply = reply
        if not self.held:
            self.now()

    def now(self) -> None:
        self.held = False
        if self._reply is not None:
            self._line.give_reply(self._reply)
            for waiting in self._steered:  # they were answered with it
                self._line.give_reply(self._reply, waiting.turn_id)

    async def after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.now()


@final
class RunningTurn:
    """A turn that holds the session: what it was started with, and what may still happen to it."""

    __slots__ = (
        "_session",
        "accepted",
        "agent",
        "before",
        "cause",
        "created",
        "done",
        "drafts",
        "left",
        "pause",
        "release",
        "reported",
        "revision",
        "scope",
        "session_id",
        "steered",
        "steering",
        "stopped_s",
        "task",
        "ticket",
        "turn",
        "waiting",
    )

    def __init__(
        self,
        session: Session,
        waiting: Waiting,
        drafts: tuple[Draft, ...],
        before: tuple[AnyCommand, ...],
    ) -> None:
        self._session = session
        self.waiting = waiting
        self.steering: list[Waiting] = []  # messages for this turn that wait for a gate
        self.steered: list[Waiting] = []  # those that have found one
        self.release = Release(session.line, self.steered)
        self.drafts = drafts
        self.before = before
        self.accepted: Answer[None] = Answer()
        self.scope = trio.CancelScope()
        self.cause: str | None = None
        self.stopped_s = float("inf")
        self.agent: Any = None
        self.task: trio.lowlevel.Task | None = None
        self.done = False  # the agent is no longer running
        self.reported = False
        self.created = False
        self.revision = 0
        self.pause = Pause(session, self)
        self.left = False  # it is not ended: the answer to its question begins it anew
        self.ticket: Ticket
        self.turn: Turn
        self.session_id: SessionId

    def interrupt(self, cause: str) -> bool:
        """Stop the agent at its next checkpoint; the first cause stands."""
        if self.done:
            return False
        if self.cause is None:
            self.cause = cause
            self.left = self.pause.resting and cause == SHUTDOWN
            self.stopped_s = trio.current_time()
            self.scope.cancel()
            if callable(getattr(self.agent, "interrupt", None)):
                self._session.spawn(self._tell_agent)
        return True

    async def _tell_agent(self) -> None:
        try:
            result = self.agent.interrupt()
            if isawaitable(result):
                await result
        except BaseException as error:
            if not is_theirs(error):
                raise
            logger.error("an agent's interrupt() failed", exc_info=error)

    @property
    def stopped(self) -> bool:
        """Whether its agent was told to end, or has."""
        return self.done or self.cause is not None or self.scope.cancel_called

    # What the turn asks of its host ---------------------------------------------------------------

    @property
    def targets(self) -> tuple[Target, ...]:
        """Who is answered: those who spoke, and those who joined them."""
        said = [one for waiting in (self.waiting, *self.steered) for one in waiting.said]
        return distinct((*self.waiting.targets, *targets_of(said)))

    def show_delta(self, uid: Uid, piece: str) -> None:
        interval_s = self._session.settings.delta_interval_s
        stream, turn = self._session.line.stream, self.turn
        if stream.delta(turn.session_id, turn.id, uid, piece, interval_s):
            self._session.spawn(stream.keep_flushing, interval_s)

    def withdraw(self, uid: Uid) -> None:
        turn = self.turn
        self._session.line.stream.publish(
            "message.withdrawn", session_id=turn.session_id, turn_id=turn.id, uid=uid
        )

    async def ask(
        self, text: str, choices: Sequence[str], timeout_s: float | None, name: str | None
    ) -> str:
        return await questions.ask(self._session, self, text, choices, timeout_s, name)

    def report_if_stuck(self, key: str, now_s: float, grace_s: float) -> bool:
        """Say once, with its stack, that an agent goes on although it was told to stop.

        A task on this loop can't be abandoned; whoever wrote it must see where it is.
        """
        overdue = min(self.scope.deadline, self.stopped_s) + grace_s <= now_s
        if self.done or self.reported or not overdue or self.task is None:
            return False
        self.reported = True
        frames = traceback.StackSummary.extract(self.task.iter_await_frames())
        logger.error(
            "the agent of %s does not end although its turn was stopped (%s):\n%s",
            key,
            self.cause or "deadline",
            "".join(frames.format()),
        )
        return True


# One turn ------------------------------------------------------------------------------------


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
    outcome = await _finish(session, running, result)
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
    inside = Inside(session.line.key)
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
        result = Result(_failure(running, error))
        if result.outcome.cause == "agent":
            logger.warning("the agent of %s failed", session.key, exc_info=error)
    finally:
        current_binding.reset(token)
        inside_turn.reset(inside_token)
        inside.over = True
        agents.running -= 1
        turn.over = running.done = True
        running.task = None
    if result is not None:
        return _as_stopped(running, result)
    if running.cause is None:
        message = f"the turn took longer than {limit_s:g} s"
        return Result(TurnOutcome(kind="failed", error=message, cause="deadline"))
    if running.cause == "refused":
        return Result(_refused_outcome(session))
    return Result(TurnOutcome(kind="interrupted", cause=running.cause))


def _as_stopped(running: RunningTurn, result: Result) -> Result:
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


def _failure(running: RunningTurn, error: BaseException) -> TurnOutcome:
    if running.cause == "refused" or any(isinstance(e, StorageError) for e in causes_of(error)):
        return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="storage")
    if isinstance(error := sole_cause(error), InvalidContentError):
        return _unstorable(error)
    return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="agent")


def _unstorable(error: OnepenError) -> TurnOutcome:
    """The agent gave something that can't be stored; that is no word of its model's."""
    detail = {"refused": getattr(error, "field", "")}
    return TurnOutcome(kind="failed", error=storable(said_by(error)), cause="agent", detail=detail)


def _refused_outcome(session: Session) -> TurnOutcome:
    refused = session.scribe.broken
    reason = refused.reason if refused is not None else "unknown"
    return TurnOutcome(
        kind="failed", error=f"storage refused what the turn wrote: {reason}", cause="storage"
    )


# Its end -------------------------------------------------------------------------------------


async def _finish(session: Session, running: RunningTurn, result: Result) -> TurnOutcome:
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
            refused = _refused_outcome(session)
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
