"""For every command: the same natural key with other content, and what an engine must say to it.

A variant is sent without guards right after the original was applied. `again` stands where the
content is no part of the identity, by design: the row is there, and that is all that was asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import Seq, SessionKey, TurnId
from ....storage.records import Draft, TurnOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    Vary = Callable[[Any], c.AnyCommand]


def _with(**changes: Any) -> Vary:
    return lambda command: replace(command, **changes)


def _other_draft(field: str) -> Vary:
    """The same message with another text."""

    def vary(command: Any) -> c.AnyCommand:
        given: Any = getattr(command, field)
        drafts: list[Draft] = [given] if isinstance(given, Draft) else list(given)
        drafts[0] = replace(drafts[0], text="something else", parts=None)
        changed: c.AnyCommand = replace(
            command, **{field: drafts[0] if isinstance(given, Draft) else tuple(drafts)}
        )
        return changed

    return vary


VARIANTS: dict[type[c.Command], tuple[Vary, str]] = {
    c.OpenIncarnation: (lambda x: replace(x, incarnation=x.incarnation - 1), "stale_incarnation"),
    c.SetRoute: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.SetPendingTitle: (_with(title="something else"), "stale"),
    c.CountUselessCompressions: (_with(count=99), "stale"),
    c.CreateSession: (_with(key=SessionKey("somebody:else")), "conflict"),
    c.SetTitle: (_with(title="something else"), "stale"),
    c.SetFlags: (lambda x: replace(x, pinned=not x.pinned), "stale"),
    c.SetDetails: (_with(user="somebody else"), "stale"),
    c.EndSession: (_with(reason="something else"), "ended"),
    c.ReopenSession: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.EndOrphan: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.PruneSession: (lambda x: replace(x, before_ms=x.before_ms + 1), "again"),
    c.GiveOriginals: (lambda x: replace(x, first_seq=Seq(x.first_seq + 1)), "again"),
    c.PurgeSession: (lambda x: replace(x, before_seq=Seq(99)), "again"),
    c.DeleteSession: (lambda x: replace(x, at_ms=x.at_ms + 1), "again"),
    c.AppendMessages: (_other_draft("messages"), "conflict"),
    c.Rotate: (_other_draft("summary"), "route_conflict"),
    c.Compact: (_other_draft("summary"), "broken_chain"),
    c.Rewind: (lambda x: replace(x, to_seq=Seq(x.to_seq + 1)), "stale"),
    c.Restore: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.Branch: (lambda x: replace(x, upto_seq=Seq(x.upto_seq - 1)), "route_conflict"),
    c.RecountSession: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.EraseMessages: (lambda x: replace(x, seqs=(*x.seqs, Seq(99))), "missing"),
    c.StageMessages: (_other_draft("messages"), "broken_chain"),
    c.PublishSession: (lambda x: x, "again"),
    c.ExtendSession: (_with(states=()), "stale"),
    c.StageTurns: (lambda x: replace(x, turns=x.turns[:1]), "again"),
    c.DropStaged: (lambda x: replace(x, from_seq=Seq(x.from_seq + 1)), "again"),
    c.OpenTurn: (_with(key=SessionKey("somebody:else")), "conflict"),
    c.AcceptInbound: (_with(digest="something else"), "conflict"),
    c.TakeInbound: (_with(turn_id=TurnId("of another")), "conflict"),
    c.StartTurn: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
    c.SuspendTurn: (lambda x: replace(x, attempt=x.attempt + 1), "stale"),
    c.EndTurn: (_with(outcome=TurnOutcome(kind="silent")), "conflict"),
    c.SetAside: (_with(reason="something else"), "again"),
    c.ResolveDeadLetter: (
        lambda x: replace(x, resolution="retried" if x.resolution == "dropped" else "dropped"),
        "conflict",
    ),
    c.PruneInbox: (_with(limit=1_000_000), "stale"),
    c.PruneWork: (lambda x: replace(x, before_ms=x.before_ms + 1), "again"),
    c.EraseWork: (lambda x: replace(x, user="somebody else"), "again"),
    c.AddUsage: (_with(cost_nanos=123_456_789), "conflict"),
    c.PostDelivery: (_with(body={"text": "something else"}), "conflict"),
    c.MarkDelivery: (lambda x: replace(x, attempt=x.attempt + 5), "stale"),
    c.BeginEffect: (_with(digest="something else"), "conflict"),
    c.FinishEffect: (_with(result={"something": "else"}), "stale"),
    c.AskQuestion: (_with(question="something else?"), "conflict"),
    c.AnswerQuestion: (_with(answer="something else"), "conflict"),
    c.SetTimer: (lambda x: replace(x, due_ms=x.due_ms + 1), "conflict"),
    c.ResolveTimer: (lambda x: replace(x, at_ms=x.at_ms + 1), "conflict"),
    c.PutChunk: (_with(data=b"something else"), "conflict"),
    c.SealBlob: (lambda x: replace(x, size_bytes=x.size_bytes + 1), "conflict"),
    c.DropBlob: (lambda x: x, "again"),
    c.SetMark: (_with(value="something else"), "conflict"),
    c.RebuildSearch: (lambda x: replace(x, at_ms=x.at_ms + 1), "stale"),
}
