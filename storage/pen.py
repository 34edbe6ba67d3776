"""The pen: batching as one synchronous state machine, driven by whoever holds it.

    take ──▶ stage ──▶ commit ──▶ resolve ──▶ take …
      ▲        │          │
      └────────┴──────────┘
              recover: a batch whose outcome is unknown stays taken and is staged again, as it was

The ledger is the ordered list of units that are posted and not resolved. It belongs to the
writer's reference and outlives the pen, its thread and its engine: whoever takes the pen next
finds the same units in the same order and begins with them. Batches are all that waits, capped
in rows and bytes; they grow with the load by themselves, without a timer.

Posting is safe from another thread; everything else belongs to the one driver. The pen never
resolves a unit before `commit` has returned, and never skips or reorders one.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from .commands import AppendMessages
from .errors import InvariantError, LowSpaceError, StorageError

if TYPE_CHECKING:
    from .engine import Engine
    from .units import Durable, Refused, Unit

TicketT = TypeVar("TicketT")


class Posted(Generic[TicketT]):
    """A unit in the ledger, with the ticket that will carry its receipt."""

    __slots__ = ("rows", "size_bytes", "ticket", "unit")

    def __init__(self, unit: Unit, size_bytes: int, ticket: TicketT) -> None:
        self.unit = unit
        self.size_bytes = size_bytes
        self.ticket = ticket
        self.rows = 0
        for command in unit.commands:
            self.rows += len(command.messages) if type(command) is AppendMessages else 1


class Ledger(Generic[TicketT]):
    """Units that are posted and not resolved, in order."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[Posted[TicketT] | None] = SimpleQueue()
        self._next: Posted[TicketT] | None = None
        self.taken: list[Posted[TicketT]] = []

    def post(self, posted: Posted[TicketT]) -> None:
        self._arrivals.put(posted)

    def wake(self) -> None:
        """Let a `take` that waits return, with nothing."""
        self._arrivals.put(None)

    def take(self, rows_max: int, size_bytes_max: int, wait_s: float | None) -> bool:
        """Take the next batch, unless one is taken already; true if there is one.

        Waits for the first unit: not at all for 0, without end for `None`.
        """
        if self.taken:
            return True
        first = self._next or self._arrival(wait_s)
        self._next = None
        if first is None:
            return False
        self.taken.append(first)
        rows, size_bytes = first.rows, first.size_bytes
        get_nowait, taken = self._arrivals.get_nowait, self.taken
        while True:
            try:
                posted = get_nowait()
            except Empty:
                return True
            if posted is None:
                continue  # a wake-up that has done its work: the batch is here
            rows += posted.rows
            size_bytes += posted.size_bytes
            if rows > rows_max or size_bytes > size_bytes_max:
                self._next = posted
                return True
            taken.append(posted)

    def _arrival(self, wait_s: float | None) -> Posted[TicketT] | None:
        try:
            return self._arrivals.get(block=wait_s != 0, timeout=wait_s)
        except Empty:
            return None

    def clear(self) -> list[Posted[TicketT]]:
        """Everything that is not resolved, in order; for whoever must answer it at the very end."""
        rest = [*self.taken, *([self._next] if self._next is not None else [])]
        self.taken, self._next = [], None
        while not self._arrivals.empty():
            posted = self._arrival(0)
            if posted is not None:
                rest.append(posted)
        return rest


class Pen(Generic[TicketT]):
    """One engine and one ledger, step by step."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger[TicketT],
        *,
        batch_rows_max: int,
        batch_bytes_max: int,
    ) -> None:
        self.engine = engine
        self.ledger = ledger
        self._batch_rows_max = batch_rows_max
        self._batch_bytes_max = batch_bytes_max
        self._receipts: list[Durable | Refused] = []
        self._error: StorageError | None = None
        self.phase: Literal["idle", "taken", "staged", "committed", "broken"] = "idle"

    def _expect(self, *phases: str) -> None:
        if self.phase not in phases:
            raise InvariantError(f"the pen is {self.phase}, not {' or '.join(phases)}")

    def take(self, wait_s: float | None) -> bool:
        """The next batch; after `recover`, the same one again."""
        self._expect("idle", "taken")
        if self.ledger.take(self._batch_rows_max, self._batch_bytes_max, wait_s):
            self.phase = "taken"
            return True
        return False

    def stage(self) -> None:
        """Apply the batch inside a transaction. On any error the pen is broken until `recover`."""
        self._expect("taken")
        self.phase = "broken"
        try:
            self._receipts = self.engine.stage([posted.unit for posted in self.ledger.taken])
        except StorageError as error:
            self._error = error
            raise
        self.phase = "staged"

    def commit(self) -> None:
        """Make it durable.

        On any error the batch is unknown, and the pen broken until `recover`.
        """
        self._expect("staged")
        self.phase = "broken"
        try:
            self.engine.commit()
        except StorageError as error:
            self._error = error
            raise
        self.phase = "committed"

    def resolve(self) -> list[tuple[Posted[TicketT], Durable | Refused]]:
        """The batch with its receipts; only now, behind the commit, are they true."""
        self._expect("committed")
        if len(self._receipts) != len(self.ledger.taken):
            raise InvariantError("an engine must give one receipt for each unit")
        resolved = list(zip(self.ledger.taken, self._receipts, strict=True))
        self.ledger.taken, self._receipts = [], []
        self.phase = "idle"
        return resolved

    def recover(self) -> None:
        """Bring the engine back; the batch stays taken.

        Raises `StorageError` while that is impossible.
        """
        self._expect("broken")
        # With too little space nothing was begun, so there is nothing to doubt and nothing to
        # reopen.
        if not isinstance(self._error, LowSpaceError):
            self.engine.reopen()
        self._error = None
        self.phase = "taken" if self.ledger.taken else "idle"

    def distrust(self) -> None:
        """The last driver died somewhere: whatever it was doing, begin by recovering."""
        self.phase = "broken"
        self._error = None
