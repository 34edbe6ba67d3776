"""Contract J: hooks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import Inbound, Outcome, SessionSettings, Settings, Turn

from ..runtime.scripted import inline, serving
from .agents import KEY, LONG, current, echo, row, stored, texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from onepen import Runtime

NAMES = (
    "on_session_start",
    "on_turn_start",
    "on_turn_end",
    "on_rotation",
    "on_session_end",
    "on_session_finalize",
)
BRISK = Settings(sessions=SessionSettings(hook_deadline_s=0.05))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class Calls:
    """What was called, with what. `hooks` is an object that has all hooks, or some."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.positional: list[Any] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.made if called == name]

    def hooks(self, *names: str, asynchronous: bool = False, after: Any = None) -> object:
        class Hooks:
            pass

        hooks = Hooks()
        for name in names or NAMES:
            made = self._async(name, after) if asynchronous else self._sync(name, after)
            setattr(hooks, name, made)
        return hooks

    def _sync(self, name: str, after: Any) -> Callable[..., Any]:
        def hook(*positional: Any, **arguments: Any) -> Any:
            self.positional += positional
            self.made.append((name, arguments))
            return after() if after is not None else None

        return hook

    def _async(self, name: str, after: Any) -> Callable[..., Any]:
        async def hook(*positional: Any, **arguments: Any) -> Any:
            await trio.lowlevel.checkpoint()
            self.positional += positional
            self.made.append((name, arguments))
            return await after() if after is not None else None

        return hook


class Known:
    """An agent that says what it is."""

    model, platform = "model-1", "telegram"

    async def run(self, turn: Turn) -> str:
        return await echo(turn)


# The end of a session ------------------------------------------------------------------------


def ended(session_id: str, model: str | None, platform: str | None) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "completed": False,
        "interrupted": True,
        "model": model,
        "platform": platform,
    }


async def _close(runtime: Runtime) -> None:
    await runtime.close_session(KEY)


async def _reset(runtime: Runtime) -> None:
    await runtime.reset(KEY)


async def _shut_down(runtime: Runtime) -> None:
    await runtime.shutdown()


async def _leave(runtime: Runtime) -> None:
    """The block ends."""


@pytest.mark.parametrize("close", [_close, _reset, _shut_down, _leave])
@pytest.mark.parametrize(
    ("agent", "model", "platform"), [(Known(), "model-1", "telegram"), (echo, None, None)]
)
async def test_every_close_tells_the_end_of_the_session_with_exactly_these_arguments(
    path: Path, close: Any, agent: Any, model: str | None, platform: str | None
) -> None:
    """J1: a close, a reset, a shutdown, the end of the block."""
    calls = Calls()
    async with serving(path, agent, hooks=calls.hooks("on_session_end")) as runtime:
        await runtime.ask(KEY, "hello")
        session_id = await current(runtime)
        assert calls.made == []
        await close(runtime)
    assert calls.made == [("on_session_end", ended(session_id, model, platform))]
    assert calls.positional == []


async def test_each_live_session_has_its_own_end_at_shutdown(path: Path) -> None:
    """J1."""
    calls = Calls()
    async with serving(path, Known(), hooks=calls.hooks("on_session_end")) as runtime:
        keys = [f"test:{n}" for n in range(3)]
        for key in keys:
            await runtime.ask(key, "hello")
        ids = {await current(runtime, key) for key in keys}
    assert {arguments["session_id"] for arguments in calls.of("on_session_end")} == ids
    assert len(calls.made) == 3


async def test_closing_a_suspended_session_tells_its_end_as_well(path: Path) -> None:
    """J1, I5: a boundary replaces the suspension, so this is a close like any other."""
    calls = Calls()
    async with serving(path, echo) as runtime:
        session_id = (await runtime.ask(KEY, "hello")).session_id
    hooks = calls.hooks("on_session_end", "on_session_finalize")
    async with serving(path, echo, hooks=hooks) as runtime:
        assert (await row(runtime, session_id)).end_kind == "suspension"
        await runtime.close_session(KEY, reason="goodbye")
        assert calls.made == [
            ("on_session_end", ended(session_id, None, None)),
            ("on_session_finalize", {"session_id": session_id, "key": KEY, "reason": "goodbye"}),
        ]


async def test_the_end_of_a_turn_has_its_own_hook(path: Path) -> None:
    """J1: and is no end of the session."""
    calls = Calls()
    async with serving(path, echo, hooks=calls.hooks("on_turn_end", "on_session_end")) as runtime:
        first = await runtime.ask(KEY, "one")
        second = await runtime.ask(KEY, "two")
        await runtime.close_session(KEY)
    assert calls.names == ["on_turn_end", "on_turn_end", "on_session_end"]
    assert [a["turn_id"] for a in calls.of("on_turn_end")] == [first.turn_id, second.turn_id]


