"""Engine and model say the same, for any history in batches of any size."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from onepen.runtime.testing.conformance.desk import Desk
from onepen.runtime.testing.invariants import check_database
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.units import Unit

from .histories import StillClock, histories, in_batches


@given(units=histories(), data=st.data())
def test_engine_and_model_agree_on_receipts_and_views(
    units: list[Unit], data: st.DataObject
) -> None:
    """INV-1, INV-4, INV-5, INV-17: receipts unit by unit, every view after every batch."""
    engine = open_sqlite(None, StillClock())
    try:
        desk = Desk(engine)
        for batch in in_batches(data.draw, units):
            desk.apply(*batch)
    finally:
        engine.close()


@settings(max_examples=max(1, settings().max_examples // 10))
@given(units=histories(size_max=40), data=st.data())
def test_a_file_agrees_too_and_is_sound(units: list[Unit], data: st.DataObject) -> None:
    """INV-2, INV-6, INV-12: closed and opened again in the middle, and checked from outside."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.db"
        batches = in_batches(data.draw, units)
        middle = data.draw(st.integers(0, len(batches)))
        desk = Desk(open_sqlite(path, StillClock()))
        try:
            for number, batch in enumerate(batches):
                if number == middle:
                    desk.engine.close()
                    desk.engine = open_sqlite(path, StillClock())
                    desk.agree()
                desk.send(*batch)
            desk.agree()
        finally:
            desk.engine.close()
        assert check_database(path) == []
