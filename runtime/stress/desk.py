"""Inside the process under test: every order becomes a call of the runtime, as a gateway makes it.

Keeps: each request is answered by a line, whatever it came to; a line is told behind the call that
it reports. An error that is no `OnepenError` is told as one that callers should never see.

Must never repair or repeat anything: the world outside does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

import trio

from ...actors.messages import Inbound
from ...storage.errors import MissingError, OnepenError
from .agent import summary_of
from .script import SOURCE, chance, inbound_id_of, key_of
from .wire import (
    Accepted,
    Answer,
    Cancel,
    Cancelled,
    Do,
    Done,
    Finish,
    Heard,
    Interrupt,
    Refused,
    Replied,
    Send,
    Wrong,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..runtime import Runtime
    from .plan import Plan
    from .wire import Line, Order

_LOOK_S = 0.01
_AGAIN_S = 0.1


@final
class Desk:
    """Takes orders for one runtime."""

    def __init__(
        self, runtime: Runtime, plan: Plan, tell: Callable[[Line], None], nursery: trio.Nursery
    ) -> None:
        self._runtime = runtime
        self._plan = plan
        self._tell = tell
        self._nursery = nursery
        self._callers: dict[int, trio.CancelScope] = {}

    def take(self, order: Order) -> bool:
        """Begin to carry it out; false if it was the last one."""
        match order:
            case Send():
                self._nursery.start_soon(self._request, order.n, self._send, order)
            case Do():
                self._nursery.start_soon(self._request, order.n, self._do, order)
            case Answer():
                self._nursery.start_soon(self._request, order.n, self._answer, order)
            case Cancel(n):
                if n in self._callers:
                    self._callers[n].cancel()
            case Interrupt(conversation):
                self._runtime.interrupt(key_of(conversation))
            case Finish():
                return False
        return True

    async def drain(self) -> None:
        """Until everything that was accepted has come to an end and was sent."""
        runtime = self._runtime
        # Nobody holds an event for all of that.
        while runtime.statistics().busy or await runtime.approvals.list():  # noqa: ASYNC110
            await trio.sleep(_LOOK_S)

    async def _request(self, n: int, run: Callable[[Any], Awaitable[None]], order: Order) -> None:
        with trio.CancelScope() as caller:
            self._callers[n] = caller
            try:
                await run(order)
            except OnepenError as error:
                retry_s = float(getattr(error, "retry_after_s", 0.0))
                words = error.message
                self._tell(Refused(n, type(error).__name__, words, retry_s, typed=True))
            except Exception as error:
                self._tell(Refused(n, type(error).__name__, repr(error), 0.0, typed=False))
            finally:
                del self._callers[n]
        if caller.cancelled_caught:
            self._tell(Cancelled(n))

    async def _send(self, order: Send) -> None:
        inbound = Inbound(
            text=order.text,
            id=inbound_id_of((order.conversation, order.number)),
            reply_to={"conversation": order.conversation},
        )
        key, started_s = key_of(order.conversation), time.perf_counter()
        busy: Any = order.busy
        submission = await self._runtime.submit(key, inbound, busy=busy)
        disposition = submission.disposition
        repeated = submission.repeated
        seconds = time.perf_counter() - started_s
        self._tell(Accepted(order.n, submission.turn_id, disposition, repeated, seconds))
        if disposition == "rejected":
            return
        reply = await submission.reply()
        kind, cause = reply.outcome.kind, reply.outcome.cause
        seconds = time.perf_counter() - started_s
        told = (reply.turn_id, kind, cause, reply.text, reply.session_id)
        self._tell(Replied(order.n, *told, seconds))

    async def _do(self, order: Do) -> None:
        runtime, key, session = self._runtime, key_of(order.conversation), ""
        match order.move:
            case "rotate":
                session = await runtime.rotate(key, summary_of)
            case "compact":
                session = await runtime.compact(key, summary_of)
            case "reset":
                session = await runtime.reset(key)
            case "rewind":
                await runtime.rewind(key)
            case _:
                named = f"{SOURCE}-{order.conversation}-{order.name}"
                try:
                    session = await runtime.resume(key, named)  # wherever rotations have led
                except MissingError:
                    session = await runtime.switch(key, named)  # it has no message yet
        self._tell(Done(order.n, session))

    async def _answer(self, order: Answer) -> None:
        key = key_of(order.conversation)
        await self._runtime.approvals.answer(key, order.answer, question_key=order.question)
        self._tell(Done(order.n, ""))

    # Those who watch -----------------------------------------------------------------------------

    def follow_some(self) -> None:
        """Follow the events of as many conversations as the plan says, for as long as it serves."""
        for conversation in range(self._plan.sessions):
            if chance(self._plan, "follow", conversation).random() < self._plan.following:
                self._nursery.start_soon(self._follow, conversation)

    async def _follow(self, conversation: int) -> None:
        """Numbers of one incarnation have no gap and no repeat, also across a new subscription."""
        after: tuple[int, int] | None = None
        while True:
            try:
                async with self._runtime.events(key_of(conversation), after) as events:
                    async for event in events:
                        place = event.position
                        if event.kind == "gap":
                            after = None
                            continue
                        if event.kind == "dropped":
                            break
                        if after is not None and place[0] == after[0] and place[1] != after[1] + 1:
                            words = f"{key_of(conversation)}: {place} behind {after}"
                            self._tell(Wrong("events", words))
                        after = place
                        if event.kind == "message.committed":
                            line = (event.session_id or "", event.seq or 0, event.uid or "")
                            self._tell(Heard(conversation, *line))
            except OnepenError:
                pass  # it is being served by nobody just now
            await trio.sleep(_AGAIN_S)
