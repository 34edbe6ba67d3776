"""The command line: `onepen …`, what an operator types.

`main` is the group; each module beside it holds the commands of one concern. Commands that only
read work on a file that a running process owns; those that write take the file for themselves, and
say who has it if they can't.
"""

from .main import main

__all__ = ["main"]
