"""Contract B: a key moves from one session to the next in one step, and never by itself."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    InvalidContentError,
    MissingError,
    NoGainError,
    OnepenError,
    RouteConflictError,
    Runtime,
    SessionEndedError,
    SessionHeldError,
    SessionSettings,
    Settings,
    SummaryTooSlowError,
    SystemClock,
    Tokens,
    Turn,
    current_session,
    open_runtime,
    open_sqlite,
)
from onepen.storage.commands import CreateSession, Rotate
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey
from onepen.storage.units import Guard, Refused, Unit

from ..runtime.scripted import inline
from .agents import (
    KEY,
    LONG,
    Commits,
    Switchboard,
    call,
    current,
    echo,
    in_another_process,
    problems,
    query,
    result,
    row,
    shape,
    sound,
    stored,
    texts,
    texts_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Message


async def _begin(runtime: Runtime, key: str = KEY) -> str:
    """Three turns that are worth summarising; the session's id."""
    for number in range(3):
        await runtime.ask(key, f"{number} {LONG}")
    return await current(runtime, key)


# B1 ------------------------------------------------------------------------------------------


async def test_a_rotation_moves_everything_that_belongs_to_it(tmp_path: Path) -> None:
    """B1: the end, the child, what is carried, the title and the route."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        await runtime.set_title(KEY, "Chat")
        before = await stored(runtime)
        child_id = await runtime.rotate(KEY, "summary", upto=before[-3].uid)
        parent, child = await row(runtime, parent_id), await row(runtime, child_id)
        assert (parent.end_kind, parent.end_reason, parent.title) == (
            "rotation",
            "compression",
            "Chat",
        )
        assert parent.ended_ms is not None
        assert (child.parent_id, child.edge, child.key) == (parent_id, "rotation", KEY)
        assert (child.title, child.end_kind) == ("Chat #2", None)
        assert await current(runtime) == child_id != parent_id
        # The parent is what it was, and the child has copies of the same identity.
        assert await runtime.sessions.transcript(parent_id) == before
        messages = await stored(runtime)
        assert [m.text for m in messages] == ["summary", *(m.text for m in before[-2:])]
        assert [(m.summary, m.carried) for m in messages] == [(True, False)] + [(False, True)] * 2
        assert [m.uid for m in messages[1:]] == [m.uid for m in before[-2:]]
        assert (child.message_count, child.active_count, parent.message_count) == (0, 3, 6)
        assert [s.id for s in await runtime.sessions.lineage(child_id)] == [parent_id, child_id]
        grandchild_id = await _rotated_again(runtime)
        assert (await row(runtime, grandchild_id)).title == "Chat #3"
    sound(path)


async def _rotated_again(runtime: Runtime) -> str:
    await runtime.ask(KEY, LONG)
    return await runtime.rotate(KEY, "again")


async def test_no_commit_shows_a_part_of_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: whoever looks after any commit sees all of it or nothing."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    facts = (
        "SELECT count(*) FILTER (WHERE end_reason = 'compression'), "
        "count(*) FILTER (WHERE edge = 'rotation'), "
        "count(*) FILTER (WHERE title = 'Chat #2'), "
        "(SELECT count(*) FROM messages m WHERE m.carried OR m.kind = 1), "
        "(SELECT count(*) FROM routes r JOIN sessions k ON k.id = r.session_id "
        "WHERE k.edge = 'rotation') FROM sessions"
    )
    seen: list[tuple[Any, ...]] = []
    agent = Switchboard()

    async def rotating(turn: Turn) -> str:
        await turn.append("before")
        await turn.rotate("summary")
        return "behind"

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        await runtime.set_title(KEY, "Chat")
        commits.after = lambda: seen.extend(query(path, facts))
        agent.next = rotating
        await runtime.ask(KEY, "rotate")
        await runtime.ask(KEY, "next")
        commits.after = None
    assert set(seen) == {(0, 0, 0, 0, 0), (1, 1, 1, 3, 1)}
    sound(path)


@pytest.mark.parametrize(
    "point", [f"{where} {n}" for n in range(1, 6) for where in ("before", "after")]
)
async def test_at_every_crash_point_the_key_has_one_session_that_was_not_rotated_away(
    tmp_path: Path, point: str
) -> None:
    """B1, B3: killed around each commit of a turn that rotates, and started again."""
    path = tmp_path / "chat.db"
    code, said = await in_another_process(str(path), "rotation", point)
    assert code == -signal.SIGKILL
    told = dict(line.split(" ", 1) for line in said)
    async with open_runtime(path, agent=echo) as runtime:
        session_id = await current(runtime)
        found = await row(runtime, session_id)
        assert found.end_reason != "compression"
        if session_id == told["parent"]:
            assert "child" not in told
            assert point not in ("after 4", "before 5", "after 5")
            assert len(await runtime.sessions.lineage(session_id)) == 1
            assert (await texts(runtime))[:2] == [f"0: {LONG}", f"re: 0: {LONG}"]
        else:
            assert point not in ("before 1", "after 1")
            assert told.get("child", session_id) == session_id
            assert (found.parent_id, found.title) == (told["parent"], "Chat #2")
            assert (await texts(runtime))[:3] == ["summary", "rotate", "before"]
        assert problems(await stored(runtime)) == []
        await runtime.ask(KEY, "go on")
        assert (await texts(runtime))[-2:] == ["go on", "re: go on"]
    sound(path)


async def test_counts_and_usage_see_the_originals_only(tmp_path: Path) -> None:
    """B1: what a child carries was counted in its parent; what comes behind is its own."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def working(turn: Turn) -> str:
        turn.usage(model="m", input=10, output=1, cost_nanos=5)
        await turn.append(call("c1"))
        await turn.append(result("c1"))
        if turn.text == "rotate":
            await turn.rotate("summary")
            turn.usage(model="m", input=20, cost_nanos=7)
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = working
        await runtime.ask(KEY, "rotate")
        parent, child = await row(runtime, parent_id), await row(runtime, await current(runtime))
        assert (parent.message_count, child.message_count) == (9, 1)
        assert (parent.tool_call_count, child.tool_call_count) == (1, 0)
        assert (parent.cost_nanos, child.cost_nanos) == (5, 7)
        total = await runtime.sessions.usage()
        assert [(u.calls, u.tokens, u.cost_nanos) for u in total] == [
            (2, Tokens(input=30, output=1), 12)
        ]
    sound(path)


