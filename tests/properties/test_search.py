"""Search finds what is there, whatever the texts, the query, and how far the index is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepen import EngineSettings
from onepen.runtime.testing.conformance.desk import Desk
from onepen.runtime.testing.conversation import START_MS, Conversation
from onepen.storage.commands import RebuildSearch, Rewind
from onepen.storage.identity import Seq
from onepen.storage.records import Search
from onepen.storage.sqlite import search_views
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.sqlite.search_index import SearchIndex
from onepen.storage.units import Durable, Unit
from onepen.storage.wanted import wanted_of

from .histories import StillClock, histories, in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUERIES_MAX = 100_000 if settings().max_examples > 200 else 10_000
PIECES = (
    *('"', "'", "*", "-", "^", ":", "(", ")", "{", "}", "+", "\\", "%", "_", "\0", ";", "--", "\n"),
    *("AND", "OR", "NOT", "NEAR", "NEAR(", "text:", "facets :", "rank", "¤1", "null"),
    *("apple", "pear", "北京", "市", "naïve", "👍", "é", "\u0301", "x" * 300, " ", " ", " "),
)
TEXTS = (
    *("an apple", "apple pear", "a pear-apple", "北京市 apple"),
    *("naive or not", "near (text)", "👍 é", "京北"),
)
WORDS = st.sampled_from(
    ("apple", "Pear", "pearl", "北京", "京市", "東", "é", "e\u0301", "it's", "a.b")
)
SAID = st.lists(WORDS, max_size=6).map(" ".join) | st.lists(WORDS, max_size=4).map("".join)


def _done(engine: SqliteEngine, *units: Unit) -> None:
    receipts = engine.stage(units)
    engine.commit()
    assert [r for r in receipts if not isinstance(r, Durable)] == []


def _library(texts: Sequence[str]) -> tuple[SqliteEngine, Conversation]:
    engine = open_sqlite(None, StillClock(), EngineSettings(free_bytes_min=0))
    chat = Conversation("ann")
    _done(engine, *chat.opening())
    _say(engine, chat, texts)
    return engine, chat


def _say(engine: SqliteEngine, chat: Conversation, texts: Sequence[str]) -> None:
    for text in texts:
        _done(engine, chat.guarded(chat.guard(), chat.append(chat.draft("user", text))))


def _index(engine: SqliteEngine, slices: int = 10_000) -> None:
    for _ in range(slices):
        if not engine.chore_due(idle=True):
            return
        engine.chore(idle=True)


def _found(engine: SqliteEngine, query: str, order: Any, limit: int) -> list[str]:
    texts: list[str] = []
    after = None
    while True:
        with engine.reading() as reader:
            page = reader.search(Search(text=query, order=order, limit=limit, after=after))
        assert page.index != "damaged"
        texts += [hit.text for hit in page.hits]
        after = page.next
        if after is None:
            return texts


@given(
    said=st.lists(SAID, max_size=8),
    behind=st.lists(SAID, max_size=4),
    slices=st.integers(0, 6),
    rebuild=st.booleans(),
    queries=st.lists(SAID | st.text(max_size=8), min_size=1, max_size=4),
    limit=st.integers(1, 5),
)
def test_a_search_finds_what_has_the_words(
    said: list[str],
    behind: list[str],
    slices: int,
    rebuild: bool,  # noqa: FBT001
    queries: list[str],
    limit: int,
) -> None:
    """INV-18, K2: index and tail together, wherever the one ends and the other begins."""
    engine, chat = _library(said)
    try:
        _index(engine, slices)
        if rebuild:
            _done(engine, Unit((RebuildSearch(replaces=0, at_ms=START_MS),)))
            _index(engine, slices)
        _say(engine, chat, behind)
        for query in (*queries, *(f"{query[:3]}*" for query in queries)):
            matches = sorted(filter(wanted_of(query).matches, (*said, *behind)))
            for order in ("rank", "newest"):
                assert sorted(_found(engine, query, order, limit)) == matches, query
    finally:
        engine.close()


@given(units=histories(size_max=30), data=st.data())
def test_engine_and_model_agree_while_the_index_is_made(
    units: list[Unit], data: st.DataObject
) -> None:
    """INV-18: after every batch some slices, busy or idle ones, and all that is found is the same.

    Rewound, deleted and copied messages are among them, and new indexes that are asked for.
    """
    engine = open_sqlite(None, StillClock(), EngineSettings(search_tail_rows_max=2))
    try:
        desk = Desk(engine)
        for batch in in_batches(data.draw, units):
            desk.send(*batch)
            for idle in data.draw(st.lists(st.booleans(), max_size=4)):
                if engine.chore_due(idle=idle):
                    engine.chore(idle=idle)
            desk.agree()
        _index(engine)
        desk.agree()
        assert engine.statistics().search_damage is None
    finally:
        engine.close()


def test_any_text_is_a_query(record_property: Callable[[str, object], None]) -> None:
    """K2, PROOF-7: 100,000 of them in `make proof`, and a share of those in `make test`."""
    engine, _ = _library(TEXTS)
    dice = random.Random(1)
    found = 0
    try:
        _index(engine)
        with engine.reading() as reader:
            for _ in range(QUERIES_MAX):
                query = "".join(dice.choices(PIECES, k=dice.randint(1, 6)))
                if dice.random() < 0.1:
                    query += "".join(chr(dice.randrange(0x11000)) for _ in range(3))
                order: Any = dice.choice(("rank", "newest"))
                page = reader.search(Search(text=query, limit=50, order=order))
                assert page.index == "ready", query
                matches = sorted(filter(wanted_of(query).matches, TEXTS))
                assert sorted(hit.text for hit in page.hits) == matches, query
                found += bool(page.hits)
    finally:
        engine.close()
    assert found > QUERIES_MAX / 10
    record_property("search queries", QUERIES_MAX)


# Tests of the tests ---------------------------------------------------------------------------


def _story() -> None:
    """One of what the properties above draw: indexed, changed, asked for anew, gone on with."""
    engine, chat = _library(["an apple", "a pear", "apple pie"])
    try:
        _index(engine, 1)
        _say(engine, chat, ["apple and pear"])
        _index(engine)
        guard = chat.guard()
        rewind = Rewind(
            session_id=chat.session_id, to_seq=Seq(3), replaces=chat.revision, at_ms=START_MS
        )
        chat.revision += 1
        _done(engine, chat.guarded(guard, rewind))
        _say(engine, chat, ["apple again"])
        _done(engine, Unit((RebuildSearch(replaces=0, at_ms=START_MS),)))
        for slices in (1, 2, 10_000):
            _index(engine, slices)
            for order in ("rank", "newest"):
                found = sorted(_found(engine, "apple", order, 2))
                assert found == ["an apple", "apple again", "apple pie"]
    finally:
        engine.close()


_add: Any = getattr(SearchIndex, "_add")  # noqa: B009 - the steps of a slice are private
_indexed: Any = getattr(search_views.Finder, "_indexed")  # noqa: B009


def _add_but_the_first(index: SearchIndex, rows: Any) -> None:
    _add(index, list(rows)[1:])


def _read_nothing(finder: Any, floor: int, high: int, limit: int) -> tuple[list[int], int]:
    return [], floor


def _indexed_but_the_lowest(finder: Any, low: int, high: int, limit: int) -> Any:
    return _indexed(finder, low + 1, high, limit)


BUGS: dict[str, tuple[object, str, Any]] = {
    "a slice skips a row": (SearchIndex, "_add", _add_but_the_first),
    "the tail is not read": (search_views.Finder, "_read_down", _read_nothing),
    "a boundary is off by one": (search_views.Finder, "_indexed", _indexed_but_the_lowest),
    "rewound messages are shown": (search_views, "_FINDABLE", "m.carried = 0 AND s.deleted = 0"),
}


def test_the_story_holds_without_a_bug() -> None:
    _story()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(
    bug: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """PROOF-8: what the properties look at is enough to see it."""
    target, name, value = BUGS[bug]
    monkeypatch.setattr(target, name, value)
    with pytest.raises(AssertionError):
        _story()
    record_property("planted bug", f"{bug}: a story of searches, in one run")
