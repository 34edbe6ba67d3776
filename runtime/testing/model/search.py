"""The model of search: every message is read, each time, and nothing is ever indexed.

Shares with the engine what a word and a query are, which have tests of their own; everything else,
what can be found and where, is computed from the rows. Hits come in no order and on one page: where
a page ends and what is ranked above what is an engine's own business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....storage import commands as c
from ....storage.records import Hit, Hits
from ....storage.wanted import wanted_of

if TYPE_CHECKING:
    from ....storage.records import Message, Search, Session
    from .state import State


def rebuild_search(state: State, command: c.RebuildSearch) -> bool:
    if state.was_set("search", "rebuild", command.replaces, command):
        return False
    state.rebuilds = state.set_value("search", "rebuild", state.rebuilds, command.replaces, command)
    return True


def found_in(state: State, search: Search) -> Hits:
    """All that is found."""
    wanted = wanted_of(search.text)
    hits = [
        Hit(message=message, key=session.key, source=session.source, title=session.title)
        for session in state.sessions.values()
        if not session.hidden and not session.deleted
        for message in state.transcripts[session.id]
        if _findable(message)
        and _is_asked_for(search, session, message)
        and wanted.matches(_said(message))
    ]
    return Hits(hits=tuple(hits))


def _findable(message: Message) -> bool:
    return not message.carried and not message.erased and message.state != "rewound"


def _is_asked_for(search: Search, session: Session, message: Message) -> bool:
    user = message.user if message.user is not None else session.user
    asked: tuple[tuple[Any, Any], ...] = (
        (search.session_id, session.id),
        (search.key, session.key),
        (search.source, session.source),
        (search.user, user),
        (search.role, message.role),
    )
    return (
        all(wanted is None or wanted == value for wanted, value in asked)
        and (search.since_ms is None or message.created_ms >= search.since_ms)
        and (search.until_ms is None or message.created_ms < search.until_ms)
        and (not search.active or message.state == "active")
    )


def _said(message: Message) -> str:
    parts = (part.get("text") for part in message.parts or ())
    calls = (word for call in message.tool_calls for word in (call.name, call.arguments))
    return "\n".join(
        [message.text or "", *(text for text in parts if isinstance(text, str)), *calls]
    )


COMMANDS: dict[type[c.Command], Any] = {c.RebuildSearch: rebuild_search}
