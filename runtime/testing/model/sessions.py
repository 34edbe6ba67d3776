"""The model of keys and sessions: routes, incarnations, titles, flags, ends, deletion, marks.

Each function takes one command to a state and tells whether it was new; a command that can't be
applied leaves by `refuse`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.records import Route, Session
from .state import State, refuse

if TYPE_CHECKING:
    from ....storage.identity import SessionId, SessionKey

TITLE_LENGTH_MAX = 100


# Keys --------------------------------------------------------------------------------------------


def open_incarnation(state: State, command: c.OpenIncarnation) -> bool:
    route = state.keys.get(command.key, Route(key=command.key))
    if route.incarnation == command.incarnation:
        return False
    if state.found and route.incarnation > command.incarnation:
        return False  # overtaken since; what stands before it in its unit is stored
    if command.incarnation < route.incarnation:
        refuse("stale_incarnation", command.key)
    state.keys[command.key] = replace(route, incarnation=command.incarnation)
    return True


def _set_on_key(state: State, command: Any, aspect: str, replaces: int, **values: Any) -> None:
    route = state.keys.get(command.key)
    if route is None:
        refuse("missing", f"key {command.key}")
    stored: int = getattr(route, f"{aspect}_version")
    version = state.set_value(command.key, aspect, stored, replaces, command)
    state.keys[command.key] = replace(route, **{f"{aspect}_version": version}, **values)


def move_route(state: State, command: Any, session_id: SessionId) -> None:
    _set_on_key(state, command, "route", command.replaces, session_id=session_id)


def hand_over(state: State, key: SessionKey, session_id: SessionId, command: Any) -> None:
    """The key's route moves, whichever version it has."""
    route = state.keys[key]
    version = state.set_value(key, "route", route.route_version, route.route_version, command)
    state.keys[key] = replace(route, route_version=version, session_id=session_id)


def set_route(state: State, command: c.SetRoute) -> bool:
    if state.was_set(command.key, "route", command.replaces, command):
        return False
    if state.holder(command.session_id) not in (None, command.key):
        refuse("route_conflict", "another key has it")
    if command.session_id in state.sessions:
        session = state.known_session(command.session_id)
        if session.hidden:
            refuse("missing", "it is being staged")
        if session.end_kind == "rotation":
            refuse("route_conflict", "it was rotated away")
        if session.key != command.key:
            if not command.take_over:
                refuse("route_conflict", "it is another key's")
            former = state.former_keys.get(session.id, ())
            state.former_keys[session.id] = (*former, session.key)
            state.sessions[session.id] = replace(session, key=command.key)
    move_route(state, command, command.session_id)
    return True


def set_pending_title(state: State, command: c.SetPendingTitle) -> bool:
    if state.was_set(command.key, "pending_title", command.replaces, command):
        return False
    _set_on_key(
        state,
        command,
        "pending_title",
        command.replaces,
        pending_title=command.title,
        pending_title_origin=None if command.title is None else command.origin,
    )
    return True


def count_useless_compressions(state: State, command: c.CountUselessCompressions) -> bool:
    if state.was_set(command.key, "compression", command.replaces, command):
        return False
    count = {"useless_compressions": command.count}
    _set_on_key(state, command, "compression", command.replaces, **count)
    return True


# Sessions ----------------------------------------------------------------------------------------


def create_session(state: State, command: c.CreateSession) -> bool:
    session = state.sessions.get(command.session_id)
    if session is not None and session.parent_id == command.parent_id:
        if session.key == command.key:
            return False
        # It has changed hands since; the one who made it is still recognised.
        former = state.former_keys.get(session.id, ())
        if command.key in former and session.started_ms == command.at_ms:
            return False
    if session is not None or state.holder(command.session_id) not in (None, command.key):
        refuse("conflict", f"session {command.session_id}")
    if command.parent_id is not None and command.parent_id not in state.sessions:
        refuse("missing", f"parent {command.parent_id}")
    if command.edge == "rotation":
        if not command.hidden:
            refuse("invalid", "only a rotation makes a rotation's child")
        if command.parent_id is not None and state.successor(command.parent_id) is not None:
            refuse("conflict", "the parent has a child by rotation")
    state.sessions[command.session_id] = Session(
        id=command.session_id,
        key=command.key,
        parent_id=command.parent_id,
        edge=command.edge,
        source=command.source,
        user=command.user,
        model=command.model,
        meta=command.meta,
        hidden=command.hidden,
        started_ms=command.at_ms,
        last_ms=command.at_ms,
    )
    state.transcripts[command.session_id] = ()
    return True


