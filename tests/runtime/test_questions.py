"""Questions to people: what waits for an answer, and what does not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    AmbiguousError,
    ConflictError,
    Inbound,
    InvalidContentError,
    MissingError,
    QuestionExpiredError,
    SessionSettings,
    Settings,
    SourcePolicy,
    TurnPendingError,
    open_runtime,
)
from onepen.testing import FakePlatform

from ..contract.agents import LONG, call, problems, query, result, snapshot, sound, stored
from .scripted import LIMIT_S, LoopClock, directory_of, inline, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Question, Runtime, Turn

KEY, OTHER = "test:dm:1", "test:dm:2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class Clerk:
    """An agent that asks before it does anything, and remembers what it was told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, bool]] = []
        self.heard: list[str] = []

    async def run(self, turn: Turn) -> str:
        self.begun.append((turn.text, turn.attempt, turn.resumed))
        if turn.text.startswith("ask"):
            answer = await turn.ask_user(f"may I: {turn.text}?", ("yes", "no"))
            self.heard.append(answer)
            return f"{turn.text}: {answer}"
        return f"re {turn.text}"


async def asked(runtime: Runtime, key: str = KEY, count: int = 1) -> tuple[Question, ...]:
    """The open questions, once there are so many."""
    async with runtime.events(key) as events:
        while len(questions := await runtime.approvals.list(key)) < count:
            await events.receive()
    return questions


async def turn_row(runtime: Runtime, turn_id: str) -> tuple[str, int]:
    turn = await runtime.turns.get(turn_id)
    return turn.state, turn.attempt


# Asking and answering --------------------------------------------------------------------------


async def test_a_turn_waits_for_its_answer_and_goes_on_one_attempt_further(path: Path) -> None:
    """The same call of the agent goes on: it was not cut off, and nothing is done twice."""
    clerk = Clerk()
    async with serving(path, clerk) as runtime:
        submission = await runtime.submit(KEY, "ask")
        (question,) = await asked(runtime)
        assert (question.question, question.choices, question.state) == (
            "may I: ask?",
            ("yes", "no"),
            "open",
        )
        assert await turn_row(runtime, submission.turn_id) == ("waiting", 1)
        status = await runtime.status(KEY)
        assert (status.state, status.turn_id) == ("waiting", submission.turn_id)
        assert status.questions == (question,)
        answered = await runtime.approvals.answer(KEY, "yes", by="ann")
        assert (answered.state, answered.answer, answered.answered_by) == ("answered", "yes", "ann")
        reply = await submission.reply()
        assert (reply.text, clerk.begun) == ("ask: yes", [("ask", 1, False)])
        assert await turn_row(runtime, submission.turn_id) == ("ended", 2)
        assert (await runtime.turns.get(submission.turn_id)).tries == 1
    sound(path)


async def test_the_first_answer_stands_and_a_repeat_of_it_is_harmless(path: Path) -> None:
    """A button that is pressed twice, and another one that is pressed late."""
    async with serving(path, Clerk()) as runtime:
        submission = await runtime.submit(KEY, "ask")
        (question,) = await asked(runtime)
        name = question.question_key
        for bad in ("maybe", "", "YES"):
            with pytest.raises(InvalidContentError):
                await runtime.approvals.answer(KEY, bad)
        assert (await runtime.approvals.answer(KEY, "no", question_key=name)).answer == "no"
        again = await runtime.approvals.answer(KEY, "no", question_key=name)
        assert again.answer == "no"
        with pytest.raises(ConflictError):
            await runtime.approvals.answer(KEY, "yes", question_key=name)
        with pytest.raises(MissingError):
            await runtime.approvals.answer(KEY, "yes")
        with pytest.raises(MissingError):
            await runtime.approvals.answer(KEY, "yes", question_key="nothing")
        assert (await submission.reply()).text == "ask: no"
        assert await runtime.approvals.get(KEY, name) == again
    sound(path)


