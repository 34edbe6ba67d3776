"""The conformance suite for engines: name an engine, and pytest runs every test on it."""

from .suite import EngineConformance

__all__ = ["EngineConformance"]
