"""Contract I: finalize and force-quit (I6 is about signals, and is shown elsewhere)."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trio

from onepen import Draft, SessionInfo, SessionSettings, Settings, Turn
from onepen.storage.identity import Uid

from ..runtime.scripted import Held, serving
from .agents import KEY, LONG, ROOT, call, current, echo, plain, problems, row, shape, sound, stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from onepen import Message, Runtime


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class Noting:
    """An agent with every optional method; notes what is done to it, and may be told to fail."""

    def __init__(self, steps: list[str], **failing: BaseException) -> None:
        self.model, self.platform = "model-1", "test"
        self.steps = steps
        self.failing = failing
        self.begun = trio.Event()
        self.report: list[Any] | None = None
        self.memory: tuple[Message, ...] = ()

    async def run(self, turn: Turn) -> str:
        if turn.text == "hang":
            await turn.append("working", call("c1"))
            self.begun.set()
            try:
                await trio.sleep_forever()
            finally:
                self.note("stop the turn")
        return f"re: {turn.text}"

    def note(self, step: str) -> None:
        self.steps.append(step)
        if step in self.failing:
            raise self.failing[step]

    def unsaved(self) -> list[Any] | None:
        self.note("store")
        return self.report

    async def commit_memory(self, history: tuple[Message, ...]) -> None:
        self.memory = history
        self.note("commit_memory")

    async def close(self) -> None:
        self.note("close")


class Observer:
    """Hooks that note their names beside the agent's steps."""

    def __init__(self, steps: list[str], **failing: BaseException) -> None:
        self.steps = steps
        self.failing = failing
        self.check: Callable[[str], None] | None = None

    def _note(self, step: str) -> None:
        self.steps.append(step)
        if step in self.failing:
            raise self.failing[step]

    def on_session_end(self, **_: object) -> None:
        self._note("on_session_end")

    async def on_session_finalize(self, **_: object) -> None:
        self._note("on_session_finalize")


def built(agent: Noting) -> Callable[[SessionInfo], Noting]:
    """A factory, so that closing the session closes the agent."""
    return lambda _: agent


# Closing -------------------------------------------------------------------------------------


async def test_closing_stores_the_messages_of_the_turn_that_is_still_running(path: Path) -> None:
    """I1: and then ends the row with the reason; the call that was open gets a result (A10)."""
    agent = Noting([])
    async with serving(path, factory=built(agent)) as runtime:
        await runtime.ask(KEY, "hello")
        submission = await runtime.submit(KEY, "hang")
        await agent.begun.wait()
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert closed.ended
        assert closed.failures == {}
        messages = await stored(runtime)
        assert shape(messages) == [
            "user hello",
            "assistant re: hello",
            "user hang",
            "assistant working",
            "call c1",
            "result c1",
        ]
        assert problems(messages) == []
        session = await row(runtime, closed.session_id)
        assert (session.end_reason, session.end_kind) == ("goodbye", "boundary")
        assert (await submission.reply()).outcome.kind == "interrupted"
    async with serving(path, echo) as runtime:
        assert await stored(runtime) == messages
        session = await row(runtime, closed.session_id)
        assert (session.end_reason, session.end_kind) == ("goodbye", "boundary")
    sound(path)


async def test_what_an_agent_has_not_reported_is_stored_and_preferred_to_the_actors_copy(
    path: Path,
) -> None:
    """I1: `unsaved()` of an agent that reports only at the end of its turns."""
    agent = Noting([])
    async with serving(path, factory=built(agent)) as runtime:
        await runtime.ask(KEY, "hello")
        submission = await runtime.submit(KEY, "hang")
        await agent.begun.wait()
        agent.report = [
            {"role": "user", "content": "hang"},
            {"role": "assistant", "content": "working"},
            call("c1"),
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "assistant", "content": "almost there"},
        ]
        await runtime.close_session(KEY)
        await submission.reply()
        assert shape(await stored(runtime))[2:] == [
            "user hang",
            "assistant working",
            "call c1",
            "result c1",
            "assistant almost there",
        ]
        assert "found" in [message.text for message in await stored(runtime)]
    sound(path)


