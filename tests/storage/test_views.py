"""Read views: pages, look-ups, listings, and rows that somebody has damaged."""

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace

from onepen.runtime.system import SystemClock
from onepen.runtime.testing.conformance.agreement import followed
from onepen.runtime.testing.conversation import START_MS, Conversation, uid_of
from onepen.storage import commands as c
from onepen.storage.errors import (
    AmbiguousError,
    MissingError,
    StorageError,
    StorageUnavailableError,
)
from onepen.storage.identity import Seq, SessionId, SessionKey
from onepen.storage.records import Session
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.units import Durable, Unit

LONG = "a long message that is worth a summary " * 3


class Library:
    """An engine with a few conversations in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine: SqliteEngine = open_sqlite(path, SystemClock())

    def done(self, *units: Unit) -> None:
        receipts = self.engine.stage(units)
        self.engine.commit()
        assert [r for r in receipts if not isinstance(r, Durable)] == []

    def chat(self, name: str, *texts: str, source: str = "chat", at_ms: int = 0) -> Conversation:
        chat = Conversation(name, source=source)
        chat.now_ms += at_ms
        self.done(*chat.opening())
        for text in texts:
            self.done(chat.guarded(chat.guard(), chat.append(chat.draft("user", text))))
        return chat

    def rotated(self, chat: Conversation) -> None:
        long = chat.guarded(chat.guard(), chat.append(chat.draft("user", LONG)))
        self.done(long)
        self.done(chat.guarded(chat.guard(), chat.rotate()))

    def titled(self, chat: Conversation, title: str) -> None:
        self.done(chat.unit(chat.title(title)))

    def found(self, given: str) -> SessionId:
        with self.engine.reading() as reader:
            return reader.find_session(given).id

    def damage(self, sql: str) -> None:
        """What another program did to the file while we were not looking."""
        self.engine.close()
        db = apsw.Connection(str(self.path))
        db.execute(sql)
        db.close()
        self.engine = open_sqlite(self.path, SystemClock())


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    library = Library(tmp_path / "chat.db")
    yield library
    library.engine.close()


# Transcripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("include_inactive", [True, False])
def test_pages_put_together_are_the_whole(
    library: Library, limit: int, *, include_inactive: bool
) -> None:
    """B10, INV-17: whatever their size, with summaries in their place, each row once (A9)."""
    chat = library.chat("ann", *(f"{number} {LONG}" for number in range(12)))
    for first, last in ((1, 3), (6, 8), (0, 5)):
        base = library_next_seq(library, chat.session_id)
        compact = c.Compact(
            session_id=chat.session_id,
            base_seq=base,
            first_seq=Seq(first),
            last_seq=Seq(last),
            summary=chat.draft("user", f"summary {first} to {last}"),
            at_ms=chat.at(),
        )
        library.done(Unit((compact,)))
    with library.engine.reading() as reader:
        whole = reader.transcript(chat.session_id, include_inactive=include_inactive).messages
        pages = followed(
            lambda after: (
                (
                    page := reader.transcript(
                        chat.session_id,
                        include_inactive=include_inactive,
                        after=after,
                        limit=limit,
                    )
                ).messages,
                page.next,
            )
        )
    assert pages == whole
    assert len({message.seq for message in whole}) == len(whole)
    order = [message.seq for message in whole]
    if include_inactive:
        assert order == [0, 1, 2, 3, 12, 4, 5, 14, 6, 7, 8, 13, 9, 10, 11]
    else:
        assert order == [14, 13, 9, 10, 11]


def library_next_seq(library: Library, session_id: SessionId) -> Seq:
    return session(library, session_id).next_seq


def session(library: Library, session_id: SessionId) -> Session:
    with library.engine.reading() as reader:
        found = reader.session(session_id)
    assert found is not None
    return found


def test_a_page_of_nothing_is_the_last_one(library: Library) -> None:
    """INV-15: a limit of zero and an unknown session end the paging."""
    chat = library.chat("ann", "hello")
    with library.engine.reading() as reader:
        for found in (
            reader.transcript(chat.session_id, limit=0),
            reader.transcript(SessionId("nothing")),
            reader.transcript(chat.session_id, after=(99, 99)),
        ):
            assert (found.messages, found.next) == ((), None)
        assert reader.listing(limit=0) == ((), None)


def test_around_a_message_stand_its_neighbours(library: Library) -> None:
    """K2: active ones, in reading order; the message itself whatever its state."""
    chat = library.chat("ann", *(f"{number}" for number in range(9)))
    rewound = c.Rewind(session_id=chat.session_id, to_seq=Seq(6), replaces=9, at_ms=chat.at())
    library.done(Unit((rewound,)))
    with library.engine.reading() as reader:
        rows = reader.transcript(chat.session_id, include_inactive=True).messages

        def texts(seq: int, before: int, after: int) -> list[str | None]:
            found = reader.around(chat.session_id, rows[seq].uid, before=before, after=after)
            return [message.text for message in found.messages]

        assert texts(3, 2, 1) == ["1", "2", "3", "4"]
        assert texts(0, 5, 1) == ["0", "1"]
        assert texts(5, 1, 5) == ["4", "5"]
        assert texts(7, 2, 2) == ["4", "5", "7"]
        with pytest.raises(MissingError):
            reader.around(chat.session_id, uid_of("nothing"))
        with pytest.raises(MissingError):
            reader.around(SessionId("nothing"), rows[0].uid)


def test_the_messages_of_a_turn_are_found(library: Library) -> None:
    """A2: the rows of one turn, in order, in the session that it is in."""
    chat = library.chat("ann", "before")
    library.done(*chat.exchange("first"))
    with library.engine.reading() as reader:
        (*_, last) = reader.transcript(chat.session_id).messages
        assert last.turn_id is not None
        rows = reader.turn_messages(last.turn_id)
    assert [message.seq for message in rows] == [1, 2, 3, 4]


# Finding a session -------------------------------------------------------------------------------


def test_a_session_is_found_by_id_prefix_or_title(library: Library) -> None:
    """E4, DESIGN look-ups: in this order, so that a whole id is never ambiguous."""
    first = SessionId("abc")
    for name in ("abc", "abcd", "abce", "xyz"):
        made = c.CreateSession(session_id=SessionId(name), key=SessionKey(name), at_ms=1)
        library.done(Unit((made,)))
    titled = c.SetTitle(
        session_id=SessionId("xyz"), title="abcd", origin="person", replaces=0, at_ms=1
    )
    library.done(Unit((titled,)))
    assert library.found("abc") == first
    assert library.found("abcd") == "abcd"
    assert library.found("x") == "xyz"
    with pytest.raises(AmbiguousError) as caught:
        library.found("ab")
    assert caught.value.candidates == ("abc", "abcd", "abce")
    for nothing in ("", "q", "abcdq", "\x7f", "%", "_", "é", "\ud800", "a" * 9999):
        with pytest.raises(MissingError):
            library.found(nothing)


def test_a_title_stands_for_the_latest_of_its_lineage(library: Library) -> None:
    """E4: by the base title and by any number, also when the first is gone."""
    chat = library.chat("ann")
    library.titled(chat, "Chat")
    parent = chat.session_id
    library.rotated(chat)
    library.rotated(chat)
    for title in ("Chat", "Chat #2", "Chat #3"):
        assert library.found(title) == chat.session_id
    library.done(Unit((c.DeleteSession(session_id=parent, at_ms=1),)))
    assert library.found("Chat") == chat.session_id
    with pytest.raises(MissingError):
        library.found("Chat #4")


@pytest.mark.parametrize(
    "title", ["Chat #1\u00b2", "Chat #\u0663", "Chat #1x", "Chat #", "Chat #-1"]
)
def test_only_plain_numbers_number_a_title(library: Library, title: str) -> None:
    """E4: other scripts have digits too, and no title may break a look-up."""
    chat = library.chat("ann")
    library.titled(chat, title.strip())
    with pytest.raises(MissingError):
        library.found("Chat")
    assert library.found(title.strip()) == chat.session_id


def test_a_staged_session_is_not_found(library: Library) -> None:
    """H3: neither by id nor by prefix."""
    made = c.CreateSession(
        session_id=SessionId("staged"), key=SessionKey("k"), at_ms=1, hidden=True
    )
    library.done(Unit((made,)))
    for given in ("staged", "stag"):
        with pytest.raises(MissingError):
            library.found(given)


def test_a_lineage_goes_from_the_oldest_to_the_tip(library: Library) -> None:
    """B7: through branches upwards and rotations downwards, from anywhere in it."""
    chat = library.chat("ann")
    line = [chat.session_id]
    library.rotated(chat)
    line.append(chat.session_id)
    branch = c.Branch(
        key=chat.key,
        parent_id=chat.session_id,
        child_id=SessionId("branch"),
        upto_seq=Seq(0),
        replaces=chat.route_version,
        at_ms=chat.at(),
    )
    library.done(chat.guarded(chat.guard(), branch))
    with library.engine.reading() as reader:
        for session_id in line:
            assert [s.id for s in reader.lineage(session_id)] == line
            tip = reader.tip(session_id)
            assert tip is not None
            assert tip.id == line[-1]
        assert [s.id for s in reader.lineage(SessionId("branch"))] == [*line, "branch"]
        assert reader.lineage(SessionId("nothing")) == ()
        assert reader.tip(SessionId("nothing")) is None


# Listings ----------------------------------------------------------------------------------------


def test_a_listing_shows_each_conversation_once(library: Library) -> None:
    """INV-17: a lineage as its tip with its length, most recent first, with a preview."""
    ann = library.chat("ann", "first words of ann\0!", "more", at_ms=0)
    library.chat("bob", "x" * 500, at_ms=3_600_000)
    library.chat("eve", at_ms=7_200_000)
    library.rotated(ann)
    with library.engine.reading() as reader:
        listed, following = reader.listing()
    assert following is None
    assert [one.session.id for one in listed] == ["eve-1", "bob-1", ann.session_id]
    assert [one.lineage_length for one in listed] == [1, 1, 2]
    assert [one.preview for one in listed] == [None, "x" * 200, "so far: hello"]


def test_a_preview_holds_whole_characters(library: Library) -> None:
    """INV-20: NUL does not end it, and no character is cut."""
    for name, text in (("nul", "a\0b"), ("wide", "\U0001f469" * 300), ("empty", "")):
        library.chat(name, text, source=name)
    with library.engine.reading() as reader:
        previews = {
            name: reader.listing(source=name)[0][0].preview for name in ("nul", "wide", "empty")
        }
    assert previews == {"nul": "a\0b", "wide": "\U0001f469" * 200, "empty": ""}


def test_a_listing_is_filtered(library: Library) -> None:
    """INV-17: by source, key, flag and time."""
    ann = library.chat("ann", "hello", source="tg", at_ms=0)
    bob = library.chat("bob", "hello", source="web", at_ms=3_600_000)
    flags = c.SetFlags(session_id=bob.session_id, archived=True, pinned=False, replaces=0, at_ms=1)
    library.done(bob.unit(flags))
    with library.engine.reading() as reader:

        def names(**options: object) -> set[str]:
            listed, _ = reader.listing(**options)  # type: ignore[arg-type]
            return {one.session.id for one in listed}

        both = {ann.session_id, bob.session_id}
        assert names() == {ann.session_id}
        assert names(archived=True) == {bob.session_id}
        assert names(archived=None) == both
        assert names(archived=None, source="web") == {bob.session_id}
        assert names(archived=None, key=ann.key) == {ann.session_id}
        assert names(archived=None, source="nothing") == set()
        middle = START_MS + 1_800_000
        assert names(archived=None, since_ms=middle) == {bob.session_id}
        assert names(archived=None, until_ms=middle) == {ann.session_id}
        assert names(archived=None, since_ms=START_MS, until_ms=2**60) == both


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_pages_of_a_listing_show_each_session_once(library: Library, limit: int) -> None:
    """INV-17: also those whose last activity is the same."""
    for number in range(7):
        library.chat(f"chat-{number}", at_ms=(number // 3) * 3_600_000)
    with library.engine.reading() as reader:
        pages = followed(lambda after: reader.listing(limit=limit, after=after))
        whole, _ = reader.listing()
    assert list(pages) == list(whole)
    assert len(whole) == 7


# Damage ------------------------------------------------------------------------------------------

BAD = "CAST(x'68ff6c6c6f' AS TEXT)"  # not UTF-8


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (f"text = {BAD}", "h\ufffdllo"),
        (f"user = {BAD}", "1"),
        (f"details = {BAD}", "1"),
        ("details = '{'", "1"),
        ("details = '{\"parts\": 7}'", "1"),
        ("details = '{\"unknown\": 7}'", "1"),
    ],
)
def test_a_damaged_row_is_shown_and_hides_no_other(
    library: Library, damage: str, shown: str
) -> None:
    """INV-17: it is marked, the rows around it are exact, and it can be erased."""
    chat = library.chat("ann", "0", "1", "2")
    library.damage(f"UPDATE messages SET {damage} WHERE seq = 1")
    with library.engine.reading() as reader:
        rows = reader.transcript(chat.session_id).messages
        assert [message.text for message in rows] == ["0", shown, "2"]
        assert [message.damaged for message in rows] == [False, True, False]
        assert len(reader.around(chat.session_id, rows[0].uid).messages) == 3
        assert len(reader.listing()[0]) == 1
    library.done(Unit((c.EraseMessages(session_id=chat.session_id, seqs=(Seq(1),)),)))
    with library.engine.reading() as reader:
        rows = reader.transcript(chat.session_id).messages
    assert [message.damaged for message in rows] == [False, False, False]


@pytest.mark.parametrize(
    "damage",
    [*(f"{column} = {BAD}" for column in ("title", "user", "meta", "source")), "meta = '['"],
)
def test_a_damaged_session_is_listed_beside_the_others(library: Library, damage: str) -> None:
    """INV-17: one undecodable row is no reason to show nothing."""
    ann, bob = library.chat("ann", "hello"), library.chat("bob", "hello")
    library.damage(f"UPDATE sessions SET {damage} WHERE id = '{ann.session_id}'")
    with library.engine.reading() as reader:
        listed, _ = reader.listing()
        assert {one.session.id for one in listed} == {ann.session_id, bob.session_id}
        assert [s.id for s in reader.lineage(ann.session_id)] == [ann.session_id]
    assert session(library, ann.session_id).message_count == 1


def test_a_session_with_damaged_rows_can_be_deleted(library: Library) -> None:
    """INV-13: what somebody else broke stops no write of ours."""
    chat = library.chat("ann", "0")
    library.done(*chat.exchange("first"))
    library.damage("UPDATE messages SET details = '{'; UPDATE turns SET outcome = '{'")
    library.done(chat.unit(chat.route_to(SessionId("fresh"))))
    library.done(Unit((c.DeleteSession(session_id=SessionId("ann-1"), at_ms=1),)))
    assert session(library, SessionId("ann-1")).deleted


# Readers -----------------------------------------------------------------------------------------


def test_a_reader_sees_one_snapshot(library: Library) -> None:
    """INV-17: what is committed meanwhile is for the next one."""
    chat = library.chat("ann", "one")
    with library.engine.reading() as reader:
        before = reader.session(chat.session_id)
        library.done(chat.guarded(chat.guard(), chat.append(chat.draft("user", "two"))))
        assert reader.session(chat.session_id) == before
        assert len(reader.transcript(chat.session_id).messages) == 1
    assert session(library, chat.session_id).message_count == 2


def test_a_failed_read_hurts_no_later_one(library: Library) -> None:
    """INV-13: however often it fails."""
    chat = library.chat("ann", "one")
    for _ in range(20):
        with pytest.raises(MissingError), library.engine.reading() as reader:
            reader.find_session("nothing")
    assert session(library, chat.session_id).message_count == 1


def test_a_reader_can_not_write(library: Library) -> None:
    """A5: the connection itself refuses."""
    with (
        pytest.raises(StorageUnavailableError, match="readonly"),
        library.engine.reading() as reader,
    ):
        reader.turn_messages.__self__._db.execute("DELETE FROM pen")  # type: ignore[attr-defined]  # pyright: ignore


def test_reading_is_refused_while_the_engine_is_broken(library: Library) -> None:
    """INV-15: a reader gets an error at once when the file can't be opened again."""
    library.path.rename(library.path.with_suffix(".away"))
    with pytest.raises(StorageError):
        library.engine.reopen()
    with pytest.raises(StorageUnavailableError), library.engine.reading():
        pass
    library.path.with_suffix(".away").rename(library.path)
    library.engine.reopen()
    with library.engine.reading() as reader:
        assert reader.unfinished_turns() == ()


def test_sent_again_after_a_reopening_is_recognised(library: Library) -> None:
    """A8: nothing of what is cached is needed for it."""
    chat = library.chat("ann", "one")
    unit = chat.guarded(chat.guard(), chat.append(chat.draft("user", "two")))
    library.done(unit)
    library.engine.reopen()
    (receipt,) = library.engine.stage([replace(unit, guards=())])
    library.engine.commit()
    assert isinstance(receipt, Durable)
    assert receipt.again
