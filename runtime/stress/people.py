"""Those who talk: they send, send again, overtake themselves, go away, interrupt and move about.

Keeps: what was not acknowledged is sent again under the same id until it is; a person begins the
next step behind the acknowledgement of the last, so that there is an order to be kept. Everything
that is done is a step of the plan; answers to questions come when somebody is asked.

Must never tell the runtime anything that a gateway would not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import trio

from .link import LostError
from .script import chance, inbound_id_of, step_of, text_of
from .wire import Accepted, Answer, Cancel, Cancelled, Do, Done, Interrupt, Refused, Replied, Send

if TYPE_CHECKING:
    import random

    from .figures import Figures
    from .ledger import Ledger
    from .link import Answered, Call, Link
    from .plan import Plan
    from .script import Message, Place, Step
    from .wire import Shown

_AGAIN_S = 0.05
# What callers are told to send again, or to wait for.
_PASSING = {
    "SessionBusyError",
    "RuntimeClosedError",
    "TurnPendingError",
    "StorageUnavailableError",
    "SessionCrashedError",
    "WriterClosedError",
    "OutcomeUnknownError",
}
# What an operation may come to where others are at the same conversation.
_PLAIN = {
    "NoGainError",
    "MissingError",
    "StaleError",
    "RouteConflictError",
    "SessionEndedError",
    "ConflictError",
    "AmbiguousError",
}


@final
class People:
    """Everybody who talks to the runtime under test."""

    def __init__(
        self, plan: Plan, link: Link, ledger: Ledger, figures: Figures, first: dict[int, int]
    ) -> None:
        self._figures = figures
        self._plan = plan
        self._link = link
        self._ledger = ledger
        self._first = first
        self.calm = trio.Event()
        self.beside: trio.Nursery | None = None
        """Where answers and cancels live: somebody may be asked when nobody talks any more."""
        self.talking = 0

    def calm_down(self) -> None:
        """Nobody begins anything new; what is begun is brought to an end."""
        self.calm.set()

    async def run(self) -> None:
        """Until everybody has calmed down and heard of everything they wait for."""
        async with trio.open_nursery() as nursery:
            for conversation in range(self._plan.sessions):
                nursery.start_soon(self._talk, conversation)

    async def _talk(self, conversation: int) -> None:
        number, steps = self._first.get(conversation, 0), 0
        room = trio.Semaphore(self._plan.unanswered_max)
        self.talking += 1
        async with trio.open_nursery() as nursery:
            while not self.calm.is_set():
                step = step_of(self._plan, conversation, steps, number)
                steps += 1
                with trio.move_on_after(step.pause_s):
                    await self.calm.wait()
                await trio.lowlevel.checkpoint()
                if step.move is not None:
                    await self._move(conversation, step)
                    continue
                number += len(step.messages)
                acknowledged: list[trio.Event] = []
                for message in reversed(step.messages):
                    await room.acquire()
                    acknowledged.append(trio.Event())
                    place = (conversation, message.number)
                    nursery.start_soon(self._say, place, message, room, acknowledged[-1])
                for event in acknowledged:
                    await event.wait()
        self.talking -= 1

    # Messages ------------------------------------------------------------------------------------

    async def _say(
        self, place: Place, message: Message, room: trio.Semaphore, acknowledged: trio.Event
    ) -> None:
        """Until it is acknowledged, and until its end is told or left to the outbox."""
        text, tries = text_of(self._plan, place), 0
        said = self._ledger.sent(place, message.busy)
        self._ledger.actions["message"] += 1
        async with trio.open_nursery() as nursery:
            for delay_s in message.again_s:
                nursery.start_soon(self._repeat, place, message, text, acknowledged, delay_s)
            if message.interrupt_s is not None:
                nursery.start_soon(self._interrupt, place, message.interrupt_s, acknowledged)
            try:
                while True:
                    await self._link.serving()
                    tries += 1
                    cancel_s = message.cancel_s if tries == 1 else None
                    try:
                        if await self._send(place, message, text, cancel_s, acknowledged):
                            break
                    except LostError:
                        if said.accepted is not None and not message.follow:
                            break
                    self._ledger.actions["sent again"] += 1
            finally:
                acknowledged.set()
                room.release()

    async def _send(
        self,
        place: Place,
        message: Message,
        text: str,
        cancel_s: float | None,
        acknowledged: trio.Event,
    ) -> bool:
        """Once; whether its end is told. Raises `LostError`."""
        ledger, asked, repeated = self._ledger, self._ledger.now, False
        call = self._link.ask(lambda n: Send(n, *place, message.busy, text))
        if cancel_s is not None and self.beside is not None:
            self.beside.start_soon(self._cancel, call, cancel_s)
        try:
            line = await self._first_line(call, place)
            if isinstance(line, Accepted):
                self._figures.accepted(line.seconds)
                ledger.accepted(place, line, asked)
                acknowledged.set()
                repeated = line.repeated
                if line.disposition == "rejected":
                    return True
                line = await call.next()
        finally:
            self._link.over(call)
        if isinstance(line, Replied):
            if not repeated:  # it may have waited for nothing
                self._figures.replied(line.seconds)
            ledger.replied(place, line)
            return True
        if isinstance(line, Cancelled):
            return False
        assert isinstance(line, Refused), line
        return await self._refused(line, inbound_id_of(place), follow=message.follow)

    async def _first_line(self, call: Call, place: Place) -> Answered:
        """What it was answered; how long that takes has a limit."""
        with trio.move_on_after(self._plan.request_s):
            return await call.next()
        words = f"{inbound_id_of(place)}: nothing in {self._plan.request_s:g} s"
        self._ledger.note("requests end", words)
        return await call.next()

    async def _refused(self, line: Refused, who: str, *, follow: bool = True) -> bool:
        """Whether there is no use in sending it again."""
        self._ledger.refusals[line.error] += 1
        if not line.typed or line.error not in _PASSING:
            self._ledger.note("errors", f"{who}: {line.error}: {line.words}")
            return True
        if line.error == "TurnPendingError" and not follow:
            return True
        await trio.sleep(max(line.retry_s, _AGAIN_S))
        return False

    async def _repeat(
        self,
        place: Place,
        message: Message,
        text: str,
        acknowledged: trio.Event,
        delay_s: float,
    ) -> None:
        """A webhook that comes again: at once, or behind the acknowledgement."""
        if delay_s:
            await acknowledged.wait()
            with trio.move_on_after(delay_s):
                await self.calm.wait()
        await self._link.serving()
        self._ledger.actions["duplicate"] += 1
        try:
            while not await self._send(place, message, text, None, acknowledged):
                await self._link.serving()
        except LostError:
            pass  # a webhook is not sent for ever; the message itself is

    async def _cancel(self, call: Call, after_s: float) -> None:
        await trio.sleep(after_s)
        self._ledger.actions["cancel"] += 1
        self._link.tell(Cancel(call.n))

    async def _interrupt(self, place: Place, after_s: float, acknowledged: trio.Event) -> None:
        await acknowledged.wait()
        await trio.sleep(after_s)
        self._ledger.actions["interrupt"] += 1
        self._link.tell(Interrupt(place[0]))

    # Everything else -----------------------------------------------------------------------------

    async def _move(self, conversation: int, step: Step) -> None:
        """Once: what was lost on the way is not asked for again, and then nobody knows."""
        assert step.move is not None
        move, ledger = step.move, self._ledger
        ledger.actions[move] += 1
        await self._link.serving()
        where = ledger.placed.pop(conversation, "")
        try:
            call = self._link.ask(lambda n: Do(n, conversation, move, step.name))
            try:
                line = await call.next()
            finally:
                self._link.over(call)
        except LostError:
            return
        if isinstance(line, Done):
            if move == "rotate":
                ledger.promise("session", line.session, f"conversation {conversation}")
            if where or line.session:
                ledger.placed[conversation] = line.session or where
        elif isinstance(line, Refused):
            ledger.refusals[line.error] += 1
            if not line.typed or line.error not in _PASSING | _PLAIN:
                ledger.note("errors", f"{move} {conversation}: {line.error}: {line.words}")

    def asked(self, line: Shown) -> None:
        """Somebody is asked something, and will answer in a moment."""
        if self.beside is not None:
            self.beside.start_soon(self._answer, line.conversation, line.question)

    async def _answer(self, conversation: int, question: str) -> None:
        draw: random.Random = chance(self._plan, "answer", question)
        await trio.sleep(draw.uniform(0.0, 0.3))
        answer = draw.choice(("yes", "no"))
        self._ledger.actions["answer"] += 1
        while True:
            await self._link.serving()
            try:
                call = self._link.ask(lambda n: Answer(n, conversation, question, answer))
                try:
                    line = await call.next()
                finally:
                    self._link.over(call)
            except LostError:
                continue
            if not isinstance(line, Refused) or not line.typed or line.error in _PLAIN:
                return  # answered, or it is over: the turn was stopped, or its time was up
            await trio.sleep(_AGAIN_S)
