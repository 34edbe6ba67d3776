"""Contract F: no silent turn. The one text that follows from an outcome, wherever it is read.

A text has four readers: who waits for the reply, who listens to the events, who is sent what is in
the outbox, and whoever comes again with the same message after a restart.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import (
    Draft,
    Inbound,
    Outcome,
    Reply,
    SessionSettings,
    Settings,
    SourcePolicy,
    StorageUnavailableError,
    SystemIds,
    WriterSettings,
    open_runtime,
)
from onepen.storage.commands import AppendMessages
from onepen.storage.identity import SessionKey, Uid
from onepen.storage.units import Guard, Unit

from ..runtime.scripted import serving, until
from .agents import (
    KEY,
    LONG,
    ROOT,
    Commits,
    call,
    echo,
    query,
    result,
    shape,
    snapshot,
    sound,
    stored,
    texts,
)
from .killed_answering import FIRST, JOINED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from onepen import Delivery, Runtime, Submission, Turn, WriterRef
    from onepen.storage.records import OutcomeKind


class Shout(str):
    """What an enum or a template gives for text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "not this"


KINDS: tuple[OutcomeKind, ...] = ("answered", "failed", "interrupted", "partial", "silent")
RESUME = Settings(sessions=SessionSettings(recovery="resume"))
NONE = re.compile(r"\bNone\b")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


# Readers -------------------------------------------------------------------------------------


async def never(turn: Turn) -> str:
    """The agent of a runtime in which nothing is to be answered."""
    return f"{turn.text!r} was answered a second time"


def ending(returned: Any) -> Any:
    """An agent that returns this to `FIRST`, or raises it; everybody else gets an echo."""

    async def agent(turn: Turn) -> Any:
        if turn.text != FIRST.text:
            return await echo(turn)
        if isinstance(returned, BaseException):
            raise returned
        return returned

    return agent


async def everywhere(path: Path, agent: Any, *, history: int = 0) -> Reply:
    """The end of the turn that answers `FIRST`, behind so many messages; all readers agree on it.

    What has no text is not sent; what has one is sent once.
    """
    async with serving(path, agent) as runtime:
        await _talk(runtime, history)
        async with runtime.events(KEY) as events:
            submission = await runtime.submit(KEY, FIRST)
            reply = await submission.reply()
            async for event in events:
                if event.kind == "turn.ended":
                    assert (event.turn_id, event.text) == (submission.turn_id, reply.text)
                    break
        sent = await _sent(runtime, reply.turn_id)
        assert sent == ([reply.text] if reply.text else [])
        await _agrees(runtime, reply)
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
        assert await _sent(runtime, reply.turn_id) == sent
    sound(path)
    return reply


