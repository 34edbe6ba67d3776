"""The handler for deletion: all text of a session goes, and what must stay stays.

Keeps: a tombstone (id, key, edge), so that lineages hold; turns and inbox rows without text, so
that a repeated inbound message is still recognised; carried copies in other sessions, of which the
oldest becomes the original.
"""

from __future__ import annotations

from ..commands import DeleteSession
from .handlers import Handler, Handlers
from .rows import SUMMARY
from .sessions import TOOL_CALLS, holder_of
from .transaction import SessionState, Transaction, refuse
from .turns import with_step


def _session_deleted(tx: Transaction, command: DeleteSession) -> bool:
    session = tx.session(command.session_id)
    return session is not None and session.deleted


def _delete_session(tx: Transaction, command: DeleteSession) -> None:
    session = tx.stored_session(command.session_id)
    holder = holder_of(tx, session.id)
    if holder is not None:
        refuse("route_conflict", holder, stored=holder, given=session.id)
    tx.flush()
    _give_originals_away(tx, session)
    n = (session.n,)
    turns = "(SELECT n FROM turns WHERE session = ?)"
    for table, rows in (
        ("blob_uses", "session = ?"),
        ("messages", "session = ?"),
        ("rewinds", "session = ?"),
        ("deliveries", "session = ?"),
        ("deliveries", f"turn IN {turns}"),
        ("effects", f"turn IN {turns}"),
        ("questions", f"turn IN {turns}"),
    ):
        tx.change(f"DELETE FROM {table} WHERE {rows}", n)
    # Turns and inbox rows stay, without text, so that what is sent again is still recognised.
    for turn, attempt, outcome, history, ended_ms in tx.all(
        "SELECT n, attempt, outcome, history, ended_ms FROM turns "
        "WHERE session = ? AND outcome IS NOT NULL",
        n,
    ):
        tx.change(
            "UPDATE turns SET history = ?, outcome = json_object('kind', "
            "CASE WHEN json_valid(outcome) THEN outcome ->> 'kind' ELSE 'failed' END) WHERE n = ?",
            (with_step(history, attempt, "ended", [outcome, ended_ms]), turn),
        )
    tx.forget_turns()
    for column in ("turn", "into_turn"):
        tx.change(f"UPDATE inbox SET body = NULL, reply_to = NULL WHERE {column} IN {turns}", n)
    tx.change(f"UPDATE dead_letters SET reason = '' WHERE turn IN {turns}", n)
    tx.change(
        "UPDATE sessions SET deleted = 1, title = NULL, title_origin = NULL, user = NULL, meta = "
        "NULL, "
        "ended_ms = coalesce(ended_ms, ?), end_reason = coalesce(end_reason, 'deleted'), "
        "end_kind = coalesce(end_kind, 'boundary') WHERE n = ?",
        (command.at_ms, session.n),
    )
    tx.change(
        "UPDATE heads SET message_count = 0, active_count = 0, active_bytes = 0, tool_call_count "
        "= 0 "
        "WHERE session = ?",
        n,
    )
    tx.forget(session.id)


def _give_originals_away(tx: Transaction, session: SessionState) -> None:
    """Carried copies of the session's own messages.

    The oldest copy of each becomes the original.
    """
    heirs = tx.all(
        "SELECT min(c.n), c.uid FROM messages o JOIN messages c ON c.uid = o.uid AND c.carried = 1 "
        "WHERE o.session = ? AND o.carried = 0 AND c.session <> o.session GROUP BY c.uid",
        (session.n,),
    )
    for n, uid in heirs:
        # The index allows one original of a uid: the old one goes first.
        tx.change(
            "DELETE FROM messages WHERE uid = ? AND carried = 0 AND session = ?", (uid, session.n)
        )
        tx.change("UPDATE messages SET carried = 0 WHERE n = ?", (n,))
        tx.change(
            "UPDATE heads SET message_count = message_count + 1, "
            f"tool_call_count = tool_call_count + (SELECT {TOOL_CALLS} FROM messages WHERE n = ?) "
            "WHERE session = (SELECT session FROM messages "
            f"WHERE n = ? AND kind & {SUMMARY} = 0)",
            (n, n),
        )
        heir = tx.one(
            "SELECT s.id FROM sessions s JOIN messages m ON m.session = s.n WHERE m.n = ?", (n,)
        )
        assert heir is not None
        tx.forget(heir[0])


HANDLERS: Handlers = {DeleteSession: Handler(_session_deleted, _delete_session)}
