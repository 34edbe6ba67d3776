"""The tables, and how an older file becomes a current one.

Owns the schema version (`PRAGMA user_version`) and the application id that marks a file as
ours. Migrations go forward only, one transaction each, in order; the first makes an empty file
current. A migration that was released is never edited: a change is a new entry at the end. A
file that is newer than this code, or not ours, is refused and not touched.

`docs/schema.md` is this page for people with a SQL shell; a test compares the two.

Choices that cost or save bytes on every message:
- sessions and turns are referred to by row number, uids are 16 bytes;
- what most messages don't have shares one JSON column, `details`, which is NULL for plain text;
- what changes with every append lives in `heads`, a narrow table: an append rewrites 40 bytes,
  not a session's whole row;
- a row's `state` and `kind` are small numbers, whose zero takes no space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ForeignFileError, NewerSchemaError

if TYPE_CHECKING:
    import apsw

APPLICATION_ID = 0x6F6E6570  # "onep"

_INITIAL = """
CREATE TABLE pen (
  one          INTEGER PRIMARY KEY CHECK (one = 1),
  epoch        INTEGER NOT NULL,      -- moved by every opening for writing
  commit_seq   INTEGER NOT NULL,      -- moved by every batch
  created_ms   INTEGER NOT NULL
) STRICT;

