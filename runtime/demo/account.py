"""The verdict: what was told, held against what is stored, right after the kill and at the end.

Keeps: every line of the table is computed from the pipe and the file alone; a line that may not
happen is red when it does, and one red line makes the whole demo fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from ...actors.replies import reply_text
from .gateway import answer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .gateway import Script
    from .stored import Stored
    from .told import Told


class Fact(NamedTuple):
    """One line of the table; `wrong` is how many times it is not as it was promised."""

    name: str
    value: str
    wrong: int | None = None  # none for what is only a number


class Before(NamedTuple):
    """The state of affairs at the kill."""

    acknowledged: int
    replied: int
    facts: tuple[Fact, ...]
    running: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...]
    stored: int


def at_the_kill(told: Told, stored: Stored) -> Before:
    """What had been promised when the process died must be there before anybody repairs it."""
    known = stored.messages.keys() | stored.waiting
    return Before(
        acknowledged=told.total,
        replied=len(told.replies),
        facts=(
            Fact("lost by the kill", "", len(told.messages() - known)),
            Fact("replies lost by the kill", "", _replies_not_stored(told, stored)),
            Fact("rotations lost by the kill", "", _rotations_not_stored(told, stored)),
            Fact("invariants broken by the kill", "", len(stored.violations)),
            Fact("keys without one current session at the kill", "", stored.currents_wrong),
            Fact("rotations torn by the kill", "", stored.rotations_torn),
            Fact("lineages broken by the kill", "", stored.lineages_wrong),
            Fact("rows of another key at the kill", "", stored.foreign),
        ),
        running=tuple(stored.running),
        waiting=tuple(stored.waiting),
        stored=len(known),
    )


def account(script: Script, told: Told, before: Before, stored: Stored) -> list[Fact]:
    """All lines; the demo has failed if one of them is wrong."""
    return [
        *_messages(script, told, before, stored),
        *_turns(told, before, stored),
        *_outbox(told, stored),
        *_sessions(script, told, stored),
        *(fact._replace(value=f"{fact.wrong:,}") for fact in before.facts if fact.wrong),
        *_speed(told),
    ]


def _messages(script: Script, told: Told, before: Before, stored: Stored) -> Iterator[Fact]:
    sent = script.conversations * script.turns
    once = sum(stored.messages[place] == 1 for place in told.messages())
    lost = len(told.messages() - stored.messages.keys())
    untold = before.stored - before.acknowledged
    twice = sum(n - 1 for counted in (stored.messages, stored.answers) for n in counted.values())
    yield Fact(
        "messages acknowledged",
        f"{told.total:,} ({before.acknowledged:,} before the kill)",
        sent - told.total,
    )
    yield Fact(
        "  stored, but not told, when killed",
        f"{untold:,} ({told.recognised:,} recognised when resent)",
        abs(untold - told.recognised),
    )
    yield Fact("  stored exactly once", f"{once:,}", told.total - once)
    yield Fact("  lost", f"{lost:,}", lost)
    yield Fact("  stored twice", f"{twice:,}", twice)
    yield Fact("  out of order", f"{stored.out_of_order:,}", stored.out_of_order)
    yield Fact("  of another key, or of nobody", f"{stored.foreign:,}", stored.foreign)


def _replies_not_stored(told: Told, stored: Stored) -> int:
    """An answer is told only if it is a row; any end is told only if it is the turn's."""
    missing = 0
    for place, reply in told.replies.items():
        turn = stored.turns.get(place)
        outcome = None if turn is None else turn.outcome
        answered = reply.outcome != "answered" or (
            reply.text == answer_of(*place) and stored.answers[place] == 1
        )
        missing += outcome is None or outcome.kind != reply.outcome or not answered
    return missing


