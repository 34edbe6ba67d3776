"""The warm agent of a session actor: built once, kept, rebuilt when it must be.

Keeps:
- One agent per session actor, that is, per key; switching the key between sessions keeps it
  (contract H1, H2). What changes with every turn is binding and transcript, never the agent.
- It is rebuilt before the next turn when somebody else wrote to the session that it knew (H3, H4),
  or when its configuration's signature changed (H5). Baselines are revisions, one per session id,
  compared only with the same session's.
- An agent that is shared by all keys is never rebuilt, and closed only when the runtime ends.
- One that needs tasks which outlive turns has an `attach(spawn)`: it is called once before its
  first turn, and what `spawn` starts lives no longer than the runtime. What such a task raises is
  logged; its `close()` ends it.

Building may fail: then that turn fails, and the next one tries again (H6).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio

from ..storage.errors import OnepenError
from .raised import is_theirs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

    from ..storage.identity import SessionId, SessionKey

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0  # an agent that takes longer to close is left alone
_BASELINES_MAX = 64  # sessions of one key that an agent may remember
_MISSING: Any = object()


class InvalidAgentError(OnepenError):
    """Something was given as an agent that can't run a turn."""

    hint = "give an async function of one argument, or an object with run(turn)"


class SessionInfo(NamedTuple):
    """What a factory is told about the session actor that it builds an agent for."""

    key: SessionKey
    source: str
    user: str | None
    session_id: SessionId


class AgentSource:
    """Where agents come from: one for all keys, or a factory."""

    def __init__(
        self, agent: Any = None, factory: Callable[[SessionInfo], Any] | None = None
    ) -> None:
        if (agent is None) == (factory is None):
            raise InvalidAgentError("give either agent= or factory=, and not both")
        if agent is not None:
            check_agent(agent)
        elif not callable(factory):
            raise InvalidAgentError(f"{type(factory).__name__} can't be called as a factory")
        self.shared = agent
        self.factory = factory
        self.built = self.rebuilt = 0
        self.running = 0  # turns in which the shared agent is at work just now
        self.last_key: SessionKey | None = None  # whose turn it was at last
        self._nursery: trio.Nursery | None = None
        self._context: Context | None = None
        self._attaching = trio.Lock()
        self._to_attach = callable(getattr(agent, "attach", None))  # the shared one

    # Agents that need tasks of their own ---------------------------------------------------------

    def serve_in(self, nursery: trio.Nursery, context: Context) -> None:
        """Where the tasks of agents live: longer than turns, and not longer than the runtime."""
        self._nursery, self._context = nursery, context

    async def attach(self, agent: Any) -> None:
        """Let an agent that has an `attach(spawn)` begin what it needs. Raises what it raises."""
        attach = getattr(agent, "attach", None)
        if callable(attach):
            result = attach(self._spawn)
            if isawaitable(result):
                await result

    async def attached(self) -> Any:
        """The shared agent, for a turn; if it could not begin, the next turn tries again."""
        if self._to_attach:
            async with self._attaching:
                if self._to_attach:
                    await self.attach(self.shared)
                    self._to_attach = False
        return self.shared

    def _spawn(self, function: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """A task of an agent's, in a context that belongs to no turn; its `close()` ends it."""
        assert self._nursery is not None
        assert self._context is not None
        run = partial(_quietly_beside, function, arguments)
        self._context.run(partial(self._nursery.start_soon, run, name=function))

    def signature(self, agent: Any, info: SessionInfo) -> Any:
        """The configuration as it is now: the factory's word, or else the agent's own."""
        # A class as factory has its agents' signature, not one of its own.
        factory = None if isinstance(self.factory, type) else self.factory
        for owner, arguments in ((factory, (info,)), (agent, ())):
            signature = getattr(owner, "signature", None)
            if signature is not None:
                return signature(*arguments) if callable(signature) else signature
        return None

    async def close(self) -> None:
        """At the runtime's end: the shared agent, once."""
        if self.shared is not None:
            await _quietly(close_agent(self.shared))


def check_agent(agent: Any) -> None:
    """Raise unless a turn can be run with it."""
    if not callable(getattr(agent, "run", None)) and not callable(agent):
        raise InvalidAgentError(f"{type(agent).__name__} is no agent")


def runner_of(agent: Any) -> Callable[[Any], Any]:
    """What is called with a turn."""
    run: Any = getattr(agent, "run", None)
    runner: Callable[[Any], Any] = run if callable(run) else agent
    return runner


async def close_agent(agent: Any) -> None:
    """Its optional `close()`, sync or async. Raises what it raises."""
    close = getattr(agent, "close", None) or getattr(agent, "aclose", None)
    if not callable(close):
        return
    result = close()
    if isawaitable(result):
        await result


async def _quietly(closing: Awaitable[None]) -> None:
    """Where nobody could mend it: an error is logged."""
    try:
        await closing
    except BaseException as error:
        if not is_theirs(error):
            raise
        logger.error("closing an agent failed", exc_info=error)


async def _quietly_beside(
    function: Callable[..., Awaitable[object]], arguments: tuple[Any, ...]
) -> None:
    try:
        await function(*arguments)
    except BaseException as error:
        if not is_theirs(error):
            raise
        logger.error("a task of an agent failed", exc_info=error)


@final
class AgentSlot:
    """The place of one session actor's agent."""

    __slots__ = ("_baselines", "_foreign", "_signature", "_source", "agent")

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self.agent: Any = source.shared
        self._signature: Any = _MISSING
        self._baselines: OrderedDict[SessionId, int] | None = None
        self._foreign = False

    async def ready(self, info: SessionInfo) -> Any:
        """The agent for the next turn; built, rebuilt or the one that is here."""
        source = self._source
        if source.factory is None:
            return await source.attached()
        if self.agent is not None:
            changed = source.signature(self.agent, info) != self._signature
            if not changed and not self._foreign:
                return self.agent
            source.rebuilt += 1
            await self.close_quietly()
        built: Any = source.factory(info)
        if isawaitable(built):
            built = await built
        check_agent(built)
        await source.attach(built)
        self.agent = built
        self._foreign = False
        self._signature = deepcopy(source.signature(built, info))  # it may be changed in place
        source.built += 1
        return built

    def seen(self, session_id: SessionId, revision: int) -> None:
        """Our own writes have brought the session here."""
        if self._baselines is None:
            self._baselines = OrderedDict()
        self._baselines[session_id] = revision
        self._baselines.move_to_end(session_id)
        if len(self._baselines) > _BASELINES_MAX:
            self._baselines.popitem(last=False)

    def compare(self, session_id: SessionId, revision: int) -> None:
        """A turn begins at this revision: if we left the session at another one, somebody wrote."""
        baseline = None if self._baselines is None else self._baselines.get(session_id)
        if baseline is not None and baseline != revision:
            self.distrust()

    def distrust(self) -> None:
        """Somebody else wrote: the agent is rebuilt before the next turn, unless it opted out."""
        if self.agent is not None and getattr(self.agent, "check_revision", True) is not False:
            self._foreign = True

    async def close(self) -> None:
        """Let the agent go, unless it is everybody's. Raises what it raises, or that it hangs."""
        agent = self.agent
        if self._source.factory is None or agent is None:
            return
        self.agent = None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S) as scope:
            await close_agent(agent)
        if scope.cancelled_caught:
            raise trio.TooSlowError(f"close() took longer than {_CLOSE_S:g} s")

    async def close_quietly(self) -> None:
        """The same for whoever has nobody to tell."""
        await _quietly(self.close())
