"""Tickets: what a caller holds for a unit that is posted.

Keeps: a ticket resolves once, to a receipt that is true. Cancelling a wait revokes nothing: the
unit stays in the ledger, the ticket still belongs to whoever holds it, and waiting again is
allowed. A wait ends early, with `StorageUnavailableError`, only while storage is down; the ticket
itself stays unresolved then.

Whoever posts may name a function that gets the receipt. It is called before any waiter runs, in the
order of posting, on the loop's own stack: it must not raise and can't wait.

Belongs to the trio thread. Nothing here may run a checkpoint between looking at the receipt and
parking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import outcome
import trio

from ..storage.errors import OutcomeUnknownError
from ..storage.units import Durable, Receipt, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..storage.errors import OnepenError


@final
class Ticket:
    """The promise of a receipt."""

    __slots__ = ("_on_receipt", "_receipt", "_trouble", "_waiters", "posted_s")

    def __init__(
        self,
        posted_s: float,
        trouble: Callable[[], OnepenError | None],
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        self.posted_s = posted_s
        self._on_receipt = on_receipt
        self._receipt: Receipt | None = None
        self._waiters: list[trio.lowlevel.Task] | None = None  # most tickets have one, or none
        self._trouble = trouble

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, once there is one."""
        return self._receipt

    async def wait(self) -> Receipt:
        """The receipt. Does not yield if it is there already.

        Raises `StorageUnavailableError` while storage is down; the unit stays posted all the same.
        """
        if self._receipt is not None:
            return self._receipt
        if (error := self._trouble()) is not None:
            raise error
        task = trio.lowlevel.current_task()
        if self._waiters is None:
            self._waiters = [task]
        else:
            self._waiters.append(task)

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            if self._waiters is not None:
                self._waiters.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        receipt: Receipt = await trio.lowlevel.wait_task_rescheduled(abort)
        return receipt

    async def durable(self) -> Durable:
        """The same for callers that expect success: a refusal or an unknown outcome is raised."""
        receipt = await self.wait()
        if isinstance(receipt, Durable):
            return receipt
        if isinstance(receipt, Refused):
            raise receipt.error()
        raise OutcomeUnknownError(f"not known whether the unit is stored: {receipt.reason}")

    def resolve(self, receipt: Receipt) -> None:
        """For the Writer: the outcome is known."""
        self._receipt = receipt
        if self._waiters is not None:
            waiters, self._waiters = self._waiters, None
            for task in waiters:
                trio.lowlevel.reschedule(task, outcome.Value(receipt))
        if self._on_receipt is not None:
            on_receipt, self._on_receipt = self._on_receipt, None
            on_receipt(receipt)

    def interrupt_waits(self, error: OnepenError) -> None:
        """For the Writer: storage is down, nobody shall wait; the ticket stays open."""
        waiters, self._waiters = self._waiters, None
        for task in waiters or ():
            # An Outcome may be used once, so each task gets its own.
            trio.lowlevel.reschedule(task, outcome.Error(error))
