"""Rubbish in every place of every call about messages on their way, and in an agent's hands.

Wrong types, huge texts, halves of characters, numbers that are none: each is refused with an error
of ours that can be shown, or it is harmless. It must never get to an actor.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import Inbound, InvalidContentError, OnepenError

from .scripted import inline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    from onepen import Runtime, Turn

KEY = "test:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


async def _subscribe(runtime: Runtime, after: Any) -> None:
    async with runtime.events(KEY, after=after):
        pass


class Word(str):
    """A subclass of str: equal to its text wherever it is compared."""

    __slots__ = ()


class Odd:
    """Nobody can show it."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


def nested(depth: int) -> list[Any]:
    root: list[Any] = []
    for _ in range(depth):
        root = [root]
    return root


RUBBISH: tuple[Any, ...] = (
    *(None, 0, -1, 2**70, 1.5, float("nan"), float("inf"), True, b"x", "", " ", "a\0b", "a\ud800"),
    *("x" * 5_000, [], {}, (), [1], {"a": float("nan")}, {1: 2}, ("a", "b"), (1, 2, 3), object()),
    *(Word("word"), Odd(), nested(2_000), datetime(2020, 1, 1), date(2020, 1, 1)),
    datetime.max.replace(tzinfo=UTC),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
)
FIELDS = ("text", "source", "id", "user", "reply_to", "parts", "platform_id", "blobs", "meta")


def _seams(runtime: Runtime, given: Any) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every public call about messages on their way, with this in each of its places."""
    turns, letters, timers = runtime.turns, runtime.dead_letters, runtime.timers
    outbox, asked = runtime.deliveries, runtime.approvals
    return {
        "submit key": lambda: runtime.submit(given, "x"),
        "submit": lambda: runtime.submit("a:1", given),
        "submit busy": lambda: runtime.submit("a:1", "x", busy=given),
        "submit debounce_s": lambda: runtime.submit("a:1", "x", debounce_s=given),
        "submit at": lambda: runtime.submit("a:1", "x", at=given),
        "ask key": lambda: runtime.ask(given, "x"),
        "post key": lambda: runtime.post(given, "x"),
        "post": lambda: runtime.post("a:2", given),
        "post reply_to": lambda: runtime.post("a:2", "x", reply_to=given),
        "post source": lambda: runtime.post("a:2", "x", source=given),
        "post id": lambda: runtime.post("a:2", "x", id=given),
        "events after": lambda: _subscribe(runtime, given),
        "status": lambda: runtime.status(given),
        "turns key": lambda: turns.list(given),
        "turns limit": lambda: turns.list(limit=given),
        "turn": lambda: turns.get(given),
        "cancel": lambda: turns.cancel(given),
        "letters": lambda: letters.list(given),
        "retry a letter": lambda: letters.retry(given),
        "drop a letter": lambda: letters.drop(given),
        "deliveries state": lambda: outbox.list(state=given),
        "deliveries key": lambda: outbox.list(key=given),
        "deliveries limit": lambda: outbox.list(limit=given),
        "deliveries after": lambda: outbox.list(after=given),
        "take": lambda: outbox.take(given),
        "take limit": lambda: outbox.take("a", given),
        "acknowledge": lambda: outbox.acknowledge(given),
        "acknowledge id": lambda: outbox.acknowledge("a", given),
        "fail": lambda: outbox.fail(given, "x"),
        "fail error": lambda: outbox.fail("a", given),
        "fail later": lambda: outbox.fail("a", "x", retry_after_s=given),
        "retry": lambda: outbox.retry(given),
        "questions": lambda: asked.list(given),
        "answer key": lambda: asked.answer(given, "x"),
        "answer": lambda: asked.answer("a:1", given),
        "answer question": lambda: asked.answer("a:1", "x", question_key=given),
        "answer by": lambda: asked.answer("a:1", "x", by=given),
        "timers": lambda: timers.list(given),
        "timer": lambda: timers.cancel(given),
        **{f"inbound {field}": partial(_inbound, runtime, field, given) for field in FIELDS},
    }


async def _inbound(runtime: Runtime, field: str, given: Any) -> None:
    fields: dict[str, Any] = {"text": "x", field: given}
    await runtime.submit("a:3", Inbound(**fields))


@pytest.mark.parametrize("number", range(len(RUBBISH)))
async def test_rubbish_in_any_place_is_refused_with_a_type_or_harmless(
    path: Path, autojump_clock: MockClock, number: int
) -> None:
    """INV-20, INV-15: no error of an inner kind, no actor that dies, nobody who waits for ever."""
    async with inline(path) as runtime:
        for name, call in _seams(runtime, RUBBISH[number]).items():
            try:
                with trio.fail_after(60):
                    await call()
            except OnepenError:
                pass
            except BaseException as error:
                raise AssertionError(name) from error
        runtime.interrupt("a:1")
        assert (await runtime.ask("a:9", "still here")).text == "re still here"
        assert runtime.statistics().counters["crashes"] == 0


async def test_a_key_is_text_and_nothing_that_is_like_it(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-13, INV-20: it would serve everybody who gives the same key as text, and crash."""
    async with inline(path) as runtime:
        for call in (runtime.submit, runtime.ask, runtime.post):
            with pytest.raises(InvalidContentError, match="key"):
                await call(Word(KEY), "hello")
        assert (await runtime.ask(KEY, "hello")).text == "re hello"


