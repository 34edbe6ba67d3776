"""Handlers for keys and sessions: routes, incarnations, titles, flags, ends.

Keeps: a session id stands in at most one route; a route never names a session that was rotated
away; titles are unique; an end is set once, except that a boundary replaces a suspension. Every
value that is set leaves a row in `changes` under the version it made.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..commands import (
    CountUselessCompressions,
    CreateSession,
    EndSession,
    OpenIncarnation,
    ReopenSession,
    SetDetails,
    SetFlags,
    SetMark,
    SetPendingTitle,
    SetRoute,
    SetTitle,
)
from .handlers import Handler, Handlers
from .rows import digest, to_json
from .transaction import RouteState, SessionState, Transaction, refuse

if TYPE_CHECKING:
    from ..identity import SessionId, SessionKey

TITLE_LENGTH_MAX = 100
# A row that somebody else damaged counts none; an error here would stop every later write.
TOOL_CALLS = (
    "CASE WHEN json_valid(details) THEN coalesce(json_array_length(details, '$.tool_calls'), 0) "
    "ELSE 0 END"
)
_NUMBERED = re.compile(r"^(.*) #([1-9][0-9]{0,8})$", re.DOTALL)


# Values with a version -----------------------------------------------------------------------


def _expect(versions: dict[str, int], aspect: str, scope: str, replaces: int) -> int:
    """The next version, if `replaces` is the stored one."""
    if versions[aspect] != replaces:
        refuse("stale", f"{aspect} of {scope}", stored=versions[aspect], given=replaces)
    versions[aspect] = replaces + 1
    return replaces + 1


def set_on_session(
    tx: Transaction, command: Any, aspect: str, assignments: str, *values: Any
) -> None:
    """Set columns of a session under a version of theirs."""
    session = tx.stored_session(command.session_id)
    version = _expect(session.versions, aspect, session.id, command.replaces)
    tx.change(
        f"UPDATE sessions SET {assignments}, {aspect}_version = ? WHERE n = ?",
        (*values, version, session.n),
    )
    tx.record_set(session.id, aspect, version, command, command.at_ms)
    tx.touch(session)


def _set_on_route(
    tx: Transaction, command: Any, aspect: str, assignments: str, *values: Any
) -> None:
    """Set columns of a key under a version of theirs."""
    route = _stored_route(tx, command.key)
    version = _expect(route.versions, aspect, route.key, command.replaces)
    tx.change(
        f"UPDATE routes SET {assignments}, {aspect}_version = ? WHERE key = ?",
        (*values, version, route.key),
    )
    tx.record_set(route.key, aspect, version, command, command.at_ms)


def _session_value(aspect: str) -> Any:
    def applied(tx: Transaction, command: Any) -> bool:
        return tx.was_set(command.session_id, aspect, command.replaces + 1, command)

    return applied


def _route_value(aspect: str) -> Any:
    def applied(tx: Transaction, command: Any) -> bool:
        return tx.was_set(command.key, aspect, command.replaces + 1, command)

    return applied


# Keys ----------------------------------------------------------------------------------------


def _stored_route(tx: Transaction, key: SessionKey) -> RouteState:
    route = tx.route(key)
    if not route.exists:
        refuse("missing", f"key {key}")
    return route


def _incarnation_applied(tx: Transaction, command: OpenIncarnation) -> bool:
    stored = tx.route(command.key).incarnation
    # Overtaken since, it has left no trace; what stands before it in its unit has.
    return stored == command.incarnation or (tx.found and stored > command.incarnation)


def _open_incarnation(tx: Transaction, command: OpenIncarnation) -> None:
    route = tx.route(command.key)
    if command.incarnation < route.incarnation:
        refuse("stale_incarnation", command.key, route.incarnation, command.incarnation)
    tx.change(
        "INSERT INTO routes (key, incarnation) VALUES (?, ?) "
        "ON CONFLICT (key) DO UPDATE SET incarnation = excluded.incarnation",
        (command.key, command.incarnation),
    )
    route.exists, route.incarnation = True, command.incarnation


def move_route(
    tx: Transaction,
    key: SessionKey,
    session_id: SessionId,
    replaces: int,
    command: Any,
    at_ms: int | None = None,
) -> None:
    """The one place where a key gets another session; always part of a committed unit."""
    route = _stored_route(tx, key)
    version = _expect(route.versions, "route", key, replaces)
    tx.change(
        "UPDATE routes SET session_id = ?, route_version = ? WHERE key = ?",
        (session_id, version, key),
    )
    tx.record_set(key, "route", version, command, command.at_ms if at_ms is None else at_ms)
    route.session_id = session_id
    tx.route_writes += 1


def holder_of(tx: Transaction, session_id: SessionId) -> SessionKey | None:
    """The key whose route names the session."""
    row = tx.one("SELECT key FROM routes WHERE session_id = ?", (session_id,))
    return row[0] if row else None


def tip_of(tx: Transaction, session: SessionState) -> SessionId:
    """Where a chain of rotations ends."""
    n, tip, seen = session.n, session.id, {session.n}
    while row := tx.one("SELECT n, id FROM sessions WHERE parent = ? AND edge = 'rotation'", (n,)):
        n, tip = row
        if n in seen:  # imported data may hold a cycle; it must not hang us
            break
        seen.add(n)
    return tip


def _set_route(tx: Transaction, command: SetRoute) -> None:
    holder = holder_of(tx, command.session_id)
    if holder is not None and holder != command.key:
        refuse("route_conflict", command.key, stored=holder, given=command.session_id)
    session = tx.session(command.session_id)
    if session is not None:
        tx.stored_session(command.session_id)
        if session.hidden:
            refuse("missing", f"session {session.id}")
        if session.end_kind == "rotation":
            refuse("route_conflict", command.key, stored=tip_of(tx, session), given=session.id)
        if session.key != command.key:
            if not command.take_over:
                refuse("route_conflict", command.key, stored=session.key, given=session.id)
            _take_over(tx, session, command)
    move_route(tx, command.key, command.session_id, command.replaces, command)


def _take_over(tx: Transaction, session: SessionState, command: SetRoute) -> None:
    """The session changes hands; whoever made it is still recognised by its former key."""
    row = tx.one(
        "SELECT coalesce(max(version), 0) FROM changes WHERE scope = ? AND aspect = 'former_key'",
        (session.id,),
    )
    assert row is not None
    tx.record_set(session.id, "former_key", row[0] + 1, session.key, command.at_ms)
    tx.change("UPDATE sessions SET key = ? WHERE n = ?", (command.key, session.n))
    session.key = command.key


def _set_pending_title(tx: Transaction, command: SetPendingTitle) -> None:
    origin = None if command.title is None else command.origin
    columns = "pending_title = ?, pending_title_origin = ?"
    _set_on_route(tx, command, "pending_title", columns, command.title, origin)


def _count_useless(tx: Transaction, command: CountUselessCompressions) -> None:
    _set_on_route(tx, command, "compression", "useless_compressions = ?", command.count)


# Sessions ------------------------------------------------------------------------------------


def _session_created(tx: Transaction, command: CreateSession) -> bool:
    session = tx.session(command.session_id)
    if session is None:
        return False
    parent = None if command.parent_id is None else tx.session(command.parent_id)
    if session.parent != (parent.n if parent else None):
        return False
    if session.key == command.key:
        return True
    row = tx.one(
        "SELECT 1 FROM sessions s JOIN changes c ON c.scope = s.id AND c.aspect = 'former_key' "
        "WHERE s.n = ? AND s.started_ms = ? AND c.digest = ?",
        (session.n, command.at_ms, digest(command.key)),
    )
    return row is not None


def _create_session(tx: Transaction, command: CreateSession) -> None:
    session = tx.session(command.session_id)
    holder = holder_of(tx, command.session_id)
    owner = session.key if session is not None else holder
    if session is not None or (holder is not None and holder != command.key):
        refuse("conflict", f"session {command.session_id}", stored=owner, given=command.key)
    parent = None
    if command.parent_id is not None:
        parent = tx.session(command.parent_id)
        if parent is None:
            refuse("missing", f"parent session {command.parent_id}")
    if command.edge == "rotation" and not command.hidden:
        refuse("invalid", "edge", given="only a rotation makes a rotation's child")
    session = tx.insert_session(
        {
            "id": command.session_id,
            "key": command.key,
            "parent": parent.n if parent else None,
            "edge": command.edge,
            "source": command.source,
            "user": command.user,
            "model": command.model,
            "started_ms": command.at_ms,
            "hidden": command.hidden,
            "meta": None if command.meta is None else to_json(command.meta),
        },
        command.at_ms,
    )
    tx.touch(session)


def _set_title(tx: Transaction, command: SetTitle) -> None:
    session = tx.stored_session(command.session_id)
    if command.title is not None:
        row = tx.one(
            "SELECT id FROM sessions WHERE title = ? AND n <> ?", (command.title, session.n)
        )
        if row is not None:
            refuse("title_taken", session.id, stored=row[0], given=command.title)
    origin = None if command.title is None else command.origin
    set_on_session(tx, command, "title", "title = ?, title_origin = ?", command.title, origin)
    session.title, session.title_origin = command.title, origin


def next_title(tx: Transaction, title: str) -> str:
    """The title with the next free number: `Chat`, `Chat #2`, `Chat #3`."""
    numbered = _NUMBERED.match(title)
    base, number = (numbered[1], int(numbered[2])) if numbered else (title, 1)
    while True:
        number += 1
        suffix = f" #{number}"
        candidate = base[: TITLE_LENGTH_MAX - len(suffix)].rstrip() + suffix
        if tx.one("SELECT 1 FROM sessions WHERE title = ?", (candidate,)) is None:
            return candidate


def _set_flags(tx: Transaction, command: SetFlags) -> None:
    columns = "archived = ?, pinned = ?"
    set_on_session(tx, command, "flags", columns, command.archived, command.pinned)


def _set_details(tx: Transaction, command: SetDetails) -> None:
    meta = None if command.meta is None else to_json(command.meta)
    columns = "user = ?, model = ?, meta = ?"
    set_on_session(tx, command, "details", columns, command.user, command.model, meta)


def _end_session(tx: Transaction, command: EndSession) -> None:
    session = tx.stored_session(command.session_id)
    replaced_by_boundary = session.end_kind == "suspension" and command.kind == "boundary"
    if session.end_kind is not None and not replaced_by_boundary:
        refuse("ended", session.id, stored=session.end_reason, given=command.reason)
    columns = "ended_ms = ?, end_reason = ?, end_kind = ?"
    set_on_session(tx, command, "end", columns, command.at_ms, command.reason, command.kind)
    session.end_kind, session.end_reason = command.kind, command.reason


def _reopen_session(tx: Transaction, command: ReopenSession) -> None:
    session = tx.stored_session(command.session_id)
    if session.end_kind == "rotation":
        tip = tip_of(tx, session)
        if tip != session.id:  # a parent without a child may be reopened: contract G4
            refuse("route_conflict", session.key, stored=tip, given=session.id)
        # A rotation moves the version without a row of its own: one for what is undone here.
        tx.record_set(session.id, "end", session.versions["end"], command, command.at_ms)
    columns = "ended_ms = NULL, end_reason = NULL, end_kind = NULL"
    set_on_session(tx, command, "end", columns)
    session.end_kind = session.end_reason = None


# Marks ---------------------------------------------------------------------------------------


def _mark_set(tx: Transaction, command: SetMark) -> bool:
    return tx.one("SELECT value FROM marks WHERE name = ?", (command.name,)) == (command.value,)


def _set_mark(tx: Transaction, command: SetMark) -> None:
    row = tx.one("SELECT value FROM marks WHERE name = ?", (command.name,))
    if row is not None:
        refuse("conflict", f"mark {command.name}", stored=row[0], given=command.value)
    tx.change("INSERT INTO marks VALUES (?, ?)", (command.name, command.value))


HANDLERS: Handlers = {
    OpenIncarnation: Handler(_incarnation_applied, _open_incarnation),
    SetRoute: Handler(_route_value("route"), _set_route),
    SetPendingTitle: Handler(_route_value("pending_title"), _set_pending_title),
    CountUselessCompressions: Handler(_route_value("compression"), _count_useless),
    CreateSession: Handler(_session_created, _create_session),
    SetTitle: Handler(_session_value("title"), _set_title),
    SetFlags: Handler(_session_value("flags"), _set_flags),
    SetDetails: Handler(_session_value("details"), _set_details),
    EndSession: Handler(_session_value("end"), _end_session),
    ReopenSession: Handler(_session_value("end"), _reopen_session),
    SetMark: Handler(_mark_set, _set_mark),
}
