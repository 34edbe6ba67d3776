"""Handlers for blobs: pieces, the seal, and dropping what nothing refers to.

Keeps: a message refers only to blobs whose pieces are all there; a blob that is referred to is
not dropped.
"""

from __future__ import annotations

import json

from ..commands import DropBlob, PutChunk, SealBlob
from .handlers import Handler, Handlers
from .transaction import Transaction, refuse


def _chunk_put(tx: Transaction, command: PutChunk) -> bool:
    row = tx.one(
        "SELECT c.data FROM chunks c JOIN blobs b ON b.n = c.blob WHERE b.id = ? AND c.idx = ?",
        (command.blob_id, command.index),
    )
    return row is not None and row[0] == command.data


def _put_chunk(tx: Transaction, command: PutChunk) -> None:
    row = tx.one("SELECT n, sealed_ms FROM blobs WHERE id = ?", (command.blob_id,))
    if row is None:
        tx.change(
            "INSERT INTO blobs (id, size_bytes, chunk_count, media_type) VALUES (?, 0, 0, '')",
            (command.blob_id,),
        )
        row = tx.one("SELECT n, sealed_ms FROM blobs WHERE id = ?", (command.blob_id,))
    assert row is not None
    n, sealed_ms = row
    taken = tx.one("SELECT 1 FROM chunks WHERE blob = ? AND idx = ?", (n, command.index))
    if sealed_ms is not None or taken is not None:
        refuse("conflict", f"piece {command.index} of blob {command.blob_id}")
    tx.change("INSERT INTO chunks VALUES (?, ?, ?)", (n, command.index, command.data))


def _blob_sealed(tx: Transaction, command: SealBlob) -> bool:
    row = tx.one(
        "SELECT size_bytes, chunk_count FROM blobs WHERE id = ? AND sealed_ms IS NOT NULL",
        (command.blob_id,),
    )
    return row == (command.size_bytes, command.chunk_count)


def _seal_blob(tx: Transaction, command: SealBlob) -> None:
    row = tx.one("SELECT n, sealed_ms FROM blobs WHERE id = ?", (command.blob_id,))
    what = f"blob {command.blob_id}"
    if row is None:
        refuse("missing", what)
    if row[1] is not None:
        refuse("conflict", what)
    stored = tx.one(
        "SELECT count(*), coalesce(sum(length(data)), 0), min(idx), max(idx) FROM chunks "
        "WHERE blob = ?",
        (row[0],),
    )
    if stored != (command.chunk_count, command.size_bytes, 0, command.chunk_count - 1):
        refuse("missing", f"a piece of blob {command.blob_id}", stored=json.dumps(stored))
    tx.change(
        "UPDATE blobs SET size_bytes = ?, chunk_count = ?, media_type = ?, sealed_ms = ? WHERE n "
        "= ?",
        (command.size_bytes, command.chunk_count, command.media_type, command.at_ms, row[0]),
    )


def _blob_dropped(tx: Transaction, command: DropBlob) -> bool:
    row = tx.one("SELECT n, sealed_ms FROM blobs WHERE id = ?", (command.blob_id,))
    if row is None:
        return True
    if command.keeping == 0 or row[1] is not None:
        return False
    left = tx.one(
        "SELECT 1 FROM chunks WHERE blob = ? AND idx >= ? LIMIT 1", (row[0], command.keeping)
    )
    return left is None


# Messages that wait and timers name their blobs in what they bring: they are few at any time.
USED_BY = (
    ("a message", "SELECT 1 FROM blob_uses u JOIN blobs b ON b.n = u.blob WHERE b.id = ?"),
    (
        "a message that waits",
        "SELECT 1 FROM turns t INDEXED BY turns_unfinished JOIN inbox i ON i.turn = t.n "
        "WHERE t.state <> 'ended' AND i.body IS NOT NULL "
        "AND EXISTS (SELECT 1 FROM json_each(i.body, '$.blobs') j WHERE j.value = ?)",
    ),
    (
        "a timer",
        "SELECT 1 FROM timers t INDEXED BY timers_due WHERE t.state = 'set' "
        "AND EXISTS (SELECT 1 FROM json_each(t.inbound, '$.blobs') j WHERE j.value = ?)",
    ),
)


def _drop_blob(tx: Transaction, command: DropBlob) -> None:
    for whose, sql in USED_BY:
        if tx.one(f"{sql} LIMIT 1", (command.blob_id,)) is not None:
            refuse("conflict", f"blob {command.blob_id}", stored=f"{whose} refers to it")
    if command.keeping == 0:
        tx.change("DELETE FROM blobs WHERE id = ?", (command.blob_id,))
        return
    tx.change(
        "UPDATE blobs SET size_bytes = 0, chunk_count = 0, media_type = '', sealed_ms = NULL "
        "WHERE id = ?",
        (command.blob_id,),
    )
    tx.change(
        "DELETE FROM chunks WHERE idx >= ? AND blob = (SELECT n FROM blobs WHERE id = ?)",
        (command.keeping, command.blob_id),
    )


HANDLERS: Handlers = {
    PutChunk: Handler(_chunk_put, _put_chunk),
    SealBlob: Handler(_blob_sealed, _seal_blob),
    DropBlob: Handler(_blob_dropped, _drop_blob),
}
