"""Exports and imports on an engine alone, without a Writer: what the tests of both are made of."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onepen.storage.engine import Engine
from onepen.storage.identity import SessionId, SessionKey
from onepen.storage.sqlite.scratch import Scratch
from onepen.storage.transfer import (
    Exporter,
    Hold,
    ImportLimits,
    ImportReport,
    Read,
    Release,
    Selection,
    Write,
    importing,
    open_source,
    output_to,
)
from onepen.storage.units import Refused, Unit

ALL = Selection(everything=True)
LIMITS = ImportLimits()


def exported(engine: Engine, what: Selection = ALL) -> bytes:
    """The bytes of an export."""
    stream = io.BytesIO()
    exporter = Exporter(output_to(stream), what)
    try:
        more = True
        while more:
            with engine.reading() as reader:
                more = exporter.step(reader)
    finally:
        exporter.close()
    return stream.getvalue()


def of_session(session_id: str) -> Selection:
    return Selection(session_id=SessionId(session_id))


def of_key(key: str) -> Selection:
    return Selection(key=SessionKey(key))


def wrote(engine: Engine, unit: Unit) -> None:
    """One unit, in a batch of its own."""
    (receipt,) = engine.stage([unit])
    engine.commit()
    if isinstance(receipt, Refused):
        raise receipt.error()


def import_file(
    engine: Engine,
    path: Path,
    *,
    dry_run: bool = False,
    limits: ImportLimits = LIMITS,
    write: Callable[[Engine, Unit], None] = wrote,
    told: Callable[[Any], None] = lambda _: None,
) -> ImportReport:
    """Import a file; `write` may do something else at some unit."""
    source = open_source(path, limits)
    scratch = Scratch()
    steps = importing(source, scratch, dry_run=dry_run)
    answer: Any = None
    held: str | None = None
    try:
        while True:
            try:
                ask = steps.send(answer)
            except StopIteration as stop:
                assert held is None
                report: ImportReport = stop.value
                return report
            answer = None
            match ask:
                case Read():
                    with engine.reading() as reader:
                        answer = ask.view(reader)
                case Write():
                    write(engine, ask.unit)
                case Hold():
                    assert held is None
                    held = ask.key
                case Release():
                    held = None
                case _:
                    told(ask)
    finally:
        source.close()
        scratch.close()


def import_bytes(engine: Engine, data: bytes, folder: Path, **options: Any) -> ImportReport:
    path = folder / "given.jsonl"
    path.write_bytes(data)
    return import_file(engine, path, **options)
