"""Contract D: a session's row appears with its first message; ids may be chosen."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
import trio

from onepen import (
    ConflictError,
    InvalidContentError,
    Runtime,
    SessionHeldError,
    Turn,
    open_runtime,
)

if TYPE_CHECKING:
    from pathlib import Path


async def agent(turn: Turn) -> str:
    return f"re: {turn.text}"


async def texts(runtime: Runtime, session_id: str) -> list[str | None]:
    return [message.text for message in await runtime.sessions.transcript(session_id)]


# D1 ------------------------------------------------------------------------------------------


async def test_opening_a_session_writes_a_route_and_no_row(tmp_path: Path) -> None:
    """D1: the row appears with the first message, and not before, over a restart as well."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        session_id = await runtime.open_session("test:1", user="ada", model="large")
        assert await runtime.sessions.get(session_id) is None
        assert await runtime.sessions.current("test:1") == session_id
        assert await runtime.open_session("test:1") == session_id
        assert (await runtime.sessions.list()).sessions == ()
    async with open_runtime(path, agent=agent) as runtime:
        assert await runtime.sessions.get(session_id) is None
        assert await runtime.sessions.current("test:1") == session_id
        assert await runtime.open_session("test:1") == session_id
        reply = await runtime.ask("test:1", "hello")
        assert reply.session_id == session_id
        row = await runtime.sessions.get(session_id)
        assert row is not None
        assert (row.key, row.message_count) == ("test:1", 2)


async def test_the_row_is_there_when_the_first_message_is(tmp_path: Path) -> None:
    """D1: with what was said at the opening, before the agent is called."""
    runtimes: list[Runtime] = []
    found: list[object] = []

    async def look(turn: Turn) -> str:
        row = await runtimes[0].sessions.get(turn.session_id)
        assert row is not None
        found.append((row.id, row.user, row.model, row.message_count))
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=look) as runtime:
        runtimes.append(runtime)
        await runtime.open_session("test:1", "chosen", user="ada", model="large")
        assert await runtime.sessions.get("chosen") is None
        await runtime.ask("test:1", "hello")
        assert found == [("chosen", "ada", "large", 1)]


async def test_setting_a_title_writes_no_row_and_is_durable(tmp_path: Path) -> None:
    """D1: a pending title is kept durably with the key, with or without a session of its own."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        session_id = await runtime.open_session("test:opened", title="One")
        assert await runtime.set_title("test:bare", "Two")
        assert await runtime.sessions.get(session_id) is None
        assert (await runtime.sessions.list()).sessions == ()
        assert await runtime.sessions.pending_title("test:opened") == "One"
        assert await runtime.sessions.pending_title("test:bare") == "Two"
    async with open_runtime(path, agent=agent) as runtime:
        assert (await runtime.sessions.list()).sessions == ()
        assert await runtime.sessions.current("test:opened") == session_id
        assert await runtime.sessions.pending_title("test:opened") == "One"
        assert await runtime.sessions.pending_title("test:bare") == "Two"
        await runtime.ask("test:bare", "hello")
        bare_id = await runtime.open_session("test:bare")
        row = await runtime.sessions.get(bare_id)
        assert row is not None
        assert row.title == "Two"


async def test_no_operation_on_a_lazy_session_makes_a_row(tmp_path: Path) -> None:
    """D1: switching, resetting and closing are no messages either."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        ids = [await runtime.open_session("test:1")]
        ids.append(await runtime.switch("test:1", "reserved"))
        ids.append(await runtime.reset("test:1"))
        closed = await runtime.close_session("test:1")
        assert (closed.ended, closed.failures) == (False, {})
        assert [await runtime.sessions.get(one) for one in ids] == [None] * 3
        assert (await runtime.sessions.list()).sessions == ()
        assert await runtime.sessions.current("test:1") == ids[-1]


