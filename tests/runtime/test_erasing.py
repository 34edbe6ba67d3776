"""Erasing a user: what one person has said is nowhere any more, and nobody else loses anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import Inbound, InvalidContentError, Runtime, Turn, open_runtime, open_sqlite
from onepen.actors.intake import Intake
from onepen.runtime.testing.invariants import check_database

from ..contract.agents import current, query, row, sound, stored
from ..contract.test_g_cleanup import Clock
from .test_cleanup import put_blob

if TYPE_CHECKING:
    from pathlib import Path

    from onepen.storage.identity import BlobId

GROUP, OWN = "tg:group:7", "tg:dm:ann"

# Words that begin differently: an index keeps words behind a common beginning.
SECRETS = {
    name: f"{letter}{name}zqxv"
    for letter, name in zip(
        "abcdefghijklmnopqrs",
        (
            "text",
            "part",
            "meta",
            "blob",
            "reply",
            "title",
            "pending",
            "answer",
            "effect",
            "question",
            "decision",
            "timer",
            "fired",
            "waiting",
            "call",
            "result",
            "group",
            "groupmeta",
            "platform",
        ),
        strict=True,
    )
}


class Agent:
    """It does with a message what the message says."""

    async def run(self, turn: Turn) -> Any:
        text = turn.text or ""
        if "ask" in text:
            await turn.ask_user(SECRETS["question"], key="may-i")
        if "act" in text:
            await turn.effect(_effect, key="mail")
        if "wait" in text:
            await trio.sleep_forever()
        if "tool" in text:
            call = {"id": "1", "type": "function"}
            function = {"name": "look", "arguments": SECRETS["call"]}
            return {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**call, "function": function}]},
                    {"role": "tool", "tool_call_id": "1", "content": SECRETS["result"]},
                    {"role": "assistant", "content": "done"},
                ],
                "final_response": "done",
            }
        return SECRETS["answer"] if "own" in text else "an answer for everybody"


async def _effect() -> str:
    return SECRETS["effect"]


def said_by_ann(name: str, blob: BlobId | None = None, **fields: Any) -> Inbound:
    text = f"{SECRETS[name]} {fields.pop('more', '')}"
    return Inbound(text, user="ann", blobs=() if blob is None else (blob,), **fields)


async def tell_secrets(runtime: Runtime, blob: BlobId) -> None:
    """Everywhere where something of a person can be stored."""
    own = said_by_ann(
        "text",
        blob,
        more="own tool act",
        meta={"m": SECRETS["meta"]},
        reply_to={"chat": SECRETS["reply"]},
        platform_id=SECRETS["platform"],
        id="first",
    )
    await runtime.ask(OWN, own)
    await runtime.set_title(OWN, SECRETS["title"])
    await runtime.ask(OWN, Inbound(parts=({"type": "text", "text": SECRETS["part"]},), user="ann"))
    await runtime.ask(OWN, Inbound("own", user="ann"))
    asked = await runtime.submit(OWN, Inbound("ask", user="ann"))
    with trio.fail_after(5):
        while not await runtime.approvals.list():
            await trio.testing.wait_all_tasks_blocked(0.001)
    await runtime.approvals.answer(OWN, SECRETS["decision"], by="ann")
    await asked.reply()
    await runtime.submit(OWN, said_by_ann("timer"), at=4_000_000_000)
    await runtime.set_title("tg:dm:nobody", SECRETS["pending"])
    # In a group the others must lose nothing.
    await runtime.ask(GROUP, Inbound("hello from bob", user="bob", id="b1"))
    await runtime.ask(
        GROUP, said_by_ann("group", blob, more="act", meta={"m": SECRETS["groupmeta"]}, id="a1")
    )
    await runtime.ask(GROUP, Inbound("bob again", user="bob", id="b2"))
    await runtime.submit(GROUP, Inbound("wait", user="bob", id="b3"))
    await runtime.submit(GROUP, said_by_ann("waiting", id="a2"))


def leftovers(path: Path) -> list[str]:
    """The secrets that the bytes of the closed file still hold."""
    content = path.read_bytes()
    return [name for name, secret in SECRETS.items() if secret[1:].encode() in content]


def tidy(path: Path) -> None:
    """What the engine does when it is idle, until there is nothing left to do."""
    engine = open_sqlite(path, Clock())
    while engine.maintain(idle=True):
        pass
    engine.close()


async def test_nothing_that_a_user_has_said_is_left_in_the_file(tmp_path: Path) -> None:
    """Not in rows, not in the index, not in blobs, not in free pages, not in the log."""
    path = tmp_path / "chat.db"
    blob = put_blob(path, SECRETS["blob"].encode() * 2_000, 3)
    async with open_runtime(path, agent=Agent()) as runtime:
        await tell_secrets(runtime, blob)
    tidy(path)
    planted = set(leftovers(path))
    assert planted == SECRETS.keys() - {"fired"}
    async with open_runtime(path, agent=Agent()) as runtime:
        report = await runtime.erase("ann")
    assert (report.sessions_deleted, report.sessions_blanked) == (1, 1)
    assert report.timers_removed == 1
    tidy(path)
    # The title waits for a session of another key, in which nobody has said anything.
    assert leftovers(path) == ["pending"]
    sound(path)


async def test_the_others_of_a_group_lose_nothing(tmp_path: Path) -> None:
    """Rows keep their seq and uid; only that user's are blank, in every generation; again: none."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=Agent()) as runtime:
        await runtime.ask(GROUP, Inbound("hello from bob " * 9, user="bob"))
        await runtime.ask(GROUP, said_by_ann("group"))
        history = await stored(runtime, GROUP)
        upto = history[1].uid
        await runtime.rotate(GROUP, "in short", upto=upto)
        await runtime.ask(GROUP, Inbound("bob again", user="bob"))
        before = await stored(runtime, GROUP)
        assert any(m.carried and m.user == "ann" for m in before)
        report = await runtime.erase("ann")
        assert (report.sessions_deleted, report.sessions_blanked) == (0, 2)
        assert report.rows_blanked == 2
        after = await stored(runtime, GROUP)
        assert [(m.seq, m.uid, m.role) for m in after] == [(m.seq, m.uid, m.role) for m in before]
        for old, new in zip(before, after, strict=True):
            if old.user == "ann":
                assert (new.text, new.user, new.erased) == ("", None, True)
            else:
                assert new == old
        again = await runtime.erase("ann")
        assert (again.sessions_deleted, again.rows_blanked, again.turns_blanked) == (0, 0, 0)
        assert (await runtime.sessions.search(SECRETS["group"])).hits == ()
        with pytest.raises(InvalidContentError):
            await runtime.erase("")
    sound(path)