async def _talk(runtime: Runtime, messages: int) -> None:
    for _ in range(messages // 2):
        await runtime.ask(KEY, "and so on")
    if messages % 2:
        await runtime.post(KEY, "one more thing")
    if messages:
        assert len(await stored(runtime)) == messages


async def _sent(runtime: Runtime, turn_id: str) -> list[str]:
    """What this turn has to say to whoever sent its message."""
    posted = [d for d in await runtime.deliveries.list(key=KEY) if d.turn_id == turn_id]
    assert {(d.source, str(d.target)) for d in posted} <= {("test", "{'to': 'chat-1'}")}
    return [d.text for d in posted]


async def _agrees(runtime: Runtime, reply: Reply) -> None:
    """A repeat gets the same end."""
    again = await runtime.ask(KEY, FIRST)
    assert (again.turn_id, again.text, again.outcome) == (reply.turn_id, reply.text, reply.outcome)


# F1: an answer -------------------------------------------------------------------------------

ANSWERS = {
    "short": "x",
    "blanks": "  \n\t an answer\r\n\r\n with\u00a0odd \u2003 blanks\u2028\u200b \n",
    "unicode": "日本語, e\u0301, \u202eright to left\u202c, 👩‍👩‍👧, \U0010ffff, \ufeff",
    "control": "\x00 nothing \x1b[31m red \x7f\x0b",
    "markup": '{"text": null} <b>&amp;</b> \\n \\u0041 \'"; DROP TABLE turns; --',
    "long": "a long story, ünd so on\n" * 20_000,
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_passes_unchanged(path: Path, name: str) -> None:
    """F1: to the last blank; it is what the transcript says as well."""
    answer = ANSWERS[name]
    reply = await everywhere(path, ending(answer))
    assert reply.text == answer
    assert reply.outcome.kind == "answered"
    async with serving(path, never) as runtime:
        assert await texts(runtime) == ["hello", answer]


async def test_the_longest_answer_passes_unchanged_and_is_sent_as_far_as_a_platform_takes_it(
    path: Path,
) -> None:
    """F1: what is sent says that it is cut, and which message has the whole of it."""
    answer = "ü" * (512 * 1024)
    async with serving(path, ending(answer)) as runtime, runtime.events(KEY) as events:
        reply = await runtime.ask(KEY, FIRST)
        async for event in events:
            if event.kind == "turn.ended":
                assert event.text == answer
                break
        assert reply.text == answer
        (delivery,) = await runtime.deliveries.list(key=KEY)
        assert delivery.text == "ü" * (256 * 1024)
        assert delivery.body["cut"] is True
        (said,) = [m for m in await stored(runtime) if m.role == "assistant"]
        assert (said.uid, said.text) == (delivery.message_uid, answer)
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
    sound(path)


async def _said(turn: Turn) -> None:
    await turn.say("half of it")
    await turn.say(" an answer ")


async def _streamed(turn: Turn) -> str:
    async with turn.streaming() as out:
        await out.write(" an ")
        await out.write("answer ")
    return " an answer "


async def _appended(turn: Turn) -> dict[str, Any]:
    await turn.append(call("c1"), result("c1"), " an answer ")
    return {"final_response": None, "api_calls": 2}


async def _appended_marked(turn: Turn) -> None:
    await turn.append({"role": "assistant", "content": Shout(" an answer ")})


REPORTED = {"messages": [{"role": "assistant", "content": " an answer "}]}
WAYS_TO_ANSWER: dict[str, Any] = {
    "outcome": ending(Outcome(kind="answered", text=" an answer ")),
    "mapping": ending({"final_response": " an answer ", "error": None}),
    "report": ending(REPORTED),
    "both": ending({**REPORTED, "final_response": " an answer "}),
    "marked": ending(Shout(" an answer ")),
    "appended and marked": _appended_marked,
    "appended": _appended,
    "streamed": _streamed,
}


@pytest.mark.parametrize("way", WAYS_TO_ANSWER)
async def test_an_answer_passes_unchanged_however_the_agent_gives_it(path: Path, way: str) -> None:
    """F1: and it is sent and stored once."""
    reply = await everywhere(path, WAYS_TO_ANSWER[way])
    assert reply.text == " an answer "
    async with serving(path, never) as runtime:
        assert (await texts(runtime)).count(" an answer ") == 1


async def test_what_was_said_last_is_the_answer_if_nothing_is_returned(path: Path) -> None:
    """F1: it has been sent by then, and is not sent twice."""
    async with serving(path, _said) as runtime:
        reply = await runtime.ask(KEY, FIRST)
        assert reply.text == " an answer "
        assert await _sent(runtime, reply.turn_id) == [" an answer ", "half of it"]
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)


# F2: a part of an answer ---------------------------------------------------------------------

NO_SUCH_TOOL = "Model generated invalid tool call: nonexistent_tool"


@pytest.mark.parametrize("text", [None, "", " \n"])
@pytest.mark.parametrize("way", ["outcome", "mapping"])
async def test_a_partial_answer_without_a_text_names_its_error(
    path: Path, way: str, text: str | None
) -> None:
    """F2: visibly, and without the advice that belongs to failures."""
    returned: Any = {"final_response": text, "partial": True, "error": NO_SUCH_TOOL}
    if way == "outcome":
        returned = Outcome(kind="partial", text=text, error=NO_SUCH_TOOL)
    reply = await everywhere(path, ending(returned))
    assert reply.outcome.kind == "partial"
    assert NO_SUCH_TOOL in reply.text
    assert "/reset" not in reply.text


@pytest.mark.parametrize("way", ["outcome", "mapping"])
async def test_a_partial_answer_names_two_hundred_characters_of_its_error(
    path: Path, way: str
) -> None:
    """F2: the first ones; characters, not bytes."""
    error = "§" * 199 + "¶" + "never shown"
    returned: Any = {"partial": True, "error": error}
    if way == "outcome":
        returned = Outcome(kind="partial", error=error)
    reply = await everywhere(path, ending(returned))
    assert error[:200] in reply.text
    assert error[:201] not in reply.text
    assert reply.outcome.error == error


# F3: a person stops it -----------------------------------------------------------------------

STOPPED = Inbound("stop me", id="s1", reply_to="chat-1")


class Hanging:
    """Works on `STOPPED`, and says so, until somebody stops it; answers everybody else."""

    def __init__(self) -> None:
        self.begun = trio.Event()

    async def run(self, turn: Turn) -> str:
        if turn.text == STOPPED.text:
            await turn.say("working")
            turn.usage(model="m", input=5)
            self.begun.set()
            await trio.sleep_forever()
        return await echo(turn)


async def _interrupt_key(runtime: Runtime, _: Submission) -> None:
    assert await runtime.interrupt(KEY)


async def _interrupt_turn(_: Runtime, submission: Submission) -> None:
    assert await submission.interrupt()


async def _supersede(runtime: Runtime, _: Submission) -> None:
    await runtime.submit(KEY, Inbound("this instead", reply_to="chat-1"), busy="interrupt")


async def _reset(runtime: Runtime, _: Submission) -> None:
    await runtime.reset(KEY)


async def _close(runtime: Runtime, _: Submission) -> None:
    await runtime.close_session(KEY)


async def _switch(runtime: Runtime, _: Submission) -> None:
    await runtime.switch(KEY, "elsewhere")


async def _rewind(runtime: Runtime, _: Submission) -> None:
    await runtime.rewind(KEY)


@pytest.mark.parametrize(
    "stop", [_interrupt_key, _interrupt_turn, _supersede, _reset, _close, _switch, _rewind]
)
async def test_a_turn_that_a_person_stops_has_no_text_and_sends_none(
    path: Path, stop: Callable[[Runtime, Submission], Awaitable[None]]
) -> None:
    """F3: exactly the empty string; what it had said until then was sent, and nothing follows."""
    agent = Hanging()
    async with serving(path, agent) as runtime, runtime.events(KEY) as events:
        submission = await runtime.submit(KEY, STOPPED)
        await agent.begun.wait()
        await stop(runtime, submission)
        reply = await submission.reply()
        assert (reply.text, reply.outcome.kind) == ("", "interrupted")
        async for event in events:
            if (event.kind, event.turn_id) == ("turn.ended", submission.turn_id):
                assert event.text == ""
                break
        await runtime.ask(KEY, "go on")  # behind everything that the stop has brought about
        assert await _sent(runtime, submission.turn_id) == ["working"]
    async with serving(path, never) as runtime:
        again = await runtime.ask(KEY, STOPPED)
        assert (again.turn_id, again.text) == (submission.turn_id, "")
        assert await _sent(runtime, submission.turn_id) == ["working"]
    sound(path)


async def _take_back(_: Runtime, submission: Submission) -> None:
    assert await submission.interrupt()


async def _take_its_place(runtime: Runtime, _: Submission) -> None:
    latest = await runtime.submit(KEY, "this instead", busy="latest")
    assert latest.disposition == "superseded"


@pytest.mark.parametrize("stop", [_take_back, _take_its_place])
async def test_a_message_that_a_person_takes_back_has_no_text_and_sends_none(
    path: Path, stop: Callable[[Runtime, Submission], Awaitable[None]]
) -> None:
    """F3: its turn has not begun; nothing of it is in the transcript."""
    agent = Hanging()
    async with serving(path, agent) as runtime:
        await runtime.submit(KEY, STOPPED)
        await agent.begun.wait()
        waiting = await runtime.submit(KEY, FIRST)
        assert waiting.disposition == "queued"
        await stop(runtime, waiting)
        reply = await waiting.reply()
        assert (reply.text, reply.outcome.kind) == ("", "interrupted")
        assert await _sent(runtime, waiting.turn_id) == []
        assert runtime.interrupt(KEY)
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
        assert "hello" not in await texts(runtime)
        assert await _sent(runtime, waiting.turn_id) == []
    sound(path)


# F4: too long for the model ------------------------------------------------------------------

TOO_LONG = (
    "400 context length exceeded",
    "Error code: 400 - This model's maximum context length is 8192 tokens, you asked for 9000",
    "400 Bad Request: CONTEXT LENGTH EXCEEDED",
    "413 Request Entity Too Large",
    "prompt is too long: 200001 tokens > 200000 maximum",
    "too many tokens in the prompt",
    "413 payload",
    f"{LONG}: context length exceeded",
)


def _as_outcome(error: str) -> Any:
    return Outcome(kind="failed", error=error)


def _as_mapping(error: str) -> Any:
    return {"final_response": None, "failed": True, "error": error, "api_calls": 1}


def _as_exception(error: str) -> Any:
    return RuntimeError(error)


WAYS_TO_FAIL = (_as_outcome, _as_mapping, _as_exception)


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
@pytest.mark.parametrize("error", TOO_LONG)
async def test_a_context_that_is_too_long_offers_to_compact(
    path: Path, way: Callable[[str], Any], error: str
) -> None:
    """F4: whatever the history, and wherever in the error it stands; a reset is no advice."""
    reply = await everywhere(path, ending(way(error)))
    assert reply.outcome.kind == "failed"
    assert "context window" in reply.text
    assert "/compact" in reply.text
    assert "/reset" not in reply.text


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
@pytest.mark.parametrize("error", ["400", "Error code: 400", "HTTP 400 Bad Request"])
async def test_a_bare_400_behind_a_long_history_offers_to_compact(
    path: Path, way: Callable[[str], Any], error: str
) -> None:
    """F4: behind more than 50 messages, of whatever kind."""
    reply = await everywhere(path, ending(way(error)), history=51)
    assert "context window" in reply.text
    assert "/compact" in reply.text


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
@pytest.mark.parametrize(
    ("error", "history"),
    [("Error code: 400", 0), ("Error code: 400", 50), ("Error code: 4001", 51), ("500", 51)],
)
async def test_another_error_or_a_short_history_is_no_context_that_is_too_long(
    path: Path, way: Callable[[str], Any], error: str, history: int
) -> None:
    """F4, F5: 50 messages are not more than 50, and 4001 is not 400."""
    reply = await everywhere(path, ending(way(error)), history=history)
    assert "context window" not in reply.text
    assert "/compact" not in reply.text
    assert error in reply.text
    assert "/reset" in reply.text


async def test_what_was_summarised_does_not_count_as_history(path: Path) -> None:
    """F4: a bare 400 behind a compaction has another cause than the length."""
    async with serving(path, ending(RuntimeError("400"))) as runtime:
        await _talk(runtime, 52)
        await runtime.compact(KEY, "in short")
        assert "/reset" in (await runtime.ask(KEY, FIRST)).text


# F5: it failed -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
async def test_a_failure_says_its_error_and_offers_to_reset(
    path: Path, way: Callable[[str], Any]
) -> None:
    """F5."""
    reply = await everywhere(path, ending(way("the model is on holiday")))
    assert reply.outcome.kind == "failed"
    assert "the model is on holiday" in reply.text
    assert "/reset" in reply.text
    assert "/compact" not in reply.text


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
async def test_a_failure_says_three_hundred_characters_of_its_error(
    path: Path, way: Callable[[str], Any]
) -> None:
    """F5: of an exception its name is a part of them; characters, not bytes."""
    error = "§" * 299 + "¶" + "never shown"
    reply = await everywhere(path, ending(way(error)))
    if way is _as_exception:
        error = f"RuntimeError: {error}"
    assert error[:300] in reply.text
    assert error[:301] not in reply.text
    assert "/reset" in reply.text


async def test_a_turn_that_takes_too_long_says_so_and_offers_to_reset(path: Path) -> None:
    """F5: that the turn took too long is no word about the context (F4)."""
    brisk = Settings(sessions=SessionSettings(turn_deadline_s=0.05))
    async with serving(path, Hanging(), settings=brisk) as runtime:
        reply = await runtime.ask(KEY, STOPPED)
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "deadline")
        assert "0.05 s" in reply.text
        assert "/reset" in reply.text
        assert await _sent(runtime, reply.turn_id) == [reply.text, "working"]