async def test_two_questions_at_once_must_be_named(path: Path) -> None:
    """The turn goes on when the last of them is answered."""

    async def agent(turn: Turn) -> str:
        answers: dict[str, str] = {}

        async def ask(name: str) -> None:
            answers[name] = await turn.ask_user("may I?", key=name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
        return " ".join(answers[name] for name in "ab")

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        first, second = sorted(await asked(runtime, count=2), key=lambda q: q.question_key)
        with pytest.raises(AmbiguousError, match="2 open questions") as ambiguous:
            await runtime.approvals.answer(KEY, "one")
        assert sorted(ambiguous.value.candidates) == [first.question_key, second.question_key]
        await runtime.approvals.answer(KEY, "one", question_key=first.question_key)
        with pytest.raises(ConflictError, match="answered already"):
            await runtime.approvals.answer(KEY, "no", question_key=first.question_key)
        assert (await turn_row(runtime, submission.turn_id))[0] == "waiting"
        await runtime.approvals.answer(KEY, "two")
        assert (await submission.reply()).text == "one two"
        assert second.question_key.endswith("/b")
    sound(path)


async def test_the_same_question_gets_the_recorded_answer_and_another_key_is_another_question(
    path: Path,
) -> None:
    """Within one turn; the next turn's is its own, so that nobody's approval lasts for ever."""
    heard: list[str] = []

    async def agent(turn: Turn) -> str:
        heard.append(await turn.ask_user("sure?"))
        heard.append(await turn.ask_user("sure?"))
        await turn.ask_user("quite sure?", key="k")
        with pytest.raises(ConflictError):
            await turn.ask_user("something else?", key="k")
        return "ok"

    async with serving(path, agent) as runtime:
        for number in range(2):
            submission = await runtime.submit(KEY, f"{number}")
            await asked(runtime)
            await runtime.approvals.answer(KEY, f"answer {number}")
            await until_open(runtime, "quite sure?")
            await runtime.approvals.answer(KEY, "quite")
            assert (await submission.reply()).text == "ok"
    assert heard == ["answer 0"] * 2 + ["answer 1"] * 2
    sound(path)


async def until_open(runtime: Runtime, text: str) -> None:
    async with runtime.events(KEY) as events:
        while [q.question for q in await runtime.approvals.list(KEY)] != [text]:
            await events.receive()


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        (5,),
        ("half \ud800",),
        ("ok?", "yes"),
        ("ok?", ["yes", 5]),
        ("ok?", [""]),
        ("ok?", (), 0),
        ("ok?", (), "soon"),
        ("ok?", (), float("inf")),
    ],
    ids=repr,
)
async def test_a_question_that_can_not_be_asked_is_refused_and_the_turn_goes_on(
    path: Path, arguments: tuple[Any, ...]
) -> None:
    """INV-20."""

    async def agent(turn: Turn) -> str:
        with pytest.raises(InvalidContentError):
            await turn.ask_user(*arguments)
        return "ok"

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.text == "ok"
        assert await turn_row(runtime, reply.turn_id) == ("ended", 1)
    sound(path)


async def test_a_question_is_shown_and_told(path: Path) -> None:
    """As a delivery to whoever is answered, with its choices, and as events."""
    platform = FakePlatform()
    sources = {"test": SourcePolicy(deliver=platform.deliver)}
    async with serving(path, Clerk(), sources=sources) as runtime:
        submission = await runtime.submit(KEY, Inbound("ask", reply_to="chat-1"))
        (question,) = await asked(runtime)
        await until(lambda: len(platform.texts("chat-1")) == 1)
        (delivery,) = await runtime.deliveries.list()
        assert (delivery.kind, delivery.text) == ("question", "may I: ask?")
        assert delivery.body["choices"] == ["yes", "no"]
        assert delivery.body["question"] == question.question_key
        await runtime.approvals.answer(KEY, "yes")
        await submission.reply()
        async with submission.events() as events:
            told = [event async for event in events]
        kinds = [event.kind for event in told if event.kind.startswith("question")]
        assert kinds == ["question.asked", "question.ended"]
        assert [e.question.state for e in told if e.question is not None] == ["open", "answered"]
        await until(lambda: len(platform.texts("chat-1")) == 2)
    sound(path)


