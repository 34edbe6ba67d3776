"""Agents that are not native trio code, and how they run in a turn all the same."""

from .asyncio_agent import AsyncioAgent, AsyncioStatistics
from .asyncio_loop import AsyncioLoopError, TrioInAsyncioError
from .asyncio_turn import AsyncioStreaming, AsyncioTurn

__all__ = [
    "AsyncioAgent",
    "AsyncioLoopError",
    "AsyncioStatistics",
    "AsyncioStreaming",
    "AsyncioTurn",
    "TrioInAsyncioError",
]