async def test_what_an_agent_kept_back_between_turns_is_stored_once(path: Path) -> None:
    """I1: no turn is running; closing asks the agent all the same."""
    agent = Noting([])
    async with serving(path, factory=built(agent)) as runtime:
        await runtime.ask(KEY, "hello")
        agent.report = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "re: hello"},
            {"role": "assistant", "content": "one more thing"},
        ]
        closed = await runtime.close_session(KEY)
        assert closed.failures == {}
        assert shape(await stored(runtime)) == [
            "user hello",
            "assistant re: hello",
            "assistant one more thing",
        ]


async def test_what_an_agent_kept_back_does_not_undo_a_rewind(path: Path) -> None:
    """I1: the agent still has the turn that a person took back; closing leaves it inactive."""
    agent = Noting([])
    async with serving(path, factory=built(agent)) as runtime:
        await runtime.ask(KEY, "one")
        await runtime.ask(KEY, "two")
        agent.report = plain(await stored(runtime))
        await runtime.rewind(KEY)
        closed = await runtime.close_session(KEY)
        assert closed.failures == {}
        assert shape(await stored(runtime)) == ["user one", "assistant re: one"]
    sound(path)


async def test_shutdown_closes_every_live_session_as_a_suspension(path: Path) -> None:
    """I1: what was running is stored, and the next message goes on with the same session."""
    agent = Noting([])
    async with serving(path, agent) as runtime:
        await runtime.ask("test:other", "hello")
        await runtime.submit(KEY, "hang")
        await agent.begun.wait()
        ids = [await current(runtime, key) for key in (KEY, "test:other")]
    async with serving(path, echo) as runtime:
        for session_id in ids:
            session = await row(runtime, session_id)
            assert (session.end_reason, session.end_kind) == ("shutdown", "suspension")
        assert shape(await stored(runtime)) == [
            "user hang",
            "assistant working",
            "call c1",
            "result c1",
        ]
        reply = await runtime.ask(KEY, "hello again")
        assert reply.session_id == ids[0]
        session = await row(runtime, ids[0])
        assert session.end_kind is None
    sound(path)


# After rotation, and which end stands --------------------------------------------------------


async def test_after_rotation_the_child_is_ended_and_the_parent_keeps_its_reason(
    path: Path,
) -> None:
    """I2."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, LONG)
        parent = await current(runtime)
        child = await runtime.rotate(KEY, "in short")
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert closed.session_id == child
        assert (await row(runtime, child)).end_reason == "goodbye"
        assert (await row(runtime, parent)).end_reason == "compression"
    sound(path)


async def test_a_rotation_inside_the_turn_that_is_stopped_is_followed(path: Path) -> None:
    """I2: the *current* session is ended, whatever the turn began in."""
    rotated = trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "rotate":
            await turn.rotate("in short")
            rotated.set()
            await trio.sleep_forever()
        return await echo(turn)

    async with serving(path, agent) as runtime:
        await runtime.ask(KEY, LONG)
        parent = await current(runtime)
        await runtime.submit(KEY, "rotate")
        await rotated.wait()
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert closed.session_id == await current(runtime) != parent
        assert (await row(runtime, closed.session_id)).end_reason == "goodbye"
        assert (await row(runtime, parent)).end_reason == "compression"
    sound(path)


async def test_the_first_boundary_wins(path: Path) -> None:
    """I2: neither another close nor a shutdown changes it; a message starts a new session."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, "hello")
        first = await runtime.close_session(KEY, reason="first")
        await runtime.close_session(KEY, reason="second")
    async with serving(path, echo) as runtime:
        session = await row(runtime, first.session_id)
        assert (session.end_reason, session.end_kind) == ("first", "boundary")
        reply = await runtime.ask(KEY, "hello again")
        assert reply.session_id != first.session_id
        assert (await row(runtime, first.session_id)).end_reason == "first"


async def test_a_boundary_replaces_a_suspension(path: Path) -> None:
    """I2."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, "hello")
    async with serving(path, echo) as runtime:
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert closed.ended
        session = await row(runtime, closed.session_id)
        assert (session.end_reason, session.end_kind) == ("goodbye", "boundary")


async def test_a_rotation_replaces_a_suspension(path: Path) -> None:
    """I2."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, LONG)
        parent = await current(runtime)
    async with serving(path, echo) as runtime:
        assert (await row(runtime, parent)).end_kind == "suspension"
        child = await runtime.rotate(KEY, "in short")
        session = await row(runtime, parent)
        assert (session.end_reason, session.end_kind) == ("compression", "rotation")
        assert (await row(runtime, child)).end_kind is None
    sound(path)


