"""The agent that is stressed, and the chat platform that its answers go to.

Keeps: what it does about a message follows from the message alone. What it does to the world (a
side effect, a message that is shown) has left the process when it returns from doing it.

Must never claim more than a real agent and a real platform could: they are slow, they fail, they
hang, and they lose acknowledgements.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, final

import trio

from ...actors.questions import QuestionExpiredError
from ...storage.errors import NoGainError
from .script import answer_of, chance, part_of, place_of
from .wire import Did, Rotated, Shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...actors.turn import Turn
    from ...actors.warm import SessionInfo
    from ...storage.records import Delivery, Message
    from .plan import Plan
    from .script import Part, Place
    from .wire import Line

_QUESTION_S = 10.0
_PLATFORM_S = 0.02  # how long the chat platform takes at most


class PlannedError(Exception):
    """The agent fails because the plan says so."""


@final
class Crew:
    """Builds agents, counts those that are not closed, and is how they reach the world."""

    def __init__(
        self, plan: Plan, tell: Callable[[Line], None], show: Callable[[Line], None]
    ) -> None:
        self.plan = plan
        self.tell = tell
        self.show = show
        """As `tell`, and it has left the process on return."""
        self.alive = 0

    def build(self, _: SessionInfo) -> Agent:
        self.alive += 1
        return Agent(self)

    async def deliver(self, delivery: Delivery) -> str:
        """The platform: it may refuse, and it may show a message and lose the receipt."""
        draw = chance(self.plan, "platform", delivery.id, delivery.attempt)
        await trio.sleep(draw.uniform(0.0, _PLATFORM_S))
        if draw.random() < self.plan.refusing:
            raise ConnectionError("the platform answers 500")
        self.show(
            Shown(
                delivery.target["conversation"],
                delivery.id,
                delivery.kind,
                delivery.text,
                delivery.turn_id or "",
                str(delivery.body.get("question") or ""),
            )
        )
        if draw.random() < self.plan.losing:
            raise ConnectionError("the connection was reset")
        return f"platform-{delivery.id}"


@final
class Agent:
    """One for each session that is served."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def close(self) -> None:
        self._crew.alive -= 1

    async def run(self, turn: Turn) -> str:
        place = place_of(turn.text)
        if place is None:
            raise ValueError(f"nobody sends such a message: {turn.text[:40]!r}")
        part = part_of(self._crew.plan, place)
        await self._shorten(turn, place, part)
        await trio.sleep(part.latency_s / 2)
        if part.says:
            await turn.say(f"re {place[0]}/{place[1]} one moment")
        if part.tool:
            await self._use_tool(turn, place)
        if part.asks:
            try:
                await turn.ask_user("Go on?", ["yes", "no"], timeout=_QUESTION_S)
            except QuestionExpiredError:
                pass
        if part.hangs:
            await trio.sleep_forever()
        if part.fails:
            raise PlannedError(f"re {place[0]}/{place[1]} this agent fails <as &planned>")
        turn.usage(model="stress", input=len(turn.text), output=part.length)
        answer = answer_of(place, part.length)
        if part.streams:
            return await self._stream(turn, answer, part)
        await trio.sleep(part.latency_s / 2)
        return answer

    async def _shorten(self, turn: Turn, place: Place, part: Part) -> None:
        if len(turn.history) <= self._crew.plan.history_max:
            return
        parent = turn.session_id
        try:
            if part.compacts:
                await turn.compact(summary_of)
            else:
                child = await turn.rotate(summary_of)
                self._crew.tell(Rotated(place[0], parent, child))
        except NoGainError:
            pass  # short messages and a long summary: it stays as it is

    async def _use_tool(self, turn: Turn, place: Place) -> None:
        call_id = f"call-{place[0]}-{place[1]}-{turn.attempt}"
        function = {"name": "touch", "arguments": json.dumps({"place": place})}
        call = {"id": call_id, "type": "function", "function": function}
        await turn.append({"role": "assistant", "content": None, "tool_calls": [call]})
        # The call stands open meanwhile: what cuts this turn off must close it. The effect has a
        # key of its own, so that another attempt finds what this one has done.
        done = await turn.effect(self._touch, *place, key="touch", on_unknown="retry")
        content = f"done {done}"
        await turn.append({"role": "tool", "tool_call_id": call_id, "content": content})
        await turn.steering()

    async def _touch(self, conversation: int, number: int, effect_id: str) -> int:
        self._crew.show(Did(effect_id, conversation, number))
        await trio.sleep(0.002)
        return number

    async def _stream(self, turn: Turn, answer: str, part: Part) -> str:
        size = len(answer) // part.streams + 1
        async with turn.streaming() as out:
            for start in range(0, len(answer), size):
                await out.write(answer[start : start + size])
                await trio.sleep(part.latency_s / 2 / part.streams)
        return answer


def summary_of(history: tuple[Message, ...]) -> str:
    return f"Summary of {len(history)} messages."