WITHOUT_AN_ERROR: dict[str, Any] = {
    "failed outcome": Outcome(kind="failed"),
    "failed outcome without anything": Outcome(kind="failed", text=None, error=None, cause=None),
    "failed mapping": {"failed": True},
    "failed mapping without anything": {"failed": True, "final_response": None, "error": None},
    "failed with a blank error": {"failed": True, "error": " \n"},
    "partial outcome": Outcome(kind="partial", error=None),
    "partial mapping": {"partial": True, "final_response": None, "error": None},
    "partial with a blank error": {"partial": True, "error": ""},
    "an exception without a message": RuntimeError(),
    "a key error without a message": KeyError(),
    "a timeout": trio.TooSlowError(),
    "an exit": SystemExit(),
    "nothing": None,
    "an empty answer": Outcome(kind="answered", text=None, error=None),
    "an empty mapping": {"final_response": None, "error": None, "api_calls": None},
}


@pytest.mark.parametrize("name", WITHOUT_AN_ERROR)
async def test_what_is_missing_is_never_printed_as_none(path: Path, name: str) -> None:
    """F5: nor as nothing at all; an exception without a message has a name."""
    returned = WITHOUT_AN_ERROR[name]
    reply = await everywhere(path, ending(returned))
    assert reply.text.strip()
    assert not NONE.search(reply.text)
    if isinstance(returned, BaseException):
        assert type(returned).__name__ in reply.text


