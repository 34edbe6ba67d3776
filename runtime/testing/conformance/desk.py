"""An engine under test beside the model: every unit goes to both, and they must agree.

A `Desk` owns neither: it stages, commits and compares. Receipts are compared unit by unit (durable,
again, refused and why), read views after every batch. It knows nothing of SQL and works for any
engine.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ....storage.units import Durable, Refused, Unit
from ..model.model import Model
from .agreement import Names, names_in, views_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from ....storage.commands import AnyCommand
    from ....storage.engine import Engine, Reader
    from ....storage.identity import SessionId
    from ....storage.records import Message, Session
    from ....storage.units import Guard, Reason


class DisagreementError(AssertionError):
    """Engine and model differ."""


class Desk:
    """One engine and one model, fed with the same units."""

    def __init__(self, engine: Engine, model: Model | None = None) -> None:
        self.engine = engine
        self.model = Model() if model is None else model
        self.names = Names()

    def apply(self, *units: Unit) -> list[Durable | Refused]:
        """One batch; returns the engine's receipts."""
        receipts = self.send(*units)
        self.agree()
        return receipts

    def send(self, *units: Unit) -> list[Durable | Refused]:
        """The same, with receipts compared and views not: for long histories."""
        receipts = self.engine.stage(units)
        self.engine.commit()
        expected = self.model.apply(units)
        names_in(units, self.names)
        for unit, receipt, wanted in zip(units, receipts, expected, strict=True):
            if outcome_of(receipt) != outcome_of(wanted):
                raise DisagreementError(f"engine: {receipt}\nmodel: {wanted}\nunit: {unit}")
        return receipts

    def engine_receipts(self, *units: Unit) -> list[Durable | Refused]:
        """One batch for the engine alone: for what no model understands, and for large ones."""
        receipts = self.engine.stage(units)
        self.engine.commit()
        return receipts

    def agree(self) -> None:
        """Raise unless engine and model give the same answers."""
        found = self.views()
        with self.model.reading() as reader:
            expected = views_of(reader, self.names)
        for asked, answer in expected.items():
            if found[asked] != answer:
                raise DisagreementError(f"{asked}\nengine: {found[asked]}\nmodel: {answer}")

    def views(self) -> dict[str, Any]:
        """Every view of the engine, of every name that was mentioned so far."""
        with self.engine.reading() as reader:
            return views_of(reader, self.names)

    # Expectations ----------------------------------------------------------------------------

    def done(self, *units: Unit) -> list[Durable]:
        """Apply units that are new and must be accepted."""
        receipts = self.apply(*units)
        assert [outcome_of(receipt) for receipt in receipts] == ["durable"] * len(units)
        return [receipt for receipt in receipts if isinstance(receipt, Durable)]

    def again(self, *units: Unit) -> None:
        """Apply units that are stored already: nothing may change."""
        names_in(units, self.names)
        before = self.views()
        receipts = self.send(*units)
        assert [outcome_of(receipt) for receipt in receipts] == ["again"] * len(units)
        assert self.views() == before

    def refused(self, reason: Reason, unit: Unit) -> Refused:
        """Apply a unit that must be refused: nothing may change."""
        names_in([unit], self.names)
        before = self.views()
        (receipt,) = self.send(unit)
        assert outcome_of(receipt) == reason, receipt
        assert self.views() == before
        assert isinstance(receipt, Refused)
        receipt.error()  # every refusal has an error of its own
        return receipt

    # Reading ---------------------------------------------------------------------------------

    def reading(self) -> AbstractContextManager[Reader]:
        return self.engine.reading()

    def session(self, session_id: SessionId) -> Session:
        with self.engine.reading() as reader:
            session = reader.session(session_id)
        assert session is not None
        return session

    def rows(self, session_id: SessionId, *, everything: bool = False) -> tuple[Message, ...]:
        with self.engine.reading() as reader:
            return reader.transcript(session_id, include_inactive=everything, limit=10_000).messages

    def texts(self, session_id: SessionId, *, everything: bool = False) -> list[str | None]:
        return [message.text for message in self.rows(session_id, everything=everything)]


class UnderTest:
    """What a class of conformance tests stands on: how to open the engine that is checked."""

    reopens = True
    """Whether an engine that is opened in the same folder again finds what was stored."""

    reads_while_staged = True
    """Whether a read may begin between `stage` and `commit`; if not, it waits for the commit."""

    def open_engine(self, folder: Path) -> Engine:
        """An engine for this folder, which exists; every call gives one that is open."""
        raise NotImplementedError

    @contextmanager
    def desk(self, folder: Path) -> Generator[Desk]:
        folder.mkdir(parents=True, exist_ok=True)
        engine = self.open_engine(folder)
        try:
            yield Desk(engine)
        finally:
            engine.close()


def outcome_of(receipt: Durable | Refused) -> str:
    """What a receipt says, in one word."""
    if isinstance(receipt, Refused):
        return receipt.reason
    return "again" if receipt.again else "durable"


def bare(*commands: AnyCommand, guards: tuple[Guard, ...] = ()) -> Unit:
    """A unit without guards, to see what a command says by itself."""
    return Unit(commands, guards)
