"""PROOF-5: an I/O error at every operation of the engine: EIO, disk full, short write, lost pages.

Each run has one fault, once or until it is healed, and is driven as the Writer drives an engine: an
error of `stage` or `commit` means that the batch is unknown, so the engine is reopened and gets the
same units again. In the end everything is stored once. Besides, each run is also ended right at its
error, by a process that dies and by a power loss, and started again from what that leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from onepen.runtime.testing import Failure, Fault, Kind
from onepen.runtime.testing.workloads import WORKLOADS

from ..proving import PROOF
from .campaign import Prepared, prepared
from .faults import Plan, io_error, operations_of, plans_for, spilling

SHORT = ("finalize", "take_over")
LONG = {"checkpoint": 3, "restart": 3, "indexing": 3, "give_back": 6}
NAMES = tuple(WORKLOADS) if PROOF else (*SHORT, *LONG)
# Staging what is larger than the cache writes to the log before the commit.
SPILLED = ("group_commit", "put_chunk", "delete_session")
PARTS = 6 if PROOF else 1  # so that no test takes as long as a hang
RUNS_MIN = 5_000 if PROOF else 700

_done: Counter[str] = Counter()
Property = Callable[[str, object], None]


def check(start: Prepared, plans: Iterable[Plan], record_property: Property) -> int:
    """Every plan; returns how many of them had an error that reached the caller."""
    found: list[str] = []
    runs = seen = 0
    for plan in plans:
        violations, run = io_error(start, plan)
        runs += 1
        seen += bool(run.deaths)
        found += [f"{plan}: {violation}" for violation in violations]
        if not run.fired:
            found.append(f"{plan}: the fault never fired")
    record_property("I/O error runs", runs)
    _done["runs"] += runs
    _done["tests"] += 1
    assert found == []
    return seen


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", NAMES)
def test_after_an_io_error_at_any_operation_everything_is_stored_once(
    name: str, part: int, record_property: Property
) -> None:
    """INV-1, INV-2, INV-5, INV-11, PROOF-5: an error of a commit means unknown, never a wrong
    answer.
    """
    start = prepared(name)
    plans = list(plans_for(operations_of(start)))
    if not PROOF and name in LONG:
        plans = plans[:: LONG[name]]  # each operation in some of its ways, or each other one
    assert check(start, plans[part::PARTS], record_property) > 0


@pytest.mark.parametrize("part", range(PARTS))
def test_a_database_whose_creation_failed_at_any_operation_is_created_by_the_next_opening(
    part: int, record_property: Property
) -> None:
    """INV-19, PROOF-5: a migration is done or not begun."""
    start = prepared("create_database")
    operations = operations_of(start)
    plans = [Plan(Fault(operation.number)) for operation in operations]
    if PROOF:
        plans = list(plans_for(operations))
    assert check(start, plans[part::PARTS], record_property) > 0


@pytest.mark.parametrize("name", SPILLED)
def test_an_io_error_while_staging_takes_the_whole_batch_along(
    name: str, record_property: Property
) -> None:
    """INV-5, INV-11, PROOF-5: SQLite rolls the transaction back by itself; no unit is left to
    commit alone.
    """
    start = prepared(name)
    with spilling():
        operations = operations_of(start)
        plans = plans_for(operations)
        if not PROOF:
            plans = (
                Plan(Fault(operation.number, failure))
                for operation in operations
                for failure in (Failure.EIO, Failure.FULL)
                if operation.kind is Kind.WRITE
            )
        assert check(start, plans, record_property) > 0


def test_a_read_that_fails_does_no_harm(record_property: Property) -> None:
    """INV-11, PROOF-5: while opening, staging and recovering."""
    for name in ("rotate", "restart"):
        start = prepared(name)
        operations = operations_of(start, count_reads=True)
        reads = [operation for operation in operations if operation.kind is Kind.READ]
        if not PROOF:
            reads = reads[::4]
        plans = [
            Plan(Fault(operation.number, sticky=sticky), count_reads=True)
            for operation in reads
            for sticky in (False, True)
        ]
        assert check(start, plans, record_property) > 0


def test_an_io_error_in_the_middle_of_reopening_is_followed_by_another_reopening(
    record_property: Property,
) -> None:
    """INV-11, INV-19, PROOF-5: recovery is repeated until it succeeds, and ends in the same
    database.
    """
    start = prepared("append_messages")
    first_faults = [
        Plan(Fault(operation.number, failure))
        for operation in operations_of(start)
        for failure in (Failure.EIO, Failure.DROP)
        if operation.kind is Kind.SYNC and operation.file.endswith("-wal")
    ]
    plans: list[Plan] = []
    for plan in first_faults:
        _, run = io_error(start, plan)
        for number in range(run.reopen_operations):
            for failure in Failure if PROOF else (Failure.EIO,):
                for sticky in (False, True) if PROOF else (False,):
                    second = Fault(number, failure, sticky=sticky)
                    plans.append(replace(plan, in_reopen=second))
    assert len(plans) > 50
    assert check(start, plans, record_property) == len(plans)


def test_the_campaign_was_large_enough() -> None:
    """PROOF-5: the promised number of runs."""
    if _done["tests"] < (len(NAMES) + 1) * PARTS + len(SPILLED) + 3:
        pytest.skip("only some of the tests were run")
    assert _done["runs"] >= RUNS_MIN
