"""A crash between every two steps of each hand-over, and what the next start makes of it.

A real gateway kills itself at a named point; what it had done to the world is in files. Then the
state that it left is asserted, the next process starts, the platform sends its webhook again, and
in the end people have what they should have: nothing is lost, nothing is stored twice, and what may
have happened twice bears the same id both times.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from onepen.runtime.testing.invariants import check_database

from ..contract.agents import query
from .handing_over import ALARM, DATABASE, KEY, QUESTION, WEBHOOK, Agent, World, opened

ROOT = Path(__file__).resolve().parents[2]
CUT_OFF = "The work on your message was cut off. Please send it again."


class Point(NamedTuple):
    """Where it dies; what is stored then; and what came of it in the end."""

    name: str
    turn: tuple[str, int] | None  # state and attempt
    effect: str | None
    delivery: tuple[str, int] | None
    paid: int  # how often, when it dies
    paid_at_last: int
    attempts: tuple[int, ...]  # of the turn, by the processes that came after
    notice: bool = False  # whether the user was told that the turn was cut off


# By the steps of one message: accept and start, effect intent, effect run, result, finish, deliver,
# acknowledge.
PAYING = [
    Point("AcceptInbound before", None, None, None, 0, 1, (1,)),
    Point("AcceptInbound after", ("running", 1), None, None, 0, 1, (2,), notice=True),
    Point("BeginEffect before", ("running", 1), None, None, 0, 1, (2,), notice=True),
    Point("BeginEffect after", ("running", 1), "begun", None, 0, 1, (2,), notice=True),
    Point("pay before", ("running", 1), "begun", None, 0, 1, (2,), notice=True),
    Point("pay after", ("running", 1), "begun", None, 1, 2, (2,), notice=True),
    Point("FinishEffect before", ("running", 1), "begun", None, 1, 2, (2,), notice=True),
    Point("FinishEffect after", ("running", 1), "done", None, 1, 1, (2,), notice=True),
    Point("EndTurn before", ("running", 1), "done", None, 1, 1, (2,), notice=True),
    Point("EndTurn after", ("ended", 1), "done", ("pending", 0), 1, 1, ()),
    Point("MarkDelivery sending before", ("ended", 1), "done", ("pending", 0), 1, 1, ()),
    Point("MarkDelivery sending after", ("ended", 1), "done", ("sending", 1), 1, 1, ()),
    Point("deliver reply before", ("ended", 1), "done", ("sending", 1), 1, 1, ()),
    Point("deliver reply after", ("ended", 1), "done", ("sending", 1), 1, 1, ()),
    Point("MarkDelivery sent before", ("ended", 1), "done", ("sending", 1), 1, 1, ()),
    Point("MarkDelivery sent after", ("ended", 1), "done", ("sent", 1), 1, 1, ()),
]


def die(folder: Path, scenario: str, point: str) -> None:
    command = [sys.executable, "-m", "tests.crash.handing_over", str(folder), scenario, point]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def one(folder: Path, sql: str) -> Any:
    rows = query(folder / DATABASE, sql)
    assert len(rows) <= 1, rows
    return rows[0] if rows else None


def state_of(folder: Path) -> tuple[Any, Any, Any]:
    effect = one(folder, "SELECT state FROM effects")
    return (
        one(folder, "SELECT state, attempt FROM turns"),
        None if effect is None else effect[0],
        one(folder, "SELECT state, attempt FROM deliveries"),
    )


async def until_sent(runtime: Any) -> None:
    while any(d.state != "sent" for d in await runtime.deliveries.list()):
        await trio.lowlevel.checkpoint()


def nothing(_: str) -> None:
    """This process lives."""


@pytest.mark.parametrize("recovery", ["mark", "resume"])
@pytest.mark.parametrize("point", PAYING, ids=lambda point: point.name)
async def test_whatever_a_crash_cuts_the_next_start_brings_to_its_end(
    tmp_path: Path, point: Point, recovery: Any
) -> None:
    """A1, A7, F7, INV-1, INV-3: with the state after the crash, and after the restart."""
    die(tmp_path, "pay", point.name)
    world = World(tmp_path, nothing)
    assert state_of(tmp_path) == (point.turn, point.effect, point.delivery)
    assert len(world.lines("world")) == point.paid
    assert check_database(tmp_path / DATABASE) == []
    agent = Agent(world)
    with trio.fail_after(20):
        async with opened(tmp_path, world, recovery, agent) as runtime:
            # The platform was never answered: it sends its webhook again.
            submission = await runtime.submit(KEY, WEBHOOK)
            assert submission.repeated == (point.turn is not None)
            assert (await submission.reply()).text == "paid 5"
            await until_sent(runtime)
            assert tuple(agent.attempts) == point.attempts
    paid = [line.split()[0] for line in world.lines("world")]
    assert len(paid) == point.paid_at_last
    assert len(set(paid)) == 1, "what may have happened twice bears one id"
    notice = [CUT_OFF] if point.notice and recovery == "mark" else []
    assert world.shown() == [*notice, "paid 5"]
    users = query(tmp_path / DATABASE, "SELECT count(*) FROM messages WHERE role = 'user'")
    assert users == [(1,)]
    assert query(tmp_path / DATABASE, "SELECT DISTINCT state FROM effects") == [("done",)]
    assert check_database(tmp_path / DATABASE) == []


ASKING = [
    ("AskQuestion before", ("running", 1), None, (2,)),
    ("AskQuestion after", ("waiting", 1), "open", (2,)),
    ("deliver question after", ("waiting", 1), "open", (2,)),
    ("AnswerQuestion before", ("waiting", 1), "open", (2,)),
    ("AnswerQuestion after", ("waiting", 1), "answered", (2,)),
    ("StartTurn 2 before", ("waiting", 1), "answered", (2,)),
    ("StartTurn 2 after", ("running", 2), "answered", (3,)),
    ("EndTurn before", ("running", 2), "answered", (3,)),
    ("EndTurn after", ("ended", 2), "answered", ()),
]


@pytest.mark.parametrize(("point", "turn", "question", "attempts"), ASKING)
async def test_a_question_that_a_crash_cuts_is_asked_once_and_answered_once(
    tmp_path: Path, point: str, turn: Any, question: str | None, attempts: tuple[int, ...]
) -> None:
    """B12, INV-1: whoever was asked is not asked again, whatever was answered stands."""
    die(tmp_path, "ask", point)
    world = World(tmp_path, nothing)
    stored = one(tmp_path, "SELECT state FROM questions")
    assert one(tmp_path, "SELECT state, attempt FROM turns") == turn
    assert (None if stored is None else stored[0]) == question
    agent = Agent(world)
    with trio.fail_after(20):
        async with opened(tmp_path, world, "resume", agent) as runtime:
            submission = await runtime.submit(KEY, QUESTION)
            while (await runtime.status(KEY)).state not in ("idle", "waiting"):
                await trio.lowlevel.checkpoint()
            if question in (None, "open"):
                await runtime.approvals.answer(KEY, "yes")
            assert (await submission.reply()).text == "you said yes"
            await until_sent(runtime)
    assert tuple(agent.attempts) == attempts
    assert world.shown() == ["may I?", "you said yes"]
    assert query(tmp_path / DATABASE, "SELECT state, answer FROM questions") == [
        ("answered", "yes")
    ]
    assert check_database(tmp_path / DATABASE) == []


@pytest.mark.parametrize(
    ("point", "timer", "turn"),
    [
        ("SetTimer before", None, None),
        ("SetTimer after", ("set",), None),
        ("ResolveTimer before", ("set",), None),
        ("ResolveTimer after", ("fired",), ("running", 1)),
        ("EndTurn after", ("fired",), ("ended", 1)),
    ],
)
async def test_a_timer_that_a_crash_cuts_fires_once(
    tmp_path: Path, point: str, timer: Any, turn: Any
) -> None:
    """A7: firing it and accepting its message are one."""
    die(tmp_path, "alarm", point)
    world = World(tmp_path, nothing)
    assert one(tmp_path, "SELECT state FROM timers") == timer
    assert one(tmp_path, "SELECT state, attempt FROM turns") == turn
    due = one(tmp_path, "SELECT due_ms FROM timers")
    with trio.fail_after(20):
        async with opened(tmp_path, world, "resume") as runtime:
            # Whoever set it was not told, and sets it again.
            at = 1.0 if due is None else int(due[0])
            submission = await runtime.submit(KEY, ALARM, at=at)
            assert (await submission.reply()).text == "re tick"
            await until_sent(runtime)
    assert world.shown() == ["re tick"]
    assert query(tmp_path / DATABASE, "SELECT count(*) FROM turns") == [(1,)]
    assert check_database(tmp_path / DATABASE) == []


@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_post_that_a_crash_cuts_is_made_once(tmp_path: Path, side: str) -> None:
    """INV-5: the message and its delivery are there, both or neither."""
    die(tmp_path, "post", f"PostDelivery {side}")
    world = World(tmp_path, nothing)
    rows = [
        query(tmp_path / DATABASE, f"SELECT count(*) FROM {table}")
        for table in ("messages", "deliveries")
    ]
    assert rows == [[(int(side == "after"),)]] * 2
    with trio.fail_after(20):
        async with opened(tmp_path, world) as runtime:
            await runtime.post(KEY, "good morning", reply_to="chat-1", id="p1")
            await until_sent(runtime)
    assert world.shown() == ["good morning"]
    assert check_database(tmp_path / DATABASE) == []