# What waits, and what does not -------------------------------------------------------------------


async def test_a_turn_that_waits_holds_no_slot_and_its_deadline_stands_still(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """With one slot for everybody, others go on for an hour; then it has its time as before."""
    clerk = Clerk()
    settings = Settings(sessions=SessionSettings(turns_running_max=1, turn_deadline_s=60))
    async with inline(path, clerk, settings=settings) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        for number in range(60):
            await trio.sleep(60)
            assert (await runtime.ask("test:dm:2", f"{number}")).text == f"re {number}"
        assert runtime.statistics().slots.running == 0
        await runtime.approvals.answer(KEY, "yes")
        assert (await submission.reply()).outcome.kind == "answered"
    sound(path)


async def test_the_answer_waits_for_a_slot_like_everybody_else(path: Path) -> None:
    """The limit holds; what was answered is recorded meanwhile."""
    go_on, began = trio.Event(), trio.Event()
    clerk = Clerk()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await go_on.wait()
        return await clerk.run(turn)

    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with serving(path, agent, settings=settings) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        slow = await runtime.submit("test:dm:2", "slow")
        await began.wait()
        answered = await runtime.approvals.answer(KEY, "yes")
        assert answered.state == "answered"
        assert clerk.heard == []
        assert runtime.statistics().slots.running == 1
        go_on.set()
        await slow.reply()
        assert (await submission.reply()).text == "ask: yes"
    sound(path)


async def test_messages_wait_behind_a_turn_that_waits(path: Path) -> None:
    """It keeps its place; they are next, in order."""
    clerk = Clerk()
    async with serving(path, clerk) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        later = [await runtime.submit(KEY, text) for text in ("one", "two")]
        assert [one.disposition for one in later] == ["queued", "queued"]
        await runtime.approvals.answer(KEY, "yes")
        assert (await submission.reply()).text == "ask: yes"
        assert [(await one.reply()).text for one in later] == ["re one", "re two"]
    sound(path)


@pytest.mark.parametrize("parked", [False, True], ids=["live", "after a restart"])
async def test_a_pending_approval_survives_a_rotation_and_a_compaction(
    path: Path, *, parked: bool
) -> None:
    """B12: from outside, while it is open; the turn is carried whole and goes on in the child."""

    async def agent(turn: Turn) -> str:
        if turn.text.startswith("ask"):
            await turn.append(call("c1"))
            answer = await turn.ask_user("may I?")
            assert turn.session_id == await turn_session()
            if turn.resumed:
                return answer
            await turn.append(result("c1"))
            return answer
        return LONG

    async def turn_session() -> str | None:
        return await runtime.sessions.current(KEY)

    left = path.with_name("left.db")
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, f"hello {LONG}")
        submission = await runtime.submit(KEY, Inbound("ask", id="u1"))
        await asked(runtime)
        if parked:
            snapshot(path, left)
        else:
            await check_rotation(runtime, submission)
    if parked:
        path = left
        async with open_runtime(path, agent=agent) as runtime:
            await check_rotation(runtime, await runtime.submit(KEY, Inbound("ask", id="u1")))
    sound(path)


async def check_rotation(runtime: Runtime, submission: Any) -> None:
    parent = await runtime.sessions.current(KEY)
    waits = await runtime.submit(KEY, f"later {LONG}")
    with trio.fail_after(10):
        child = await runtime.rotate(KEY, "summary")
    assert child != parent
    (question,) = await runtime.approvals.list(KEY)
    assert await turn_row(runtime, submission.turn_id) == ("waiting", 1)
    await runtime.set_title(KEY, "Titled")
    await runtime.approvals.answer(KEY, "yes", question_key=question.question_key)
    assert (await submission.reply()).text == "yes"
    assert (await waits.reply()).text == LONG
    assert await runtime.sessions.current(KEY) == child
    rows = await stored(runtime, KEY)
    assert [row.text for row in rows][:2] == ["summary", "ask"]
    assert problems(rows) == []
    with trio.fail_after(10):
        await runtime.compact(KEY, "in short")


