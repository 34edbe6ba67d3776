"""A turn's wait for people: what it asks just now, and what it holds meanwhile, which is nothing.

    running ──a question is durable──▶ resting ──nobody waits for one any more──▶ running

Keeps:
- While it rests the turn holds no slot, its deadline stands still, and storage says `waiting`.
- Whatever ends the waiting (answers, an expiry, an agent that gives up) the turn comes back the
  same way: a slot like everybody's, then one attempt further. Asking again meanwhile keeps it at
  rest.
- What is open is known here until its end is posted, so that the turn's end withdraws just that.

Coming back is a task of the session's own: no cancellation of the agent's can leave it half-way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

import trio

from ..storage.commands import AnswerQuestion, StartTurn, SuspendTurn
from ..storage.errors import InvalidContentError, OnepenError
from .mailbox import Answer

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.identity import SessionKey
    from ..storage.records import Question
    from .running import RunningTurn
    from .session import Session

logger = logging.getLogger(__name__)


@final
class Pause:
    """Of one running turn."""

    __slots__ = (
        *("_calls", "_coming_back", "_left_s", "_running", "_session", "_suspended", "_waited_for"),
        *("open", "resting", "settled"),
    )

    def __init__(self, session: Session, running: RunningTurn) -> None:
        self._session = session
        self._running = running
        self._calls = 0  # of `ask_user` that wait
        self._waited_for: dict[str, Answer[Question]] = {}
        self._suspended = False  # posted as waiting
        self._coming_back: trio.Event | None = None
        self._left_s = 0.0  # of the deadline, while it stands still
        self.resting = False
        self.open: dict[str, Question | None] = dict.fromkeys(running.waiting.asks)
        self.settled: dict[str, Question] = {}

    @property
    def undisturbed(self) -> bool:
        """Whether something may be done beside the turn."""
        return self.resting and self._coming_back is None

    # Waiting -------------------------------------------------------------------------------------

    def enter(self, question_key: str) -> tuple[Answer[Question], tuple[AnyCommand, ...]]:
        """One more call waits; what must be posted with its question. No checkpoint before that."""
        self._calls += 1
        answer = self._waited_for.setdefault(question_key, Answer())
        if self._suspended:
            return answer, ()
        self._suspended = True
        turn, scribe = self._running.turn, self._session.scribe
        # What was counted until now is stored with it: this may be the last unit of the attempt.
        suspend = SuspendTurn(turn_id=turn.id, attempt=turn.attempt, at_ms=scribe.now())
        return answer, (*turn.take_usage(), suspend)

    def refused(self, commands: tuple[AnyCommand, ...]) -> None:
        """The unit that brought the question is not stored."""
        if any(isinstance(command, SuspendTurn) for command in commands):
            self._suspended = False

    def rest(self) -> None:
        """The question is durable: hold nothing that others need."""
        running = self._running
        if self.resting or not self._calls or not self._suspended or running.done:
            return
        self._left_s = running.scope.deadline - trio.current_time()
        running.scope.deadline = running.turn.deadline = float("inf")
        self.resting = True
        self._session.claim.give_back()
        self._session.go_on()  # what does not mind a turn that waits

    def settle(self, question: Question) -> None:
        """A question has its end, durably."""
        self.settled[question.question_key] = question
        answer = self._waited_for.pop(question.question_key, None)
        if answer is not None:
            answer.give(question)

    async def leave(self) -> None:
        """A call has its answer; the last one waits until the turn runs again."""
        self._calls -= 1
        self._come_back_if_over()
        if self._coming_back is not None:
            await self._coming_back.wait()

    def give_up(self, question_key: str) -> None:
        """A call was cut off: nobody waits for its answer any more, unless another call does."""
        self._calls -= 1
        if self._running.stopped:
            return  # the turn's end withdraws what is open
        answer = self._waited_for.get(question_key)
        if answer is not None and not answer.awaited and question_key in self.open:
            del self._waited_for[question_key]
            self._session.spawn(self._withdraw, question_key)
        self._come_back_if_over()

    async def _withdraw(self, question_key: str) -> None:
        """If it is only the call that was cut off: an actor that dies leaves the question alone."""
        scribe = self._session.scribe
        await trio.lowlevel.checkpoint()
        try:
            await scribe.room()
            asked_again = question_key in self._waited_for
            if question_key in self.open and not asked_again and not self._running.stopped:
                scribe.note(withdrawing(scribe.key, (question_key,), scribe.now()))
                del self.open[question_key]
        except OnepenError as error:
            # It stays open until the turn ends.
            logger.info("%s: question %s is not withdrawn: %s", scribe.key, question_key, error)

    def end(self) -> None:
        """The turn is over: whoever still waits in it, beside its agent, waits for nobody."""
        for answer in self._waited_for.values():
            answer.fail(turn_over())

    # Coming back ---------------------------------------------------------------------------------

    def _come_back_if_over(self) -> None:
        if self._suspended and not self._calls and self._coming_back is None:
            self._coming_back = trio.Event()
            self._session.spawn(self._come_back)

    async def _come_back(self) -> None:
        try:
            await self._take_up()
        except OnepenError as error:
            logger.warning("%s: a turn can't go on: %s", self._session.key, error)
            self._running.interrupt("storage")
        finally:
            coming_back, self._coming_back = self._coming_back, None
            assert coming_back is not None
            coming_back.set()

    async def _take_up(self) -> None:
        session, running = self._session, self._running
        turn, scribe = running.turn, session.scribe
        await trio.lowlevel.checkpoint()  # an actor that dies goes no further
        await session.wait_beside()
        if not await session.claim.wait(running.waiting.source or scribe.source):
            return  # the turn has ended
        await scribe.room()
        if running.stopped:
            return
        if self._calls:
            session.claim.give_back()  # it has asked again
            return
        turn.attempt += 1
        running.waiting = running.waiting._replace(attempt=turn.attempt)
        start = StartTurn(
            turn_id=turn.id, session_id=turn.session_id, attempt=turn.attempt, at_ms=scribe.now()
        )
        scribe.note((start,))
        self._suspended = False
        if self.resting:
            self.resting = False
            running.scope.deadline = turn.deadline = trio.current_time() + self._left_s


def turn_over() -> InvalidContentError:
    """What is said to whoever goes on with a turn that has ended."""
    return InvalidContentError("turn", "it is over", hint="use a turn only until its agent returns")


def withdrawing(
    key: SessionKey, question_keys: tuple[str, ...], now_ms: int
) -> tuple[AnswerQuestion, ...]:
    """What was asked is asked no more."""
    return tuple(
        AnswerQuestion(key=key, question_key=one, state="withdrawn", at_ms=now_ms)
        for one in question_keys
    )