# Hooks that go wrong -------------------------------------------------------------------------


def _raise() -> None:
    raise ValueError("no luck")


async def _hang() -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trouble", ["raises", "hangs"])
async def test_a_hook_that_raises_or_hangs_stops_nothing_and_is_logged_and_counted(
    path: Path, name: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """J2."""
    calls = Calls()
    hangs = trouble == "hangs"
    hooks = calls.hooks(name, asynchronous=hangs, after=_hang if hangs else _raise)
    caplog.set_level(logging.ERROR, logger="onepen")
    async with serving(path, echo, hooks=hooks, settings=BRISK) as runtime:
        assert (await runtime.ask(KEY, LONG)).text == f"re: {LONG}"
        await runtime.rotate(KEY, "in short")
        assert (await runtime.ask(KEY, "two")).text == "re: two"
        session_id = await current(runtime)
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert closed.ended
        assert (await row(runtime, session_id)).end_reason == "goodbye"
        # Rotation is told beside the turn: its hook may still be running.
        while runtime.statistics().hook_failures < len(calls.made):
            await trio.lowlevel.checkpoint()
        assert runtime.statistics().hook_failures == len(calls.made) >= 1
        assert runtime.statistics().counters["crashes"] == 0
    told = [record.getMessage() for record in caplog.records]
    assert sum(f"the hook {name}" in message for message in told) == len(calls.made)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=["exit", "cancel"])
async def test_a_hook_that_raises_what_is_no_exception_stops_nothing_either(
    path: Path, error: BaseException
) -> None:
    """J2: an exit, or asyncio's cancellation, from every hook."""

    def leave() -> None:
        raise error

    calls = Calls()
    async with serving(path, echo, hooks=calls.hooks(after=leave)) as runtime:
        assert (await runtime.ask(KEY, LONG)).text == f"re: {LONG}"
        await runtime.rotate(KEY, "in short")
        while "on_rotation" not in calls.names:
            await trio.lowlevel.checkpoint()
        closed = await runtime.close_session(KEY)
        assert (closed.ended, set(closed.failures)) == (True, set(NAMES[-2:]))
        assert calls.names == list(NAMES)
        assert runtime.statistics().hook_failures == len(NAMES)
        assert (await runtime.ask(KEY, "two")).text == "re: two"
        assert runtime.statistics().counters["crashes"] == 0


async def test_a_quick_hook_has_been_called_when_ask_returns(path: Path) -> None:
    """J3: `on_turn_end` stands before the reply for whoever counts turns."""
    calls = Calls()
    hooks = calls.hooks("on_turn_end", asynchronous=True)
    async with serving(path, echo, hooks=hooks) as runtime:
        for number in range(1, 6):
            reply = await runtime.ask(KEY, "hello")
            assert len(calls.made) == number
            assert calls.made[-1][1]["turn_id"] == reply.turn_id


async def test_a_hook_that_hangs_at_the_end_of_a_turn_does_not_hold_up_the_reply(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """J2: the reply is there long before the hook's deadline; the hook runs on until then."""
    ends: list[float] = []

    class Hooks:
        async def on_turn_end(self, **_: object) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ends.append(trio.current_time())

    settings = Settings(sessions=SessionSettings(hook_deadline_s=100))
    async with inline(path, echo, settings, hooks=Hooks()) as runtime:
        started = trio.current_time()
        assert (await runtime.ask(KEY, "hello")).text == "re: hello"
        assert ends == []
        assert trio.current_time() - started < 10
        assert (await runtime.ask(KEY, "again")).text == "re: again"
        assert [round(end - started) for end in ends] == [100]


async def test_a_hook_that_hangs_for_one_key_delays_no_other(path: Path) -> None:
    """J2, INV-13."""
    begun, let_go = trio.Event(), trio.Event()

    class Hooks:
        async def on_turn_start(self, *, key: str, **_: object) -> None:
            if key == "test:slow":
                begun.set()
                await let_go.wait()

    async with serving(path, echo, hooks=Hooks()) as runtime:
        slow = await runtime.submit("test:slow", "hello")
        await begun.wait()
        assert (await runtime.ask(KEY, "hello")).text == "re: hello"
        let_go.set()
        assert (await slow.reply()).text == "re: hello"


# All hooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_each_hook_is_called_with_its_documented_keyword_arguments(
    path: Path, *, asynchronous: bool
) -> None:
    """J3: sync or async, by keyword only."""
    calls = Calls()
    async with serving(path, Known(), hooks=calls.hooks(asynchronous=asynchronous)) as runtime:
        reply = await runtime.ask(KEY, Inbound(text=LONG, user="ann"))
        parent = reply.session_id
        child = await runtime.rotate(KEY, "in short")
        while "on_rotation" not in calls.names:
            await trio.lowlevel.checkpoint()
        await runtime.close_session(KEY, reason="goodbye")
    assert calls.positional == []
    assert calls.made == [
        (
            "on_session_start",
            {"session_id": parent, "key": KEY, "source": "test", "user": "ann"},
        ),
        (
            "on_turn_start",
            {"session_id": parent, "key": KEY, "turn_id": reply.turn_id, "attempt": 1},
        ),
        (
            "on_turn_end",
            {
                "session_id": parent,
                "key": KEY,
                "turn_id": reply.turn_id,
                "outcome": Outcome(kind="answered", text=f"re: {LONG}"),
            },
        ),
        ("on_rotation", {"key": KEY, "parent_id": parent, "child_id": child}),
        ("on_session_end", ended(child, "model-1", "telegram")),
        ("on_session_finalize", {"session_id": child, "key": KEY, "reason": "goodbye"}),
    ]


