"""What an agent returned, as an outcome and the messages that are new.

An agent returns text, an `Outcome`, nothing, or a mapping as existing agents do:
`final_response`, `messages`, `api_calls`, `partial`, `failed`, `interrupted`, `error`,
`session_id`, `agent_persisted`. `messages` may be the whole transcript: only what is new is stored
(contract A4). `agent_persisted` is information only, whatever it says (A5).

Aligning a report: echoed uids match by themselves. Without uids, leading system messages are left
out; old is the longest end of what this attempt was given with which the report begins, then a
leading run equal to what the attempt has stored already. If nothing aligns, new begins behind the
report's last user message that equals the turn's own, else behind its last user message. What comes
before that is a rewrite of the past: with a new session id it is what the rotation carries, and
otherwise it is dropped and counted, never stored as new.

The i-th message behind the turn's own user message gets its uid from (turn id, attempt, i), so
reporting twice is harmless. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import structs

from ..storage.errors import InvalidContentError
from ..storage.identity import SessionId, Uid, derived_uid
from ..storage.records import Draft, JsonObject, Message, OutcomeKind, TurnOutcome
from .messages import draft_of, same_message

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
        return Result(TurnOutcome(kind="answered", text=returned), returned)
    if isinstance(returned, TurnOutcome):
        return Result(returned, returned.text)
    if isinstance(returned, Mapping):
        return _result_of_mapping(cast("Mapping[str, Any]", returned), now_ms, said)
    raise InvalidContentError(
        "result",
        f"an agent can't return {type(returned).__name__}",
        hint="return text, an Outcome, a mapping, or nothing",
    )


def _result_of_mapping(returned: Mapping[str, Any], now_ms: int, said: str | None) -> Result:
    report: tuple[Draft, ...] | None = None
    messages: Any = returned.get("messages")
    if messages is not None:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidContentError(
                "messages", f"{type(messages).__name__} is no list", hint="give a list of messages"
            )
        report = reported([*messages], now_ms)
    text: Any = returned.get("final_response")
    if text is not None and not isinstance(text, str):
        text = str(text)
    if text is None and report is None and said is not None:
        return Result(TurnOutcome(kind=_kind_of(returned), text=said, **_facts_of(returned)))
    session_id = returned.get("session_id")
    return Result(
        TurnOutcome(kind=_kind_of(returned), text=text, **_facts_of(returned)),
        None if _reports_answer(report, text) else text,
        report,
        None if not session_id else SessionId(str(session_id)),
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
    if isinstance(calls, int):
        detail["api_calls"] = calls
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
    rest = report[start:]
    given_uids = {message.uid for message in attempt.given}
    stored_uids = {message.uid for message in attempt.stored}
    if any(draft.uid for draft in rest):
        return _align_by_uid(rest, attempt, given_uids, stored_uids)
    old = _longest_end(attempt.given, rest)
    stored = _leading_run(attempt.stored, rest[old:])
    own_user = [m for m in attempt.stored if m.role == "user"]
    kept = tuple(m.uid for m in attempt.given[len(attempt.given) - old :]) if old else ()
    if old or stored:
        # Behind the aligned past comes the turn: its own user message, if it is echoed, is no new
        # one and doesn't count for the numbering.
        users = min(stored, len(own_user))
        return Aligned(_numbered(rest[old + users :], stored - users, attempt), (), kept, ())
    at = _behind_user(rest, own_user)
    rewrite = tuple(rest[:at])
    if rewrite and own_user and same_message(rewrite[-1], own_user[-1]):
        rewrite = rewrite[:-1]
    return Aligned(_numbered(rest[at:], 0, attempt), rewrite, (), ())


def _longest_end(given: Sequence[Message], report: Sequence[Draft]) -> int:
    """The length of the longest end of `given` with which the report begins."""
    for length in range(min(len(given), len(report)), 0, -1):
        end = given[len(given) - length :]
        if all(same_message(a, b) for a, b in zip(end, report, strict=False)):
            return length
    return 0


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
    report: Sequence[Draft], attempt: Attempt, given: set[Uid], stored: set[Uid]
) -> Aligned:
    """Echoed uids say what is old; the rest is new behind the last of them, a rewrite before."""
    own_users = [m for m in attempt.stored if m.role == "user"]
    last = -1
    for index, draft in enumerate(report):
        echoes_user = not draft.uid and any(same_message(draft, m) for m in own_users)
        if draft.uid in given or draft.uid in stored or echoes_user:
            last = index
    kept = tuple(draft.uid for draft in report if draft.uid in given)
    rewrite = tuple(
        draft
        for draft in report[: last + 1]
        if not draft.uid and not any(same_message(draft, m) for m in own_users)
    )
    behind_own = [m for m in attempt.stored if m.role != "user"]
    base = sum(1 for draft in report[: last + 1] if draft.uid in {m.uid for m in behind_own})
    new: list[Draft] = []
    known: list[Uid] = []
    for index, draft in enumerate(report[last + 1 :]):
        if draft.uid:
            known.append(draft.uid)
            new.append(draft)
        else:
            uid = derived_uid(attempt.turn_id, attempt.attempt, base + index)
            new.append(structs.replace(draft, uid=uid))
    return Aligned(tuple(new), rewrite, kept, tuple(known))
