"""Tools for testing programs built on onepen; nothing in the runtime itself imports them.

`Disk` records and fails the I/O of SQLite, `images` gives what a power loss may leave of it,
`check_database` looks at any database file, `EngineConformance` is the suite that every engine
passes, and `Model` says what the commands mean. `FakePlatform` is a chat platform that behaves as
badly as real ones do. `simulate` runs a program under a schedule that is
data, and `explore` under all of them up to a number of preemptions.
"""

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

__all__ = [
    "Created",
    "Deleted",
    "Disk",
    "Dropped",
    "EngineConformance",
    "Entry",
    "Exploration",
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
    "PlatformError",
    "Run",
    "Shown",
    "SimulationStuckError",
    "SimulationUnsupportedError",
    "Synced",
    "Truncated",
    "Violation",
    "Written",
    "check_database",
    "explore",
    "images",
    "schedules",
    "simulate",
]
