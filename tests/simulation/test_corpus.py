"""Cases that have once shown a bug, run for ever; and the promise that a case is always one run.

Each line of `corpus.jsonl` is a case, and names what it showed: most of them are the smallest
schedules at which a planted bug was found. A case that fails anywhere prints its line; put it there
with the mend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..proving import PROOF
from .cases import RUNS, Case, decoded, hold
from .replay import CORPUS
from .world import Step

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
LINES = CORPUS.read_text().splitlines()
HASH_SEEDS = range(20 if PROOF else 2)


@pytest.mark.parametrize("number", range(len(LINES)))
def test_what_has_shown_a_bug_once_holds(number: int) -> None:
    """PROOF-9."""
    hold(decoded(LINES[number]))


def test_a_case_is_the_same_run_in_every_process(
    record_property: Callable[[str, object], None],
) -> None:
    """INV-22, PROOF-9: whatever the order in which hashes put things."""
    command = [sys.executable, "-m", "tests.simulation.replay", "--corpus"]
    told: set[str] = set()
    for seed in HASH_SEEDS:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        told.add(done.stdout.decode())
        record_property("replays", len(LINES))
    (digests,) = told
    assert len(set(digests.split())) > len(LINES) / 2, "different cases are different runs"


def test_a_case_is_read_as_it_was_written() -> None:
    program = [[Step("ask"), Step("ask", "two:b", "many")], [Step("rotate")]]
    case = Case("sessions", program, [0, 2, 0, 1], 7, 0.25)
    assert decoded(case.encoded()) == case
    assert decoded(case._replace(schedule=[1, 0, 0], cut=None).encoded()).schedule == [1]


def test_a_case_that_fails_says_what_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> None:
        raise AssertionError("something is wrong")

    case = Case("broken", [[Step("ask")]], [1])
    monkeypatch.setitem(RUNS, "broken", broken)
    with pytest.raises(AssertionError) as caught:
        hold(case)
    (note,) = caught.value.__notes__
    assert note == f"replay it with: python -m tests.simulation.replay '{case.encoded()}'"


def test_the_command_in_a_note_runs() -> None:
    case = Case("sessions", [[Step("ask")]], [1])
    command = [sys.executable, "-m", "tests.simulation.replay", case.encoded()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == [hold(case).digest]
