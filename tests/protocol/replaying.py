"""A trace of the model, done by the real engine, and compared after each step.

The model says what may happen; the real engine must do one of these things. Where a label leaves
something open (what an opening finds), all of it may have happened until what is seen tells. If the
engine is then not where the trace went, the rest of the trace is left out, and `finished` says so.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from onepen.runtime.testing import Failure
from onepen.runtime.testing.invariants import check_database

from .explorer import words
from .rig import Rig, comparable
from .steps import PROCESSES, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path
    from random import Random

    from .explorer import Explored
    from .rig import Files
    from .state import Label, State

_CHOSEN = {"reopen", "reopening fails", "open", "opening fails", "a second process opens"}
"""Steps whose last word is what the engine finds, and not what we do to it."""


_FAILURES = {"kept": Failure.EIO, "dropped": Failure.DROP, "done": None}


_WITH_OUTCOME = _CHOSEN | {"apply", "commit fails", "kill", "power loss"}
_ACTORS = frozenset(
    ("start an actor", "start a successor", "load", "post", "rotate", "switch", "wait given up")
)
"""Steps in which the engine has no part: they post at most."""


class Difference(AssertionError):
    """The engine did what the page does not allow."""


class Replayed(NamedTuple):
    steps: int
    finished: bool


def replay(
    root: Path, files: Files, protocol: Protocol, start: State, trace: Sequence[Label]
) -> Replayed:
    """Do the steps, one by one. Raises `Difference`, with the trace up to there."""
    rig = Rig(root, files, batch_max=protocol.batch_max)
    states, done = [start], 0
    try:
        for label in trace:
            states = _step(rig, protocol, states, label)
            if not states:
                break
            done += 1
        rig.close()
        # And by the rules that know nothing of the model.
        found = check_database(rig.path)
        assert not found, "\n".join(map(str, found))
    except AssertionError as error:
        lines = "\n".join(map(words, trace[: done + 1]))
        raise Difference(f"{error}\n{lines}") from error
    finally:
        rig.close()
    return Replayed(done, finished=done == len(trace))


def _step(rig: Rig, protocol: Protocol, states: Sequence[State], label: Label) -> list[State]:
    """From the states in which the engine may be to those in which it may be then."""
    steps = [
        (before, after)
        for before in states
        for other, after in protocol.steps(before)
        if other == label or (label[0] in _CHOSEN and other[:2] == label[:2])
    ]
    if not steps:
        return []  # what the engine has found before has led elsewhere
    before, after = steps[0]
    if label[0] == "apply":
        told = rig.apply(_process(label))
        steps = [step for step in steps if _receipts(step[1], label) == told]
        assert steps, f"receipts {told}, page {_receipts(after, label)}"
    elif not _act(rig, before, label):
        return []
    _post(rig, *steps[0], label)
    # What only posts can't change what is stored, and every look costs.
    seen = None if label[0] in _ACTORS else rig.look()
    fitting = [s for _, s in steps if seen is None or comparable(s.disk.visible) == seen]
    if not fitting:
        allowed = "\n  or ".join(str(comparable(s.disk.visible)) for _, s in steps)
        raise AssertionError(f"stored: {seen}\n  page: {allowed}")
    _compare_pens(rig, fitting[0])
    return list(dict.fromkeys(fitting))


def _receipts(state: State, label: Label) -> tuple[str, ...]:
    return state.processes[_process(label)].receipts


def _post(rig: Rig, before: State, after: State, label: Label) -> None:
    """What the actors of the step have posted."""
    for at, (old, new) in enumerate(zip(before.processes, after.processes, strict=True)):
        gone = old.taken if label[:2] == ("acknowledge", PROCESSES[at]) else 0
        for unit in new.ledger[len(old.ledger) - gone :] if new.up else ():
            rig.post(at, unit)


def _process(label: Label) -> int:
    """Who does it; nobody does a power loss."""
    name = next((part for part in label[1:2] if part in PROCESSES), None)
    return -1 if name is None else PROCESSES.index(name)


def _outcome(label: Label) -> str:
    """What chance has decided, if anything."""
    return label[-1] if label[0] in _WITH_OUTCOME and (label[2:] or _process(label) < 0) else ""


def _act(rig: Rig, before: State, label: Label) -> bool:
    """Do it; false if this outcome can't be had here."""
    at, outcome = _process(label), _outcome(label)
    match label[0]:
        case "open" | "a second process opens":
            rig.open(at)
        case "opening fails":
            rig.open(at, fails=True)
        case "fenced":
            assert rig.apply(at) is None, "a stale epoch has applied a batch"
        case "commit":
            rig.commit(at)
        case "commit fails":
            rig.fail_commit(at, _FAILURES[outcome])
        case "reopen":
            rig.reopen(at)
        case "reopening fails":
            rig.reopen(at, fails=True)
        case "acknowledge":
            process = before.processes[at]
            pairs = tuple(zip(process.ledger, process.receipts, strict=False))
            told = rig.acknowledge(at)
            assert told == pairs[: process.taken], f"told {told}, page {pairs[: process.taken]}"
        case "kill":
            rig.kill(at, written=bool(outcome))
        case "power loss":
            staged = [n for n, p in enumerate(before.processes) if p.phase == "staged"]
            written = staged[0] if outcome == "commit written" else None
            return rig.lose_power(survives=bool(outcome), at=written)
        case _:
            pass  # an actor's step: what it posts comes behind it
    return True


def _compare_pens(rig: Rig, state: State) -> None:
    for at, process in enumerate(state.processes):
        phase = rig.phase(at)
        wanted = process.phase if process.up else "down"
        assert phase == wanted, f"the pen of {PROCESSES[at]} is {phase}, page {wanted}"
        if process.up and phase != "down":
            taken = rig.waiting(at)
            assert taken == process.taken, f"taken {taken}, page {process.taken}"


# Which traces -------------------------------------------------------------------------------------


Pair: TypeAlias = tuple[tuple[str, str], tuple[str, str]]


def key_of(label: Label) -> tuple[str, str]:
    """What of a step makes a difference to the engine: not who asks, but what chance decides."""
    return (label[0], _outcome(label))


def engine_steps(trace: Iterable[Label]) -> list[tuple[str, str]]:
    """What of a trace the engine has a part in."""
    return [key_of(label) for label in trace if label[0] not in _ACTORS]


def covering(graph: Explored, done: set[Pair], chance: Random) -> Generator[tuple[Label, ...], int]:
    """Traces, until each step of the engine was done behind each other that it can follow.

    Each goes on from there to its end, where it can by something that was not done yet. Sent in is
    how many of its steps were done. A pair that was aimed at and missed is not aimed at again.
    """
    last: list[tuple[str, str]] = [("", "")]
    for parent, label in graph.parents[1:]:
        last.append(last[parent] if label[0] in _ACTORS else key_of(label))
    for number, out in enumerate(graph.edges):
        for label, target in out:
            pair = (last[number], key_of(label))
            if label[0] in _ACTORS or pair in done:
                continue
            done.add(pair)
            trace = (*graph.trace(number), label, *_onward(graph, target, pair[1], done, chance))
            steps = yield trace
            done |= set(pairwise(engine_steps(trace[:steps])))


def _onward(
    graph: Explored, number: int, last: tuple[str, str], done: set[Pair], chance: Random
) -> list[Label]:
    """From a state to the end of a run, by what is new."""
    labels: list[Label] = []
    while out := graph.edges[number]:
        new = [step for step in out if (last, key_of(step[0])) not in done]
        label, number = chance.choice(new or out)
        last = last if label[0] in _ACTORS else key_of(label)
        labels.append(label)
    return labels
