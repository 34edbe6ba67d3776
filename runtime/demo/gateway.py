"""The process that is killed: a runtime on a real file, its agent, and people who talk to it.

What a person does and what the agent does about it are functions of the seed and the message, so
that a second process goes on with the same script; which turn a kill or an interrupt hits is up to
the machine. A message has the same text and the same inbound id whenever it is sent.

Must never tell the world anything before the runtime has promised it.
"""

from __future__ import annotations

import json
import random
import re
import time
from functools import partial
from typing import TYPE_CHECKING, final

import trio
from msgspec import Struct

from ...actors.messages import Inbound
from ...actors.sources import SourcePolicy
from ...storage.errors import MissingError, RouteConflictError
from ..opening import open_runtime
from .told import Accepted, Replied, Rotated, Shown, Switched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ...actors.replies import Reply
    from ...actors.turn import Turn
    from ...storage.records import Delivery, Message
    from ..runtime import Runtime
    from ..submission import Submission
    from .told import Line, Place

SOURCE = "demo"
_TEXT = "A message of a few hundred characters, as people send them. " * 5
_PLACE = re.compile(r"(?:re )?(\d+)/(\d+)(?: |$)")
_HISTORY_MAX = 8  # messages, before the agent moves on to a child session
_UNANSWERED_MAX = 3  # so many messages a person sends before waiting for an answer
_MOVES_TRIED_MAX = 5
_TURNS_PER_S = 600  # what people ask for; a busy machine serves less, and they wait
_DRAIN_LOOK_S = 0.01
_PLATFORM_S = 0.02  # how long the chat platform takes to show a message


class Script(Struct, frozen=True, kw_only=True):
    """What both processes have in common."""

    conversations: int
    turns: int
    seed: int

    def chance(self, *what: object) -> random.Random:
        return random.Random(f"{self.seed} {what}")


def key_of(conversation: int) -> str:
    return f"{SOURCE}:{conversation}"


def inbound_id_of(conversation: int, number: int) -> str:
    return f"{conversation}/{number}"


def text_of(conversation: int, number: int) -> str:
    return f"{conversation}/{number} {_TEXT}"


def answer_of(conversation: int, number: int) -> str:
    return f"re {conversation}/{number}"


def call_id_of(conversation: int, number: int) -> str:
    return f"call-{conversation}-{number}"


def place_of(text: str) -> Place | None:
    """The message that a text, or an answer, is about; none if nobody here wrote it."""
    found = _PLACE.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


# The agent -----------------------------------------------------------------------------------


@final
class Agent:
    """Looks things up, takes its time, and rotates when the history is long."""

    def __init__(self, script: Script, tell: Callable[[Line], None]) -> None:
        self._script = script
        self._tell = tell

    async def run(self, turn: Turn) -> str:
        place = place_of(turn.text)
        if place is None:
            raise ValueError(f"nobody sends such a message: {turn.text[:40]!r}")
        conversation, number = place
        chance = self._script.chance("agent", conversation, number)
        if len(turn.history) > _HISTORY_MAX:
            parent = turn.session_id
            child = await turn.rotate(_summary)
            self._tell(Rotated(conversation, parent, child))
        if chance.random() < 0.3:
            call_id = call_id_of(conversation, number)
            function = {"name": "look_up", "arguments": json.dumps({"number": number})}
            call = {"id": call_id, "type": "function", "function": function}
            await turn.append({"role": "assistant", "content": None, "tool_calls": [call]})
            # The call stands open meanwhile: what cuts this turn off must close it.
            await trio.sleep(chance.uniform(0.002, 0.02))
            await turn.append({"role": "tool", "tool_call_id": call_id, "content": "found"})
        await trio.sleep(chance.choice((0.0, 0.005, 0.02, 0.1)))
        return answer_of(conversation, number)


def _summary(history: tuple[Message, ...]) -> str:
    return f"Summary of {len(history)} messages."


# The people ----------------------------------------------------------------------------------