async def test_memory_forgets_as_well(tmp_path: Path) -> None:
    """H3, H4: the transcript is read again, a warm agent is rebuilt, and events are a gap."""
    seen: list[list[str | None]] = []
    built: list[object] = []

    def factory(_: Any) -> Any:
        built.append(object())

        async def agent(turn: Turn) -> str:
            seen.append([message.text for message in turn.history])
            return "ok"

        return agent

    async with open_runtime(tmp_path / "chat.db", factory=factory) as runtime:
        await runtime.ask(GROUP, Inbound("hello", user="bob"))
        await runtime.ask(GROUP, Inbound("my secret", user="ann"))
        session_id = await current(runtime, GROUP)
        revision = (await row(runtime, session_id)).revision
        assert len(built) == 1
        async with runtime.events(GROUP, after=(0, 0)) as events:
            await runtime.erase("ann")
            while (event := await events.receive()).kind != "gap":
                assert event.kind != "dropped"
        assert (await row(runtime, session_id)).revision > revision
        await runtime.ask(GROUP, Inbound("and now?", user="bob"))
        assert seen[-1] == ["hello", "ok", "", "ok"]
        assert len(built) == 2
        async with runtime.events(GROUP, after=(0, 0)) as events:
            texts = list[str | None]()
            while (event := await events.receive()).kind != "turn.ended":
                texts.append(event.text or (event.message.text if event.message else None))
            assert "my secret" not in texts


async def test_a_running_turn_writes_nothing_back(tmp_path: Path) -> None:
    """It is interrupted and stored first; what waits of the user never gets a turn."""
    path, started = tmp_path / "chat.db", trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "wait":
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await turn.append(f"I have read {turn.history[-1].text}")
        return "ok"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(GROUP, Inbound("hello", user="bob"))
        await runtime.ask(GROUP, Inbound("my secret", user="ann"))
        running = await runtime.submit(GROUP, Inbound("wait", user="ann"))
        await started.wait()
        waiting = await runtime.submit(GROUP, Inbound("another secret", user="ann", id="w"))
        bobs = await runtime.submit(GROUP, Inbound("I still wait", user="bob", id="b"))
        with trio.fail_after(10):  # it does not wait for the turn
            report = await runtime.erase("ann")
        assert report.messages_withdrawn == 1
        assert (await running.reply()).outcome.kind == "interrupted"
        assert (await waiting.reply()).outcome.kind == "interrupted"
        assert (await bobs.reply()).text == "ok"
        texts = [m.text for m in await stored(runtime, GROUP)]
        assert "my secret" not in texts
        assert "wait" not in texts
        assert "I still wait" in texts
        assert (await runtime.turns.list()) == ()
    assert query(path, "SELECT count(*) FROM inbox WHERE body IS NOT NULL") == [(0,)]
    sound(path)


@pytest.mark.parametrize("cut", range(1, 8))
async def test_erasing_again_finishes_what_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """INV-19: stopped before any of its units, with the process gone; then asked for once more."""
    path = tmp_path / "chat.db"
    blob = put_blob(path, SECRETS["blob"].encode() * 2_000, 3)
    async with open_runtime(path, agent=Agent()) as runtime:
        await tell_secrets(runtime, blob)
    posted, post = 0, Intake.post

    async with open_runtime(path, agent=Agent()) as runtime:
        with trio.CancelScope() as scope:

            def counted(intake: Any, unit: Any, *arguments: Any, **options: Any) -> Any:
                nonlocal posted
                kinds = {type(command).__name__ for command in unit.commands}
                if kinds & {"EraseWork", "EraseMessages", "DeleteSession", "PurgeSession"}:
                    posted += 1
                    if posted == cut:
                        scope.cancel()
                return post(intake, unit, *arguments, **options)

            monkeypatch.setattr(Intake, "post", counted)
            await runtime.erase("ann")
        monkeypatch.undo()
    assert check_database(path) == []
    async with open_runtime(path, agent=Agent()) as runtime:
        await runtime.erase("ann")
        report = await runtime.erase("ann")
        assert (report.sessions_deleted, report.rows_blanked, report.turns_blanked) == (0, 0, 0)
    tidy(path)
    assert set(leftovers(path)) <= {"pending", "blob"}
    sound(path)
