"""Contract H: the agent that is kept between turns, and when it is built anew."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trio
import trio.testing

from onepen import (
    Draft,
    Guard,
    Runtime,
    SessionInfo,
    SessionSettings,
    Settings,
    SystemIds,
    Tokens,
    Turn,
    Unit,
    WriterRef,
    open_runtime,
)
from onepen.storage.commands import AppendMessages, Rewind
from onepen.storage.identity import Seq, SessionId, SessionKey, Uid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from onepen import Message

KEY = "test:1"
LONG = "a long story, " * 50  # something that a summary makes shorter


class Seen(NamedTuple):
    """What an agent saw of one turn."""

    session_id: str
    history: list[str | None]


class Agent:
    """One agent that was built; it remembers what it was shown."""

    check_revision: bool

    def __init__(self, info: SessionInfo, works: Works) -> None:
        self.info = info
        self.works = works
        self.seen: list[Seen] = []
        self.closed = 0

    async def run(self, turn: Turn) -> str:
        self.seen.append(Seen(turn.session_id, [m.text for m in turn.history]))
        if self.works.during is not None:
            await self.works.during(turn)
        return f"re: {turn.text}"

    def close(self) -> None:
        self.closed += 1


class Works:
    """A factory, and every agent that it has built."""

    def __init__(self) -> None:
        self.built: list[Agent] = []
        self.during: Callable[[Turn], Awaitable[object]] | None = None

    def __call__(self, info: SessionInfo) -> Agent:
        self.built.append(Agent(info, self))
        return self.built[-1]

    @property
    def last(self) -> Agent:
        return self.built[-1]


async def texts(runtime: Runtime, session_id: str) -> list[str | None]:
    return [message.text for message in await runtime.sessions.transcript(session_id)]


# Somebody else ---------------------------------------------------------------------------------

# As `storage/sqlite/transcript.py` does it, with a connection of its own, in a process of its own.
_FOREIGN = """
import sys
import apsw

path, session_id, text = sys.argv[1:]
db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
db.set_busy_timeout(10_000)
db.execute("BEGIN IMMEDIATE")
n, seq = db.execute(
    "SELECT s.n, h.next_seq FROM sessions s JOIN heads h ON h.session = s.n WHERE s.id = ?",
    (session_id,),
).fetchall()[0]
db.execute(
    "INSERT INTO messages (session, seq, uid, role, state, carried, kind, created_ms, text) "
    "VALUES (?, ?, randomblob(16), 'user', 0, 0, 0, 1, ?)",
    (n, seq, text),
)
db.execute(
    "UPDATE heads SET next_seq = next_seq + 1, revision = revision + 1, "
    "message_count = message_count + 1, active_count = active_count + 1, "
    "active_bytes = active_bytes + octet_length(?) WHERE session = ?",
    (text, n),
)
db.execute("COMMIT")
db.close()
"""


async def write_from_outside(path: Path, session_id: str, text: str) -> None:
    """Another process appends a message to a session, around the runtime."""
    await trio.run_process([sys.executable, "-c", _FOREIGN, str(path), session_id, text])


def writer_of(runtime: Runtime) -> WriterRef:
    """The runtime's own writer, which no public call gives away."""
    surroundings: Any = vars(runtime)["_surroundings"]
    writer: WriterRef = surroundings.writer
    return writer


async def guard_of(runtime: Runtime, key: str, session_id: str) -> Guard:
    route = await writer_of(runtime).read(lambda reader: reader.route(SessionKey(key)))
    assert route is not None
    return Guard(
        key=SessionKey(key), incarnation=route.incarnation, session_id=SessionId(session_id)
    )


async def write_beside(runtime: Runtime, key: str, session_id: str, text: str) -> None:
    """Append through the writer in the actor's name, behind the actor's back."""
    row = await runtime.sessions.get(session_id)
    assert row is not None
    draft = Draft(uid=Uid(SystemIds().fresh()), role="user", text=text, created_ms=1)
    append = AppendMessages(session_id=row.id, base_seq=row.next_seq, messages=(draft,))
    await writer_of(runtime).write(Unit((append,), (await guard_of(runtime, key, session_id),)))


async def rewind_beside(runtime: Runtime, key: str, session_id: str, to: int) -> None:
    """Rewind through the writer in the actor's name, behind the actor's back."""
    row = await runtime.sessions.get(session_id)
    assert row is not None
    rewind = Rewind(session_id=row.id, to_seq=Seq(to), replaces=row.revision, at_ms=1)
    await writer_of(runtime).write(Unit((rewind,), (await guard_of(runtime, key, session_id),)))


