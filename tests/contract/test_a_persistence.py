"""Contract A: every message is stored exactly once, in order, whatever happens around it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import apsw
import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    Draft,
    Inbound,
    InvalidContentError,
    Outcome,
    Runtime,
    Settings,
    Turn,
    WriterSettings,
    open_runtime,
)
from onepen.runtime.reading import Sessions
from onepen.storage.errors import BatchUnknownError

from .agents import (
    KEY,
    LONG,
    Commits,
    Switchboard,
    Trouble,
    call,
    current,
    echo,
    in_another_process,
    plain,
    problems,
    query,
    result,
    shape,
    sound,
    stored,
    texts,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from onepen import Message

QUICK = Settings(writer=WriterSettings(backoff_first_s=0.001, backoff_max_s=0.01))


# A1 ------------------------------------------------------------------------------------------


async def test_the_agent_finds_its_user_message_in_storage(tmp_path: Path) -> None:
    """A1: another connection sees the row before the agent has done anything."""
    path = tmp_path / "chat.db"
    found: list[list[tuple[Any, ...]]] = []

    async def agent(turn: Turn) -> str:
        found.append(query(path, "SELECT role, text FROM messages ORDER BY n"))
        assert await texts_of(runtime, turn.session_id) == [m.text for m in turn.messages]
        return "yes"

    async with open_runtime(path, agent=agent) as runtime:
        assert (await runtime.ask(KEY, "hello")).text == "yes"
    assert found == [[("user", "hello")]]


async def test_the_agent_is_not_called_while_the_commit_of_its_user_message_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: durable before, not soon after."""
    commits, called = Commits(monkeypatch), trio.Event()

    async def agent(turn: Turn) -> str:
        called.set()
        return await echo(turn)

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.open_session(KEY)  # so that the next commit is that of the message
        async with trio.open_nursery() as nursery:
            with commits.holding():
                nursery.start_soon(runtime.ask, KEY, "hello")
                await commits.wait_reached()
                await trio.testing.wait_all_tasks_blocked()
                assert not called.is_set()
            await called.wait()


async def test_a_process_killed_by_its_agent_keeps_the_user_message(tmp_path: Path) -> None:
    """A1, A8: the agent's first step may be its last."""
    path = tmp_path / "chat.db"
    code, said = await in_another_process(str(path), "agent", "at once")
    assert (code, said) == (-signal.SIGKILL, ["re: hello"])
    async with open_runtime(path, agent=echo) as runtime:
        assert await texts(runtime) == ["hello", "re: hello", "kill"]
    sound(path)


# A2 ------------------------------------------------------------------------------------------


async def test_everything_that_a_turn_appends_is_stored_once_and_in_order(tmp_path: Path) -> None:
    """A2: calls, results, system and interim messages, and the answer."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str:
        await turn.append({"role": "system", "content": "be brief"}, "thinking")
        await turn.append(call("c1", "c2"))
        await turn.append(result("c1"))
        await turn.append(result("c2", "more"))
        await turn.say("nearly")
        async with turn.streaming() as out:
            await out.write("str")
            await out.write("eam")
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        messages = await stored(runtime)
        assert shape(messages) == [
            "user go",
            "system be brief",
            "assistant thinking",
            "call c1 c2",
            "result c1",
            "result c2",
            "assistant nearly",
            "assistant stream",
            "assistant done",
        ]
        assert [m.seq for m in messages] == list(range(9))
        assert {m.turn_id for m in messages} == {reply.turn_id}
        assert [m.uid for m in reply.messages] == [m.uid for m in messages]
    sound(path)


async def test_an_agent_that_reports_its_turn_at_the_end_stores_the_same(tmp_path: Path) -> None:
    """A2: nothing was appended on the way."""

    async def agent(turn: Turn) -> dict[str, Any]:
        new = [call("c1"), result("c1"), {"role": "assistant", "content": "done"}]
        return {"messages": [*plain(turn.messages), *new], "final_response": "done"}

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        assert (await runtime.ask(KEY, "go")).text == "done"
        messages = await stored(runtime)
        assert shape(messages) == ["user go", "call c1", "result c1", "assistant done"]


async def test_a_streamed_answer_that_is_returned_too_is_one_message(tmp_path: Path) -> None:
    """A2: what was streamed is the answer, not another one before it."""

    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            await out.write("the answer")
        return out.text

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        assert (await runtime.ask(KEY, "go")).text == "the answer"
        assert await texts(runtime) == ["go", "the answer"]


async def test_many_turns_of_many_keys_are_each_stored_once_and_in_order(tmp_path: Path) -> None:
    """A2: keys don't disturb each other."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append(result("c1", turn.text))
        return f"re: {turn.text}"

    async def talk(runtime: Runtime, key: str) -> None:
        for number in range(10):
            await runtime.ask(key, f"{number}")

    async with open_runtime(path, agent=agent) as runtime:
        async with trio.open_nursery() as nursery:
            for key in range(10):
                nursery.start_soon(talk, runtime, f"test:{key}")
        for key in range(10):
            expected = [t for n in range(10) for t in (f"{n}", None, f"{n}", f"re: {n}")]
            assert await texts(runtime, f"test:{key}") == expected
    sound(path)