def _done(*_: object) -> int:
    return 1


def _of_an_agent(turn: Turn, given: Any, n: int) -> dict[str, Callable[[], object]]:
    """What an agent can do with it."""

    async def write(piece: Any) -> None:
        async with turn.streaming() as out:
            await out.write(piece)

    async def finish(reason: Any) -> None:
        async with turn.streaming() as out:
            out.finish_reason = reason
            await out.write("x")

    return {
        "append": lambda: turn.append(given),
        "say": lambda: turn.say(given),
        "write": lambda: write(given),
        "finish_reason": lambda: finish(given),
        "effect": lambda: turn.effect(given, key="f"),
        "effect arguments": lambda: turn.effect(_done, given, key=f"a{n}"),
        "effect key": lambda: turn.effect(lambda: 1, key=given),
        "effect policy": lambda: turn.effect(lambda: 1, key=f"p{n}", on_unknown=given),
        "effect result": lambda: turn.effect(lambda: given, key=f"r{n}"),
        "question timeout": lambda: turn.ask_user("ok?", ("yes",), given or -1),
        "rotate": lambda: turn.rotate(given),
        "rotate upto": lambda: turn.rotate("short", upto=given),
        "compact": lambda: turn.compact(given),
        "usage model": lambda: turn.usage(model=given),
        "usage": lambda: turn.usage(input=given),
        "cost": lambda: turn.usage(cost_nanos=given),
    }


@pytest.mark.parametrize("number", range(len(RUBBISH)))
async def test_an_agent_that_hands_over_rubbish_is_told_so_and_its_turn_goes_on(
    path: Path, autojump_clock: MockClock, number: int
) -> None:
    """INV-13, INV-20: an error that it can catch, and the turn ends as it wants."""

    async def agent(turn: Turn) -> str:
        if turn.text != "go":
            return "still here"
        for n, (name, call) in enumerate(_of_an_agent(turn, RUBBISH[number], n=0).items()):
            try:
                with trio.move_on_after(60):  # a question may be one, and nobody answers it
                    done: Any = call()
                    if isawaitable(done):
                        await done
            except OnepenError:
                pass
            except Exception as error:
                raise AssertionError(f"{n} {name}") from error
        return "done"

    async with inline(path, agent) as runtime:
        assert (await runtime.ask(KEY, "go")).text == "done"
        assert (await runtime.ask(KEY, "and now?")).text == "still here"
        assert runtime.statistics().counters["crashes"] == 0