# H1 and H2 -------------------------------------------------------------------------------------


async def test_switching_to_another_session_and_back_keeps_the_agent(tmp_path: Path) -> None:
    """H1: A, B, A: one object; each turn has its own session's transcript and goes there."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "two")
        await runtime.switch(KEY, "a")
        await runtime.ask(KEY, "three")
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "four")
        assert len(works.built) == 1
        assert works.last.seen == [
            ("a", []),
            ("b", []),
            ("a", ["one", "re: one"]),
            ("b", ["two", "re: two"]),
        ]
        assert await texts(runtime, "a") == ["one", "re: one", "three", "re: three"]
        assert await texts(runtime, "b") == ["two", "re: two", "four", "re: four"]
        statistics = runtime.statistics()
        assert (statistics.agents_built, statistics.agents_rebuilt) == (1, 0)
        assert works.last.closed == 0
    assert works.last.closed == 1


async def test_an_agent_cannot_write_one_sessions_turn_into_another(tmp_path: Path) -> None:
    """H1: a turn that the agent has kept from session A writes nothing once the key has B."""
    kept: list[Turn] = []
    problems: list[str] = []

    async def agent(turn: Turn) -> str:
        kept.append(turn)
        for old in kept[:-1]:
            try:
                await old.append("late")
            except Exception as error:
                problems.append(type(error).__name__)
        await turn.append("own")
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "two")
        assert problems == ["InvalidContentError"]
        assert await texts(runtime, "a") == ["one", "own", "done"]
        assert await texts(runtime, "b") == ["two", "own", "done"]


class Keeping:
    """An agent that keeps what it did in its last turn, whatever was stored of it."""

    def __init__(self) -> None:
        self.began = trio.Event()
        self.hangs = False
        self.report: list[dict[str, str]] = []

    async def run(self, turn: Turn) -> str:
        answer = f"{turn.session_id}'s answer"
        said = {"role": "user", "content": turn.text}
        self.report = [said, {"role": "assistant", "content": answer}]
        if self.hangs:
            self.began.set()
            await trio.sleep_forever()
        return answer

    def unsaved(self) -> list[dict[str, str]]:
        return self.report


async def test_what_an_agent_kept_back_in_one_session_stays_out_of_another(tmp_path: Path) -> None:
    """H1: cut off in A, it is stored there; a close of B, which heard the same, has none of it."""
    agent = Keeping()
    async with open_runtime(tmp_path / "x.db", factory=lambda _: agent) as runtime:
        await runtime.open_session(KEY, "b")
        await runtime.ask(KEY, "hello")
        await runtime.switch(KEY, "a")
        agent.hangs = True
        await runtime.submit(KEY, "hello")
        await agent.began.wait()
        await runtime.switch(KEY, "b")
        closed = await runtime.close_session(KEY)
        assert (closed.session_id, closed.failures) == ("b", {})
        assert await texts(runtime, "a") == ["hello", "a's answer"]
        assert await texts(runtime, "b") == ["hello", "b's answer"]


async def test_what_an_agent_still_has_of_another_session_is_not_taken_for_this_ones(
    tmp_path: Path,
) -> None:
    """H1: its last turn was in B, but what it offers is A's."""
    kept: list[dict[str, str]] = []

    class Forgetful:
        async def run(self, turn: Turn) -> str:
            if turn.session_id == "a":
                kept.append({"role": "user", "content": turn.text})
                kept.append({"role": "assistant", "content": "a secret"})
            return f"re: {turn.text}"

        def unsaved(self) -> list[dict[str, str]]:
            return kept

    async with open_runtime(tmp_path / "x.db", factory=lambda _: Forgetful()) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "two")
        await runtime.close_session(KEY)
        assert await texts(runtime, "b") == ["two", "re: two"]


@pytest.mark.parametrize("at_work", [True, False])
async def test_what_a_shared_agent_kept_back_stays_out_of_another_key(
    tmp_path: Path, *, at_work: bool
) -> None:
    """H1: while it works for the other key, and when it has done so last; both say the same."""
    agent = Keeping()
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.open_session(KEY, "mine")
        await runtime.ask(KEY, "hello")
        agent.hangs = at_work
        other = await runtime.submit("test:2", "hello")
        if at_work:
            await agent.began.wait()
        else:
            await other.reply()
        closed = await runtime.close_session(KEY)
        assert (closed.session_id, closed.failures) == ("mine", {})
        assert await texts(runtime, "mine") == ["hello", "mine's answer"]


