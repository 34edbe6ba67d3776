"""Side effects: intent before, result after, and what a resumed turn gets of them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    EffectFailedError,
    EffectUnknownError,
    Inbound,
    InvalidContentError,
    NoGainError,
    Outcome,
    open_runtime,
)
from onepen.actors.scribe import Scribe

from ..contract.agents import Commits, call, query, result, shape, snapshot, sound, stored
from .scripted import serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Turn

KEY = "test:dm:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class World:
    """What was done to it, and what it was told of its doer."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.ids: list[str] = []
        self.hang = trio.Event()

    async def pay(self, amount: int, effect_id: str) -> dict[str, Any]:
        self.done.append(amount)
        self.ids.append(effect_id)
        return {"paid": amount, "as": (1, 2)}

    async def pay_and_hang(self, amount: int, effect_id: str) -> dict[str, Any]:
        await self.pay(amount, effect_id)
        self.hang.set()
        await trio.sleep_forever()
        raise AssertionError


def effects(path: Path) -> list[tuple[Any, ...]]:
    return query(path, "SELECT effect_key, tool, state, attempt FROM effects ORDER BY 1")


async def run(path: Path, agent: Any, text: str = "go") -> str:
    """One turn of a fresh runtime; its reply."""
    async with serving(path, agent) as runtime:
        return (await runtime.ask(KEY, text)).text


# Once ----------------------------------------------------------------------------------------