async def test_reopening_is_an_operation_of_its_own(path: Path) -> None:
    """I2: after it the same session goes on, and can be closed again with another reason."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, "hello")
        closed = await runtime.close_session(KEY, reason="first")
        assert await runtime.reopen(KEY) == closed.session_id
        session = await row(runtime, closed.session_id)
        assert (session.end_reason, session.end_kind) == (None, None)
        assert (await runtime.ask(KEY, "again")).session_id == closed.session_id
        await runtime.close_session(KEY, reason="second")
        assert (await row(runtime, closed.session_id)).end_reason == "second"


# Closing nothing -----------------------------------------------------------------------------


async def test_closing_twice_changes_nothing(path: Path) -> None:
    """I3."""
    steps: list[str] = []
    agent, hooks = Noting(steps), Observer(steps)
    async with serving(path, factory=built(agent), hooks=hooks) as runtime:
        await runtime.ask(KEY, "hello")
        first = await runtime.close_session(KEY, reason="first")
        before, done = await row(runtime, first.session_id), list(steps)
        second = await runtime.close_session(KEY, reason="second")
        assert (second.session_id, second.ended, second.failures) == (first.session_id, False, {})
        assert await row(runtime, first.session_id) == before
        assert steps == done


async def test_closing_a_lazy_session_makes_no_row_and_raises_nothing(path: Path) -> None:
    """I3: no agent, no messages, no row."""
    steps: list[str] = []
    async with serving(path, echo, hooks=Observer(steps)) as runtime:
        closed = await runtime.close_session(KEY)
        assert (closed.ended, closed.failures) == (False, {})
        opened = await runtime.open_session("test:lazy", "chosen")
        closed = await runtime.close_session("test:lazy")
        assert (closed.ended, closed.session_id) == (False, opened)
        assert await runtime.sessions.get("chosen") is None
        assert (await runtime.sessions.list()).sessions == ()
    assert steps == []


async def test_a_session_without_an_agent_is_still_ended_with_the_reason(path: Path) -> None:
    """I3: after a restart no agent was built, and none is built for this."""
    async with serving(path, echo) as runtime:
        await runtime.ask(KEY, "hello")
        session_id = await current(runtime)
        await runtime.reopen(KEY)
    async with serving(path, factory=lambda _: pytest.fail("built")) as runtime:
        await runtime.reopen(KEY)
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert (closed.ended, closed.failures) == (True, {})
        assert (await row(runtime, session_id)).end_reason == "goodbye"


async def test_an_agent_without_optional_methods_is_closed_without_a_word(path: Path) -> None:
    """I3."""

    class Bare:
        async def run(self, turn: Turn) -> str:
            return "ok"

    async with serving(path, factory=lambda _: Bare()) as runtime:
        await runtime.ask(KEY, "hello")
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert (closed.ended, closed.failures) == (True, {})
        assert (await row(runtime, closed.session_id)).end_reason == "goodbye"


# Steps that fail -----------------------------------------------------------------------------

STEPS = ["store", "on_session_end", "commit_memory", "on_session_finalize", "close"]


@pytest.mark.parametrize("failing", STEPS)
async def test_whichever_step_fails_the_others_run_and_the_failure_is_reported(
    path: Path, failing: str
) -> None:
    """I4."""
    steps: list[str] = []
    agent = Noting(steps, **{failing: ValueError("no luck")})
    hooks = Observer(steps, **{failing: ValueError("no luck")})
    async with serving(path, factory=built(agent), hooks=hooks) as runtime:
        await runtime.ask(KEY, "hello")
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert steps == STEPS
        assert closed.ended
        assert (await row(runtime, closed.session_id)).end_reason == "goodbye"
        assert list(closed.failures) == [failing]
        assert "no luck" in closed.failures[failing]


async def test_if_what_was_kept_back_can_not_be_stored_the_session_still_ends(path: Path) -> None:
    """I4: storing fails."""
    steps: list[str] = []
    agent = Noting(steps)
    async with serving(path, factory=built(agent), hooks=Observer(steps)) as runtime:
        await runtime.ask(KEY, "hello")
        draft = Draft(uid=Uid("f" * 32), role="assistant", text="half \ud800")
        agent.report = [*await stored(runtime), draft]
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert steps == STEPS
        assert list(closed.failures) == ["store"]
        assert (await row(runtime, closed.session_id)).end_reason == "goodbye"
        assert shape(await stored(runtime)) == ["user hello", "assistant re: hello"]


async def test_a_step_that_hangs_is_cut_off_and_the_others_run(path: Path) -> None:
    """I4."""
    steps: list[str] = []

    class Hanging(Noting):
        async def commit_memory(self, history: tuple[Message, ...]) -> None:
            self.note("commit_memory")
            await trio.sleep_forever()

    agent = Hanging(steps)
    limits = SessionSettings(finalize_deadline_s=0.05, hook_deadline_s=0.05)
    settings = Settings(sessions=limits)
    hooks = Observer(steps)
    async with serving(path, factory=built(agent), hooks=hooks, settings=settings) as runtime:
        await runtime.ask(KEY, "hello")
        closed = await runtime.close_session(KEY, reason="goodbye")
        assert steps == STEPS
        assert list(closed.failures) == ["commit_memory"]
        assert (await row(runtime, closed.session_id)).end_reason == "goodbye"


# Order ---------------------------------------------------------------------------------------


async def test_the_steps_of_a_close_come_in_their_order(path: Path) -> None:
    """I5: and what each may rely on is durable when it runs."""
    steps: list[str] = []
    seen: dict[str, tuple[Any, ...]] = {}
    agent = Noting(steps)

    class Looking(Observer):
        async def on_session_end(self, **arguments: object) -> None:  # type: ignore[override]
            self._note("on_session_end")
            await look("on_session_end")

        async def on_session_finalize(self, **arguments: object) -> None:
            self._note("on_session_finalize")
            await look("on_session_finalize")

    async def look(step: str) -> None:
        session = await row(runtime, await current(runtime))
        seen[step] = (session.end_kind, len(await stored(runtime)))

    async with serving(path, factory=built(agent), hooks=Looking(steps)) as runtime:
        submission = await runtime.submit(KEY, "hang")
        await agent.begun.wait()
        waiting = await runtime.submit(KEY, "hello")
        closed = await runtime.close_session(KEY, reason="goodbye")
        # The turn's own end asks for what is unsaved as well, hence the first "store".
        assert steps[:2] == ["stop the turn", "store"]
        assert steps[-5:] == STEPS
        assert seen == {"on_session_end": (None, 4), "on_session_finalize": (None, 4)}
        assert shape(agent.memory) == ["user hang", "assistant working", "call c1", "result c1"]
        assert (await submission.reply()).outcome.kind == "interrupted"
        # No new turn came in between: what waited goes on behind the boundary.
        assert (await waiting.reply()).session_id != closed.session_id


# SIGKILL -------------------------------------------------------------------------------------


class Killed(NamedTuple):
    """What the killed process had acknowledged: key, turn id and text."""

    acknowledged: list[tuple[str, str, str]]

    def turn_id(self, text: str) -> str:
        return next(turn_id for _, turn_id, said in self.acknowledged if said == text)


async def _run(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "tests.contract.killed_serving", *arguments]
    with trio.fail_after(60):
        done = await trio.run_process(command, cwd=ROOT, capture_stdout=True, check=False)
    return done.returncode, done.stdout.decode().splitlines()


async def _kill(path: Path) -> Killed:
    code, lines = await _run(str(path), "serve")
    assert code == -signal.SIGKILL
    assert len(lines) == 5
    acknowledged: list[tuple[str, str, str]] = []
    for line in lines:
        key, turn_id, text = line.split("\t")
        acknowledged.append((key, turn_id, text))
    return Killed(acknowledged)


async def _settled(runtime: Runtime, killed: Killed) -> None:
    """Until every turn that the killed process had accepted has an end."""
    for turn_id in {turn_id for _, turn_id, _ in killed.acknowledged}:
        while (await runtime.sessions.turn(turn_id)).state != "ended":
            await trio.lowlevel.checkpoint()


STREAMED = ["user stream", "assistant working"]
CALLED = ["user call", "call c1 c2", "result c2", "result c1"]


async def _check_marked(runtime: Runtime, killed: Killed) -> None:
    for text in ("stream", "call"):
        turn = await runtime.sessions.turn(killed.turn_id(text))
        assert turn.outcome is not None
        assert (turn.state, turn.attempt) == ("ended", 1)
        assert (turn.outcome.kind, turn.outcome.cause) == ("interrupted", "crash")
    done = await runtime.sessions.turn(killed.turn_id("hello"))
    assert done.outcome is not None
    assert done.outcome.kind == "answered"
    assert shape(await stored(runtime, "test:done")) == ["user hello", "assistant re: hello"]
    assert shape(await stored(runtime, "test:stream"))[:2] == STREAMED
    called = await stored(runtime, "test:call")
    assert shape(called) == CALLED
    assert problems(called) == []
    assert len((await runtime.sessions.list()).sessions) == 3


async def test_after_sigkill_every_acknowledged_message_is_there_and_its_turns_are_marked(
    path: Path,
) -> None:
    """I7: already when the block begins; what waited goes on; nothing is deleted or ended."""
    killed = await _kill(path)
    held = Held()
    async with serving(path, held) as runtime:
        await _check_marked(runtime, killed)
        assert runtime.statistics().counters["turns_recovered"] == 2
        for key in ("test:done", "test:stream", "test:call"):
            assert (await row(runtime, await current(runtime, key))).end_kind is None
        await held.begun["later"].wait()
        held.go_on["later"].set()
        await _settled(runtime, killed)
        assert shape(await stored(runtime, "test:stream")) == [
            *STREAMED,
            "user later",
            "assistant re later",
        ]
    sound(path)


async def test_after_sigkill_turns_are_resumed_if_the_policy_says_so(path: Path) -> None:
    """I7: a second attempt on what is stored; the user's message is not stored twice, and the call
    that was open is closed before the agent is called.
    """
    killed = await _kill(path)
    seen: dict[str, tuple[bool, int, list[str]]] = {}

    async def agent(turn: Turn) -> str:
        seen[turn.text] = (turn.resumed, turn.attempt, shape(turn.messages))
        return f"re: {turn.text}"

    settings = Settings(sessions=SessionSettings(recovery="resume"))
    async with serving(path, agent, settings=settings) as runtime:
        await _settled(runtime, killed)
        assert seen == {
            "stream": (True, 2, STREAMED),
            "call": (True, 2, CALLED),
            "later": (False, 1, ["user later"]),
        }
        for text in ("stream", "call"):
            turn = await runtime.sessions.turn(killed.turn_id(text))
            assert turn.outcome is not None
            assert (turn.attempt, turn.outcome.kind) == (2, "answered")
        assert shape(await stored(runtime, "test:stream")) == [
            *STREAMED,
            "assistant re: stream",
            "user later",
            "assistant re: later",
        ]
        called = await stored(runtime, "test:call")
        assert shape(called) == [*CALLED, "assistant re: call"]
        assert problems(called) == []
    sound(path)


async def test_recovery_done_again_changes_nothing(path: Path) -> None:
    """I7, INV-19."""
    killed = await _kill(path)
    async with serving(path, echo) as runtime:
        await _settled(runtime, killed)
        before = {k: await stored(runtime, k) for k in ("test:done", "test:stream", "test:call")}
    for _ in range(2):
        async with serving(path, echo) as runtime:
            await _check_marked(runtime, killed)
            assert runtime.statistics().counters["turns_recovered"] == 0
            assert {key: await stored(runtime, key) for key in before} == before
    sound(path)


@pytest.mark.parametrize("policy", ["mark", "resume"])
@pytest.mark.slow
async def test_a_process_killed_during_recovery_is_recovered_by_the_next(
    path: Path, policy: Any
) -> None:
    """I7, INV-19: killed behind every commit of it, one after the other, on the same file."""
    killed = await _kill(path)
    kills = 0
    for number in range(1, 7):
        code, _ = await _run(str(path), "recover", policy, str(number))
        assert code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
    assert kills >= 2
    settings = Settings(sessions=SessionSettings(recovery=policy))
    async with serving(path, echo, settings=settings) as runtime:
        await _settled(runtime, killed)
        for key, text in (("test:stream", "stream"), ("test:call", "call"), ("test:done", "hello")):
            messages = await stored(runtime, key)
            assert problems(messages) == []
            assert shape(messages).count(f"user {text}") == 1
        assert shape(await stored(runtime, "test:stream"))[:2] == STREAMED
        assert shape(await stored(runtime, "test:stream")).count("user later") == 1
        assert shape(await stored(runtime, "test:call"))[:4] == CALLED
    sound(path)