# B2 ------------------------------------------------------------------------------------------


async def _fails(_: tuple[Message, ...]) -> str:
    raise ValueError("the model is away")


def _says_nothing(_: tuple[Message, ...]) -> Any:
    return None


@pytest.mark.parametrize("summary", [LONG * 100, " ", _fails, _says_nothing])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_a_failed_rotation_leaves_the_old_session_usable(
    tmp_path: Path, summary: Any, how: str, *, inside: bool
) -> None:
    """B2: no gain, no text, a summary that raises; in a turn and on request."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    raised: list[Exception] = []

    async def attempting(turn: Turn) -> str:
        await turn.append("before")
        session_id = turn.session_id
        try:
            await getattr(turn, how)(summary)
        except Exception as error:
            raised.append(error)
        assert turn.session_id == session_id
        await turn.append("behind")
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        before = await stored(runtime)
        if inside:
            agent.next = attempting
            await runtime.ask(KEY, "go")
            assert (await texts(runtime))[-4:] == ["go", "before", "behind", "answer"]
        else:
            try:
                await getattr(runtime, how)(KEY, summary)
            except Exception as error:
                raised.append(error)
            await runtime.ask(KEY, "go")
            assert (await texts(runtime))[-2:] == ["go", "re: go"]
        assert len(raised) == 1
        assert (await stored(runtime))[:6] == before
        assert await current(runtime) == parent_id
        assert (await row(runtime, parent_id)).end_kind is None
        assert runtime.statistics().counters["crashes"] == 0
    sound(path)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_a_summary_that_is_neither_text_nor_a_function_is_refused(
    tmp_path: Path, how: str, *, inside: bool
) -> None:
    """B2: with a type, where it was given; nothing has changed."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    refused: list[str] = []

    async def attempt(compress: Any, *arguments: Any) -> None:
        with pytest.raises(InvalidContentError) as caught:
            await compress(*arguments, None)
        refused.append(caught.value.field)

    async def attempting(turn: Turn) -> str:
        await attempt(getattr(turn, how))
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        session_id = await _begin(runtime)
        if inside:
            agent.next = attempting
        else:
            await attempt(getattr(runtime, how), KEY)
        reply = await runtime.ask(KEY, "go")
        assert (reply.outcome.kind, reply.session_id) == ("answered", session_id)
        assert refused == ["summary"]
    sound(path)


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_a_summary_that_hangs_ends_at_the_deadline_of_a_turn(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    """B2, INV-15: with a type of its own; the old session is usable, and what waited goes on."""
    path, began = tmp_path / "chat.db", trio.Event()
    settings = Settings(sessions=SessionSettings(turn_deadline_s=60))

    async def hangs(_: tuple[Message, ...]) -> str:
        began.set()
        await trio.sleep_forever()

    async with inline(path, echo, settings) as runtime:
        session_id = await _begin(runtime)
        before = await texts(runtime)
        started = trio.current_time()

        async def attempt() -> None:
            with pytest.raises(SummaryTooSlowError) as caught, trio.fail_after(600):
                await getattr(runtime, how)(KEY, hangs)
            assert (caught.value.session_id, caught.value.limit_s) == (session_id, 60)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt)
            await began.wait()
            assert (await runtime.ask(KEY, "go")).session_id == session_id
        assert 60 <= trio.current_time() - started < 600
        assert await texts(runtime) == [*before, "go", "re: go"]
    sound(path)


async def test_an_interrupt_during_the_summary_leaves_the_old_session(tmp_path: Path) -> None:
    """B2: nothing was posted yet."""
    path, began = tmp_path / "chat.db", trio.Event()
    agent = Switchboard()

    async def slow(_: tuple[Message, ...]) -> str:
        began.set()
        await trio.sleep_forever()

    async def rotating(turn: Turn) -> str:
        await turn.append("before")
        await turn.rotate(slow)
        return "never"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = rotating
        submission = await runtime.submit(KEY, "go")
        await began.wait()
        assert await submission.interrupt()
        assert (await submission.reply()).session_id == parent_id
        await runtime.ask(KEY, "next")
        assert await current(runtime) == parent_id
        assert (await texts(runtime))[-4:] == ["go", "before", "next", "re: next"]
    sound(path)


