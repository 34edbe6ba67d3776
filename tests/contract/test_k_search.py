"""Contract K: what was said is found, by whatever agent, in whatever words, on whatever index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest
import trio

from onepen import Hits, Inbound, Runtime, Turn, open_runtime

from .agents import echo

if TYPE_CHECKING:
    from pathlib import Path


class Object:
    """An agent that is an object with `run`."""

    async def run(self, turn: Turn) -> str:
        return f"re: {turn.text}"


async def mapping(turn: Turn) -> dict[str, Any]:
    return {"final_response": f"re: {turn.text}"}


async def streaming(turn: Turn) -> None:
    async with turn.streaming() as out:
        await out.write("re: ")
        await out.write(turn.text or "")


def texts(hits: Hits) -> list[str]:
    return [hit.text for hit in hits.hits]


@pytest.mark.parametrize("agent", [echo, Object(), mapping, streaming])
async def test_what_was_said_is_found_at_once(tmp_path: Path, agent: Any) -> None:
    """K1: question and answer, as soon as the turn is acknowledged, whichever agent it was."""
    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        await runtime.ask("telegram:1", "where do pelicans sleep?")
        found = await runtime.sessions.search("pelicans", order="newest")
        assert texts(found) == ["re: where do pelicans sleep?", "where do pelicans sleep?"]
        assert found.hits[0].key == "telegram:1"
        assert found.hits[0].source == "telegram"


async def test_a_message_is_found_before_its_turn_has_ended(tmp_path: Path) -> None:
    """K1: what is acknowledged is found, whatever is still running."""
    found: list[str] = []

    async def agent(turn: Turn) -> str:
        found.extend(texts(await runtime.sessions.search("pelicans")))
        return "ok"

    async with open_runtime(tmp_path / "chat.db", agent=agent) as runtime:
        submission = await runtime.submit("telegram:1", "pelicans!")
        await submission.reply()
    assert found == ["pelicans!"]


async def test_filters_snippets_pages_and_what_stands_around(tmp_path: Path) -> None:
    """K2: by source, role, key, user and time; marked; page by page; with its neighbours."""
    async with open_runtime(tmp_path / "chat.db", agent=echo) as runtime:
        for number in range(5):
            await runtime.ask("telegram:1", Inbound(f"pelican number {number}", user="ada"))
        await runtime.ask("web:1", Inbound("a pelican on the web", user="bob"))
        search = runtime.sessions.search
        assert len((await search("pelican", source="web")).hits) == 2
        assert len((await search("pelican", key="telegram:1", role="user")).hits) == 5
        # What the model said in a user's own session is that user's as well.
        assert {hit.key for hit in (await search("pelican", user="bob")).hits} == {"web:1"}
        assert texts(await search("pelican number 3", marks=("[", "]"), role="user"))
        (hit,) = (await search("number-3 pelican", role="user", marks=("[", "]"), around=1)).hits
        assert hit.snippet == "[pelican] [number] [3]"
        assert [one.text for one in hit.before] == ["re: pelican number 2"]
        assert [one.text for one in hit.after] == ["re: pelican number 3"]
        seen: list[str] = []
        page = await search("pelican", limit=5, order="newest")
        while True:
            seen += texts(page)
            if page.next is None:
                break
            page = await search("pelican", limit=5, order="newest", after=page.next)
        assert len(seen) == len(set(seen)) == 12
        newest = (await search("pelican", order="newest", limit=1)).hits[0].message
        assert texts(await search("pelican", until_ms=newest.created_ms, order="newest"))
        assert texts(await search("pelican", since_ms=newest.created_ms + 60_000)) == []


@pytest.mark.parametrize(
    ("said", "query"),
    [
        ("我在北京市工作", "北京"),
        ("東京大学に行きます", "大学"),
        ("안녕하세요 세계", "세계"),
        ("ﾊﾟｿｺﾝ", "パソコン"),
        ("Ελληνικά", "ελληνικα"),
        ("naïve Straße", "NAIVE strasse"),
    ],
)
async def test_all_scripts_are_found(tmp_path: Path, said: str, query: str) -> None:
    """K2: Chinese, Japanese and Korean text too, which has no blanks to go by."""
    async with open_runtime(tmp_path / "chat.db", agent=echo) as runtime:
        await runtime.ask("telegram:1", said)
        await runtime.ask("telegram:1", "something else")
        for _ in range(2):
            found = await runtime.sessions.search(query, role="user")
            assert texts(found) == [said]
            await caught_up(runtime)


@pytest.mark.parametrize(
    "query", ['"', "*", "a AND", "NEAR(", "x:y", "(", "-", "'; DROP", "", "\0"]
)
async def test_no_text_is_an_error(tmp_path: Path, query: str) -> None:
    """K2: any user text is a valid query."""
    async with open_runtime(tmp_path / "chat.db", agent=echo) as runtime:
        await runtime.ask("telegram:1", "pelican")
        await runtime.sessions.search(query)
        await runtime.sessions.search(query, order="newest")


async def caught_up(runtime: Runtime) -> None:
    """Wait until the writer has indexed everything; it needs a quiet moment for that."""
    while True:
        await runtime.sessions.search("")
        engine = runtime.statistics().writer.engine
        if engine.search_tail == 0 and engine.search_older == 0:
            return


async def test_a_damaged_index_blocks_nothing_and_is_rebuilt_while_serving(tmp_path: Path) -> None:
    """K3: the conversation goes on before, meanwhile and after, and search finds all of it."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        for number in range(10):
            await runtime.ask("telegram:1", f"pelican {number}")
        await caught_up(runtime)
        db = apsw.Connection(str(path))
        db.execute("UPDATE search_index_data SET block = zeroblob(length(block))")
        db.close()
        await runtime.ask("telegram:1", "pelican behind the damage")
        found = await runtime.sessions.search("pelican", limit=50)
        assert (found.index, len(found.hits)) == ("damaged", 22)
        await runtime.rebuild_search()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.ask, "telegram:1", "pelican meanwhile")
            found = await runtime.sessions.search("pelican", limit=50)
            assert len(found.hits) >= 22
        while found.index != "ready":
            found = await runtime.sessions.search("pelican", limit=50)
        assert len(found.hits) == 24
        await runtime.rebuild_search()  # as often as you like
        assert len((await runtime.sessions.search("pelican", limit=50)).hits) == 24
