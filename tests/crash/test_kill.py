"""PROOF-6, first part: real processes killed with SIGKILL at named points, then started again.

A helper process forks a child for each kill (`killed.py`). What the child had acknowledged is known
exactly; this process then opens the same files, checks that all of it is stored, sends the rest
again and finds everything stored once. After a kill at a sync the power is taken away as well: what
the second process acknowledged, or only showed to a reader, must not rest on what the first one had
not synced.
"""

from __future__ import annotations

import itertools
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from onepen.runtime.testing import Kind, Log
from onepen.runtime.testing.workloads import WORKLOADS

from ..proving import PROOF
from .campaign import (
    Prepared,
    check_directory,
    killed_at_syncs,
    prepared,
    restart_then_power_loss,
    scratch,
)
from .killed import Ending, Request

ROOT = Path(__file__).resolve().parents[2]
Property = Callable[[str, object], None]


class Server:
    """The helper process; one for all tests of this file."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.crash.killed"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[bytes] = self.process.stdin
        self.stdout: IO[bytes] = self.process.stdout

    def kill(self, request: Request) -> Ending:
        self.stdin.write(msgspec.json.encode(request) + b"\n")
        self.stdin.flush()
        line = self.stdout.readline()
        assert line, "the helper process has ended"
        return msgspec.json.decode(line, type=Ending)

    def close(self) -> None:
        self.stdin.close()
        self.process.wait(10)
        self.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    helper = Server()
    yield helper
    helper.close()


# Each failpoint: the phase, where in it, and the workloads that have it (`None` stands for all).
CREATING = ("create_database", "create_and_use")
OPERATIONS = tuple(range(20))
FAILPOINTS: dict[str, tuple[str, tuple[str | int, ...], str | None, tuple[str, ...] | None]] = {
    "before begin": ("stage", ("before",), None, None),
    "after insert": ("stage", ("after",), None, None),
    "before commit": ("commit", ("before",), None, None),
    "in the commit's writes": ("commit", OPERATIONS, "write", None),
    "in the commit's sync": ("commit", (0,), "sync", None),
    "after commit, before ack": ("commit", ("after",), None, None),
    "after ack": ("acknowledge", ("after",), None, None),
    "in a checkpoint": ("checkpoint", OPERATIONS, None, ("checkpoint",)),
    "in the checkpoint of a closing": ("close", OPERATIONS, None, None),
    "in a reopening": ("reopen", OPERATIONS, None, ("reopen",)),
    "in the fence": ("open", OPERATIONS, None, None),
    "in a migration": ("open", tuple(range(100)), None, CREATING),
}
KILLS_MIN = 100 if PROOF else 8


def requests(failpoint: str) -> Iterator[Request]:
    """All kills of this failpoint: workloads, batches, and operations where it has several."""
    phase, positions, kind, names = FAILPOINTS[failpoint]
    if names is None:
        names = tuple(name for name in WORKLOADS if name not in CREATING)
    for where, nth, name in itertools.product(positions, range(4), names):
        batches = len(WORKLOADS[name].batches)
        if phase in ("stage", "commit", "acknowledge") and nth >= batches:
            continue
        if phase in ("open", "close") and nth > WORKLOADS[name].steps.count("restart"):
            continue
        yield Request(directory="", workload=name, phase=phase, nth=nth, position=where, kind=kind)


def shuffled(failpoint: str) -> Iterator[Request]:
    """The same in a fixed random order, again and again: a share of it is spread over the whole."""
    everything = list(requests(failpoint))
    random.Random(failpoint).shuffle(everything)
    # Not every point exists: a commit may have fewer operations than were asked for.
    return itertools.islice(itertools.cycle(everything), 40 * KILLS_MIN)


def kill(server: Server, request: Request, root: Path) -> tuple[Prepared, Path, Ending]:
    start = prepared(request.workload)
    directory = start.write_to(root / "killed")
    ending = server.kill(msgspec.structs.replace(request, directory=str(directory)))
    return start, directory, ending


_done: Counter[str] = Counter()


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_what_a_killed_process_acknowledged_is_stored_and_the_rest_is_stored_once_when_sent_again(
    server: Server, failpoint: str, record_property: Property
) -> None:
    """INV-1, INV-2, INV-5, INV-19, PROOF-6; contract A8."""
    found: list[str] = []
    kills = 0
    with scratch() as root:
        for request in shuffled(failpoint):
            if kills >= KILLS_MIN:
                break
            start, directory, ending = kill(server, request, root)
            acked, commit_seq = 0, 0
            if ending.acknowledged:
                acked, commit_seq = ending.acknowledged[-1][0] + 1, ending.acknowledged[-1][1]
            kills += ending.signal == signal.SIGKILL
            violations = check_directory(start, directory, acked, commit_seq)
            found += [f"{request}: {violation}" for violation in violations]
            shutil.rmtree(directory)
    record_property("kills", kills)
    _done[failpoint] = kills
    assert found == []
    assert kills >= KILLS_MIN


def test_the_campaign_was_large_enough() -> None:
    """PROOF-6, first part: the promised number of kills."""
    if len(_done) < len(FAILPOINTS):
        pytest.skip("only some of the failpoints were run")
    assert _done.total() >= (700 if PROOF else 40)


def test_a_child_that_reaches_no_failpoint_comes_to_its_end(server: Server) -> None:
    """A kill that never happens must not be counted as one."""
    with scratch() as root:
        request = Request(directory="", workload="whole_turn", phase="commit", nth=99)
        start, directory, ending = kill(server, request, root)
        assert ending.signal == 0
        assert [number for number, _ in ending.acknowledged] == [0, 1]
        assert check_directory(start, directory, 2, ending.acknowledged[-1][1]) == []


SYNC_KILLS = [
    (name, nth, phase)
    for name in ("append_messages", "rotate_in_a_turn", "whole_turn", "group_commit", "finalize")
    for phase, nth in (("commit", 0), ("commit", 1), ("open", 0))
    if phase == "open" or nth < len(WORKLOADS[name].batches)
]


@pytest.mark.parametrize(("name", "nth", "phase"), SYNC_KILLS if PROOF else SYNC_KILLS[::4])
def test_killed_at_a_sync_restarted_and_sent_again_it_survives_a_power_loss(
    server: Server, name: str, nth: int, phase: str, record_property: Property
) -> None:
    """INV-2, INV-19, PROOF-6: opening is a fence, so nothing rests on what was never synced."""
    with scratch() as root:
        path = root / "log"
        request = Request(
            directory="",
            workload=name,
            phase=phase,
            nth=nth,
            position=0,
            kind=Kind.SYNC.value,
            log=str(path),
        )
        start, _, ending = kill(server, request, root)
        assert ending.signal == signal.SIGKILL
        log: Log = pickle.loads(path.read_bytes())
    tally = restart_then_power_loss(start, log)
    record_property("kills", 1)
    record_property("images", tally.runs)
    assert tally.violations == []
    assert tally.runs > 10


@pytest.mark.parametrize("name", WORKLOADS if PROOF else ("rotate", "take_over"))
def test_a_process_that_died_before_any_sync_leaves_nothing_that_its_successor_may_trust(
    name: str, record_property: Property
) -> None:
    """INV-2, INV-19: the same for every sync of the log, with the deaths simulated."""
    start = prepared(name)
    tallies = [restart_then_power_loss(start, log) for log in killed_at_syncs(start)]
    record_property("images", sum(tally.runs for tally in tallies))
    assert [violation for tally in tallies for violation in tally.violations] == []
    assert sum(tally.runs for tally in tallies) > 20
