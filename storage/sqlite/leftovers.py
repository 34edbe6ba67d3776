"""Handlers for sessions that nobody can reach, or in which nothing was said: contract G.

Keeps: every guard is looked at inside the transaction, so that a route that moves or a turn that
starts between the look and the write is never overlooked. What does not hold is refused as `stale`,
and nothing is changed.
"""

from __future__ import annotations

from ..commands import EndOrphan, PruneSession
from .handlers import Handler, Handlers
from .sessions import set_on_session
from .transaction import Transaction, refuse

ORPHANED_REASON = "orphaned_compression"
_ASPECTS = "'title', 'end', 'flags', 'details', 'revision', 'former_key'"
UNROUTED = "NOT EXISTS (SELECT 1 FROM routes r WHERE r.session_id = s.id)"

# Of a session that is called `s`, with its head `h`; `?` is the time before which it began, or
# ended.
ORPHANED = (
    "s.ended_ms IS NULL AND s.deleted = 0 AND s.hidden = 0 AND s.started_ms < ? "
    "AND h.message_count > 0 AND EXISTS (SELECT 1 FROM sessions p WHERE p.n = s.parent "
    f"AND p.end_reason = 'compression') AND {UNROUTED} "
    "AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.session = s.n AND t.state <> 'ended')"
)
EMPTY = (
    "s.ended_ms < ? AND s.deleted = 0 AND s.hidden = 0 AND s.pinned = 0 AND s.title IS NULL "
    f"AND h.next_seq = 0 AND {UNROUTED} "
    "AND NOT EXISTS (SELECT 1 FROM sessions c WHERE c.parent = s.n) "
    "AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.session = s.n) "
    "AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.session = s.n) "  # the inbox refers to turns
    "AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.session = s.n) "
    "AND NOT EXISTS (SELECT 1 FROM usage u WHERE u.session = s.n)"
)
_SESSION = "SELECT 1 FROM sessions s JOIN heads h ON h.session = s.n WHERE "


def _orphan_ended(tx: Transaction, command: EndOrphan) -> bool:
    return tx.was_set(command.session_id, "end", command.replaces + 1, command)


def _end_orphan(tx: Transaction, command: EndOrphan) -> None:
    session = tx.stored_session(command.session_id)
    tx.flush()
    row = tx.one(f"{_SESSION}{ORPHANED} AND s.n = ?", (command.before_ms, session.n))
    if row is None:
        refuse("stale", f"session {session.id} as an orphan", given=command.before_ms)
    columns = "ended_ms = ?, end_reason = ?, end_kind = 'suspension'"
    set_on_session(tx, command, "end", columns, command.at_ms, ORPHANED_REASON)
    session.end_kind, session.end_reason = "suspension", ORPHANED_REASON


def _session_pruned(tx: Transaction, command: PruneSession) -> bool:
    return tx.session(command.session_id) is None


def _prune_session(tx: Transaction, command: PruneSession) -> None:
    session = tx.stored_session(command.session_id)
    tx.flush()
    row = tx.one(f"{_SESSION}{EMPTY} AND s.n = ?", (command.before_ms, session.n))
    if row is None:
        refuse("stale", f"session {session.id} as an empty one", given=command.before_ms)
    for table in ("rewinds", "purges", "heads"):
        tx.change(f"DELETE FROM {table} WHERE session = ?", (session.n,))
    tx.change("DELETE FROM sessions WHERE n = ?", (session.n,))
    # Its id may be chosen again, and then begins with the first version of everything.
    tx.change(f"DELETE FROM changes WHERE scope = ? AND aspect IN ({_ASPECTS})", (session.id,))
    tx.forget(session.id)


HANDLERS: Handlers = {
    EndOrphan: Handler(_orphan_ended, _end_orphan),
    PruneSession: Handler(_session_pruned, _prune_session),
}
