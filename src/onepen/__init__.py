"""onepen: many sessions, one pen.

The public API of the package; everything that is not exported here is private.
"""

from importlib.metadata import version

__version__ = version("onepen")