async def test_an_interrupt_while_the_rotation_is_being_committed_can_not_tear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the id changes behind the commit, not before; the turn ends in the child."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    agent = Switchboard()
    turns: list[Turn] = []

    async def rotating(turn: Turn) -> str:
        turns.append(turn)
        await turn.append(call("c1"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn.rotate, "summary")
            await trio.testing.wait_all_tasks_blocked()
            await turn.append("held")
        return "never"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = rotating
        submission = await runtime.submit(KEY, "go")
        with commits.holding():
            await commits.wait_reached()
            await trio.testing.wait_all_tasks_blocked()
            assert turns[0].session_id == parent_id
            assert await current(runtime) == parent_id
            assert await submission.interrupt()
            await trio.testing.wait_all_tasks_blocked()
            assert turns[0].session_id == parent_id
        reply = await submission.reply()
        child_id = await current(runtime)
        assert reply.outcome.kind == "interrupted"
        assert reply.session_id == turns[0].session_id == child_id != parent_id
        messages = await stored(runtime)
        assert shape(messages)[:4] == ["system summary", "user go", "call c1", "result c1"]
        assert problems(messages) == []
        await runtime.ask(KEY, "next")
        assert (await texts(runtime))[-2:] == ["next", "re: next"]
    sound(path)


async def test_a_child_that_can_not_be_had_leaves_the_old_session(tmp_path: Path) -> None:
    """B2, B6: refused in the transaction itself, and nothing of it remains."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        other_id = await _begin(runtime, "test:other")
        parent_id = await _begin(runtime)
        agent.next = _returning(other_id)
        reply = await runtime.ask(KEY, "go")
        assert (reply.text, reply.session_id) == ("new", parent_id)
        assert "rotation_refused" in (reply.outcome.detail or {})
        assert (await texts(runtime))[-2:] == ["go", "new"]
        assert len(await texts(runtime)) == 8
        assert (await row(runtime, parent_id)).end_kind is None
        assert await current(runtime, "test:other") == other_id
        assert len(await texts(runtime, "test:other")) == 6
    sound(path)


# B3 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
async def test_after_a_restart_the_key_has_the_child_and_is_not_compressed_again(
    tmp_path: Path, *, inside: bool
) -> None:
    """B3: an agent that compresses long transcripts does it once."""
    path = tmp_path / "chat.db"
    rotations: list[str] = []

    async def agent(turn: Turn) -> str:
        size = sum(len(m.text or "") for m in turn.history)
        if inside and size > 3 * len(LONG):
            rotations.append(await turn.rotate("summary"))
        return await echo(turn)

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        if not inside:
            rotations.append(await runtime.rotate(KEY, "summary"))
        told = await texts(runtime)
    for number in range(3):
        async with open_runtime(path, agent=agent) as runtime:
            assert await current(runtime) == rotations[0]
            await runtime.ask(KEY, f"{number}")
            told += [f"{number}", f"re: {number}"]
            assert await texts(runtime) == told
    assert len(rotations) == 1
    assert told[0] == "summary"
    sound(path)


# B4, B5 --------------------------------------------------------------------------------------


async def test_ordinary_turns_write_no_route(tmp_path: Path) -> None:
    """B4: the first turn does, and one behind a boundary; also after a restart."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        assert runtime.statistics().route_writes == 0
        await runtime.ask(KEY, "first")
        assert runtime.statistics().route_writes == 1
        for number in range(20):
            await runtime.ask(KEY, f"{number}")
        await runtime.compact(KEY, "summary", force=True)
        await runtime.ask(KEY, "taken back")
        await runtime.rewind(KEY)
        await runtime.set_title(KEY, "Chat")
        await runtime.ask(KEY, "still the same")
        assert runtime.statistics().route_writes == 1
        await runtime.close_session(KEY)
        assert runtime.statistics().route_writes == 1
        await runtime.ask(KEY, "behind a boundary")
        await runtime.ask(KEY, "and on")
        assert runtime.statistics().route_writes == 2
        assert await texts(runtime) == [
            "behind a boundary",
            "re: behind a boundary",
            "and on",
            "re: and on",
        ]
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, "resumed")
        assert runtime.statistics().route_writes == 0
        assert len(await texts(runtime)) == 6
    sound(path)


async def _rotate_inside(runtime: Runtime, agent: Switchboard) -> None:
    async def rotating(turn: Turn) -> str:
        await turn.append("before")
        await turn.rotate("summary")
        return "answer"

    agent.next = rotating
    await runtime.ask(KEY, "rotate")


async def _rotate_first(runtime: Runtime, agent: Switchboard) -> None:
    async def rotating(turn: Turn) -> str:
        await turn.rotate("summary")
        return "answer"

    agent.next = rotating
    await runtime.ask(KEY, "rotate")


async def _rotate_by_result(runtime: Runtime, agent: Switchboard) -> None:
    agent.next = _returning("the-child")
    await runtime.ask(KEY, "rotate")


