"""Exports and imports of an engine: what is written, what is refused, what is gone on with."""

import gzip
import os
import stat
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onepen.runtime.testing.conversation import Conversation, uid_of
from onepen.runtime.testing.invariants import check_database, logical_dump
from onepen.storage import commands as c
from onepen.storage.engine import Engine, EngineSettings
from onepen.storage.errors import (
    ConflictError,
    ExportError,
    ImportFileError,
    InvalidContentError,
    MissingError,
    NewerExportError,
)
from onepen.storage.identity import BlobId, Seq, SessionId, SessionKey, TurnId
from onepen.storage.records import Search, ToolCall
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.transfer import ImportLimits, Selection, asking, staging, written_file
from onepen.storage.transfer.format import Header
from onepen.storage.units import Unit

from ..properties.histories import StillClock
from .transferring import ALL, exported, import_bytes, import_file, of_key, of_session, wrote

_HEADER = Header(version=1)
QUICK = EngineSettings(synchronous="NORMAL")
JSON = msgspec.json


@pytest.fixture
def engine() -> Generator[Engine]:
    opened = open_sqlite(None, StillClock())
    yield opened
    opened.close()


@pytest.fixture
def copy(tmp_path: Path) -> Generator[Engine]:
    opened = open_sqlite(tmp_path / "copy.db", StillClock(), QUICK)
    yield opened
    opened.close()
    assert check_database(tmp_path / "copy.db") == []


def send(engine: Engine, *units: Unit) -> None:
    for unit in units:
        wrote(engine, unit)


def talked(engine: Engine, name: str = "ann", *, rotated: bool = False) -> Conversation:
    """A conversation with a title and two turns, perhaps with a rotation between them."""
    chat = Conversation(name)
    send(engine, *chat.opening(), chat.unit(chat.title(f"Chat of {name}")))
    send(engine, *chat.exchange("first"))
    if rotated:
        guard = chat.guard()
        send(engine, chat.guarded(guard, chat.rotate(2, 3)))
    send(engine, *chat.exchange("second"))
    return chat


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [JSON.decode(line) for line in data.splitlines()]


def of_lines(lines: list[dict[str, Any]]) -> bytes:
    """A file as somebody leaves it who edits it: without the digest."""
    lines[-1].pop("sha256", None)
    return b"".join(JSON.encode(line) + b"\n" for line in lines)


def texts(engine: Engine, session_id: str) -> list[str | None]:
    with engine.reading() as reader:
        return [m.text for m in reader.rows_of(SessionId(session_id), 0, 1_000)]


# What is written ---------------------------------------------------------------------------------


def test_a_lineage_comes_back_as_it_was(engine: Engine, copy: Engine, tmp_path: Path) -> None:
    """B1, G4: parents first, copies as copies, the key's current session, the same bytes again."""
    chat = talked(engine, rotated=True)
    first = exported(engine)
    kinds = [line["type"] for line in lines_of(first)]
    assert kinds[0] == "onepen-export"
    assert kinds[-1] == "end"
    assert kinds.count("session") == 2
    report = import_bytes(copy, first, tmp_path)
    assert (report.sessions_new, report.routes, report.reopened) == (2, 1, 0)
    assert exported(copy) == first
    with copy.reading() as reader:
        current = reader.session_of_key(chat.key)
        assert current is not None
        assert current.id == chat.session_id
        assert current.title == "Chat of ann #2"
        assert [s.id for s in reader.lineage(current.id)] == ["ann-1", "ann-1-next"]