async def test_a_storage_that_is_down_advises_no_reset(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: the agent is told so and fails with it; its turn is stored when storage is back."""
    commits = Commits(monkeypatch)

    async def agent(turn: Turn) -> str:
        if turn.text != FIRST.text:
            return await echo(turn)
        with commits.holding():
            await turn.append("behind this nothing moves")
            while runtime.statistics().writer.traffic.state != "down":
                await trio.to_thread.run_sync(lambda: None)  # lets the loop go on
            await turn.append("refused")
        return "not reached"

    settings = Settings(writer=WriterSettings(down_after_s=0.05))
    async with serving(path, agent, settings=settings) as runtime:
        submission = await runtime.submit(KEY, FIRST)
        reply = await _patient_reply(submission)
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "storage")
        assert "storage is unavailable" in reply.text
        _advises_no_reset(reply)
        assert await _sent(runtime, reply.turn_id) == [reply.text]
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
    sound(path)


async def _patient_reply(submission: Submission) -> Reply:
    while True:
        try:
            return await submission.reply()
        except StorageUnavailableError:
            await trio.lowlevel.checkpoint()  # the turn goes on, and waiting again is allowed


def _advises_no_reset(reply: Reply) -> None:
    assert "/reset" not in reply.text
    assert "/compact" not in reply.text
    assert not NONE.search(reply.text)


async def test_a_unit_that_storage_refuses_advises_no_reset(path: Path) -> None:
    """F5: somebody else has written to the session meanwhile, and the agent is stopped for that."""

    async def agent(turn: Turn) -> None:
        await write_beside(runtime, turn.session_id)
        await turn.append("it does not follow what is stored")
        await trio.sleep_forever()

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, FIRST)
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "storage")
        assert "storage refused" in reply.text
        _advises_no_reset(reply)
        assert await _sent(runtime, reply.turn_id) == [reply.text]
        assert await texts(runtime) == ["hello", "from somewhere else"]
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
    sound(path)


async def write_beside(runtime: Runtime, session_id: str) -> None:
    """One message in the actor's name, behind its back."""
    writer: WriterRef = vars(runtime)["_surroundings"].writer
    route = await writer.read(lambda reader: reader.route(SessionKey(KEY)))
    row = await runtime.sessions.get(session_id)
    assert route is not None
    assert row is not None
    draft = Draft(uid=Uid(SystemIds().fresh()), role="user", text="from somewhere else")
    append = AppendMessages(session_id=row.id, base_seq=row.next_seq, messages=(draft,))
    guard = Guard(key=SessionKey(KEY), incarnation=route.incarnation, session_id=row.id)
    await writer.write(Unit((append,), (guard,)))


@pytest.mark.parametrize("returned", ["the answer", None])
async def test_the_end_of_a_turn_never_outlives_a_row_that_was_refused(
    tmp_path: Path, returned: str | None
) -> None:
    """F5, INV-4: somebody else's row stands where the turn's own was to stand."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str | None:
        await write_beside(runtime, turn.session_id)
        await turn.append("the row")
        return returned

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "storage")
        assert "the row" not in await texts(runtime)
        assert "the answer" not in await texts(runtime)
    sound(path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("400 context length exceeded"), "/compact"),
        (RuntimeError("context_length_exceeded"), "/compact"),
        (RuntimeError("the model is on holiday"), "holiday"),
        (StorageUnavailableError("disk full"), "try again later"),
    ],
    ids=["prose", "code", "other", "storage"],
)
async def test_an_error_that_comes_out_of_a_nursery_is_told_as_itself(
    tmp_path: Path, error: Exception, says: str
) -> None:
    """F4, F5: agents run their tools in nurseries."""

    async def agent(_: Turn) -> None:
        async def model() -> None:
            raise error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(model)

    async with serving(tmp_path / "chat.db", agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert says in reply.text
        assert "ExceptionGroup" not in reply.text
        assert ("/reset" in reply.text) == (says == "holiday")


async def test_an_error_that_was_raised_from_storages_advises_no_reset(tmp_path: Path) -> None:
    """F5."""

    async def agent(_: Turn) -> None:
        raise RuntimeError("could not save") from StorageUnavailableError("disk full")

    async with serving(tmp_path / "chat.db", agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.outcome.cause == "storage"
        assert "/reset" not in reply.text


async def test_what_our_own_edge_finds_too_large_is_not_the_models_context(tmp_path: Path) -> None:
    """F4, F5: and what the agent had to say of its failure is said."""
    big = {"a": "y" * 700_000, "b": "y" * 700_000}

    async def agent(turn: Turn) -> Outcome:
        if turn.text == "append":
            await turn.append({"role": "assistant", "content": "x", "meta": big})
        return Outcome(kind="failed", error="boom", detail=big)

    async with serving(tmp_path / "chat.db", agent) as runtime:
        for text in ("append", "return"):
            reply = await runtime.ask(KEY, text)
            assert reply.outcome.kind == "failed"
            assert "context window" not in reply.text
        assert "boom" in reply.text


class Stoppable:
    """A synchronous agent in a thread: it is told to stop, and comes to an end by itself."""

    def __init__(self, ends: Any) -> None:
        self.stop, self.begun = threading.Event(), trio.Event()
        self._ends = ends

    def interrupt(self) -> None:
        self.stop.set()

    async def run(self, _: Turn) -> Any:
        self.begun.set()
        await trio.to_thread.run_sync(self.stop.wait)
        if isinstance(self._ends, BaseException):
            raise self._ends
        return self._ends


ENDS = [
    None,
    {},
    {"interrupted": True, "final_response": None},
    {"failed": True, "error": "cancelled"},
    Outcome(kind="interrupted"),
    ConnectionError("stream closed"),
]


@pytest.mark.parametrize(
    "ends", ENDS, ids=["nothing", "empty", "flag", "failed", "outcome", "raised"]
)
@pytest.mark.parametrize("how", ["person", "shutdown"])
async def test_however_an_agent_ends_that_was_told_to_stop_it_was_interrupted(
    tmp_path: Path, ends: Any, how: str
) -> None:
    """F3, F7: silent for a person who asked for it, and never for a shutdown."""
    agent = Stoppable(ends)
    async with serving(tmp_path / "chat.db", agent) as runtime:
        submission = await runtime.submit(KEY, Inbound("go", reply_to="chat-1"))
        await agent.begun.wait()
        if how == "person":
            assert submission.interrupt()
        else:
            await runtime.shutdown()
        reply = await submission.reply()
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", how)
        assert (reply.text == "") == (how == "person")
        assert len(await runtime.deliveries.list()) == (how == "shutdown")


async def test_an_answer_that_was_finished_in_spite_of_an_interrupt_is_the_answer(
    tmp_path: Path,
) -> None:
    """F1."""
    agent = Stoppable("done anyway")
    async with serving(tmp_path / "chat.db", agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await agent.begun.wait()
        submission.interrupt()
        assert (await submission.reply()).text == "done anyway"


@pytest.mark.parametrize(
    "ends",
    [RuntimeError(None), {"failed": True, "error": "None"}, {"partial": True, "error": "None"}],
    ids=["raised", "failed", "partial"],
)
async def test_an_error_that_says_none_says_nothing(tmp_path: Path, ends: Any) -> None:
    """F5."""

    async def agent(_: Turn) -> Any:
        if isinstance(ends, BaseException):
            raise ends
        return ends

    async with serving(tmp_path / "chat.db", agent) as runtime:
        assert "None" not in (await runtime.ask(KEY, "go")).text


async def test_the_work_of_an_attempt_that_was_cut_counts_for_the_next(tmp_path: Path) -> None:
    """F6: its model calls are stored, so nobody says that nothing was done."""
    path, began = tmp_path / "chat.db", trio.Event()

    async def cut(turn: Turn) -> None:
        turn.usage(model="m", input=10)
        await turn.append(call("c1"))
        began.set()
        await trio.sleep_forever()

    async with open_runtime(path, agent=cut) as runtime:
        await runtime.submit(KEY, Inbound("go", id="u1"))
        await began.wait()
        await until(lambda: query(path, "SELECT count(*) FROM usage") == [(1,)])
        left = snapshot(path, path.with_name("left.db"))

    async def nothing(turn: Turn) -> None:
        assert turn.resumed

    async with serving(left, nothing) as runtime:
        reply = await runtime.ask(KEY, Inbound("go", id="u1"))
        assert "The work was done" in reply.text


# F6: nothing came back -----------------------------------------------------------------------


async def _counted(turn: Turn) -> None:
    turn.usage(model="m", input=10, output=1)


async def _counted_and_blank(turn: Turn) -> str:
    turn.usage(model="m", input=10, output=1)
    return " \n"


async def _worked(turn: Turn) -> None:
    await turn.append(call("c1"), result("c1"))
    turn.usage(model="m")


async def _counted_itself(turn: Turn) -> dict[str, Any]:
    turn.usage(model="m")
    return {"final_response": None, "api_calls": 0}


DONE: dict[str, Any] = {
    "usage": _counted,
    "usage and a blank": _counted_and_blank,
    "usage and a tool call": _worked,
    "usage, though the mapping says none": _counted_itself,
    "mapping": ending({"final_response": None, "api_calls": 3}),
    "mapping with an empty text": ending({"final_response": "", "api_calls": 1, "error": None}),
    "outcome": ending(Outcome(kind="answered", detail={"api_calls": 2})),
}
NOTHING: dict[str, Any] = {
    "nothing": None,
    "empty": "",
    "blank": " \n\t",
    "mapping": {"final_response": None, "api_calls": 0},
    "empty mapping": {},
    "outcome": Outcome(kind="answered"),
    "outcome with a blank": Outcome(kind="answered", text="\u2003"),
}


@pytest.mark.parametrize("way", DONE)
async def test_work_of_which_nothing_came_back_leaves_a_notice(path: Path, way: str) -> None:
    """F6: it does not say that nothing was done, because that would be done twice."""
    reply = await everywhere(path, DONE[way])
    assert reply.outcome.kind == "answered"
    assert "work was done" in reply.text
    assert "not processed" not in reply.text


@pytest.mark.parametrize("way", NOTHING)
async def test_a_turn_in_which_nothing_was_done_may_be_sent_again(path: Path, way: str) -> None:
    """F6: that it was not processed, and what can be done about it."""
    reply = await everywhere(path, ending(NOTHING[way]))
    assert reply.outcome.kind == "answered"
    assert "not processed" in reply.text
    assert "send it again" in reply.text


@pytest.mark.parametrize(
    ("detail", "done"),
    [
        ({"api_calls": 3.0}, True),
        ({"api_calls": -1}, False),
        ({"api_calls": "three"}, False),
        ({"api_calls": [1]}, False),
    ],
)
async def test_work_is_a_number_above_zero_whatever_an_agent_puts_there(
    path: Path, detail: dict[str, Any], *, done: bool
) -> None:
    """F6: no odd detail makes work of nothing, or ends a turn in another way."""
    reply = await everywhere(path, ending(Outcome(kind="answered", detail=detail)))
    assert ("work was done" in reply.text) == done
    assert ("not processed" in reply.text) != done
    reply = await everywhere(path.with_name("mapping.db"), ending(detail))
    assert ("work was done" in reply.text) == done


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}], "in\nparts"),
        (Shout("aloud"), "aloud"),
        ([], None),
        ({}, None),
        (False, None),
    ],
)
async def test_what_a_mapping_gives_as_its_answer_is_words(
    path: Path, given: Any, text: str | None
) -> None:
    """F1, F6: nobody is sent what only programmers can read."""
    reply = await everywhere(path, ending({"final_response": given}))
    if text is None:
        assert "not processed" in reply.text
    else:
        assert reply.text == text
        assert type(reply.text) is str


@pytest.mark.parametrize("given", [0, 1.5, b"bytes", {"a": 1}, [1], object()])
async def test_an_answer_that_is_no_text_fails_its_turn(path: Path, given: Any) -> None:
    """F5: rather than to show its `repr`."""
    reply = await everywhere(path, ending({"final_response": given}))
    assert reply.outcome.kind == "failed"
    assert "final_response" in reply.text


# The order -----------------------------------------------------------------------------------


def check_text(reply: Reply, kind: str, text: str | None, error: str | None, *, work: bool) -> None:
    """The contract's order, once more: text, failed, interrupted, partial, silent, empty."""
    shown = reply.text
    assert not NONE.search(shown)
    if text is not None and text.strip():
        assert shown == text
        return
    assert bool(shown.strip()) == (kind not in ("interrupted", "silent"))
    assert shown == "" or shown.strip()
    assert ("/reset" in shown) == (kind == "failed")
    assert ("not complete" in shown) == (kind == "partial")
    assert ("not processed" in shown) == (kind == "answered" and not work)
    assert ("work was done" in shown) == (kind == "answered" and work)
    if kind in ("failed", "partial", "answered") and error:
        assert error in shown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [None, "", " \n", " the text "])
