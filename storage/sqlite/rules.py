"""What must hold in every database, as SQL that finds what breaks it.

Owned by nobody who writes: these rules share no code with the handlers, so that a mistake there
does not hide itself here. Tests hold every state of the crash campaign against them, and `onepen
doctor` a database that has lived.

Keeps:
- Each rule is one query that returns the offenders, by id and number, never by text of a
  conversation; a sound database returns none. Each has its own name.
- What was lost on purpose (a deleted session, an erased message) is no violation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE = "coalesce(octet_length(m.text), 0) + coalesce(octet_length(m.details), 0)"
# JSON that somebody else has damaged is a finding of its own, and must not hide the others.
_CALLS = (
    "CASE WHEN json_valid(m.details) "
    "THEN coalesce(json_array_length(m.details, '$.tool_calls'), 0) ELSE 0 END"
)
_BLANK = (
    "json_object('kind', CASE WHEN json_valid(t.outcome) THEN t.outcome ->> 'kind' "
    "ELSE 'failed' END)"
)
_TOKENS = "CASE WHEN json_valid(s.tokens) THEN s.tokens END"
_MESSAGES = "sessions s JOIN heads h ON h.session = s.n LEFT JOIN messages m ON m.session = s.n"


def _version_rule(table: str, identity: str, aspect: str) -> str:
    """A version is one more than the one before, and each has a row that tells who made it."""
    return (
        f"SELECT t.{identity}, t.{aspect}_version, count(c.version), max(c.version) FROM {table} t "
        f"LEFT JOIN changes c ON c.scope = t.{identity} AND c.aspect = '{aspect}' "
        f"GROUP BY t.{identity} HAVING count(c.version) <> t.{aspect}_version "
        f"OR coalesce(max(c.version), 0) <> t.{aspect}_version"
    )


RULES: Mapping[str, str] = {
    "one pen": (
        "SELECT count(*), max(epoch), min(commit_seq) FROM pen "
        "HAVING count(*) <> 1 OR max(epoch) < 1 OR min(commit_seq) < 0"
    ),
    "every session has its head": (
        "SELECT s.id FROM sessions s LEFT JOIN heads h ON h.session = s.n WHERE h.session IS NULL"
    ),
    "seqs are 0 to next_seq - 1": (
        "SELECT s.id, h.next_seq, count(m.seq), min(m.seq), max(m.seq), count(DISTINCT m.seq) "
        f"FROM {_MESSAGES} WHERE s.deleted = 0 GROUP BY s.n HAVING count(m.seq) <> h.next_seq "
        "OR count(DISTINCT m.seq) <> h.next_seq "
        "OR (h.next_seq > 0 AND (min(m.seq) <> 0 OR max(m.seq) <> h.next_seq - 1))"
    ),
    "a tombstone has no text": (
        "SELECT s.id FROM sessions s WHERE s.deleted = 1 AND (s.title IS NOT NULL "
        "OR s.user IS NOT NULL OR s.meta IS NOT NULL "
        "OR EXISTS (SELECT 1 FROM deliveries d WHERE d.session = s.n "
        "AND d.state IN ('pending', 'sending')))"
    ),
    # What waits to be taken away is known by name.
    "what is left of a tombstone is to be purged": (
        "SELECT s.id FROM sessions s LEFT JOIN purges p ON p.session = s.n "
        "WHERE s.deleted = 1 AND p.session IS NULL "
        "AND (EXISTS (SELECT 1 FROM messages m WHERE m.session = s.n) "
        "OR EXISTS (SELECT 1 FROM deliveries d WHERE d.session = s.n) "
        "OR EXISTS (SELECT 1 FROM blob_uses u WHERE u.session = s.n) "
        "OR EXISTS (SELECT 1 FROM rewinds r WHERE r.session = s.n) "
        "OR EXISTS (SELECT 1 FROM turns t WHERE t.session = s.n "
        f"AND ((t.outcome IS NOT NULL AND t.outcome <> {_BLANK}) "
        "OR EXISTS (SELECT 1 FROM effects e WHERE e.turn = t.n) "
        "OR EXISTS (SELECT 1 FROM questions q WHERE q.turn = t.n) "
        "OR EXISTS (SELECT 1 FROM deliveries d WHERE d.turn = t.n) "
        "OR EXISTS (SELECT 1 FROM dead_letters l WHERE l.turn = t.n AND l.reason <> '') "
        "OR EXISTS (SELECT 1 FROM inbox i WHERE t.n IN (i.turn, i.into_turn) "
        "AND (i.body IS NOT NULL OR i.reply_to IS NOT NULL)))))"
    ),
    "no original is left in a tombstone that was carried on": (
        "SELECT s.id, m.seq FROM sessions s JOIN messages m ON m.session = s.n "
        "JOIN messages k ON k.uid = m.uid AND k.carried = 1 "
        "JOIN sessions heir ON heir.n = k.session "
        "WHERE s.deleted = 1 AND m.carried = 0 AND heir.deleted = 0 AND heir.hidden = 0"
    ),
    # An erased row does not tell any more whether it was a summary, or what it called.
    "message_count counts the originals": (
        "SELECT s.id, h.message_count, total(m.kind = 0), total(m.kind = 2) "
        f"FROM {_MESSAGES} AND m.carried = 0 AND s.deleted = 0 GROUP BY s.n "
        "HAVING h.message_count NOT BETWEEN total(m.kind = 0) AND total(m.kind IN (0, 2))"
    ),
    "tool_call_count counts the calls": (
        f"SELECT s.id, h.tool_call_count, total({_CALLS}) FROM {_MESSAGES} AND m.carried = 0 "
        "WHERE s.deleted = 0 GROUP BY s.n "
        f"HAVING h.tool_call_count < total(CASE m.kind WHEN 0 THEN {_CALLS} END) "
        f"OR (total(m.kind = 2) = 0 AND h.tool_call_count > total({_CALLS}))"
    ),
    "active_count counts the active rows": (
        f"SELECT s.id, h.active_count, count(m.n) FROM {_MESSAGES} AND m.state = 0 "
        "AND s.deleted = 0 GROUP BY s.n "
        "HAVING h.active_count <> count(m.n)"
    ),
    "active_bytes adds up the active rows": (
        f"SELECT s.id, h.active_bytes, total({_SIZE}) FROM {_MESSAGES} AND m.state = 0 "
        f"AND s.deleted = 0 GROUP BY s.n HAVING h.active_bytes <> total({_SIZE})"
    ),
    "no active row stands before first_active": (
        f"SELECT s.id, h.first_active, min(m.seq) FROM {_MESSAGES} "
        "WHERE m.state = 0 AND m.seq < h.first_active GROUP BY s.n"
    ),
    "a revision moves with its transcript": (
        "SELECT s.id, h.revision, h.next_seq FROM sessions s JOIN heads h ON h.session = s.n "
        "WHERE (h.next_seq > 0 AND h.revision = 0) "
        "OR h.revision < (SELECT coalesce(max(r.revision), 0) FROM rewinds r WHERE r.session = s.n)"
    ),
    "an original is there once": (
        "SELECT hex(uid), count(*) FROM messages WHERE carried = 0 GROUP BY uid HAVING count(*) > 1"
    ),
    "a session has a message once": (
        "SELECT session, hex(uid), count(*) FROM messages GROUP BY session, uid HAVING count(*) > 1"
    ),
    "what is summarised has its summary": (
        "SELECT m.session, m.seq, m.summarised_by FROM messages m "
        "JOIN sessions s ON s.n = m.session AND s.hidden = 0 WHERE m.state = 1 "
        "AND NOT EXISTS (SELECT 1 FROM messages b "
        "WHERE b.session = m.session AND b.seq = m.summarised_by "
        "AND b.state <> 2)"
    ),
    "a session is in one route at most": (
        "SELECT session_id, count(*) FROM routes WHERE session_id IS NOT NULL GROUP BY session_id "
        "HAVING count(*) > 1"
    ),
    "a route never names a session that was rotated away": (
        "SELECT r.key, s.id FROM routes r JOIN sessions s ON s.id = r.session_id "
        "WHERE s.end_kind = 'rotation'"
    ),
    "a route names a session of its own key": (
        "SELECT r.key, s.id, s.key FROM routes r JOIN sessions s ON s.id = r.session_id "
        "WHERE s.key <> r.key OR s.deleted OR s.hidden"
    ),
    "a rotation has one child": (
        "SELECT p.id, count(k.n) FROM sessions p LEFT JOIN sessions k ON k.parent = p.n "
        "AND k.edge = 'rotation' GROUP BY p.n "
        "HAVING count(k.n) > 1 OR (count(k.n) = 0 AND p.end_kind = 'rotation')"
    ),
    "a rotation's parent has ended by compression": (
        "SELECT p.id, p.end_kind, p.end_reason, k.id FROM sessions k "
        "JOIN sessions p ON p.n = k.parent "
        "WHERE k.edge = 'rotation' AND k.hidden = 0 AND p.hidden = 0 AND (p.ended_ms IS NULL "
        "OR p.end_reason IS NOT 'compression')"
    ),
    "an end has its time, reason and kind": (
        "SELECT id, ended_ms, end_reason, end_kind FROM sessions "
        "WHERE (ended_ms IS NULL) + (end_reason IS NULL) + (end_kind IS NULL) NOT IN (0, 3)"
    ),
    "a route's version is its number of changes": _version_rule("routes", "key", "route"),
    "a pending title's version is its number of changes": _version_rule(
        "routes", "key", "pending_title"
    ),
    "a brake's version is its number of changes": _version_rule("routes", "key", "compression"),
    "a title's version is its number of changes": _version_rule("sessions", "id", "title"),
    "the flags' version is its number of changes": _version_rule("sessions", "id", "flags"),
    "the details' version is its number of changes": _version_rule("sessions", "id", "details"),
    # A rotation moves it too, and is recorded as a change of its route.
    "an end's version is its number of changes": (
        "SELECT s.id, s.end_version FROM sessions s WHERE s.end_version <> "
        "(SELECT count(*) FROM changes c WHERE c.scope = s.id AND c.aspect = 'end') "
        "+ (s.end_kind IS 'rotation')"
    ),
    "a turn's state agrees with its fields": (
        "SELECT id, state, attempt FROM turns WHERE CASE state "
        "WHEN 'queued' THEN attempt <> 0 OR session IS NOT NULL "
        "WHEN 'ended' THEN outcome IS NULL OR ended_ms IS NULL "
        "WHEN 'running' THEN attempt < 1 OR session IS NULL OR ended_ms IS NOT NULL "
        "WHEN 'waiting' THEN attempt < 1 OR session IS NULL OR ended_ms IS NOT NULL ELSE 1 END"
    ),
    "a message's turn is stored": (
        "SELECT m.session, m.seq, m.turn FROM messages m LEFT JOIN turns t ON t.n = m.turn "
        "WHERE m.turn IS NOT NULL AND t.n IS NULL"
    ),
    "cost adds up the calls": (
        "SELECT s.id, s.cost_nanos, s.auxiliary_cost_nanos FROM sessions s "
        "LEFT JOIN usage u ON u.session = s.n GROUP BY s.n "
        "HAVING s.cost_nanos <> total(CASE u.auxiliary WHEN 0 THEN u.cost_nanos END) "
        "OR s.auxiliary_cost_nanos <> total(CASE u.auxiliary WHEN 1 THEN u.cost_nanos END)"
    ),
    "tokens add up the calls": (
        "SELECT s.id, s.tokens FROM sessions s "
        "LEFT JOIN usage u ON u.session = s.n AND u.auxiliary = 0 GROUP BY s.n "
        f"HAVING coalesce({_TOKENS} ->> 'input', 0) <> total(u.input) "
        f"OR coalesce({_TOKENS} ->> 'output', 0) <> total(u.output)"
    ),
    "a sealed blob has all its pieces": (
        "SELECT b.id, b.chunk_count, count(c.idx) FROM blobs b LEFT JOIN chunks c ON c.blob = b.n "
        "WHERE b.sealed_ms IS NOT NULL GROUP BY b.n HAVING count(c.idx) <> b.chunk_count "
        "OR total(length(c.data)) <> b.size_bytes OR max(c.idx) <> b.chunk_count - 1"
    ),
    "a blob's use is a message's": (
        "SELECT u.session, u.seq, b.id FROM blob_uses u JOIN blobs b ON b.n = u.blob "
        "LEFT JOIN messages m ON m.session = u.session AND m.seq = u.seq "
        "WHERE m.n IS NULL OR b.sealed_ms IS NULL"
    ),
    "a message's blob is stored": (
        "SELECT m.session, m.seq, j.value FROM messages m, "
        "json_each(CASE WHEN json_valid(m.details) THEN m.details END, '$.blobs') j "
        "LEFT JOIN blobs b ON b.id = j.value "
        "LEFT JOIN blob_uses u ON u.blob = b.n AND u.session = m.session AND u.seq = m.seq "
        "WHERE u.blob IS NULL"
    ),
}
"""The rules in SQL, by name: each query gives one row for each offender."""

SINCE: Mapping[str, int] = {"what is left of a tombstone is to be purged": 4}
"""The version of the schema from which on a rule can be looked at, if not from the first."""
