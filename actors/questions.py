"""Questions to people, and their answers. What the turn does meanwhile is its `Pause`.

    asked ──▶ answered · expired · withdrawn
       └── a restart leaves it: the answer begins the turn's next attempt

Keeps:
- A question is durable before anybody sees it, under its session key: rotation, reconnect and
  restart leave it where it is. So is its answer before the turn goes on; the first answer stands.
- The same question of the same turn gets the recorded answer. Another turn's answer is none of its.
- Expiry is said as such (`QuestionExpiredError`), never taken for a no. A turn that ends withdraws
  what it still asked.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..storage.commands import AddUsage, AnswerQuestion, AskQuestion
from ..storage.edge import check_json, check_name, check_unit, shown
from ..storage.errors import (
    AmbiguousError,
    ConflictError,
    InvalidContentError,
    MissingError,
    OnepenError,
)
from ..storage.records import Question
from ..storage.units import Durable, Refused, Unit
from .messages import plain
from .outbox import posting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import TurnId
    from ..storage.units import Receipt
    from .line import Settle
    from .mailbox import Answer
    from .running import RunningTurn
    from .session import Session

_TIMEOUT_S_MAX = 366 * 24 * 3600.0
_CHOICES_MAX = 100


class QuestionExpiredError(OnepenError):
    """Nobody has answered in time. That is not a no, and not a yes."""

    hint = "it can't be answered any more; send the message again if it still matters"

    def __init__(self, question_key: str, expired_ms: int) -> None:
        super().__init__(f"question {question_key} has expired without an answer")
        self.question_key = question_key
        self.expired_ms = expired_ms


async def ask(
    session: Session,
    running: RunningTurn,
    text: str,
    choices: Sequence[str],
    timeout_s: float | None,
    name: str | None,
) -> str:
    """Ask, and wait for the answer. Raises `QuestionExpiredError`."""
    text, choices, timeout_s = _checked(session, text, choices, timeout_s, name)
    scribe, pause = session.scribe, running.pause
    if name is None:
        name = blake2b(msgspec.json.encode([text, choices]), digest_size=8).hexdigest()
    stored, question_key = await _find(session, running.turn.id, name)
    await scribe.room()
    running.turn.check_open()
    # No checkpoint from here to posting: what was asked or answered while we looked is known now.
    stored = pause.settled.get(question_key) or pause.open.get(question_key) or stored
    if stored is not None and (stored.question, stored.choices) != (text, choices):
        raise ConflictError(f"question {question_key}", stored.choices, choices)
    if stored is not None and stored.state != "open":
        return _answer_of(stored)
    new: tuple[AnyCommand, ...] = ()
    if stored is None:
        new = _asking(session, running, question_key, text, choices, timeout_s)
    answer, suspending = pause.enter(question_key)
    try:
        await _post(session, running, question_key, (*new, *suspending))
        question = await answer.wait()
    except BaseException:
        pause.give_up(question_key)
        raise
    await pause.leave()
    return _answer_of(question)


async def _post(
    session: Session, running: RunningTurn, question_key: str, commands: tuple[AnyCommand, ...]
) -> None:
    """Until the question is durable, and the turn is at rest."""
    scribe, pause = session.scribe, running.pause
    asked = next((c for c in commands if isinstance(c, AskQuestion)), None)
    question = None if asked is None else question_of(asked)

    def received(receipt: Receipt) -> None:
        if isinstance(receipt, Refused):
            pause.refused(commands)
            if question is not None:
                pause.open.pop(question_key, None)
            scribe.uncounted += [c for c in commands if isinstance(c, AddUsage)]
        elif isinstance(receipt, Durable):
            if question is not None:
                session.on_asked(question)
            pause.rest()

    if commands:
        try:
            ticket = scribe.note(commands, then=received)
        except BaseException:  # it was never posted
            pause.refused(commands)
            raise
        if question is not None:
            pause.open[question_key] = question
        receipt = await scribe.receipt_of(ticket)
        if isinstance(receipt, Refused):
            raise receipt.error()
    pause.rest()
    if scribe.broken is not None:
        raise scribe.broken.error()


def _checked(
    session: Session, text: Any, choices: Any, timeout_s: Any, name: str | None
) -> tuple[str, tuple[str, ...], float]:
    if not isinstance(text, str) or not text.strip():
        raise InvalidContentError("question", "it is empty or not text", hint="ask something")
    if isinstance(choices, str) or not isinstance(choices, list | tuple):
        problem = f"{type(choices).__name__} is no list of choices"
        raise InvalidContentError("choices", problem, hint="give a list of texts, or none")
    given = cast("Sequence[Any]", choices)
    if len(given) > _CHOICES_MAX or not all(isinstance(c, str) and c.strip() for c in given):
        hint = f"give at most {_CHOICES_MAX} texts that are not blank"
        raise InvalidContentError("choices", "they can't be shown", hint=hint)
    text, given = plain(text), [plain(choice) for choice in given]  # enums make good choices
    check_json("question", {"question": text, "choices": given})
    if timeout_s is None:
        timeout_s = session.settings.question_timeout_s
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= _TIMEOUT_S_MAX:
        hint = "give seconds, at most a year; the default is in the settings"
        raise InvalidContentError("timeout", f"{shown(timeout_s)} is no time to wait", hint=hint)
    if name is not None:
        check_name("key", name)
    return text, tuple(given), float(timeout_s)


async def _find(session: Session, turn_id: TurnId, name: str) -> tuple[Question | None, str]:
    """The turn's question of this name that was not withdrawn, and the key it has, or will have."""
    key = session.line.key

    def look(reader: Reader) -> tuple[Question | None, str]:
        question_key, number = f"{turn_id}/{name}", 1
        while (found := reader.question(key, question_key)) is not None:
            if found.state != "withdrawn":
                break
            number += 1  # an attempt that was stopped had asked it; this one asks anew
            question_key = f"{turn_id}/{name}/{number}"
        return found, question_key

    return await session.scribe.read(look)