@pytest.mark.parametrize("error", [None, "", "boom"])
async def test_one_text_follows_from_an_outcome(
    path: Path, kind: OutcomeKind, text: str | None, error: str | None
) -> None:
    """F1, F2, F3, F5, F6: the same for every reader, and empty only if somebody wants it so."""
    reply = await everywhere(path, ending(Outcome(kind=kind, text=text, error=error)))
    assert reply.outcome.kind == kind
    check_text(reply, kind, text, error, work=False)


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("partial", [False, True])
async def test_one_text_follows_from_the_mapping_that_existing_agents_return(
    path: Path, *, failed: bool, interrupted: bool, partial: bool
) -> None:
    """F1, F2, F3, F5, F6: the gravest of what its flags say decides."""
    flags = {"failed": failed, "interrupted": interrupted, "partial": partial}
    kind = next((name for name, flag in flags.items() if flag), "answered")
    rest: Iterable[Any] = product((None, "", " the text "), (None, "boom"), (None, 0, 3))
    cases: list[dict[str, Any]] = [
        {**flags, "final_response": text, "error": error, "api_calls": calls}
        for text, error, calls in rest
    ]

    async def agent(turn: Turn) -> dict[str, Any]:
        return cases[int(turn.text)]

    said = [Inbound(str(n), id=f"m{n}", reply_to="chat-1") for n in range(len(cases))]
    replies: list[Reply] = []
    async with serving(path, agent) as runtime:
        for inbound, case in zip(said, cases, strict=True):
            reply = await runtime.ask(KEY, inbound)
            assert reply.outcome.kind == kind, case
            text, error = case["final_response"], case["error"]
            check_text(reply, kind, text, error, work=bool(case["api_calls"]))
            sent = await _sent(runtime, reply.turn_id)
            assert sent == ([reply.text] if reply.text else []), case
            replies.append(reply)
    async with serving(path, never) as runtime:
        for inbound, reply in zip(said, replies, strict=True):
            assert (await runtime.ask(KEY, inbound)).text == reply.text
    sound(path)