def _turns(told: Told, before: Before, stored: Stored) -> Iterator[Fact]:
    missing = _replies_not_stored(told, stored)
    outcomes = told.outcomes
    marked = 0
    for place in before.running:
        turn = stored.turns.get(place)
        outcome = None if turn is None else turn.outcome
        if turn is None or outcome is None:
            continue
        # Its repeat may have resumed it since.
        marked += turn.attempt > 1 or (outcome.kind, outcome.cause) == ("interrupted", "crash")
    yield Fact(
        "replies told, each stored",
        f"{len(told.replies):,} ({outcomes['interrupted']:,} interrupted)",
        missing,
    )
    failed = outcomes.total() - outcomes["interrupted"] - outcomes["answered"]
    yield Fact("turns failed", f"{failed:,}", failed)
    yield Fact(
        "turns running at the kill, marked or resumed",
        f"{marked:,} of {len(before.running):,}",
        len(before.running) - marked,
    )
    served = sum(stored.ended(place) for place in before.waiting)
    yield Fact(
        "turns waiting at the kill, then served",
        f"{served:,} of {len(before.waiting):,}",
        len(before.waiting) - served,
    )
    ended = sum(stored.ended(place) for place in told.messages())
    yield Fact("turns ended, or marked", f"{ended:,} of {told.total:,}", told.total - ended)


def _outbox(told: Told, stored: Stored) -> Iterator[Fact]:
    """What people were shown, held against what is stored to have been sent."""
    sent = {delivery.id for delivery in stored.deliveries if delivery.state == "sent"}
    last = {delivery.turn_id: delivery.text for delivery in stored.deliveries}
    missing = 0
    for turn in stored.turns.values():
        text = "" if turn.outcome is None else reply_text(turn.outcome)
        missing += bool(text) and last.get(turn.id) != text
    not_shown = len(stored.deliveries) - len(sent & told.shown.keys())
    invented = len(told.shown.keys() - {delivery.id for delivery in stored.deliveries})
    yield Fact(
        "messages in the outbox, each shown",
        f"{len(stored.deliveries):,} ({told.shown_again:,} shown again, under the same id)",
        not_shown + invented,
    )
    yield Fact("  answers that are not in the outbox", f"{missing:,}", missing)
    order = {delivery.id: number for number, delivery in enumerate(stored.deliveries)}
    seen: dict[int, int] = {}
    out_of_order = 0
    for line in told.shown.values():
        number = order.get(line.delivery, -1)
        out_of_order += number < seen.get(line.conversation, -1)
        seen[line.conversation] = number
    yield Fact("  shown out of order", f"{out_of_order:,}", out_of_order)


def _rotations_not_stored(told: Told, stored: Stored) -> int:
    return sum(stored.rotations.get(one.child) != one.parent for one in told.rotations)


def _sessions(script: Script, told: Told, stored: Stored) -> Iterator[Fact]:
    astray = sum(
        session not in stored.lines[conversation]
        for conversation, session in told.last_switch.items()
    )
    right = script.conversations - stored.currents_wrong
    yield Fact(
        "keys with exactly one current session",
        f"{right:,} of {script.conversations:,}",
        stored.currents_wrong,
    )
    yield Fact("switches, each key where told", f"{told.switches:,}", astray)
    yield Fact(
        "rotations committed, none torn",
        f"{len(stored.rotations):,}",
        stored.rotations_torn + _rotations_not_stored(told, stored),
    )
    yield Fact("sessions in unbroken lineages", f"{stored.sessions:,}", stored.lineages_wrong)
    yield Fact(
        "transcripts valid for a model",
        f"{stored.sessions:,}",
        stored.calls_open,
    )
    violations = len(stored.violations)
    yield Fact("invariant violations", f"{violations:,}", violations)


def _speed(told: Told) -> Iterator[Fact]:
    seconds = sorted(reply.seconds for reply in told.replies.values())
    p50, p99 = (seconds[int(len(seconds) * share)] if seconds else 0.0 for share in (0.5, 0.99))
    yield Fact("a whole turn, p50 / p99", f"{p50 * 1000:.0f} ms / {p99 * 1000:.0f} ms")
    yield Fact(
        "turns per second, people pausing", f"{len(told.replies) / max(told.seconds, 1e-9):,.0f}"
    )


def wrong_in(facts: list[Fact]) -> list[str]:
    """The names of the lines that are red; the verdict holds only if there are none."""
    return [fact.name.strip() for fact in facts if fact.wrong]


def table_of(facts: list[Fact]) -> Table:
    table = Table(title="what was promised, and what is stored", show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    for fact in facts:
        verdict = "" if fact.wrong is None else "[green]ok[/]"
        if fact.wrong:
            verdict = f"[red]{fact.wrong:,} wrong[/]"
        table.add_row(fact.name, fact.value, verdict)
    return table