def _asking(
    session: Session,
    running: RunningTurn,
    question_key: str,
    text: str,
    choices: tuple[str, ...],
    timeout_s: float,
) -> tuple[AnyCommand, ...]:
    scribe, turn = session.scribe, running.turn
    now = scribe.now()
    asked = AskQuestion(
        key=scribe.key,
        question_key=question_key,
        turn_id=turn.id,
        question=text,
        choices=choices,
        expires_ms=now + int(timeout_s * 1000),
        at_ms=now,
    )
    check_unit(Unit((asked,)))  # here, where it can be mended
    more = {"question": question_key, "choices": list(choices)}
    posted = posting(scribe, running.targets, text, "question", turn_id=turn.id, more=more)
    return (asked, *posted)


def question_of(asked: AskQuestion) -> Question:
    """The question that this command asks."""
    return Question(
        key=asked.key,
        question_key=asked.question_key,
        turn_id=asked.turn_id,
        question=asked.question,
        choices=asked.choices,
        asked_ms=asked.at_ms,
        expires_ms=asked.expires_ms,
    )


def _answer_of(question: Question) -> str:
    if question.state == "expired":
        raise QuestionExpiredError(question.question_key, question.expires_ms or 0)
    return question.answer or ""


# Answering -----------------------------------------------------------------------------------


async def settle(session: Session, settled: Settle, box: Answer[object] | None) -> None:
    """Store an answer, or the expiry; the turn goes on when that is durable.

    The same answer again is harmless. Raises `MissingError`, `AmbiguousError`, `ConflictError` and
    `InvalidContentError`.
    """
    scribe = session.scribe
    question = await _question(session, settled)  # behind an answer that is under way
    if question.state != "open":
        if (question.state, question.answer) != (settled.state, settled.answer):
            what = f"question {question.question_key}"
            stored = [question.state, question.answer]
            message = f"{what} is {question.state} already"
            raise ConflictError(what, stored, [settled.state, settled.answer], message=message)
        if box is not None:
            box.give(question)
        return
    if settled.state == "answered" and question.choices and settled.answer not in question.choices:
        hint = f"use one of {question.choices}"
        raise InvalidContentError("answer", "it is none of the choices", hint=hint)
    await scribe.room()
    command = AnswerQuestion(
        key=scribe.key,
        question_key=question.question_key,
        state=settled.state,
        at_ms=scribe.now(),
        answer=settled.answer,
        by=settled.by,
    )

    running = session.turn
    # From here on it is not open any more: a turn that ends must not withdraw it.
    was_open = running is not None and question.question_key in running.pause.open

    def received(receipt: Receipt) -> None:
        if isinstance(receipt, Durable):
            ended = msgspec.structs.replace(
                question,
                state=command.state,
                answer=command.answer,
                answered_by=command.by,
                answered_ms=command.at_ms,
            )
            session.on_settled(ended)
            if box is not None:
                box.give(ended)
            return
        if was_open and running is not None:
            running.pause.open[question.question_key] = question
        if box is not None and isinstance(receipt, Refused):
            box.fail(receipt.error())

    scribe.note((command,), then=received)
    if was_open and running is not None:
        del running.pause.open[question.question_key]


async def _question(session: Session, settled: Settle) -> Question:
    key, wanted = session.line.key, settled.question_key

    def look(reader: Reader) -> tuple[Question, ...]:
        if wanted is None:
            return reader.questions(key, open_only=True)
        found = reader.question(key, wanted)
        return () if found is None else (found,)

    found = await session.scribe.read(look)
    question = next(iter(found), None)
    if question is None:
        raise MissingError(f"an open question of {key}" if wanted is None else f"question {wanted}")
    if len(found) > 1:
        hint = "say which one by its question_key"
        names = tuple(q.question_key for q in found)
        raise AmbiguousError(key, names, of="open questions", hint=hint)
    return question
