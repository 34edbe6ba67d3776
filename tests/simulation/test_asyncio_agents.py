"""Asyncio agents inside the simulation: schedules are theirs as well, and their bugs are found."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import given, settings

from onepen.agents import AsyncioAgent
from onepen.runtime.agents.asyncio_loop import AsyncioLoop
from onepen.storage.errors import InvariantError
from onepen.testing import SimulationStuckError, schedules, simulate

from .world import SETTINGS, Account, Step, World, check_world, programs, scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onepen.agents import AsyncioTurn

ASK = Step("ask")


async def agent(turn: AsyncioTurn) -> str:
    """Two tasks that append, sleep and stream beside each other; the first word says what else."""
    kind, _, name = turn.text.partition(" ")

    async def appending() -> None:
        for number in range(2):
            await turn.append(f"part {number} of {name}")
            await asyncio.sleep(number)

    async def calling() -> None:
        call = {"id": f"call {name}", "name": "look", "arguments": "{}"}
        await asyncio.sleep(1)
        await turn.append({"role": "assistant", "tool_calls": [call]})
        await turn.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})

    async def summarise(history: Sequence[object]) -> str:
        await asyncio.sleep(1)
        return f"summary of {len(history)}"

    if kind == "fail":
        raise ValueError(name)
    if kind == "slow":
        await asyncio.sleep(30)
    if kind == "rotate":
        await turn.rotate(summarise, force=True)
    if kind == "stream":
        async with turn.streaming() as out:
            await asyncio.gather(out.write("piece "), appending())
    async with asyncio.TaskGroup() as group:
        group.create_task(appending())
        if kind in ("tools", "many"):
            group.create_task(calling())
    return f"answer to {turn.text}"


class AsyncioWorld(World):
    """The same world; its agent is behind the bridge."""

    @property
    def agent(self) -> Any:  # a new one for each opening
        return AsyncioAgent(agent)


def run_program(program: Sequence[Sequence[Step]], schedule: Sequence[int]) -> str:
    with scratch() as directory:
        account = Account()
        world = AsyncioWorld(directory, account)
        digest = simulate(world.run, schedule, program).digest
        check_world(directory, account.accepted, account.answered, ended=True)
        return digest


@given(programs("crash session", "crash writer"), schedules())
@settings(max_examples=40)
def test_whatever_the_schedule_what_an_asyncio_agent_said_is_stored_once(
    program: list[list[Step]], schedule: list[int]
) -> None:
    """INV-1, INV-4, INV-10, A2: any program, any interleaving, crashes of actors included."""
    run_program(program, schedule)


PROGRAM = [[Step("ask", kind="tools"), Step("ask", kind="rotate")], [Step("ask", key="two:b")]]


def test_the_same_schedule_is_the_same_run() -> None:
    """INV-22."""
    chance = Random(3)
    digests = set[str]()
    for _ in range(5):
        schedule = [chance.choice((0, 0, 1, 2)) for _ in range(200)]
        found = {run_program(PROGRAM, schedule) for _ in range(3)}
        assert len(found) == 1
        digests |= found
    assert len(digests) == 5


def test_the_same_schedule_is_the_same_run_in_every_process() -> None:
    """INV-22: whatever the hash seed."""
    script = (
        "from tests.simulation.test_asyncio_agents import PROGRAM, run_program\n"
        "print(run_program(PROGRAM, [0, 1, 0, 2] * 40))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(found) == 1


def test_asyncio_sleeps_by_the_mock_clock() -> None:
    async def sleepy(_: AsyncioTurn) -> str:
        begun_s = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        async with asyncio.timeout(60):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(300), 5)
        return str(asyncio.get_running_loop().time() - begun_s)

    class Sleepy(World):
        agent = property(lambda _: AsyncioAgent(sleepy))

    assert SETTINGS.sessions.turn_deadline_s < 3605  # it is cut off, an hour before it wakes
    with scratch() as directory:
        account = Account()
        simulate(Sleepy(directory, account).run, [], [[ASK]])
        assert account.accepted
        assert not account.answered


def test_a_thread_of_an_asyncio_agent_is_refused() -> None:
    """What a thread does is in no schedule."""
    seen: list[BaseException] = []

    async def threaded(_: AsyncioTurn) -> str:
        try:
            return str(await asyncio.to_thread(len, "never"))
        except InvariantError as error:
            seen.append(error)
            raise

    class Threaded(World):
        agent = property(lambda _: AsyncioAgent(threaded))

    with scratch() as directory:
        simulate(Threaded(directory, Account()).run, [], [[ASK]])
    assert "thread" in str(seen[0])


# A planted bug --------------------------------------------------------------------------------


class Flushing:
    """An agent that keeps what it has to say, and flushes it from two tasks; with a lock, or not.

    Without one, both may find the same words unsaid: what marks them comes behind an await.
    """

    def __init__(self, *, locked: bool) -> None:
        self.locked = locked

    async def run(self, turn: AsyncioTurn) -> str:
        unsaid = ["the only thing"]
        lock = asyncio.Lock()

        async def flush() -> None:
            for words in tuple(unsaid):
                await turn.steering()
                await turn.append(words)
                unsaid.remove(words)

        async def flush_locked() -> None:
            async with lock:
                await flush()

        async def late() -> None:
            await turn.steering()
            await turn.steering()  # the other is through by now, as a rule
            await (flush_locked() if self.locked else flush())

        await asyncio.gather(flush_locked() if self.locked else flush(), late())
        said = [message.text for message in turn.messages[1:]]
        assert said == ["the only thing"], f"said twice: {said}"
        return "done"


def failures(*, locked: bool) -> list[list[int]]:
    """Those of a hundred schedules, always the same ones, under which the agent finds its bug."""

    class Flushed(World):
        agent = property(lambda _: AsyncioAgent(Flushing(locked=locked)))

    found: list[list[int]] = []
    for schedule in SCHEDULES:
        with scratch() as directory:
            world = Flushed(directory, Account())
            simulate(world.run, schedule, [[ASK]])
            if not world.account.answered:
                found.append(schedule)
    return found


def _drawn(seed: int) -> list[int]:
    chance = Random(seed)
    return [chance.choice((0, 0, 1, 2, 3)) for _ in range(100)]


SCHEDULES = [[], *map(_drawn, range(100))]


def test_a_bug_that_is_planted_in_an_asyncio_agent_is_found() -> None:
    """PROOF-8: by schedules, and not by every one; with the lock it is gone."""
    found = failures(locked=False)
    assert found
    assert [] not in found, "it is seen without a preemption: the program always fails"
    assert failures(locked=True) == []


# The protections, switched off ----------------------------------------------------------------


async def swallowing(_: AsyncioTurn) -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


class Swallowing(World):
    agent = property(lambda _: AsyncioAgent(swallowing))


def nothing(*_: object) -> None: ...


def test_a_run_in_which_an_agent_swallows_its_deadline_ends() -> None:
    """INV-15; and without the force it never would."""
    with scratch() as directory:
        simulate(Swallowing(directory, Account()).run, [], [[ASK]])
    with (
        scratch() as directory,
        patch.object(AsyncioLoop, "_force", nothing),
        pytest.raises((SimulationStuckError, InvariantError, trio.TrioInternalError)),
    ):
        simulate(Swallowing(directory, Account()).run, [], [[ASK]])


TRIO_INSIDE = """
import sys, trio
from onepen import open_runtime
from onepen.agents import AsyncioAgent
from onepen.runtime.agents import asyncio_loop

async def unguarded(coro):
    return await coro

if sys.argv[1] == "unguarded":
    asyncio_loop._only_asyncio = unguarded

async def agent(turn):
    event = trio.Event()
    try:
        await event.wait()
    except Exception:
        event.set()
    return "done"

async def main():
    async with open_runtime(None, agent=AsyncioAgent(agent)) as runtime:
        assert (await runtime.ask("a:1", "hello")).text == "done"

trio.run(main)
"""


@pytest.mark.parametrize("guard", ["guarded", "unguarded"])
def test_trio_awaited_in_asyncio_code_would_end_the_process(guard: str) -> None:
    """The guard is what stands between such a mistake and everybody's conversations."""
    command = [sys.executable, "-c", TRIO_INSIDE, guard]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (guard == "guarded"), done.stderr
