"""PROOF-4: a power loss at every I/O operation of every kind of transaction.

Each workload runs once on a recording disk. For every point of the recording the disk is rebuilt as
a power loss may leave it: nothing that was not synced, all of it, or seeded torn subsets;
`campaign.check_directory` then starts again on it. Some of the recoveries are cut off by a second
power loss.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from onepen.runtime.testing import Synced, Written
from onepen.runtime.testing.workloads import WORKLOADS

from ..proving import PROOF
from .campaign import power_loss, prepared, record

if TYPE_CHECKING:
    from collections.abc import Callable

# Seeded torn subsets for each point; with these the proof profile has more than 10,000 images.
TORN = 4 if PROOF else 1
# Every so-maniest image is recovered on a recording disk and loses its power again.
DOUBLE_EVERY = 150
PARTS = 6 if PROOF else 1  # so that no test takes as long as a hang
IMAGES_MIN, DOUBLES_MIN = (10_000, 400) if PROOF else (3_000, 100)

_done: Counter[str] = Counter()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_power_loss_at_any_operation_loses_nothing_acknowledged_and_tears_nothing(
    name: str, part: int, record_property: Callable[[str, object], None]
) -> None:
    """INV-1, INV-2, INV-5, INV-6, INV-19, PROOF-4; contract A8, B1."""
    tally = power_loss(prepared(name), torn=TORN, double_every=DOUBLE_EVERY, part=part, parts=PARTS)
    record_property("images", tally.runs - tally.doubles)
    record_property("double-crash images", tally.doubles)
    _done.update({"tests": 1, "images": tally.runs - tally.doubles, "doubles": tally.doubles})
    assert tally.violations == []


def test_the_campaign_was_large_enough() -> None:
    """PROOF-4: the promised number of images, of at least 20 kinds of transactions."""
    if _done["tests"] < len(WORKLOADS) * PARTS:
        pytest.skip("only some of the workloads were run")
    assert len(WORKLOADS) >= 20
    assert _done["images"] >= IMAGES_MIN
    assert _done["doubles"] >= DOUBLES_MIN


def test_a_recording_holds_the_whole_life_of_a_database() -> None:
    """A campaign on a recording without syncs, or without the closing checkpoint, would prove
    little.
    """
    entries = record(prepared("append_messages")).entries
    synced = [entry.file for entry in entries if isinstance(entry, Synced)]
    assert synced.count("onepen.db-wal") >= 3, "the fence and two commits"
    assert "onepen.db" in synced, "the checkpoint at the end"
    assert any(isinstance(entry, Written) and entry.file == "onepen.db" for entry in entries)
