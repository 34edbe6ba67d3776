"""What was not acknowledged is sent again, in order, and nothing changes by it."""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from onepen.runtime.testing.conformance.agreement import Names, names_in, views_of
from onepen.runtime.testing.conformance.desk import outcome_of
from onepen.runtime.testing.invariants import compare, logical_dump
from onepen.runtime.testing.model.model import Model
from onepen.storage import commands as c
from onepen.storage.engine import Engine, EngineSettings
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.units import Unit

from .histories import KEYS, StillClock, histories

# Not slowed down by syncs: what is durable when is the crash tests' business.
QUICK = EngineSettings(synchronous="NORMAL")

# Row numbers of a blob that was dropped and stored again differ; the views are compared as well.
_NUMBERED_ANEW = {"blobs", "chunks", "blob_uses"}


@contextmanager
def opened(path: Path) -> Generator[Engine]:
    engine = open_sqlite(path, StillClock(), QUICK)
    try:
        yield engine
    finally:
        engine.close()


def send(engine: Engine, units: Sequence[Unit]) -> list[str]:
    receipts = engine.stage(units)
    engine.commit()
    return [outcome_of(receipt) for receipt in receipts]


def views(engine: Engine, names: Names) -> dict[str, Any]:
    with engine.reading() as reader:
        return views_of(reader, names)


class Senders:
    """Who sends a unit: one chain for each key, delivery, timer, blob and staged session."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def of(self, unit: Unit) -> set[str]:
        senders = {str(guard.key) for guard in unit.guards}
        for command in unit.commands:
            senders.add(self._sender(command))
        return senders

    def _sender(self, command: c.AnyCommand) -> str:
        names = ("session_id", "parent_id", "turn_id", "delivery_id", "timer_id", "blob_id")
        ids = [getattr(command, name, None) for name in (*names, "inbound_id")]
        known = [self._owners[name] for name in ids if name in self._owners]
        own = str(next((name for name in ids if name is not None), type(command).__name__))
        sender = str(getattr(command, "key", known[0] if known else own))
        for name in (*ids, getattr(command, "child_id", None)):
            if name is not None:
                self._owners.setdefault(name, sender)
        return sender


_FORGETS = (c.PruneInbox, c.PruneWork, c.EraseWork, c.PruneSession, c.DropStaged)


def _forgets(unit: Unit) -> bool:
    return any(isinstance(command, _FORGETS) for command in unit.commands)


@given(units=histories(size_max=25), data=st.data())
def test_a_suffix_sent_again_changes_nothing(units: list[Unit], data: st.DataObject) -> None:
    """A8, INV-1: any sender's unacknowledged suffix, at any moment, any number of times.

    What forgets is left out: it takes away on purpose what a very late repeat would be recognised
    by.
    """
    units = [unit for unit in units if not _forgets(unit)]
    names = names_in(units)
    with tempfile.TemporaryDirectory() as folder:
        once, often = Path(folder) / "once.db", Path(folder) / "often.db"
        with opened(once) as engine:
            expected = [send(engine, [unit])[0] for unit in units]
            wanted = views(engine, names)
        senders, sent = Senders(), list[tuple[Unit, set[str]]]()
        with opened(often) as engine:
            for unit, outcome in zip(units, expected, strict=True):
                assert send(engine, [unit]) == [outcome]
                if outcome in ("durable", "again"):
                    sent.append((unit, senders.of(unit)))
                while sent and data.draw(st.sampled_from((False, False, True))):
                    _resend(engine, sent, data)
            found = views(engine, names)
        for asked, answer in wanted.items():
            assert (asked, found[asked]) == (asked, answer)
        differences = compare(logical_dump(once), logical_dump(often))
        assert [d for d in differences if d.rule.split()[-1] not in _NUMBERED_ANEW] == []


def _resend(engine: Engine, sent: list[tuple[Unit, set[str]]], data: st.DataObject) -> None:
    """One sender replays the end of its ledger."""
    sender = data.draw(st.sampled_from(sorted({name for _, names in sent for name in names})))
    ledger = [unit for unit, names in sent if sender in names]
    suffix = ledger[-data.draw(st.integers(1, len(ledger))) :]
    together = data.draw(st.booleans())
    for batch in [suffix] if together else [[unit] for unit in suffix]:
        for unit, outcome in zip(batch, send(engine, batch), strict=True):
            assert outcome == "again" or _may_differ(unit, outcome), (outcome, unit)


def _may_differ(unit: Unit, outcome: str) -> bool:
    """Where a repeat is refused although it was applied; nothing is changed by that either.

    A predecessor learns that it is one. What was about a deleted session's text finds it gone. A
    blob that was dropped is stored and dropped again, or is in use by now. A place that was kept
    for an import has the key and the parent that the import gave it.
    """
    kinds = {type(command) for command in unit.commands}
    if c.OpenIncarnation in kinds:
        return outcome == "stale_incarnation"
    if any(isinstance(command, c.CreateSession) and command.hidden for command in unit.commands):
        return outcome == "conflict"
    if kinds & {c.MarkDelivery, c.AnswerQuestion}:
        return outcome == "missing"
    return bool(kinds & {c.PutChunk, c.SealBlob, c.DropBlob})


@given(units=histories(size_max=25), data=st.data())
def test_a_stale_value_is_never_applied(units: list[Unit], data: st.DataObject) -> None:
    """INV-1: with a version that was replaced already, a command is refused at any later time."""
    model = Model()
    setting: list[c.AnyCommand] = []
    for unit in units:
        (receipt,) = model.apply([unit])
        if outcome_of(receipt) == "durable":
            setting += [command for command in unit.commands if hasattr(command, "replaces")]
    assume(setting)
    command: Any = data.draw(st.sampled_from(setting))
    late = Unit((_other(command),))
    names = names_in([*units, late])
    engine = open_sqlite(None, StillClock())
    try:
        send(engine, units)
        before = views(engine, names)
        (outcome,) = send(engine, [late])
        assert outcome not in ("durable", "again")
        assert views(engine, names) == before
    finally:
        engine.close()


def _other(command: Any) -> Any:
    """The same version of the same value, with another content."""
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    return type(command)(**{**fields, "at_ms": command.at_ms + 1})


def test_senders_are_told_apart() -> None:
    """The chains of the property above are those of keys, and of what has no key."""
    senders = Senders()
    opened_ = Unit((c.OpenIncarnation(key=KEYS[0], incarnation=1),))  # type: ignore[arg-type]
    assert senders.of(opened_) == {KEYS[0]}
    put = c.PutChunk(blob_id="b", index=0, data=b"")  # type: ignore[arg-type]
    assert senders.of(Unit((put,))) == {"b"}
