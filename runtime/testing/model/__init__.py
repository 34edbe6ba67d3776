"""A plain Python model of an engine: what the commands mean, without SQL."""

from .model import Model

__all__ = ["Model"]
