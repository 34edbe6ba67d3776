"""What an agent returned, as an outcome and the messages that are new.

An agent returns text, an `Outcome`, nothing, or a mapping as existing agents do:
`final_response`, `messages`, `api_calls`, `partial`, `failed`, `interrupted`, `error`,
`session_id`, `agent_persisted`. `messages` may be the whole transcript: only what is new is stored
(contract A4). `agent_persisted` is information only, whatever it says (A5).

Aligning a report: echoed uids match by themselves. Without uids, leading system messages are left
out; old is the longest end of what this attempt was given, the turn's own user message last, with
which the report begins (one that leaves that message out, or puts it in other words, must begin
with a user's), then a leading run equal to what the attempt has stored already. If nothing aligns,
new begins behind the report's last user message that equals the turn's own, else behind its last
user message. What comes before that is a rewrite of the past: with a new session id it is what the
rotation carries, and otherwise it is dropped and counted, never stored as new.

The i-th message behind the turn's own user message gets its uid from (turn id, attempt, i), so
reporting twice is harmless. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import msgspec
from msgspec import structs

from ..storage.errors import InvalidContentError
from ..storage.identity import SessionId, Uid, derived_uid
from ..storage.records import Draft, JsonObject, Message, OutcomeKind, TurnOutcome
from .messages import content_of, draft_of, plain, same_message

if TYPE_CHECKING:
    from ..storage.identity import TurnId

_NO_UID = Uid("")


class Attempt(NamedTuple):
    """What one attempt of a turn was given, and what it has stored since."""

    turn_id: TurnId
    attempt: int
    given: Sequence[Message]
    stored: Sequence[Message]
    now_ms: int


class Aligned(NamedTuple):
    """A report, sorted out."""

    new: tuple[Draft, ...]
    rewrite: tuple[Draft, ...]
    kept: tuple[Uid, ...]  # of what was given, what the report still begins with
    known: tuple[Uid, ...]  # echoed uids, for whoever can look them up in storage
    leading: tuple[Draft, ...]  # system messages at the front: a prompt, or a past in short
    sure: bool = True  # whether anything of it was recognised


class Result(NamedTuple):
    """What a returned value means."""

    outcome: TurnOutcome
    answer: str | None = None  # the text that is to be stored as one more message
    report: tuple[Draft, ...] | None = None
    session_id: SessionId | None = None


def result_of(returned: Any, now_ms: int, *, said: str | None) -> Result:
    """The outcome of whatever an agent returned; `said` is the answer if it returned nothing."""
    if returned is None:
        return Result(TurnOutcome(kind="answered", text=said))
    if isinstance(returned, str):
        text = plain(returned)
        return Result(TurnOutcome(kind="answered", text=text), text)
    if isinstance(returned, TurnOutcome):
        _check_outcome(returned)
        return Result(returned, returned.text)
    if isinstance(returned, Mapping):
        return _result_of_mapping(cast("Mapping[str, Any]", returned), now_ms, said)
    raise InvalidContentError(
        "result",
        f"an agent can't return {type(returned).__name__}",
        hint="return text, an Outcome, a mapping, or nothing",
    )


def _check_outcome(outcome: TurnOutcome) -> None:
    """Whatever its types promise, nobody has looked yet."""
    try:
        msgspec.convert(structs.asdict(outcome), TurnOutcome)
    except msgspec.ValidationError as error:
        kinds = ", ".join(get_args(OutcomeKind))
        hint = f"kind is one of {kinds}; texts are strings, detail is a mapping"
        raise InvalidContentError("outcome", str(error), hint=hint) from error


def _result_of_mapping(returned: Mapping[str, Any], now_ms: int, said: str | None) -> Result:
    report: tuple[Draft, ...] | None = None
    messages: Any = returned.get("messages")
    if messages is not None:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidContentError(
                "messages", f"{type(messages).__name__} is no list", hint="give a list of messages"
            )
        report = reported([*messages], now_ms)
    text = _final_text(returned.get("final_response"))
    session_id = returned.get("session_id")
    answer = text
    if text is None and report is None:
        text = said  # it is stored already
    elif _reports_answer(report, text):
        answer = None
    return Result(
        TurnOutcome(kind=_kind_of(returned), text=text, **_facts_of(returned)),
        answer,
        report,
        None if not session_id else SessionId(str(session_id)),
    )


def _final_text(given: Any) -> str | None:
    """What a mapping gives as its answer, in words; nothing of a user's is printed as code."""
    if isinstance(given, str):
        return plain(given)
    kind = type(given).__name__
    if isinstance(given, list | tuple):  # in parts, as a chat completion has it
        parts = cast("Sequence[Any]", given)
        objects = [cast("Mapping[str, Any]", part) for part in parts if isinstance(part, Mapping)]
        texts = [part.get("text") for part in objects]
        said = [plain(text) for text in texts if isinstance(text, str)]
        if said or not parts:
            return "\n".join(said) or None
    elif given is None or given is False or given == {}:
        return None
    raise InvalidContentError(
        "final_response", f"{kind} is not text", hint="give a string, or nothing"
    )


