"""Hooks: observers that a gateway hands in, called with keyword arguments only.

| hook                  | keyword arguments                                   | behind           |
| --------------------- | --------------------------------------------------- | ---------------- |
| `on_session_start`    | session_id, key, source, user                       | its first row    |
| `on_turn_start`       | session_id, key, turn_id, attempt                   | the user's row   |
| `on_turn_end`         | session_id, key, turn_id, outcome                   | the turn's end   |
| `on_rotation`         | key, parent_id, child_id                            | the rotation     |
| `on_session_end`      | session_id, completed, interrupted, model, platform | all its messages |
| `on_session_finalize` | session_id, key, reason                             | the same         |

Keeps: a hook that raises or hangs stops nothing; it has a deadline, and its failure is logged and
counted. All hooks are optional methods of one object, each sync or async. They observe: what they
return is ignored. A sync hook is called on the loop, so that it may use trio's own things; nobody
can cut it off, so it must return at once: what takes time is `async`.
"""

from __future__ import annotations

import logging
from inspect import isawaitable
from typing import Any, final

import trio

from .raised import is_theirs, said_by

logger = logging.getLogger(__name__)

HOOK_NAMES = (
    "on_session_start",
    "on_turn_start",
    "on_turn_end",
    "on_rotation",
    "on_session_end",
    "on_session_finalize",
)


@final
class Hooks:
    """A gateway's hooks, guarded."""

    def __init__(self, observer: object | None, deadline_s: float) -> None:
        self._methods: dict[str, Any] = {}
        for name in HOOK_NAMES:
            method = getattr(observer, name, None)
            if callable(method):
                self._methods[name] = method
        self._deadline_s = deadline_s
        self.failures = 0

    def has(self, name: str) -> bool:
        return name in self._methods

    async def call(self, name: str, **arguments: object) -> str | None:
        """Call a hook if there is one; the problem, if there was one."""
        method = self._methods.get(name)
        if method is None:
            return None
        problem: str | None = None
        with trio.move_on_after(self._deadline_s) as scope:
            try:
                result = method(**arguments)
                if isawaitable(result):
                    await result
            except BaseException as error:
                if not is_theirs(error):
                    raise
                problem = f"{name} raised {said_by(error)}"
                logger.exception("the hook %s failed", name)
        if scope.cancelled_caught:
            problem = f"{name} took longer than {self._deadline_s} s"
            logger.error(
                "the hook %s took longer than %s s and was cut off", name, self._deadline_s
            )
        if problem is not None:
            self.failures += 1
        return problem
