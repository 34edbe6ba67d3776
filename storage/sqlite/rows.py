"""Messages to rows and back, exactly.

What most messages have is in columns; the rest (`Details`) is one JSON text, NULL when there is
none. Two contents are equal when their canonical forms are: `1`, `1.0` and `true` are three
different contents, and the order of an object's members is none.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..identity import BlobId, Seq, SessionId, TurnId, Uid
from ..records import Draft, JsonObject, Message, MessageState, Record, Tokens, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from apsw import SQLiteValue

STATES: tuple[MessageState, ...] = ("active", "summarised", "rewound")
ACTIVE, SUMMARISED, REWOUND = 0, 1, 2
MESSAGE, SUMMARY, ERASED = 0, 1, 2  # two bits: an erased summary is still a summary


class Details(Record, frozen=True, kw_only=True):
    """The fields of `Draft` that have no column of their own."""

    parts: tuple[JsonObject, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: Tokens | None = None
    platform_id: str | None = None
    meta: JsonObject | None = None
    blobs: tuple[BlobId, ...] = ()


NO_DETAILS = Details()
_encode = msgspec.json.Encoder().encode
_encode_canonical = msgspec.json.Encoder(order="deterministic").encode
_decode_details = msgspec.json.Decoder(Details).decode


def to_json(value: Any) -> str:
    """Compact JSON, member order kept."""
    return _encode(value).decode()


def canonical(value: Any) -> bytes:
    """Equal bytes for equal content, and only for equal content."""
    return _encode_canonical(value)


def digest(value: Any) -> bytes:
    """16 bytes that stand for a content."""
    return blake2b(_encode_canonical(value), digest_size=16).digest()


def details_of(draft: Draft) -> str | None:
    """The JSON of what has no column, `None` for a plain text message."""
    if draft.plain:
        return None
    return to_json(
        Details(
            parts=draft.parts,
            tool_calls=draft.tool_calls,
            tool_call_id=draft.tool_call_id,
            name=draft.name,
            reasoning=draft.reasoning,
            finish_reason=draft.finish_reason,
            tokens=draft.tokens,
            platform_id=draft.platform_id,
            meta=draft.meta,
            blobs=draft.blobs,
        )
    )


def size_of(text: str | None, details: str | None) -> int:
    """Content bytes of a row; the same number as SQL's `octet_length` of the two columns gives."""
    size = 0
    if text is not None:
        size = len(text) if text.isascii() else len(text.encode())
    if details is not None:
        size += len(details) if details.isascii() else len(details.encode())
    return size


def same_content(stored: Iterable[SQLiteValue], draft: Draft) -> bool:
    """Whether a stored (uid, role, created_ms, user, text, details, kind) is what was given."""
    uid, role, created_ms, user, text, details, kind = stored
    if uid != bytes.fromhex(draft.uid):
        return False
    # The content of an erased row is gone on purpose; its identity is all there is to compare.
    if cast("int", kind) & ERASED:
        return True
    if (role, created_ms, user, text) != (draft.role, draft.created_ms, draft.user, draft.text):
        return False
    given = details_of(draft)
    if details == given:
        return True
    if details is None or given is None:
        return False
    # The same object may have been given with its members in another order.
    return canonical(msgspec.json.decode(str(details))) == canonical(msgspec.json.decode(given))


# The columns, in the order that `message_of` reads them.
MESSAGE_COLUMNS = (
    "s.id, m.seq, m.uid, t.id, m.role, m.state, m.carried, m.kind, m.created_ms, m.user, m.text, "
    "m.details, m.covers_first, m.covers_last, m.summarised_by"
)
MESSAGE_TABLES = "messages m JOIN sessions s ON s.n = m.session LEFT JOIN turns t ON t.n = m.turn"
# The same columns for rows whose text is not valid UTF-8: text comes as bytes.
MESSAGE_COLUMNS_RAW = (
    MESSAGE_COLUMNS.replace("m.user", "CAST(m.user AS BLOB)")
    .replace("m.text", "CAST(m.text AS BLOB)")
    .replace("m.details", "CAST(m.details AS BLOB)")
)


def message_of(row: Sequence[Any], *, damaged: bool = False) -> Message:
    """A stored row as a record."""
    details = _decode_details(row[11]) if row[11] is not None else NO_DETAILS
    return Message(
        session_id=SessionId(row[0]),
        seq=Seq(row[1]),
        uid=Uid(row[2].hex()),
        turn_id=None if row[3] is None else TurnId(row[3]),
        role=row[4],
        state=STATES[int(row[5])],
        carried=bool(row[6]),
        summary=bool(row[7] & SUMMARY),
        erased=bool(row[7] & ERASED),
        created_ms=row[8],
        user=row[9],
        text=row[10],
        covers=None if row[13] is None else (Seq(row[12]), Seq(row[13])),
        summarised_by=None if row[14] is None else Seq(row[14]),
        parts=details.parts,
        tool_calls=details.tool_calls,
        tool_call_id=details.tool_call_id,
        name=details.name,
        reasoning=details.reasoning,
        finish_reason=details.finish_reason,
        tokens=details.tokens,
        platform_id=details.platform_id,
        meta=details.meta,
        blobs=details.blobs,
        damaged=damaged,
    )


def mended_message_of(row: Sequence[Any]) -> Message:
    """A row read raw, because its text is not valid UTF-8.

    Shown with replacement characters and marked.
    """
    readable: list[Any] = list(row)
    damaged = False
    for column in (9, 10, 11):
        raw = readable[column]
        if raw is None:
            continue
        try:
            readable[column] = raw.decode()
        except UnicodeDecodeError:
            damaged = True
            readable[column] = None if column == 11 else raw.decode(errors="replace")
    try:
        return message_of(readable, damaged=damaged)
    except msgspec.DecodeError:  # readable text, but not the JSON that we wrote
        readable[11] = None
        return message_of(readable, damaged=True)