async def test_an_interrupt_ends_a_turn_that_waits_and_withdraws_its_question(path: Path) -> None:
    """F3: by a person, by a message that interrupts, by a reset; the slot is nobody's."""
    async with serving(path, Clerk()) as runtime:
        for number, stop in enumerate(("person", "message", "reset", "close", "cancel")):
            submission = await runtime.submit(KEY, f"ask {number}")
            (question,) = await asked(runtime)
            match stop:
                case "person":
                    assert runtime.interrupt(KEY)
                case "message":
                    urgent = await runtime.submit(KEY, "stop", busy="interrupt")
                    assert (await urgent.reply()).text == "re stop"
                case "reset":
                    await runtime.reset(KEY)
                case "close":
                    await runtime.close_session(KEY)
                case _:
                    assert await runtime.turns.cancel(submission.turn_id)
            reply = await submission.reply()
            assert (reply.outcome.kind, reply.text) == ("interrupted", "")
            withdrawn = await runtime.approvals.get(KEY, question.question_key)
            assert withdrawn is not None
            assert withdrawn.state == "withdrawn"
            with pytest.raises(ConflictError):
                await runtime.approvals.answer(KEY, "yes", question_key=question.question_key)
        assert runtime.statistics().slots.running == 0
    sound(path)


# Expiry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caught", [True, False])
async def test_an_expired_question_says_so_and_is_no_answer(
    path: Path, autojump_clock: trio.testing.MockClock, *, caught: bool
) -> None:
    """Never a silent no: the agent decides, or its turn fails with that reason."""

    async def agent(turn: Turn) -> str:
        try:
            return await turn.ask_user("may I?", ("yes", "no"), timeout=90)
        except QuestionExpiredError:
            if caught:
                return "nobody said anything"
            raise

    async with inline(path, agent, clock=LoopClock()) as runtime:
        start = trio.current_time()
        reply = await runtime.ask(KEY, "go")
        assert 90 <= trio.current_time() - start < 91
        if caught:
            assert reply.text == "nobody said anything"
        else:
            assert (reply.outcome.kind, "expired" in reply.text) == ("failed", True)
        (question,) = await runtime.approvals.list(KEY, open_only=False)
        assert question.state == "expired"
        with pytest.raises(ConflictError):
            await runtime.approvals.answer(KEY, "yes", question_key=question.question_key)
    sound(path)


# Restarts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "shut down"])
@pytest.mark.parametrize("recovery", ["mark", "resume"])
async def test_a_restart_leaves_the_question_and_its_answer_resumes_the_turn(
    path: Path, how: str, recovery: Any
) -> None:
    """Whatever the policy for cut-off turns; messages that came behind it are next."""
    clerk = Clerk()
    settings = Settings(sessions=SessionSettings(recovery=recovery))
    async with open_runtime(path, agent=clerk) as runtime:
        submission = await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        (question,) = await asked(runtime)
        await runtime.submit(KEY, Inbound("later", id="u2"))
        left = snapshot(path, path.with_name("left.db"))
    with pytest.raises(TurnPendingError):
        await submission.reply()
    if how == "killed":
        path = left
    after = Clerk()
    for _ in range(2):  # a second restart leaves it as well
        async with open_runtime(path, agent=after, settings=settings) as runtime:
            assert await runtime.approvals.list() == (question,)
            assert await turn_row(runtime, submission.turn_id) == ("waiting", 1)
            assert [t.state for t in await runtime.turns.list(KEY)] == ["waiting", "queued"]
    async with open_runtime(path, agent=after, settings=settings) as runtime:
        repeat = await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        assert (repeat.turn_id, repeat.repeated) == (submission.turn_id, True)
        later = await runtime.submit(KEY, Inbound("later", id="u2"))
        assert after.begun == []
        await runtime.approvals.answer(KEY, "yes")
        assert (await repeat.reply()).text == "ask: yes"
        assert (await later.reply()).text == "re later"
        assert after.begun == [("ask", 2, True), ("later", 1, False)]
        assert await turn_row(runtime, submission.turn_id) == ("ended", 2)
        posted = [(d.kind, d.text) for d in reversed(await runtime.deliveries.list())]
        assert posted == [("question", "may I: ask?"), ("reply", "ask: yes")]
    sound(path)


