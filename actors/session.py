"""A session actor: one per key, it owns the transcript, the warm agent and the turns of its key.

| message   | effect                                                  | answered | durable      |
| --------- | ------------------------------------------------------- | -------- | ------------ |
| `Submit`  | idle: accept, start and user row in one unit; or queued | at once  | as it says   |
| `Interrupt` | that turn is stopped, or taken back | at once | when its reply is there |
| `Settle`  | a question has its answer, and its turn goes on | when done | when answered |
| `Operate` | done when no turn is in the way; some interrupt it      | when done | when answered |
| (a slot)  | the next waiting message starts its turn                |          |              |

Keeps:
- One thing at a time: a turn, or an operation. Operations go before waiting messages.
- A turn's agent runs under a cancel scope; writes belong to the actor, so an interrupt never loses
  or tears one.
- Durability is waited for only at the gates: before the agent is first called, before a rotation
  takes hold, before a reply is released.
- A refused unit cuts the tail there: the actor reloads, and the turn is stored as failed at the
  true base. A unit of a predecessor (`stale_incarnation`) ends the actor at once.
- A turn that waits for a person keeps its place: messages wait behind it, and what does not mind it
  is done beside it. One that an earlier actor left waiting is *parked* until it is answered.

Never asks another actor. Everything that involves two goes through the Directory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio

from ..storage.commands import OpenTurn
from ..storage.errors import BrokenChainError, InvariantError, OnepenError, StaleError
from ..storage.records import TurnOutcome
from ..storage.units import Durable, Refused
from . import questions, reception, recovery, repeats, turning
from .binding import Binding
from .compression import SummaryRaised
from .effects import fates_of
from .exchanges import closing_results, open_calls
from .line import (
    SHUTDOWN,
    Interrupt,
    Operate,
    SessionBusyError,
    SessionCrashedError,
    Settle,
    Submit,
)
from .mailbox import Answer, MailboxClosedError, run_actor
from .messages import user_draft
from .recovery import Parked, taking
from .repeats import Accepting
from .running import RunningTurn
from .scribe import Scribe, ScribeEvents
from .slots import Claim
from .turn import Turn
from .warm import AgentSlot, SessionInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..storage.commands import AnyCommand, PostDelivery
    from ..storage.identity import Incarnation, TurnId
    from ..storage.records import Draft, Message, Question
    from ..storage.units import Receipt
    from .line import Letter, Line, Surroundings, Waiting
    from .page import LazyPage, Page

logger = logging.getLogger(__name__)

_RESTARTS_OF_A_UNIT_MAX = 8


class _Operation(NamedTuple):
    operate: Operate[Any]
    answer: Answer[object] | None


@final
class Session(ScribeEvents):
    """The actor. `line` outlives it."""

    __slots__ = (  # there are thousands of them
        "_beside",
        "_debouncing",
        "_ending",
        "_errands",
        "_handling",
        "_lazy",
        "_left",
        "_nursery",
        "_operations",
        "_ready",
        "_working",
        "accepting",
        "binding",
        "claim",
        "crash",
        "doubtful",
        "hooks",
        "last_turn_id",
        "line",
        "parked",
        "scribe",
        "settings",
        "slot",
        "stopping",
        "surroundings",
        "turn",
        "waiting",
    )

    def __init__(
        self,
        line: Line,
        incarnation: Incarnation,
        surroundings: Surroundings,
        crash: BaseException | None = None,
        lazy: LazyPage | None = None,
    ) -> None:
        self.line = line
        self._lazy = lazy
        self.surroundings = surroundings
        self.settings = surroundings.settings
        self.hooks = surroundings.hooks
        self.slot = AgentSlot(surroundings.agents)
        self.scribe = Scribe(
            line.key,
            line.source,
            incarnation,
            surroundings.writer,
            surroundings.clock,
            surroundings.ids,
            surroundings.settings,
            self,
        )
        self.binding: Binding
        self.crash = crash  # why this one was started in another's place
        self.turn: RunningTurn | None = None
        # Lists: they are short, and an empty one is a tenth of an empty deque.
        self.waiting: list[Waiting] = []
        self.accepting = Accepting()
        self.parked: dict[TurnId, Parked] = {}  # turns that an earlier actor left waiting
        self._ending: list[tuple[TurnId, TurnOutcome]] = []  # turns nobody runs that are to end
        self.stopping = False
        self.doubtful = False  # an operation failed: memory must be compared with storage first
        self.last_turn_id: TurnId | None = None  # of the turn that the agent has last run
        self._ready = False
        self._handling = False  # a message was read and is not dealt with yet
        self._left = False  # the actor is gone; receipts may still come
        self._operations: list[_Operation] = []
        self._working = False
        self._errands = 0  # tasks that end or resume turns, beside the loop
        self._beside: trio.Event | None = None  # an operation runs beside a turn that waits
        self._debouncing: trio.CancelScope | None = None
        self.claim = Claim(surroundings.slots, self.go_on)
        self._nursery: trio.Nursery

    # The loop ----------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        return self.line.key

    @property
    def ready(self) -> bool:
        """Whether it has taken over what the key's last actor left."""
        return self._ready

    async def run(self) -> None:
        """Until the mailbox is closed and read, or something goes wrong."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await run_actor(self, self.line.mailbox, self._gone)
            nursery.cancel_scope.cancel()

    def _gone(self) -> Exception:
        """What is said to those whom this actor did not answer."""
        if self.stopping:
            return MailboxClosedError("the actor has left")
        return SessionCrashedError(self.key, RuntimeError("the actor ended"))

    async def on_start(self) -> None:
        loaded = await self.scribe.open()
        self.binding = Binding(self.line.key, self.scribe.page.session_id)
        self.line.stream.begin(self.scribe.incarnation)
        self.surroundings.counters.activated += 1
        if self._lazy is not None and not self.scribe.page.stored:
            self.scribe.page.recall(self._lazy)
        await recovery.recover(self, loaded)
        self._ready = True
        self.go_on()

    async def on_message(self, message: Letter, answer: Answer[object] | None) -> None:
        if self.stopping:
            return  # answered when the actor is gone: then the Directory sends it again
        self._handling = True
        try:
            if isinstance(message, Interrupt):
                done = self.interrupt(message.cause, message.turn_id)
                done = done or self.take_back(message.turn_id, message.cause)
                if answer is not None:
                    answer.give(done)
            elif isinstance(message, Settle):
                await questions.settle(self, message, answer)
            elif isinstance(message, Submit) and (
                message.repeatable
                and (repeat := await repeats.follow_repeat(self, message)) is not None
            ):
                if answer is not None:
                    answer.give(repeat)
            elif isinstance(message, Submit):
                await reception.prepare(self, message)
                # Room first: between it and posting there is no checkpoint.
                await self.scribe.writer.room()
                accepted = reception.accept(self, message)
                if answer is not None:
                    answer.give(accepted)
            else:
                self._operate(_Operation(message, answer))
        except OnepenError as error:
            if answer is None or isinstance(error, InvariantError):
                raise
            answer.fail(error)
        finally:
            self._handling = False

    async def on_stop(self) -> None:
        self._left = True
        if self.turn is not None and isinstance(self.turn.ticket.receipt, Refused):
            self._give_up_start(self.turn)
        self.claim.give_back()
        with trio.CancelScope(shield=True):
            await self.slot.close_quietly()

    def spawn(self, function: Callable[..., Any], *arguments: Any) -> None:
        """A task of this actor, in a context that belongs to no turn; none once it is gone."""
        if self._left:
            return
        self.surroundings.context.run(self._nursery.start_soon, function, *arguments)

    # Inbound messages --------------------------------------------------------------------------

    def wait_in_line(self, waiting: Waiting) -> None:
        """A turn that is stored already, and shall go on."""
        self.waiting.append(waiting)
        self.go_on()

    @property
    def may_start(self) -> bool:
        """Whether a turn could start at once, but for a slot."""
        return (
            not self._working
            and not self._operations
            and not self.waiting
            and not self.parked
            and not self._ending
            and not self.stopping
            and not self.doubtful
            and self.scribe.broken is None
        )

    def replace_waiting(self, turn_id: TurnId, change: Callable[[Waiting], Waiting]) -> None:
        """A turn that still waits, changed."""
        for index, waiting in enumerate(self.waiting):
            if waiting.turn_id == turn_id:
                self.waiting[index] = change(waiting)

    # Starting turns ----------------------------------------------------------------------------

    def start(self, waiting: Waiting, before: tuple[AnyCommand, ...]) -> RunningTurn:
        """Post a turn's first unit, with a slot in hand; with no checkpoint before it."""
        running = RunningTurn(self, waiting, self._user_rows(waiting), before)
        self._post_start(running)
        self.turn = running
        self._working = True
        self.spawn(self._work)
        return running

    def _user_rows(self, waiting: Waiting) -> tuple[Draft, ...]:
        if waiting.attempt > 1:
            # Its message is in the transcript already; what its last attempt left open is not.
            calls = open_calls(m for m in self.scribe.page.messages if m.turn_id == waiting.turn_id)
            why = "the process died before there was one"
            now, fates = self.scribe.now(), fates_of(waiting.effects)
            return closing_results(calls.values(), why, self.scribe.fresh_uid, now, fates)
        now = self.scribe.now()
        return tuple(user_draft(body, self.scribe.fresh_uid(), now) for body in waiting.bodies)

    def _post_start(self, running: RunningTurn) -> None:
        waiting = running.waiting
        page = self.scribe.page
        if not page.stored:
            # The message that makes the row says where the conversation comes from.
            self.scribe.source = waiting.source or self.scribe.source
            page.user = page.user or waiting.bodies[0].user

        def received(receipt: Receipt) -> None:
            # The submitter is told here, without a detour through the turn's task.
            if isinstance(receipt, Durable):
                running.accepted.give(None)
            elif isinstance(receipt, Refused) and self._left:
                self._give_up_start(running)
            elif isinstance(receipt, Refused) and receipt.reason != "stale_revision":
                for said in waiting.said:
                    self.accepting.forget(said.source, said.inbound_id)
                running.accepted.fail(receipt.error())

        running.ticket, running.created = self.scribe.start(
            running.drafts, running.before, waiting.turn_id, waiting.attempt, received
        )
        running.session_id = self.scribe.page.session_id
        running.revision = self.scribe.page.revision - bool(running.drafts)
        if self.scribe.page.session_id != self.binding.session_id:
            self.binding = Binding(self.line.key, self.scribe.page.session_id)
        useless_max = self.settings.useless_compressions_max
        running.turn = Turn(self.scribe, self.binding, waiting, useless_max, running)

    def _give_up_start(self, running: RunningTurn) -> None:
        """Its first unit was refused, and who would have posted it again is gone."""
        error = SessionCrashedError(self.key, RuntimeError("its message is not stored"))
        running.accepted.fail(error)
        if any(isinstance(command, OpenTurn) for command in running.before):
            # One that had waited is stored, and the next actor begins with it.
            self.line.fail_reply(running.waiting.turn_id, error)

    async def pass_first_gate(self, running: RunningTurn) -> bool:
        """Until the turn's first rows are durable; false if they were refused for good."""
        for _ in range(_RESTARTS_OF_A_UNIT_MAX):
            reply = self.line.reply_of(running.waiting.turn_id)
            receipt = await self.scribe.receipt_of(running.ticket, running.accepted, reply)
            if isinstance(receipt, Durable):
                return True
            await self.reload()
            if receipt.reason == "stale_revision":
                # Somebody else wrote to this session: its agent is rebuilt, and the turn begins
                # again on what is stored.
                await self.scribe.room()
                self._post_start(running)
                continue
            error = receipt.error()
            running.accepted.fail(error)
            self.line.fail_reply(running.waiting.turn_id, error)
            await recovery.drop_queued(self, running.waiting, error)
            return False
        raise InvariantError(f"the first unit of a turn of {self.key} is refused again and again")

    # Working -----------------------------------------------------------------------------------

    def go_on(self) -> None:
        """See to it that what is there to do is done."""
        if self._left:
            return
        if self._working:
            if self._beside is None and self._next_beside() is not None:
                self._beside = trio.Event()
                self.spawn(self._work_beside)
            return
        if self._ending or self._next_operation() is not None or self.claim.held:
            self._working = True
            self.spawn(self._work)
        elif self.waiting and self._may_begin and self.claim.idle:
            if self.waiting[0].not_before_s > trio.current_time():
                self._debounce()
                return
            self.claim.ask(self.waiting[0].source or self.scribe.source)

    @property
    def _may_begin(self) -> bool:
        return not self.parked and not self.stopping

    def _next_operation(self) -> _Operation | None:
        """The next operation that may run: behind a parked turn those wait that would mind it."""
        self._drop_unwanted()
        for one in self._operations:
            if not self.parked or one.operate.beside or one.operate.interrupts:
                return one
        return None

    def _next_beside(self) -> _Operation | None:
        """The next operation that may run beside the turn, which waits for a person."""
        if self.turn is None or not self.turn.pause.undisturbed:
            return None
        self._drop_unwanted()
        return next((one for one in self._operations if one.operate.beside), None)

    async def _work_beside(self) -> None:
        beside = self._beside
        assert beside is not None
        try:
            while (operation := self._next_beside()) is not None:
                self._operations.remove(operation)
                await self._run_operation(operation)
        finally:
            self._beside = None
            beside.set()

    async def wait_beside(self) -> None:
        """Until nothing is done beside the turn."""
        while self._beside is not None:
            await self._beside.wait()

    def _debounce(self) -> None:
        """Go on when the turn that is next by now may start; until then more may come."""
        until_s = self.waiting[0].not_before_s
        if self._debouncing is None:
            self._debouncing = trio.CancelScope(deadline=until_s)
            self.spawn(self._go_on_later, self._debouncing)
        else:
            self._debouncing.deadline = until_s

    async def _go_on_later(self, quiet: trio.CancelScope) -> None:
        with quiet:
            await trio.sleep_forever()
        self._debouncing = None
        self.go_on()

    async def _work(self) -> None:
        """Turns and operations, one at a time, until there is nothing to do."""
        while not self._left:
            if self.turn is not None:
                running = self.turn
                await turning.run_turn(self, running)
                await self.wait_beside()
                # What was to be steered into it, and found no gate, is next.
                self.waiting[:0] = running.steering
                self.turn = None
            elif self._ending:
                await recovery.end_begun(self, *self._ending.pop(0))
            elif not self.stopping and (operation := self._next_operation()) is not None:
                # Behind one that ends the actor none is begun: it is sent again, untouched.
                self._operations.remove(operation)
                await self._run_operation(operation)
            elif self.claim.held:
                if not self._may_begin or not await self._start_next():
                    self.claim.give_back()
            else:
                break
        # No checkpoint since the last look.
        self._working = False
        if self.waiting and not self.stopping:
            self.go_on()
        else:
            self.line.stream.rest()
            self.surroundings.on_idle(self.line.key)

    async def _start_next(self) -> bool:
        """The next waiting message gets its turn; false if there is none after all."""
        if self.scribe.broken is not None or self.doubtful:
            await self.reload()
        while self.waiting:
            waiting = self.waiting[0]
            if waiting.ticket is not None:
                reply = self.line.reply_of(waiting.turn_id)
                receipt = await self.scribe.receipt_of(waiting.ticket, reply)
                if isinstance(receipt, Refused):
                    # A message that was to join others is out already, and they go on without it.
                    if waiting in self.waiting:
                        self.waiting.remove(waiting)
                        self.line.fail_reply(waiting.turn_id, receipt.error())
                    continue
            await self.scribe.room()
            if self._next_operation() is not None or not self._may_begin:
                break
            if not self.waiting or self.waiting[0] is not waiting:
                continue  # it was taken back, or got one more message meanwhile
            if waiting.not_before_s > trio.current_time():
                break
            del self.waiting[0]
            if waiting.attempt > 1 and not recovery.is_here(self, waiting.turn_id):
                outcome = TurnOutcome(kind="interrupted", cause="moved")
                self._ending.append((waiting.turn_id, outcome))
                break
            before = taking(waiting) if waiting.attempt == 1 else ()
            running = RunningTurn(self, waiting, self._user_rows(waiting), before)
            self._post_start(running)
            self.turn = running  # the slot is the turn's now
            return True
        return False

    async def perform(self, operate: Operate[Any]) -> None:
        """Do this for nobody in particular. Nothing is read until it is done.

        Behind something else it is not waited for: that may be what ends this actor.
        """
        alone = not self._working and not self._operations and not self._ending
        answer: Answer[object] | None = Answer() if alone else None
        self._operate(_Operation(operate, answer))
        if answer is not None:
            await answer.wait()

    def _operate(self, operation: _Operation) -> None:
        self._drop_unwanted()
        # One that interrupts waits for nobody, so there are never many of them.
        full = len(self._operations) >= self.settings.mailbox_size_max
        if full and not operation.operate.interrupts:
            raise SessionBusyError(self.key, 1.0, why="too many operations wait for its turn")
        self._operations.append(operation)
        if operation.operate.interrupts:
            self._end_resumed(operation.operate.name)
            self.interrupt(operation.operate.name)
        self.go_on()

    def _drop_unwanted(self) -> None:
        """What waits for the running turn is not done when whoever asked for it has left."""
        for one in list(self._operations):
            answer = one.answer
            if answer is not None and not answer.awaited and not one.operate.interrupts:
                self._operations.remove(one)
                answer.fail(SessionBusyError(self.key, 0.0, why="nobody has waited for it"))

    def _end_resumed(self, cause: str) -> None:
        """What has begun ends with the session it is in, also while it waits for a slot."""
        for waiting in [one for one in self.waiting if one.attempt > 1 and cause != SHUTDOWN]:
            self.waiting.remove(waiting)
            outcome = TurnOutcome(kind="interrupted", cause=cause)
            self._ending.append((waiting.turn_id, outcome))

    async def _run_operation(self, operation: _Operation) -> None:
        answer = operation.answer
        try:
            if self.scribe.broken is not None or self.doubtful:
                await self.reload()
            result = await self._try_operation(operation.operate)
        except SummaryRaised as raised:
            assert answer is not None  # whoever gave the function waits for what became of it
            answer.fail(raised.error)
        except OnepenError as error:
            if isinstance(error, InvariantError):
                raise
            self.doubtful = True  # perhaps it failed behind its commit
            if answer is None:
                logger.error("%s: %s failed: %s", self.key, operation.operate.name, error)
            else:
                answer.fail(error)
        else:
            if answer is not None:
                answer.give(result)

    async def _try_operation(self, operate: Operate[Any]) -> object:
        """Once more if somebody else has written to the session since it was loaded."""
        revision = self.scribe.page.revision
        try:
            return await operate.run(self)
        except (StaleError, BrokenChainError):
            await self.reload()
            if self.scribe.page.revision == revision:
                raise
            return await operate.run(self)

    # What may come at any time -------------------------------------------------------------------

    def interrupt(self, cause: str, turn_id: TurnId | None = None) -> bool:
        """Stop the running turn, or a parked one; true if there was one (of this id)."""
        running, stopped = self.turn, False
        for parked in list(self.parked.values()):
            if turn_id in (None, parked.turn.id) and cause != SHUTDOWN:
                del self.parked[parked.turn.id]
                outcome = TurnOutcome(kind="interrupted", cause=cause)
                self._ending.append((parked.turn.id, outcome))
                stopped = True
        if stopped:
            self.go_on()
        if running is None or turn_id not in (None, running.waiting.turn_id):
            return stopped
        return running.interrupt(cause) or stopped

    def take_back(self, turn_id: TurnId, cause: str) -> bool:
        """A message that still waits gets no turn; true if there was one of this id."""
        steering = [] if self.turn is None else self.turn.steering
        for line in (self.waiting, steering):
            waiting = next((one for one in line if one.turn_id == turn_id), None)
            if waiting is not None:
                line.remove(waiting)
                break
        else:
            return False
        outcome = TurnOutcome(kind="interrupted", cause=cause)
        self.errand(recovery.end_waiting, self, waiting, outcome)
        self.go_on()  # whoever is next need not wait for what it was waiting for
        return True

    def errand(self, run: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Something that must be done before this actor may be forgotten."""
        self._errands += 1
        self.spawn(self._run_errand, run, *arguments)

    async def _run_errand(self, run: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        await run(*arguments)
        self._errands -= 1

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost by forgetting this actor."""
        return (
            self._ready
            and not self.stopping
            and not self._handling
            and not self._working
            and self.claim.idle
            and not self.waiting
            and not self._ending
            and not (self.parked and self.line.replies)
            and not self._errands
            and not self._operations
            and not len(self.line.mailbox)
            and self.scribe.settled
            and not self.line.stream.watched
        )

    @property
    def lazy(self) -> LazyPage | None:
        """What only memory knows of a session that has no row yet, if there is anything."""
        return self.scribe.page.lazy if self._ready else None

    @property
    def size_bytes(self) -> int:
        """Of the transcript and the events in memory; nothing before it is loaded."""
        return self.scribe.page.size_bytes + self.line.stream.size_bytes if self._ready else 0

    def info(self) -> SessionInfo:
        page = self.scribe.page
        return SessionInfo(self.line.key, self.scribe.source, page.user, page.session_id)

    async def reload(self) -> None:
        """Look at what is stored; memory follows."""
        broken = self.scribe.broken
        await self.scribe.reload()
        self.doubtful = False
        self.surroundings.counters.reloads += 1
        if broken is not None and broken.reason == "broken_chain":
            self.slot.distrust()  # somebody wrote in the middle of a turn
        self.follow_page()
        self.slot.compare(self.scribe.page.session_id, self.scribe.page.revision)

    def follow_page(self) -> None:
        """The binding of what runs names the session that the scribe writes to."""
        session_id = self.scribe.page.session_id
        if self.turn is None and session_id != self.binding.session_id:
            # What an earlier turn has left running stays with that turn's session.
            self.binding = Binding(self.line.key, session_id)
        self.binding.session_id = session_id

    # From the scribe: on the loop's own stack ----------------------------------------------------

    def on_committed(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.line.stream.publish("message.committed", message=message)

    def on_broken(self, refused: Refused, messages: Sequence[Message]) -> None:
        logger.error("a unit of %s was refused: %s (%s)", self.key, refused.reason, refused.what)
        for message in messages:
            self.line.stream.publish("withdrawn", message=message)
        if self._left:
            return
        if refused.reason == "stale_incarnation":
            self._nursery.start_soon(self._stop_as_predecessor, refused)
        elif self.turn is not None:
            self.turn.interrupt("refused")

    def on_posted(self, deliveries: Sequence[PostDelivery]) -> None:
        self.surroundings.courier.posted(deliveries)

    def on_asked(self, question: Question) -> None:
        """A question is durable: it may be shown, and it may expire."""
        self.line.stream.publish(
            "question.asked",
            session_id=self.scribe.page.session_id,
            turn_id=question.turn_id,
            text=question.question,
            question=question,
        )
        self.surroundings.bell.ring()

    def on_settled(self, question: Question) -> None:
        """A question has its end, durably: who waits for it goes on."""
        turn_id = question.turn_id
        self.line.stream.publish(
            "question.ended",
            session_id=self.scribe.page.session_id,
            turn_id=turn_id,
            text=question.answer,
            question=question,
        )
        if self.turn is not None and turn_id == self._turn_id:
            self.turn.pause.settle(question)
        parked = self.parked.get(turn_id)
        if parked is not None:
            parked.asks.discard(question.question_key)
            if not parked.asks:
                self.errand(recovery.unpark, self, parked)

    async def _stop_as_predecessor(self, refused: Refused) -> None:
        raise refused.error()

    def on_moved(self, page: Page) -> None:
        parent_id = self.binding.session_id
        self.binding.session_id = page.session_id  # of tasks from before it, too: contract C2
        self.surroundings.counters.rotations += 1
        self.line.stream.publish(
            "rotated", session_id=page.session_id, turn_id=self._turn_id, text=parent_id
        )
        if self.hooks.has("on_rotation"):
            self.spawn(self._tell_rotation, parent_id, page.session_id)

    async def tell_session_start(self) -> None:
        """The session has a row now."""
        page = self.scribe.page
        await self.hooks.call(
            "on_session_start",
            session_id=page.session_id,
            key=self.key,
            source=self.scribe.source,
            user=page.user,
        )

    @property
    def _turn_id(self) -> TurnId | None:
        return None if self.turn is None else self.turn.waiting.turn_id

    async def _tell_rotation(self, parent_id: str, child_id: str) -> None:
        await self.hooks.call(
            "on_rotation", key=self.line.key, parent_id=parent_id, child_id=child_id
        )
