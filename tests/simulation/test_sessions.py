"""Sessions under drawn schedules: whatever the interleaving, what was told is stored, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onepen.testing import explore, images, schedules, simulate

from .world import Account, Step, World, check_world, programs, recorded, scratch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from onepen.storage.identity import TurnId

ASK = Step("ask")
CANONICAL: dict[str, list[list[Step]]] = {
    "append/append": [[ASK], [ASK]],
    "append/rotate": [[Step("ask", kind="beside")], [ASK]],
    "rotate/finalize": [[ASK, Step("rotate")], [Step("close")]],
    "interrupt/rotate": [[ASK, Step("ask", kind="rotate")], [Step("interrupt")]],
    "cancel/ack": [[Step("cancelled ask")], [ASK]],
    "evict/append": [[ASK, Step("evict")], [ASK]],
    "switch/submit": [[ASK, Step("switch back")], [Step("submit")]],
    "submit/shutdown": [[Step("submit")], [Step("shutdown")]],
    "writer crash": [[Step("crash writer", kind="before commit"), ASK], [ASK]],
    "writer crash behind the commit": [[Step("crash writer", kind="committed"), ASK], [ASK]],
    "session crash": [[ASK], [Step("crash session"), ASK]],
    "take over": [[ASK, Step("take over")], [Step("ask", key="two:b")]],
    "unit refused with later ones posted": [[ASK, Step("ask", kind="many")], [Step("foreign")]],
    "rewind/ask": [[ASK, Step("rewind")], [Step("ask", kind="tools")]],
}


def run_program(program: Sequence[Sequence[Step]], schedule: Sequence[int]) -> None:
    with scratch() as directory:
        account = Account()
        world = World(directory, account)
        simulate(world.run, schedule, program)
        check_world(directory, account.accepted, account.answered, ended=True)


@given(programs("crash session", "crash writer", "foreign"), schedules())
def test_whatever_the_schedule_what_was_told_is_stored_once(
    program: list[list[Step]], schedule: list[int]
) -> None:
    """INV-1, INV-4, INV-6, INV-10: any program, any interleaving, crashes of actors included."""
    run_program(program, schedule)


@pytest.mark.parametrize("name", CANONICAL)
def test_every_schedule_with_one_preemption_holds(name: str) -> None:
    """INV-1, INV-10: the named programs, at every schedule with at most one preemption that the
    budget allows.
    """
    program = CANONICAL[name]

    def fresh() -> object:
        async def main() -> None:
            with scratch() as directory:
                account = Account()
                await World(directory, account).run(program)
                check_world(directory, account.accepted, account.answered, ended=True)

        return main

    found = explore(fresh, preemptions_max=1, runs_max=120)  # type: ignore[arg-type]
    assert found.runs > 10


def test_a_refused_unit_takes_those_behind_it_along_and_the_turn_says_so() -> None:
    """INV-4, INV-10: the search comes to schedules in which somebody else's row gets between."""
    worlds: list[World] = []
    program = [[ASK, Step("ask", kind="many")], [ASK, Step("foreign")]]

    def fresh() -> object:
        async def main() -> None:
            with scratch() as directory:
                account = Account()
                worlds.append(World(directory, account))
                await worlds[-1].run(program)
                check_world(directory, account.accepted, account.answered, ended=True)

        return main

    explore(fresh, preemptions_max=1, runs_max=150)  # type: ignore[arg-type]
    assert sum(world.reloads > 0 for world in worlds) > 5


@given(programs(), schedules(), st.floats(0, 1), st.integers(0, 2**16))
@settings(max_examples=25)
@example([[ASK, Step("rotate")]], [], 0.9, 1)
def test_after_a_power_cut_each_key_has_one_session_and_nothing_told_is_lost(
    program: list[list[Step]], schedule: list[int], where: float, seed: int
) -> None:
    """INV-2, INV-6, INV-19, B5: at any point of the disk's log, whatever survives of the rest."""
    with scratch() as directory:
        account = Account()
        with recorded(directory, account) as disk:
            simulate(World(directory, account, disk.name).run, schedule, program)
            log = disk.log
        point = int(where * len(log.entries))
        for number, image in enumerate(images(log, torn=1, seed=seed, start=point, stop=point + 1)):
            texts = [str(text) for text in image.payloads("accepted")]
            accepted = {text: account.accepted[text] for text in texts}
            answered = dict(_pairs(image.payloads("answered")))
            with scratch() as left:
                image.write_to(left / "disk")
                check_recovery(left / "disk", accepted, answered, number)


def _pairs(payloads: Sequence[object]) -> list[tuple[TurnId, str]]:
    return [payload for payload in payloads if isinstance(payload, tuple)]


def check_recovery(
    directory: Path, accepted: dict[str, TurnId], answered: dict[TurnId, str], number: int
) -> None:
    """What is left holds by itself, and holds when a runtime has recovered it, twice."""
    check_world(directory, accepted, answered, ended=False)
    account = Account()
    world = World(directory, account)
    world.start = 100 + number
    for _ in range(2):
        simulate(world.run, [], [[ASK]])
    check_world(
        directory,
        {**accepted, **account.accepted},
        {**answered, **account.answered},
        ended=True,
    )
