"""What a unit does to what is stored: recognised, guarded, applied. The page's second table.

Keeps: a unit is applied whole or not at all; what is stored already exactly as given is recognised
before any guard is asked. Knows nothing of logs, processes or actors.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from .state import Content, Session, Unit

Reason: TypeAlias = Literal[
    "stale_incarnation", "ended", "route_conflict", "broken_chain", "conflict", "stale", "invalid"
]
UNBINDABLE = "x"
"""The message that the edge would have refused and storage can't take: it fails alone."""


class Rules:
    """As they must be. A planted bug overrides one of them."""

    def apply(self, content: Content, unit: Unit) -> tuple[str, Content]:
        """The receipt, and what is stored then."""
        if self.is_stored(content, unit):
            return "again", content
        reason = self.refusal(content, unit)
        return (reason, content) if reason else ("durable", self.effect(content, unit))

    # Recognised ------------------------------------------------------------------------------

    def is_stored(self, content: Content, unit: Unit) -> bool:
        match unit.kind:
            case "open":
                return content.key(unit.key).incarnation == unit.incarnation
            case "append":
                session = content.session(unit.session)
                rows = () if session is None else session.rows
                return content.accepted(unit.message) == unit.new and rows[
                    unit.base : unit.base + 1
                ] == (unit.new,)
            case "rotate":
                child = content.session(unit.new)
                return child is not None and child.parent == unit.session
            case "switch":
                return unit.loser_session in content.switched

    # Guarded ---------------------------------------------------------------------------------

    def refusal(self, content: Content, unit: Unit) -> Reason | None:
        """The first thing that does not hold."""
        if self.is_predecessor(content, unit):
            return "stale_incarnation"
        if unit.kind in ("append", "rotate"):
            session = content.session(unit.session)
            if session is not None and session.ended:
                return "ended"
            if content.key(unit.key).session != unit.session:
                return "route_conflict"
            if not self.follows(session, unit):
                return "broken_chain"
        if unit.kind == "append":
            return self._append_refusal(content, unit)
        return self._move_refusal(content, unit)

    def is_predecessor(self, content: Content, unit: Unit) -> bool:
        stored = content.key(unit.key).incarnation
        if unit.kind == "open":
            return unit.incarnation < stored
        return unit.incarnation != stored

    def follows(self, session: Session | None, unit: Unit) -> bool:
        rows = () if session is None else session.rows
        return len(rows) == unit.base and (rows[-1] if rows else "") == unit.behind

    def _append_refusal(self, content: Content, unit: Unit) -> Reason | None:
        if content.accepted(unit.message) is not None:
            return "conflict"
        return "invalid" if unit.message == UNBINDABLE else None

    def _move_refusal(self, content: Content, unit: Unit) -> Reason | None:
        if unit.kind == "open":
            return None
        if unit.kind == "switch":
            loser = content.key(unit.loser)
            if loser.version != unit.loser_version:
                return "stale"
            if unit.loser_incarnation < loser.incarnation:
                return "stale_incarnation"
            if content.holder(unit.new) not in (None, unit.key, unit.loser):
                return "route_conflict"
        return None if content.key(unit.key).version == unit.version else "stale"

    # Applied ---------------------------------------------------------------------------------

    def effect(self, content: Content, unit: Unit) -> Content:
        key = content.key(unit.key)
        match unit.kind:
            case "open":
                return content.with_key(key._replace(incarnation=unit.incarnation))
            case "append":
                return self.appended(content, unit)
            case "rotate":
                return self.moved(self.rotated(content, unit), unit)
            case "switch":
                return self.moved(self.taken_over(content, unit), unit)

    def appended(self, content: Content, unit: Unit) -> Content:
        session = content.session(unit.session) or Session(unit.session, unit.key, ())
        inbox = tuple(sorted((*content.inbox, (unit.message, unit.new))))
        session = session._replace(rows=(*session.rows, unit.new))
        return content.with_session(session)._replace(inbox=inbox)

    def rotated(self, content: Content, unit: Unit) -> Content:
        """The parent ends, and the child is there with the summary and the carried rows."""
        parent = content.session(unit.session)
        assert parent is not None
        child = Session(unit.new, unit.key, unit.carried, len(unit.carried), parent.id)
        return content.with_session(parent._replace(ended=True)).with_session(child)

    def taken_over(self, content: Content, unit: Unit) -> Content:
        """The loser gets a fresh session, and an incarnation that nobody of it has yet."""
        loser = content.key(unit.loser)
        content = content.with_key(
            loser._replace(
                session=unit.loser_session,
                incarnation=unit.loser_incarnation,
                version=loser.version + 1,
            )
        )
        session = content.session(unit.new)
        assert session is not None
        content = content.with_session(session._replace(key=unit.key))
        return content._replace(switched=(*content.switched, unit.loser_session))

    def moved(self, content: Content, unit: Unit) -> Content:
        key = content.key(unit.key)
        return content.with_key(key._replace(session=unit.new, version=key.version + 1))