# F7: a crash ---------------------------------------------------------------------------------


async def in_another_process(*arguments: str) -> int:
    """Run `killed_answering.py`; its exit code, negative for a signal."""
    command = [sys.executable, "-m", "tests.contract.killed_answering", *arguments]
    return (await trio.run_process(command, cwd=ROOT, check=False)).returncode


async def cut(path: Path, how: str = "at once") -> str:
    """A process is killed in the middle of the turn that answers `FIRST`; the turn's id."""
    assert await in_another_process(str(path), "answer", how) == -signal.SIGKILL
    ((turn_id, state),) = query(path, "SELECT id, state FROM turns WHERE attempt > 0")
    assert state == "running"
    assert query(path, "SELECT count(*) FROM deliveries") == [(0,)]
    return str(turn_id)


class Chats:
    """A platform: what was sent, and to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, str]] = []
        self.sources = {"test": SourcePolicy(deliver=self.deliver)}

    def deliver(self, delivery: Delivery) -> None:
        self.sent.append((delivery.target["to"], delivery.text))


FACTS = "SELECT t.state, count(d.n) FROM turns t LEFT JOIN deliveries d ON d.turn = t.n GROUP BY 1"


@pytest.mark.parametrize("how", ["at once", "open call"])
async def test_a_crash_leaves_a_visible_notice_in_the_transaction_that_marks_the_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """F7: no commit shows a marked turn without its notice, or a notice before the mark."""
    turn_id = await cut(path, how)
    commits, seen = Commits(monkeypatch), list[tuple[Any, ...]]()
    commits.after = lambda: seen.extend(query(path, FACTS))
    async with serving(path, never) as runtime:
        commits.after = None
        assert set(seen) == {("running", 0), ("ended", 1)}
        turn = await runtime.sessions.turn(turn_id)
        assert turn.outcome is not None
        assert (turn.outcome.kind, turn.outcome.cause) == ("interrupted", "crash")
        (notice,) = await runtime.deliveries.list(key=KEY)
        assert "cut off" in notice.text
        assert "send it again" in notice.text
        assert (notice.kind, notice.turn_id, notice.target) == ("reply", turn_id, {"to": "chat-1"})
        assert (notice.source, notice.state) == ("test", "pending")
    sound(path)


async def test_the_notice_of_a_crash_is_sent_once_by_whoever_sends(path: Path) -> None:
    """F7: it waits for that, over restarts if need be."""
    await cut(path)
    async with serving(path, never) as runtime:
        (notice,) = await runtime.deliveries.list(key=KEY)
        assert notice.state == "pending"
    chats, late = Chats(), Chats()
    async with serving(path, never, sources=chats.sources) as runtime:
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        assert chats.sent == [("chat-1", notice.text)]
        (sent,) = await runtime.deliveries.list(key=KEY)
        assert (sent.id, sent.state) == (notice.id, "sent")
    async with serving(path, never, sources=late.sources) as runtime:
        assert len(await runtime.deliveries.list(key=KEY)) == 1
    assert (len(chats.sent), late.sent) == (1, [])
    sound(path)


async def test_a_gateway_that_is_there_at_the_next_start_sends_the_notice(path: Path) -> None:
    """F7."""
    await cut(path)
    chats = Chats()
    async with serving(path, never, sources=chats.sources) as runtime:
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        (notice,) = await runtime.deliveries.list(key=KEY)
    assert chats.sent == [("chat-1", notice.text)]


async def test_whoever_sends_a_message_again_that_a_crash_cut_gets_its_answer(path: Path) -> None:
    """F7, A7: behind the notice; the turn is resumed once, and its answer stands from then on."""
    turn_id = await cut(path, "open call")
    chats = Chats()
    async with serving(path, echo, sources=chats.sources) as runtime:
        reply = await runtime.ask(KEY, FIRST)
        assert (reply.text, reply.turn_id) == ("re: hello", turn_id)
        await until(lambda: len(chats.sent) == 2)
        assert [chat for chat, _ in chats.sent] == ["chat-1", "chat-1"]
        assert "cut off" in chats.sent[0][1]
        assert chats.sent[1][1] == "re: hello"
        assert shape(await stored(runtime)) == [
            "user hello",
            "call c1",
            "result c1",
            "assistant re: hello",
        ]
        await _agrees(runtime, reply)
    async with serving(path, never) as runtime:
        await _agrees(runtime, reply)
        assert len(await runtime.deliveries.list(key=KEY)) == 2
    sound(path)


@pytest.mark.parametrize("how", ["at once", "open call"])
async def test_a_turn_that_is_resumed_behind_a_crash_answers_once_and_leaves_no_notice(
    path: Path, how: str
) -> None:
    """F7: to the place from which it was asked."""
    turn_id = await cut(path, how)
    chats, late = Chats(), Chats()
    async with serving(path, echo, settings=RESUME, sources=chats.sources) as runtime:
        await until(lambda: runtime.statistics().deliveries.sent == 1)
        (delivery,) = await runtime.deliveries.list(key=KEY)
        assert (delivery.turn_id, delivery.text) == (turn_id, "re: hello")
        reply = await runtime.ask(KEY, FIRST)
        assert (reply.turn_id, reply.text) == (turn_id, "re: hello")
        assert (await runtime.sessions.turn(turn_id)).attempt == 2
    async with serving(path, never, settings=RESUME, sources=late.sources) as runtime:
        await _agrees(runtime, reply)
        assert len(await runtime.deliveries.list(key=KEY)) == 1
    assert (chats.sent, late.sent) == ([("chat-1", "re: hello")], [])
    sound(path)


@pytest.mark.parametrize("policy", ["mark", "resume"])
async def test_whoever_has_joined_a_turn_that_a_crash_cut_hears_of_it_as_well(
    path: Path, policy: Any
) -> None:
    """F7: their message was steered into it, from another place; each place is told once."""
    await cut(path, "joined")
    settings = Settings(sessions=SessionSettings(recovery=policy))
    chats = Chats()
    async with serving(path, echo, settings=settings, sources=chats.sources) as runtime:
        await until(lambda: len(chats.sent) == 2)
        assert sorted(chat for chat, _ in chats.sent) == ["chat-1", "chat-2"]
        (said,) = {text for _, text in chats.sent}
        assert ("cut off" in said) == (policy == "mark")
        replies = [await runtime.ask(KEY, one) for one in (FIRST, JOINED)]
        assert [reply.text for reply in replies] == ["re: hello\nme too"] * 2
    sound(path)


@pytest.mark.parametrize("policy", ["mark", "resume"])
async def test_a_turn_that_a_crash_has_cut_too_often_is_given_up_visibly(
    path: Path, policy: Any
) -> None:
    """F7: whatever the policy, and it offers to reset (F5)."""
    turn_id = await cut(path)
    sessions = SessionSettings(recovery=policy, turn_tries_max=1)
    async with serving(path, never, settings=Settings(sessions=sessions)) as runtime:
        (notice,) = await runtime.deliveries.list(key=KEY)
        assert (notice.turn_id, notice.target) == (turn_id, {"to": "chat-1"})
        assert "cut off" in notice.text
        assert "/reset" in notice.text
        reply = await runtime.ask(KEY, FIRST)
        assert (reply.text, reply.outcome.cause) == (notice.text, "dead_letter")
        assert len(await runtime.deliveries.list(key=KEY)) == 1
    sound(path)


@pytest.mark.parametrize("policy", ["mark", "resume"])
@pytest.mark.slow
async def test_a_recovery_that_is_killed_leaves_one_text_for_each_place_in_the_end(
    path: Path, policy: str
) -> None:
    """F7, INV-19: killed around every commit of it, one after the other, on the same file."""
    turn_id = await cut(path, "joined")
    code, kills = -signal.SIGKILL, 0
    points = (f"{where} {n}" for n in range(1, 20) for where in ("before", "after"))
    while code == -signal.SIGKILL:
        code = await in_another_process(str(path), "recover", policy, next(points))
        kills += code == -signal.SIGKILL
        facts = (
            "SELECT t.state, count(d.n) FROM turns t LEFT JOIN deliveries d ON d.turn = t.n "
            "WHERE t.id = ?"
        )
        assert query(path, facts, turn_id) in ([("running", 0)], [("ended", 2)])
    assert code == 0
    assert kills >= 4
    async with serving(path, echo) as runtime:
        posted = await runtime.deliveries.list(key=KEY)
        assert len({str(delivery.target) for delivery in posted}) == len(posted) == 2
        assert len({delivery.text for delivery in posted}) == 1
        assert ("cut off" in posted[0].text) == (policy == "mark")
        assert (await stored(runtime))[0].text == "hello"
    sound(path)


async def test_an_actor_that_crashes_leaves_a_visible_text_in_the_transaction_that_ends_the_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: the process lives on; whoever waits gets that text too."""
    agent, chats = Hanging(), Chats()
    commits, seen = Commits(monkeypatch), list[tuple[Any, ...]]()

    async def crash() -> None:
        raise RuntimeError("a defect of ours")

    async with serving(path, agent, sources=chats.sources) as runtime:
        submission = await runtime.submit(KEY, Inbound("stop me", id="m1", reply_to="chat-1"))
        await agent.begun.wait()
        await until(lambda: len(chats.sent) == 1)
        commits.after = lambda: seen.extend(query(path, FACTS))
        for session in vars(runtime)["_directory"].sessions():
            session.spawn(crash)
        reply = await submission.reply()
        commits.after = None
        assert set(seen) == {("running", 1), ("ended", 2)}
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "crash")
        assert "a defect of ours" in reply.text
        await until(lambda: len(chats.sent) == 2)
        assert chats.sent == [("chat-1", "working"), ("chat-1", reply.text)]
        assert (await runtime.ask(KEY, "go on")).text == "re: go on"
    sound(path)


