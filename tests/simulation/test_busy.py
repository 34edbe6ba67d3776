"""Busy policies under drawn schedules, against what a plain reading of them says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from onepen import open_sqlite
from onepen.storage.identity import SessionKey
from onepen.testing import schedules, simulate

from ..actors.fixtures import StillClock
from .world import BUSY, DATABASE, KEYS, SETTINGS, Account, Step, World, check_world, scratch

if TYPE_CHECKING:
    from pathlib import Path

TALK = ("ask", *BUSY)
LANE = st.lists(
    st.builds(
        Step, st.sampled_from(TALK), st.just(KEYS[0]), st.sampled_from(("plain", "gates", "many"))
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(LANE, min_size=1, max_size=3), schedules())
@settings(max_examples=60)
@example([[Step("queueing", kind="gates"), Step("steer"), Step("steer")]], [0, 0, 1, 0, 2])
@example([[Step("queueing", kind="many"), Step("collect"), Step("collect")]], [])
@example([[Step("queueing", kind="many"), Step("queueing"), Step("latest")]], [])
def test_every_message_ends_as_its_policy_says(
    program: list[list[Step]], schedule: list[int]
) -> None:
    """INV-1, INV-15: rows, outcomes and dispositions agree for every message of one busy key."""
    with scratch() as directory:
        account = Account()
        world = World(directory, account)
        simulate(world.run, schedule, program)
        check_world(directory, account.accepted, account.answered, ended=True)
        policies = {step.name for lane in program for step in lane}
        for submission, reply in world.replies:
            outcome = reply.outcome
            match submission.disposition:
                case "steered":
                    # Answered with the turn it went into, or as a turn of its own.
                    same = reply.turn_id == submission.turn_id
                    assert outcome.kind == "answered" or _gave_way(outcome.cause, policies), same
                case "started" | "queued" | "merged" | "superseded":
                    assert reply.turn_id == submission.turn_id
                    assert outcome.kind == "answered" or _gave_way(outcome.cause, policies)
                case "rejected" | "scheduled":
                    raise AssertionError("such a message has no reply here")
        _check_order(directory, account, policies)


def _gave_way(cause: str | None, policies: set[str]) -> bool:
    """Only where somebody was there to give way to."""
    return cause == "superseded" and bool(policies & {"latest", "interrupting"})


def _check_order(directory: Path, account: Account, policies: set[str]) -> None:
    """Where nobody jumps the line, messages stand in the order of their acceptance."""
    if policies - {"ask", "queueing", "collect"}:
        return
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS.engine)
    try:
        with engine.reading() as reader:
            session = reader.session_of_key(SessionKey(KEYS[0]))
            assert session is not None
            rows = reader.transcript(session.id, limit=10_000).messages
            waiting = reader.waiting_inbound(SessionKey(KEYS[0]))
    finally:
        engine.close()
    assert not waiting, "somebody waits although all have ended"
    said = [row.text for row in rows if row.role == "user"]
    assert sorted(map(str, said)) == sorted(account.accepted)
    turns = [row.turn_id for row in rows if row.role == "user"]
    assert turns == sorted(turns, key=turns.index), "the rows of a turn are together"