def _kind_of(returned: Mapping[str, Any]) -> OutcomeKind:
    """The gravest of what the flags say."""
    kinds: tuple[OutcomeKind, ...] = ("failed", "interrupted", "partial")
    for kind in kinds:
        if returned.get(kind):
            return kind
    return "answered"


def _facts_of(returned: Mapping[str, Any]) -> dict[str, Any]:
    detail: JsonObject = {}
    calls = returned.get("api_calls")
    if isinstance(calls, int | float) and math.isfinite(calls):
        detail["api_calls"] = int(calls)
    if "agent_persisted" in returned:
        detail["agent_persisted"] = bool(returned["agent_persisted"])
    error = returned.get("error")
    return {"error": None if error is None else str(error), "detail": detail or None}


def _reports_answer(report: tuple[Draft, ...] | None, text: str | None) -> bool:
    """Whether the answer is among the reported messages: then it is not one more."""
    for draft in reversed(report or ()):
        if draft.role == "assistant" and not draft.tool_calls:
            return draft.text == text
        if draft.role == "user":
            break
    return False


def reported(messages: Sequence[Any], now_ms: int) -> tuple[Draft, ...]:
    """A report's messages; those without a uid get an empty one for now."""
    return tuple(draft_of(message, lambda: _NO_UID, now_ms) for message in messages)


def align(report: tuple[Draft, ...], attempt: Attempt) -> Aligned:
    """What of a report is new, and what is a rewrite."""
    start = 0
    while start < len(report) and report[start].role == "system" and not report[start].uid:
        start += 1
    rest, leading = report[start:], report[:start]
    if any(draft.uid for draft in rest):
        return _align_by_uid(rest, leading, attempt)
    own = _own_users(attempt)
    past = [*attempt.given, *own]
    old = _longest_end(past, rest)
    if old <= len(own) and _behind_user(rest, own) > old:
        old = 0  # the turn's own message comes again later: what stands before that is rewritten
    if not own or not old:
        past = [*attempt.given]
        old = _longest_end(past, rest)
        if old and past[len(past) - old].role != "user":
            # It begins in the middle of an exchange, so it is the turn alone, though it may say
            # the same as the last turn did.
            old = 0
    kept = tuple(m.uid for m in past[len(past) - old : len(attempt.given)])
    if old and old <= len(attempt.given) and old < len(rest) and rest[old].role == "user":
        old += 1  # the turn's own message, as the agent has put it
    stored = _leading_run(attempt.stored[len(own) :], rest[old:])
    if old or stored:
        return Aligned(_numbered(rest[old:], stored, attempt), (), kept, (), leading)
    at = _behind_user(rest, own)
    rewrite = tuple(rest[:at])
    sure = bool(rewrite and own) and same_message(rewrite[-1], own[-1])
    if sure:
        rewrite = rewrite[:-1]
    return Aligned(_numbered(rest[at:], 0, attempt), rewrite, (), (), leading, sure)