async def test_the_intent_is_durable_before_the_call_and_all_that_the_turn_has_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-3: while a commit is held, nothing is done to the world."""
    commits, world = Commits(monkeypatch), World()
    asked = trio.Event()

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        asked.set()
        await turn.effect(world.pay, 5)
        await turn.append(result("c1"))
        return "ok"

    async with serving(path, agent) as runtime:
        await runtime.ask("test:dm:0", "warm")
        world.done.clear()
        asked = trio.Event()
        submission = await runtime.submit(KEY, "go")
        with commits.holding():
            await asked.wait()
            await commits.wait_reached()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert world.done == []
        assert (await submission.reply()).text == "ok"
        assert world.done == [5]
    assert effects(path)[1] == ("c1", "pay", "done", 1)
    sound(path)


async def test_the_same_call_again_gets_the_recorded_result(path: Path) -> None:
    """As JSON has it, the first time as well; sync functions, partials and unnamed ids too."""
    world = World()
    counted: list[int] = []

    def count(step: int) -> tuple[int, ...]:
        counted.append(step)
        return (step, step)

    async def agent(turn: Turn) -> str:
        for _ in range(2):
            assert await turn.effect(world.pay, 5, key="pay") == {"paid": 5, "as": [1, 2]}
            assert await turn.effect(count, 2, key="count") == [2, 2]
            assert await turn.effect(partial(count, 3), key="bound") == [3, 3]
        return "ok"

    assert await run(path, agent) == "ok"
    assert (world.done, counted) == ([5], [2, 3])
    assert [len(one) for one in world.ids] == [32]
    sound(path)


async def test_two_at_once_under_one_key_are_one(path: Path) -> None:
    world = World()

    async def agent(turn: Turn) -> str:
        got: list[Any] = []

        async def pay() -> None:
            got.append(await turn.effect(world.pay, 5, key="pay"))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(pay)
        assert got == [{"paid": 5, "as": [1, 2]}] * 3
        return "ok"

    assert await run(path, agent) == "ok"
    assert world.done == [5]


async def test_other_arguments_or_another_function_under_the_key_are_a_conflict(
    path: Path,
) -> None:
    """And nothing is called."""
    world = World()

    async def agent(turn: Turn) -> str:
        await turn.effect(world.pay, 5, key="pay")
        for function, argument in ((world.pay, 6), (world.pay, 5.0), (world.pay_and_hang, 5)):
            with pytest.raises(ConflictError):
                await turn.effect(function, argument, key="pay")
        return "ok"

    assert await run(path, agent) == "ok"
    assert world.done == [5]


async def test_an_open_tool_call_names_its_effect_and_nothing_else_does(path: Path) -> None:
    world = World()

    async def agent(turn: Turn) -> str:
        with pytest.raises(InvalidContentError, match="0 tool calls"):
            await turn.effect(world.pay, 5)
        await turn.append(call("c1", "c2"))
        with pytest.raises(InvalidContentError, match="2 tool calls"):
            await turn.effect(world.pay, 5)
        await turn.append(result("c1"))
        await turn.effect(world.pay, 5)
        await turn.append(result("c2"))
        return "ok"

    assert await run(path, agent) == "ok"
    assert effects(path) == [("c2", "pay", "done", 1)]


async def test_the_effect_id_goes_where_the_function_wants_it(path: Path) -> None:
    seen: list[tuple[Any, ...]] = []
    functions: list[Any] = []

    def first(effect_id: str, amount: int) -> None:
        seen.append((len(effect_id), amount))

    def last(amount: int, *, effect_id: str) -> None:
        seen.append((len(effect_id), amount))

    def without(amount: int) -> None:
        seen.append((0, amount))

    async def agent(turn: Turn) -> str:
        for number, function in enumerate(functions):
            await turn.effect(function, number, key=f"k{number}")
        return "ok"

    functions += [first, last, without]
    assert await run(path, agent) == "ok"
    assert seen == [(32, 0), (32, 1), (0, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"fn": "nothing to call"},
        {"args": (object(),)},
        {"args": (float("nan"),)},
        {"args": ("half \ud800",)},
        {"key": ""},
        {"key": 5},
        {"on_unknown": "whatever"},
    ],
    ids=["function", "object", "NaN", "surrogate", "no key", "number as key", "policy"],
)
async def test_what_can_not_be_recorded_is_not_done(path: Path, arguments: dict[str, Any]) -> None:
    """INV-20."""
    world = World()

    async def agent(turn: Turn) -> str:
        given: dict[str, Any] = {"key": "pay", **arguments}
        function, args = given.pop("fn", world.pay), given.pop("args", (5,))
        with pytest.raises(InvalidContentError):
            await turn.effect(function, *args, **given)
        return "ok"

    assert await run(path, agent) == "ok"
    assert world.done == []


async def test_a_result_that_can_not_be_stored_does_not_hide_that_it_was_done(path: Path) -> None:
    """It is done for ever: the same call says the same, and does nothing again."""
    done: list[int] = []

    def open_socket() -> object:
        done.append(1)
        return object()

    async def agent(turn: Turn) -> str:
        for _ in range(2):
            with pytest.raises(InvalidContentError, match="was done"):
                await turn.effect(open_socket, key="open")
        return "ok"

    assert await run(path, agent) == "ok"
    assert done == [1]
    assert effects(path) == [("open", "open_socket", "done", 1)]
    sound(path)


async def test_a_failure_is_recorded_and_may_be_tried_again(path: Path) -> None:
    tried: list[str] = []

    def flaky(effect_id: str) -> str:
        tried.append(effect_id)
        if len(tried) == 1:
            raise OSError("no route")
        return "done"

    async def agent(turn: Turn) -> str:
        with pytest.raises(OSError, match="no route"):
            await turn.effect(flaky, key="f")
        return str(await turn.effect(flaky, key="f"))

    assert await run(path, agent) == "done"
    assert len(tried) == 2
    assert len(set(tried)) == 1
    assert effects(path) == [("f", "flaky", "done", 2)]
    sound(path)


async def test_an_effect_outside_its_turn_is_refused(path: Path) -> None:
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        turns.append(turn)
        return "ok"

    async with serving(path, agent) as runtime:
        await runtime.ask(KEY, "go")
        with pytest.raises(InvalidContentError, match="over"):
            await turns[0].effect(World().pay, 5, key="pay")
    assert effects(path) == []


# Cut off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["the agent's", "an interrupt"])
async def test_an_error_out_of_a_cancelled_effect_does_not_tell_what_happened(
    path: Path, whose: str
) -> None:
    """It may be the way in which a client ends: what follows is its policy for the unknown."""
    began, giving_up = trio.Event(), trio.CancelScope()

    async def charge() -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("the connection was closed")

    async def agent(turn: Turn) -> str:
        with giving_up:
            try:
                await turn.effect(charge, key="c0")
            except OSError:
                pass
        try:
            await turn.effect(charge, key="c0")
        except EffectUnknownError:
            return "nobody knows"
        return "never"

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await began.wait()
        if whose == "the agent's":
            giving_up.cancel()
            assert (await submission.reply()).text == "nobody knows"
        else:
            submission.interrupt()
            assert (await submission.reply()).outcome.kind == "interrupted"
    assert effects(path) == [("c0", "charge", "unknown", 1)]
    sound(path)


async def test_an_effect_that_an_interrupt_cut_is_unknown_and_the_transcript_says_so(
    path: Path,
) -> None:
    """A10: the open call gets a result that tells a model what is known of it."""
    world = World()

    async def agent(turn: Turn) -> str:
        await turn.append(call("c0", "c1"))
        await turn.effect(world.pay, 3, key="c0")
        await turn.effect(world.pay_and_hang, 5, key="c1")
        return "never"

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await world.hang.wait()
        submission.interrupt()
        assert (await submission.reply()).outcome.kind == "interrupted"
        closing = [m.text for m in await stored(runtime) if m.role == "tool"]
        assert 'pay was done, and its result is {"as":[1,2],"paid":3}' in sorted_json(closing[0])
        assert "it is not known whether pay_and_hang was done" in str(closing[1])
    assert effects(path) == [("c0", "pay", "done", 1), ("c1", "pay_and_hang", "unknown", 1)]
    sound(path)


def sorted_json(text: str | None) -> str:
    """Members come in the order in which they were stored, which is canonical."""
    return str(text).replace('{"paid":3,"as":[1,2]}', '{"as":[1,2],"paid":3}')


async def cut(path: Path, agent: Any, began: trio.Event, state: str) -> Path:
    """A file whose process died when the agent had come so far, with its last effect durable."""
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.submit(KEY, Inbound("go", id="u1"))
        await began.wait()
        await until(lambda: effects(path)[-1][2] == state)
        return snapshot(path, path.with_name("left.db"))


async def cut_while_paying(path: Path, world: World, key: str = "second") -> Path:
    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.effect(world.pay, 3, key="first")
        await turn.effect(world.pay_and_hang, 5, key=key)
        return "never"

    left = await cut(path, agent, world.hang, "begun")
    assert effects(left)[1] == (key, "pay_and_hang", "begun", 1)
    return left


@pytest.mark.parametrize(
    ("policy", "done", "text"),
    [
        ("retry", [3, 5, 5], "paid 5"),
        ("skip", [3, 5], "skipped"),
        ("fail", [3, 5], "failed: pay_and_hang second"),
    ],
)
async def test_a_resumed_turn_gets_what_is_recorded_and_decides_about_the_unknown(
    path: Path, policy: Any, done: list[int], text: str
) -> None:
    """What was done is not done again; the one without a result follows its policy."""
    world = World()
    path = await cut_while_paying(path, world)

    async def pay_and_hang(amount: int, effect_id: str) -> dict[str, Any]:
        return await world.pay(amount, effect_id)

    async def agent(turn: Turn) -> str:
        assert turn.resumed
        assert await turn.effect(world.pay, 3, key="first") == {"paid": 3, "as": [1, 2]}
        try:
            paid = await turn.effect(pay_and_hang, 5, key="second", on_unknown=policy)
        except EffectUnknownError as error:
            return f"failed: {error.tool} {error.effect_key}"
        return "skipped" if paid is None else f"paid {paid['paid']}"

    async with serving(path, agent) as runtime:
        repeat = await runtime.submit(KEY, Inbound("go", id="u1"))
        assert (await repeat.reply()).text == text
        assert shape(await stored(runtime))[:2] == ["user go", "call c1"]
    assert world.done == done
    assert len(set(world.ids[1:])) == 1, "the effect id is the same in every attempt"
    ends = {"retry": ("done", 2), "skip": ("skipped", 1), "fail": ("unknown", 1)}
    assert effects(path)[1][2:] == ends[policy]
    sound(path)


@pytest.mark.parametrize("key", ["second", "k" * 1024], ids=["short", "long"])
@pytest.mark.parametrize(
    ("answer", "done", "text"),
    [("do it again", [3, 5, 5], "paid 5"), ("leave it", [3, 5], "skipped")],
)
async def test_the_user_may_be_asked_what_follows(
    path: Path, answer: str, done: list[int], text: str, key: str
) -> None:
    """Whatever the effect's key is: a question's name is made of it."""
    world = World()
    path = await cut_while_paying(path, world, key)

    async def pay_and_hang(amount: int, effect_id: str) -> dict[str, Any]:
        return await world.pay(amount, effect_id)

    async def agent(turn: Turn) -> str:
        paid = await turn.effect(pay_and_hang, 5, key=key, on_unknown="ask")
        return "skipped" if paid is None else f"paid {paid['paid']}"

    async with serving(path, agent) as runtime:
        repeat = await runtime.submit(KEY, Inbound("go", id="u1"))
        async with runtime.events(KEY) as events:
            while not await runtime.approvals.list(KEY):
                await events.receive()
        (question,) = await runtime.approvals.list(KEY)
        assert "pay_and_hang" in question.question
        await runtime.approvals.answer(KEY, answer)
        assert (await repeat.reply()).text == text
    assert world.done == done
    sound(path)


async def test_a_recorded_failure_is_told_to_the_resumed_turn_once(path: Path) -> None:
    """So that it goes the way it went; called again, it is tried again."""
    world = World()

    def fail() -> str:
        world.done.append("tried")
        raise OSError("no route")

    async def first(turn: Turn) -> None:
        with pytest.raises(OSError, match="no route"):
            await turn.effect(fail, key="f")
        world.hang.set()
        await trio.sleep_forever()

    path = await cut(path, first, world.hang, "failed")

    async def second(turn: Turn) -> str:
        with pytest.raises(EffectFailedError, match="no route"):
            await turn.effect(fail, key="f")
        assert world.done == ["tried"]
        with pytest.raises(OSError, match="no route"):
            await turn.effect(fail, key="f")
        return "ok"

    async with serving(path, second) as runtime:
        repeat = await runtime.submit(KEY, Inbound("go", id="u1"))
        assert (await repeat.reply()).text == "ok"
    assert world.done == ["tried", "tried"]
    sound(path)


async def test_effects_of_a_turn_that_is_marked_are_unknown(path: Path) -> None:
    """I7: recovery closes what the crash has left open, in the unit that marks the turn."""
    path = await cut_while_paying(path, World())
    async with serving(path) as runtime:
        closing = (await stored(runtime, KEY))[-1].text
        assert closing == "no result: the process died before there was one"
    assert effects(path)[1] == ("second", "pay_and_hang", "unknown", 1)
    sound(path)


async def test_an_effect_outlives_a_rotation_of_its_turn(path: Path) -> None:
    """It belongs to the turn, wherever the conversation has moved."""
    world = World()

    async def agent(turn: Turn) -> str | Outcome:
        if turn.text != "go":
            return "x" * 500
        await turn.effect(world.pay, 5, key="pay")
        try:
            await turn.rotate("summary")
        except NoGainError:
            return Outcome(kind="failed", error="no gain")
        assert await turn.effect(world.pay, 5, key="pay") == {"paid": 5, "as": [1, 2]}
        return "ok"

    async with serving(path, agent) as runtime:
        await runtime.ask(KEY, "hello " * 50)
        assert (await runtime.ask(KEY, "go")).text == "ok"
    assert world.done == [5]
    sound(path)


# What a review found -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TimeoutError, trio.TooSlowError])
async def test_an_effect_that_timed_out_may_have_happened(
    path: Path, error: type[Exception]
) -> None:
    """So it is unknown and not failed: its policy is asked, and nothing is done twice unasked."""
    world = World()

    async def slow(amount: int) -> None:
        world.done.append(amount)
        raise error("no answer")

    async def agent(turn: Turn) -> str:
        with pytest.raises(error):
            await turn.effect(slow, 5, key="pay")
        with pytest.raises(EffectUnknownError):
            await turn.effect(slow, 5, key="pay")
        assert await turn.effect(slow, 5, key="pay", on_unknown="skip") is None
        return "ok"

    assert await run(path, agent) == "ok"
    assert world.done == [5]
    assert effects(path) == [("pay", "slow", "skipped", 1)]
    sound(path)


def test_arguments_have_one_form_in_every_process() -> None:
    """A set has no order of its own: a resumed turn must not find other arguments."""
    from onepen.actors.effects import _given  # pyright: ignore[reportPrivateUsage]

    given = "({'a', 'b', 'c'}, {'y': 1, 'x': 2})"
    code = f"from onepen.actors.effects import _given; print(_given(len, {given}))"
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        expected = _given(len, ({"a", "b", "c"}, {"x": 2, "y": 1}))
        assert done.stdout.strip() == str(expected)


async def test_what_is_known_of_an_effect_waits_for_storage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down or full when it comes to an end: the result is recorded when there is room again."""
    world = World()
    room = Scribe.room
    closed, opened = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        async def pay() -> str:
            world.done.append(5)
            monkeypatch.setattr(Scribe, "room", no_room)
            return "paid"

        return str(await turn.effect(pay, key="pay"))

    async def no_room(scribe: Scribe) -> None:
        closed.set()
        await opened.wait()

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await closed.wait()
        submission.interrupt()  # the turn's end brings it, if it comes first
        await trio.testing.wait_all_tasks_blocked(0.05)
        monkeypatch.setattr(Scribe, "room", room)
        opened.set()
        assert (await submission.reply()).outcome.kind == "interrupted"
    assert effects(path) == [("pay", "pay", "done", 1)]
    sound(path)


async def test_an_effect_whose_turn_was_stopped_before_the_call_was_never_called(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its intent is on its way to the disk: that much is known, and said."""
    commits, world = Commits(monkeypatch), World()
    ready, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> None:
        ready.set()
        await go_on.wait()
        await turn.effect(world.pay, 5, key="pay")

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await ready.wait()
        with commits.holding():
            go_on.set()
            await commits.wait_reached()
            submission.interrupt()
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await submission.reply()).outcome.kind == "interrupted"
    assert world.done == []
    rows = query(path, "SELECT state, result ->> '$.error' FROM effects")
    assert rows == [("failed", "it was never called")]
    sound(path)
