"""Shortening a transcript: what a summary covers, what is carried, and the brake.

Keeps: the running turn and everything behind the summary's watermark is carried; no cut goes
between a tool call and its result (contract A10); messages that come while a summary is being
written stand behind it (B9); a compression that would gain nothing is refused and counted, durably,
and after a few in a row it is not even tried, unless a person forces it (B11).

The summary is written in the caller's own task, where it may be interrupted; the move itself is the
scribe's, where it can't.
"""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import trio

from ..storage.commands import CountUselessCompressions
from ..storage.edge import check_draft, check_name
from ..storage.errors import InvalidContentError, NoGainError, OnepenError
from ..storage.records import Draft, Message
from ..storage.units import Refused
from .exchanges import safe_cut
from .raised import is_theirs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..storage.identity import SessionId, TurnId, Uid
    from .scribe import Scribe

Compress: TypeAlias = "Callable[[Scribe, Compression, int], Awaitable[SessionId]]"
Summarise: TypeAlias = "str | Callable[[tuple[Message, ...]], Awaitable[str] | str]"


class SummaryTooSlowError(OnepenError):
    """The function that was to write a summary did not come back."""

    hint = "the session is as it was; give its model call a deadline of its own"

    def __init__(self, session_id: str, limit_s: float) -> None:
        super().__init__(f"{session_id}: its summary took longer than {limit_s:g} s")
        self.session_id = session_id
        self.limit_s = limit_s


class SummaryRaised(Exception):
    """The caller's function raised `error`; that is for the caller, and no failure of ours."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Cut(NamedTuple):
    covered: list[Message]
    carried: list[Message]


class Compression(NamedTuple):
    """What somebody asked for."""

    summary: Summarise
    upto: Uid | None = None
    force: bool = False
    turn_id: TurnId | None = None
    attempt: int = 1
    check: Callable[[], None] | None = None  # raises if it is too late by now


def _turn_start(scribe: Scribe, asked: Compression) -> int:
    page = scribe.page
    if asked.turn_id is None:
        return len(page.messages)
    return page.start_of(asked.turn_id, asked.attempt)


async def _summary(scribe: Scribe, asked: Compression, useless_max: int) -> tuple[Draft, Uid]:
    """Write the summary; with it, the uid of the last message that it saw."""
    page = scribe.page
    if scribe.route.useless_compressions >= useless_max and not asked.force:
        raise NoGainError(
            page.session_id,
            f"{scribe.route.useless_compressions} compressions in a row gained nothing",
            "not tried again",
        )
    end = _turn_start(scribe, asked)
    if asked.upto is not None:
        check_name("upto", asked.upto)
        end = min(end, page.index_of(asked.upto) + 1)
    history = tuple(page.messages[: safe_cut(page.messages, end)])
    if not history:
        raise NoGainError(page.session_id, "nothing to summarise", "nothing")
    text: Any = asked.summary
    if not isinstance(text, str) and not callable(text):
        raise InvalidContentError(
            "summary", f"{type(text).__name__} is no summary", hint="give text, or a function"
        )
    if not isinstance(text, str):
        text = await _write(scribe, text, history)
    if not isinstance(text, str) or not text.strip():
        raise InvalidContentError(
            "summary", "it is empty or not text", hint="give the text that stands for the history"
        )
    draft = Draft(uid=scribe.fresh_uid(), role="system", text=text, created_ms=scribe.now())
    check_draft(draft)
    return draft, history[-1].uid


async def _write(scribe: Scribe, write: Any, history: tuple[Message, ...]) -> Any:
    """What the caller's own function says, within the time that a turn may take."""
    limit_s = scribe.turn_deadline_s
    try:
        with trio.move_on_after(limit_s) as scope:
            text = write(history)
            return await text if isawaitable(text) else text
    except BaseException as error:
        if not is_theirs(error):
            raise
        raise SummaryRaised(error) from error
    assert scope.cancelled_caught
    raise SummaryTooSlowError(scribe.page.session_id, limit_s)


def _cut(scribe: Scribe, watermark: Uid, asked: Compression) -> _Cut:
    """Where the transcript, as it is now, is cut: at the watermark, or a little before it."""
    messages = scribe.page.messages
    end = scribe.page.index_of(watermark) + 1
    cut = safe_cut(messages, min(end, _turn_start(scribe, asked)))
    if cut == 0:
        raise NoGainError(scribe.page.session_id, "nothing to summarise", "nothing")
    return _Cut(messages[:cut], messages[cut:])


async def rotate(scribe: Scribe, asked: Compression, useless_max: int) -> SessionId:
    """Move the key to a child; returns its id, once that is durable."""
    summary, watermark = await _summary(scribe, asked, useless_max)
    await scribe.room()
    cut = _cut(scribe, watermark, asked)
    child_id = scribe.fresh_session_id()
    return await move(scribe, child_id, (summary,), cut.carried, asked)


async def move(
    scribe: Scribe,
    child_id: SessionId,
    summary: tuple[Draft, ...],
    carried: Sequence[Message],
    asked: Compression,
) -> SessionId:
    """Post the rotation, with no checkpoint before it, and wait for its receipt."""
    session_id = scribe.page.session_id
    if asked.check is not None:
        asked.check()
    ticket = scribe.rotate(
        child_id, summary, carried, turn_id=asked.turn_id, force=asked.force, after=_reset(scribe)
    )
    receipt = await scribe.receipt_of(ticket)
    if isinstance(receipt, Refused):
        await _count_useless(scribe, receipt)
        error = receipt.error()
        if isinstance(error, NoGainError):
            error.session_id = session_id
        raise error
    return child_id


async def compact(
    scribe: Scribe,
    asked: Compression,
    useless_max: int,
) -> SessionId:
    """Shorten the transcript in place; returns the session's id, which stays."""
    summary, watermark = await _summary(scribe, asked, useless_max)
    await scribe.room()
    cut = _cut(scribe, watermark, asked)
    session_id = scribe.page.session_id
    if asked.check is not None:
        asked.check()
    ticket = scribe.compact(
        summary, cut.covered, turn_id=asked.turn_id, force=asked.force, after=_reset(scribe)
    )
    receipt = await scribe.receipt_of(ticket)
    if isinstance(receipt, Refused):
        await _count_useless(scribe, receipt)
        raise receipt.error()
    return session_id


def _counting(scribe: Scribe, count: int) -> CountUselessCompressions:
    return CountUselessCompressions(
        key=scribe.key,
        count=count,
        replaces=scribe.route.compression_version,
        at_ms=scribe.now(),
    )


def _reset(scribe: Scribe) -> tuple[CountUselessCompressions, ...]:
    """A compression that gains something lets go of the brake, in its own unit."""
    return (_counting(scribe, 0),) if scribe.route.useless_compressions else ()


async def _count_useless(scribe: Scribe, refused: Refused) -> None:
    """The brake is durable before anybody hears of the refusal, so that a restart keeps it."""
    if refused.reason != "no_gain":
        return
    await scribe.room()
    count = scribe.route.useless_compressions + 1
    ticket = scribe.note((_counting(scribe, count),))
    scribe.counted_useless(count)
    await scribe.receipt_of(ticket)