# F7: a shutdown ------------------------------------------------------------------------------


class Passing(Exception):
    """Ends the block of a runtime from inside."""


async def _leave(_: Runtime, __: trio.CancelScope) -> None:
    """The block comes to its end."""


async def _shut_down(runtime: Runtime, _: trio.CancelScope) -> None:
    assert await runtime.shutdown()


async def _fail(_: Runtime, __: trio.CancelScope) -> None:
    raise Passing


async def _cancel(_: Runtime, scope: trio.CancelScope) -> None:
    scope.cancel()
    await trio.sleep_forever()


WAYS_TO_END = (_leave, _shut_down, _fail, _cancel)


class Told:
    """Who waits for a reply and who listens, beside the runtime."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.heard: list[str | None] = []

    async def wait(self, submission: Submission) -> None:
        self.replies.append(await submission.reply())

    async def listen(self, runtime: Runtime, task_status: trio.TaskStatus[None]) -> None:
        async with runtime.events(KEY) as events:
            task_status.started()
            self.heard += [event.text async for event in events if event.kind == "turn.ended"]


async def end_in_the_middle(
    path: Path,
    end: Callable[[Runtime, trio.CancelScope], Awaitable[None]],
    sources: dict[str, SourcePolicy] | None = None,
) -> Reply:
    """A runtime ends while its agent works on `STOPPED`; everybody is told the same."""
    agent, told = Hanging(), Told()
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            try:
                async with serving(path, agent, sources=sources) as runtime:
                    await nursery.start(told.listen, runtime)
                    submission = await runtime.submit(KEY, STOPPED)
                    nursery.start_soon(told.wait, submission)
                    await agent.begun.wait()
                    await end(runtime, scope)
            except Passing:
                pass
    (reply,) = told.replies
    assert told.heard == [reply.text]
    return reply


@pytest.mark.parametrize("end", WAYS_TO_END)
async def test_a_shutdown_in_the_middle_of_a_turn_leaves_a_visible_text(
    path: Path, end: Callable[[Runtime, trio.CancelScope], Awaitable[None]]
) -> None:
    """F7: however the runtime ends; for everybody, and for good."""
    reply = await end_in_the_middle(path, end)
    assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "shutdown")
    assert "cut off" in reply.text
    assert "send it again" in reply.text
    async with serving(path, never) as runtime:
        assert await _sent(runtime, reply.turn_id) == [reply.text, "working"]
        again = await runtime.ask(KEY, STOPPED)
        assert (again.turn_id, again.text) == (reply.turn_id, reply.text)
        assert await _sent(runtime, reply.turn_id) == [reply.text, "working"]
    sound(path)


@pytest.mark.parametrize("end", WAYS_TO_END)
async def test_a_shutdown_in_the_middle_of_a_turn_sends_its_text_before_it_ends(
    path: Path, end: Callable[[Runtime, trio.CancelScope], Awaitable[None]]
) -> None:
    """F7: and the next start sends nothing again."""
    chats, late = Chats(), Chats()
    reply = await end_in_the_middle(path, end, chats.sources)
    assert chats.sent == [("chat-1", "working"), ("chat-1", reply.text)]
    async with serving(path, never, sources=late.sources) as runtime:
        states = {delivery.state for delivery in await runtime.deliveries.list(key=KEY)}
        assert states == {"sent"}
    assert late.sent == []
    sound(path)


async def test_the_text_of_a_shutdown_is_in_the_transaction_that_ends_the_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: no commit shows the one without the other."""
    commits, seen = Commits(monkeypatch), list[tuple[Any, ...]]()

    async def watch(_: Runtime, __: trio.CancelScope) -> None:
        await until(lambda: query(path, "SELECT count(*) FROM deliveries") == [(1,)])
        commits.after = lambda: seen.extend(query(path, FACTS))

    await end_in_the_middle(path, watch)
    assert set(seen) <= {("running", 1), ("ended", 2)}
    assert ("ended", 2) in seen