# A3 ------------------------------------------------------------------------------------------


async def test_the_same_drafts_handed_over_again_are_not_stored_again(tmp_path: Path) -> None:
    """A3: in the same turn, mixed with new ones, and in a later turn."""
    path = tmp_path / "chat.db"
    kept: list[Draft] = []

    async def first(turn: Turn) -> str:
        kept.extend(await turn.append("one", "two"))
        assert await turn.append(*kept) == tuple(kept)
        await turn.append(kept[0], "three", kept[1])
        return "answer"

    async def second(turn: Turn) -> str:
        await turn.append(*kept, *turn.history)
        return "nothing new"

    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        agent.next = first
        await runtime.ask(KEY, "go")
        assert await texts(runtime) == ["go", "one", "two", "three", "answer"]
        agent.next = second
        await runtime.ask(KEY, "again")
        assert (await texts(runtime))[5:] == ["again", "nothing new"]
    async with open_runtime(path, agent=agent) as runtime:
        agent.next = second
        await runtime.ask(KEY, "after a restart")
        assert (await texts(runtime))[7:] == ["after a restart", "nothing new"]
    sound(path)


async def test_a_draft_given_twice_in_one_call_is_stored_once(tmp_path: Path) -> None:
    """A3: the uid is looked at within a call, too."""
    path = tmp_path / "chat.db"
    draft = Draft(uid=_uid(1), role="assistant", text="once")

    async def agent(turn: Turn) -> str:
        await turn.append(draft, draft)
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered"
        assert await texts(runtime) == ["go", "once", "answer"]
    sound(path)


@pytest.mark.parametrize("how", ["rotated", "compacted", "rewound"])
async def test_a_draft_that_left_the_transcript_is_not_stored_again(
    tmp_path: Path, how: str
) -> None:
    """A3: it is stored, though no longer among the active messages; the rest of the turn stands."""
    path = tmp_path / "chat.db"
    kept: list[Draft] = []
    agent = Switchboard()

    async def first(turn: Turn) -> str:
        kept.extend(await turn.append("one " + LONG, "two"))
        return "answer"

    async def second(turn: Turn) -> str:
        await turn.append(*kept, "new")
        return "second answer"

    async with open_runtime(path, agent=agent) as runtime:
        agent.next = first
        await runtime.ask(KEY, "go")
        match how:
            case "rotated":
                await runtime.rotate(KEY, "summary")
            case "compacted":
                await runtime.compact(KEY, "summary")
            case _:
                await runtime.rewind(KEY)
        agent.next = second
        reply = await runtime.ask(KEY, "again")
        assert reply.outcome.kind == "answered", reply.outcome
        assert (await texts(runtime))[-3:] == ["again", "new", "second answer"]
    uids = query(path, "SELECT count(*) FROM messages WHERE text LIKE 'one %' AND carried = 0")
    assert uids == [(1,)]
    sound(path)


async def test_two_messages_with_equal_text_are_both_stored(tmp_path: Path) -> None:
    """A3: identity is never equal text, nor the same object."""
    same: dict[str, Any] = {"role": "assistant", "content": "ok"}

    async def agent(turn: Turn) -> str:
        one, two = await turn.append("ok", "ok")
        assert one.uid != two.uid
        await turn.append(same)
        await turn.append(same)
        await turn.say("ok")
        return "ok"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.ask(KEY, "ok")
        await runtime.ask(KEY, "ok")
        assert await texts(runtime) == ["ok"] * 14
        assert len({m.uid for m in await stored(runtime)}) == 14


async def test_a_draft_handed_over_twice_while_a_rotation_is_under_way_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: what is held back until the rotation is durable counts as stored."""
    path, commits = tmp_path / "chat.db", Commits(monkeypatch)
    agent = Switchboard()

    async def rotating(turn: Turn) -> str:
        async with trio.open_nursery() as nursery:
            with commits.holding():
                nursery.start_soon(turn.rotate, "summary")
                await commits.wait_reached()
                drafts = await turn.append("held")
                await turn.append(*drafts)
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        agent.next = rotating
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        assert await texts(runtime) == ["summary", "go", "held", "answer"]
    sound(path)


async def test_other_content_under_a_stored_uid_is_a_conflict(tmp_path: Path) -> None:
    """A3: of this turn and of an earlier one; what is stored stands, and the turn goes on."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str:
        (draft,) = await turn.append("one")
        for message in (draft, *turn.history[:1]):
            with pytest.raises(ConflictError):
                await turn.append({"uid": message.uid, "role": message.role, "content": "other"})
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        for text in ("go", "again"):
            reply = await runtime.ask(KEY, text)
            assert reply.outcome.kind == "answered", reply.outcome
        assert await texts(runtime) == ["go", "one", "answer", "again", "one", "answer"]
    sound(path)