def _set_on_session(state: State, command: Any, aspect: str, **values: Any) -> None:
    session = state.known_session(command.session_id)
    stored: int = getattr(session, f"{aspect}_version")
    version = state.set_value(session.id, aspect, stored, command.replaces, command)
    state.sessions[session.id] = replace(session, **{f"{aspect}_version": version}, **values)


def set_title(state: State, command: c.SetTitle) -> bool:
    if state.was_set(command.session_id, "title", command.replaces, command):
        return False
    state.known_session(command.session_id)
    if command.title is not None and any(
        s.title == command.title and s.id != command.session_id for s in state.sessions.values()
    ):
        refuse("title_taken", command.title)
    origin = None if command.title is None else command.origin
    _set_on_session(state, command, "title", title=command.title, title_origin=origin)
    return True


def next_title(state: State, title: str) -> str:
    """The title with the next free number."""
    numbered = re.fullmatch(r"(.*) #([1-9][0-9]{0,8})", title, re.DOTALL)
    base, number = (numbered[1], int(numbered[2])) if numbered else (title, 1)
    taken = {s.title for s in state.sessions.values()}
    while True:
        number += 1
        suffix = f" #{number}"
        candidate = base[: TITLE_LENGTH_MAX - len(suffix)].rstrip() + suffix
        if candidate not in taken:
            return candidate


def set_flags(state: State, command: c.SetFlags) -> bool:
    if state.was_set(command.session_id, "flags", command.replaces, command):
        return False
    _set_on_session(state, command, "flags", archived=command.archived, pinned=command.pinned)
    return True


def set_details(state: State, command: c.SetDetails) -> bool:
    if state.was_set(command.session_id, "details", command.replaces, command):
        return False
    values = {"user": command.user, "model": command.model, "meta": command.meta}
    _set_on_session(state, command, "details", **values)
    return True


def end_session(state: State, command: c.EndSession) -> bool:
    if state.was_set(command.session_id, "end", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    if session.end_kind is not None and (session.end_kind, command.kind) != (
        "suspension",
        "boundary",
    ):
        refuse("ended", session.id)
    values = {"ended_ms": command.at_ms, "end_reason": command.reason, "end_kind": command.kind}
    _set_on_session(state, command, "end", **values)
    return True


def reopen_session(state: State, command: c.ReopenSession) -> bool:
    if state.was_set(command.session_id, "end", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    if session.end_kind == "rotation" and state.successor(session.id) is not None:
        refuse("route_conflict", "it was rotated away")
    _set_on_session(state, command, "end", ended_ms=None, end_reason=None, end_kind=None)
    return True


def set_mark(state: State, command: c.SetMark) -> bool:
    stored = state.marks.get(command.name)
    if stored == command.value:
        return False
    if stored is not None:
        refuse("conflict", f"mark {command.name}")
    state.marks[command.name] = command.value
    return True


def tip(state: State, session_id: SessionId) -> SessionId:
    """Where a chain of rotations ends; what is being staged is not seen."""
    seen = {session_id}
    while (child := state.successor(session_id)) and not child.hidden and child.id not in seen:
        session_id = child.id
        seen.add(session_id)
    return session_id


def session_key_of(state: State, session_id: SessionId) -> SessionKey | None:
    session = state.sessions.get(session_id)
    return state.holder(session_id) if session is None else session.key


COMMANDS: dict[type[c.Command], Any] = {
    c.OpenIncarnation: open_incarnation,
    c.SetRoute: set_route,
    c.SetPendingTitle: set_pending_title,
    c.CountUselessCompressions: count_useless_compressions,
    c.CreateSession: create_session,
    c.SetTitle: set_title,
    c.SetFlags: set_flags,
    c.SetDetails: set_details,
    c.EndSession: end_session,
    c.ReopenSession: reopen_session,
    c.SetMark: set_mark,
}
