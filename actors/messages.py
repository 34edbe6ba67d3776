"""Messages as people and agents hand them over, turned into drafts.

Owns the forms that are understood: a string, a `Draft` or `Message`, and the chat-completion shape
(`role`, `content`, `tool_calls`, `tool_call_id`, …) as a mapping. What is not understood is refused
with `InvalidContentError`, never stored in part. Pure functions: uids and times are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
from msgspec import Struct

from ..storage import records
from ..storage.errors import InvalidContentError
from ..storage.identity import BlobId, Uid
from ..storage.records import Draft, JsonObject, Message, Tokens, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable

Given: TypeAlias = str | Draft | Mapping[str, Any]
_DRAFT_FIELDS = Draft.__struct_fields__
_CHAT_NAMES = {"content": "text", "reasoning_content": "reasoning"}


class _Said(Struct, frozen=True):
    text: str | None = None  # the one field that may be given without its name


class Inbound(_Said, frozen=True, kw_only=True):
    """A message from outside, as a gateway hands it over.

    `source` and `id` are its identity: the platform, and what the platform calls this message. Left
    out, the source is the key's part before the first colon, and the id is a fresh one. `reply_to`
    is where the reply goes, in the platform's own words. Text beside `parts` is their first part.
    """

    source: str | None = None
    id: str | None = None
    user: str | None = None
    reply_to: str | JsonObject | None = None
    parts: Sequence[JsonObject] | None = None
    platform_id: str | None = None
    blobs: tuple[BlobId, ...] = ()
    meta: JsonObject | None = None

    def body(self) -> records.Inbound:
        """What is kept of it until its turn starts."""
        text, parts = self.text, None if self.parts is None else tuple(self.parts)
        if text is not None and parts is not None:
            text, parts = None, ({"type": "text", "text": text}, *parts)
        target = self.reply_to
        return records.Inbound(
            text=text,
            parts=parts,
            user=self.user,
            reply_to={"to": target} if isinstance(target, str) else target,
            platform_id=self.platform_id,
            blobs=self.blobs,
            meta=self.meta,
        )


def texts_of(body: records.Inbound) -> list[str]:
    """What an inbound message says in words."""
    texts = [] if body.text is None else [body.text]
    parts = [part for part in body.parts or () if part.get("type") == "text"]
    return texts + [part["text"] for part in parts if isinstance(part.get("text"), str)]


def digest_of(body: records.Inbound) -> str:
    """What an inbound message says, in short: the same for the same content."""
    return blake2b(msgspec.json.encode(body, order="sorted"), digest_size=16).hexdigest()


def user_draft(body: records.Inbound, uid: Uid, now_ms: int) -> Draft:
    """The user's row of a turn."""
    return Draft(
        uid=uid,
        role="user",
        text=body.text,
        parts=body.parts,
        user=body.user,
        platform_id=body.platform_id,
        created_ms=now_ms,
        meta=body.meta,
        blobs=body.blobs,
    )


def plain(text: str) -> str:
    """The same characters as no more than text: an enum's, or what a template has marked."""
    return text if type(text) is str else str.__str__(text)


def _refuse(field: str, problem: str, hint: str) -> InvalidContentError:
    return InvalidContentError(field, problem, hint=hint)


def draft_of(given: Given, fresh_uid: Callable[[], Uid], now_ms: int) -> Draft:
    """A draft of whatever form was given; one that carries a uid keeps it."""
    if isinstance(given, str):
        return Draft(uid=fresh_uid(), role="assistant", text=plain(given), created_ms=now_ms)
    if type(given) is Draft:
        # 0 is what it has if nobody has said when it was written, and no time of ours.
        return given if given.created_ms else msgspec.structs.replace(given, created_ms=now_ms)
    if isinstance(given, Message):
        return Draft(**{name: getattr(given, name) for name in _DRAFT_FIELDS})
    if not isinstance(given, Mapping):
        hint = "give a string, a Draft, or a mapping with role and content"
        raise _refuse("message", f"{type(given).__name__} is not a message", hint)
    return _draft_of_mapping(given, fresh_uid, now_ms)


def _draft_of_mapping(given: Mapping[str, Any], fresh_uid: Callable[[], Uid], now_ms: int) -> Draft:
    fields: dict[str, Any] = {"created_ms": now_ms}
    unknown: JsonObject = {}
    for name, value in given.items():
        if name == "tool_calls":
            fields["tool_calls"] = tuple(_tool_call(call) for call in _list("tool_calls", value))
        elif name == "content":
            fields.update(_content(value))
        elif _CHAT_NAMES.get(name, name) in _DRAFT_FIELDS:
            if value is not None:
                fields[_CHAT_NAMES.get(name, name)] = value
        elif value is not None:
            unknown[str(name)] = value
    if unknown:  # nothing that an agent says is dropped silently
        fields["meta"] = {**_object("meta", fields.get("meta") or {}), "more": unknown}
    for name in ("parts", "blobs"):
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    if "role" not in fields:
        raise _refuse("role", "it is missing", "say who speaks: user, assistant, tool or system")
    uid = fields.get("uid")
    if uid is not None and not isinstance(uid, str):
        raise _refuse("uid", f"{type(uid).__name__} is no uid", "leave it out, or give it back")
    fields["uid"] = uid or fresh_uid()
    try:
        if isinstance(fields.get("tokens"), Mapping):
            fields["tokens"] = Tokens(**fields["tokens"])
        return Draft(**fields)
    except TypeError as error:
        raise _refuse("message", str(error), "use the fields of Draft") from error


def _list(field: str, value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _refuse(field, f"{type(value).__name__} is no list", "give a list")
    return cast("Sequence[Any]", value)


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(field, f"{type(value).__name__} is no mapping", "give a mapping")
    return cast("Mapping[str, Any]", value)


def _content(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, str):
        return {"text": None if value is None else plain(value)}
    if isinstance(value, list | tuple):
        parts: Sequence[Any] = cast("Any", value)
        return {"parts": tuple(parts)}
    raise _refuse(
        "content", f"{type(value).__name__} is no content", "give text or a list of parts"
    )


def _tool_call(given: Any) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    call = _object("tool_calls", given)
    function = _object("tool_calls.function", call.get("function") or call)
    arguments: Any = function.get("arguments", "")
    if not isinstance(arguments, str):
        try:
            arguments = msgspec.json.encode(arguments).decode()
        except (TypeError, ValueError) as error:
            raise _refuse("tool_calls.arguments", str(error), "give a JSON text") from error
    return ToolCall(
        id=str(call.get("id") or ""), name=str(function.get("name") or ""), arguments=arguments
    )


def content_of(draft: Draft) -> tuple[object, ...]:
    """What a message says, whatever its identity; can be compared and hashed."""
    parts: object = draft.parts
    if parts is not None:
        try:
            parts = msgspec.json.encode(parts, order="sorted")
        except (TypeError, ValueError):
            parts = repr(parts)  # it can't be stored, and will be refused as that
    calls = tuple((call.id, call.name, call.arguments) for call in draft.tool_calls)
    return (draft.role, draft.text or None, parts, draft.tool_call_id, calls)


def same_message(one: Draft, other: Draft) -> bool:
    """Whether two messages say the same, whatever their identity: for aligning reports."""
    return content_of(one) == content_of(other)


def size_of(draft: Draft) -> int:
    """Roughly how many bytes a message takes in memory, for bounds."""
    size = 200 + (len(draft.text) if draft.text else 0)
    if not draft.plain:
        size += len(repr(draft.parts)) + len(repr(draft.tool_calls)) + len(repr(draft.meta))
        size += len(draft.reasoning or "")
    return size