async def test_a_message_of_another_conversation_is_a_conflict(tmp_path: Path) -> None:
    """A3: its uid is stored, but not here; nothing of the call is."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        theirs = (await runtime.ask("test:other", "hello")).messages[-1]

        async def appending(turn: Turn) -> str:
            with pytest.raises(ConflictError):
                await turn.append("mine", theirs)
            return "answer"

        agent.next = appending
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        assert await texts(runtime) == ["go", "answer"]
        assert await texts(runtime, "test:other") == ["hello", "re: hello"]
    sound(path)


@pytest.mark.parametrize("how", ["twice in one call", "rotated", "compacted", "rewound"])
async def test_other_content_under_a_uid_is_a_conflict_wherever_the_message_is(
    tmp_path: Path, how: str
) -> None:
    """A3: in the same call, and when the message has left the transcript."""
    path, agent = tmp_path / "chat.db", Switchboard()
    one = Draft(uid=_uid(1), role="assistant", text="one " + LONG)
    other = Draft(uid=_uid(1), role="assistant", text="other")

    async def first(turn: Turn) -> str:
        await turn.append(one)
        return "answer"

    async def second(turn: Turn) -> str:
        with pytest.raises(ConflictError):
            await turn.append(*((one, other) if how == "twice in one call" else (other,)))
        return "second answer"

    async with open_runtime(path, agent=agent) as runtime:
        if how != "twice in one call":
            agent.next = first
            await runtime.ask(KEY, "go")
        match how:
            case "rotated":
                await runtime.rotate(KEY, "summary")
            case "compacted":
                await runtime.compact(KEY, "summary")
            case "rewound":
                await runtime.rewind(KEY)
            case _:
                pass
        agent.next = second
        assert (await runtime.ask(KEY, "again")).text == "second answer"
    assert query(path, "SELECT count(*) FROM messages WHERE text = 'other'") == [(0,)]
    sound(path)


# A4 ------------------------------------------------------------------------------------------


def _uid(number: int) -> Any:
    return f"{number:032x}"


NEW: dict[str, Any] = {"role": "assistant", "content": "new"}


async def _begun(runtime: Runtime) -> None:
    for number in range(3):
        await runtime.ask(KEY, f"{number}")


BEGUN = ["0", "re: 0", "1", "re: 1", "2", "re: 2"]


def _new(turn: Turn) -> dict[str, Any]:
    return {"role": "assistant", "content": f"new {turn.text}"}


def _with_uids(turn: Turn) -> list[Any]:
    return [*turn.history, *turn.messages, _new(turn)]


def _uids_in_mappings(turn: Turn) -> list[Any]:
    old = [*turn.history, *turn.messages]
    return [{"role": m.role, "content": m.text, "uid": m.uid} for m in old] + [_new(turn)]


def _without_uids(turn: Turn) -> list[Any]:
    return [*plain(turn.history), *plain(turn.messages), _new(turn)]


def _uids_of_the_history_alone(turn: Turn) -> list[Any]:
    return [*turn.history, *plain(turn.messages), _new(turn)]


def _with_a_system_prompt(turn: Turn) -> list[Any]:
    return [{"role": "system", "content": "you are kind"}, *_without_uids(turn)]


def _uids_with_a_system_prompt(turn: Turn) -> list[Any]:
    return [{"role": "system", "content": "you are kind"}, *_with_uids(turn)]


def _the_end_of_the_history(turn: Turn) -> list[Any]:
    return [*plain(turn.history[-3:]), *plain(turn.messages), _new(turn)]


def _this_turn_alone(turn: Turn) -> list[Any]:
    return [*plain(turn.messages), _new(turn)]


def _new_alone(turn: Turn) -> list[Any]:
    return [_new(turn)]


REPORTS = [
    _with_uids,
    _uids_in_mappings,
    _without_uids,
    _uids_of_the_history_alone,
    _with_a_system_prompt,
    _uids_with_a_system_prompt,
    _the_end_of_the_history,
    _this_turn_alone,
    _new_alone,
]


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("appends", [False, True])
async def test_a_report_adds_only_what_is_new(
    tmp_path: Path, report: Any, *, appends: bool
) -> None:
    """A4: also behind what the turn has appended already; and a second turn the same."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        if appends:
            await turn.append(call("c1"), result("c1"))
        return {"messages": report(turn), "final_response": f"new {turn.text}"}

    tools = [None, "found"] if appends else []
    async with open_runtime(path, agent=agent) as runtime:
        await _begun(runtime)
        for number in range(2):
            agent.next = reporting
            reply = await runtime.ask(KEY, f"go {number}")
            assert (reply.text, reply.outcome.kind) == (f"new go {number}", "answered")
        expected = [*BEGUN, "go 0", *tools, "new go 0", "go 1", *tools, "new go 1"]
        assert await texts(runtime) == expected
        assert runtime.statistics().counters["report_rows_dropped"] == 0
    sound(path)