async def test_an_answer_whose_turn_never_went_on_resumes_it_at_the_next_start(path: Path) -> None:
    """Killed between the answer and the next attempt: the answer is there, so it goes on."""
    clerk = Clerk()
    began, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await go_on.wait()
        return await clerk.run(turn)

    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with open_runtime(path, agent=agent, settings=settings) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        await runtime.submit("test:dm:2", "slow")
        await began.wait()  # it has the only slot
        await runtime.approvals.answer(KEY, "yes")
        left = snapshot(path, path.with_name("left.db"))
        go_on.set()
    after = Clerk()
    async with serving(left, after) as runtime:
        await until(lambda: ("ask", 2, True) in after.begun)
        await until(lambda: not runtime.statistics().sessions.running)
        assert (await runtime.turns.get(submission.turn_id)).state == "ended"
    assert after.heard == ["yes"]
    sound(left)


async def test_a_question_expires_while_nobody_serves(path: Path) -> None:
    """Its turn goes on at the next start, and is told."""

    async def agent(turn: Turn) -> str:
        try:
            return await turn.ask_user("may I?", timeout=0.2)
        except QuestionExpiredError:
            return "expired"

    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, Inbound("go", id="u1"))
        await asked(runtime)
        left = snapshot(path, path.with_name("left.db"))
    await trio.sleep(0.3)  # the wall clock's own time is what is tested
    async with serving(left, agent) as runtime:
        repeat = await runtime.submit(KEY, Inbound("go", id="u1"))
        assert (await repeat.reply()).text == "expired"
        assert await turn_row(runtime, submission.turn_id) == ("ended", 2)
    sound(left)


async def calling(turn: Turn) -> str:
    """Asks while a call is open."""
    if turn.text == "ask":
        await turn.append(call("c1"))
        await turn.ask_user("may I?")
    return f"re {turn.text}"


@pytest.mark.parametrize("how", ["killed", "shut down"])
async def test_a_parked_turn_may_be_stopped(path: Path, how: str) -> None:
    """A10: its open calls get results, its question is withdrawn, and messages go on."""
    agent = calling
    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, Inbound("ask", id="u1"))
        (question,) = await asked(runtime)
        await runtime.submit(KEY, Inbound("later", id="u2"))
        left = snapshot(path, path.with_name("left.db"))
    if how == "shut down":
        left = path
    async with serving(left, agent) as runtime:
        later = await runtime.submit(KEY, Inbound("later", id="u2"))
        assert await runtime.turns.cancel(submission.turn_id)
        assert (await later.reply()).text == "re later"
        assert problems(await stored(runtime, KEY)) == []
        outcome = (await runtime.turns.get(submission.turn_id)).outcome
        assert outcome is not None
        assert (outcome.kind, outcome.cause) == ("interrupted", "person")
        withdrawn = await runtime.approvals.get(KEY, question.question_key)
        assert withdrawn is not None
        assert withdrawn.state == "withdrawn"
        assert query(left, "SELECT count(*) FROM turns WHERE state <> 'ended'") == [(0,)]
    sound(left)