async def test_a_session_starts_once_however_often_it_is_opened(path: Path) -> None:
    """J3: with its first row, not with every runtime; a session behind a boundary is another."""
    calls = Calls()
    hooks = calls.hooks("on_session_start")
    async with serving(path, echo, hooks=hooks) as runtime:
        await runtime.open_session(KEY)
        assert calls.made == []
        first = await runtime.ask(KEY, "one")
        await runtime.ask(KEY, "two")
    async with serving(path, echo, hooks=hooks) as runtime:
        await runtime.ask(KEY, "three")
        await runtime.close_session(KEY)
        second = await runtime.ask(KEY, "four")
    assert [a["session_id"] for a in calls.of("on_session_start")] == [
        first.session_id,
        second.session_id,
    ]


async def test_a_rotation_inside_a_turn_is_told(path: Path) -> None:
    """J3."""
    calls = Calls()
    children: list[str] = []

    async def agent(turn: Turn) -> str:
        if turn.text == "rotate":
            children.append(await turn.rotate("in short"))
        return await echo(turn)

    async with serving(path, agent, hooks=calls.hooks("on_rotation")) as runtime:
        parent = (await runtime.ask(KEY, LONG)).session_id
        await runtime.ask(KEY, "rotate")
    assert calls.of("on_rotation") == [{"key": KEY, "parent_id": parent, "child_id": children[0]}]


async def test_what_a_hook_tells_of_is_durable(path: Path) -> None:
    """J3: an observer that looks at storage finds it there."""
    seen: dict[str, Any] = {}

    class Hooks:
        async def on_session_start(self, *, session_id: str, **_: object) -> None:
            seen["start"] = await runtime.sessions.get(session_id) is not None

        async def on_turn_start(self, **_: object) -> None:
            seen["turn start"] = await texts(runtime)

        async def on_turn_end(self, *, turn_id: str, outcome: Outcome, **_: object) -> None:
            seen["turn end"] = (await runtime.sessions.turn(turn_id)).outcome == outcome

        async def on_rotation(self, *, child_id: str, **_: object) -> None:
            seen["rotation"] = await runtime.sessions.current(KEY) == child_id

        async def on_session_end(self, **_: object) -> None:
            seen["end"] = len(await stored(runtime))

    async with serving(path, echo, hooks=Hooks()) as runtime:
        await runtime.ask(KEY, LONG)
        await runtime.rotate(KEY, "in short")
        while "rotation" not in seen:
            await trio.lowlevel.checkpoint()
        count = len(await stored(runtime))
        await runtime.close_session(KEY)
    assert seen == {
        "start": True,
        "turn start": [LONG],
        "turn end": True,
        "rotation": True,
        "end": count,
    }


async def test_hooks_are_optional_and_only_observe(path: Path) -> None:
    """J3: none of them, some of them, names that are no hooks, values that nobody asked for."""

    class Odd:
        on_turn_start = "not a function"

        def on_turn_end(self, **_: object) -> str:
            return "ignored"

        def on_something_else(self, **_: object) -> None:
            pytest.fail("no such hook")

    for hooks in (None, object(), Odd()):
        async with serving(path, echo, hooks=hooks) as runtime:
            assert (await runtime.ask(KEY, "hello")).text == "re: hello"
            assert runtime.statistics().hook_failures == 0
