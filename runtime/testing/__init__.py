"""Tools for testing programs built on onepen; nothing in the runtime itself imports them.

`check_agent` holds an agent against everything that a runtime promises, whatever the schedule and
whatever crashes; `Trial` is one such life, for `simulate` and `explore`. `failpoint` crashes, kills
or looks at a named point, and `run_until` does so in a process of its own. Fixtures for pytest are
in `onepen.testing.fixtures`.

`Disk` records and fails the I/O of SQLite, `images` gives what a power loss may leave of it,
`check_database` looks at any database file, `EngineConformance` is the suite that every engine
passes, and `Model` says what the commands mean. `FakePlatform` is a chat platform that behaves as
badly as real ones do. `simulate` runs a program under a schedule that is
data, and `explore` under all of them up to a number of preemptions.
"""

from .checking import Checked, Crash, PlannedCrash, check_agent
from .conformance import EngineConformance
from .disk import (
    Created,
    Deleted,
    Disk,
    Dropped,
    Entry,
    Failure,
    Fault,
    Image,
    Kind,
    Log,
    Loss,
    Marked,
    Operation,
    Synced,
    Truncated,
    Written,
    images,
)
from .failpoints import (
    FAILPOINTS,
    Ended,
    Failpoint,
    FailpointCrash,
    FailpointError,
    crash,
    failpoint,
    kill,
    run_until,
)
from .invariants import Violation, check_database
from .model import Model
from .platform import FakePlatform, PlatformError, Shown
from .simulation import (
    Exploration,
    Run,
    SimulationStuckError,
    SimulationUnsupportedError,
    explore,
    schedules,
    simulate,
)
from .trial import CheckFailedError, Trial

__all__ = [
    "FAILPOINTS",
    "CheckFailedError",
    "Checked",
    "Crash",
    "Created",
    "Deleted",
    "Disk",
    "Dropped",
    "Ended",
    "EngineConformance",
    "Entry",
    "Exploration",
    "Failpoint",
    "FailpointCrash",
    "FailpointError",
    "Failure",
    "FakePlatform",
    "Fault",
    "Image",
    "Kind",
    "Log",
    "Loss",
    "Marked",
    "Model",
    "Operation",
    "PlannedCrash",
    "PlatformError",
    "Run",
    "Shown",
    "SimulationStuckError",
    "SimulationUnsupportedError",
    "Synced",
    "Trial",
    "Truncated",
    "Violation",
    "Written",
    "check_agent",
    "check_database",
    "crash",
    "explore",
    "failpoint",
    "images",
    "kill",
    "run_until",
    "schedules",
    "simulate",
]