@pytest.mark.parametrize("field", ["user", "model"])
async def test_what_could_not_be_stored_with_the_row_is_refused_at_the_opening(
    tmp_path: Path, field: str
) -> None:
    """D1: what is kept for the row that is to come must not stand in its way."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        with pytest.raises(InvalidContentError):
            if field == "user":
                await runtime.open_session("test:1", user="x" * 5000)
            else:
                await runtime.open_session("test:1", model="\ud800")
        # Either way: the key must be of use afterwards.
        assert (await runtime.ask("test:1", "hello")).text == "re: hello"


# D2 ------------------------------------------------------------------------------------------


async def test_a_caller_may_choose_the_session_id(tmp_path: Path) -> None:
    """D2: the chosen id is the key's session, from the first message on."""
    longest = "Az09_-" + "x" * 58
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        for n, chosen in enumerate(("a", "-", longest)):
            assert await runtime.open_session(f"test:{n}", chosen) == chosen
            assert (await runtime.ask(f"test:{n}", "hello")).session_id == chosen
            assert await texts(runtime, chosen) == ["hello", "re: hello"]


async def test_creating_the_same_session_again_changes_nothing(tmp_path: Path) -> None:
    """D2: for the same key it is no error, lazy or stored, before and after a restart."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        for _ in range(2):
            assert await runtime.open_session("test:1", "mine", user="ada") == "mine"
        await runtime.ask("test:1", "hello")
        row, writes = await runtime.sessions.get("mine"), runtime.statistics().route_writes
        assert await runtime.open_session("test:1", "mine", user="bob", model="m") == "mine"
        assert await runtime.sessions.get("mine") == row
        assert runtime.statistics().route_writes == writes
    async with open_runtime(path, agent=agent) as runtime:
        before = await runtime.sessions.get("mine")
        assert await runtime.open_session("test:1", "mine") == "mine"
        assert await runtime.sessions.get("mine") == before
        assert runtime.statistics().route_writes == 0
        assert (await runtime.ask("test:1", "again")).session_id == "mine"
        assert await texts(runtime, "mine") == ["hello", "re: hello", "again", "re: again"]


async def test_creating_a_stored_session_again_with_a_title_changes_nothing(
    tmp_path: Path,
) -> None:
    """D2: neither the title that it has, nor the one that a later session would get."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.open_session("test:1", "mine", title="Old")
        await runtime.ask("test:1", "hello")
        row = await runtime.sessions.get("mine")
        assert row is not None
        assert row.title == "Old"
        assert await runtime.open_session("test:1", "mine", title="New") == "mine"
        assert await runtime.sessions.get("mine") == row
        assert await runtime.sessions.pending_title("test:1") is None


async def test_creating_an_ended_session_again_moves_the_key_and_keeps_the_end(
    tmp_path: Path,
) -> None:
    """D2: one that is no longer current, behind a boundary: it is not reopened, nor renamed."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.open_session("test:1", "mine")
        await runtime.ask("test:1", "hello")
        await runtime.reset("test:1")
        row = await runtime.sessions.get("mine")
        assert row is not None
        assert row.end_kind == "boundary"
        assert await runtime.open_session("test:1", "mine", title="New", user="bob") == "mine"
        assert await runtime.sessions.current("test:1") == "mine"
        assert await runtime.sessions.get("mine") == row
        assert await runtime.sessions.pending_title("test:1") is None


async def test_an_id_of_another_key_is_a_conflict(tmp_path: Path) -> None:
    """D2: reserved, stored, and no longer that key's current one; nothing changes by asking."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.open_session("test:1", "former")
        await runtime.ask("test:1", "hello")
        await runtime.open_session("test:1", "stored")
        await runtime.ask("test:1", "hello")
        await runtime.open_session("test:2", "reserved")
        own = await runtime.open_session("test:3")

        async def check(runtime: Runtime) -> None:
            for taken, holder in (
                ("former", "test:1"),
                ("stored", "test:1"),
                ("reserved", "test:2"),
            ):
                with pytest.raises(ConflictError) as caught:
                    await runtime.open_session("test:3", taken)
                assert isinstance(caught.value, SessionHeldError)
                assert caught.value.holder_key == holder
            assert await runtime.sessions.current("test:1") == "stored"
            assert await runtime.sessions.current("test:2") == "reserved"
            assert await runtime.sessions.current("test:3") == own
            assert await runtime.sessions.get("reserved") is None

        await check(runtime)
    async with open_runtime(path, agent=agent) as runtime:
        await check(runtime)
        assert (await runtime.ask("test:3", "hello")).session_id == own
        assert await texts(runtime, "stored") == ["hello", "re: hello"]


