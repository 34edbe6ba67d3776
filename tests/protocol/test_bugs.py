"""Tests of the test (PROOF-8): each planted bug of the protocol is found, by its shortest trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .bugs import BUGS
from .explorer import explore
from .page import tables
from .scopes import scope

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_its_shortest_trace(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """The rule that must catch it does, after as many steps and states as the page says."""
    planted = BUGS[name]
    graph = explore(planted.bug(), scope(planted.scope).start)
    assert graph.found is not None, "nothing was found"
    print(name, planted.rule, len(graph.found.trace), len(graph.states))  # noqa: T201
    print(graph.found)  # noqa: T201 - the trace is what one wants to read
    assert planted.rule in graph.found.what
    on_page = {row[0]: row[1:4] for row in tables()["Planted bugs"]}
    steps, states = len(graph.found.trace), len(graph.states)
    assert on_page[name] == [planted.rule, str(steps), f"{states:,}"]
    told = f"{name}: the rule '{planted.rule}', after {states:,} states"
    record_property("planted bug", told)


def test_the_page_lists_the_planted_bugs() -> None:
    assert [row[0] for row in tables()["Planted bugs"]] == list(BUGS)