async def test_turns_of_a_session_share_one_agent(tmp_path: Path) -> None:
    """H2: turn after turn, failed ones included; each key has its own."""
    works = Works()

    async def fail_sometimes(turn: Turn) -> None:
        if turn.text == "3":
            raise ValueError("as asked")

    works.during = fail_sometimes
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        for n in range(6):
            await runtime.ask("test:1", str(n))
            await runtime.ask("test:2", str(n))
        assert [agent.info.key for agent in works.built] == ["test:1", "test:2"]
        assert [len(agent.seen) for agent in works.built] == [6, 6]
        assert runtime.statistics().agents_rebuilt == 0


async def test_our_own_changes_of_a_session_keep_the_agent(tmp_path: Path) -> None:
    """H2: titles, compaction, rewind, restore, rotation and branching are our own writes."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:

        async def again() -> list[str | None]:
            reply = await runtime.ask(KEY, LONG)
            assert reply.outcome.kind == "answered", reply.outcome
            return works.last.seen[-1].history

        await again()
        await runtime.set_title(KEY, "Chat")
        await again()
        await runtime.compact(KEY, "compacted")
        assert await again() == ["compacted"]
        await runtime.rewind(KEY)
        assert await again() == ["compacted"]
        await runtime.rewind(KEY)
        await runtime.restore(KEY)
        assert len(await again()) == 3
        await runtime.rotate(KEY, "rotated")
        assert await again() == ["rotated"]
        await runtime.branch(KEY)
        assert len(await again()) == 3
        assert len(works.built) == 1
        assert runtime.statistics().agents_rebuilt == 0
        assert runtime.statistics().counters["reloads"] == 0


async def test_a_turn_that_rotates_or_compacts_keeps_the_agent(tmp_path: Path) -> None:
    """H2: what the agent itself does to its transcript is no reason to build it anew."""
    works = Works()

    async def move(turn: Turn) -> None:
        if turn.text == "rotate":
            await turn.rotate("rotated")
        elif turn.text == "compact":
            await turn.compact("compacted")

    works.during = move
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        for text in (LONG, "rotate", LONG, "compact", "on"):
            reply = await runtime.ask(KEY, text)
            assert reply.outcome.kind == "answered", reply.outcome
        assert works.last.seen[-1].history[0] == "compacted"
        assert len(works.built) == 1
        assert runtime.statistics().counters["reloads"] == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_what_a_failing_agent_still_has_of_elsewhere_stays_out(
    tmp_path: Path, *, shared: bool
) -> None:
    """H1: it fails before it begins, and offers the last session's messages as unsaved."""

    class Failing:
        messages: list[dict[str, str]]

        async def run(self, turn: Turn) -> str:
            if turn.text == "boom":
                raise ValueError("before it has begun")
            self.messages = [
                {"role": "user", "content": turn.text},
                {"role": "assistant", "content": "a secret"},
            ]
            return "ok"

        def unsaved(self) -> list[dict[str, str]]:
            return self.messages

    agent = Failing()

    def factory(_: SessionInfo) -> Failing:
        return agent

    given: dict[str, Any] = {"agent": agent} if shared else {"factory": factory}
    async with open_runtime(tmp_path / "x.db", **given) as runtime:
        await runtime.ask(KEY, "elsewhere")
        other = "test:other" if shared else KEY
        await runtime.switch(other, "B")
        assert (await runtime.ask(other, "boom")).outcome.kind == "failed"
        assert await texts(runtime, "B") == ["boom"]
        assert runtime.statistics().counters["report_rows_dropped"] == 2


# H3 and H4 -------------------------------------------------------------------------------------


