"""Export, import and export again, for any history; and for any damage to a file."""

import tempfile
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from onepen.runtime.testing.invariants import check_database, logical_dump
from onepen.storage.engine import Engine, EngineSettings
from onepen.storage.errors import ConflictError, ImportFileError
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.transfer import ImportReport, Selection
from onepen.storage.units import Unit

from ..storage.transferring import exported, import_bytes
from .histories import KEYS, StillClock, histories

QUICK = EngineSettings(synchronous="NORMAL")
FEWER = max(1, settings().max_examples // 4)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def written(units: list[Unit]) -> Engine:
    engine = open_sqlite(None, StillClock())
    for unit in units:
        engine.stage([unit])
        engine.commit()
    return engine


@settings(max_examples=FEWER, phases=PHASES)
@given(units=histories(size_max=40), data=st.data())
def test_export_import_export_gives_the_same_bytes(units: list[Unit], data: st.DataObject) -> None:
    """Whatever was exported from, the copy exports the same, is sound, and takes it only once."""
    engine = written(units)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.db"
        try:
            ids = [
                line.split(b'"')[7].decode()
                for line in exported(engine).splitlines()
                if line.startswith(b'{"type":"session"')
            ]
            whole = [Selection(everything=True), *(Selection(key=key) for key in KEYS)]
            some = [Selection(lineage=one) for one in ids] + [Selection(session_id=x) for x in ids]
            what = data.draw(st.sampled_from(whole[:1] * 3 + whole + some))
            try:
                first = exported(engine, what)
            except Exception as error:
                assert "is not stored" in str(error)
                return
            copy = open_sqlite(path, StillClock(), QUICK)
            try:
                import_bytes(copy, first, Path(folder))
                if b'"end_kind":"rotation"' not in first or what.everything:
                    assert exported(copy, what).decode() == first.decode()
                before = logical_dump(path)
                again = import_bytes(copy, first, Path(folder))
                assert logical_dump(path) == before
                assert (again.sessions_new, again.sessions_extended) == (0, 0)
            finally:
                copy.close()
            assert check_database(path) == []
        finally:
            engine.close()
