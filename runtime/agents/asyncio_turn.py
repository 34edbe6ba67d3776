"""A turn as an asyncio agent sees it: the same names, awaited from asyncio.

Keeps: one crossing of the loops for each call, and none for what does not wait (attributes,
`usage`, the pieces of a stream); what is cancelled on one side is cancelled on the other. Functions
that are given (`effect`, the summaries) are asyncio's, and run on the agent's loop. What a call
means, and what it raises, is what `Turn` says.

Must never keep anything of its own: the turn is the native one.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ...actors.compression import Summarise
    from ...actors.effects import OnUnknownEffect
    from ...actors.messages import Given
    from ...actors.streaming import Streaming
    from ...actors.turn import Turn
    from ...storage.identity import SessionId, SessionKey, TurnId, Uid
    from ...storage.records import Draft, Inbound, Message, Tokens
    from .asyncio_loop import AsyncioLoop


@final
class AsyncioStreaming:
    """A message that is being written. What is shown of it is provisional until it is stored."""

    __slots__ = ("_out",)

    def __init__(self, out: Streaming) -> None:
        self._out = out

    async def write(self, piece: str) -> None:
        """Show one more piece; it does not cross to the other loop."""
        self._out.write_nowait(piece)
        await asyncio.sleep(0)  # others may go on between two pieces

    @property
    def uid(self) -> Uid:
        return self._out.uid

    @property
    def text(self) -> str:
        """What was written so far."""
        return self._out.text

    @property
    def finish_reason(self) -> str | None:
        return self._out.finish_reason

    @finish_reason.setter
    def finish_reason(self, reason: str | None) -> None:
        self._out.finish_reason = reason


@final
class AsyncioTurn:
    """One turn of a conversation, for asyncio code. Valid until the agent returns."""

    __slots__ = ("_loop", "_turn")

    def __init__(self, turn: Turn, loop: AsyncioLoop) -> None:
        self._turn = turn
        self._loop = loop

    # What an agent reads -------------------------------------------------------------------------

    @property
    def id(self) -> TurnId:
        return self._turn.id

    @property
    def key(self) -> SessionKey:
        """The conversation's address."""
        return self._turn.key

    @property
    def session_id(self) -> SessionId:
        """The session that the turn is in now; rotation changes it."""
        return self._turn.session_id

    @property
    def text(self) -> str:
        """What the user said, the texts of several messages in lines."""
        return self._turn.text

    @property
    def inbound(self) -> tuple[Inbound, ...]:
        return self._turn.inbound

    @property
    def history(self) -> tuple[Message, ...]:
        """The transcript before this turn's own user message."""
        return self._turn.history

    @property
    def messages(self) -> tuple[Message, ...]:
        """This turn's own rows so far, its user message first."""
        return self._turn.messages

    @property
    def attempt(self) -> int:
        return self._turn.attempt

    @property
    def resumed(self) -> bool:
        return self._turn.resumed

    @property
    def deadline(self) -> float:
        """By the loop's clock: `asyncio.timeout_at(turn.deadline - 5)` leaves five seconds."""
        return self._turn.deadline

    @property
    def said(self) -> str | None:
        """The last interim message."""
        return self._turn.said

    @property
    def model_calls(self) -> int:
        return self._turn.model_calls

    @property
    def tokens(self) -> Tokens:
        return self._turn.tokens

    @property
    def over(self) -> bool:
        """Whether its agent has returned."""
        return self._turn.over

    # What an agent does --------------------------------------------------------------------------

    async def append(self, *given: Given) -> tuple[Draft, ...]:
        """Store messages of this turn, in order; returns them with their uids."""
        drafts: tuple[Draft, ...] = await self._cross(self._turn.append, *given)
        return drafts

    async def say(self, text: str) -> None:
        """An interim message to the user, sent once it is durable."""
        await self._cross(self._turn.say, text)

    @asynccontextmanager
    async def streaming(self) -> AsyncGenerator[AsyncioStreaming]:
        """One message, piece by piece. Cut off, what there is of it is stored as partial."""
        out = self._turn.open_stream()
        try:
            yield AsyncioStreaming(out)
        except BaseException:
            self._turn.cut_stream(out)
            raise
        await self._cross(self._turn.end_stream, out)

    async def steering(self) -> tuple[str, ...]:
        """What the user has said since, under the policy `steer`: each text once."""
        heard: tuple[str, ...] = await self._cross(self._turn.steering)
        return heard

    async def rotate(
        self, summary: Summarise, *, upto: Uid | None = None, force: bool = False
    ) -> SessionId:
        """Move the conversation to a child session that begins with a summary."""
        return await self._compress(self._turn.rotate, summary, upto, force=force)

    async def compact(
        self, summary: Summarise, *, upto: Uid | None = None, force: bool = False
    ) -> SessionId:
        """Shorten the transcript in place: the history becomes inactive behind its summary."""
        return await self._compress(self._turn.compact, summary, upto, force=force)

    async def _compress(
        self, compress: Callable[..., Any], summary: Any, upto: Uid | None, *, force: bool
    ) -> SessionId:
        asked = partial(compress, self._here(summary), upto=upto, force=force)
        session_id: SessionId = await self._cross(asked)
        return session_id

    async def effect(
        self,
        fn: Callable[..., Any],
        *args: Any,
        key: str | None = None,
        on_unknown: OnUnknownEffect = "fail",
    ) -> Any:
        """Do something to the world, on the record: `fn(*args)`, sync or async."""
        call = partial(self._turn.effect, self._here(fn), *args, key=key, on_unknown=on_unknown)
        return await self._cross(call)

    async def ask_user(
        self,
        question: str,
        choices: Sequence[str] = (),
        timeout: float | None = None,
        *,
        key: str | None = None,
    ) -> str:
        """Ask a person, and wait for the answer; it comes through `runtime.approvals`."""
        ask = partial(self._turn.ask_user, question, choices, timeout, key=key)
        answer: str = await self._cross(ask)
        return answer

    def usage(
        self,
        *,
        model: str = "",
        input: int = 0,
        output: int = 0,
        cache_read: int = 0,
        cache_write: int = 0,
        reasoning: int = 0,
        cost_nanos: int = 0,
        auxiliary: bool = False,
    ) -> None:
        """Count one model call; stored with the turn's next unit."""
        self._turn.usage(
            model=model,
            input=input,
            output=output,
            cache_read=cache_read,
            cache_write=cache_write,
            reasoning=reasoning,
            cost_nanos=cost_nanos,
            auxiliary=auxiliary,
        )

    async def _cross(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._turn.check_open()  # here already: behind a turn there may be no loop to cross
        return await self._loop.cross(function, *arguments)

    def _here(self, function: Any) -> Any:
        """The same function for trio's side: called there, it runs on the agent's loop.

        An effect is known by the name of its function and all its arguments, so both stay visible.
        """
        if isinstance(function, partial):
            inner = self._here(function.func)
            return partial(inner, *function.args, **function.keywords)
        if not callable(function):
            return (
                function  # a summary that is text; whatever else it is, the turn says what is wrong
            )

        @wraps(function)
        async def crossing(*arguments: Any, **named: Any) -> Any:
            return await self._loop.call(partial(function, **named), *arguments)

        crossing.__name__ = getattr(function, "__name__", None) or type(function).__name__
        return crossing