async def test_a_write_by_another_process_rebuilds_the_agent(tmp_path: Path) -> None:
    """H3: before the next turn, which sees the foreign message; then that agent stays."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        await write_from_outside(path, session_id, "foreign")
        reply = await runtime.ask(KEY, "two")
        assert (reply.text, reply.session_id) == ("re: two", session_id)
        assert [len(agent.seen) for agent in works.built] == [1, 1]
        assert works.last.seen == [(session_id, ["one", "re: one", "foreign"])]
        assert [agent.closed for agent in works.built] == [1, 0]
        await runtime.ask(KEY, "three")
        assert len(works.built) == 2
        assert await texts(runtime, session_id) == [
            "one",
            "re: one",
            "foreign",
            "two",
            "re: two",
            "three",
            "re: three",
        ]
        assert runtime.statistics().agents_rebuilt == 1
        assert runtime.statistics().counters["crashes"] == 0


async def test_a_write_beside_the_actor_rebuilds_the_agent(tmp_path: Path) -> None:
    """H3: through the runtime's own writer, in the actor's own name."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        await write_beside(runtime, KEY, session_id, "foreign")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2
        assert works.last.seen == [(session_id, ["one", "re: one", "foreign"])]
        await runtime.ask(KEY, "three")
        assert len(works.built) == 2


async def test_a_foreign_commit_rebuilds_only_the_agent_of_the_session_it_wrote_to(
    tmp_path: Path,
) -> None:
    """H3: revisions are read again, but those of other sessions are as they were."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        first = (await runtime.ask("test:1", "one")).session_id
        await runtime.ask("test:2", "one")
        await write_from_outside(path, first, "foreign")
        await runtime.ask("test:2", "two")
        await runtime.ask("test:1", "two")
        await runtime.ask("test:2", "three")
        assert [agent.info.key for agent in works.built] == ["test:1", "test:2", "test:1"]
        assert len(works.built[1].seen) == 3


async def test_a_foreign_write_to_the_session_that_is_not_current_is_noticed_on_return(
    tmp_path: Path,
) -> None:
    """H3: the key has B meanwhile, where the agent stays; back in A it is rebuilt."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "two")
        await write_from_outside(path, "a", "foreign")
        await runtime.ask(KEY, "three")
        assert len(works.built) == 1
        await runtime.switch(KEY, "a")
        await runtime.ask(KEY, "four")
        assert len(works.built) == 2
        assert works.last.seen == [("a", ["one", "re: one", "foreign"])]
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "five")
        assert len(works.built) == 2


async def test_a_foreign_write_during_a_turn_rebuilds_the_agent_before_the_next(
    tmp_path: Path,
) -> None:
    """H3: the turn can't be stored as it was; the next one sees the foreign message, and a new
    agent does.
    """
    path, works = tmp_path / "x.db", Works()

    async def foreign(turn: Turn) -> None:
        if turn.text == "interfere":
            await write_from_outside(path, turn.session_id, "foreign")

    works.during = foreign
    async with open_runtime(path, factory=works) as runtime:
        await runtime.ask(KEY, "one")
        reply = await runtime.ask(KEY, "interfere")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2
        assert "foreign" in works.last.seen[0].history
        assert (await texts(runtime, reply.session_id)).count("foreign") == 1


async def test_a_foreign_write_during_the_first_turn_rebuilds_the_agent_before_the_next(
    tmp_path: Path,
) -> None:
    """H3: also if there is no earlier turn whose end the revision could be compared with."""
    path, works = tmp_path / "x.db", Works()

    async def foreign(turn: Turn) -> None:
        if turn.text == "interfere":
            await write_from_outside(path, turn.session_id, "foreign")

    works.during = foreign
    async with open_runtime(path, factory=works) as runtime:
        await runtime.ask(KEY, "interfere")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2
        assert "foreign" in works.last.seen[0].history


async def test_a_foreign_write_while_a_message_waits_for_its_turn_is_noticed(
    tmp_path: Path,
) -> None:
    """H4: the first unit of a queued message's turn is refused and tried again, too."""
    path, works = tmp_path / "x.db", Works()
    began, end = trio.Event(), trio.Event()

    async def slow(turn: Turn) -> None:
        if turn.text == "slow":
            began.set()
            await end.wait()

    works.during = slow
    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with open_runtime(path, factory=works, settings=settings) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        other = await runtime.submit("test:other", "slow")
        await began.wait()
        waiting = await runtime.submit(KEY, "two")
        assert waiting.disposition == "queued"
        await write_from_outside(path, session_id, "foreign")
        end.set()
        await other.reply()
        assert (await waiting.reply()).text == "re: two"
        assert [agent.info.key for agent in works.built] == [KEY, "test:other", KEY]
        assert works.last.seen == [(session_id, ["one", "re: one", "foreign"])]
        stored = ["one", "re: one", "foreign", "two", "re: two"]
        assert await texts(runtime, session_id) == stored


