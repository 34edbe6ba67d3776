"""Runs whose schedule is data: one run, a search through all of them, and schedules to draw."""

from .runs import Run, schedules, simulate
from .scheduler import SimulationStuckError, SimulationUnsupportedError
from .search import Exploration, explore

__all__ = [
    "Exploration",
    "Run",
    "SimulationStuckError",
    "SimulationUnsupportedError",
    "explore",
    "schedules",
    "simulate",
]