async def test_of_two_keys_that_want_one_id_at_once_one_gets_it(tmp_path: Path) -> None:
    """D2: the other one gets a `ConflictError`, and both go on."""
    outcomes: list[str] = []
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:

        async def want(key: str) -> None:
            try:
                outcomes.append(await runtime.open_session(key, "the-one"))
            except ConflictError:
                outcomes.append("conflict")

        keys = [f"test:{n}" for n in range(8)]
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(want, key)
        assert sorted(outcomes) == ["conflict"] * 7 + ["the-one"]
        holders = [key for key in keys if await runtime.sessions.current(key) == "the-one"]
        assert len(holders) == 1
        replies = [await runtime.ask(key, "hello") for key in keys]
        assert len({reply.session_id for reply in replies}) == len(keys)


@pytest.mark.parametrize(
    "bad", ["", "a b", "a/b", "ä", "a.b", "x" * 65, "a\n", "\n", "a\x00", "é", "\uff11", "../x"]
)
async def test_an_id_of_another_form_is_refused(tmp_path: Path, bad: str) -> None:
    """D2: a chosen id matches `^[A-Za-z0-9_-]{1,64}$`, or nothing happens."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        with pytest.raises(InvalidContentError):
            await runtime.open_session("test:1", bad)
        with pytest.raises(InvalidContentError):
            await runtime.switch("test:1", bad)
        assert await runtime.sessions.current("test:1") is None


async def test_generated_ids_sort_by_time_and_are_random(tmp_path: Path) -> None:
    """D2: 48 bits of milliseconds in front, at least 80 random bits behind."""
    path, ids = tmp_path / "x.db", list[tuple[int, str, int]]()
    async with open_runtime(path, agent=agent) as runtime:
        for n in range(40):
            before_ms = time.time_ns() // 1_000_000
            session_id = await runtime.open_session(f"test:{n}")
            after_ms = time.time_ns() // 1_000_000
            ids.append((before_ms, session_id, after_ms))
            while time.time_ns() // 1_000_000 == after_ms:  # until the next millisecond
                await trio.lowlevel.checkpoint()
    plain = [one for _, one, _ in ids]
    assert plain == sorted(plain)
    for before_ms, one, after_ms in ids:
        assert re.fullmatch(r"[0-9a-f]{32}", one)
        assert before_ms <= int(one[:12], 16) <= after_ms
    # Each of the 80 bits is set in some id and clear in another; by chance it fails once in 10**9.
    tails = [int(one[12:], 16) for one in plain]
    every, some = (1 << 80) - 1, 0
    for tail in tails:
        every, some = every & tail, some | tail
    assert (every, some) == (0, (1 << 80) - 1)


async def test_every_way_to_a_new_session_generates_such_an_id(tmp_path: Path) -> None:
    """D2: rotation, branch, reset and a key's first message; each id sorts behind its parent's."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        ids = [(await runtime.ask("test:1", "a long story " * 50)).session_id]

        async def later() -> None:
            while f"{time.time_ns() // 1_000_000:012x}" <= ids[-1][:12]:
                await trio.lowlevel.checkpoint()

        await later()
        ids.append(await runtime.rotate("test:1", "short"))
        await later()
        ids.append(await runtime.branch("test:1"))
        await later()
        ids.append(await runtime.reset("test:1"))
        await later()
        assert (await runtime.ask("test:1", "hello")).session_id == ids[-1]
        await runtime.close_session("test:1")
        ids.append((await runtime.ask("test:1", "hello")).session_id)
        assert ids == sorted(set(ids))
        assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)
