"""A process whose children kill themselves with SIGKILL at named points of a workload.

Run as `python -m tests.crash.killed`. It reads one request (a line of JSON, see `Request`) after
the other, forks a child for each and answers with one line about its end (`Ending`). Forking is
fast and safe here: this process has one thread and never opens a database. What a child has
acknowledged goes through a pipe by `os.write`, unbuffered, so that it is known exactly however the
child ends.

The points are installed from here by wrapping the engine's methods; the shipped code knows nothing
of them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from onepen.runtime.testing import Disk, Kind, Operation
from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage.sqlite.engine import SqliteEngine

from .campaign import Rig

# The engine's methods by the name of their phase; a child is killed in, before or after one of
# them.
PHASES = {
    "open": "__init__",
    "stage": "stage",
    "commit": "commit",
    "checkpoint": "maintain",
    "reopen": "reopen",
    "close": "close",
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Where to die: at the `nth` call of a phase, before or after it, or at an operation in it."""

    directory: str
    workload: str
    phase: str
    nth: int = 0
    position: str | int = "before"
    """"before", "after", or the number of an operation (of this kind) within the phase."""
    kind: str | None = None
    log: str | None = None
    """Where to leave the recording, right before the end."""


class Ending(msgspec.Struct, frozen=True):
    """How a child ended: the signal (0 if it came to the end of its work), and what it
    acknowledged.
    """

    signal: int
    acknowledged: tuple[tuple[int, int], ...]


class Killer:
    """Watches the phases of one child, and ends it at the requested point."""

    def __init__(self, request: Request, pipe: int) -> None:
        self.request = request
        self.pipe = pipe
        self.calls = 0
        self.inside = False
        self.operations = 0
        self.disk = Disk(request.directory, on_operation=self.on_operation)

    def die(self) -> NoReturn:
        if self.request.log is not None:
            with open(self.request.log, "wb") as file:
                pickle.dump(self.disk.log, file)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    def on_operation(self, operation: Operation) -> None:
        wanted = self.request.kind
        if not self.inside or (wanted is not None and operation.kind is not Kind(wanted)):
            return
        if self.operations == self.request.position:
            self.die()
        self.operations += 1

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the phase that is watched."""
        self.inside = self.calls == self.request.nth
        self.calls += 1
        if self.inside and self.request.position == "before":
            self.die()
        result = function(*args, **kwargs)
        if self.inside and self.request.position == "after":
            self.die()
        self.inside = False
        return result

    def acknowledge(self, number: int, commit_seq: int) -> None:
        self.disk.mark("ack", (number, commit_seq))
        os.write(self.pipe, b"%d %d\n" % (number, commit_seq))

    def run(self) -> None:
        acknowledge = self.acknowledge
        if self.request.phase == "acknowledge":
            acknowledge = partial(self.call, self.acknowledge)
        else:
            name = PHASES[self.request.phase]
            original: Any = getattr(SqliteEngine, name)

            def wrapped(engine: SqliteEngine, *args: Any, **kwargs: Any) -> Any:
                return self.call(original, engine, *args, **kwargs)

            setattr(SqliteEngine, name, wrapped)
        rig = Rig(Path(self.request.directory), self.disk.name, acknowledge)
        rig.run(WORKLOADS[self.request.workload].steps)
        rig.engine.close()


def child(request: Request, pipe: int) -> NoReturn:
    status = 1
    try:
        Killer(request, pipe).run()
        status = 0
    finally:
        os._exit(status)  # never back into the server's loop, whatever happened


def serve_one(request: Request) -> Ending:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(request, writing)
    os.close(writing)
    with open(reading, encoding="ascii") as pipe:
        lines = [line.split() for line in pipe]
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        raise SystemExit(f"a child failed: {request}")  # its traceback is on stderr
    return Ending(-code, tuple((int(number), int(seq)) for number, seq in lines))


def main() -> None:
    for line in sys.stdin.buffer:
        ending = serve_one(msgspec.json.decode(line, type=Request))
        sys.stdout.buffer.write(msgspec.json.encode(ending) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