@final
class _Person:
    """One conversation: messages in order, some without waiting for the answer to the last."""

    def __init__(
        self, runtime: Runtime, script: Script, conversation: int, tell: Callable[[Line], None]
    ) -> None:
        self._runtime = runtime
        self._script = script
        self._conversation = conversation
        self._key = key_of(conversation)
        self._tell = tell
        self._unanswered = trio.Semaphore(_UNANSWERED_MAX)

    async def talk(self, first: int, *, to_be_killed: bool) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(first, self._script.turns):
                if to_be_killed and number == self._script.turns - 1:
                    # However slow the killer is, it finds every conversation in the middle.
                    await trio.sleep_forever()
                chance = self._script.chance("person", self._conversation, number)
                if chance.random() < 0.75:  # else it comes at once, and is queued
                    # Near to each other, so that no slow talker holds up the end alone.
                    await trio.sleep(chance.uniform(0.7, 1.3) * self._pause_s)
                if number == 0 or chance.random() < 0.08:
                    await self._move(chance.choice("ab"))
                await self._unanswered.acquire()
                started_s = time.perf_counter()
                submission = await self._send(number)
                nursery.start_soon(self._follow, submission, number, started_s)
                if chance.random() < 0.1:
                    nursery.start_soon(self._interrupt, chance.uniform(0.0, 0.05))

    @property
    def _pause_s(self) -> float:
        """So that the load is the same, however many people there are."""
        return self._script.conversations / _TURNS_PER_S / 0.75

    async def _send(self, number: int) -> Submission:
        """It may be a repeat: sent before, to the process that was killed, and never acknowledged.

        Then it follows the first one's turn, which goes on if the kill has cut it.
        """
        inbound = Inbound(
            text=text_of(self._conversation, number),
            id=inbound_id_of(self._conversation, number),
            reply_to={"conversation": self._conversation},
        )
        submission = await self._runtime.submit(self._key, inbound)
        self._tell(Accepted(self._conversation, number, again=submission.repeated))
        return submission

    async def _follow(self, submission: Submission, number: int, started_s: float) -> None:
        reply: Reply = await submission.reply()
        seconds = time.perf_counter() - started_s
        kind = reply.outcome.kind
        self._tell(Replied(self._conversation, number, kind, reply.text, seconds))
        self._unanswered.release()

    async def _interrupt(self, after_s: float) -> None:
        await trio.sleep(after_s)
        self._runtime.interrupt(self._key)

    async def _move(self, name: str) -> None:
        """Switch to one of this person's two threads, wherever its rotations have led."""
        session_id = f"{SOURCE}-{self._conversation}-{name}"
        for _ in range(_MOVES_TRIED_MAX):
            try:
                moved = await self._runtime.resume(self._key, session_id)
            except MissingError:
                moved = await self._runtime.switch(self._key, session_id)  # it has no message yet
            except RouteConflictError:
                continue  # the thread was rotated on between looking and moving
            self._tell(Switched(self._conversation, moved))
            return
        raise RuntimeError(f"{self._key} could not move to {session_id}")


async def serve(
    path: str | Path,
    script: Script,
    acknowledged: Sequence[int],
    tell: Callable[[Line], None],
    show: Callable[[Line], None],
    *,
    to_be_killed: bool = False,
) -> None:
    """Go on with every conversation behind what was acknowledged, to the end of the script.

    If it is to be killed, nobody sends the last message: it does not end by itself. What is shown
    has left when `show` returns.
    """

    async def deliver(delivery: Delivery) -> None:
        await trio.sleep(_PLATFORM_S)
        show(Shown(delivery.target["conversation"], delivery.id, delivery.text))

    sources = {SOURCE: SourcePolicy(deliver=deliver)}
    agent = Agent(script, tell)
    async with open_runtime(path, agent=agent, sources=sources) as runtime:
        async with trio.open_nursery() as nursery:
            for conversation, first in enumerate(acknowledged):
                person = _Person(runtime, script, conversation, tell)
                nursery.start_soon(partial(person.talk, first, to_be_killed=to_be_killed))
        # Messages from before the kill that were waiting have nobody here who waits for a reply.
        while runtime.statistics().busy:  # noqa: ASYNC110 - nobody here holds an event for those turns
            await trio.sleep(_DRAIN_LOOK_S)