@pytest.mark.parametrize("how", ["killed", "shut down"])
async def test_a_parked_turn_that_is_stopped_alone_leaves_no_open_call(
    path: Path, how: str
) -> None:
    """A10: nothing has to come behind it, and the session may have been rotated meanwhile."""
    async with open_runtime(path, agent=calling) as runtime:
        await runtime.ask(KEY, LONG)
        submission = await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        await asked(runtime)
        left = snapshot(path, path.with_name("left.db"))
    if how == "shut down":
        left = path
    async with serving(left, calling) as runtime:
        await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))  # it is parked
        if how == "killed":
            await runtime.rotate(KEY, "short", force=True)
        assert await runtime.turns.cancel(submission.turn_id)
        await until(lambda: query(left, "SELECT 1 FROM turns WHERE state <> 'ended'") == [])
        rows = await stored(runtime, KEY)
        assert (problems(rows), rows[-1].tool_call_id) == ([], "c1")
        assert (await runtime.ask(KEY, "on")).text == "re on"
    sound(left)


async def test_a_take_over_closes_the_calls_that_it_brings(path: Path) -> None:
    """A10; and the turn that is left without its messages ends, with a word to its user."""
    async with open_runtime(path, agent=calling) as runtime:
        await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        (question,) = await asked(runtime)
        left = snapshot(path, path.with_name("left.db"))
    async with serving(left, calling) as runtime:
        directory = directory_of(runtime)
        await until(lambda: directory.evict_idle() == 1)
        await until(lambda: directory.live == 0)
        taken = await runtime.sessions.current(KEY)
        assert taken is not None
        await runtime.switch(OTHER, taken, take_over=True)
        assert problems(await stored(runtime, OTHER)) == []
        assert (await runtime.ask(OTHER, "on")).text == "re on"
        with pytest.raises(ConflictError):  # it is withdrawn: nobody waits for it
            await runtime.approvals.answer(KEY, "yes", question_key=question.question_key)
        assert await runtime.turns.list(KEY) == ()
        told = (await runtime.deliveries.list())[0]
        assert (told.kind, told.target) == ("reply", {"to": "chat-1"})
        assert "moved" in told.text
    sound(left)


async def test_a_turn_that_waits_when_its_key_is_taken_over_says_so(path: Path) -> None:
    """F: whoever is asked a question hears what became of it."""
    async with serving(path, calling) as runtime:
        inbound = Inbound("ask", id="u1", reply_to="chat-1")
        submission = await runtime.submit(KEY, inbound)
        await asked(runtime)
        taken = await runtime.sessions.current(KEY)
        assert taken is not None
        await runtime.switch(OTHER, taken, take_over=True)
        reply = await submission.reply()
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "rest")
        assert "moved" in reply.text
        assert (await runtime.deliveries.list())[0].text == reply.text
    sound(path)


async def test_a_turn_that_waits_is_interrupted_though_its_actor_is_not_in_memory(
    path: Path,
) -> None:
    """Whether somebody served the key just now is nothing that a person who says stop can know."""
    async with open_runtime(path, agent=calling) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        left = snapshot(path, path.with_name("left.db"))
    async with serving(left, calling) as runtime:
        directory = directory_of(runtime)
        await until(lambda: directory.evict_idle() == 1)
        await until(lambda: directory.live == 0)
        assert await runtime.interrupt(KEY)
        await until(lambda: query(left, "SELECT 1 FROM turns WHERE state <> 'ended'") == [])
        outcome = (await runtime.turns.get(submission.turn_id)).outcome
        assert outcome is not None
        assert (outcome.kind, outcome.cause) == ("interrupted", "person")
        assert not await runtime.interrupt(KEY)
        assert not await runtime.interrupt(OTHER)
    sound(left)


