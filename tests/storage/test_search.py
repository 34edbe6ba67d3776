"""Search in the engine: the index behind the commits, the tail, damage, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest
from msgspec.structs import replace

from onepen import EngineSettings
from onepen.runtime.testing.conversation import START_MS, Conversation
from onepen.runtime.testing.invariants import inspecting
from onepen.storage import commands as c
from onepen.storage.identity import Seq, SessionId, SessionKey
from onepen.storage.records import Search, ToolCall
from onepen.storage.sqlite import search_views
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.units import Durable, Unit
from tests.actors.fixtures import StillClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from onepen.storage.records import Hits

SHADOWS = ("data", "idx", "docsize", "config")


class Library:
    """An engine, conversations in it, and everything that a search finds."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.settings = EngineSettings(free_bytes_min=0, **settings)
        self.engine: SqliteEngine = open_sqlite(path, StillClock(), self.settings)

    def done(self, *units: Unit) -> None:
        receipts = self.engine.stage(units)
        self.engine.commit()
        assert [r for r in receipts if not isinstance(r, Durable)] == []

    def chat(self, name: str, *texts: str, source: str = "chat") -> Conversation:
        chat = Conversation(name, source=source)
        self.done(*chat.opening())
        for text in texts:
            self.say(chat, text)
        return chat

    def say(self, chat: Conversation, text: str, role: Any = "user") -> None:
        self.done(chat.guarded(chat.guard(), chat.append(chat.draft(role, text))))

    def rewind(self, chat: Conversation, to_seq: int) -> None:
        guard = chat.guard()
        replaces, chat.revision = chat.revision, chat.revision + 1
        rewind = c.Rewind(
            session_id=chat.session_id, to_seq=Seq(to_seq), replaces=replaces, at_ms=START_MS
        )
        self.done(chat.guarded(guard, rewind))

    def index(self, slices: int = 10_000) -> int:
        """Chores until none is left, or so many; how many there were."""
        for number in range(slices):
            if not self.engine.chore_due(idle=True):
                return number
            self.engine.chore(idle=True)
        return slices

    def search(self, text: str, **options: Any) -> Hits:
        with self.engine.reading() as reader:
            return reader.search(Search(text=text, **options))

    def found(self, text: str, **options: Any) -> list[str]:
        """The texts of all hits, page by page."""
        texts: list[str] = []
        after = None
        while True:
            page = self.search(text, after=after, **options)
            texts += [hit.text for hit in page.hits]
            after = page.next
            if after is None:
                return texts

    def rebuild(self) -> None:
        with self.engine.reading() as reader:
            replaces = reader.search_rebuilds()
        self.done(Unit((c.RebuildSearch(replaces=replaces, at_ms=START_MS),)))

    def reopened(self) -> None:
        self.engine.close()
        self.engine = open_sqlite(self.path, StillClock(), self.settings)

    def damage(self, *statements: str) -> None:
        """By another hand, while nobody has it open."""
        self.engine.close()
        db = apsw.Connection(str(self.path))
        try:
            db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
            db.pragma("writable_schema", 1)
            for statement in statements:
                db.execute(statement)
        finally:
            db.close()
        self.engine = open_sqlite(self.path, StillClock(), self.settings)

    def indexed(self) -> set[int]:
        """The numbers of the messages that stand in the index, as the index itself says."""
        db = apsw.Connection(str(self.path))
        try:
            db.execute(
                "CREATE VIRTUAL TABLE temp.v USING fts5vocab('main', search_index, instance)"
            )
            return {n for (n,) in db.execute("SELECT DISTINCT doc FROM temp.v")}
        finally:
            db.close()

    def check_index(self) -> None:
        """SQLite's own check of the structure."""
        db = apsw.Connection(str(self.path))
        try:
            db.execute("INSERT INTO search_index (search_index) VALUES ('integrity-check')")
        finally:
            db.close()


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    library = Library(tmp_path / "chat.db")
    yield library
    library.engine.close()


# What is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["rank", "newest"])
def test_a_message_is_found_before_it_is_indexed_and_after(library: Library, order: str) -> None:
    """K1: as soon as it is acknowledged; INV-18: once, wherever it stands."""
    chat = library.chat("ann", "one apple", "two apples", "an apple tree")
    library.index(1)
    library.say(chat, "the last apple")
    for _ in range(2):
        assert sorted(library.found("apple", order=order)) == [
            "an apple tree",
            "one apple",
            "the last apple",
        ]
        library.index()
    assert library.engine.statistics().search_tail == 0


def test_newest_first_is_the_order_of_storing(library: Library) -> None:
    texts = [f"apple {number}" for number in range(30)]
    chat = library.chat("ann", *texts[:20])
    library.index()
    for text in texts[20:]:
        library.say(chat, text)
    assert library.found("apple", order="newest", limit=7) == texts[::-1]


