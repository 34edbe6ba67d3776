"""How a reader asks: one connection, inside one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import apsw
    from apsw import SQLiteValue


class Queries:
    """What the read views are made of."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def _one(self, sql: str, parameters: tuple[SQLiteValue, ...] = ()) -> tuple[Any, ...] | None:
        return next(iter(self._db.execute(sql, parameters)), None)

    def _all_named(self, sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, parameters).fetchall()

    def _all(self, sql: str, parameters: tuple[SQLiteValue, ...] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, parameters).fetchall()
