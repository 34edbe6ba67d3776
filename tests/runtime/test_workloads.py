"""The canonical workloads cover every command, and an undisturbed run of each is accepted and
sound.
"""

from __future__ import annotations

from typing import get_args

import pytest

from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage import commands
from onepen.storage.edge import check_unit

from ..crash.campaign import prepare


def test_every_command_is_under_test_in_some_workload() -> None:
    """PROOF-4: "every command kind" is meant literally, also for commands that are added later."""
    covered = {kind for load in WORKLOADS.values() for kind in load.kinds}
    assert covered == set(get_args(commands.AnyCommand))


def test_every_unit_passes_the_edge() -> None:
    """The workloads are what a real writer could post."""
    for load in WORKLOADS.values():
        for unit in (*load.preparation, *(unit for batch in load.batches for unit in batch.units)):
            assert check_unit(unit) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_undisturbed_run_is_accepted_sound_and_the_same_every_time(name: str) -> None:
    """INV-5, INV-22: the states that a crash test compares with are right, and differ."""
    first, second = prepare(WORKLOADS[name]), prepare(WORKLOADS[name])
    assert first.violations == ()
    assert first.dumps == second.dumps
    assert all(one != other for one, other in zip(first.dumps, first.dumps[1:], strict=False))
