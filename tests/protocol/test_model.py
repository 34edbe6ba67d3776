"""The protocol of `docs/protocol.md`, explored exhaustively: every state, every order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from ..proving import PROOF
from .explorer import explore
from .page import named, tables
from .scopes import SCOPES, WIDE, scope
from .steps import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from .explorer import Explored

_ALL = SCOPES + WIDE if PROOF else SCOPES
_SECOND_LINE = {"conflict", "route_conflict", "ended"}


@cache
def explored(name: str) -> Explored:
    """Every state of a scope, found once for each process."""
    return explore(Protocol(), scope(name).start)


def receipts(graph: Explored) -> set[str]:
    """All that were ever given."""
    return {r for state in graph.states for process in state.processes for r in process.receipts}


def counts(graph: Explored) -> list[str]:
    """States, transitions, states in which nothing is left to happen, and the furthest state."""
    ends = sum(not out for out in graph.edges)
    return [f"{n:,}" for n in (len(graph.states), graph.transitions, ends, graph.depth)]


@pytest.mark.parametrize("name", [scope.name for scope in _ALL])
def test_every_reachable_state_keeps_every_invariant(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """INV-1, 2, 4, 6, 7, 8, 10, 11, 12, and every run comes to an end with everything answered.

    The counts stand on the page: a change of the protocol is seen in them.
    """
    # The wide ones are too large to be kept.
    graph = explored(name) if scope(name) in SCOPES else explore(Protocol(), scope(name).start)
    assert graph.found is None, str(graph.found)
    assert not receipts(graph) & _SECOND_LINE, "the page says that they are never met"
    print(name, *counts(graph))  # noqa: T201 - for whoever changes the protocol, and the page
    on_page = {row[0]: row[1:5] for row in tables()["Scopes"]}
    assert on_page[name] == counts(graph)
    record_property("protocol states", len(graph.states))
    record_property("protocol transitions", graph.transitions)


def test_the_page_lists_the_scopes() -> None:
    assert [row[0] for row in tables()["Scopes"]] == [scope.name for scope in SCOPES + WIDE]


def test_the_page_names_every_step_and_no_other() -> None:
    """What nobody can do in any scope is no step; what somebody can do must be on the page."""
    taken = {label[0] for s in SCOPES for out in explored(s.name).edges for label, _ in out}
    on_page = [name for row in tables()["Steps"] for name in named(row[0])]
    assert sorted(on_page) == sorted(taken)


def test_the_page_names_every_receipt_and_no_other() -> None:
    """Each row of the rules is met, but for the second line, which the page names."""
    given = set[str]().union(*(receipts(explored(s.name)) for s in SCOPES))
    on_page = [name for row in tables()["Applying a unit"] for name in named(row[1])]
    assert sorted(on_page) == sorted(given | _SECOND_LINE)


def test_an_exploration_is_the_same_every_time() -> None:
    """INV-22."""
    again = explore(Protocol(), scope("a unit fails alone").start)
    assert again == explored("a unit fails alone")