CREATE TABLE marks (
  name         TEXT PRIMARY KEY,
  value        TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE routes (
  key                   TEXT PRIMARY KEY,
  session_id            TEXT UNIQUE,  -- may name a session that has no row yet
  incarnation           INTEGER NOT NULL,
  pending_title         TEXT,
  pending_title_origin  TEXT,
  useless_compressions  INTEGER NOT NULL DEFAULT 0,
  route_version         INTEGER NOT NULL DEFAULT 0,
  pending_title_version INTEGER NOT NULL DEFAULT 0,
  compression_version   INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE changes (                -- one row for each value that was set
  scope        TEXT NOT NULL,         -- a session key or a session id
  aspect       TEXT NOT NULL,
  version      INTEGER NOT NULL,
  digest       BLOB NOT NULL,
  at_ms        INTEGER NOT NULL,
  PRIMARY KEY (scope, aspect, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
  n               INTEGER PRIMARY KEY AUTOINCREMENT,
  id              TEXT NOT NULL UNIQUE,
  key             TEXT NOT NULL,
  parent          INTEGER REFERENCES sessions (n),
  edge            TEXT CHECK (edge IN ('rotation', 'branch', 'reset', 'delegate')),
  source          TEXT NOT NULL,
  user            TEXT,
  model           TEXT,
  title           TEXT UNIQUE,
  title_origin    TEXT,
  started_ms      INTEGER NOT NULL,
  ended_ms        INTEGER,
  end_reason      TEXT,
  end_kind        TEXT CHECK (end_kind IN ('suspension', 'boundary', 'rotation')),
  archived        INTEGER NOT NULL DEFAULT 0,
  pinned          INTEGER NOT NULL DEFAULT 0,
  deleted         INTEGER NOT NULL DEFAULT 0,
  hidden          INTEGER NOT NULL DEFAULT 0,
  meta            TEXT,
  compaction_count INTEGER NOT NULL DEFAULT 0,
  tokens          TEXT,               -- JSON: input, output, cache_read, cache_write, reasoning
  cost_nanos      INTEGER NOT NULL DEFAULT 0,
  auxiliary_tokens TEXT,
  auxiliary_cost_nanos INTEGER NOT NULL DEFAULT 0,
  title_version   INTEGER NOT NULL DEFAULT 0,
  end_version     INTEGER NOT NULL DEFAULT 0,
  flags_version   INTEGER NOT NULL DEFAULT 0,
  details_version INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE UNIQUE INDEX sessions_rotation ON sessions (parent) WHERE edge = 'rotation';
CREATE INDEX sessions_parent ON sessions (parent) WHERE parent IS NOT NULL;
CREATE INDEX sessions_key ON sessions (key);

CREATE TABLE heads (                  -- what an append changes of its session
  session         INTEGER PRIMARY KEY REFERENCES sessions (n),
  next_seq        INTEGER NOT NULL,
  revision        INTEGER NOT NULL,
  message_count   INTEGER NOT NULL,   -- carried copies are not counted
  active_count    INTEGER NOT NULL,
  active_bytes    INTEGER NOT NULL,
  tool_call_count INTEGER NOT NULL,
  first_active    INTEGER NOT NULL,   -- no active row stands before this seq
  last_ms         INTEGER NOT NULL,
  last_minute     INTEGER NOT NULL    -- last_ms in minutes, so that its index rests
) STRICT;
CREATE INDEX heads_recent ON heads (last_minute, session);

CREATE TABLE turns (
  n            INTEGER PRIMARY KEY AUTOINCREMENT,
  id           TEXT NOT NULL UNIQUE,
  key          TEXT NOT NULL,
  session      INTEGER REFERENCES sessions (n),
  state        TEXT NOT NULL,
  attempt      INTEGER NOT NULL,
  outcome      TEXT,
  history      TEXT,                  -- JSON: what earlier attempts came to
  opened_ms    INTEGER NOT NULL,
  started_ms   INTEGER,
  ended_ms     INTEGER
) STRICT;
CREATE INDEX turns_unfinished ON turns (key, n) WHERE state <> 'ended';
CREATE INDEX turns_session ON turns (session) WHERE session IS NOT NULL;

CREATE TABLE messages (
  n             INTEGER PRIMARY KEY AUTOINCREMENT,   -- the order of commits, never used twice
  session       INTEGER NOT NULL REFERENCES sessions (n),
  seq           INTEGER NOT NULL,
  uid           BLOB NOT NULL CHECK (length(uid) = 16),
  turn          INTEGER,              -- turns.n; a foreign key would need an index
  role          TEXT NOT NULL,
  state         INTEGER NOT NULL,     -- 0 active, 1 summarised, 2 rewound
  carried       INTEGER NOT NULL,
  kind          INTEGER NOT NULL,     -- bits: 1 summary, 2 erased
  created_ms    INTEGER NOT NULL,
  user          TEXT,
  text          TEXT,
  details       TEXT,                 -- JSON: everything else that was given
  covers_first  INTEGER,
  covers_last   INTEGER,
  summarised_by INTEGER
) STRICT;
CREATE UNIQUE INDEX messages_place ON messages (session, seq);
CREATE UNIQUE INDEX messages_original ON messages (uid) WHERE carried = 0;
CREATE UNIQUE INDEX messages_carried ON messages (uid, session) WHERE carried = 1;
CREATE INDEX messages_covering ON messages (session, covers_last) WHERE covers_last IS NOT NULL;

CREATE TABLE rewinds (
  session      INTEGER NOT NULL REFERENCES sessions (n),
  revision     INTEGER NOT NULL,      -- the revision that it made
  kind         TEXT NOT NULL CHECK (kind IN ('rewind', 'restore')),
  to_seq       INTEGER NOT NULL,
  next_seq     INTEGER NOT NULL,      -- before what a rewind adds: results for open tool calls
  changed      TEXT NOT NULL,         -- JSON: [first, last, state, summarised_by] before
  at_ms        INTEGER NOT NULL,
  PRIMARY KEY (session, revision)
) STRICT, WITHOUT ROWID;

CREATE TABLE inbox (
  n            INTEGER PRIMARY KEY AUTOINCREMENT,    -- the order of acceptance
  source       TEXT NOT NULL,
  inbound_id   TEXT NOT NULL,
  key          TEXT NOT NULL,
  turn         INTEGER NOT NULL REFERENCES turns (n),
  disposition  TEXT NOT NULL,
  digest       TEXT NOT NULL,
  accepted_ms  INTEGER NOT NULL,
  body         TEXT,                  -- JSON, until it is taken into a transcript
  UNIQUE (source, inbound_id)
) STRICT;
CREATE INDEX inbox_turn ON inbox (turn);

CREATE TABLE dead_letters (
  turn         INTEGER PRIMARY KEY REFERENCES turns (n),
  reason       TEXT NOT NULL,
  tries        INTEGER NOT NULL,
  state        TEXT NOT NULL,
  at_ms        INTEGER NOT NULL,
  resolved_ms  INTEGER
) STRICT;

CREATE TABLE usage (
  call         BLOB PRIMARY KEY,
  session      INTEGER NOT NULL REFERENCES sessions (n),
  turn         INTEGER REFERENCES turns (n),
  model        TEXT NOT NULL,
  auxiliary    INTEGER NOT NULL,
  input        INTEGER NOT NULL,
  output       INTEGER NOT NULL,
  cache_read   INTEGER NOT NULL,
  cache_write  INTEGER NOT NULL,
  reasoning    INTEGER NOT NULL,
  cost_nanos   INTEGER NOT NULL,
  at_ms        INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX usage_session ON usage (session);

CREATE TABLE deliveries (
  n            INTEGER PRIMARY KEY AUTOINCREMENT,
  id           TEXT NOT NULL UNIQUE,
  key          TEXT NOT NULL,
  source       TEXT NOT NULL,
  target       TEXT NOT NULL,
  body         TEXT NOT NULL,
  turn         INTEGER REFERENCES turns (n),
  session      INTEGER REFERENCES sessions (n),
  message_uid  BLOB,
  state        TEXT NOT NULL,
  attempt      INTEGER NOT NULL,
  error        TEXT,
  platform_id  TEXT,
  next_ms      INTEGER,
  history      TEXT,
  posted_ms    INTEGER NOT NULL,
  marked_ms    INTEGER
) STRICT;
CREATE INDEX deliveries_open ON deliveries (n) WHERE state IN ('pending', 'sending');
CREATE INDEX deliveries_session ON deliveries (session) WHERE session IS NOT NULL;
CREATE INDEX deliveries_turn ON deliveries (turn) WHERE turn IS NOT NULL;

CREATE TABLE effects (
  turn         INTEGER NOT NULL REFERENCES turns (n),
  effect_key   TEXT NOT NULL,
  effect_id    BLOB NOT NULL,
  tool         TEXT NOT NULL,
  digest       TEXT NOT NULL,
  state        TEXT NOT NULL,
  attempt      INTEGER NOT NULL,
  result       TEXT,
  history      TEXT,
  begun_ms     INTEGER NOT NULL,
  finished_ms  INTEGER,
  PRIMARY KEY (turn, effect_key)
) STRICT, WITHOUT ROWID;

CREATE TABLE questions (
  key          TEXT NOT NULL,
  question_key TEXT NOT NULL,
  turn         INTEGER NOT NULL REFERENCES turns (n),
  question     TEXT NOT NULL,
  choices      TEXT NOT NULL,
  state        TEXT NOT NULL,
  answer       TEXT,
  answered_by  TEXT,
  asked_ms     INTEGER NOT NULL,
  expires_ms   INTEGER,
  answered_ms  INTEGER,
  PRIMARY KEY (key, question_key)
) STRICT, WITHOUT ROWID;
CREATE INDEX questions_turn ON questions (turn);
CREATE INDEX questions_open ON questions (expires_ms) WHERE state = 'open';

CREATE TABLE timers (
  id           TEXT PRIMARY KEY,
  key          TEXT NOT NULL,
  source       TEXT NOT NULL,
  due_ms       INTEGER NOT NULL,
  inbound      TEXT NOT NULL,
  state        TEXT NOT NULL,
  set_ms       INTEGER NOT NULL,
  resolved_ms  INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX timers_due ON timers (due_ms) WHERE state = 'set';

CREATE TABLE blobs (
  n            INTEGER PRIMARY KEY,
  id           TEXT NOT NULL UNIQUE,
  size_bytes   INTEGER NOT NULL,
  chunk_count  INTEGER NOT NULL,
  media_type   TEXT NOT NULL,
  sealed_ms    INTEGER                -- NULL while its pieces arrive
) STRICT;

CREATE TABLE chunks (
  blob         INTEGER NOT NULL REFERENCES blobs (n) ON DELETE CASCADE,
  idx          INTEGER NOT NULL,
  data         BLOB NOT NULL,
  PRIMARY KEY (blob, idx)
) STRICT;

CREATE TABLE blob_uses (
  blob         INTEGER NOT NULL REFERENCES blobs (n),
  session      INTEGER NOT NULL,
  seq          INTEGER NOT NULL,
  PRIMARY KEY (blob, session, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX blob_uses_message ON blob_uses (session, seq);
"""

# Who is answered outlives the body of a message; what leaves is found by key, and by what is left.
_HAND_OVERS = """
ALTER TABLE inbox ADD COLUMN reply_to TEXT;
UPDATE inbox SET reply_to = body -> '$.reply_to' WHERE json_valid(body);
ALTER TABLE inbox ADD COLUMN into_turn INTEGER REFERENCES turns (n);
CREATE INDEX inbox_into ON inbox (into_turn) WHERE into_turn IS NOT NULL;
ALTER TABLE timers ADD COLUMN busy TEXT;
DROP INDEX deliveries_open;
CREATE INDEX deliveries_open ON deliveries (source, n) WHERE state IN ('pending', 'sending');
CREATE INDEX deliveries_key ON deliveries (key, n);
CREATE INDEX deliveries_left ON deliveries (n) WHERE state IN ('failed', 'unknown');
"""

# Search is derived from `messages`: which rows are indexed is a range that grows at both ends, and
# whatever changes a row inside it leaves its number behind, so that no command can forget to.
SEARCH_INDEX = """
CREATE VIRTUAL TABLE search_index USING fts5 (
  text, facets, content = '', contentless_delete = 1, tokenize = 'ascii'
);"""
# Pieces are merged by us, in small steps: by itself it would take its time in one of our slices.
SEARCH_CONFIG = """
INSERT INTO search_index (search_index, rank) VALUES ('automerge', 0);
INSERT INTO search_index (search_index, rank) VALUES ('crisismerge', 1999);
INSERT INTO search_index (search_index, rank) VALUES ('usermerge', 16);
INSERT INTO search_index (search_index, rank) VALUES ('rank', 'bm25(1.0, 0.0)');
"""
_SEARCH = f"""{SEARCH_INDEX}
{SEARCH_CONFIG}
CREATE TABLE search_state (
  one          INTEGER PRIMARY KEY CHECK (one = 1),
  first_n      INTEGER NOT NULL,      -- messages from here ...
  last_n       INTEGER NOT NULL,      -- ... up to here are indexed
  edition      TEXT NOT NULL,         -- of the tokeniser that made the words
  phase        TEXT NOT NULL CHECK (phase IN ('ready', 'clearing')),
  scrub        INTEGER NOT NULL       -- 1: what was deleted is still in the index's old pages
) STRICT;
INSERT INTO search_state SELECT 1, coalesce(max(n), 0) + 1, coalesce(max(n), 0), '', 'ready', 0
  FROM messages;
CREATE TABLE search_changes (
  n            INTEGER PRIMARY KEY    -- messages.n of a row whose entry is to be made again
) STRICT;
CREATE TRIGGER messages_changed AFTER UPDATE OF state, carried, kind ON messages
  WHEN ((old.state = 2) <> (new.state = 2) OR old.carried <> new.carried OR old.kind <> new.kind)
    AND EXISTS (SELECT 1 FROM search_state WHERE old.n BETWEEN first_n AND last_n)
  BEGIN INSERT OR IGNORE INTO search_changes VALUES (old.n); END;
CREATE TRIGGER messages_gone AFTER DELETE ON messages
  WHEN old.carried = 0
    AND EXISTS (SELECT 1 FROM search_state WHERE old.n BETWEEN first_n AND last_n)
  BEGIN INSERT OR IGNORE INTO search_changes VALUES (old.n); END;
"""

# A deleted session is gone from every view at once, and from the file in slices.
_PURGES = """
CREATE TABLE purges (
  session      INTEGER PRIMARY KEY REFERENCES sessions (n),
  step         INTEGER NOT NULL,      -- slices that were taken away
  given        INTEGER NOT NULL,      -- before this seq no row has a copy that is not an original
  turn         INTEGER NOT NULL       -- up to this turn nothing is left
) STRICT;
"""

MIGRATIONS: tuple[str, ...] = (_INITIAL, _HAND_OVERS, _SEARCH, _PURGES)
VERSION = len(MIGRATIONS)


def check_ours(db: apsw.Connection, path: str) -> int:
    """The file's schema version; 0 for an empty one. Raises for a foreign or newer file."""
    stored: int = db.pragma("user_version")
    if stored > VERSION and db.pragma("application_id") == APPLICATION_ID:
        raise NewerSchemaError(path, stored, VERSION)
    if db.pragma("application_id") == APPLICATION_ID:
        return stored
    if stored == 0 and db.execute("SELECT count(*) FROM sqlite_schema").get == 0:
        return 0
    raise ForeignFileError(path, "it is a SQLite database, but not one of onepen's")


def migrate(db: apsw.Connection, path: str, now_ms: int) -> int:
    """Bring the file to the current version, one transaction a step; returns the version it had."""
    stored = check_ours(db, path)
    for version in range(stored, VERSION):
        with db:
            db.execute(MIGRATIONS[version])
            if version == 0:
                db.execute("INSERT INTO pen VALUES (1, 0, 0, ?)", (now_ms,))
                # A new database has no rotations from before our time: contract G1.
                db.execute("INSERT INTO marks VALUES ('finalize_orphaned_rotations', 'new')")
            # Version and contents move in one transaction: a crash leaves the step done or not
            # begun.
            db.pragma("application_id", APPLICATION_ID)
            db.pragma("user_version", version + 1)
    return stored
