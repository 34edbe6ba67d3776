"""Fixtures for pytest; opt in by `pytest_plugins = ["onepen.testing.fixtures"]` in a conftest.

| fixture           | is                                                                          |
| ----------------- | --------------------------------------------------------------------------- |
| `onepen_agent`    | the agent of `onepen_runtime`: an echo; override it with your own           |
| `onepen_runtime`  | a runtime in memory that serves it; closed in order behind the test         |
| `onepen_database` | a path for a database file; whatever is there behind the test must be sound |
| `fake_platform`   | a `FakePlatform` that is well behaved until a test says otherwise           |

Needs the `testing` extra. Async fixtures and tests are pytest-trio's. Must never be imported by the
rest of `onepen.testing`, which works without pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_trio  # type: ignore[import-untyped]

from ..opening import open_runtime
from .invariants import check_database
from .platform import FakePlatform

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from pathlib import Path

    from ...actors.turn import Turn
    from ..runtime import Runtime

__all__ = ["fake_platform", "onepen_agent", "onepen_database", "onepen_runtime"]


@pytest.fixture
def onepen_agent() -> Any:
    """Override it: `@pytest.fixture def onepen_agent(): return my_agent`."""

    async def echo(turn: Turn) -> str:
        return f"you said {turn.text}"

    return echo


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator, unused-ignore]
async def onepen_runtime(onepen_agent: Any) -> AsyncGenerator[Runtime]:
    """A runtime in memory."""
    async with open_runtime(None, agent=onepen_agent) as runtime:
        yield runtime


@pytest.fixture
def onepen_database(tmp_path: Path) -> Generator[Path]:
    """Where a test may keep a database; it is checked when the test is over."""
    path = tmp_path / "onepen.db"
    yield path
    if path.exists():
        violations = check_database(path)
        if violations:
            pytest.fail("\n".join(map(str, violations)), pytrace=False)


@pytest.fixture
def fake_platform() -> FakePlatform:
    """A chat platform with nobody in it yet."""
    return FakePlatform()
