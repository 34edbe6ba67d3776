"""Slots: never too many, fair between sources, in order within one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from onepen.actors.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable


class Queue:
    """Notes who was granted a slot, and in which order."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.granted: list[str] = []

    def ask(self, source: str, name: str) -> Callable[[], None]:
        def granted() -> None:
            self.granted.append(name)

        self.slots.ask(source, granted)
        return granted


def test_a_free_slot_is_granted_at_once() -> None:
    queue = Queue(Slots(2))
    queue.ask("a", "a1")
    assert queue.slots.take()
    assert queue.granted == ["a1"]
    assert queue.slots.statistics().running == 2


def test_no_more_than_the_limit_run() -> None:
    """INV-14."""
    queue = Queue(Slots(2))
    for name in ("a1", "a2", "a3"):
        queue.ask("a", name)
    assert queue.granted == ["a1", "a2"]
    assert not queue.slots.take()
    statistics = queue.slots.statistics()
    assert (statistics.running, statistics.running_max, statistics.waiting) == (2, 2, 1)
    assert statistics.waiting_by_source == {"a": 1}


def test_sources_take_turns_and_each_is_served_in_order() -> None:
    queue = Queue(Slots(1))
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
        queue.ask(name[0], name)
    for _ in range(6):
        queue.slots.give_back()
    assert queue.granted == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_a_flood_of_one_source_delays_another_by_at_most_one_grant() -> None:
    """INV-13: one busy platform can't starve another."""
    queue = Queue(Slots(1))
    for number in range(100):
        queue.ask("busy", f"busy{number}")
    queue.ask("calm", "calm")
    queue.slots.give_back()
    queue.slots.give_back()
    assert queue.granted == ["busy0", "busy1", "calm"]


def test_nobody_overtakes_those_who_wait() -> None:
    slots = Slots(1)
    queue = Queue(slots)
    queue.ask("a", "a1")
    queue.ask("a", "a2")
    slots.give_back()
    assert queue.granted == ["a1", "a2"]
    assert not slots.take()


def test_whoever_withdraws_is_passed_over() -> None:
    slots = Slots(1)
    queue = Queue(slots)
    queue.ask("a", "a1")
    b1, b2 = queue.ask("b", "b1"), queue.ask("b", "b2")
    queue.ask("c", "c1")
    slots.withdraw("b", b1)
    slots.withdraw("b", b2)
    slots.withdraw("b", b2)
    slots.withdraw("nobody", b2)
    slots.give_back()
    assert queue.granted == ["a1", "c1"]


def test_withdrawing_what_was_granted_changes_nothing() -> None:
    slots = Slots(1)
    queue = Queue(slots)
    granted = queue.ask("a", "a1")
    slots.withdraw("a", granted)
    assert slots.statistics().running == 1
    slots.give_back()
    assert slots.statistics().running == 0


def test_a_slot_given_back_while_nobody_waits_is_free() -> None:
    slots = Slots(1)
    assert slots.take()
    slots.give_back()
    assert slots.take()


@given(
    running_max=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["take", "give", "ask a", "ask b", "withdraw"]), max_size=60),
)
def test_slots_are_neither_lost_nor_made(running_max: int, steps: list[str]) -> None:
    """INV-14: whatever is asked, withdrawn and given back."""
    slots = Slots(running_max)
    held = 0
    waiting: list[tuple[str, Callable[[], None]]] = []
    grants: Counter[int] = Counter()

    def waiter(number: int) -> Callable[[], None]:
        def granted() -> None:
            nonlocal held
            held += 1
            grants[number] += 1

        return granted

    for number, step in enumerate(steps):
        if step == "take":
            held += slots.take()
        elif step == "give" and held:
            held -= 1
            slots.give_back()
        elif step == "withdraw" and waiting:
            slots.withdraw(*waiting.pop())
        elif step.startswith("ask"):
            waiter_ = waiter(number)
            waiting.append((step[-1], waiter_))
            slots.ask(step[-1], waiter_)
        assert slots.statistics().running == held
        assert held <= running_max
        assert held == running_max or slots.statistics().waiting == 0
    assert set(grants.values()) <= {1}
