"""Fixtures for pytest: `pytest_plugins = ["onepen.testing.fixtures"]`."""

from ..runtime.testing.fixtures import (
    fake_platform,
    onepen_agent,
    onepen_database,
    onepen_runtime,
)

__all__ = ["fake_platform", "onepen_agent", "onepen_database", "onepen_runtime"]
