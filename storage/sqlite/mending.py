"""Handler of a repair: the numbers that a session keeps about its rows, made anew from them.

Keeps: in a sound session nothing but the revision changes, which moves so that everybody who holds
the transcript reads it again (contract H3); what can't be told any more, because rows were erased,
stays as it is as long as it is possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..commands import RecountSession
from ..records import Tokens
from .handlers import Handler, Handlers
from .rows import ERASED, MESSAGE, to_json
from .sessions import TOOL_CALLS
from .transaction import Transaction, refuse
from .transcript import recount_active

if TYPE_CHECKING:
    from .transaction import SessionState

_ASPECT = "recount"
_FIELDS = ("input", "output", "cache_read", "cache_write", "reasoning")


def _recounted(tx: Transaction, command: RecountSession) -> bool:
    return tx.was_set(command.session_id, _ASPECT, command.replaces + 1, command)


def _recount(tx: Transaction, command: RecountSession) -> None:
    session = tx.session(command.session_id) or _with_head(tx, command)
    if session.revision != command.replaces:
        what = f"revision of {session.id}"
        refuse("stale", what, stored=session.revision, given=command.replaces)
    tx.flush()
    if not session.deleted:  # of a tombstone's rows nothing is left that could be counted
        _count_seqs(tx, session)
    _count_originals(tx, session)
    recount_active(tx, session)
    _add_up_usage(tx, session)
    row = tx.one("SELECT coalesce(max(revision), 0) FROM rewinds WHERE session = ?", (session.n,))
    assert row is not None
    session.revision = max(session.revision, row[0])
    tx.revise(session)
    tx.record_set(session.id, _ASPECT, command.replaces + 1, command, command.at_ms)


def _with_head(tx: Transaction, command: RecountSession) -> SessionState:
    """A session whose head is gone gets an empty one, to be filled."""
    row = tx.one("SELECT n, started_ms FROM sessions WHERE id = ?", (command.session_id,))
    if row is None:
        refuse("missing", f"session {command.session_id}")
    n, started_ms = row
    last = tx.one("SELECT coalesce(max(created_ms), ?) FROM messages WHERE session = ?", row[::-1])
    last_ms = started_ms if last is None else max(started_ms, last[0])
    tx.change(
        "INSERT INTO heads VALUES (?, 0, 0, 0, 0, 0, 0, 0, ?, ?)", (n, last_ms, last_ms // 60_000)
    )
    session = tx.session(command.session_id)
    assert session is not None
    return session


def _count_seqs(tx: Transaction, session: SessionState) -> None:
    row = tx.one("SELECT coalesce(max(seq), -1) + 1 FROM messages WHERE session = ?", (session.n,))
    assert row is not None
    session.next_seq = row[0]
    session.last = None


def _count_originals(tx: Transaction, session: SessionState) -> None:
    """An erased row does not tell whether it was counted, nor what it called."""
    row = tx.one(
        f"SELECT count(*) FILTER (WHERE kind = {MESSAGE}), "
        f"count(*) FILTER (WHERE kind IN ({MESSAGE}, {ERASED})), "
        f"coalesce(sum({TOOL_CALLS}) FILTER (WHERE kind = {MESSAGE}), 0), "
        f"coalesce(sum({TOOL_CALLS}), 0), count(*) FILTER (WHERE kind = {ERASED}) "
        "FROM messages WHERE session = ? AND carried = 0",
        (session.n,),
    )
    assert row is not None
    fewest, most, calls_fewest, calls_most, erased = row
    session.message_count = min(max(session.message_count, fewest), most)
    calls = max(session.tool_call_count, calls_fewest)
    session.tool_call_count = calls if erased else min(calls, calls_most)


def _add_up_usage(tx: Transaction, session: SessionState) -> None:
    sums = ", ".join(f"coalesce(sum({field}), 0)" for field in (*_FIELDS, "cost_nanos"))
    for auxiliary, prefix in ((0, ""), (1, "auxiliary_")):
        row = tx.one(
            f"SELECT {sums}, count(*) FROM usage WHERE session = ? AND auxiliary = ?",
            (session.n, auxiliary),
        )
        assert row is not None
        *counts, cost_nanos, calls = row
        tokens = Tokens(**dict(zip(_FIELDS, counts, strict=True)))
        stored = tx.one(
            f"SELECT CASE WHEN json_valid({prefix}tokens) THEN {prefix}tokens END, "
            f"{prefix}cost_nanos FROM sessions WHERE n = ?",
            (session.n,),
        )
        assert stored is not None
        if (_tokens_of(stored[0]), stored[1]) != (tokens, cost_nanos):
            tx.change(
                f"UPDATE sessions SET {prefix}tokens = ?, {prefix}cost_nanos = ? WHERE n = ?",
                (to_json(tokens) if calls else None, cost_nanos, session.n),
            )


def _tokens_of(stored: str | None) -> Tokens | None:
    if stored is None:
        return Tokens()
    try:
        return msgspec.json.decode(stored, type=Tokens)
    except msgspec.ValidationError:
        return None


HANDLERS: Handlers = {RecountSession: Handler(_recounted, _recount)}
