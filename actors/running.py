"""A turn that holds its session: what it was started with, and what may still happen to it.

Keeps: the first cause of an interrupt stands; an agent that goes on although it was told to stop is
reported once, with its stack; the reply leaves when it is durable and nobody holds it back.
"""

from __future__ import annotations

import logging
import traceback
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, final

import trio

from . import questions
from .line import SHUTDOWN
from .mailbox import Answer
from .outbox import distinct, targets_of
from .pausing import Pause
from .raised import is_theirs
from .replies import steered_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.commands import AnyCommand
    from ..storage.identity import SessionId, TurnId, Uid
    from ..storage.records import Draft
    from .line import Line, Waiting
    from .outbox import Target
    from .replies import Reply
    from .session import Session
    from .tickets import Ticket
    from .turn import Turn

logger = logging.getLogger(__name__)


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
                self._tell_end(waiting.turn_id, self._reply)
                self._line.give_reply(self._reply, waiting.turn_id)

    def _tell_end(self, turn_id: TurnId, reply: Reply) -> None:
        """Those who follow a message that was steered in: its own turn is over with this one."""
        self._line.stream.publish(
            "turn.ended",
            session_id=reply.session_id,
            turn_id=turn_id,
            text=reply.text,
            outcome=steered_into(reply.turn_id),
        )

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
            "withdrawn", session_id=turn.session_id, turn_id=turn.id, uid=uid
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
