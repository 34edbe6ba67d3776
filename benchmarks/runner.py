"""Runs the cells, each in a process of its own, contenders taking turns inside each round."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from . import growth, startup, surroundings
from .cells import (
    ALTERNATIVES,
    Cell,
    Condition,
    Contender,
    Disk,
    Outcome,
    Probe,
    ProbeSample,
    Sample,
)
from .growth import GrowthSample
from .plan import STORED_GOAL, Pace, conditions, contenders, least_messages, probes, stretch
from .surroundings import Machine, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

CELL_TIMEOUT_S = 300
PROBE_TIMEOUT_S = 300
_CELLS_BETWEEN_SYNCS = 8


class Results(Struct, frozen=True):
    """Everything a run found; what `--json` writes."""

    machine: Machine
    pace: Pace
    sync_us: dict[Disk, float]
    samples: list[Sample]
    growth: list[GrowthSample]
    remarks: list[str]
    probes: list[ProbeSample] = []


class Runner:
    """One run: its folder, what it may use, what it has found."""

    def __init__(
        self, pace: Pace, parts: frozenset[str], tell: Callable[[str, int, int], None]
    ) -> None:
        self._pace = pace
        self._parts = parts
        self._tell = tell
        self._remarks: list[str] = []
        self._slow: dict[str, str] = {}
        self._sync_us: dict[Disk, float] = {}
        self._python: Path | None = None
        surroundings.BUILD.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=surroundings.BUILD))

    def run(self) -> Results:
        try:
            self._prepare()
            samples = self._run_cells()
            found = self._run_growth() if "growth" in self._parts else []
            probed = self._run_probes()
            self._time_syncs()
            return Results(
                machine=surroundings.describe_machine(),
                pace=self._pace,
                sync_us=self._sync_us,
                samples=samples,
                growth=found,
                remarks=self._remarks,
                probes=probed,
            )
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _prepare(self) -> None:
        if self._parts & {"slow", "turns", "startup"}:
            try:
                self._slow = surroundings.slow_disk()
            except Unavailable as error:
                self._remarks.append(str(error))
        if self._parts & {"alternatives", "turns"}:
            self._tell("building the alternatives' environment (once)", 0, 1)
            try:
                self._python = surroundings.alternatives_python()
            except Unavailable as error:
                self._remarks.append(str(error))

    def _time_syncs(self) -> None:
        """What a sync takes on each disk. Measured again and again: the fastest is the disk's own,
        the others hold what somebody else was doing to it.
        """
        disks: dict[Disk, dict[str, str]] = {"native": {}}
        if self._slow:
            disks["1 ms"] = self._slow
        for disk, variables in disks.items():
            took_us = surroundings.sync_cost_us(self._folder, variables)
            self._sync_us[disk] = min(took_us, self._sync_us.get(disk, took_us))

    def _run_cells(self) -> list[Sample]:
        parts, slow, others = self._parts, bool(self._slow), self._python is not None
        work: list[tuple[int, Condition, Contender]] = []
        for turn in range(self._pace.rounds):
            for condition in conditions(self._pace, parts, slow=slow):
                names = contenders(condition, parts, alternatives=others)
                # Another one begins in each round: nobody always follows the same neighbour.
                start = turn % max(1, len(names))
                work.extend((turn, condition, name) for name in names[start:] + names[:start])
        samples: list[Sample] = []
        for number, (turn, condition, contender) in enumerate(work):
            where = f"{condition.synchronous}, {condition.disk} disk"
            label = f"{condition.work}: {contender}, producers: {condition.producers}, {where}"
            self._tell(label, number, len(work))
            if number % _CELLS_BETWEEN_SYNCS == 0:
                self._time_syncs()
            if (outcome := self._run_cell(contender, condition)) is not None:
                samples.append(Sample(contender, condition, turn, outcome))
        return samples

    def _run_cell(
        self, contender: Contender, condition: Condition, database: Path | None = None
    ) -> Outcome | None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        longer = stretch(condition)
        cell = Cell(
            contender=contender,
            condition=condition,
            folder=str(folder),
            warm_up_s=self._pace.warm_up_s * longer,
            window_s=self._pace.window_s * longer,
            database=None if database is None else str(database),
            least_messages=least_messages(self._pace, condition),
        )
        given = msgspec.json.encode(cell).decode()
        if contender in ALTERNATIVES:
            command = [str(self._python), str(surroundings.HERE / "alternatives.py"), given]
        else:
            command = [sys.executable, "-m", f"{__package__}.child", given]
        try:
            printed = self._run_child(command, condition.disk, CELL_TIMEOUT_S)
            return msgspec.json.decode(printed, type=Outcome)
        except (subprocess.SubprocessError, msgspec.DecodeError) as error:
            what = f"{contender} at {condition.producers}, {condition.work}"
            self._remarks.append(f"{what} failed: {_last_words(error)}")
            return None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_child(self, command: list[str], disk: Disk, timeout_s: float) -> bytes:
        variables = self._slow if disk == "1 ms" else {}
        done = subprocess.run(
            command,
            cwd=surroundings.ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            timeout=timeout_s,
            check=True,
        )
        return done.stdout

    def _run_probes(self) -> list[ProbeSample]:
        work = [
            (turn, probe)
            for turn in range(self._pace.rounds)
            for probe in probes(self._pace, self._parts, slow=bool(self._slow))
        ]
        stored = self._build_stored() if "startup" in self._parts else None
        samples: list[ProbeSample] = []
        for number, (turn, probe) in enumerate(work):
            what = f"{probe.kind} {probe.case}, {probe.size:,}, {probe.disk} disk"
            self._tell(what, number, len(work))
            figures = self._run_probe(msgspec.structs.replace(probe, database=stored), what)
            if figures is not None:
                samples.append(
                    ProbeSample(probe.kind, probe.case, probe.size, probe.disk, turn, figures)
                )
        return samples

    def _build_stored(self) -> str:
        """The file of stored sessions, which is kept for the next run."""
        size = self._pace.stored_sessions
        if size < STORED_GOAL:
            self._remarks.append(
                f"startup: {size:,} stored sessions here, the goal is about {STORED_GOAL:,}"
            )
        what = f"building a file of {size:,} sessions (once)"
        return str(startup.build(size, lambda done: self._tell(what, done, size)))

    def _run_probe(self, probe: Probe, what: str) -> dict[str, float] | None:
        given = msgspec.json.encode(probe).decode()
        command = [sys.executable, "-m", f"{__package__}.probe", given]
        try:
            printed = self._run_child(command, probe.disk, PROBE_TIMEOUT_S)
            return msgspec.json.decode(printed, type=dict[str, float])
        except (subprocess.SubprocessError, msgspec.DecodeError) as error:
            self._remarks.append(f"{what} failed: {_last_words(error)}")
            return None

    def _run_growth(self) -> list[GrowthSample]:
        condition = Condition(growth.PRODUCERS, "FULL", "native")
        samples: list[GrowthSample] = []
        rounds, histories = self._pace.growth_rounds, growth.HISTORIES
        # The first turn fills the system's cache and is not counted.
        for turn in range(-1, rounds):
            start = turn % len(histories)
            for history in histories[start:] + histories[:start]:
                self._tell(f"growth: {history.name}", len(samples), rounds * len(histories))
                path = self._folder / f"growth-{histories.index(history)}.db"
                # The smallest one would not stay small: it is made anew for each round.
                if history is histories[0]:
                    for file in self._folder.glob(f"{path.name}*"):
                        file.unlink()
                if not path.exists():
                    growth.build(history, path)
                outcome = self._run_cell("writer", condition, path)
                if outcome is not None and turn >= 0:
                    samples.append(GrowthSample(history.name, turn, outcome))
        return samples


def _last_words(error: Exception) -> str:
    """The last line that a child has written before it failed, or else the error."""
    output: bytes = getattr(error, "stderr", None) or b""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else str(error)
