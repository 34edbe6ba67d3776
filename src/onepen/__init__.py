"""onepen: many sessions, one pen.

The public API of the package: what is exported here and in `onepen.testing`. Importing it starts
nothing and leaves asyncio as it is.
"""

import logging
from importlib.metadata import version

from .actors.intake import WriterSettings
from .actors.tickets import Ticket
from .actors.writer import WriterRef, WriterStatistics, open_writer
from .runtime.system import SystemClock, SystemIds
from .storage.engine import Engine, EngineSettings, Reader
from .storage.errors import (
    ConflictError,
    DatabaseHeldError,
    InvalidContentError,
    NoGainError,
    OnepenError,
    RouteConflictError,
    SessionHeldError,
    StorageUnavailableError,
)
from .storage.records import Draft, Message, Session
from .storage.sqlite import open_sqlite
from .storage.units import Durable, Guard, Receipt, Refused, Unit, Unknown

__version__ = version("onepen")

__all__ = [
    "ConflictError",
    "DatabaseHeldError",
    "Draft",
    "Durable",
    "Engine",
    "EngineSettings",
    "Guard",
    "InvalidContentError",
    "Message",
    "NoGainError",
    "OnepenError",
    "Reader",
    "Receipt",
    "Refused",
    "RouteConflictError",
    "Session",
    "SessionHeldError",
    "StorageUnavailableError",
    "SystemClock",
    "SystemIds",
    "Ticket",
    "Unit",
    "Unknown",
    "WriterRef",
    "WriterSettings",
    "WriterStatistics",
    "__version__",
    "open_sqlite",
    "open_writer",
]

# A library is silent unless its user listens.
logging.getLogger(__name__).addHandler(logging.NullHandler())