async def test_a_report_of_equal_texts_is_aligned_by_its_place(tmp_path: Path) -> None:
    """A4: a history that repeats itself is old once, and a new message of the same text is new."""
    agent = Switchboard()

    async def constant(turn: Turn) -> str:
        return "ok"

    async def reporting(turn: Turn) -> dict[str, Any]:
        last = {"role": "assistant", "content": "ok"}
        return {"messages": [*plain(turn.history), *plain(turn.messages), last]}

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        for _ in range(3):
            agent.next = constant
            await runtime.ask(KEY, "hi")
        for count in (4, 5):
            agent.next = reporting
            await runtime.ask(KEY, "hi")
            assert await texts(runtime) == ["hi", "ok"] * count


@pytest.mark.parametrize("echoes_own", [True, False])
async def test_a_report_of_one_turn_that_says_the_same_as_the_last_one_is_new(
    tmp_path: Path, *, echoes_own: bool
) -> None:
    """A3, A4: a report of the turn alone must not be taken for the end of the history."""

    async def agent(turn: Turn) -> dict[str, Any]:
        own = plain(turn.messages) if echoes_own else []
        messages = [*own, {"role": "assistant", "content": "ok"}]
        return {"messages": messages, "final_response": "ok"}

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        for _ in range(2):
            assert (await runtime.ask(KEY, "hi")).text == "ok"
        assert await texts(runtime) == ["hi", "ok"] * 2


async def test_reporting_twice_is_harmless(tmp_path: Path) -> None:
    """A4: the same report when the turn is interrupted, and again when the session is closed."""
    path = tmp_path / "chat.db"

    class Agent:
        def __init__(self) -> None:
            self.began = trio.Event()
            self.messages: list[Any] = []
            self.asked = 0

        async def run(self, turn: Turn) -> str:
            self.messages = [*plain(turn.history), *plain(turn.messages), call("c1"), result("c1")]
            self.began.set()
            await trio.sleep_forever()

        def unsaved(self) -> list[Any]:
            self.asked += 1
            return self.messages

    agent = Agent()
    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await agent.began.wait()
        assert await submission.interrupt()
        reply = await submission.reply()
        assert (reply.outcome.kind, reply.text) == ("interrupted", "")
        assert shape(await stored(runtime)) == ["user go", "call c1", "result c1"]
        session_id = await current(runtime)
        closed = await runtime.close_session(KEY)
        assert closed.failures == {}
        assert agent.asked == 2
        assert shape(await runtime.sessions.transcript(session_id)) == [
            "user go",
            "call c1",
            "result c1",
        ]
    sound(path)


async def test_what_a_failed_agent_has_not_reported_is_stored(tmp_path: Path) -> None:
    """A4: `unsaved()` is asked for when there is no report, and its open call gets a result."""
    path = tmp_path / "chat.db"

    class Agent:
        def run(self, turn: Turn) -> str:
            raise ValueError("no luck")

        async def unsaved(self) -> Sequence[Any]:
            return [{"role": "assistant", "content": "so far"}, call("c1")]

    async with open_runtime(path, agent=Agent()) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "failed"
        messages = await stored(runtime)
        assert shape(messages) == ["user go", "assistant so far", "call c1", "result c1"]
        assert problems(messages) == []
    sound(path)


@pytest.mark.parametrize("echoes_own", [True, False])
async def test_a_rewritten_past_is_dropped_and_counted(tmp_path: Path, *, echoes_own: bool) -> None:
    """A4: nothing aligns, so new begins behind the turn's own message, else the last user's."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        user = turn.text if echoes_own else "the user's words, polished"
        messages = [
            {"role": "assistant", "content": "a summary of it all"},
            {"role": "user", "content": "an invention"},
            {"role": "assistant", "content": "another"},
            {"role": "user", "content": user},
            call("c1"),
            result("c1"),
            NEW,
        ]
        return {"messages": messages, "final_response": "new"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begun(runtime)
        agent.next = reporting
        await runtime.ask(KEY, "go")
        assert await texts(runtime) == [*BEGUN, "go", None, "found", "new"]
        dropped = runtime.statistics().counters["report_rows_dropped"]
        assert dropped == (3 if echoes_own else 4)
    sound(path)


async def test_a_rewritten_past_whose_user_said_the_same_is_not_stored_as_new(
    tmp_path: Path,
) -> None:
    """A4: the old user message equals the turn's own; what stands before that is a rewrite."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        user = {"role": "user", "content": turn.text}
        pruned = {"role": "assistant", "content": "pruned"}
        return {"messages": [user, pruned, user, NEW], "final_response": "new"}

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, "go")
        agent.next = reporting
        await runtime.ask(KEY, "go")
        assert await texts(runtime) == ["go", "re: go", "go", "new"]
        assert runtime.statistics().counters["report_rows_dropped"] == 2
    sound(path)