async def test_every_change_of_a_transcript_moves_its_revision(tmp_path: Path) -> None:
    """H4: append, rewind, restore and compaction do, titles don't."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        session_id = (await runtime.ask(KEY, LONG)).session_id
        revisions: list[int] = []

        async def note() -> None:
            row = await runtime.sessions.get(session_id)
            assert row is not None
            revisions.append(row.revision)

        await note()
        await runtime.ask(KEY, LONG)
        await note()
        await runtime.rewind(KEY)
        await note()
        await runtime.restore(KEY)
        await note()
        await runtime.compact(KEY, "short")
        await note()
        assert revisions == sorted(set(revisions))
        await runtime.set_title(KEY, "Chat")
        await note()
        assert revisions[-1] == revisions[-2]


async def test_a_foreign_rewind_rebuilds_the_agent(tmp_path: Path) -> None:
    """H4: a change that adds no message is noticed by its revision."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        await runtime.ask(KEY, "two")
        await rewind_beside(runtime, KEY, session_id, 2)
        await runtime.ask(KEY, "three")
        assert len(works.built) == 2
        assert works.last.seen == [(session_id, ["one", "re: one"])]
        assert await texts(runtime, session_id) == ["one", "re: one", "three", "re: three"]


@pytest.mark.parametrize("how", ["rotate", "compact", "rewind"])
async def test_an_operation_after_a_foreign_write_works_at_the_first_call(
    tmp_path: Path, how: str
) -> None:
    """H3, H4: it is refused, and done again on what is stored, the foreign message included."""
    path, works = tmp_path / "x.db", Works()
    seen: list[list[str | None]] = []

    def summary(history: tuple[Message, ...]) -> str:
        seen.append([message.text for message in history])
        return "short"

    async with open_runtime(path, factory=works) as runtime:
        session_id = (await runtime.ask(KEY, LONG)).session_id
        await runtime.ask(KEY, "two")
        await write_from_outside(path, session_id, "foreign")
        if how == "rewind":
            assert await runtime.rewind(KEY) == 3
            left = [LONG, f"re: {LONG}"]
        else:
            session_id = await getattr(runtime, how)(KEY, summary)
            assert seen[-1] == [LONG, f"re: {LONG}", "two", "re: two", "foreign"]
            left = ["short"]
        assert await texts(runtime, session_id) == left
        assert (await runtime.ask(KEY, "three")).outcome.kind == "answered"
        assert works.last.seen[-1].history == left


async def test_a_refused_first_unit_is_tried_again_on_what_is_stored(tmp_path: Path) -> None:
    """H4: one refusal, one reload; the user's message is stored once, behind the foreign one."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        before = runtime.statistics()
        assert (before.counters["reloads"], before.writer.engine.refusals) == (0, 0)
        await write_beside(runtime, KEY, session_id, "foreign")
        reply = await runtime.ask(KEY, "two")
        after = runtime.statistics()
        assert (after.counters["reloads"], after.writer.engine.refusals) == (1, 1)
        messages = await runtime.sessions.transcript(session_id)
        assert [(m.seq, m.text) for m in messages[2:]] == [
            (2, "foreign"),
            (3, "two"),
            (4, "re: two"),
        ]
        assert [m.text for m in reply.messages] == ["two", "re: two"]
        assert (await runtime.sessions.turn(reply.turn_id)).attempt == 1


async def test_writes_between_our_turns_are_each_noticed(tmp_path: Path) -> None:
    """H4: again and again, from both sides, and never without a cause."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "0")).session_id
        for n in range(1, 4):
            await write_from_outside(path, session_id, f"outside {n}")
            await write_beside(runtime, KEY, session_id, f"beside {n}")
            await runtime.ask(KEY, f"{n}")
            assert len(works.built) == n + 1
            assert works.last.seen[0].history[-2:] == [f"outside {n}", f"beside {n}"]
            await runtime.ask(KEY, f"{n} again")
            assert len(works.built) == n + 1
        stored = await texts(runtime, session_id)
        assert len(stored) == len(set(stored)) == 2 + 3 * 6


async def test_baselines_are_compared_with_the_same_session_only(tmp_path: Path) -> None:
    """H4: sessions at very different revisions, switched between; nothing is rebuilt."""
    works = Works()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.open_session(KEY, "busy")
        for n in range(5):
            await runtime.ask(KEY, str(n))
        for n in range(3):
            await runtime.switch(KEY, f"quiet-{n}")
            await runtime.ask(KEY, "hello")
            await runtime.switch(KEY, "busy")
            await runtime.ask(KEY, "hello")
        assert len(works.built) == 1


