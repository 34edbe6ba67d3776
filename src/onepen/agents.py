"""Agents of other kinds than native trio code. Importing it starts nothing and leaves asyncio as it
is; trio-asyncio is imported when the first asyncio agent is about to run.
"""

from .runtime import agents as _agents
from .runtime.agents import *  # noqa: F403 - the list of names is kept in one place

__all__ = _agents.__all__  # pyright: ignore[reportUnsupportedDunderAll]
