"""The read views of work: turns, the inbox, dead letters, usage, deliveries, effects, questions,
timers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..identity import SessionId, SessionKey, TurnId, Uid
from ..records import (
    DeadLetter,
    Delivery,
    DeliveryState,
    Effect,
    Inbound,
    InboxEntry,
    Question,
    Timer,
    Tokens,
    Turn,
    TurnOutcome,
    TurnUsage,
    UsageTotal,
)
from .erasing import KIND_OF_OUTCOME
from .gone import DELIVERY_GONE, turn_gone
from .queries import Queries
from .turns import FORGETTABLE, waits_in

_decode_inbound = msgspec.json.Decoder(Inbound).decode
_decode_outcome = msgspec.json.Decoder(TurnOutcome).decode
_LAST = 2**63 - 1

_KIND = f"iif(t.outcome IS NULL, NULL, {KIND_OF_OUTCOME.format('t.outcome')})"
TURN = (
    "SELECT t.id, t.key, s.id, t.state, t.attempt, "
    f"iif(s.deleted = 1, {_KIND}, t.outcome), t.opened_ms, t.started_ms, "
    "t.ended_ms, t.history "
    "FROM turns t LEFT JOIN sessions s ON s.n = t.session"
)
_INBOUND_GONE = (
    "EXISTS (SELECT 1 FROM sessions gone_s WHERE gone_s.n IN (t.session, into_t.session) "
    "AND gone_s.deleted = 1)"
)
_INBOX = (
    "SELECT i.source, i.inbound_id, i.key, t.id, i.disposition, i.digest, i.accepted_ms, "
    f"iif({_INBOUND_GONE}, NULL, i.body), iif({_INBOUND_GONE}, NULL, i.reply_to), into_t.id "
    "FROM inbox i JOIN turns t ON t.n = i.turn "
    "LEFT JOIN turns into_t ON into_t.n = i.into_turn"
)
_DELIVERY = (
    "SELECT d.id, d.key, d.source, d.target, d.body, t.id, s.id, d.message_uid, d.state, "
    "d.attempt, d.error, "
    "d.platform_id, d.next_ms, d.posted_ms, d.marked_ms FROM deliveries d "
    "LEFT JOIN turns t ON t.n = d.turn LEFT JOIN sessions s ON s.n = d.session"
)


_OPEN_DELIVERY = _DELIVERY.replace("deliveries d", "deliveries d INDEXED BY deliveries_open")
_LANE_DELIVERY = _DELIVERY.replace("deliveries d", "deliveries d INDEXED BY deliveries_key")


def turn_of(row: tuple[Any, ...]) -> Turn:
    return Turn(
        id=row[0],
        key=row[1],
        session_id=row[2],
        state=row[3],
        attempt=row[4],
        outcome=None if row[5] is None else _decode_outcome(row[5]),
        opened_ms=row[6],
        started_ms=row[7],
        ended_ms=row[8],
        waits=0 if row[9] is None else waits_in(row[9]),
    )


def _inbox_entry_of(row: tuple[Any, ...]) -> InboxEntry:
    return InboxEntry(
        source=row[0],
        inbound_id=row[1],
        key=row[2],
        turn_id=row[3],
        disposition=row[4],
        digest=row[5],
        accepted_ms=row[6],
        body=None if row[7] is None else _decode_inbound(row[7]),
        reply_to=None if row[8] is None else msgspec.json.decode(row[8]),
        into=row[9],
    )


def _delivery_of(row: tuple[Any, ...]) -> Delivery:
    return Delivery(
        id=row[0],
        key=row[1],
        source=row[2],
        target=msgspec.json.decode(row[3]),
        body=msgspec.json.decode(row[4]),
        turn_id=row[5],
        session_id=row[6],
        message_uid=None if row[7] is None else Uid(row[7].hex()),
        state=row[8],
        attempt=row[9],
        error=row[10],
        platform_id=row[11],
        next_ms=row[12],
        posted_ms=row[13],
        marked_ms=row[14],
    )


class WorkViews(Queries):
    """The part of a reader that tells what is to be done."""

    def turn(self, turn_id: TurnId) -> Turn | None:
        row = self._one(f"{TURN} WHERE t.id = ?", (turn_id,))
        return None if row is None else turn_of(row)

    def unfinished_turns(self, key: SessionKey | None = None) -> tuple[Turn, ...]:
        where = "" if key is None else "AND t.key = ? "
        rows = self._all(
            f"{TURN.replace('turns t', 'turns t INDEXED BY turns_unfinished')} "
            f"WHERE t.state <> 'ended' {where}ORDER BY t.n",
            () if key is None else (key,),
        )
        return tuple(turn_of(row) for row in rows)

    def waiting_inbound(self, key: SessionKey) -> tuple[InboxEntry, ...]:
        rows = self._all(
            f"{_INBOX} WHERE t.key = ? AND t.state <> 'ended' AND i.body IS NOT NULL "
            f"AND NOT {_INBOUND_GONE} ORDER BY i.n",
            (key,),
        )
        return tuple(_inbox_entry_of(row) for row in rows)

    def inbound(self, source: str, inbound_id: str) -> InboxEntry | None:
        row = self._one(f"{_INBOX} WHERE i.source = ? AND i.inbound_id = ?", (source, inbound_id))
        return None if row is None else _inbox_entry_of(row)

    def inbound_of_turn(self, turn_id: TurnId) -> tuple[InboxEntry, ...]:
        rows = set[tuple[Any, ...]]()
        for column in ("turn", "into_turn"):  # an index each
            rows |= {
                *self._all(
                    f"{_INBOX.replace('SELECT ', 'SELECT i.n, ', 1)} WHERE i.{column} = "
                    "(SELECT n FROM turns WHERE id = ?)",
                    (turn_id,),
                )
            }
        return tuple(_inbox_entry_of(row[1:]) for row in sorted(rows))

    def oldest_ended_inbound_ms(self) -> int | None:
        row = self._one(
            f"SELECT i.accepted_ms FROM inbox i WHERE {FORGETTABLE} ORDER BY i.n LIMIT 1"
        )
        return None if row is None else row[0]

    def inbox_pruned_version(self) -> int:
        row = self._one(
            "SELECT max(version) FROM changes WHERE scope = 'inbox' AND aspect = 'pruned'"
        )
        return row[0] if row is not None and row[0] is not None else 0

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        rows = self._all(
            f"SELECT t.id, t.key, iif({turn_gone('d.turn')}, '', d.reason), d.tries, d.state, "
            "d.at_ms, d.resolved_ms "
            "FROM dead_letters d JOIN turns t ON t.n = d.turn ORDER BY d.turn"
        )
        return tuple(
            DeadLetter(
                turn_id=row[0],
                key=row[1],
                reason=row[2],
                tries=row[3],
                state=row[4],
                at_ms=row[5],
                resolved_ms=row[6],
            )
            for row in rows
        )

    def usage(self, session_id: SessionId | None = None) -> tuple[UsageTotal, ...]:
        where, parameters = ("", ()) if session_id is None else ("WHERE s.id = ? ", (session_id,))
        rows = self._all(
            "SELECT s.source, u.model, u.auxiliary, count(*), sum(u.input), sum(u.output), "
            "sum(u.cache_read), sum(u.cache_write), sum(u.reasoning), sum(u.cost_nanos) FROM "
            "usage u "
            f"JOIN sessions s ON s.n = u.session {where}GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
            parameters,
        )
        return tuple(
            UsageTotal(
                source=row[0],
                model=row[1],
                auxiliary=bool(row[2]),
                calls=row[3],
                tokens=Tokens(
                    input=row[4],
                    output=row[5],
                    cache_read=row[6],
                    cache_write=row[7],
                    reasoning=row[8],
                ),
                cost_nanos=row[9],
            )
            for row in rows
        )

    def turn_usage(self, turn_id: TurnId) -> TurnUsage:
        row = self._one(
            # By the sessions of its key, which have the index: a turn may have been in several.
            "SELECT sum(u.auxiliary = 0), sum(u.input), sum(u.output), sum(u.cache_read), "
            "sum(u.cache_write), sum(u.reasoning) FROM turns t JOIN sessions s ON s.key = t.key "
            "JOIN usage u ON u.session = s.n AND u.turn = t.n WHERE t.id = ?",
            (turn_id,),
        )
        if row is None or row[0] is None:
            return TurnUsage()
        tokens = Tokens(
            input=row[1], output=row[2], cache_read=row[3], cache_write=row[4], reasoning=row[5]
        )
        return TurnUsage(calls=row[0], tokens=tokens)

    def delivery(self, delivery_id: str) -> Delivery | None:
        row = self._one(f"{_DELIVERY} WHERE d.id = ? AND NOT {DELIVERY_GONE}", (delivery_id,))
        return None if row is None else _delivery_of(row)

    def open_deliveries(self, source: str | None = None, limit: int = 500) -> tuple[Delivery, ...]:
        where, parameters = ("", ()) if source is None else ("AND d.source = ? ", (source,))
        rows = self._all(
            f"{_OPEN_DELIVERY} WHERE d.state IN ('pending', 'sending') {where}ORDER BY d.n LIMIT ?",
            (*parameters, limit),
        )
        return tuple(_delivery_of(row) for row in rows)

    def first_deliveries(
        self, source: str, limit: int = 500, *, now_ms: int | None = None
    ) -> tuple[Delivery, ...]:
        rows = self._all(
            # Beside min(n) the other columns are those of that very row.
            f"{_OPEN_DELIVERY} WHERE d.n IN (SELECT n FROM (SELECT min(n) AS n, next_ms, marked_ms "
            "FROM deliveries INDEXED BY deliveries_open WHERE state IN ('pending', 'sending') "
            "AND source = ? GROUP BY key) WHERE ? IS NULL OR next_ms IS NULL OR next_ms <= ? "
            "OR marked_ms > ? ORDER BY n LIMIT ?) AND d.state IN ('pending', 'sending') "
            "AND d.source = ? ORDER BY d.n",
            (source, now_ms, now_ms, now_ms, limit, source),
        )
        return tuple(_delivery_of(row) for row in rows)

    def lane_deliveries(
        self, source: str, key: SessionKey, after: str | None = None, limit: int = 500
    ) -> tuple[Delivery, ...]:
        rows = self._all(
            f"{_LANE_DELIVERY} WHERE d.key = ? AND d.n > coalesce((SELECT n FROM deliveries "
            "WHERE id = ?), 0) AND d.source = ? AND d.state IN ('pending', 'sending') "
            "ORDER BY d.n LIMIT ?",
            (key, after, source, limit),
        )
        return tuple(_delivery_of(row) for row in rows)

    def deliveries(
        self,
        *,
        state: DeliveryState | None = None,
        source: str | None = None,
        key: SessionKey | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> tuple[tuple[Delivery, ...], int | None]:
        where, parameters = (
            f"d.n < ? AND NOT {DELIVERY_GONE}",
            list[Any]([_LAST if after is None else after]),
        )
        wanted = [("state", state), ("source", source), ("key", key)]
        for column, value in wanted:
            if value is not None:
                where += f" AND d.{column} = ?"
                parameters.append(value)
        # What is open, or left over, is little beside what was sent: each has an index of its own,
        # which SQLite uses only if it sees the very same condition.
        if state in ("pending", "sending"):
            where += " AND d.state IN ('pending', 'sending')"
        elif state in ("failed", "unknown"):
            where += " AND d.state IN ('failed', 'unknown')"
        rows = self._all(
            f"{_DELIVERY.replace('SELECT ', 'SELECT d.n, ', 1)} WHERE {where} "
            "ORDER BY d.n DESC LIMIT ?",
            (*parameters, limit),
        )
        found = tuple(_delivery_of(row[1:]) for row in rows)
        return found, rows[-1][0] if len(rows) == limit else None

    def last_delivery(self, key: SessionKey, source: str) -> Delivery | None:
        row = self._one(
            f"{_DELIVERY} WHERE d.key = ? AND d.source = ? AND NOT {DELIVERY_GONE} "
            "ORDER BY d.n DESC LIMIT 1",
            (key, source),
        )
        return None if row is None else _delivery_of(row)

    def effects(self, turn_id: TurnId) -> tuple[Effect, ...]:
        rows = self._all(
            "SELECT e.effect_key, e.effect_id, e.tool, e.digest, e.state, e.attempt, e.result, "
            "e.begun_ms, "
            "e.finished_ms FROM effects e JOIN turns t ON t.n = e.turn "
            f"WHERE t.id = ? AND NOT {turn_gone('t.n')} "
            "ORDER BY e.begun_ms, e.effect_key",
            (turn_id,),
        )
        return tuple(
            Effect(
                turn_id=turn_id,
                effect_key=row[0],
                effect_id=Uid(row[1].hex()),
                tool=row[2],
                digest=row[3],
                state=row[4],
                attempt=row[5],
                result=None if row[6] is None else msgspec.json.decode(row[6]),
                begun_ms=row[7],
                finished_ms=row[8],
            )
            for row in rows
        )

    def question(self, key: SessionKey, question_key: str) -> Question | None:
        found = self._questions("AND q.key = ? AND q.question_key = ?", (key, question_key))
        return found[0] if found else None

    def questions(
        self, key: SessionKey | None = None, *, open_only: bool = False, limit: int = 500
    ) -> tuple[Question, ...]:
        where, parameters = ("", ()) if key is None else ("AND q.key = ? ", (key,))
        if open_only:
            where += "AND q.state = 'open' "
        order = f"{where}ORDER BY q.asked_ms, q.key, q.question_key LIMIT ?"
        return self._questions(order, (*parameters, limit))

    def expired_questions(self, now_ms: int, limit: int = 500) -> tuple[Question, ...]:
        return self._questions(
            "AND q.state = 'open' AND q.expires_ms <= ? "
            "ORDER BY q.expires_ms, q.key, q.question_key LIMIT ?",
            (now_ms, limit),
        )

    def _questions(self, rest: str, parameters: tuple[Any, ...]) -> tuple[Question, ...]:
        rows = self._all(
            "SELECT q.key, q.question_key, t.id, q.question, q.choices, q.state, q.answer, "
            "q.answered_by, "
            "q.asked_ms, q.expires_ms, q.answered_ms FROM questions q JOIN turns t ON t.n = q.turn "
            f"WHERE NOT {turn_gone('q.turn')} {rest}",
            parameters,
        )
        return tuple(
            Question(
                key=row[0],
                question_key=row[1],
                turn_id=row[2],
                question=row[3],
                choices=tuple(msgspec.json.decode(row[4])),
                state=row[5],
                answer=row[6],
                answered_by=row[7],
                asked_ms=row[8],
                expires_ms=row[9],
                answered_ms=row[10],
            )
            for row in rows
        )

    def timer(self, timer_id: str) -> Timer | None:
        found = self._timers("WHERE id = ?", (timer_id,))
        return found[0] if found else None

    def timers(
        self, due_ms: int | None = None, *, key: SessionKey | None = None, limit: int = 500
    ) -> tuple[Timer, ...]:
        where, parameters = "WHERE state = 'set' ", list[Any]()
        for condition, value in (("due_ms <= ?", due_ms), ("key = ?", key)):
            if value is not None:
                where += f"AND {condition} "
                parameters.append(value)
        return self._timers(f"{where}ORDER BY due_ms, id LIMIT ?", (*parameters, limit))

    def due_timers(self, now_ms: int, limit: int = 500) -> tuple[Timer, ...]:
        return self._timers(
            "WHERE id IN (SELECT id FROM (SELECT id, due_ms, row_number() OVER (PARTITION BY key "
            "ORDER BY due_ms, id) AS place FROM timers WHERE state = 'set' AND due_ms <= ?) "
            "WHERE place = 1 ORDER BY due_ms, id LIMIT ?) ORDER BY due_ms, id",
            (now_ms, limit),
        )

    def _timers(self, rest: str, parameters: tuple[Any, ...]) -> tuple[Timer, ...]:
        rows = self._all(
            "SELECT id, key, source, due_ms, inbound, state, set_ms, resolved_ms, busy FROM timers "
            f"{rest}",
            parameters,
        )
        return tuple(
            Timer(
                id=row[0],
                key=row[1],
                source=row[2],
                due_ms=row[3],
                inbound=_decode_inbound(row[4]),
                state=row[5],
                set_ms=row[6],
                resolved_ms=row[7],
                busy=row[8],
            )
            for row in rows
        )

    def next_due_ms(self, now_ms: int) -> int | None:
        row = self._one(
            "SELECT min(due_ms) FROM (SELECT min(due_ms) AS due_ms FROM timers WHERE state = 'set' "
            "AND due_ms > ? UNION ALL SELECT min(expires_ms) FROM questions q WHERE state = 'open' "
            f"AND expires_ms > ? AND NOT {turn_gone('q.turn')})",
            (now_ms, now_ms),
        )
        return None if row is None else row[0]
