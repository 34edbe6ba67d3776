"""The export list is a promise: what is in it, and that importing it costs nothing by surprise."""

from __future__ import annotations

import onepen
from onepen.storage import errors

EXPORTED = {
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
}


def test_exactly_these_names_are_exported() -> None:
    """Adding or removing a public name is a decision, so it is made here as well."""
    assert set(onepen.__all__) == EXPORTED
    for name in onepen.__all__:
        assert hasattr(onepen, name)


def test_every_error_has_one_root_and_says_what_to_do() -> None:
    """Errors are typed, under one root, and the ones that callers meet carry a hint."""
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    roots = [c for c in classes if issubclass(c, Exception)]
    assert len(roots) > 20
    assert all(issubclass(c, errors.OnepenError) for c in roots)
    examples: list[errors.OnepenError] = [
        errors.ConflictError("key", 1, 2),
        errors.RouteConflictError("key", "s", "other"),
        errors.SessionHeldError("key", "s", "other"),
        errors.StaleError("what", 1, 2),
        errors.StaleIncarnationError("key", 1, 2),
        errors.BrokenChainError("s", 1, 2),
        errors.SessionEndedError("s", "closed"),
        errors.NoGainError("s", [2, 20], [3, 30]),
        errors.TitleTakenError("Chat", "s"),
        errors.MissingError("turn t"),
        errors.AmbiguousError("a", ("ab", "ac")),
        errors.StorageUnavailableError("disk full", 1),
        errors.LowSpaceError("chat.db", 1, 2),
        errors.StaleEpochError(3),
        errors.WriterFullError(1, 2),
        errors.DatabaseHeldError("chat.db", 42, 1),
        errors.ForeignFileError("chat.db", "it is a picture"),
        errors.DamagedFileError("chat.db", "it is truncated"),
        errors.CopyError("backup.db", "it is there", hint="choose another name"),
        errors.NewerSchemaError("chat.db", 9, 1),
        errors.NetworkFileSystemError("chat.db", "nfs"),
        errors.InvalidContentError("text", "too long", hint="shorten it"),
    ]
    for error in examples:
        assert error.hint, type(error)
        assert error.message in str(error)
        assert error.hint in str(error)


def test_a_title_is_not_repeated_in_its_error() -> None:
    """Error messages end up in logs, so they hold no text of a conversation."""
    assert "secret" not in str(errors.TitleTakenError("secret plans", "s"))