def test_by_rank_the_best_comes_first_and_pages_hold_together(library: Library) -> None:
    chat = library.chat("ann", "apple", "apple and a lot of other words " * 3, "apple apple apple")
    library.index()
    ranked = library.found("apple", limit=1)
    assert ranked[0] == "apple apple apple"
    assert len(ranked) == 3
    # What comes between two pages, indexed or not, neither hides a hit nor repeats one.
    first = library.search("apple", limit=1)
    library.say(chat, "apple of today")
    library.index()
    rest = library.search("apple", limit=10, after=first.next)
    uids = [hit.uid for hit in (*first.hits, *rest.hits)]
    assert len(set(uids)) == len(uids) >= 3


def test_filters(library: Library) -> None:
    """K2: by source, role, key, session, user, time."""
    ann = library.chat("ann", "apple of ann", source="telegram")
    library.say(ann, "apple of the model", role="assistant")
    library.chat("bob", "apple of bob", source="web")
    for _ in range(2):
        assert library.found("apple", source="web") == ["apple of bob"]
        assert library.found("apple", role="assistant") == ["apple of the model"]
        assert library.found("apple", key=SessionKey("nobody")) == []
        assert sorted(library.found("apple", key=ann.key)) == ["apple of ann", "apple of the model"]
        assert len(library.found("apple", session_id=ann.session_id)) == 2
        everything = library.search("apple", limit=10).hits
        times = sorted(hit.message.created_ms for hit in everything)
        assert len(library.found("apple", since_ms=times[1])) == len(
            [t for t in times if t >= times[1]]
        )
        assert len(library.found("apple", until_ms=times[1])) == len(
            [t for t in times if t < times[1]]
        )
        library.index()