# H5 --------------------------------------------------------------------------------------------


async def test_a_changed_signature_of_the_factory_rebuilds_the_agent(tmp_path: Path) -> None:
    """H5: once for each change, as a method that is told for which session."""

    class Signed(Works):
        model = "small"

        def signature(self, info: SessionInfo) -> tuple[str, str]:
            return (self.model, info.key)

    works = Signed()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.ask(KEY, "one")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 1
        works.model = "large"
        session_id = (await runtime.ask(KEY, "three")).session_id
        await runtime.ask(KEY, "four")
        assert [len(agent.seen) for agent in works.built] == [2, 2]
        assert [agent.closed for agent in works.built] == [1, 0]
        assert len(works.last.seen[0].history) == 4
        assert len(await texts(runtime, session_id)) == 8
        assert runtime.statistics().agents_rebuilt == 1


@pytest.mark.parametrize("kind", ["attribute", "method"])
async def test_a_changed_signature_of_the_agent_rebuilds_it(tmp_path: Path, kind: str) -> None:
    """H5: the agent's own word, where the factory has none."""
    works = Works()

    def sign(agent: Any, signature: str) -> None:
        agent.signature = (lambda: signature) if kind == "method" else signature

    def build(info: SessionInfo) -> Agent:
        agent = works(info)
        sign(agent, "small")
        return agent

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        await runtime.ask(KEY, "one")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 1
        sign(works.last, "large")
        await runtime.ask(KEY, "three")
        await runtime.ask(KEY, "four")
        assert [len(agent.seen) for agent in works.built] == [2, 2]


@pytest.mark.parametrize("kind", ["attribute", "property", "method"])
async def test_an_agents_class_as_factory_has_the_signature_of_its_agents(
    tmp_path: Path, kind: str
) -> None:
    """H5: what the class has under that name describes its agents, and is no word of a factory."""
    model, built = ["small"], list[Any]()

    class Plain:
        def __init__(self, _: SessionInfo) -> None:
            built.append(self)

        async def run(self, turn: Turn) -> str:
            return f"re: {turn.text}"

    class Attribute(Plain):
        signature = "of no agent"

        def __init__(self, info: SessionInfo) -> None:
            super().__init__(info)
            self.signature = model[0]

    class Property(Plain):
        @property
        def signature(self) -> str:
            return model[0]

    class Method(Plain):
        def signature(self) -> str:
            assert self in built
            return model[0]

    factory = {"attribute": Attribute, "property": Property, "method": Method}[kind]
    async with open_runtime(tmp_path / "x.db", factory=factory) as runtime:
        for text in ("one", "two"):
            reply = await runtime.ask(KEY, text)
            assert reply.outcome.kind == "answered", reply.outcome
        assert len(built) == 1
        model[0] = "large"
        if kind == "attribute":
            built[0].signature = "large"
        for text in ("three", "four"):
            assert (await runtime.ask(KEY, text)).text == f"re: {text}"
        assert len(built) == 2


async def test_a_signature_that_is_changed_in_place_counts_as_changed(tmp_path: Path) -> None:
    """H5: a configuration that is one mutable object."""

    class Signed(Works):
        def __init__(self) -> None:
            super().__init__()
            self.signature = {"model": "small", "tools": ["read"]}

    works = Signed()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.ask(KEY, "one")
        works.signature["tools"] = ["read", "write"]
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2


async def test_a_signature_is_looked_at_after_a_switch_as_well(tmp_path: Path) -> None:
    """H5: it belongs to the agent, not to one session."""

    class Signed(Works):
        signature = 1

    works = Signed()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
        await runtime.switch(KEY, "b")
        works.signature = 2
        await runtime.ask(KEY, "two")
        await runtime.switch(KEY, "a")
        await runtime.ask(KEY, "three")
        assert [len(agent.seen) for agent in works.built] == [1, 2]


# H6 --------------------------------------------------------------------------------------------