@pytest.mark.parametrize("uids", [False, True])
async def test_a_report_that_decorates_its_own_user_message_stores_no_second_one(
    tmp_path: Path, *, uids: bool
) -> None:
    """A4: what an agent puts in front of the user's words makes no other message of them."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        past = [*turn.history] if uids else plain(turn.history)
        own = {"role": "user", "content": f"[memory] {turn.text}"}
        return {"messages": [*past, own, NEW], "final_response": "new"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begun(runtime)
        agent.next = reporting
        await runtime.ask(KEY, "own")
        assert await texts(runtime) == [*BEGUN, "own", "new"]
    sound(path)


async def test_a_rewrite_between_echoed_uids_is_dropped_and_counted(tmp_path: Path) -> None:
    """A4: with uids, what has none and stands before the last echo is no new message."""
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        invented = {"role": "assistant", "content": "never said"}
        return {"messages": [*turn.history[:2], invented, *turn.history[2:], *turn.messages, NEW]}

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await _begun(runtime)
        agent.next = reporting
        await runtime.ask(KEY, "go")
        assert await texts(runtime) == [*BEGUN, "go", "new"]
        assert runtime.statistics().counters["report_rows_dropped"] == 1


async def test_an_echo_of_what_was_compressed_in_this_turn_is_old(tmp_path: Path) -> None:
    """A4: the attempt was given these messages, though the transcript has them no more."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def reporting(turn: Turn) -> dict[str, Any]:
        given = turn.history
        await turn.rotate("short", force=True)
        return {"messages": [*given, *turn.messages, NEW], "final_response": "new"}

    async with open_runtime(path, agent=agent) as runtime:
        await _begun(runtime)
        agent.next = reporting
        await runtime.ask(KEY, "go")
        assert await texts(runtime) == ["short", "go", "new"]
    sound(path)


