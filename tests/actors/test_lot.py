"""The place to wait: who is woken, in which order, and what a cancelled wait leaves."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from onepen.actors.lot import Lot


async def test_all_who_wait_are_woken() -> None:
    lot, woken = Lot(), list[int]()

    async def wait(number: int) -> None:
        await lot.park()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(wait, number)
            await wait_all_tasks_blocked()
        lot.unpark_all()
        await wait_all_tasks_blocked()
    assert sorted(woken) == [0, 1, 2]  # within one pass trio's order is nobody's promise
    lot.unpark_all()  # nobody is there any more


async def test_who_comes_behind_it_waits_for_the_next_one() -> None:
    lot, woken = Lot(), list[str]()

    async def wait_twice() -> None:
        await lot.park()
        woken.append("first")
        await lot.park()
        woken.append("second")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_twice)
        await wait_all_tasks_blocked()
        lot.unpark_all()
        await wait_all_tasks_blocked()
        assert woken == ["first"]
        lot.unpark_all()


async def test_a_cancelled_wait_is_forgotten_and_the_others_are_woken() -> None:
    lot, woken = Lot(), list[str]()

    async def wait(scope: trio.CancelScope) -> None:
        with scope:
            await lot.park()
            woken.append("woken")

    scopes = [trio.CancelScope(), trio.CancelScope()]
    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(wait, scope)
        await wait_all_tasks_blocked()
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        lot.unpark_all()
    assert woken == ["woken"]
