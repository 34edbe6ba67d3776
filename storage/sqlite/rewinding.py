"""Handlers for going back: rewind, and restore, which undoes the last rewind.

Keeps: nothing is deleted, rows change their state; what a rewind has changed is written down with
it, so that it can be undone exactly; only the last thing that happened to a transcript is undone.
"""

from __future__ import annotations

import json
from typing import Any

from ..commands import Restore, Rewind
from .handlers import Handler, Handlers
from .rows import ACTIVE, REWOUND, SUMMARISED
from .transaction import SessionState, Transaction, refuse
from .transcript import PLACE, add_row, recount_active

# Rewind and restore --------------------------------------------------------------------------


def _rewound(tx: Transaction, command: Rewind | Restore) -> bool:
    return tx.was_set(command.session_id, "revision", command.replaces + 1, command)


def _expect_revision(session: SessionState, replaces: int) -> None:
    if session.revision != replaces:
        refuse("stale", f"revision of {session.id}", stored=session.revision, given=replaces)


def _rewind(tx: Transaction, command: Rewind) -> None:
    """Rows at or after the point go.

    Rows before it come back if the summary that covered them goes.
    """
    session = tx.stored_session(command.session_id)
    _expect_revision(session, command.replaces)
    tx.flush()
    gone = tx.all(
        f"SELECT seq, state, summarised_by FROM messages WHERE session = ? AND state <> {REWOUND} "
        f"AND {PLACE} >= ?",
        (session.n, command.to_seq),
    )
    gone_seqs = json.dumps([seq for seq, _, _ in gone])
    back = tx.all(
        "SELECT seq, state, summarised_by FROM messages WHERE session = ? AND state = "
        f"{SUMMARISED} "
        f"AND {PLACE} < ? AND summarised_by IN (SELECT value FROM json_each(?))",
        (session.n, command.to_seq, gone_seqs),
    )
    _set_states(tx, session, gone_seqs, REWOUND)
    back_seqs = json.dumps([seq for seq, _, _ in back])
    _set_states(tx, session, back_seqs, ACTIVE)
    next_seq = session.next_seq
    for draft in command.closing:
        add_row(tx, session, draft)
    tx.flush_messages()
    recount_active(tx, session)
    tx.revise(session, command.at_ms)
    tx.change(
        "INSERT INTO rewinds VALUES (?, ?, 'rewind', ?, ?, ?, ?)",
        (
            session.n,
            session.revision,
            command.to_seq,
            next_seq,
            json.dumps(_ranges([*gone, *back]), separators=(",", ":")),
            command.at_ms,
        ),
    )
    tx.record_set(session.id, "revision", session.revision, command, command.at_ms)


def _set_states(tx: Transaction, session: SessionState, seqs: str, state: int) -> None:
    tx.change(
        "UPDATE messages SET state = ?, summarised_by = NULL "
        "WHERE session = ? AND seq IN (SELECT value FROM json_each(?))",
        (state, session.n, seqs),
    )


def _ranges(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    """(seq, state, summarised_by) rows as runs: [first seq, last seq, state, summarised_by]."""
    ranges: list[list[Any]] = []
    for seq, state, summarised_by in sorted(rows, key=lambda row: int(row[0])):
        if ranges and ranges[-1][1:] == [seq - 1, state, summarised_by]:
            ranges[-1][1] = seq
        else:
            ranges.append([seq, seq, state, summarised_by])
    return ranges


def _restore(tx: Transaction, command: Restore) -> None:
    session = tx.stored_session(command.session_id)
    _expect_revision(session, command.replaces)
    tx.flush()
    row = tx.one(
        "SELECT kind, to_seq, next_seq, changed FROM rewinds WHERE session = ? AND revision = ?",
        (session.n, session.revision),
    )
    # The rewind must be the last thing that happened: what came after it would be torn from its
    # context.
    if row is None or row[0] != "rewind":
        refuse("stale", f"rewind of {session.id}", given=command.replaces)
    _, to_seq, next_seq, changed = row
    # What the rewind itself has added, results for open tool calls, has no use any more.
    tx.change(
        f"UPDATE messages SET state = {REWOUND} WHERE session = ? AND seq >= ?",
        (session.n, next_seq),
    )
    for first, last, state, summarised_by in json.loads(changed):
        tx.change(
            "UPDATE messages SET state = ?, summarised_by = ? WHERE session = ? AND seq BETWEEN ? "
            "AND ?",
            (state, summarised_by, session.n, first, last),
        )
    recount_active(tx, session)
    tx.revise(session, command.at_ms)
    tx.change(
        "INSERT INTO rewinds VALUES (?, ?, 'restore', ?, ?, '[]', ?)",
        (session.n, session.revision, to_seq, next_seq, command.at_ms),
    )
    tx.record_set(session.id, "revision", session.revision, command, command.at_ms)


HANDLERS: Handlers = {
    Rewind: Handler(_rewound, _rewind),
    Restore: Handler(_rewound, _restore),
}
