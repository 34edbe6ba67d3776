"""Tools for testing programs built on onepen, and for testing engines."""

from ..runtime import testing as _testing
from ..runtime.testing import *  # noqa: F403 - the list of names is kept in one place

__all__ = _testing.__all__  # pyright: ignore[reportUnsupportedDunderAll]