async def test_messages_wait_while_the_agent_is_being_built(tmp_path: Path) -> None:
    """H6: they are durable and queued, one agent is built, and the turns come in order."""
    works, building, may_build = Works(), trio.Event(), trio.Event()

    async def build(info: SessionInfo) -> Agent:
        building.set()
        await may_build.wait()
        return works(info)

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        first = await runtime.submit(KEY, "one")
        await building.wait()
        second = await runtime.submit(KEY, "two")
        third = await runtime.submit(KEY, "three")
        assert (first.disposition, second.disposition) == ("started", "queued")
        assert (second.position, third.position) == (1, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert works.built == []
        may_build.set()
        replies = [await submission.reply() for submission in (first, second, third)]
        assert [reply.text for reply in replies] == ["re: one", "re: two", "re: three"]
        assert len(works.built) == 1
        assert [len(seen.history) for seen in works.last.seen] == [0, 2, 4]


async def test_a_failed_build_fails_its_turn_and_the_next_one_tries_again(tmp_path: Path) -> None:
    """H6: with a reason; the message is stored, and so is the turn's end."""
    works, tries = Works(), 0

    def build(info: SessionInfo) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("no such model")
        if tries == 2:
            return 5  # no agent
        return works(info)

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        first = await runtime.ask(KEY, "one")
        assert first.outcome.kind == "failed"
        assert "no such model" in (first.outcome.error or "")
        assert "no such model" in first.text
        second = await runtime.ask(KEY, "two")
        assert second.outcome.kind == "failed"
        assert (await runtime.ask(KEY, "three")).text == "re: three"
        await runtime.ask(KEY, "four")
        assert tries == 3
        assert works.last.seen[0].history == ["one", "two"]
        for reply in (first, second):
            assert (await runtime.sessions.turn(reply.turn_id)).state == "ended"
        assert runtime.statistics().counters["crashes"] == 0


async def test_a_message_that_waited_for_a_failed_build_tries_again(tmp_path: Path) -> None:
    """H6: only the turn that the build was for fails."""
    works, building, may_build = Works(), trio.Event(), trio.Event()

    async def build(info: SessionInfo) -> Agent:
        if not building.is_set():
            building.set()
            await may_build.wait()
            raise ValueError("not yet")
        return works(info)

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        first = await runtime.submit(KEY, "one")
        await building.wait()
        second = await runtime.submit(KEY, "two")
        may_build.set()
        assert (await first.reply()).outcome.kind == "failed"
        assert (await second.reply()).text == "re: two"


async def test_a_rebuild_that_fails_is_tried_again_as_well(tmp_path: Path) -> None:
    """H6: the agent of before is gone, and the foreign message is seen by the one that comes."""
    works, fails = Works(), False

    def build(info: SessionInfo) -> Agent:
        if fails:
            raise ValueError("not now")
        return works(info)

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        await write_beside(runtime, KEY, session_id, "foreign")
        fails = True
        assert (await runtime.ask(KEY, "two")).outcome.kind == "failed"
        assert works.last.closed == 1
        fails = False
        assert (await runtime.ask(KEY, "three")).text == "re: three"
        assert len(works.built) == 2
        assert works.last.seen[0].history == ["one", "re: one", "foreign", "two"]


async def test_a_build_can_be_interrupted_and_is_tried_again(tmp_path: Path) -> None:
    """H6: a build that takes for ever holds nobody."""
    works, building = Works(), trio.Event()

    async def build(info: SessionInfo) -> Agent:
        if not building.is_set():
            building.set()
            await trio.sleep_forever()
        return works(info)

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        first = await runtime.submit(KEY, "one")
        await building.wait()
        assert runtime.interrupt(KEY)
        assert (await first.reply()).outcome.kind == "interrupted"
        assert (await runtime.ask(KEY, "two")).text == "re: two"


# H7 --------------------------------------------------------------------------------------------


async def test_an_agent_may_opt_out_of_the_check(tmp_path: Path) -> None:
    """H7: it is kept; its turn has the foreign message nevertheless."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        session_id = (await runtime.ask(KEY, "one")).session_id
        works.last.check_revision = False
        await write_from_outside(path, session_id, "foreign")
        await runtime.ask(KEY, "two")
        await write_beside(runtime, KEY, session_id, "more")
        await runtime.ask(KEY, "three")
        assert len(works.built) == 1
        assert works.last.seen[1].history[-1] == "foreign"
        assert works.last.seen[2].history[-1] == "more"
        stored = await texts(runtime, session_id)
        assert (len(stored), len(set(stored))) == (8, 8)


async def test_an_agent_that_opted_out_is_still_rebuilt_for_its_signature(tmp_path: Path) -> None:
    """H7: only the check of revisions is left out."""

    class Signed(Works):
        signature = 1

    works = Signed()
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        await runtime.ask(KEY, "one")
        works.last.check_revision = False
        works.signature = 2
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2


async def test_a_session_that_the_agent_never_knew_counts_as_unchanged(tmp_path: Path) -> None:
    """H7: without a baseline nothing can have changed since; what is stored is seen anyway."""
    path, works = tmp_path / "x.db", Works()
    async with open_runtime(path, factory=works) as runtime:
        await runtime.open_session(KEY, "a")
        await runtime.ask(KEY, "one")
    await write_from_outside(path, "a", "foreign")
    async with open_runtime(path, factory=works) as runtime:
        await runtime.switch(KEY, "b")
        await runtime.ask(KEY, "two")
        await runtime.switch(KEY, "a")
        await runtime.ask(KEY, "three")
        assert len(works.built) == 2  # one for each runtime
        assert works.last.seen[-1].history == ["one", "re: one", "foreign"]


# H8 --------------------------------------------------------------------------------------------


async def test_usage_survives_a_rebuild(tmp_path: Path) -> None:
    """H8: counters live in storage: over a foreign write, a signature, a restart."""

    class Signed(Works):
        signature = 1

    path, works = tmp_path / "x.db", Signed()

    async def count(turn: Turn) -> None:
        turn.usage(model="m", input=10, output=3, cache_read=2, cost_nanos=7)
        await turn.append("between")
        turn.usage(model="m", input=1, auxiliary=True, cost_nanos=1)

    works.during = count
    async with open_runtime(path, factory=works) as runtime:
        reply = await runtime.ask(KEY, "one")
        session_id = reply.session_id
        assert reply.usage == Tokens(input=11, output=3, cache_read=2)
        await check_usage(runtime, session_id, 1)
        await write_beside(runtime, KEY, session_id, "foreign")
        await runtime.ask(KEY, "two")
        assert len(works.built) == 2
        await check_usage(runtime, session_id, 2)
        works.signature = 2
        await runtime.ask(KEY, "three")
        assert len(works.built) == 3
        await check_usage(runtime, session_id, 3)
    async with open_runtime(path, factory=works) as runtime:
        await check_usage(runtime, session_id, 3)
        await runtime.ask(KEY, "four")
        assert len(works.built) == 4
        await check_usage(runtime, session_id, 4)


async def check_usage(runtime: Runtime, session_id: str, turns: int) -> None:
    row = await runtime.sessions.get(session_id)
    assert row is not None
    assert row.tokens == Tokens(input=10 * turns, output=3 * turns, cache_read=2 * turns)
    assert row.auxiliary_tokens == Tokens(input=turns)
    assert (row.cost_nanos, row.auxiliary_cost_nanos) == (7 * turns, turns)
    for totals in (await runtime.sessions.usage(session_id), await runtime.sessions.usage()):
        found = {(t.model, t.auxiliary): (t.calls, t.tokens, t.cost_nanos) for t in totals}
        assert found == {
            ("m", False): (turns, row.tokens, 7 * turns),
            ("m", True): (turns, row.auxiliary_tokens, turns),
        }


async def test_usage_of_a_turn_that_fails_is_counted(tmp_path: Path) -> None:
    """H8: what was used was used, also by an agent that is gone before its turn is stored."""
    works = Works()

    async def count(turn: Turn) -> None:
        turn.usage(model="m", input=10)
        raise ValueError("as asked")

    works.during = count
    async with open_runtime(tmp_path / "x.db", factory=works) as runtime:
        reply = await runtime.ask(KEY, "one")
        assert reply.outcome.kind == "failed"
        (total,) = await runtime.sessions.usage(reply.session_id)
        assert (total.calls, total.tokens) == (1, Tokens(input=10))


async def test_usage_of_a_turn_that_somebody_else_cut_is_counted(tmp_path: Path) -> None:
    """H8: a foreign write refuses a unit of the turn; what it was to count is not lost."""
    path, works = tmp_path / "x.db", Works()

    async def count(turn: Turn) -> None:
        if turn.text == "interfere":
            await write_from_outside(path, turn.session_id, "foreign")
            turn.usage(model="m", input=10)

    works.during = count
    async with open_runtime(path, factory=works) as runtime:
        await runtime.ask(KEY, "one")
        reply = await runtime.ask(KEY, "interfere")
        totals = await runtime.sessions.usage(reply.session_id)
        assert [(total.calls, total.tokens) for total in totals] == [(1, Tokens(input=10))]