async def test_a_task_that_outlives_its_turn_is_not_left_waiting_for_an_answer(
    path: Path,
) -> None:
    """INV-15: its question is withdrawn with the turn, so nobody can answer it."""
    told: list[InvalidContentError] = []

    async def ask(turn: Turn) -> None:
        try:
            await turn.ask_user("may I?")
        except InvalidContentError as error:
            told.append(error)

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:

            async def agent(turn: Turn) -> str:
                nursery.start_soon(ask, turn)
                await asked(runtime)
                return "done"

            async with open_runtime(path, agent=agent) as runtime:
                assert (await runtime.ask(KEY, "go")).text == "done"
                await until(lambda: bool(told))
                assert await runtime.approvals.list(KEY) == ()
    assert told[0].field == "turn"
    sound(path)


async def test_a_crash_of_the_actor_leaves_the_question(path: Path) -> None:
    """INV-13: the next actor of the key finds the turn waiting."""
    clerk = Clerk()
    async with serving(path, clerk) as runtime:
        submission = await runtime.submit(KEY, "ask")
        await asked(runtime)
        for session in list(runtime._directory.sessions()):  # pyright: ignore[reportPrivateUsage]
            session.spawn(_crash)
        await until(lambda: runtime.statistics().counters["crashes"] == 1)
        await runtime.approvals.answer(KEY, "yes")
        assert (await submission.reply()).text == "ask: yes"
        assert clerk.begun == [("ask", 1, False), ("ask", 2, True)]
    sound(path)


async def _crash() -> None:
    raise RuntimeError("planted")


# The pause ---------------------------------------------------------------------------------------


