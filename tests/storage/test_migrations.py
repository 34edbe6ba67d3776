"""A file of version 1 becomes a current one: with all of its rows, and wholly or not at all.

`migrating.py` has the file and the checks; the last tests plant bugs for them to find.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from onepen.runtime.testing import Disk
from onepen.runtime.testing.conformance.agreement import Names, followed, views_of
from onepen.runtime.testing.invariants import check_connection, compare, inspecting
from onepen.runtime.testing.workloads import START_MS
from onepen.storage import commands as c
from onepen.storage.errors import OpenError, StorageError
from onepen.storage.identity import Incarnation, SessionId, SessionKey, TurnId, Uid
from onepen.storage.records import Draft, Inbound, TurnOutcome
from onepen.storage.sqlite import schema
from onepen.storage.units import Durable, Guard, Unit

from ..crash.campaign import DATABASE, open_engine, scratch
from ..crash.faults import plans_for
from ..proving import PROOF
from .migrating import (
    Start,
    Tally,
    check_left,
    check_migrated,
    closed_file,
    fresh_schema,
    killed_file,
    made_schema,
    make_old,
    migrated_file,
    old,
    power_loss,
    schema_of,
    stages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import apsw

    from onepen.storage.engine import Reader
    from onepen.storage.sqlite.engine import SqliteEngine

TORN = 8 if PROOF else 1
# Every so-maniest image is recovered on a recording disk and loses its power again.
DOUBLE_EVERY = 5 if PROOF else 40

ANN, TIP = SessionKey("chat:ann"), SessionId("ann-1-next")
AT = START_MS + 1_000_000


# The fixture itself

STATES = {
    "turns": {"queued", "running", "waiting", "ended"},
    "deliveries": {"pending", "sending", "sent", "failed", "unknown"},
    "effects": {"begun", "done", "failed", "skipped", "unknown"},
    "questions": {"open", "answered", "expired", "withdrawn"},
    "timers": {"set", "fired", "cancelled"},
    "dead_letters": {"open", "retried", "dropped"},
    "messages": {0, 1, 2},
}
"""Written down and not taken from the records: these are the states of version 1."""


def test_the_fixture_is_sound_and_uses_every_table_and_state(tmp_path: Path) -> None:
    """An empty table would let the tests below say nothing about it."""
    columns, rows = old().columns, old().rows
    assert old().schema["version"] == ((1, schema.APPLICATION_ID, 2),)
    assert [table for table in columns if not rows[table]] == []
    for table, states in STATES.items():
        place = columns[table].index("state")
        assert {row[place] for row in rows[table]} == states, table
    with inspecting(closed_file(tmp_path) / DATABASE) as db:
        assert check_connection(db) == []


def test_the_killed_process_has_left_its_rows_in_the_log(tmp_path: Path) -> None:
    """Otherwise the tests that begin there would show the same as the others."""
    directory = killed_file(tmp_path / "place")
    assert (directory / f"{DATABASE}-wal").stat().st_size > 100_000
    assert (directory / DATABASE).stat().st_size < 10_000


def test_the_first_migration_is_as_it_was_released() -> None:
    """A released migration is never edited: files out there have run it."""
    assert compare(old().schema, made_schema(1)) == []


def test_the_second_migration_adds_these_columns_and_indexes() -> None:
    """Without an index everything would still agree, and only be slow."""
    before, after = made_schema(1), made_schema(2)
    added = {kind: {*after[kind]} - {*before[kind]} for kind in ("columns", "indexes")}
    assert {(row[0], row[2]) for row in added["columns"]} == {
        ("inbox", "reply_to"),
        ("inbox", "into_turn"),
        ("timers", "busy"),
    }
    assert {row[2] for row in added["indexes"]} >= {
        "inbox_into",
        "deliveries_key",
        "deliveries_left",
    }


# Brought forward


@pytest.mark.parametrize("start", [closed_file, killed_file])
def test_a_file_of_version_1_is_brought_forward_with_every_row(
    tmp_path: Path, start: Start
) -> None:
    """INV-2, INV-19: also when the process before was killed, and its log is recovered first."""
    directory = start(tmp_path / "place")
    expected = stages()
    assert expected[-1]["version"] == ((schema.VERSION, schema.APPLICATION_ID, 2),)
    for opening in (1, 2):  # the second time there is nothing to do
        engine = open_engine(directory)
        assert engine.epoch == 1 + opening
        engine.close()
        assert check_migrated(directory / DATABASE, expected) == []


def test_a_file_of_version_1_without_rows_is_brought_forward(tmp_path: Path) -> None:
    """INV-19: as it was when it had just been created."""
    old_db = make_old(tmp_path / DATABASE)
    old_db.pragma("foreign_keys", 0)
    for table in old().columns.keys() - {"pen"}:
        old_db.execute(f"DELETE FROM {table}")
    old_db.close()
    open_engine(tmp_path).close()
    with inspecting(tmp_path / DATABASE) as db:
        assert check_connection(db) == []
        assert compare(fresh_schema(), schema_of(db)) == []


def names_of(db: apsw.Connection) -> Names:
    """Every name that is stored, for the views to be asked about."""

    def these(query: str) -> dict[Any, None]:
        return dict.fromkeys(row if len(row) > 1 else row[0] for row in db.execute(query))

    return Names(
        keys=these("SELECT key FROM routes UNION SELECT key FROM sessions"),
        sessions=these("SELECT id FROM sessions"),
        uids=these("SELECT DISTINCT lower(hex(uid)) FROM messages"),
        turns=these("SELECT id FROM turns"),
        inbound=these("SELECT source, inbound_id FROM inbox"),
        sources=these(
            "SELECT source FROM sessions UNION SELECT source FROM inbox "
            "UNION SELECT source FROM deliveries UNION SELECT source FROM timers"
        ),
        titles=these("SELECT title FROM sessions WHERE title IS NOT NULL"),
        deliveries=these("SELECT id FROM deliveries"),
        questions=these("SELECT key, question_key FROM questions"),
        timers=these("SELECT id FROM timers"),
        chunks=these("SELECT b.id, c.idx FROM chunks c JOIN blobs b ON b.n = c.blob"),
        marks=these("SELECT name FROM marks"),
        times=these("SELECT created_ms FROM messages UNION SELECT due_ms FROM timers"),
    )


def test_every_view_answers_about_a_migrated_file(tmp_path: Path) -> None:
    """INV-2: nothing is damaged, and asking again after a restart gives the same."""
    path = migrated_file(tmp_path)
    with inspecting(path) as db:
        names = names_of(db)
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        engine = open_engine(tmp_path)
        with engine.reading() as reader:
            answers.append(views_of(reader, names))
        engine.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) > 300
    assert [view for view, answer in answers[0].items() if "damaged=True" in answer] == []


def test_the_views_say_what_version_1_has_stored(tmp_path: Path) -> None:
    """INV-2: one fact from each table, through the reader."""
    engine = open_engine(closed_file(tmp_path))
    with engine.reading() as reader:
        _expect_conversations(reader)
        _expect_work(reader)
    engine.close()


def texts(reader: Reader, session_id: str) -> list[str | None]:
    return [m.text for m in reader.transcript(SessionId(session_id)).messages]


def _expect_conversations(reader: Reader) -> None:
    route = reader.route(ANN)
    assert route is not None
    assert (route.session_id, route.incarnation, route.route_version) == (TIP, 1, 2)
    assert reader.holder(TIP) == ANN
    assert [s.id for s in reader.lineage(TIP)] == ["ann-1", TIP]
    assert reader.find_session("Milk and honey").id == TIP
    asked = "tell me all about it, at length please " * 3
    assert texts(reader, TIP) == ["so far: hello", "look", asked, "go on"]
    question, call, result, *_ = reader.transcript(SessionId("ann-1")).messages
    assert question.text == "is there milk?\nand honey: naïve 日本 it's"
    assert [asked.name for asked in call.tool_calls] == ["search"]
    assert result.text == "found: a\0b"
    assert texts(reader, "bob-1") == ["so far", "", "answer 1 " * 9, "question 2 " * 9]
    tombstone = reader.session(SessionId("cat-1"))
    assert tombstone is not None
    assert tombstone.deleted
    totals = {(u.model, u.auxiliary): (u.calls, u.cost_nanos) for u in reader.usage()}
    assert totals == {("model-1", False): (3, 13_300), ("model-2", True): (1, 7)}
    picture = reader.transcript(TIP).messages[1].blobs[0]
    assert [reader.blob_chunk(picture, n) for n in (0, 1)] == [
        bytes(range(24)),
        bytes(range(24, 48)),
    ]
    assert reader.mark("moved") == "yes"


def _expect_work(reader: Reader) -> None:
    running, *queued = reader.unfinished_turns(ANN)
    assert (running.state, running.attempt, running.waits, running.tries) == ("running", 3, 1, 2)
    assert [turn.state for turn in queued] == ["queued"] * 3
    assert [turn.state for turn in reader.unfinished_turns(SessionKey("chat:bob"))] == ["waiting"]
    assert {e.effect_key: (e.state, e.attempt) for e in reader.effects(running.id)} == {
        "call": ("begun", 2),
        "mail": ("done", 1),
        "pay": ("skipped", 1),
        "post": ("failed", 1),
        "ring": ("unknown", 1),
    }
    waiting = reader.waiting_inbound(ANN)
    assert [entry.inbound_id for entry in waiting] == ["in-3", "in-4", "in-5", "t-3"]
    assert [entry.into for entry in waiting] == [None] * 4
    posted = followed(lambda after: reader.deliveries(key=ANN, limit=2, after=after))
    assert [(one.id, one.state) for one in posted] == [
        ("out-6", "pending"),
        ("out-5", "sending"),
        ("out-4", "unknown"),
        ("out-3", "failed"),
        ("out-2", "pending"),
        ("out-1", "sent"),
    ]
    last = reader.last_delivery(ANN, "chat")
    assert last is not None
    assert last.id == "out-6"
    assert [(timer.id, timer.busy) for timer in reader.timers()] == [("t-1", None), ("t-2", None)]
    assert reader.next_due_ms(START_MS) == START_MS + 60_000
    assert [question.question_key for question in reader.questions(open_only=True)] == ["q-1"]
    assert [letter.state for letter in reader.dead_letters()] == ["open", "retried", "dropped"]


# Written


def store(engine: SqliteEngine, *commands: c.AnyCommand, guards: tuple[Guard, ...] = ()) -> None:
    """Stored as new, and recognised when it is sent again."""
    unit = Unit(commands, guards)
    for again in (False, True):
        receipts = engine.stage([unit])
        engine.commit()
        assert [r.again if isinstance(r, Durable) else r for r in receipts] == [again]


def test_messages_that_wait_in_a_migrated_file_are_taken_and_answered(tmp_path: Path) -> None:
    """INV-2: into a turn of their own, and into a running one; numbers are not used twice."""
    engine = open_engine(closed_file(tmp_path))
    store(engine, c.OpenIncarnation(key=ANN, incarnation=Incarnation(2)))
    with engine.reading() as reader:
        (running, *_), waiting = reader.unfinished_turns(ANN), reader.waiting_inbound(ANN)
        page = reader.session(TIP)
    assert page is not None
    cut = TurnOutcome(kind="interrupted", cause="crash")
    store(engine, c.EndTurn(turn_id=running.id, attempt=3, outcome=cut, at_ms=AT))
    own, merged, steered, _ = waiting
    assert own.body is not None
    assert own.body.reply_to is not None
    guard = Guard(
        key=ANN,
        incarnation=Incarnation(2),
        session_id=TIP,
        base_seq=page.next_seq,
        revision=page.revision,
    )
    store(
        engine,
        c.TakeInbound(source="chat", inbound_id=own.inbound_id, turn_id=own.turn_id),
        c.TakeInbound(source="chat", inbound_id=merged.inbound_id, turn_id=merged.turn_id),
        c.StartTurn(turn_id=own.turn_id, session_id=TIP, attempt=1, at_ms=AT),
        c.AppendMessages(
            session_id=TIP,
            base_seq=page.next_seq,
            messages=(Draft(uid=Uid("a" * 32), role="user", text=own.body.text, created_ms=AT),),
            turn_id=own.turn_id,
        ),
        guards=(guard,),
    )
    store(
        engine,
        c.TakeInbound(
            source="chat", inbound_id=steered.inbound_id, turn_id=steered.turn_id, into=own.turn_id
        ),
    )
    answered = TurnOutcome(kind="answered", text="here")
    store(
        engine,
        c.EndTurn(turn_id=own.turn_id, attempt=1, outcome=answered, at_ms=AT),
        c.PostDelivery(
            delivery_id="out-8",
            key=ANN,
            source="chat",
            target=own.body.reply_to,
            body={"text": "here"},
            at_ms=AT,
            turn_id=own.turn_id,
            session_id=TIP,
        ),
    )
    with engine.reading() as reader:
        assert [entry.inbound_id for entry in reader.waiting_inbound(ANN)] == ["t-3"]
        answers = reader.inbound_of_turn(own.turn_id)
        assert [(e.inbound_id, e.body, e.into) for e in answers] == [
            ("in-3", None, None),
            ("in-4", None, None),
            ("in-5", None, own.turn_id),
        ]
        assert texts(reader, TIP)[-1] == "are you there?"
    engine.close()
    with inspecting(tmp_path / DATABASE) as db:
        assert check_connection(db) == []
        # The last ones of version 1 had been deleted: 33 messages, 7 deliveries.
        assert db.execute("SELECT max(n) FROM messages").get == 34
        assert db.execute("SELECT max(n) FROM deliveries").get == 8


def test_timers_deliveries_and_decisions_go_on_in_a_migrated_file(tmp_path: Path) -> None:
    """INV-2: each step is the next of what version 1 had stored, and is known when it is resent."""
    engine = open_engine(closed_file(tmp_path))
    turn_id, reply_to = TurnId("b" * 32), {"channel": 7}
    accepted = c.AcceptInbound(
        source="timer",
        inbound_id="t-1",
        key=ANN,
        turn_id=turn_id,
        disposition="queued",
        digest="d" * 32,
        at_ms=AT,
        body=Inbound(text="remember 1", reply_to=reply_to),
        reply_to=reply_to,
    )
    fired = c.ResolveTimer(timer_id="t-1", resolution="fired", at_ms=AT)
    store(engine, c.OpenTurn(turn_id=turn_id, key=ANN, at_ms=AT), accepted, fired)
    store(engine, c.ResolveTimer(timer_id="t-2", resolution="cancelled", at_ms=AT))
    later = c.SetTimer(
        timer_id="t-5",
        key=ANN,
        source="timer",
        due_ms=AT + 1,
        inbound=Inbound(text="later"),
        at_ms=AT,
        busy="steer",
    )
    store(engine, later)
    for delivery_id in ("out-3", "out-4"):  # one has failed, of one nobody knows
        again = c.MarkDelivery(delivery_id=delivery_id, attempt=1, state="pending", at_ms=AT)
        store(engine, again)
    store(engine, c.MarkDelivery(delivery_id="out-3", attempt=2, state="sending", at_ms=AT))
    bob = SessionKey("chat:bob")
    yes = c.AnswerQuestion(key=bob, question_key="q-1", state="answered", at_ms=AT, answer="yes")
    store(engine, yes)
    with engine.reading() as reader:
        (lost, *_), (running, *_) = reader.dead_letters(), reader.unfinished_turns(ANN)
    dropped = c.ResolveDeadLetter(turn_id=lost.turn_id, tries=3, resolution="dropped", at_ms=AT)
    done = c.FinishEffect(turn_id=running.id, effect_key="call", attempt=2, state="done", at_ms=AT)
    store(engine, dropped, done)
    with engine.reading() as reader:
        assert [(timer.id, timer.busy) for timer in reader.timers()] == [("t-5", "steer")]
        (entry,) = reader.inbound_of_turn(turn_id)
        assert entry.reply_to == reply_to
        assert reader.deliveries(state="failed") == ((), None)
        assert reader.deliveries(state="unknown") == ((), None)
        opened = [(one.id, one.state) for one in reader.open_deliveries()]
    assert opened == [
        ("out-2", "pending"),
        ("out-3", "sending"),
        ("out-4", "pending"),
        ("out-5", "sending"),
        ("out-6", "pending"),
    ]
    engine.close()
    with inspecting(tmp_path / DATABASE) as db:
        assert check_connection(db) == []


def test_a_message_that_version_1_has_accepted_is_recognised(tmp_path: Path) -> None:
    """INV-19: a platform that delivers it again, behind the migration, finds it stored."""
    engine = open_engine(closed_file(tmp_path))
    with inspecting(tmp_path / DATABASE) as db:
        names = names_of(db)
    with engine.reading() as reader:
        entries = [reader.inbound(*name) for name in names.inbound]
    assert len(entries) == 10
    for entry in entries:
        assert entry is not None
        accepted = c.AcceptInbound(
            source=entry.source,
            inbound_id=entry.inbound_id,
            key=entry.key,
            turn_id=entry.turn_id,
            disposition=entry.disposition,
            digest=entry.digest,
            at_ms=entry.accepted_ms,
            reply_to={"channel": 7},  # which version 1 did not keep apart from the body
        )
        (receipt,) = engine.stage([Unit((accepted,))])
        engine.commit()
        assert isinstance(receipt, Durable)
        assert receipt.again
    engine.close()


REPLY_TO = {"channel": 7, "thread": "t-é"}


def test_a_waiting_message_of_version_1_still_tells_where_its_answer_goes(tmp_path: Path) -> None:
    """INV-2: in its body, which version 1 kept."""
    engine = open_engine(closed_file(tmp_path))
    with engine.reading() as reader:
        body = reader.waiting_inbound(ANN)[0].body
    engine.close()
    assert body is not None
    assert body.reply_to == REPLY_TO


def test_a_message_of_version_1_tells_where_its_answer_goes_once_it_was_taken(
    tmp_path: Path,
) -> None:
    """INV-2: when the turn was cut off, its body is gone, and the row is all that is left."""
    engine = open_engine(closed_file(tmp_path))
    with engine.reading() as reader:
        waiting = reader.waiting_inbound(ANN)[0]
    store(engine, c.TakeInbound(source="chat", inbound_id="in-3", turn_id=waiting.turn_id))
    with engine.reading() as reader:
        entry = reader.inbound("chat", "in-3")
    engine.close()
    assert entry is not None
    assert entry.reply_to == REPLY_TO


# Cut off, and failing


@pytest.mark.parametrize("start", [closed_file, killed_file])
def test_a_power_loss_at_any_operation_of_the_migration_leaves_a_whole_version(
    start: Start, record_property: Callable[[str, object], None]
) -> None:
    """INV-2, INV-19, PROOF-4: never less than all rows, nor when the recovery is cut off again."""
    tally = power_loss(start, stages(), torn=TORN, double_every=DOUBLE_EVERY)
    record_property("images", tally.images)
    assert tally.violations == []
    assert tally.versions == set(range(1, schema.VERSION + 1))
    assert tally.images >= 60


def test_an_io_error_at_any_operation_of_the_migration_leaves_a_whole_version() -> None:
    """INV-19: opening fails with an error of ours or succeeds; on a healed disk it succeeds."""
    expected, tally, failed = stages(), Tally(), 0
    with scratch() as root:
        with Disk(closed_file(root / "clean")) as disk:
            open_engine(root / "clean", disk.name).close()
            operations = disk.history
        for plan in plans_for(operations):
            directory = closed_file(root / "disk")
            with Disk(directory, faults=[plan.fault]) as disk:
                try:
                    open_engine(directory, disk.name).close()
                except StorageError:
                    failed += 1
                assert disk.fired, plan
            assert check_left(directory, expected, tally) == [], plan
            shutil.rmtree(directory)
    assert tally.versions == set(range(1, schema.VERSION + 1))
    assert failed >= len(operations)


INITIAL, SECOND, *LATER = schema.MIGRATIONS
STATEMENTS = [statement for statement in SECOND.split(";") if statement.strip()]


def without(name: str) -> list[str]:
    """The second migration's statements but for those that speak of this name."""
    return [statement for statement in STATEMENTS if name not in statement]


