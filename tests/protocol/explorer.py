"""The exploration: every state that can be reached, breadth first, and what is wrong with it.

Keeps: deterministic, so counts can be asserted; breadth first, so the first violation that is found
has the shortest trace. Liveness is judged on the finished graph: it has no cycle, so every run
comes to an end whatever the schedule, and where a run can end everything has been answered. No
fairness is assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .invariants import is_settled, step_violations, violations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .state import Label, State
    from .steps import Protocol


DEPTH_MAX = 60
"""No scope reaches so far: what does has found a way to go on without an end."""


class Found(NamedTuple):
    """A violation, and the shortest way to it."""

    what: str
    trace: tuple[Label, ...]

    def __str__(self) -> str:
        lines = [f"{number:3}  {words(label)}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([self.what, *lines])


class Explored(NamedTuple):
    """A graph: states by number, and for each the numbers that its steps lead to."""

    states: Sequence[State]
    edges: Sequence[Sequence[tuple[Label, int]]]
    parents: Sequence[tuple[int, Label]]
    found: Found | None
    depth: int

    @property
    def transitions(self) -> int:
        return sum(map(len, self.edges))

    def trace(self, number: int) -> tuple[Label, ...]:
        return _trace(self.parents, number)


def words(label: Label) -> str:
    """A step as the page calls it."""
    return " · ".join(part for part in label if part)


def _trace(parents: Sequence[tuple[int, Label]], number: int) -> tuple[Label, ...]:
    labels: list[Label] = []
    while number:
        number, label = parents[number]
        labels.append(label)
    return tuple(reversed(labels))


def explore(protocol: Protocol, start: State) -> Explored:
    """Everything that can be reached, or up to the first violation."""
    numbers: dict[State, int] = {start: 0}
    states = [start]
    parents: list[tuple[int, Label]] = [(0, ())]
    depths = [0]
    edges: list[list[tuple[Label, int]]] = []
    found = next((Found(wrong, ()) for wrong in violations(start)), None)
    for number, state in enumerate(states):  # grows while we walk
        if found is not None:
            break
        out: list[tuple[Label, int]] = []
        edges.append(out)
        for label, after in protocol.steps(state):
            wrong = next(step_violations(state, label, after), None)
            target = numbers.get(after)
            if target is None:
                target = numbers[after] = len(states)
                states.append(after)
                parents.append((number, label))
                depths.append(depths[number] + 1)
                wrong = wrong or next(violations(after), None)
            out.append((label, target))
            if wrong is not None:
                found = Found(wrong, (*_trace(parents, number), label))
                break
        if not out and found is None and not is_settled(state):
            found = Found("liveness: nothing can happen any more", _trace(parents, number))
        if found is None and depths[number] > DEPTH_MAX:
            found = Found("liveness: a run goes on and on", _trace(parents, number))
    explored = Explored(states, edges, parents, found, depths[-1])
    if found is None and (cycle := _on_a_cycle(edges)) is not None:
        found = Found("liveness: a run may go round for ever", _trace(parents, cycle))
        explored = explored._replace(found=found)
    return explored


def _on_a_cycle(edges: Sequence[Sequence[tuple[Label, int]]]) -> int | None:
    """Some state that lies on a cycle, or behind one: it never runs out of predecessors."""
    incoming = [0] * len(edges)
    for out in edges:
        for _, target in out:
            incoming[target] += 1
    ready = [number for number, count in enumerate(incoming) if not count]
    left = len(edges)
    while ready:
        left -= 1
        for _, target in edges[ready.pop()]:
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    return next((n for n, count in enumerate(incoming) if count), None) if left else None
