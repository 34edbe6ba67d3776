"""What a submitter gets: the reply of a turn, and the one text that follows from an outcome.

Keeps: exactly one text for every outcome, looked at in this order: non-blank text, failed,
interrupted, partial, silent, empty (contract F). `None` is never printed as text, and a storage
failure never advises a reset.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from ..storage.edge import check_json
from ..storage.errors import InvalidContentError
from ..storage.identity import SessionId, TurnId
from ..storage.records import Message, Tokens, TurnOutcome
from .owned import own_json

_ERROR_LENGTH_MAX = 300
_PARTIAL_ERROR_LENGTH_MAX = 200
_STORED_LENGTH_MAX = 4000
_STORED_BYTES_MAX = 4 * _STORED_LENGTH_MAX
_LONG_HISTORY = 50
_CONTEXT_TOO_LONG = re.compile(
    r"context[ _](length|window)|too large|too long|too many tokens|maximum context|payload",
    re.IGNORECASE,
)
_BARE_400 = re.compile(r"\b400\b")


class Reply(Struct, frozen=True, kw_only=True):
    """The end of a turn. It leaves only behind the commit that stored it."""

    text: str
    outcome: TurnOutcome
    turn_id: TurnId
    session_id: SessionId
    messages: tuple[Message, ...] = ()
    usage: Tokens = Tokens()
    persisted: bool = True
    durable: bool = True


def with_facts(outcome: TurnOutcome, history_length: int, model_calls: int) -> TurnOutcome:
    """An outcome without a text, with what its text depends on: so it follows from it, for ever."""
    detail = dict(outcome.detail or {})
    if outcome.kind == "failed":
        detail["history_length"] = history_length
    elif model_calls and _count(outcome, "api_calls") <= 0:
        detail["api_calls"] = model_calls
    return msgspec.structs.replace(outcome, detail=detail or None)


def steered_into(turn_id: TurnId) -> TurnOutcome:
    """How the turn of a message ends that was steered into another turn."""
    return TurnOutcome(kind="silent", cause="steered", detail={"into": turn_id})


def reply_text(outcome: TurnOutcome) -> str:
    """The text that a user sees for an outcome."""
    if outcome.text and outcome.text.strip():
        return outcome.text
    error = (outcome.error or "").strip()
    error = "" if error == "None" else error  # what a program says when it has nothing to say
    match outcome.kind:
        case "failed":
            return _failed(outcome, error)
        case "interrupted":
            return _interrupted(outcome)
        case "partial":
            what = error[:_PARTIAL_ERROR_LENGTH_MAX] or "no reason was given"
            return f"The answer is not complete: {what}"
        case "silent":
            return ""
        case "answered":
            # Nobody has called it a failure; what went wrong is told all the same.
            why = f" ({error[:_PARTIAL_ERROR_LENGTH_MAX]})" if error else ""
            if _count(outcome, "api_calls") > 0:
                notice = f"The work was done, but no answer came back{why}."
                return f"{notice} Ask again if you expected one."
            return f"The message was not processed{why}. Please send it again."


def _count(outcome: TurnOutcome, name: str) -> int | float:
    """A number among the details, which an agent may have filled with anything."""
    count = (outcome.detail or {}).get(name)
    return count if isinstance(count, int | float) else 0


def _failed(outcome: TurnOutcome, error: str) -> str:
    long = _count(outcome, "history_length") > _LONG_HISTORY
    bare = _BARE_400.search(error) is not None and long
    # What storage or our own edge says of a size is not about the model's context.
    ours = outcome.cause == "storage" or "refused" in (outcome.detail or {})
    if not ours and (bare or _CONTEXT_TOO_LONG.search(error)):
        return (
            "The conversation no longer fits into the model's context window. "
            "Use /compact to shorten it."
        )
    what = error[:_ERROR_LENGTH_MAX] or "no reason was given"
    if outcome.cause == "storage":
        return f"The message could not be processed: {what}. Please try again later."
    return f"The message could not be processed: {what}\nTry again, or use /reset to start over."


def _interrupted(outcome: TurnOutcome) -> str:
    if outcome.cause in ("crash", "shutdown"):
        return "The work on your message was cut off. Please send it again."
    if outcome.cause in ("moved", "rest"):
        return "The conversation has moved elsewhere, and your message was not finished here."
    return ""


def storable(text: str, bytes_max: int = _STORED_BYTES_MAX) -> str:
    """Somebody else's text, whatever it holds: short enough, and without what no text can hold."""
    shown = text[:_STORED_LENGTH_MAX].encode(errors="replace")
    return shown[:bytes_max].decode(errors="ignore")


def with_storable_facts(outcome: TurnOutcome) -> TurnOutcome:
    """What an outcome says beside its text must never cost the text: it is made to fit."""
    detail, error, cause = outcome.detail, outcome.error, outcome.cause
    if detail is not None:
        try:
            check_json("detail", detail)
            detail = own_json(detail)
        except InvalidContentError as problem:
            detail = {"left_out": storable(str(problem))}
    return msgspec.structs.replace(
        outcome,
        detail=detail,
        error=None if error is None else storable(error),
        cause=None if cause is None else storable(cause)[:200],
    )
