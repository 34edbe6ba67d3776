"""The edge: what is given is stored exactly, or refused before it is posted.

Owns the table of outcomes in `docs/edge.md`. One call checks a whole unit and tells its size; it
walks structured content without recursion, so that no depth of nesting can hurt. It never changes
what is given: either every character comes back as it was, or `InvalidContentError` names the field
and the problem.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from .commands import (
    AcceptInbound,
    AddUsage,
    AppendMessages,
    Compact,
    DropStaged,
    EndTurn,
    ExtendSession,
    OpenTurn,
    PublishSession,
    PutChunk,
    Rewind,
    Rotate,
    SetPendingTitle,
    SetTitle,
    StageMessages,
    StartTurn,
    TakeInbound,
)
from .errors import InvalidContentError
from .records import Draft, Message, SessionFacts, Tokens, ToolCall, TurnOutcome
from .units import Guard, Unit, check_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT_BYTES_MAX = 1024 * 1024
DETAILS_BYTES_MAX = 1024 * 1024
NAME_BYTES_MAX = 1024  # keys, sources, ids, users, reasons
DEPTH_MAX = 64
TITLE_LENGTH_MAX = 100
CHUNK_BYTES_MAX = 256 * 1024
# In JSON a control character takes six bytes: six times this still fits into one row.
COMMAND_BYTES_MAX = 1280 * 1024
AMOUNT_MAX = 10**15
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1

_UID = re.compile(r"[0-9a-f]{32}")
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHOWN_MAX = 200
_BASE_BYTES = 64  # what a command costs in memory beside its content; a rough, safe number


def check_unit(unit: Unit) -> int:
    """Check everything in a unit and return its size in bytes, for bounds.

    Raises before anything is posted.
    """
    check_guarded(unit)
    size = 0
    for guard in unit.guards:
        _check_guard(guard)
    for command in unit.commands:
        size += _BASE_BYTES
        if type(command) is AppendMessages:  # by far the most frequent one; its guard was checked
            check_integer("base_seq", command.base_seq)
            if command.turn_id is not None:
                _check_text("turn_id", command.turn_id, NAME_BYTES_MAX)
            size += _check_drafts("messages", command.messages)
        elif (quick := _QUICK.get(type(command))) is not None:
            size += quick(command)
        else:
            size += _check_command(command)
    return size


def _check_guard(guard: Guard) -> None:
    _check_text("guard.key", guard.key, NAME_BYTES_MAX)
    check_integer("guard.incarnation", guard.incarnation)
    if guard.session_id is not None:
        check_session_id(guard.session_id)
    if guard.base_seq is not None:
        check_integer("guard.base_seq", guard.base_seq)
    if guard.revision is not None:
        check_integer("guard.revision", guard.revision)
    if guard.behind is not None:
        check_uid("guard.behind", guard.behind)


def _check_command(command: Any) -> int:
    size = 0
    match command:
        case Rotate():
            size = _check_drafts("summary", command.summary, least=0)
        case Compact():
            size = check_draft(command.summary)
        case Rewind():
            size = _check_drafts("closing", command.closing, least=0)
        case StageMessages():
            size = _check_drafts("messages", command.messages)
            for message in command.messages:
                _check_staged(message, command.session_id)
        case ExtendSession():
            size = _check_drafts("messages", command.messages, least=0)
            for message in command.messages:
                _check_staged(message, command.session_id)
        case PublishSession():
            _check_facts(command.facts)
        case DropStaged():
            if type(command.calls) is not tuple:
                _refuse("calls", f"{type(command.calls).__name__} is not a tuple", "give a tuple")
            for call in command.calls:
                check_uid("calls", call)
        case PutChunk():
            if type(command.data) is not bytes:
                _refuse("data", f"{type(command.data).__name__} is not bytes", "give bytes")
            if len(command.data) > CHUNK_BYTES_MAX:
                _refuse("data", "the piece is too large", f"cut it to {CHUNK_BYTES_MAX} bytes")
        case AddUsage():
            _check_amount("cost_nanos", command.cost_nanos)
            _check_tokens(command.tokens)
            for name in command.tokens.__struct_fields__:
                _check_amount(f"tokens.{name}", getattr(command.tokens, name))
        case SetTitle() | SetPendingTitle():
            if command.title is not None:
                check_title(command.title)
        case _:
            pass
    fields = _check_fields(command)
    if fields > COMMAND_BYTES_MAX:
        _refuse(
            type(command).__name__, f"{fields} bytes are too many", "put large things into blobs"
        )
    try:
        # Every field is what its type says: no word that is none of a state's, no 5 for true. Last,
        # because text that is none, or nests without end, would break the check itself.
        msgspec.convert(msgspec.structs.asdict(command), cast("Any", type(command)))
    except msgspec.ValidationError as error:
        _refuse(type(command).__name__, str(error), "give what the field's type says")
    return size + fields


# The commands that every turn has, field by field: several times faster than the general check, and
# whatever is not plain goes to that one.


def _check_open_turn(command: OpenTurn) -> int:
    check_integer("at_ms", command.at_ms)
    return _check_name("turn_id", command.turn_id) + _check_name("key", command.key)


def _check_accept_inbound(command: AcceptInbound) -> int:
    waits = command.body is not None or command.disposition not in ("started", "queued")
    if waits or command.reply_to is not None:
        return _check_command(command)
    check_integer("at_ms", command.at_ms)
    return (
        _check_name("source", command.source)
        + _check_name("inbound_id", command.inbound_id)
        + _check_name("key", command.key)
        + _check_name("turn_id", command.turn_id)
        + _check_name("digest", command.digest)
    )


def _check_start_turn(command: StartTurn) -> int:
    check_integer("attempt", command.attempt)
    check_integer("at_ms", command.at_ms)
    check_session_id(command.session_id)
    return _check_name("turn_id", command.turn_id) + _BASE_BYTES


def _check_end_turn(command: EndTurn) -> int:
    outcome = command.outcome
    plain = type(outcome) is TurnOutcome and outcome.kind == "answered" and outcome.detail is None
    if not plain or outcome.error is not None or outcome.cause is not None:
        return _check_command(command)
    check_integer("attempt", command.attempt)
    check_integer("at_ms", command.at_ms)
    size = _check_name("turn_id", command.turn_id)
    return (
        size if outcome.text is None else size + _check_text("text", outcome.text, TEXT_BYTES_MAX)
    )


def _check_take_inbound(command: TakeInbound) -> int:
    if command.into is not None:
        return _check_command(command)
    size = _check_name("source", command.source) + _check_name("inbound_id", command.inbound_id)
    return size + _check_name("turn_id", command.turn_id)


def _check_name(field: str, text: Any) -> int:
    if type(text) is str and len(text) <= NAME_BYTES_MAX and text.isascii():
        return len(text)
    return _check_text(field, text, NAME_BYTES_MAX)


_QUICK: dict[type, Callable[[Any], int]] = {
    OpenTurn: _check_open_turn,
    AcceptInbound: _check_accept_inbound,
    StartTurn: _check_start_turn,
    EndTurn: _check_end_turn,
    TakeInbound: _check_take_inbound,
}


def _check_drafts(field: str, drafts: tuple[Draft, ...], *, least: int = 1) -> int:
    if type(drafts) is not tuple:
        _refuse(field, f"{type(drafts).__name__} is not a tuple", "give a tuple of messages")
    if len(drafts) < least:
        _refuse(field, "there are none", "give at least one message")
    return sum(map(check_draft, drafts))


def _check_staged(message: Message, session_id: str) -> None:
    """What a staged message says about its place and state."""
    if type(message) is not Message:
        _refuse("messages", f"{type(message).__name__} is not a stored message", "give messages")
    if message.session_id != session_id:
        _refuse("messages.session_id", "it is another session's", "stage it in its own session")
    if message.state not in ("active", "summarised", "rewound"):
        _refuse("messages.state", "it is none", "use active, summarised or rewound")
    if message.damaged:
        _refuse("messages.damaged", "damage is not stored", "stage what can be read, unmarked")
    if message.turn_id is not None:
        _check_text("messages.turn_id", message.turn_id, NAME_BYTES_MAX)
    for place in (message.seq, message.summarised_by, *(message.covers or ())):
        if place is not None:
            check_integer("messages.seq", place)


def _check_facts(facts: Any) -> None:
    """What an import says of a session, if it says anything."""
    if facts is None:
        return
    if type(facts) is not SessionFacts:
        _refuse("facts", f"{type(facts).__name__} is not SessionFacts", "give SessionFacts")
    if facts.title is not None:
        check_title(facts.title)


def _check_fields(command: Any) -> int:
    """Every plain field: text that is text, integers that fit, JSON that comes back as it was."""
    size = 0
    for name in command.__struct_fields__:
        value: Any = getattr(command, name)
        if isinstance(value, str):
            size += _check_text(name, value, _limit(name))
            if name.endswith(("uid", "call_id", "effect_id")):
                check_uid(name, value)
            elif name in ("session_id", "parent_id", "child_id"):
                check_session_id(value)
        elif value is None or isinstance(value, bool | Draft):
            pass  # drafts are checked by themselves
        elif isinstance(value, int):
            check_integer(name, value)
        elif isinstance(value, dict):
            size += check_json(name, cast("Any", value))
        elif isinstance(value, bytes):
            size += len(value)
        elif isinstance(value, tuple):
            size += _check_tuple(name, value)
        elif isinstance(value, Tokens):
            size += _check_tokens(value)
        elif isinstance(value, msgspec.Struct):
            size += _check_fields(value)
        else:
            _refuse(name, f"{type(value).__name__} can't be stored", "give what its type says")
    return size


def _check_tokens(tokens: Tokens) -> int:
    if type(tokens) is not Tokens:
        _refuse("tokens", f"{type(tokens).__name__} is not Tokens", "give Tokens")
    for name in tokens.__struct_fields__:
        check_integer(f"tokens.{name}", getattr(tokens, name))
    return 100


def _check_amount(field: str, value: int) -> None:
    """Something that is added up: thousands of the largest still fit into 64 bits."""
    check_integer(field, value)
    if not -AMOUNT_MAX <= value <= AMOUNT_MAX:
        _refuse(field, "the amount is beyond all measure", f"stay within {AMOUNT_MAX}")


def _check_tuple(name: str, values: Any) -> int:
    size = 0
    for value in values:
        if isinstance(value, str):
            size += _check_text(name, value, NAME_BYTES_MAX)
        elif isinstance(value, int):
            check_integer(name, value)
            size += 8
        elif isinstance(value, dict):
            size += check_json(name, cast("Any", value))
        elif isinstance(value, msgspec.Struct):
            if not isinstance(value, Draft):  # drafts are checked by themselves
                size += _check_fields(value)
        else:
            _refuse(name, f"{type(value).__name__} can't be stored", "give what its type says")
    return size


_LONG_FIELDS = frozenset(("text", "error", "answer", "question", "reason", "cause"))


def _limit(name: str) -> int:
    return TEXT_BYTES_MAX if name in _LONG_FIELDS else NAME_BYTES_MAX


# Messages ----------------------------------------------------------------------------------------


def check_draft(draft: Draft) -> int:
    """Check one message and return its size in bytes."""
    if not isinstance(draft, Draft):  # pyright: ignore[reportUnnecessaryIsInstance]
        _refuse("messages", f"{type(draft).__name__} is not a message", "give drafts")
    check_uid("uid", draft.uid)
    size = 0 if draft.text is None else _check_text("text", draft.text, TEXT_BYTES_MAX)
    if draft.user is not None:
        _check_text("user", draft.user, NAME_BYTES_MAX)
    created_ms = draft.created_ms
    if type(created_ms) is not int or not INTEGER_MIN <= created_ms <= INTEGER_MAX:
        check_integer("created_ms", created_ms)
    if draft.role not in ("user", "assistant", "tool", "system", "developer"):
        _refuse("role", "it is none of ours", "use system, developer, user, assistant or tool")
    if draft.text is not None and draft.parts is not None:
        _refuse("parts", "there is text as well", "give text or parts, not both")
    if draft.plain:
        return size
    details = _check_details(draft)
    if details > DETAILS_BYTES_MAX:
        hint = f"keep it under {DETAILS_BYTES_MAX} bytes; put large things into blobs"
        _refuse("details", f"{details} bytes are too many", hint)
    return size + details


def check_message(message: Message) -> int:
    """Check a message with its place and state, as an import brings it, and return its size."""
    size = check_draft(message)
    _check_staged(message, message.session_id)
    return size


def _check_details(draft: Draft) -> int:
    size = 0
    for name in ("parts", "tool_calls", "blobs"):
        given = getattr(draft, name)
        if type(given) is not tuple and not (name == "parts" and given is None):
            _refuse(name, f"{type(given).__name__} is not a tuple", "give a tuple")
    if draft.parts is not None:
        for part in draft.parts:
            size += check_json("parts", part)
    for call in draft.tool_calls:
        if type(call) is not ToolCall:
            _refuse("tool_calls", f"{type(call).__name__} is not a tool call", "give ToolCall")
        size += _check_text("tool_calls.id", call.id, NAME_BYTES_MAX)
        size += _check_text("tool_calls.name", call.name, NAME_BYTES_MAX)
        size += _check_text("tool_calls.arguments", call.arguments, DETAILS_BYTES_MAX)
    for name, value, limit in (
        ("tool_call_id", draft.tool_call_id, NAME_BYTES_MAX),
        ("name", draft.name, NAME_BYTES_MAX),
        ("reasoning", draft.reasoning, DETAILS_BYTES_MAX),
        ("finish_reason", draft.finish_reason, NAME_BYTES_MAX),
        ("platform_id", draft.platform_id, NAME_BYTES_MAX),
    ):
        if value is not None:
            size += _check_text(name, value, limit)
    if draft.tokens is not None:
        size += _check_tokens(draft.tokens)
    if draft.meta is not None:
        size += check_json("meta", draft.meta)
    for blob_id in draft.blobs:
        size += _check_text("blobs", blob_id, NAME_BYTES_MAX)
    return size


# Values ------------------------------------------------------------------------------------------


def _refuse(field: str, problem: str, hint: str) -> NoReturn:
    raise InvalidContentError(field, problem, hint=hint)


def shown(value: object) -> str:
    """What was given, for a message about it: short, and whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that can't be shown"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _check_text(field: str, text: Any, limit: int) -> int:
    if type(text) is not str:
        _refuse(field, f"{type(text).__name__} is not text", "give a string")
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            _refuse(
                field,
                "it holds half of a surrogate pair, which no UTF-8 text can hold",
                "decode it properly, or replace such characters by U+FFFD",
            )
    if size > limit:
        _refuse(field, f"{size} bytes are too many", f"keep it under {limit} bytes")
    return size