# A5, A6 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [{"agent_persisted": True}, {"agent_persisted": False}, {}])
@pytest.mark.parametrize("reports", [True, False])
async def test_what_an_agent_says_about_its_own_persistence_changes_nothing(
    tmp_path: Path, claim: dict[str, Any], *, reports: bool
) -> None:
    """A5: true, false or missing, the turn is stored once."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "answer"}
        messages = {"messages": [*turn.history, *turn.messages, answer]} if reports else {}
        return {"final_response": "answer", **messages, **claim}

    async with open_runtime(path, agent=agent) as runtime:
        for _ in range(2):
            reply = await runtime.ask(KEY, "go")
            assert (reply.text, reply.persisted) == ("answer", True)
        assert await texts(runtime) == ["go", "answer", "go", "answer"]
    sound(path)


@pytest.mark.parametrize("returned", [None, {}, {"agent_persisted": True}, Outcome(kind="silent")])
async def test_no_result_at_all_is_stored_as_a_turn_as_well(tmp_path: Path, returned: Any) -> None:
    """A5: what was said on the way is there once."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> Any:
        await turn.say("on the way")
        return returned

    async with open_runtime(path, agent=agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.persisted
        assert (await runtime.sessions.turn(reply.turn_id)).state == "ended"
        assert await texts(runtime) == ["go", "on the way"]
    sound(path)


async def test_no_public_call_appends_behind_the_session(tmp_path: Path) -> None:
    """A5: what a gateway holds has no such name, and a turn takes nothing once it is over."""
    turns: list[Turn] = []

    async def agent(turn: Turn) -> str:
        turns.append(turn)
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.ask(KEY, "go")
        for attempt in (turns[0].append, turns[0].say, turns[0].rotate, turns[0].compact):
            with pytest.raises(InvalidContentError, match="over"):
                await attempt("late")
        with pytest.raises(InvalidContentError, match="over"):
            async with turns[0].streaming():
                pass
        assert await texts(runtime) == ["go", "answer"]
        public = {name for owner in (Runtime, Sessions) for name in dir(owner) if name[0] != "_"}
    writing = ("append", "write", "post", "insert", "save", "store", "add", "persist")
    # `post` asks the session to say something: it waits for the turn, and the session stores it.
    assert [name for name in public if name.startswith(writing)] == ["post"]
    assert "submit" in public


async def test_without_a_file_turns_work_the_same_and_say_so(tmp_path: Path) -> None:
    """A6: `persisted` in both, `durable` only where a file is."""
    seen: list[tuple[list[str | None], bool, bool, bool]] = []
    for path in (None, tmp_path / "chat.db"):
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask(KEY, "one")
            reply = await runtime.ask(KEY, "two")
            seen.append((await texts(runtime), reply.persisted, reply.durable, runtime.durable))
    told = ["one", "re: one", "two", "re: two"]
    assert seen == [(told, True, False, False), (told, True, True, True)]


async def test_a_runtime_in_memory_rotates_compacts_and_rewinds(tmp_path: Path) -> None:
    """A6: nothing of a session needs a file."""
    async with open_runtime(None, agent=echo) as runtime:
        for number in range(3):
            await runtime.ask(KEY, f"{number} {LONG}")
        await runtime.rotate(KEY, "summary")
        await runtime.ask(KEY, "more " + LONG)
        await runtime.compact(KEY, "summary 2")
        await runtime.ask(KEY, "last")
        assert await runtime.rewind(KEY) == 2
        assert await texts(runtime) == ["summary 2"]


# A8 ------------------------------------------------------------------------------------------


async def test_a_cancelled_ask_leaves_its_message_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: cancelled while the first commit hangs; the turn goes on and is stored once."""
    path, commits, answered = tmp_path / "chat.db", Commits(monkeypatch), trio.Event()

    class Hooks:
        def on_turn_end(self, **_: Any) -> None:
            answered.set()

    async with open_runtime(path, agent=echo, hooks=Hooks()) as runtime:
        await runtime.open_session(KEY)
        async with trio.open_nursery() as nursery:
            with commits.holding():
                nursery.start_soon(runtime.ask, KEY, Inbound(text="hello", id="m1"))
                await commits.wait_reached()
                nursery.cancel_scope.cancel()
        await answered.wait()
        assert await texts(runtime) == ["hello", "re: hello"]
    sound(path)


async def test_a_cancelled_wait_for_the_reply_leaves_the_turn_running(tmp_path: Path) -> None:
    """A8: and whoever waits again gets the reply."""
    began, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        began.set()
        await go_on.wait()
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        submission = await runtime.submit(KEY, "hello")
        await began.wait()
        with trio.CancelScope() as scope:
            scope.cancel()
            await submission.reply()
        go_on.set()
        assert (await submission.reply()).text == "answer"
        assert await texts(runtime) == ["hello", "answer"]


@pytest.mark.parametrize("step", ["stage", "commit"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["crash", "unknown"])
async def test_a_turn_rides_out_a_failing_storage_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, kind: str, *, after: bool
) -> None:
    """A8: its driver crashes, or a step fails before or after it was done; rows are there once."""
    path, trouble = tmp_path / "chat.db", Trouble(monkeypatch, step)
    trouble.after = after

    def error() -> BaseException:
        if kind == "crash":
            return RuntimeError("a bug in the writer's thread")
        return BatchUnknownError(step, apsw.IOError("the disk has hiccups"))

    async def agent(turn: Turn) -> str:
        trouble.error = error()
        await turn.append(call("c1"))
        await turn.append(result("c1"))
        if turn.text == "2":
            trouble.error = error()
            await turn.rotate("summary")
            trouble.error = error()
        return f"re: {turn.text}"

    async with open_runtime(path, agent=agent, settings=QUICK) as runtime:
        for number in range(4):
            reply = await _patiently(runtime, f"{number}")
            assert reply.text == f"re: {number}"
        expected = [t for n in (2, 3) for t in (f"{n}", None, "found", f"re: {n}")]
        assert await texts(runtime) == ["summary", *expected]
    assert trouble.failed >= 4
    sound(path)


async def _patiently(runtime: Runtime, text: str) -> Any:
    submission = await runtime.submit(KEY, text)
    return await submission.reply()


@pytest.mark.parametrize("where", ["before 4", "after 4", "before 5", "after 5", "after 12"])
async def test_what_a_killed_process_had_answered_is_stored_and_what_is_sent_again_is_there_once(
    tmp_path: Path, where: str
) -> None:
    """A8: killed around some commit; every reply that was given stands in the file."""
    path = tmp_path / "chat.db"
    code, said = await in_another_process(str(path), "commits", where)
    assert code == -signal.SIGKILL
    assert said == [f"re: {n}" for n in range(len(said))]
    async with open_runtime(path, agent=echo) as runtime:
        found = await texts(runtime) if await runtime.sessions.current(KEY) else []
        answered = [t for n in range(len(said)) for t in (f"{n}", f"re: {n}")]
        assert found[: len(answered)] == answered
        # At most the one message that was under way is there as well, and once.
        more = [f"{len(said)}", f"re: {len(said)}"]
        assert found[len(answered) :] in ([], more[:1], more)
    sound(path)


# A9 ------------------------------------------------------------------------------------------


def _once(messages: Sequence[Message]) -> None:
    assert len({m.uid for m in messages}) == len(messages)
    assert len({m.seq for m in messages}) == len(messages)


async def test_inactive_messages_are_shown_once_as_well(tmp_path: Path) -> None:
    """A9: after compaction, rewind, restore and rotation, in pages of any size."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        for number in range(4):
            await runtime.ask(KEY, f"{number} {LONG}")
        await runtime.compact(KEY, "one summary")
        await runtime.ask(KEY, "4")
        await runtime.ask(KEY, "5")
        await runtime.rewind(KEY)
        await runtime.restore(KEY)
        await runtime.rewind(KEY)
        await runtime.ask(KEY, "6")
        session_id = await current(runtime)
        whole = await stored(runtime, include_inactive=True)
        _once(whole)
        assert [m.state for m in whole].count("summarised") == 8
        assert [m.state for m in whole].count("rewound") == 2
        assert [m.seq for m in sorted(whole, key=lambda m: m.seq)] == list(range(15))
        active = [m for m in whole if m.state == "active"]
        assert [m.text for m in active] == ["one summary", "4", "re: 4", "6", "re: 6"]
        assert tuple(active) == await stored(runtime)
        for size in (1, 2, 7):
            pages: list[Message] = []
            after: tuple[int, int] | None = None
            while page := await runtime.sessions.transcript(
                session_id, include_inactive=True, limit=size, after=after
            ):
                pages += page
                last = page[-1]
                after = (last.covers[1] if last.covers else last.seq, last.seq)
            assert pages == list(whole)
        child_id = await runtime.rotate(KEY, "two", upto=active[-3].uid)
        _once(await runtime.sessions.transcript(session_id, include_inactive=True))
        child = await runtime.sessions.transcript(child_id, include_inactive=True)
        _once(child)
        assert [m.text for m in child] == ["two", "6", "re: 6"]
    sound(path)


# A10 -----------------------------------------------------------------------------------------


async def test_an_interrupt_gives_an_open_call_a_result_that_says_so(tmp_path: Path) -> None:
    """A10: also to several calls, some of which had one; what was said meanwhile is not lost."""
    path, began = tmp_path / "chat.db", trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text != "go":
            return await echo(turn)
        await turn.append(call("c1", "c2", "c3"))
        await turn.say("working")
        await turn.append(result("c2"))
        began.set()
        await trio.sleep_forever()

    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await began.wait()
        assert runtime.interrupt(KEY)
        assert (await submission.reply()).text == ""
        messages = await stored(runtime)
        assert shape(messages) == [
            "user go",
            "call c1 c2 c3",
            "result c2",
            "result c1",
            "result c3",
            "assistant working",
        ]
        assert [(m.text or "").startswith("no result") for m in messages[2:5]] == [
            False,
            True,
            True,
        ]
        assert "interrupted" in (messages[3].text or "")
        await runtime.ask(KEY, "next")
        assert problems(await stored(runtime)) == []
    sound(path)


async def test_a_stream_that_is_cut_off_is_kept_as_partial(tmp_path: Path) -> None:
    """A10: it stands where it was, and the transcript is valid."""
    began = trio.Event()

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append(result("c1"))
        async with turn.streaming() as out:
            await out.write("half a sen")
            began.set()
            await trio.sleep_forever()

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await began.wait()
        await submission.interrupt()
        await submission.reply()
        messages = await stored(runtime)
        assert shape(messages)[2:] == ["result c1", "assistant half a sen"]
        assert messages[-1].finish_reason == "partial"
        assert problems(messages) == []


async def test_a_stream_cut_off_while_a_call_is_open_leaves_a_valid_transcript(
    tmp_path: Path,
) -> None:
    """A10: the call's result comes before what was streamed behind it."""
    began = trio.Event()

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        async with turn.streaming() as out:
            await out.write("meanwhile")
            began.set()
            await trio.sleep_forever()

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await began.wait()
        await submission.interrupt()
        await submission.reply()
        messages = await stored(runtime)
        assert problems(messages) == []
        assert shape(messages) == ["user go", "call c1", "result c1", "assistant meanwhile"]


async def test_a_process_killed_with_a_call_open_gets_its_result_at_the_next_start(
    tmp_path: Path,
) -> None:
    """A10: a crash is told from an interrupt by a person."""
    path = tmp_path / "chat.db"
    code, _ = await in_another_process(str(path), "agent", "open call")
    assert code == -signal.SIGKILL
    async with open_runtime(path, agent=echo) as runtime:
        messages = await stored(runtime)
        assert shape(messages)[2:] == ["user kill", "call c1", "result c1"]
        assert "died" in (messages[-1].text or "")
        await runtime.ask(KEY, "next")
        assert problems(await stored(runtime)) == []
    sound(path)


async def test_an_agent_that_goes_on_without_a_result_leaves_a_valid_transcript(
    tmp_path: Path,
) -> None:
    """A10: the result that it owes is stored before what it says next; a late one is refused."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append("never mind")
        with pytest.raises(InvalidContentError, match="went on"):
            await turn.append(result("c1"))
        await turn.append(call("c2"))
        return "answer"

    async with open_runtime(path, agent=agent) as runtime:
        assert (await runtime.ask(KEY, "go")).text == "answer"
        messages = await stored(runtime)
        assert shape(messages) == [
            "user go",
            "call c1",
            "result c1",
            "assistant never mind",
            "call c2",
            "result c2",
            "assistant answer",
        ]
        assert problems(messages) == []
    sound(path)


async def test_a_report_that_goes_on_without_a_result_leaves_a_valid_transcript(
    tmp_path: Path,
) -> None:
    """A10: the same for an agent that reports its turn at the end."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> dict[str, Any]:
        new = [call("c1"), {"role": "assistant", "content": "never mind"}, call("c2"), NEW]
        return {"messages": [*turn.messages, *new], "final_response": "new"}

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, "go")
        messages = await stored(runtime)
        assert problems(messages) == []
        expected = ["call c1", "result c1", "assistant never mind", "call c2", "result c2"]
        assert shape(messages) == ["user go", *expected, "assistant new"]
    sound(path)


