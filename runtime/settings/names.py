"""The known names: where each one stands, what it takes, how it is written, and which was meant.

Keeps:
- The names are read off the structs: whatever has a field has a name, and nothing else does.
- Every number has a limit, its own one or "positive".
- `settings_page` shows every name, and loading what it shows changes nothing.

Must never look at two values together, which is the part of `relations`, and must never repeat a
wrong value that is long at its full length.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, TypeAlias, cast, final

from msgspec import Struct
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    StructType,
    type_info,
)

from .page import Settings, SettingsProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX = "ONEPEN_"
NOT_SETTINGS = frozenset({"ONEPEN_PROFILE", "ONEPEN_DATABASE"})
"""Variables with the prefix that are somebody else's: the command line's, and our own tests'."""

_SHOWN_MAX = 60  # characters of a wrong value that are repeated in an error
_Kind: TypeAlias = IntType | FloatType | BoolType | LiteralType
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
# Structs without limits of their own get "positive"; here 0 means something, and SQLite counts
# milliseconds in 32 bits.
_LIMITS: dict[str, _Kind] = {
    "engine.busy_timeout_s": FloatType(ge=0, le=86_400),
    "engine.free_bytes_min": IntType(ge=0),
    "writer.restarts_max": IntType(ge=0),
}


@final
class Known(Struct, frozen=True, kw_only=True):
    """One name: where it stands, what it takes, and what it is for."""

    table: str
    field: str
    kind: _Kind
    default: object
    description: str

    @property
    def name(self) -> str:
        return f"{self.table}.{self.field}" if self.table else self.field

    def read(self, given: object, *, text: bool = False) -> object:
        """The value in its type; `text` for a place where everything is text.

        Raises `ValueError` for whatever does not fit.
        """
        value = self._parsed(given) if text and isinstance(given, str) else given
        kind = self.kind
        if isinstance(kind, BoolType):
            fits = isinstance(value, bool)
        elif isinstance(kind, LiteralType):
            fits = value in kind.values
        elif isinstance(value, bool) or not isinstance(value, int | float):
            fits = False  # Python counts truth values as numbers; a page of settings does not
        elif isinstance(kind, IntType):
            fits = isinstance(value, int) and _within(value, kind)
        else:
            try:
                value = float(value)
            except OverflowError as error:
                raise ValueError(self.expected) from error
            fits = math.isfinite(value) and _within(value, kind)
        if not fits:
            raise ValueError(self.expected)
        return value

    def _parsed(self, text: str) -> object:
        match self.kind:
            case IntType():
                return int(text)
            case FloatType():
                return float(text)
            case BoolType():
                return _TRUTH.get(text.strip().lower())
            case _:
                return text.strip()

    @property
    def expected(self) -> str:
        kind = self.kind
        if isinstance(kind, BoolType):
            return "true or false"
        if isinstance(kind, LiteralType):
            return " or ".join(f'"{value}"' for value in kind.values)
        lowest = f"above {kind.gt}" if kind.gt is not None else f"of at least {kind.ge}"
        highest = f" and at most {kind.le}" if kind.le is not None else ""
        return f"a {'whole ' if isinstance(kind, IntType) else ''}number {lowest}{highest}"


def _within(value: float, kind: IntType | FloatType) -> bool:
    return (
        (kind.gt is None or value > kind.gt)
        and (kind.ge is None or value >= kind.ge)
        and (kind.le is None or value <= kind.le)
    )


@cache
def names_of(page: type[Struct], table: str = "") -> Mapping[str, Known]:
    """Every name of a page and of its tables, dotted, in the order of the fields."""
    found: dict[str, Known] = {}
    info = type_info(page)
    assert isinstance(info, StructType)
    for field in info.fields:
        kind, description = field.type, ""
        if isinstance(kind, Metadata):
            extra = cast("dict[str, object]", kind.extra_json_schema or {})
            description = str(extra.get("description", ""))
            kind = kind.type
        if isinstance(kind, StructType):
            found |= names_of(kind.cls, field.name)
            continue
        name = f"{table}.{field.name}" if table else field.name
        if name in _LIMITS:
            kind = _LIMITS[name]
        elif isinstance(kind, IntType) and kind == IntType():
            kind = IntType(ge=1)
        elif isinstance(kind, FloatType) and kind == FloatType():
            kind = FloatType(gt=0)
        assert isinstance(kind, _Kind), name
        found[name] = Known(
            table=table,
            field=field.name,
            kind=kind,
            default=field.default,
            description=description,
        )
    return found


def table_names() -> list[str]:
    return list(dict.fromkeys(known.table for known in names_of(Settings).values() if known.table))


def nearest(given: str) -> str | None:
    """The known name that was probably meant."""
    names = names_of(Settings)
    table, _, field = given.rpartition(".")
    fields = {known.field: name for name, known in names.items()}
    if field in fields:
        return fields[field]  # the right name in the wrong place
    # Within a table only the field is compared: the table's name would make all of them alike.
    beside = {known.field: name for name, known in names.items() if known.table == table}
    if table and (close := get_close_matches(field, beside, 1)):
        return beside[close[0]]
    if close := get_close_matches(given, names, 1):
        return close[0]
    return fields[close[0]] if (close := get_close_matches(field, fields, 1)) else None


def variable_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.replace(".", "__").upper()


# How values are shown ------------------------------------------------------------------------


def settings_page() -> str:
    """Every name with its default and what it is for, as a TOML file that changes nothing."""
    lines = ["# Every setting with its default. A name that is left out keeps it."]
    table = ""
    for known in names_of(Settings).values():
        if known.table != table:
            table = known.table
            lines += ["", f"[{table}]"]
        elif not table:
            lines.append("")
        lines += [f"# {known.description}"] if known.description else []
        lines.append(f"{known.field} = {_toml(known.default)}")
    return "\n".join(lines) + "\n"


def wrong_value(known: Known, given: object, origin: str) -> SettingsProblem:
    return SettingsProblem(
        name=known.name,
        origin=origin,
        problem=f"given {shown(given)}, expected {known.expected}",
        hint=f"the default is {_toml(known.default)}",
    )


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{value:_}"
        case str():
            return f'"{value}"'
        case _:
            return repr(value)