def check_integer(field: str, value: Any) -> None:
    """Raise unless it is a whole number that 64 bits can hold."""
    if type(value) is not int:
        _refuse(field, f"{type(value).__name__} is not a whole number", "give an integer")
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        _refuse(field, "the integer does not fit into 64 bits", "store it as text")


def check_json(field: str, root: Any) -> int:
    """Check a JSON object and return its rough size. Only what comes back equal is let through."""
    if type(root) is not dict:
        _refuse(field, f"{type(root).__name__} is not a JSON object", "give a dict")
    size = 0
    stack: list[tuple[Any, int]] = [(root, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > DEPTH_MAX:
            _refuse(field, "it is nested too deeply", f"keep it within {DEPTH_MAX} levels")
        kind = cast("object", type(value))  # so that nothing is narrowed to unknown types
        if kind is dict:
            for key, member in value.items():
                if type(key) is not str:
                    _refuse(field, "an object's member name is not a string", "use string keys")
                size += _check_text(field, key, DETAILS_BYTES_MAX) + 4
                stack.append((member, depth + 1))
        elif kind is list:
            stack.extend((member, depth + 1) for member in value)
        else:
            size += _check_scalar(field, value)
        size += 2
        if size > DETAILS_BYTES_MAX:
            _refuse(field, "it is too large", f"keep it under {DETAILS_BYTES_MAX} bytes")
    return size


def _check_scalar(field: str, value: Any) -> int:
    kind = cast("object", type(value))
    if kind is str:
        return _check_text(field, value, DETAILS_BYTES_MAX)
    if kind is int:
        check_integer(field, value)
        return 20
    if kind is float:
        if not math.isfinite(value):
            _refuse(field, "JSON has no NaN and no infinity", "use null or text")
        return 24
    if kind is bool or value is None:
        return 5
    hint = "use dict, list, str, int, float, bool, None"
    _refuse(field, f"{type(value).__name__} is no JSON value", hint)


def check_uid(field: str, uid: Any) -> None:
    """Raise unless it is an id as the id source gives them."""
    if not isinstance(uid, str) or _UID.fullmatch(uid) is None:
        _refuse(field, "it is not 32 lower-case hexadecimal digits", "take it from the id source")


def check_session_id(session_id: Any) -> None:
    """Raise unless it can name a session: contract D2."""
    if not isinstance(session_id, str) or _SESSION_ID.fullmatch(session_id) is None:
        _refuse(
            "session_id", "it has other characters or another length", "match [A-Za-z0-9_-]{1,64}"
        )


def check_count(field: str, count: Any) -> None:
    """Raise unless it is a whole number above 0."""
    check_integer(field, count)
    if count < 1:
        _refuse(field, "it is less than one", "give 1 or more")


def check_place(field: str, place: Any) -> None:
    """Raise unless it is a place to go on from, as it was handed out, or none."""
    if place is None:
        return
    if not isinstance(place, tuple | list) or len(cast("Any", place)) != 2:
        _refuse(field, "it is no place that was handed out", "give one back as it was, or nothing")
    for number in cast("Any", place):
        check_integer(field, number)


def check_name(field: str, name: Any) -> None:
    """Raise unless it can be the name of something: a source, an inbound id."""
    _check_text(field, name, NAME_BYTES_MAX)
    if not name:
        _refuse(field, "it is empty", "leave it out, or give a name")


def check_title(title: str) -> None:
    """A title is trimmed, visible and short; `clean_title` makes one."""
    _check_text("title", title, NAME_BYTES_MAX)
    if not title or len(title) > TITLE_LENGTH_MAX:
        _refuse("title", "it is empty or too long", f"use 1 to {TITLE_LENGTH_MAX} characters")
    if title != clean_title(title):
        _refuse("title", "it has outer blanks, control or zero-width characters", "take them out")


def clean_title(title: str) -> str:
    """The same title without what nobody can see: outer blanks, control and format characters."""
    visible = (c for c in title if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return "".join(visible).strip()[:TITLE_LENGTH_MAX].rstrip()
