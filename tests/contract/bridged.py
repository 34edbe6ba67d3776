"""The contract tests of native agents, run again with the same agents on asyncio loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onepen import open_runtime
from onepen.agents import AsyncioAgent

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractAsyncContextManager
    from types import ModuleType

    from onepen import Runtime


def bridged(
    path: Any, *, agent: Any = None, factory: Any = None, **options: Any
) -> AbstractAsyncContextManager[Runtime]:
    """`open_runtime`, with asyncio between the runtime and the agent."""
    if factory is not None:

        def build(session: Any) -> AsyncioAgent:
            return AsyncioAgent(build=lambda: factory(session))

        return open_runtime(path, factory=build, **options)
    return open_runtime(path, agent=AsyncioAgent(agent), **options)


def cases_of(module: ModuleType, native: Collection[str]) -> dict[str, Any]:
    """The module's tests, without those whose agents call trio by themselves."""
    found = {name: one for name, one in vars(module).items() if name.startswith("test_")}
    missing = set(native) - set(found)
    assert not missing, f"no such tests: {missing}"
    return {name: one for name, one in found.items() if name not in native}