async def test_a_turn_with_two_questions_goes_on_with_all_of_its_time(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Whatever they take: behind the last answer it has its slot and its deadline again."""

    async def agent(turn: Turn) -> str:
        async with trio.open_nursery() as nursery:
            for name in "ab":
                nursery.start_soon(partial(turn.ask_user, f"may I {name}?", key=name))
        assert runtime.statistics().slots.running == 1
        await trio.sleep(50)
        return "done"

    settings = Settings(sessions=SessionSettings(turn_deadline_s=60, interrupt_grace_s=1))
    async with inline(path, agent, settings) as runtime:
        submission = await runtime.submit(KEY, "go")
        first, second = await asked(runtime, count=2)
        await trio.sleep(3600)
        assert runtime.statistics().slots.running == 0
        await runtime.approvals.answer(KEY, "yes", question_key=first.question_key)
        await trio.sleep(3600)
        assert runtime.statistics().slots.running == 0
        await runtime.approvals.answer(KEY, "yes", question_key=second.question_key)
        assert (await submission.reply()).text == "done"
        assert (await runtime.turns.get(submission.turn_id)).tries == 1
    sound(path)


async def test_an_agent_that_gives_up_asking_runs_on_as_before(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Its own time-out withdraws the question; slot and deadline are back, storage says so."""
    gave_up, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> None:
        with trio.move_on_after(5):
            await turn.ask_user("may I?")
        gave_up.set()
        await go_on.wait()
        with trio.move_on_after(5):
            await turn.ask_user("may I?")
        await trio.sleep_forever()

    settings = Settings(sessions=SessionSettings(turn_deadline_s=60, interrupt_grace_s=1))
    async with inline(path, agent, settings) as runtime:
        submission = await runtime.submit(KEY, "go")
        await asked(runtime)
        await gave_up.wait()
        await trio.sleep(1)
        assert await turn_row(runtime, submission.turn_id) == ("running", 2)
        assert runtime.statistics().slots.running == 1
        assert await runtime.approvals.list(KEY) == ()
        start = trio.current_time()
        go_on.set()
        (again,) = await asked(runtime)
        assert again.question_key.endswith("/2")
        reply = await submission.reply()
        assert reply.outcome.cause == "deadline"
        assert 58 <= trio.current_time() - start <= 66
        assert query(path, "SELECT DISTINCT state FROM questions") == [("withdrawn",)]
    sound(path)


async def test_the_same_question_asked_twice_at_once_is_one(path: Path) -> None:
    async def agent(turn: Turn) -> str:
        answers: list[str] = []

        async def ask() -> None:
            answers.append(await turn.ask_user("may I?"))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        return " ".join(answers)

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await asked(runtime)
        await runtime.approvals.answer(KEY, "yes")
        assert (await submission.reply()).text == "yes yes yes"
        assert query(path, "SELECT count(*) FROM questions") == [(1,)]
    sound(path)


async def test_a_button_that_is_pressed_twice_at_once_is_pressed_once(path: Path) -> None:
    """The second finds the first under way; another one behind it is a conflict."""
    async with serving(path, Clerk()) as runtime:
        submission = await runtime.submit(KEY, "ask")
        (question,) = await asked(runtime)
        press = partial(runtime.approvals.answer, KEY, question_key=question.question_key)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(press, "yes")
        with pytest.raises(ConflictError):
            await press("no")
        assert (await submission.reply()).text == "ask: yes"
    sound(path)


async def test_a_shutdown_leaves_a_turn_that_is_answered_and_waits_for_its_slot(
    path: Path,
) -> None:
    """As a kill would: nobody is told that it was cut off, and the next start goes on."""
    began, go_on = trio.Event(), trio.Event()
    clerk = Clerk()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await go_on.wait()
        return await clerk.run(turn)

    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with open_runtime(path, agent=agent, settings=settings) as runtime:
        submission = await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        await asked(runtime)
        await runtime.submit("test:dm:2", "slow")
        await began.wait()
        await runtime.approvals.answer(KEY, "yes")
        await runtime.shutdown()
    with pytest.raises(TurnPendingError):
        await submission.reply()
    async with serving(path, Clerk()) as runtime:
        repeat = await runtime.submit(KEY, Inbound("ask", id="u1", reply_to="chat-1"))
        assert (await repeat.reply()).text == "ask: yes"
        assert [d.kind for d in await runtime.deliveries.list()] == ["reply", "question"]
    sound(path)


async def test_parked_turns_hold_up_nobody_elses_recovery(path: Path) -> None:
    """However many there are; and their actors leave memory like others."""
    clerk = Clerk()
    async with open_runtime(path, agent=clerk) as runtime:
        for number in range(4):
            await runtime.submit(f"test:parked:{number}", "ask")
            await asked(runtime, f"test:parked:{number}")
        await runtime.submit("test:parked:0", Inbound("later", id="l"))
    settings = Settings(sessions=SessionSettings(recovery_concurrency_max=2))
    async with open_runtime(path, agent=clerk) as runtime:
        # Queued, and cut off before it could begin.
        await runtime.submit("test:parked:1", Inbound("later", id="m"))
    after = Clerk()
    async with serving(path, after, settings=settings) as runtime:
        directory = runtime._directory  # pyright: ignore[reportPrivateUsage]
        await until(lambda: runtime.statistics().counters["activated"] == 4)
        await until(lambda: directory.evict_idle() + 2 >= directory.live)
        # Those with messages behind them stay until these are answered; the others are gone.
        await until(lambda: directory.live == 2)
        for number in range(4):
            await runtime.approvals.answer(f"test:parked:{number}", "yes")
        await until(lambda: len(after.begun) == 6)
    sound(path)


async def test_what_was_counted_before_a_question_survives_a_restart(path: Path) -> None:
    async def agent(turn: Turn) -> str:
        turn.usage(model="m", input=7)
        return await turn.ask_user("may I?")

    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await asked(runtime)
    assert query(path, "SELECT sum(input), count(*) FROM usage") == [(7, 1)]
    assert submission.turn_id


async def test_a_question_expires_on_time_although_nothing_else_is_due(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The timetable hears of it when it is asked, also if it was looking the other way."""

    async def agent(turn: Turn) -> str:
        try:
            return await turn.ask_user("may I?", timeout=2)
        except QuestionExpiredError:
            return "expired"

    async with inline(path, agent, clock=LoopClock()) as runtime:
        await trio.sleep(7)
        start = trio.current_time()
        assert (await runtime.ask(KEY, "go")).text == "expired"
        assert 2 <= trio.current_time() - start < 2.1