def _own_users(attempt: Attempt) -> list[Message]:
    """The messages that the turn answers: they stand before everything else of it."""
    return list(takewhile(lambda message: message.role == "user", attempt.stored))


def _longest_end(given: Sequence[Message], report: Sequence[Draft]) -> int:
    """The length of the longest end of `given` with which the report begins."""
    # Knuth, Morris and Pratt: a history that repeats itself must not cost its square.
    pattern = [content_of(draft) for draft in report]
    borders = [0] * len(pattern)
    for index in range(1, len(pattern)):
        length = borders[index - 1]
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        borders[index] = length + (pattern[index] == pattern[length])
    length = 0
    for message in given:
        content = content_of(message)
        if length == len(pattern):
            length = borders[length - 1] if length else 0
        while length and content != pattern[length]:
            length = borders[length - 1]
        if pattern and content == pattern[length]:
            length += 1
    return length


def _leading_run(stored: Sequence[Message], report: Sequence[Draft]) -> int:
    run = 0
    while run < min(len(stored), len(report)) and same_message(stored[run], report[run]):
        run += 1
    return run


def _behind_user(report: Sequence[Draft], own: Sequence[Message]) -> int:
    """Where new begins if nothing aligns."""
    for index in range(len(report) - 1, -1, -1):
        if any(same_message(report[index], message) for message in own):
            return index + 1
    for index in range(len(report) - 1, -1, -1):
        if report[index].role == "user":
            return index + 1
    return 0


def _numbered(tail: Sequence[Draft], stored: int, attempt: Attempt) -> tuple[Draft, ...]:
    """The rows behind the turn's own user message; the first `stored` of them are there already."""
    return tuple(
        structs.replace(draft, uid=derived_uid(attempt.turn_id, attempt.attempt, index))
        for index, draft in enumerate(tail)
        if index >= stored
    )


def _align_by_uid(
    report: tuple[Draft, ...], leading: tuple[Draft, ...], attempt: Attempt
) -> Aligned:
    """Echoed uids say what is old; the rest is new behind the last of them, a rewrite before.

    What of this turn is echoed without uids is old as well.
    """
    own = _own_users(attempt)
    given = {message.uid for message in attempt.given}
    places = {message.uid: place for place, message in enumerate(attempt.stored)}

    def is_own(draft: Draft) -> bool:
        return not draft.uid and any(same_message(draft, message) for message in own)

    last = -1
    for index, draft in enumerate(report):
        if draft.uid in given or draft.uid in places or is_own(draft):
            last = index
    behind = report[last + 1] if last + 1 < len(report) else None
    if last >= 0 and report[last].uid in given and behind is not None:
        last += behind.role == "user" and not behind.uid  # its own message, as the agent has put it
    rewrite = tuple(d for d in report[:last] if not d.uid and not is_own(d))
    kept = tuple(draft.uid for draft in report if draft.uid in given)
    # Where in what is stored of this turn the report has come to.
    at = places.get(report[last].uid, len(own) - 1) + 1 if last >= 0 else len(own)
    run = _leading_run(attempt.stored[at:], report[last + 1 :])
    base = at + run - len(own)
    new: list[Draft] = []
    known: list[Uid] = []
    for index, draft in enumerate(report[last + 1 + run :]):
        if draft.uid:
            known.append(draft.uid)
            new.append(draft)
        else:
            uid = derived_uid(attempt.turn_id, attempt.attempt, base + index)
            new.append(structs.replace(draft, uid=uid))
    return Aligned(tuple(new), rewrite, kept, tuple(known), leading, last >= 0)
