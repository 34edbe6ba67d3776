"""Sessions under drawn schedules: whatever the interleaving, what was told is stored, once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onepen.testing import explore, images, schedules, simulate

from ..proving import PROOF
from .cases import Case, Ran, hold, runs
from .world import Account, Step, World, check_world, programs, recorded, scratch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from onepen.storage.identity import TurnId

    Property = Callable[[str, object], None]

ASK = Step("ask")
CUTS_MAX = 400 if PROOF else 25
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


def fresh(program: Sequence[Sequence[Step]]) -> Callable[[], Callable[[], Awaitable[None]]]:
    """For a search: the program in a new world, and what must hold behind it."""

    def factory() -> Callable[[], Awaitable[None]]:
        async def main() -> None:
            with scratch() as directory:
                account = Account()
                await World(directory, account).run(program)
                check_world(directory, account.accepted, account.answered, ended=True)

        return main

    return factory


@runs("sessions")
def run_case(case: Case) -> Ran:
    if case.cut is not None:
        return cut_off(case)
    with scratch() as directory:
        account = Account()
        run = simulate(World(directory, account).run, case.schedule, case.program)
        check_world(directory, account.accepted, account.answered, ended=True)
        return Ran(run.digest)


@pytest.mark.parametrize("shard", range(6 if PROOF else 1))
def test_whatever_the_schedule_what_was_told_is_stored_once(
    shard: int, record_property: Property
) -> None:
    """INV-1, INV-4, INV-6, INV-10, PROOF-1: any program, any interleaving, crashes of actors
    included.
    """
    ran = Counter[str]()

    @given(programs("crash session", "crash writer", "foreign"), schedules())
    def any_run_holds(program: list[list[Step]], schedule: list[int]) -> None:
        hold(Case("sessions", program, schedule))
        ran["runs"] += 1

    any_run_holds()
    record_property("interleavings", ran["runs"])


@pytest.mark.parametrize("name", CANONICAL)
def test_every_schedule_with_so_many_choices_holds(name: str, record_property: Property) -> None:
    """INV-1, INV-10, PROOF-2: the named programs, completely: every schedule with one choice
    against the default, and in `make proof` with two.
    """
    found = explore(fresh(CANONICAL[name]), preemptions_max=2 if PROOF else 1, free_switches=False)
    assert found.complete
    assert found.runs > 20
    record_property("programs searched completely", 1)
    record_property("schedules searched", found.runs)


def test_a_refused_unit_takes_those_behind_it_along_and_the_turn_says_so() -> None:
    """INV-4, INV-10: the search comes to schedules in which somebody else's row gets between."""
    worlds: list[World] = []
    program = [[ASK, Step("ask", kind="many")], [ASK, Step("foreign")]]

    def factory() -> object:
        async def main() -> None:
            with scratch() as directory:
                account = Account()
                worlds.append(World(directory, account))
                await worlds[-1].run(program)
                check_world(directory, account.accepted, account.answered, ended=True)

        return main

    explore(factory, preemptions_max=1, runs_max=150)  # type: ignore[arg-type]
    assert sum(world.reloads > 0 for world in worlds) > 5


@pytest.mark.parametrize("shard", range(2 if PROOF else 1))
def test_after_a_power_cut_each_key_has_one_session_and_nothing_told_is_lost(
    shard: int, record_property: Property
) -> None:
    """INV-2, INV-6, INV-19, B5, PROOF-3: at any point of the disk's log, whatever survives."""
    ran = Counter[str]()

    @given(programs(), schedules(), st.floats(0, 1), st.integers(0, 2**16))
    @settings(max_examples=CUTS_MAX)
    @example([[ASK, Step("rotate")]], [], 0.9, 1)
    def any_cut_holds(
        program: list[list[Step]], schedule: list[int], where: float, seed: int
    ) -> None:
        ran["disks"] += hold(Case("sessions", program, schedule, seed, where)).disks

    any_cut_holds()
    record_property("power cuts of a runtime", ran["disks"])


def cut_off(case: Case) -> Ran:
    """What is left of the run is recovered, twice."""
    assert case.cut is not None
    disks = 0
    with scratch() as directory:
        account = Account()
        with recorded(directory, account) as disk:
            world = World(directory, account, disk.name)
            run = simulate(world.run, case.schedule, case.program)
            log = disk.log
        point = int(case.cut * len(log.entries))
        for number, image in enumerate(
            images(log, torn=1, seed=case.seed, start=point, stop=point + 1)
        ):
            texts = [str(text) for text in image.payloads("accepted")]
            accepted = {text: account.accepted[text] for text in texts}
            answered = dict(_pairs(image.payloads("answered")))
            with scratch() as left:
                image.write_to(left / "disk")
                check_recovery(left / "disk", accepted, answered, number)
            disks += 1
    return Ran(run.digest, disks)


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
