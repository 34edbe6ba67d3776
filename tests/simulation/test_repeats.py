"""A message that comes again while its turn is just about to end, or to be taken back."""

from __future__ import annotations

from typing import Any

import pytest

from onepen.testing import explore

from .world import Account, Step, World, check_world, scratch

REPEAT = Step("repeat")
PROGRAMS = {
    "as it ends": [[REPEAT, REPEAT], [REPEAT, REPEAT]],
    "as it is taken back": [[Step("queueing", kind="many"), REPEAT, Step("take back")], [REPEAT]],
    "as it is steered": [[Step("queueing", kind="gates"), Step("steer"), REPEAT], [REPEAT]],
}


def every_repeat_ends(program: list[list[Step]]) -> None:
    """Each submission gets a reply: a simulation in which somebody waits for ever is stuck."""

    def fresh() -> Any:
        async def main() -> None:
            with scratch() as directory:
                account = Account()
                await World(directory, account).run(program)
                check_world(directory, account.accepted, account.answered, ended=True)

        return main

    explore(fresh, preemptions_max=1, runs_max=250)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_repeat_ends_with_its_turn_whenever_it_comes(name: str) -> None:
    """A7, INV-15: at every schedule with one preemption that the budget allows."""
    every_repeat_ends(PROGRAMS[name])