async def _rotate(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.rotate(KEY, "summary")


async def _reset(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.reset(KEY)


async def _switch_to_new(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.switch(KEY, "another")


async def _open_named(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.open_session(KEY, "another")


async def _branch(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.branch(KEY)


async def _resume(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.resume(KEY, "Old chat")


async def _take_over(runtime: Runtime, agent: Switchboard) -> None:
    await runtime.switch(KEY, await current(runtime, "test:other"), take_over=True)


MOVES = [
    _rotate_inside,
    _rotate_first,
    _rotate_by_result,
    _rotate,
    _reset,
    _switch_to_new,
    _open_named,
    _branch,
    _resume,
    _take_over,
]


@pytest.mark.parametrize("move", MOVES)
async def test_every_operation_that_moves_a_key_does_it_by_a_committed_route_write(
    tmp_path: Path, move: Any
) -> None:
    """B5: in memory, in the file and after a restart the key has the same other session."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, "an old chat")
        await runtime.set_title(KEY, "Old chat")
        await runtime.reset(KEY)
        await runtime.ask("test:other", "hello")
        before = await _begin(runtime)
        writes = runtime.statistics().route_writes
        await move(runtime, agent)
        after = await current(runtime)
        assert after != before
        assert runtime.statistics().route_writes == writes + (2 if move is _take_over else 1)
        assert query(path, "SELECT session_id FROM routes WHERE key = ?", KEY) == [(after,)]
        reply = await runtime.ask(KEY, "here")
        assert reply.session_id == after == await current(runtime)
        assert runtime.statistics().route_writes == writes + (2 if move is _take_over else 1)
        assert "here" not in await texts_of(runtime, before)
    sound(path)
    async with open_runtime(path, agent=agent) as runtime:
        assert await current(runtime) == after
        assert (await runtime.ask(KEY, "and here")).session_id == after
    sound(path)


async def test_operations_that_keep_the_session_write_no_route(tmp_path: Path) -> None:
    """B5: the other way round."""
    async with open_runtime(tmp_path / "chat.db", agent=echo) as runtime:
        session_id = await _begin(runtime)
        writes = runtime.statistics().route_writes
        assert await runtime.open_session(KEY) == session_id
        assert await runtime.open_session(KEY, session_id) == session_id
        assert await runtime.switch(KEY, session_id) == session_id
        assert await runtime.resume(KEY, session_id) == session_id
        await runtime.rewind(KEY)
        await runtime.restore(KEY)
        await runtime.close_session(KEY)
        await runtime.reopen(KEY)
        await runtime.close_session(KEY)
        assert await runtime.switch(KEY, session_id) == session_id
        await runtime.ask(KEY, "still here")
        assert await current(runtime) == session_id
        assert runtime.statistics().route_writes == writes


# B6 ------------------------------------------------------------------------------------------


def _returning(session_id: str, *, summary: bool = True) -> Any:
    """An agent that has compressed by itself, and says so with another session id."""

    async def agent(turn: Turn) -> dict[str, Any]:
        past = [{"role": "user", "content": "what was said, in short"}] if summary else []
        own = [{"role": "user", "content": turn.text}]
        new = [{"role": "assistant", "content": "new"}]
        return {"messages": [*past, *own, *new], "final_response": "new", "session_id": session_id}

    return agent


async def test_an_agent_may_rotate_by_returning_another_session_id(tmp_path: Path) -> None:
    """B6, B1: its rewritten past is what the child begins with."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        await runtime.set_title(KEY, "Chat")
        agent.next = _returning("the-child")
        reply = await runtime.ask(KEY, "go")
        assert (reply.text, reply.session_id) == ("new", "the-child")
        assert await current(runtime) == "the-child"
        parent, child = await row(runtime, parent_id), await row(runtime, "the-child")
        assert (parent.end_kind, parent.end_reason) == ("rotation", "compression")
        assert (child.parent_id, child.edge, child.title) == (parent_id, "rotation", "Chat #2")
        assert await texts(runtime) == ["what was said, in short", "go", "new"]
        assert [m.summary for m in await stored(runtime)] == [True, False, False]
        assert (await texts_of(runtime, parent_id))[-1] == "go"
        await runtime.ask(KEY, "next")
        assert [m.text for m in agent.seen[-1]] == ["what was said, in short", "go", "new"]
    sound(path)


async def test_messages_that_a_rewritten_past_keeps_are_carried_with_their_uids(
    tmp_path: Path,
) -> None:
    """B6, B1: an agent that echoes uids keeps the identity of what it did not summarise."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    kept: list[Message] = []

    async def compressing(turn: Turn) -> dict[str, Any]:
        kept.extend(turn.history[-2:])
        past = [{"role": "user", "content": "in short"}, *kept]
        messages = [*past, *turn.messages, {"role": "assistant", "content": "new"}]
        return {"messages": messages, "final_response": "new", "session_id": "the-child"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = compressing
        assert (await runtime.ask(KEY, "go")).session_id == "the-child"
        messages = await stored(runtime)
        assert [m.text for m in messages] == ["in short", *(m.text for m in kept), "go", "new"]
        assert [m.uid for m in messages[1:3]] == [m.uid for m in kept]
        assert [m.carried for m in messages] == [False, True, True, True, False]
    sound(path)


async def test_a_rewritten_past_that_tears_an_exchange_leaves_a_valid_transcript(
    tmp_path: Path,
) -> None:
    """B6, A10: the agent keeps a result whose call it has summarised."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def calling(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append(result("c1", LONG))
        return "called"

    async def compressing(turn: Turn) -> dict[str, Any]:
        past = [{"role": "user", "content": "in short"}, *turn.history[-2:]]
        messages = [*past, *turn.messages, {"role": "assistant", "content": "new"}]
        return {"messages": messages, "final_response": "new", "session_id": "the-child"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = calling
        await runtime.ask(KEY, "call")
        agent.next = compressing
        await runtime.ask(KEY, "go")
        assert problems(await stored(runtime)) == []
        assert (await texts(runtime))[-2:] == ["go", "new"]
    sound(path)


@pytest.mark.parametrize("whose", ["another key's", "its own", "its parent", "no valid id"])
async def test_an_id_that_is_not_to_be_had_is_refused_and_the_messages_stay(
    tmp_path: Path, whose: str
) -> None:
    """B6: the turn is stored in the old session, and its outcome says what was refused."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        first_id = await _begin(runtime)
        if whose == "its parent":
            await runtime.rotate(KEY, "summary")
            await runtime.ask(KEY, LONG)
        else:
            await runtime.reset(KEY)
            await _begin(runtime)
        session_id = await current(runtime)
        ids = {
            "another key's": await _begin(runtime, "test:other"),
            "its own": first_id,
            "its parent": first_id,
            "no valid id": "no valid id",
        }
        before = await stored(runtime)
        writes = runtime.statistics().route_writes
        agent.next = _returning(ids[whose])
        reply = await runtime.ask(KEY, "go")
        assert (reply.text, reply.session_id) == ("new", session_id)
        assert reply.outcome.kind == "answered"
        assert reply.outcome.detail is not None
        assert "session" in str(reply.outcome.detail["rotation_refused"])
        messages = await stored(runtime)
        assert (messages[:-2], [m.text for m in messages[-2:]]) == (before, ["go", "new"])
        assert await current(runtime) == session_id
        assert runtime.statistics().route_writes == writes
        await runtime.ask(KEY, "next")
        assert (await texts(runtime))[-2:] == ["next", "re: next"]
    sound(path)


async def test_another_session_id_without_a_report_is_not_passed_over(tmp_path: Path) -> None:
    """B6: either the key moves, or the outcome says that it was refused."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def returning(turn: Turn) -> dict[str, Any]:
        return {"final_response": "new", "session_id": "the-child"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = returning
        reply = await runtime.ask(KEY, "go")
        moved = await current(runtime) == "the-child"
        assert moved or "rotation_refused" in (reply.outcome.detail or {})
        assert (await texts(runtime))[-2:] == ["go", "new"]
    sound(path)


@pytest.mark.parametrize("how", ["say", "streaming", "nothing"])
async def test_another_session_id_counts_whatever_was_said_before_it(
    tmp_path: Path, how: str
) -> None:
    """B6: no messages and no text are returned; the turn goes along to the child."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def returning(turn: Turn) -> dict[str, Any]:
        if how == "say":
            await turn.say("interim")
        elif how == "streaming":
            async with turn.streaming() as out:
                await out.write("interim")
        return {"session_id": "the-child"}

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = returning
        reply = await runtime.ask(KEY, "go")
        assert reply.session_id == await current(runtime) == "the-child"
        assert (await row(runtime, parent_id)).end_reason == "compression"
        said = [] if how == "nothing" else ["interim"]
        assert await texts(runtime) == ["go", *said]
        assert how == "nothing" or reply.text == "interim"
    sound(path)


async def test_a_past_that_was_put_into_a_leading_system_message_is_carried(
    tmp_path: Path,
) -> None:
    """B6, A4: with a new session id it is what the agent has kept, and not only a prompt."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def compressing(turn: Turn) -> dict[str, Any]:
        past = {"role": "system", "content": "what was said, in short"}
        messages = [past, {"role": "user", "content": turn.text}]
        messages.append({"role": "assistant", "content": "new"})
        return {"messages": messages, "final_response": "new", "session_id": "the-child"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = compressing
        assert (await runtime.ask(KEY, "go")).session_id == "the-child"
        messages = await stored(runtime)
        assert shape(messages) == ["system what was said, in short", "user go", "assistant new"]
        assert [m.summary for m in messages] == [True, False, False]
    sound(path)


@pytest.mark.parametrize(
    ("returned", "error"), [("theirs", "RouteConflictError"), ("no id", "InvalidContentError")]
)
async def test_a_refused_rotation_by_result_names_its_error(
    tmp_path: Path, returned: str, error: str
) -> None:
    """B6: the type is in the outcome, where a program can tell one refusal from another."""
    agent = Switchboard()
    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.open_session("test:other", "theirs")
        await runtime.ask("test:other", "hello")
        session_id = await _begin(runtime)
        agent.next = _returning(returned)
        reply = await runtime.ask(KEY, "go")
        assert reply.session_id == session_id
        assert reply.outcome.detail is not None
        assert str(reply.outcome.detail["rotation_refused"]).startswith(f"{error}: ")


@pytest.mark.parametrize("returned", ["parent", "child"])
async def test_an_agent_that_rotated_may_return_either_id(tmp_path: Path, returned: str) -> None:
    """B6: the id it was called with, or that of its own child: neither is another rotation."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def rotating(turn: Turn) -> dict[str, Any]:
        ids = {"parent": turn.session_id, "child": await turn.rotate("summary")}
        messages = [*turn.messages, {"role": "assistant", "content": "new"}]
        return {"messages": messages, "final_response": "new", "session_id": ids[returned]}

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = rotating
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.detail is None
        assert len(await runtime.sessions.lineage(await current(runtime))) == 2
        assert await texts(runtime) == ["summary", "go", "new"]
    sound(path)


# B7 ------------------------------------------------------------------------------------------


async def test_a_parent_has_one_child_by_rotation_however_many_ask_at_once(tmp_path: Path) -> None:
    """B7: two tasks of one turn, and two callers from outside."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    outcomes: list[object] = []

    async def attempt(rotate: Any, *arguments: Any) -> None:
        try:
            outcomes.append(await rotate(*arguments))
        except OnepenError as error:
            outcomes.append(error)

    async def rotating(turn: Turn) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, turn.rotate, "one")
            nursery.start_soon(attempt, turn.rotate, "two")
        await turn.append("behind")
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = rotating
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        assert sum(isinstance(one, str) for one in outcomes) == 1
        assert (await texts(runtime))[1:] == ["go", "behind", "answer"]
        await runtime.ask(KEY, LONG)
        outcomes.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, runtime.rotate, KEY, "three")
            nursery.start_soon(attempt, runtime.rotate, KEY, "four")
        lineage = await runtime.sessions.lineage(parent_id)
        assert [s.parent_id for s in lineage] == [None, *(s.id for s in lineage[:-1])]
        assert lineage[-1].id == await current(runtime)
    children = "SELECT count(*) FROM sessions WHERE edge = 'rotation' GROUP BY parent"
    assert set(query(path, children)) == {(1,)}
    sound(path)


async def test_a_child_of_a_parent_that_is_not_stored_is_refused(tmp_path: Path) -> None:
    """B7: by the engine itself, on the file that a runtime wrote."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        parent_id = SessionId(await _begin(runtime))
    engine = open_sqlite(path, SystemClock())
    try:
        key, nobody = SessionKey(KEY), SessionId("nobody")
        with engine.reading() as reader:
            route = reader.route(key)
        assert route is not None
        orphan = CreateSession(session_id=SessionId("x"), key=key, at_ms=1, parent_id=nobody)
        rotate = Rotate(
            key=key,
            parent_id=nobody,
            parent_base_seq=Seq(0),
            child_id=SessionId("y"),
            summary=(),
            carried=(),
            replaces=route.route_version,
            at_ms=1,
            turn_id=None,
            force=True,
        )
        guard = Guard(key=key, incarnation=Incarnation(route.incarnation), session_id=nobody)
        receipts = engine.stage((Unit((orphan,)), Unit((rotate,), (guard,))))
        engine.commit()
        assert all(isinstance(receipt, Refused) for receipt in receipts)
        with engine.reading() as reader:
            assert reader.session(SessionId("x")) is None
            assert reader.session(SessionId("y")) is None
            assert reader.route(key) == route
            assert route.session_id == parent_id
    finally:
        engine.close()
    sound(path)


# B8 ------------------------------------------------------------------------------------------


async def test_what_a_child_task_appends_after_the_rotation_goes_to_the_child(
    tmp_path: Path,
) -> None:
    """B8: a task that was started before it and knows nothing of it; its context follows."""
    path, rotated = tmp_path / "chat.db", trio.Event()
    agent = Switchboard()

    async def late(turn: Turn) -> None:
        await turn.append("early")
        await rotated.wait()
        await turn.append("late")
        bound = current_session()
        assert bound is not None
        assert bound.session_id == turn.session_id

    async def rotating(turn: Turn) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late, turn)
            await trio.testing.wait_all_tasks_blocked()
            await turn.rotate("summary")
            rotated.set()
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = rotating
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        assert await texts(runtime) == ["summary", "go", "early", "late", "answer"]
        assert (await texts_of(runtime, parent_id))[6:] == ["go", "early"]
        assert (await row(runtime, parent_id)).next_seq == 8
    sound(path)


async def test_a_task_that_outlives_its_turn_can_not_write_to_the_parent(tmp_path: Path) -> None:
    """B8: it is refused, and the parent stays as the rotation left it."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    turns: list[Turn] = []

    async def remembering(turn: Turn) -> str:
        turns.append(turn)
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        agent.next = remembering
        await runtime.ask(KEY, "go")
        parent_id = await current(runtime)
        before = await stored(runtime)
        await runtime.rotate(KEY, "summary")
        with pytest.raises(InvalidContentError, match="over"):
            await turns[0].append("late")
        await runtime.ask(KEY, "next")
        assert await runtime.sessions.transcript(parent_id) == before
        assert await texts(runtime) == ["summary", "next", "re: next"]
    sound(path)


# B9 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_what_is_appended_while_the_summary_is_written_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """B9, B10: before it is posted, and while its commit is under way."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    began, go_on = trio.Event(), trio.Event()
    agent = Switchboard()

    async def slow(history: tuple[Message, ...]) -> str:
        assert len(history) == 6
        began.set()
        await go_on.wait()
        return "summary"

    async def rotating(turn: Turn) -> str:
        await turn.append("one")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(getattr(turn, how), slow)
            await began.wait()
            await turn.append(call("c1"))
            await turn.append(result("c1"), "two")
            while len(await stored(runtime)) < 11:
                await trio.lowlevel.checkpoint()
            with commits.holding():
                go_on.set()
                await commits.wait_reached()
                await turn.append("three")
                await turn.append(call("c2"))
                await turn.say("four")
                await turn.append(result("c2"))
        await turn.append("five")
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        parent_id = await _begin(runtime)
        agent.next = rotating
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        messages = await stored(runtime)
        assert shape(messages) == [
            "system summary",
            "user go",
            "assistant one",
            "call c1",
            "result c1",
            "assistant two",
            "assistant three",
            "call c2",
            "result c2",
            "assistant four",
            "assistant five",
            "assistant answer",
        ]
        assert (await current(runtime) == parent_id) == (how == "compact")
        assert [m.uid for m in reply.messages] == [m.uid for m in messages[1:]]
    async with open_runtime(path, agent=agent) as runtime:
        assert await stored(runtime) == messages
    sound(path)


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_messages_that_arrive_during_a_requested_rotation_are_answered_behind_it(
    tmp_path: Path, how: str
) -> None:
    """B9: they wait, durably, and stand in the child in the order in which they came."""
    path, began, go_on = tmp_path / "chat.db", trio.Event(), trio.Event()
    agent = Switchboard()

    async def slow(_: tuple[Message, ...]) -> str:
        began.set()
        await go_on.wait()
        return "summary"

    async with open_runtime(path, agent=agent) as runtime:
        await _begin(runtime)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(getattr(runtime, how), KEY, slow)
            await began.wait()
            waiting = [await runtime.submit(KEY, f"{n}") for n in range(3)]
            assert [s.disposition for s in waiting] == ["queued"] * 3
            go_on.set()
        replies = [await submission.reply() for submission in waiting]
        told = ["summary", "0", "re: 0", "1", "re: 1", "2", "re: 2"]
        assert await texts(runtime) == told
        assert {reply.session_id for reply in replies} == {await current(runtime)}
    sound(path)


# B10 -----------------------------------------------------------------------------------------


async def test_compaction_in_place_keeps_the_session_and_puts_the_summary_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: one transaction; seqs stay; the summary stands before what it does not cover."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    agent = Switchboard()
    seen: list[tuple[Any, ...]] = []
    facts = (
        "SELECT count(*) FILTER (WHERE state = 1), count(*) FILTER (WHERE kind = 1) FROM messages"
    )
    async with open_runtime(path, agent=agent) as runtime:
        session_id = await _begin(runtime)
        before = await stored(runtime)
        commits.after = lambda: seen.extend(query(path, facts))
        assert await runtime.compact(KEY, "summary", upto=before[3].uid) == session_id
        commits.after = None
        messages = await stored(runtime)
        assert [m.text for m in messages] == ["summary", before[4].text, before[5].text]
        assert [m.seq for m in messages] == [6, 4, 5]
        assert (messages[0].summary, messages[0].covers) == (True, (0, 3))
        whole = await stored(runtime, include_inactive=True)
        assert [m.state for m in whole if not m.summary] == ["summarised"] * 4 + ["active"] * 2
        assert {m.summarised_by for m in whole[:4]} == {6}
        found = await row(runtime, session_id)
        assert (found.end_kind, found.compaction_count, found.message_count) == (None, 1, 6)
        await runtime.ask(KEY, "next")
        assert [m.text for m in agent.seen[-1]] == [m.text for m in messages]
        told = await texts(runtime)
        assert told[-2:] == ["next", "re: next"]
    assert set(seen) <= {(0, 0), (4, 1)}
    assert (4, 1) in seen
    async with open_runtime(path, agent=agent) as runtime:
        assert await texts(runtime) == told
        # A summary may be summarised itself.
        await runtime.ask(KEY, "and on")
        await runtime.compact(KEY, "both")
        assert await texts(runtime) == ["both"]
    sound(path)


@pytest.mark.parametrize("index", range(4))
async def test_a_rewind_into_a_summarys_range_brings_back_what_stood_before_that_point(
    tmp_path: Path, index: int
) -> None:
    """B10: the summary is rewound with it; restoring puts it back."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        await _begin(runtime)
        before = await stored(runtime)
        await runtime.compact(KEY, "summary", upto=before[3].uid)
        compacted = await stored(runtime)
        await runtime.rewind(KEY, to=before[index].uid)
        assert [m.uid for m in await stored(runtime)] == [m.uid for m in before[:index]]
        assert {m.state for m in await stored(runtime)} <= {"active"}
        await runtime.restore(KEY)
        assert await stored(runtime) == compacted
        await runtime.rewind(KEY, to=before[index].uid)
        await runtime.ask(KEY, "next")
        told = [*(m.text for m in before[:index]), "next", "re: next"]
        assert await texts(runtime) == told
    async with open_runtime(path, agent=echo) as runtime:
        assert await texts(runtime) == told
    sound(path)


@pytest.mark.parametrize("last", range(1, 7))
async def test_a_rewind_to_the_summary_itself_leaves_a_valid_transcript(
    tmp_path: Path, last: int
) -> None:
    """B10, A10: what comes back of its range may end inside a tool exchange."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def calling(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append(result("c1", LONG))
        await turn.append(call("c2", "c3"))
        await turn.append(result("c2", LONG), result("c3", LONG))
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        agent.next = calling
        await runtime.ask(KEY, "go")
        before = await stored(runtime)
        await runtime.compact(KEY, "summary", upto=before[1 + last].uid)
        summary = (await stored(runtime))[0]
        assert summary.text == "summary"
        await runtime.rewind(KEY, to=summary.uid)
        messages = await stored(runtime)
        assert summary.uid not in {m.uid for m in messages}
        assert problems(messages) == []
        reply = await runtime.ask(KEY, "next")
        assert reply.outcome.kind == "answered"
        assert agent.seen[-1] == messages
        assert (await texts(runtime))[len(messages) :] == ["next", "re: next"]
    sound(path)


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_a_suspended_session_can_be_compressed(tmp_path: Path, how: str) -> None:
    """B10, B13: after a restart every session is suspended, and nobody has to write first."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        await _begin(runtime)
    async with open_runtime(path, agent=echo) as runtime:
        await getattr(runtime, how)(KEY, "summary")
        await runtime.ask(KEY, "next")
        assert await texts(runtime) == ["summary", "next", "re: next"]
    sound(path)


# B11 -----------------------------------------------------------------------------------------


class Summaries:
    """Writes summaries, and counts how often it was asked to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls = 0

    def __call__(self, _: tuple[Message, ...]) -> str:
        self.calls += 1
        return self.text


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_useless_compression_stops_by_itself_and_a_person_may_force_it(
    tmp_path: Path, how: str
) -> None:
    """B11: the counter is durable, the summary is not even written, and a success resets it."""
    path, useless = tmp_path / "chat.db", Summaries(LONG * 100)
    settings = Settings(sessions=SessionSettings(useless_compressions_max=2))
    async with open_runtime(path, agent=echo, settings=settings) as runtime:
        session_id = await _begin(runtime)
        for expected in (1, 2, 2, 2):
            with pytest.raises(NoGainError) as caught:
                await getattr(runtime, how)(KEY, useless)
            assert caught.value.session_id == session_id
            assert useless.calls == expected
        await runtime.ask(KEY, "still usable")
    async with open_runtime(path, agent=echo, settings=settings) as runtime:
        with pytest.raises(NoGainError):
            await getattr(runtime, how)(KEY, useless)
        assert useless.calls == 2
        await runtime.ask(KEY, "and on")
        forced = Summaries("short")
        assert await getattr(runtime, how)(KEY, forced, force=True) == await current(runtime)
        assert (forced.calls, await texts(runtime)) == (1, ["short"])
        await runtime.ask(KEY, "more")
        with pytest.raises(NoGainError):
            await getattr(runtime, how)(KEY, useless)
        assert useless.calls == 3
    async with open_runtime(path, agent=echo, settings=settings) as runtime:
        await runtime.ask(KEY, "and on")
        with pytest.raises(NoGainError):
            await getattr(runtime, how)(KEY, useless)
        assert useless.calls == 4
    sound(path)


async def test_an_agent_that_compresses_uselessly_in_every_turn_is_stopped(tmp_path: Path) -> None:
    """B11: the same brake inside turns; the turns themselves go on."""
    path, useless = tmp_path / "chat.db", Summaries(LONG * 100)
    agent = Switchboard()

    async def compressing(turn: Turn) -> str:
        with pytest.raises(NoGainError):
            await turn.rotate(useless)
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        session_id = await _begin(runtime)
        for number in range(6):
            agent.next = compressing
            reply = await runtime.ask(KEY, f"{number}")
            assert (reply.text, reply.session_id) == ("answer", session_id)
        assert useless.calls == SessionSettings().useless_compressions_max
        # A gain by somebody's force lets the brake go, and the next one is ordinary again.
        await runtime.rotate(KEY, "short", force=True)
        await runtime.ask(KEY, LONG)
        await runtime.rotate(KEY, "shorter")
        assert await texts(runtime) == ["shorter"]
    sound(path)


async def test_the_running_turn_is_no_gain(tmp_path: Path) -> None:
    """B11: a summary longer than the history is refused, however long the turn itself is."""
    agent = Switchboard()
    raised: list[NoGainError] = []

    async def compressing(turn: Turn) -> str:
        await turn.append(LONG * 10)
        try:
            await turn.rotate("a summary that is longer than what was said before")
        except NoGainError as error:
            raised.append(error)
        await turn.rotate("ok")
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.ask(KEY, "hi")
        agent.next = compressing
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        assert len(raised) == 1
        assert await texts(runtime) == ["ok", "go", LONG * 10, "answer"]


async def test_with_nothing_to_summarise_there_is_no_gain(tmp_path: Path) -> None:
    """B11: not even forced; and a session without a row says so."""
    agent = Switchboard()

    async def compressing(turn: Turn) -> str:
        with pytest.raises(NoGainError):
            await turn.rotate("summary", force=True)
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        with pytest.raises(MissingError):
            await runtime.rotate(KEY, "summary")
        agent.next = compressing
        assert (await runtime.ask(KEY, "first")).text == "answer"


# B12 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
async def test_a_pending_title_survives_a_rotation(tmp_path: Path, *, inside: bool) -> None:
    """B12: it waits with the key, and the child gets it behind the next turn."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    pending: list[str | None] = []

    async def rotating(turn: Turn) -> str:
        await turn.rotate("summary")
        pending.append(await runtime.sessions.pending_title(KEY))
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        session_id = await _begin(runtime)
        await runtime.switch(KEY, "without-a-row")
        await runtime.set_title(KEY, "Chat")
        await runtime.switch(KEY, session_id)
        if not inside:
            await runtime.rotate(KEY, "summary")
            pending.append(await runtime.sessions.pending_title(KEY))
        else:
            agent.next = rotating
        await runtime.ask(KEY, "go")
        assert pending == ["Chat"]
    async with open_runtime(path, agent=agent) as runtime:
        assert await runtime.sessions.pending_title(KEY) is None
        child = await row(runtime, await current(runtime))
        assert (child.parent_id, child.title) == (session_id, "Chat")
    sound(path)


# B13 -----------------------------------------------------------------------------------------


async def test_a_message_to_a_suspended_session_reopens_it_in_its_own_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: no commit shows it open without the message, or the message in an ended session."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    facts = "SELECT end_kind, (SELECT count(*) FROM messages) FROM sessions"
    seen: list[tuple[Any, ...]] = []
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, "before")
        session_id = await current(runtime)
    async with open_runtime(path, agent=echo) as runtime:
        suspended = await row(runtime, session_id)
        assert (suspended.end_kind, suspended.end_reason) == ("suspension", "shutdown")
        commits.after = lambda: seen.extend(query(path, facts))
        assert (await runtime.ask(KEY, "after")).session_id == session_id
        commits.after = None
        assert (await row(runtime, session_id)).end_kind is None
        assert await texts(runtime) == ["before", "re: before", "after", "re: after"]
    assert set(seen) == {("suspension", 2), (None, 3), (None, 4)}
    sound(path)


@pytest.mark.parametrize("how", ["closed", "reset", "closed by us"])
async def test_a_message_behind_a_boundary_starts_a_new_session(tmp_path: Path, how: str) -> None:
    """B13: the reason is free text, the kind is what counts; also after a restart."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, "before")
        first_id = await current(runtime)
        if how == "reset":
            await runtime.reset(KEY)
        else:
            await runtime.close_session(KEY, reason=how)
        ended = await row(runtime, first_id)
        assert (ended.end_kind, ended.end_reason) == ("boundary", how)
        with pytest.raises((SessionEndedError, MissingError)):
            await runtime.rotate(KEY, "summary")
    async with open_runtime(path, agent=echo) as runtime:
        reply = await runtime.ask(KEY, "after")
        assert reply.session_id != first_id
        assert await texts(runtime) == ["after", "re: after"]
        assert await texts_of(runtime, first_id) == ["before", "re: before"]
        assert (await row(runtime, first_id)).end_reason == how
    sound(path)


async def test_a_crash_ends_no_session(tmp_path: Path) -> None:
    """B13: the row is open, and the next message goes on in it."""
    path = tmp_path / "chat.db"
    code, _ = await in_another_process(str(path), "agent", "at once")
    assert code == -signal.SIGKILL
    assert query(path, "SELECT end_kind FROM sessions") == [(None,)]
    async with open_runtime(path, agent=echo) as runtime:
        session_id = await current(runtime)
        assert (await row(runtime, session_id)).end_kind is None
        assert (await runtime.ask(KEY, "go on")).session_id == session_id


async def test_eviction_is_no_close(tmp_path: Path) -> None:
    """B13: no end, no hooks, only the agent's `close()`; the next message finds everything."""
    path = tmp_path / "chat.db"
    closed: list[str] = []
    ended: list[str] = []

    class Agent:
        def __init__(self, key: str) -> None:
            self.key = key

        async def run(self, turn: Turn) -> str:
            return f"{len(turn.history)}"

        def close(self) -> None:
            closed.append(self.key)

    class Hooks:
        def on_session_end(self, *, session_id: str, **_: Any) -> None:
            ended.append(session_id)

        def on_session_finalize(self, *, session_id: str, **_: Any) -> None:
            ended.append(session_id)

    settings = Settings(sessions=SessionSettings(live_actors_max=1, turns_running_max=1))
    async with open_runtime(
        path, factory=lambda info: Agent(info.key), settings=settings, hooks=Hooks()
    ) as runtime:
        await runtime.ask(KEY, "before")
        session_id = await current(runtime)
        await trio.testing.wait_all_tasks_blocked()
        await runtime.ask("test:other", "makes room for itself")
        assert runtime.statistics().counters["evicted"] == 1
        assert (closed, ended) == ([KEY], [])
        assert (await row(runtime, session_id)).end_kind is None
        await trio.testing.wait_all_tasks_blocked()
        reply = await runtime.ask(KEY, "after")
        assert (reply.text, reply.session_id) == ("2", session_id)
        assert ended == []
        assert runtime.statistics().counters["evicted"] == 2
    sound(path)


@pytest.mark.parametrize("through", ["switch", "open_session"])
async def test_going_back_to_a_parent_that_was_rotated_away_names_the_tip(
    tmp_path: Path, through: str
) -> None:
    """B13: the key stays where it is; `resume` goes to the tip by itself."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        parent_id = await _begin(runtime)
        await runtime.rotate(KEY, "one")
        await runtime.ask(KEY, LONG)
        tip_id = await runtime.rotate(KEY, "two")
        writes = runtime.statistics().route_writes
        for current_id in (tip_id, "elsewhere"):
            with pytest.raises(RouteConflictError, match=tip_id) as caught:
                await getattr(runtime, through)(KEY, parent_id)
            assert caught.value.holder == tip_id
            assert not isinstance(caught.value, SessionHeldError)
            assert await current(runtime) == current_id
            assert (await row(runtime, parent_id)).end_kind == "rotation"
            await runtime.switch(KEY, "elsewhere")
        assert runtime.statistics().route_writes == writes + 1
        assert await runtime.resume(KEY, parent_id) == tip_id
        await runtime.ask(KEY, "next")
        assert await texts(runtime) == ["two", "next", "re: next"]
    sound(path)
