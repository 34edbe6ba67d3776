"""Export, import and export again, for any history; and any damage to a file."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from onepen.runtime.testing.invariants import check_database, logical_dump
from onepen.storage.engine import Engine, EngineSettings
from onepen.storage.errors import ImportFileError
from onepen.storage.identity import SessionId
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.transfer import Selection
from onepen.storage.transfer.format import SessionLine, decoded
from onepen.storage.units import Unit

from ..storage.transferring import exported, import_bytes
from .histories import KEYS, StillClock, histories

QUICK = EngineSettings(synchronous="NORMAL")
FEWER = max(1, settings().max_examples // 4)
# Histories are long, and shrinking one through two databases takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def written(units: list[Unit], path: Path | None = None) -> Engine:
    engine = open_sqlite(path, StillClock(), QUICK)
    for unit in units:
        engine.stage([unit])
        engine.commit()
    return engine


def sessions_in(data: bytes) -> list[SessionLine]:
    return [one for one in map(decoded, data.splitlines()) if isinstance(one, SessionLine)]


def selections(engine: Engine) -> list[Selection]:
    """What there is to be exported, everything first."""
    sessions = sessions_in(exported(engine))
    ids = [SessionId(one.id) for one in sessions]
    return [
        Selection(everything=True),
        *(Selection(key=key) for key in KEYS if any(one.key == key for one in sessions)),
        *(Selection(lineage=one) for one in ids),
        *(Selection(session_id=one) for one in ids),
    ]


def goes_on_elsewhere(data: bytes) -> bool:
    """Whether a session was rotated away to one that is not in the file: it is reopened (G4)."""
    sessions = sessions_in(data)
    parents = {one.parent_id for one in sessions if one.edge == "rotation"}
    return any(one.end_kind == "rotation" and one.id not in parents for one in sessions)


@settings(max_examples=FEWER, phases=PHASES)
@given(units=histories(size_max=40), data=st.data())
def test_export_import_export_gives_the_same_bytes(units: list[Unit], data: st.DataObject) -> None:
    """G4: the copy exports the same, is sound, and takes the file only once."""
    engine = written(units)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.db"
        try:
            wanted = selections(engine)
            what = data.draw(st.sampled_from([wanted[0]] * 3 + wanted))
            first = exported(engine, what)
        finally:
            engine.close()
        copy = open_sqlite(path, StillClock(), QUICK)
        try:
            report = import_bytes(copy, first, Path(folder))
            assert report.sessions_new == len(sessions_in(first))
            if not goes_on_elsewhere(first):
                assert exported(copy, what).decode() == first.decode()
            before = logical_dump(path)
            again = import_bytes(copy, first, Path(folder))
            assert logical_dump(path) == before
            assert (again.sessions_new, again.sessions_extended) == (0, 0)
        finally:
            copy.close()
        assert check_database(path) == []


@settings(max_examples=FEWER, phases=PHASES)
@given(units=histories(size_max=40), data=st.data())
def test_what_was_exported_earlier_is_gone_on_with(units: list[Unit], data: st.DataObject) -> None:
    """H3: an export of an earlier moment, then one of a later: what is new is appended.

    Whatever happened in between, the copy stays sound, is what the later file says or a conflict
    is raised, and importing the later file again changes nothing.
    """
    cut = data.draw(st.integers(0, len(units)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.db"
        engine = written(units[:cut])
        try:
            earlier = exported(engine)
            for unit in units[cut:]:
                engine.stage([unit])
                engine.commit()
            later = exported(engine)
        finally:
            engine.close()
        copy = open_sqlite(path, StillClock(), QUICK)
        try:
            import_bytes(copy, earlier, Path(folder))
            before = logical_dump(path)
            try:
                import_bytes(copy, later, Path(folder))
            except Exception as error:
                assert type(error).__name__ == "ConflictError"  # noqa: PT017 - or none at all
                assert logical_dump(path) == before
                return
            after = logical_dump(path)
            rows = {one.id: one.messages for one in sessions_in(later) if not one.deleted}
            with copy.reading() as reader:
                for session_id, count in rows.items():
                    session = reader.session(session_id)
                    assert session is not None
                    assert session.deleted or session.next_seq == count
            import_bytes(copy, later, Path(folder))
            assert logical_dump(path) == after
        finally:
            copy.close()
        assert check_database(path) == []


# Damage ------------------------------------------------------------------------------------------


def _flip(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    place: int = draw(st.integers(0, len(data) - 1))
    bits: int = draw(st.integers(1, 255))
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def _cut(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    return data[: draw(st.integers(0, len(data) - 1))]


def _lines(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    lines: list[bytes] = data.splitlines(keepends=True)
    one: int = draw(st.integers(0, len(lines) - 1))
    two: int = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(("twice", "gone", "moved", "garbage", "cut short")))
    if kind == "twice":
        lines.insert(two, lines[one])
    elif kind == "gone":
        del lines[one]
    elif kind == "moved":
        lines.insert(two, lines.pop(one))
    elif kind == "garbage":
        garbage: bytes = draw(st.binary(max_size=40))
        lines.insert(one, garbage + b"\n")
    else:
        lines = lines[:one]
    return b"".join(lines)


def _without_digest(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """As somebody would leave it who edits it: nothing but the content tells what is wrong."""
    lines = _lines(data, draw).splitlines(keepends=True)
    if lines and lines[-1].startswith(b'{"type":"end"'):
        lines[-1] = lines[-1].partition(b',"sha256"')[0] + b"}\n"
    return b"".join(lines)


def refused(copy: Engine, damaged: bytes, folder: Path) -> bool:
    """Whether the import ends with an error that says where and what to do."""
    try:
        import_bytes(copy, damaged, folder)
    except ImportFileError as error:
        return error.line >= 1 and error.hint != ""
    return False


@settings(max_examples=FEWER * 2, phases=PHASES)
@given(units=histories(size_max=30), data=st.data())
def test_a_damaged_file_is_refused_and_nothing_of_it_is_kept(
    units: list[Unit], data: st.DataObject
) -> None:
    """Flipped, cut, with lines twice, gone or in another order: an error names the line."""
    engine = written(units)
    try:
        sound = exported(engine)
    finally:
        engine.close()
    damage = data.draw(st.sampled_from((_flip, _cut, _lines, _without_digest)))
    damaged = damage(sound, data.draw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.db"
        copy = open_sqlite(path, StillClock(), QUICK)
        try:
            before = logical_dump(path)
            if refused(copy, damaged, Path(folder)):
                assert logical_dump(path) == before
            else:
                # Only what an editor could have meant is taken: lines in an order that says the
                # same, or fewer of them.
                assert damaged == sound or damage is _without_digest
        finally:
            copy.close()
        assert check_database(path) == []


def test_the_damage_above_is_damage() -> None:
    """A flipped bit in a text is told by the digest alone, and without it by nothing."""
    engine = written([])
    try:
        sound = exported(engine)
        with tempfile.TemporaryDirectory() as folder:
            flipped = sound.replace(b'"sessions":0', b'"sessions":1')
            with pytest.raises(ImportFileError, match="line 2"):
                import_bytes(engine, flipped, Path(folder))
    finally:
        engine.close()