async def test_a_call_id_that_is_used_again_has_its_own_result(tmp_path: Path) -> None:
    """A10: some models number their calls anew; what happened to the first is no matter."""

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        await turn.append("never mind")
        await turn.append(call("c1"))
        await turn.append(result("c1", "the second"))
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        messages = await stored(runtime)
        assert shape(messages)[-3:] == ["call c1", "result c1", "assistant answer"]
        assert messages[-2].text == "the second"


async def test_a_result_without_a_call_is_not_stored(tmp_path: Path) -> None:
    """A10: no model would take it."""

    async def agent(turn: Turn) -> str:
        await turn.append(result("nobody asked"))
        return "answer"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.ask(KEY, "go")
        assert problems(await stored(runtime)) == []


async def test_what_is_said_while_a_call_is_open_stands_behind_its_result(tmp_path: Path) -> None:
    """A10: interim messages wait, in order, and only as long as they must."""

    async def agent(turn: Turn) -> None:
        await turn.say("zero")
        await turn.append(call("c1", "c2"))
        await turn.say("one")
        await turn.append(result("c1"))
        await turn.say("two")
        await turn.append(result("c2"))
        await turn.say("three")

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        assert (await runtime.ask(KEY, "go")).text == "three"
        messages = await stored(runtime)
        assert shape(messages) == [
            "user go",
            "assistant zero",
            "call c1 c2",
            "result c1",
            "result c2",
            "assistant one",
            "assistant two",
            "assistant three",
        ]