def test_every_field_of_a_message_comes_back(engine: Engine, copy: Engine, tmp_path: Path) -> None:
    """INV-20: NUL, every plane, the largest integers, nested details, tool calls, blobs."""
    chat = talked(engine)
    data = bytes(range(256)) * 2_000
    pieces = [data[:262_144], data[262_144:]]
    blob_id = BlobId(sha256(data).hexdigest())
    for index, piece in enumerate(pieces):
        send(engine, Unit((c.PutChunk(blob_id=blob_id, index=index, data=piece),)))
    seal = c.SealBlob(
        blob_id=blob_id, size_bytes=len(data), chunk_count=2, media_type="image/png", at_ms=7
    )
    send(engine, Unit((seal,)))
    guard = chat.guard()
    deep: Any = {"n": [2**63 - 1, -(2**63), 1.0, -0.5, 1e300, None, True, {"": "\0"}]}
    messages = (
        chat.draft("user", 'a\0b\u2028\U0001f469\u200d\n\\"\x7f', user="ann\0", blobs=(blob_id,)),
        chat.draft(
            "assistant",
            None,
            parts=({"type": "text", "text": "日本"}, deep),
            tool_calls=(ToolCall(id="1", name="look", arguments='{"a": 1 }'),),
            reasoning="because\0",
            finish_reason="stop",
            meta=deep,
        ),
        chat.draft("tool", "", tool_call_id="1", name="look", platform_id="p"),
    )
    send(engine, chat.guarded(guard, chat.append(*messages)))
    first = exported(engine)
    import_bytes(copy, first, tmp_path)
    assert exported(copy) == first
    with copy.reading() as there, engine.reading() as here:
        assert there.rows_of(chat.session_id, 0, 99) == here.rows_of(chat.session_id, 0, 99)
        assert there.blob_chunk(blob_id, 1) == pieces[1]
    assert sum(line["type"] == "chunk" for line in lines_of(first)) == 2


def test_a_turn_that_runs_is_written_as_cut_off(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """I7: nobody goes on with it elsewhere; a later export, in which it ended, says how."""
    chat = talked(engine)
    turn_id = TurnId(uid_of("ann/running"))
    guard = chat.guard()
    opened = c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at())
    started = c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at())
    asked = chat.append(chat.draft("user", "and now?"), turn_id=turn_id)
    send(engine, chat.guarded(guard, opened, started, asked))
    import_bytes(copy, exported(engine), tmp_path)
    with copy.reading() as reader:
        turn = reader.turn(turn_id)
        assert turn is not None
        assert turn.outcome is not None
        assert (turn.state, turn.outcome.kind) == ("ended", "interrupted")
        assert reader.unfinished_turns() == ()
    guard = chat.guard()
    answer = chat.append(chat.draft("assistant", "now this"), turn_id=turn_id)
    send(engine, chat.guarded(guard, answer, chat.end_turn(turn_id)))
    report = import_bytes(copy, exported(engine), tmp_path)
    assert (report.sessions_extended, report.messages) == (1, 1)
    with copy.reading() as reader:
        turn = reader.turn(turn_id)
        assert turn is not None
        assert turn.outcome is not None
        assert turn.outcome.kind == "answered"
    assert exported(copy) == exported(engine)


def test_what_is_staged_is_not_exported_and_what_is_not_there_is_missing(engine: Engine) -> None:
    staged = c.CreateSession(
        session_id=SessionId("staged"), key=SessionKey("k"), at_ms=1, hidden=True
    )
    before = exported(engine)
    send(engine, Unit((staged,)))
    assert exported(engine) == before
    for what in (of_session("staged"), of_session("nothing"), of_key("k")):
        with pytest.raises(MissingError):
            exported(engine, what)
    with pytest.raises(InvalidContentError):
        exported(engine, Selection())