def test_many_sessions_of_one_key_are_filtered_all_the_same(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sessions are looked up in the index, many are left to the rows."""
    for name in ("ann", "bob", "cat"):
        library.chat(name, f"apple of {name}")
    library.index()
    wanted = Conversation("bob").key
    few = library.found("apple", key=wanted)
    monkeypatch.setattr(search_views, "_FACETS_MAX", 0)
    assert library.found("apple", key=wanted) == few == ["apple of bob"]


def test_tool_calls_and_parts_are_found(library: Library) -> None:
    """K1: whichever kind of agent said it."""
    chat = library.chat("ann")
    draft = chat.draft("assistant", "")
    call = ToolCall(id="c", name="weather_report", arguments='{"city": "Zürich"}')
    draft = replace(
        draft,
        text=None,
        parts=({"type": "text", "text": "a picture of a bridge"},),
        tool_calls=(call,),
    )
    library.done(chat.guarded(chat.guard(), chat.append(draft)))
    for _ in range(2):
        for query in ("weather", "zurich", "bridge"):
            assert len(library.search(query).hits) == 1, query
        library.index()


def test_the_words_of_a_query_never_match_what_the_index_adds(library: Library) -> None:
    """Sessions stand in the index under words of their own."""
    library.chat("ann", "apple")
    library.index()
    for query in ("1", "s1", "¤1", "facets", "facets:1", "1*"):
        assert library.found(query) == []


# What is not ------------------------------------------------------------------------------------


def test_rewound_messages_leave_and_come_back(library: Library) -> None:
    chat = library.chat("ann", "apple one", "apple two")
    library.index()
    library.rewind(chat, 1)
    for _ in range(2):
        assert library.found("apple") == ["apple one"]
        library.index()
    assert len(library.indexed()) == 1
    library.check_index()


def test_copies_are_not_found_and_the_parent_is(library: Library) -> None:
    chat = library.chat("ann", "apple one", "apple two " * 40)
    library.index()
    library.done(chat.guarded(chat.guard(), chat.rotate()))
    for _ in range(2):
        hits = library.search("apple", limit=50).hits
        assert len({hit.uid for hit in hits}) == len(hits)
        library.index()


def test_a_deleted_session_leaves_the_index_and_its_pages(library: Library) -> None:
    """Nothing of what was said can be read from the file any more, once the log is copied."""
    chat = library.chat("ann", "the pelican's secret is xylophone")
    library.chat("bob", "nothing to hide")
    library.index()
    gone = chat.session_id
    away = chat.route_to(SessionId("fresh"))
    library.done(Unit((away, c.DeleteSession(session_id=gone, at_ms=START_MS))))
    assert library.found("xylophone") == []
    library.done(Unit((c.PurgeSession(session_id=gone, step=0, last=True),)))
    library.index()
    library.engine.upkeep()
    library.engine.finish_upkeep()
    library.engine.close()
    content = library.path.read_bytes()
    assert b"nothing" in content
    # The index keeps words behind a common beginning: looked for is what no other word has.
    assert b"ylophone" not in content
    library.engine = open_sqlite(library.path, StillClock(), library.settings)


# The writer's part ------------------------------------------------------------------------------


def test_the_tail_is_bounded_while_nobody_rests(tmp_path: Path) -> None:
    """A batch past the bound is followed by a slice, as large as the batch and a bit."""
    library = Library(tmp_path / "chat.db", search_tail_rows_max=100)
    try:
        chat = library.chat("ann")
        longest = 0
        for _ in range(60):
            chat_units = [
                chat.guarded(chat.guard(), chat.append(chat.draft("user", "apple")))
                for _ in range(50)
            ]
            library.done(*chat_units)
            due = library.engine.chore_due(idle=False)
            longest = max(longest, library.engine.statistics().search_tail)
            if due:
                library.engine.chore(idle=False)
        assert 100 < longest <= 100 + 50
        assert len(library.found("apple", limit=1_000)) == 3_000
    finally:
        library.engine.close()


def test_what_could_wait_is_not_put_off_for_ever(library: Library) -> None:
    """A new index, and words that must go, get a slice now and then from a writer without pause."""
    chat = library.chat("ann", "a pelican", *["apple"] * 600)
    library.index()
    library.rebuild()
    for _ in range(800):
        library.say(chat, "apple")
        if library.engine.chore_due(idle=False):
            library.engine.chore(idle=False)
    assert library.engine.statistics().search_older == 0
    assert library.search("pelican").index == "ready"


def test_a_slice_is_bounded_in_bytes(library: Library) -> None:
    chat = library.chat("ann", *["pear " * 20_000] * 6)
    assert library.index() > 2
    assert chat.next_seq == 6
    assert len(library.found("pear")) == 6


def test_indexing_goes_on_where_it_was(library: Library) -> None:
    library.chat("ann", *[f"apple {number}" for number in range(40)])
    library.index()
    library.rebuild()
    states: set[str] = set()
    for _ in range(50):
        page = library.search("apple", limit=1)
        states.add(page.index)
        assert len(library.found("apple", limit=9)) == 40
        library.reopened()
        if not library.index(1) and "ready" in states:
            break
    assert states == {"building", "ready"}
    assert len(library.indexed()) == 40
    library.check_index()


def test_another_edition_of_the_words_makes_the_index_anew(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.chat("ann", "apple", "pear")
    library.index()
    library.damage("UPDATE search_state SET edition = 'of another year'")
    assert library.found("apple") == ["apple"]
    assert library.index() > 0
    assert library.found("apple") == ["apple"]
    assert library.search("apple").index == "ready"
    with inspecting(library.path) as db:
        assert db.execute("SELECT edition FROM search_state").fetchall() != [("of another year",)]


def test_a_writer_that_lost_the_file_indexes_nothing(library: Library) -> None:
    """The slice is fenced like a batch."""
    library.chat("ann", "apple")
    other = apsw.Connection(str(library.path))
    other.execute("UPDATE pen SET epoch = epoch + 1")
    other.close()
    library.engine.chore(idle=True)
    assert library.indexed() == set()
    assert not library.engine.chore_due(idle=True)


# Damage ------------------------------------------------------------------------------------------


DAMAGES = {
    **{f"the table {table} is gone": f"DROP TABLE search_index_{table}" for table in SHADOWS},
    **{f"the table {table} is empty": f"DELETE FROM search_index_{table}" for table in SHADOWS},
    "its blocks are zeroed": "UPDATE search_index_data SET block = zeroblob(length(block))",
    "its blocks are cut": "UPDATE search_index_data SET block = substr(block, 1, 5)",
    "its blocks are noise": "UPDATE search_index_data SET block = randomblob(length(block))",
    "all of it is gone": "DROP TABLE search_index",
    "its declaration is gone": "DELETE FROM sqlite_schema WHERE name = 'search_index'",
    "its state is gone": "DELETE FROM search_state",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_stops_nobody_and_is_made_again(library: Library, damage: str) -> None:
    """K3: writes go on, a search finds the same, and a new index is made while both go on."""
    chat = library.chat("ann", *[f"apple {number}" for number in range(20)])
    library.index()
    library.damage(DAMAGES[damage])
    library.say(chat, "apple behind the damage")
    library.rewind(chat, chat.next_seq - 1)
    library.index()
    library.say(chat, "apple at last")
    wanted = sorted([*(f"apple {number}" for number in range(20)), "apple at last"])
    for order in ("rank", "newest"):
        assert sorted(library.found("apple", order=order, limit=8)) == wanted
    library.rebuild()
    for _ in range(200):
        if not library.index(1):
            break
        assert sorted(library.found("apple", limit=8)) == wanted
    assert library.search("apple").index == "ready"
    assert library.engine.statistics().search_damage is None
    assert sorted(library.found("apple", limit=8)) == wanted
    library.check_index()


def test_a_search_says_that_the_index_is_damaged(library: Library) -> None:
    library.chat("ann", "apple")
    library.index()
    library.damage(DAMAGES["its blocks are zeroed"])
    assert library.search("apple").index == "damaged"
    assert library.search("apple", order="newest").index == "damaged"