def with_second(*statements: str) -> tuple[str, ...]:
    """The migrations, with another second one."""
    return (INITIAL, ";".join(statements), *LATER)


@pytest.mark.parametrize("done", range(len(STATEMENTS) + 1))
def test_a_migration_that_fails_half_way_leaves_version_1_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """INV-19: at whichever statement, not a byte of the file is another."""
    path, expected = closed_file(tmp_path) / DATABASE, stages()
    before = path.read_bytes()
    bad = "INSERT INTO marks VALUES ('half', 'done'), ('way', NULL)"
    with monkeypatch.context() as broken:
        broken.setattr(schema, "MIGRATIONS", with_second(*STATEMENTS[:done], bad))
        with pytest.raises(OpenError, match=r"marks\.value"):
            open_engine(tmp_path)
    assert path.read_bytes() == before
    tally = Tally()
    assert check_left(tmp_path, expected, tally) == []
    assert tally.versions == {1}


# Tests of the tests: migrations with a planted bug


def _version_behind(db: apsw.Connection, path: str, now_ms: int) -> int:
    """The version has a transaction of its own."""
    with db:
        db.execute(SECOND)
    db.pragma("user_version", 2)
    return MIGRATE(db, path, now_ms)


def _statement_by_statement(db: apsw.Connection, path: str, now_ms: int) -> int:
    """Each statement has a transaction of its own, and the version is moved first."""
    if schema.check_ours(db, path) == 1:
        db.pragma("user_version", 2)
        db.execute(SECOND)
    return MIGRATE(db, path, now_ms)