def test_one_session_without_its_parent_comes_back_alone(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """G4: the place of the parent is kept for it, and it can come later; a parent whose child is
    nowhere is open again until then.
    """
    chat = talked(engine, rotated=True)
    child = exported(engine, of_session(chat.session_id))
    import_bytes(copy, child, tmp_path)
    assert exported(copy, of_session(chat.session_id)) == child
    assert exported(copy) == child
    with copy.reading() as reader:
        assert [s.id for s in reader.lineage(chat.session_id)] == [chat.session_id]
        listed, _ = reader.listing()
        assert [one.id for one in listed] == [chat.session_id]
    assert import_bytes(copy, child, tmp_path).left_over == 0
    import_bytes(copy, exported(engine), tmp_path)
    assert exported(copy) == exported(engine)


def test_a_parent_without_its_child_is_reopened_until_it_comes(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """G4: the reverse orphan is reopened by import; with its child it has ended again."""
    chat = talked(engine, rotated=True)
    report = import_bytes(copy, exported(engine, of_session("ann-1")), tmp_path)
    assert report.reopened == 1
    with copy.reading() as reader:
        parent = reader.session(SessionId("ann-1"))
        assert parent is not None
        assert parent.end_kind is None
    import_bytes(copy, exported(engine), tmp_path)
    with copy.reading() as reader:
        tip = reader.tip(SessionId("ann-1"))
        assert tip is not None
        assert tip.id == chat.session_id


def test_a_key_that_went_on_goes_on_in_the_copy(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """B5: the copy's key names the parent; with its child the route moves, in the same unit."""
    chat = talked(engine)
    import_bytes(copy, exported(engine), tmp_path)
    guard = chat.guard()
    send(engine, chat.guarded(guard, chat.rotate(2, 3)))
    send(engine, *chat.exchange("third"))
    import_bytes(copy, exported(engine), tmp_path)
    with copy.reading() as reader:
        route = reader.route(chat.key)
        assert route is not None
        assert route.session_id == chat.session_id
    assert exported(copy) == exported(engine)


def test_a_tombstone_keeps_a_lineage_together(engine: Engine, copy: Engine, tmp_path: Path) -> None:
    """B7: what was deleted is written without text, and what was deleted here stays deleted."""
    chat = talked(engine, rotated=True)
    whole = exported(engine)
    send(engine, Unit((c.DeleteSession(session_id=SessionId("ann-1"), at_ms=9),)))
    first = exported(engine)
    assert b"why first" not in first
    import_bytes(copy, first, tmp_path)
    assert exported(copy) == first
    report = import_bytes(copy, whole, tmp_path)
    assert (report.sessions_deleted, report.sessions_unchanged) == (1, 1)
    assert exported(copy) == first
    assert chat.session_id == "ann-1-next"


# Into a database that has something --------------------------------------------------------------


def test_what_is_behind_a_beginning_is_appended(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """H3: compaction and rewind included; a shorter file changes nothing, a longer one goes on."""
    chat = talked(engine)
    earlier = exported(engine)
    compact = c.Compact(
        session_id=chat.session_id,
        base_seq=Seq(chat.next_seq),
        first_seq=Seq(0),
        last_seq=Seq(3),
        summary=chat.draft("assistant", "first: because"),
        at_ms=chat.at(),
    )
    guard = chat.guard()
    send(engine, chat.guarded(guard, compact))
    chat.next_seq, chat.revision = chat.next_seq + 1, chat.revision + 1
    send(engine, *chat.exchange("third"))
    rewind = c.Rewind(
        session_id=chat.session_id, to_seq=Seq(10), replaces=chat.revision, at_ms=chat.at()
    )
    send(engine, chat.guarded(chat.guard(), rewind))
    later = exported(engine)
    import_bytes(copy, earlier, tmp_path)
    report = import_bytes(copy, later, tmp_path)
    assert (report.sessions_extended, report.sessions_new) == (1, 0)
    assert exported(copy) == later
    assert import_bytes(copy, earlier, tmp_path).sessions_unchanged == 1
    assert exported(copy) == later


def test_another_content_is_a_conflict_with_both_digests(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """A7's kind of conflict: session, seq and both digests are told, nothing is written."""
    talked(engine)
    talked(engine, "bob")
    import_bytes(copy, exported(engine, of_session("bob-1")), tmp_path)
    before = logical_dump(tmp_path / "copy.db")
    lines = lines_of(exported(engine))
    changed = next(
        x for x in lines if x["type"] == "message" and x["uid"] == uid_of("bob/message/2")
    )
    changed["text"] = "something else"
    with pytest.raises(ConflictError, match=f"message {changed['seq']} of session bob-1") as raised:
        import_bytes(copy, of_lines(lines), tmp_path)
    assert raised.value.stored != raised.value.given
    assert len(raised.value.stored) == 32
    assert logical_dump(tmp_path / "copy.db") == before


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        ({"key": "somebody:else", "current": False}, "chat:ann"),
        ({"parent_id": "bob-1"}, None),
    ],
)
def test_a_session_of_another_key_or_parent_is_a_conflict(
    engine: Engine, copy: Engine, tmp_path: Path, change: dict[str, Any], stored: str | None
) -> None:
    """D2: an id that belongs to another key."""
    talked(engine)
    import_bytes(copy, exported(engine), tmp_path)
    lines = lines_of(exported(engine))
    lines[1].update(change)
    with pytest.raises(ConflictError) as raised:
        import_bytes(copy, of_lines(lines), tmp_path)
    assert raised.value.stored == stored


def test_a_title_that_is_taken_gets_a_number_and_a_key_keeps_its_session(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """E4, B5: both are told."""
    chat = talked(engine)
    other = Conversation("ann")
    other.session_id = SessionId("other")
    send(copy, *other.opening(), other.unit(other.title("Chat of ann")))
    report = import_bytes(copy, exported(engine), tmp_path)
    assert report.titles == ((chat.session_id, "Chat of ann", "Chat of ann #2"),)
    assert (report.titles_changed, report.routes) == (1, 0)
    with copy.reading() as reader:
        route = reader.route(chat.key)
        assert route is not None
        assert route.session_id == "other"


def test_an_original_that_is_one_elsewhere_comes_as_a_copy(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """A3: a message has one original, also between two sessions of one file."""
    talked(engine)
    lines = lines_of(exported(engine))
    import_bytes(copy, of_lines([dict(line) for line in lines]), tmp_path)
    lines[1].update(id="twin", key="chat:twin", title="Twin")
    lines[2:-1] = [line for line in lines[2:-1] if line["type"] == "message"]
    report = import_bytes(copy, of_lines(lines), tmp_path)
    assert report.sessions_new == 1
    with copy.reading() as reader:
        assert all(m.carried for m in reader.rows_of(SessionId("twin"), 0, 99))
    assert import_bytes(copy, of_lines(lines), tmp_path).sessions_unchanged == 1
    lines[1].update(id="third", key="chat:third", title="Third")
    lines[2]["text"] = "changed"
    with pytest.raises(ConflictError, match="ann-1"):
        import_bytes(copy, of_lines(lines), tmp_path)


# Cut off and begun again -------------------------------------------------------------------------


class Cut(Exception):
    """The process is gone."""


@pytest.mark.parametrize("rotated", [False, True])
def test_an_import_that_is_cut_off_shows_nothing_and_goes_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rotated: bool
) -> None:
    """H3: at every unit: what is staged is in no view, in no search, and in no title's way."""
    monkeypatch.setattr(staging, "BYTES_PER_UNIT", 1)  # each command in a unit of its own
    monkeypatch.setattr(asking, "ROWS_PER_UNIT", 2)
    talked(engine, rotated=rotated)
    talked(engine, "bob")
    first = exported(engine)
    number = 0
    while True:
        path = tmp_path / f"{number}.db"
        copy = open_sqlite(path, StillClock(), QUICK)
        try:
            if _cut_at(copy, first, tmp_path, number):
                assert number > 10
                return
            with copy.reading() as reader:
                listed, _ = reader.listing()
                lines = {s.id for one in listed for s in reader.lineage(one.id)}
                # All of a lineage, or nothing of it.
                assert ("ann-1" in lines) == ("ann-1-next" in lines) or not rotated
                found = reader.search(Search(text="why"))
                assert {hit.session_id for hit in found.hits} <= lines
            assert check_database(path) == []
            import_bytes(copy, first, tmp_path)
            assert exported(copy) == first
        finally:
            copy.close()
        assert check_database(path) == []
        number += 1


def _cut_at(copy: Engine, data: bytes, folder: Path, number: int) -> bool:
    """Import up to a unit; true if there are fewer."""
    units = 0

    def write(engine: Engine, unit: Unit) -> None:
        nonlocal units
        if units == number:
            raise Cut
        units += 1
        wrote(engine, unit)

    try:
        import_bytes(copy, data, folder, write=write)
    except Cut:
        return False
    return True


def test_what_nobody_goes_on_with_is_taken_away(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """A staged session that is not in the next file: its rows, usage and turns are gone."""
    talked(engine)
    empty = logical_dump(tmp_path / "copy.db")
    assert not _cut_at(copy, exported(engine), tmp_path, 1)
    with copy.reading() as reader:
        assert len(reader.staged_sessions()) == 1
    nothing = open_sqlite(None, StillClock())
    report = import_bytes(copy, exported(nothing), tmp_path)
    nothing.close()
    assert report.left_over == 1
    after = logical_dump(tmp_path / "copy.db")
    for table in ("sessions", "heads", "messages", "usage", "routes", "blob_uses"):
        assert after[table] == empty[table]


def test_another_file_for_a_session_that_was_begun_starts_over(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    talked(engine)
    lines = lines_of(exported(engine))
    row = next(line for line in lines if line["type"] == "message")
    row["text"] = "something else"
    assert not _cut_at(copy, of_lines(lines), tmp_path, 1)
    import_bytes(copy, exported(engine), tmp_path)
    assert exported(copy) == exported(engine)


def test_a_dry_run_writes_nothing_and_tells_the_same(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    talked(engine, rotated=True)
    first = exported(engine)
    before = logical_dump(tmp_path / "copy.db")
    wanted = import_bytes(copy, first, tmp_path, dry_run=True)
    assert logical_dump(tmp_path / "copy.db") == before
    done = import_bytes(copy, first, tmp_path)
    assert (wanted.sessions_new, wanted.messages) == (done.sessions_new, done.messages)


def test_imported_rows_are_found_when_they_are_published(
    engine: Engine, copy: Engine, tmp_path: Path
) -> None:
    """K1: indexed while they are hidden or after, and found only after."""
    talked(engine)

    def hits() -> int:
        with copy.reading() as reader:
            return len(reader.search(Search(text="why")).hits)

    assert not _cut_at(copy, exported(engine), tmp_path, 1)
    while copy.maintain(idle=True):
        pass
    assert hits() == 0
    import_bytes(copy, exported(engine), tmp_path)
    assert hits() == 2
    while copy.maintain(idle=True):
        pass
    assert hits() == 2


# Files that are none -----------------------------------------------------------------------------


def _changed(number: int, **members: Any) -> Any:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[number].update(members)

    return change


def _message(**members: Any) -> Any:
    def change(lines: list[dict[str, Any]]) -> None:
        rows = [line for line in lines if line["type"] == "message"]
        rows[2].update(members)

    return change


def _swapped(lines: list[dict[str, Any]]) -> None:
    rows = [place for place, line in enumerate(lines) if line["type"] == "message"]
    lines[rows[1]], lines[rows[2]] = lines[rows[2]], lines[rows[1]]


def _twice(lines: list[dict[str, Any]]) -> None:
    lines[-1:-1] = lines[1:-1]


def _children_first(lines: list[dict[str, Any]]) -> None:
    starts = [place for place, line in enumerate(lines) if line["type"] == "session"]
    lines[1:-1] = lines[starts[1] : -1] + lines[1 : starts[1]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_changed(0, version=2), "upgrade"),
        (_changed(0, type="other"), "not an export"),
        (_changed(1, id="no id"), "match"),
        (_changed(1, key=" "), "blank"),
        (_changed(1, parent_id="ann-1"), "own parent"),
        (_changed(1, title=" x "), "blanks"),
        (_changed(1, ended_ms=None), "together"),
        (_changed(1, messages=3), "of 3"),
        (_changed(1, messages=99), "of 99"),
        (_changed(1, surprise=1), "surprise"),
        (_changed(1, meta={"a": 2**70}), "64 bits"),
        (_changed(1, deleted=True), "deleted"),
        (_message(uid="x"), "hexadecimal"),
        (_message(seq=7), "seq"),
        (_message(role="nobody"), "role"),
        (_message(summarised_by=3), "summarised_by"),
        (_message(state="summarised", summarised_by=3), "rewound"),
        (_message(covers=[0, 1]), "covers"),
        (_message(blobs=["x"]), "blobs"),
        (_message(text="x", parts=[{}]), "parts"),
        (_message(uid=uid_of("ann/message/1")), "second time"),
        (_message(meta={"a": "x" * 2_000_000}), "too"),
        (_swapped, "seq"),
        (_twice, "second time"),
        (_children_first, "behind its child"),
        (_changed(-1, sessions=9), "9 sessions"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    engine: Engine, copy: Engine, tmp_path: Path, change: Any, told: str
) -> None:
    """INV-20: nothing of such a file is stored."""
    talked(engine, rotated=True)
    lines = lines_of(exported(engine))
    change(lines)
    if told == "rewound":
        next(line for line in lines if line.get("seq") == 3)["state"] = "rewound"
    before = logical_dump(tmp_path / "copy.db")
    with pytest.raises(ImportFileError, match=told) as raised:
        import_bytes(copy, of_lines(lines), tmp_path)
    assert raised.value.line >= 1
    assert raised.value.hint
    assert logical_dump(tmp_path / "copy.db") == before


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n",
        b"SQLite format 3\0" + bytes(4096),
        b"\x1f\x8b garbage",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"type":"onepen-export","version":1}\n' + b'{"type":"session","meta":' + b'{"a":' * 9_999,
        b'{"type":"onepen-export","version":1}\n' + b"[" * 100_000 + b"\n",
        gzip.compress(b'{"type":"onepen-export","version":1}\n')[:-3],
        b"x" * 3_000_000,
    ],
)
def test_what_is_no_export_is_refused(copy: Engine, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ImportFileError):
        import_bytes(copy, data, tmp_path, limits=ImportLimits(line_bytes_max=1_000_000))


def test_limits_are_told_by_their_names(engine: Engine, copy: Engine, tmp_path: Path) -> None:
    talked(engine, rotated=True)
    first = exported(engine)
    for limits, name in (
        (ImportLimits(line_bytes_max=100), "line_bytes_max"),
        (ImportLimits(total_bytes_max=500), "total_bytes_max"),
        (ImportLimits(sessions_max=1), "sessions_max"),
        (ImportLimits(messages_max=2), "messages_max"),
    ):
        with pytest.raises(ImportFileError, match=name):
            import_bytes(copy, first, tmp_path, limits=limits)
    newer = first.replace(b'"version":1', b'"version":7')
    with pytest.raises(NewerExportError):
        import_bytes(copy, newer, tmp_path)
    with pytest.raises(ImportFileError, match="regular"):
        import_bytes_of_pipe(copy, tmp_path)


def import_bytes_of_pipe(copy: Engine, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    import_file(copy, folder / "pipe")


# Files -------------------------------------------------------------------------------------------


def test_a_file_appears_whole_private_and_never_over_another(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"

    def fails() -> None:
        with written_file(target) as out:
            out.line(_HEADER)
            assert not target.exists()
            raise Cut

    with pytest.raises(Cut):
        fails()
    assert list(tmp_path.iterdir()) == []
    with written_file(target) as out:
        out.line(_HEADER)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with pytest.raises(ExportError, match="already"), written_file(target):
        pass
    with written_file(target, overwrite=True) as out:
        out.line(_HEADER)
    (tmp_path / "a.db").touch()
    (tmp_path / "a.db-wal").touch()
    (tmp_path / "link").symlink_to(target)
    for name in ("a.db", "a.db-wal", "nowhere/x"):
        with pytest.raises(ExportError), written_file(tmp_path / name, overwrite=True):
            pass
    with pytest.raises(ExportError), written_file(tmp_path / "link"):
        pass
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.db", "a.db-wal", "link", "out.jsonl"]


def test_a_packed_file_is_the_same_each_time(engine: Engine, copy: Engine, tmp_path: Path) -> None:
    talked(engine)
    first = exported(engine)
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        with written_file(tmp_path / name) as out:
            out._stream.write(first)  # pyright: ignore[reportPrivateUsage]
    packed = (tmp_path / "one.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "two.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == first
    import_bytes(copy, packed, tmp_path)
    assert exported(copy, ALL) == first