async def _tools(turn: Turn) -> str:
    """A turn with two calls, one after the other, and a pair at once."""
    await turn.append(call("c1"))
    await turn.append(result("c1", LONG))
    await turn.append(call("c2", "c3"))
    await turn.append(result("c2", LONG))
    await turn.append(result("c3", LONG))
    return "done"


TOOLS = ["user go", "call c1", "result c1", "call c2 c3", "result c2", "result c3"]


@pytest.mark.parametrize("index", range(1, 6))
async def test_a_rewind_into_a_tool_exchange_leaves_a_valid_transcript(
    tmp_path: Path, index: int
) -> None:
    """A10: wherever it goes to; and restoring it brings everything back."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        agent.next = _tools
        await runtime.ask(KEY, "go")
        whole = await stored(runtime)
        assert shape(whole)[:6] == TOOLS
        await runtime.rewind(KEY, to=whole[index].uid)
        messages = await stored(runtime)
        assert problems(messages) == []
        assert shape(messages)[:index] == TOOLS[:index]
        await runtime.restore(KEY)
        assert await stored(runtime) == whole
        await runtime.rewind(KEY, to=whole[index].uid)
        await runtime.ask(KEY, "next")
        messages = await stored(runtime)
        assert problems(messages) == []
        assert shape(messages)[-2:] == ["user next", "assistant re: next"]
        assert problems(agent.seen[-1]) == []
    async with open_runtime(path, agent=agent) as runtime:
        assert await stored(runtime) == messages
    sound(path)


@pytest.mark.parametrize("index", range(1, 6))
@pytest.mark.parametrize("how", ["rotate", "compact", "branch"])
async def test_no_cut_falls_between_a_call_and_its_result(
    tmp_path: Path, index: int, how: str
) -> None:
    """A10: a watermark inside an exchange moves in front of it."""
    path = tmp_path / "chat.db"
    agent = Switchboard()
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        agent.next = _tools
        await runtime.ask(KEY, "go")
        upto = (await stored(runtime))[2 + index].uid
        if how == "branch":
            await runtime.branch(KEY, upto=upto)
        elif how == "rotate":
            await runtime.rotate(KEY, "summary", upto=upto)
        else:
            await runtime.compact(KEY, "summary", upto=upto)
        messages = await stored(runtime)
        assert problems(messages) == []
        whole = [f"user {LONG}", f"assistant re: {LONG}", *TOOLS, "assistant done"]
        cut = 2 + {1: 1, 2: 3, 3: 3, 4: 3, 5: 6}[index]
        left = whole[:cut] if how == "branch" else ["system summary", *whole[cut:]]
        assert shape(messages) == left
        await runtime.ask(KEY, "next")
        assert problems(await stored(runtime)) == []
    sound(path)


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_the_running_turn_is_never_cut(tmp_path: Path, how: str) -> None:
    """A10: not even with a call open, and not if the watermark is one of its own rows."""
    path = tmp_path / "chat.db"
    agent = Switchboard()

    async def cutting(turn: Turn) -> str:
        await turn.append(call("c1"))
        own = turn.messages[-1].uid
        await (turn.rotate if how == "rotate" else turn.compact)("summary", upto=own)
        await turn.append(result("c1"))
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        agent.next = cutting
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.kind == "answered", reply.outcome
        expected = ["system summary", "user go", "call c1", "result c1", "assistant done"]
        assert shape(await stored(runtime)) == expected
    sound(path)
