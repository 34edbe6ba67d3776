"""Which session the code that is running belongs to.

A turn's context variable holds a *binding*: one object for the whole turn, whose session id moves
when the conversation rotates. So tasks that were started before a rotation see the new id as well;
a variable that is set again would be seen only by tasks that are started after it.

Keeps: outside a turn there is no binding. Actors start from a clean context (`clean_context`), so
that one that was started by another session's turn does not inherit that turn's.
"""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from ..storage.identity import SessionId, SessionKey
    from .writer import WriterRef


class CurrentSession(NamedTuple):
    """What `current_session` tells."""

    key: SessionKey
    session_id: SessionId


@final
class Binding:
    """A key and the session it has just now."""

    __slots__ = ("key", "session_id")

    def __init__(self, key: SessionKey, session_id: SessionId) -> None:
        self.key = key
        self.session_id = session_id


@final
class Inside:
    """A turn, for code that it has started: whether it still runs."""

    __slots__ = ("key", "over", "writer")

    def __init__(self, key: SessionKey, writer: WriterRef) -> None:
        self.key = key
        self.writer = writer  # tells the runtimes of a process apart
        self.over = False


inside_turn: ContextVar[Inside | None] = ContextVar("onepen_inside", default=None)
current_binding: ContextVar[Binding | None] = ContextVar("onepen_binding", default=None)


def current_session() -> CurrentSession | None:
    """The key and session id of the turn that this code runs in; `None` outside a turn."""
    binding = current_binding.get()
    return None if binding is None else CurrentSession(binding.key, binding.session_id)


def clean_context() -> Context:
    """A copy of the current context that belongs to no turn."""
    context = copy_context()
    context.run(current_binding.set, None)
    context.run(inside_turn.set, None)
    return context