def _version_forgotten(db: apsw.Connection, path: str, now_ms: int) -> int:
    """The version is not moved at all."""
    with db:
        db.execute(";".join((SECOND, *LATER)))
    return 1


MIGRATE = schema.migrate


@pytest.mark.parametrize("bug", [_version_behind, _statement_by_statement, _version_forgotten])
def test_a_power_loss_finds_a_migration_that_is_not_one_transaction(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[apsw.Connection, str, int], int]
) -> None:
    """INV-19: this is what the test above would look like."""
    expected = stages()
    monkeypatch.setattr(schema, "migrate", bug)
    tally = power_loss(closed_file, expected, torn=0)
    assert tally.violations != []


BUGS: Mapping[str, tuple[Sequence[str], str]] = {
    "an index is left out": (without("deliveries_left"), "content of objects"),
    "a column is left out": (without("busy"), "content of columns"),
    "a row is lost": ([*STATEMENTS, "DELETE FROM timers WHERE id = 't-3'"], "content of timers"),
    "a value is lost": ([*STATEMENTS, "UPDATE inbox SET body = NULL"], "content of inbox"),
    "a number is free again": (
        [*STATEMENTS, "UPDATE sqlite_sequence SET seq = seq - 1"],
        "content of sqlite_sequence",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_finds_a_migration_that_does_less_or_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    """INV-2: and it is the rule that is meant to find it."""
    expected = stages()
    statements, rule = BUGS[bug]
    monkeypatch.setattr(schema, "MIGRATIONS", with_second(*statements))
    found = check_migrated(migrated_file(tmp_path), expected)
    assert rule in {violation.rule for violation in found}


def test_the_comparison_finds_a_released_migration_that_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh file would have what no file of version 1 ever gets."""
    edited = f"{INITIAL}; CREATE INDEX more ON turns (opened_ms);"
    monkeypatch.setattr(schema, "MIGRATIONS", (edited, SECOND, *LATER))
    found = check_migrated(migrated_file(tmp_path), stages())
    assert "content of objects" in {violation.rule for violation in found}
    assert compare(old().schema, made_schema(1)) != []
