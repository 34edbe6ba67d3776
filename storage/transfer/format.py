"""The format: one JSON object a line, the type of each line first. `docs/transfer.md` is this page.

Keeps: one way to write each content, so that equal databases give equal bytes; a member that has
its default is left out. A version that was released is never changed: what is new is a new version.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct

from ..identity import BlobId, Seq, SessionId, SessionKey, TurnId, Uid
from ..records import (
    Edge,
    EndKind,
    JsonObject,
    Message,
    MessageState,
    Role,
    SessionFacts,
    TitleOrigin,
    Tokens,
    ToolCall,
    Turn,
    TurnOutcome,
    Usage,
)

VERSION = 1


class Line(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
    tag_field="type",
):
    """One line."""


class Header(Line, frozen=True, kw_only=True, tag="onepen-export"):
    """The first line."""

    version: int


class SessionLine(Line, frozen=True, kw_only=True, tag="session"):
    """A session; what follows is in it, up to the next one. `messages` is how many rows it has."""

    id: SessionId
    key: SessionKey
    current: bool = False
    parent_id: SessionId | None = None
    edge: Edge | None = None
    source: str = ""
    user: str | None = None
    model: str | None = None
    title: str | None = None
    title_origin: TitleOrigin | None = None
    started_ms: int
    last_ms: int
    ended_ms: int | None = None
    end_reason: str | None = None
    end_kind: EndKind | None = None
    archived: bool = False
    pinned: bool = False
    meta: JsonObject | None = None
    deleted: bool = False
    compaction_count: int = 0
    messages: Seq

    def facts(self) -> SessionFacts:
        """The same, as a command carries it."""
        given = {n: getattr(self, n) for n in SessionFacts.__struct_fields__ if n != "next_seq"}
        return SessionFacts(**given, next_seq=self.messages)


class TurnLine(Line, frozen=True, kw_only=True, tag="turn"):
    """A turn that ended in this session; `key` only if it is not the session's."""

    id: TurnId
    key: SessionKey | None = None
    attempt: int = 0
    outcome: TurnOutcome
    opened_ms: int
    started_ms: int | None = None
    ended_ms: int

    def turn(self, session: SessionLine) -> Turn:
        return Turn(
            id=self.id,
            key=session.key if self.key is None else self.key,
            session_id=session.id,
            state="ended",
            attempt=self.attempt,
            outcome=self.outcome,
            opened_ms=self.opened_ms,
            started_ms=self.started_ms,
            ended_ms=self.ended_ms,
        )


class UsageLine(Line, frozen=True, kw_only=True, tag="usage"):
    """What one model call cost."""

    call_id: Uid
    turn_id: TurnId | None = None
    model: str = ""
    auxiliary: bool = False
    tokens: Tokens = Tokens()
    cost_nanos: int = 0
    at_ms: int


class BlobLine(Line, frozen=True, kw_only=True, tag="blob"):
    """An attachment, in front of the first session that has it; its pieces follow."""

    id: BlobId
    size_bytes: int
    chunk_count: int
    media_type: str
    sealed_ms: int


class ChunkLine(Line, frozen=True, kw_only=True, tag="chunk"):
    """One piece of it."""

    index: int
    data: bytes


class MessageLine(Line, frozen=True, kw_only=True, tag="message"):
    """A row of the session's transcript."""

    seq: Seq
    uid: Uid
    role: Role
    text: str | None = None
    parts: tuple[JsonObject, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: Tokens | None = None
    platform_id: str | None = None
    user: str | None = None
    created_ms: int = 0
    meta: JsonObject | None = None
    blobs: tuple[BlobId, ...] = ()
    turn_id: TurnId | None = None
    state: MessageState = "active"
    carried: bool = False
    summary: bool = False
    covers: tuple[Seq, Seq] | None = None
    summarised_by: Seq | None = None
    erased: bool = False

    def message(self, session_id: SessionId) -> Message:
        return Message(session_id=session_id, **{n: getattr(self, n) for n in _MESSAGE_FIELDS})


class EndLine(Line, frozen=True, kw_only=True, tag="end"):
    """The last line: what was there, and the digest of every byte before it."""

    sessions: int
    messages: int
    sha256: str | None = None


AnyLine: TypeAlias = (
    Header | SessionLine | TurnLine | UsageLine | BlobLine | ChunkLine | MessageLine | EndLine
)

_MESSAGE_FIELDS = MessageLine.__struct_fields__
_encode = msgspec.json.Encoder().encode
_decode = cast("Any", msgspec.json.Decoder)(AnyLine).decode


def encoded(line: Line) -> bytes:
    """The line's bytes."""
    return _encode(line) + b"\n"


def decoded(line: bytes) -> Any:
    """The line as one of `AnyLine`. Raises `msgspec.DecodeError`, or `RecursionError`."""
    return _decode(line)


def message_line(message: Message) -> MessageLine:
    return MessageLine(**{name: getattr(message, name) for name in _MESSAGE_FIELDS})


def usage_line(usage: Usage) -> UsageLine:
    return UsageLine(**{name: getattr(usage, name) for name in UsageLine.__struct_fields__})


def version_of(line: bytes) -> int | None:
    """The version that a first line names; `None` if it is not one of ours."""
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    members = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    version: Any = members.get("version")
    ours = members.get("type") == "onepen-export" and type(version) is int and version > 0
    return version if ours else None
