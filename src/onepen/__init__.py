"""onepen: many sessions, one pen.

The public API of the package: what is exported here and in `onepen.testing`. Importing it starts
nothing and leaves asyncio as it is.
"""

import logging
from importlib.metadata import version

from .actors.binding import CurrentSession, current_session
from .actors.compression import SummaryTooSlowError
from .actors.effects import EffectFailedError, EffectUnknownError
from .actors.events import Event, Subscription
from .actors.finalize import Finalized
from .actors.intake import WriterSettings
from .actors.limits import DeliverySettings, SessionSettings
from .actors.line import (
    RuntimeClosedError,
    SessionBusyError,
    SessionCrashedError,
    TurnPendingError,
)
from .actors.messages import Inbound
from .actors.questions import QuestionExpiredError
from .actors.replies import Reply
from .actors.sending import DeliverLaterError, UndeliverableError
from .actors.sources import ResetPolicy, SourcePolicy
from .actors.streaming import Streaming
from .actors.tickets import Ticket
from .actors.turn import Turn
from .actors.warm import InvalidAgentError, SessionInfo
from .actors.writer import WriterRef, WriterStatistics, open_writer
from .runtime.cleanup import Pruned, PrunedSession
from .runtime.forgetting import Erased
from .runtime.opening import RuntimeFailedError, open_runtime
from .runtime.runtime import Runtime, RuntimeStatistics
from .runtime.settings import Settings, SettingsError, load_settings
from .runtime.submission import Submission
from .runtime.system import SystemClock, SystemIds
from .runtime.turns import KeyStatus, UnfinishedTurn
from .storage.engine import Engine, EngineSettings, Reader
from .storage.errors import (
    AmbiguousError,
    ConflictError,
    CopyError,
    DamagedFileError,
    DatabaseHeldError,
    ExportError,
    ImportFileError,
    InvalidContentError,
    MissingError,
    NoGainError,
    OnepenError,
    OutcomeUnknownError,
    RouteConflictError,
    SessionEndedError,
    SessionHeldError,
    StaleError,
    StorageUnavailableError,
    TitleTakenError,
)
from .storage.records import (
    DeadLetter,
    Delivery,
    Draft,
    Hit,
    Hits,
    Message,
    Question,
    Session,
    Timer,
    Tokens,
    ToolCall,
)
from .storage.records import TurnOutcome as Outcome
from .storage.sqlite import open_sqlite
from .storage.transfer import ExportReport, ImportLimits, ImportReport
from .storage.units import Durable, Guard, Receipt, Refused, Unit, Unknown
from .storage.upkeep import Copied, Finding

__version__ = version("onepen")

__all__ = [
    "AmbiguousError",
    "ConflictError",
    "Copied",
    "CopyError",
    "CurrentSession",
    "DamagedFileError",
    "DatabaseHeldError",
    "DeadLetter",
    "DeliverLaterError",
    "Delivery",
    "DeliverySettings",
    "Draft",
    "Durable",
    "EffectFailedError",
    "EffectUnknownError",
    "Engine",
    "EngineSettings",
    "Erased",
    "Event",
    "ExportError",
    "ExportReport",
    "Finalized",
    "Finding",
    "Guard",
    "Hit",
    "Hits",
    "ImportFileError",
    "ImportLimits",
    "ImportReport",
    "Inbound",
    "InvalidAgentError",
    "InvalidContentError",
    "KeyStatus",
    "Message",
    "MissingError",
    "NoGainError",
    "OnepenError",
    "Outcome",
    "OutcomeUnknownError",
    "Pruned",
    "PrunedSession",
    "Question",
    "QuestionExpiredError",
    "Reader",
    "Receipt",
    "Refused",
    "Reply",
    "ResetPolicy",
    "RouteConflictError",
    "Runtime",
    "RuntimeClosedError",
    "RuntimeFailedError",
    "RuntimeStatistics",
    "Session",
    "SessionBusyError",
    "SessionCrashedError",
    "SessionEndedError",
    "SessionHeldError",
    "SessionInfo",
    "SessionSettings",
    "Settings",
    "SettingsError",
    "SourcePolicy",
    "StaleError",
    "StorageUnavailableError",
    "Streaming",
    "Submission",
    "Subscription",
    "SummaryTooSlowError",
    "SystemClock",
    "SystemIds",
    "Ticket",
    "Timer",
    "TitleTakenError",
    "Tokens",
    "ToolCall",
    "Turn",
    "TurnPendingError",
    "UndeliverableError",
    "UnfinishedTurn",
    "Unit",
    "Unknown",
    "WriterRef",
    "WriterSettings",
    "WriterStatistics",
    "__version__",
    "current_session",
    "load_settings",
    "open_runtime",
    "open_sqlite",
    "open_writer",
]

# A library is silent unless its user listens.
logging.getLogger(__name__).addHandler(logging.NullHandler())
