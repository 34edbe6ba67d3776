"""Loading: defaults, then a TOML file, then the environment, then code.

Keeps:
- Nothing is ignored: a name that nobody knows is an error, wherever it stands, and says which name
  was probably meant.
- All problems are reported at once, each with its origin.
- A page that was loaded is a page that `check_settings` accepts.

Must never repeat the value of a name it does not know, which may be a secret that was put in the
wrong place, and must never change the environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, final

from .names import (
    ENVIRONMENT_PREFIX,
    NOT_SETTINGS,
    names_of,
    nearest,
    shown,
    table_names,
    variable_of,
    wrong_value,
)
from .page import Settings, SettingsError, SettingsProblem
from .relations import follow, misfits, page_of

if TYPE_CHECKING:
    from os import PathLike


def load_settings(
    path: str | PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Defaults, then the file, then the environment, then code; the last one that names it wins.

    Without `environ` the process's own is read; `{}` leaves it out. `overrides` may be nested like
    the file or have dotted names. Reads the file at once, so call it before the loop runs. Raises
    `SettingsError` with all problems, those in a layer that a later one covers included.
    """
    loading = _Loading()
    if path is not None:
        loading.read_file(os.fspath(path))
    loading.read_environment(os.environ if environ is None else environ)
    loading.read_nested(overrides or {}, _Layer("code"))
    return loading.settings()


def _as_table(value: object) -> Mapping[str, object] | None:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


class _Layer(NamedTuple):
    """Where names come from, and how they are written there."""

    kind: Literal["file", "environment", "code"]
    path: str = ""

    def origin(self, name: str) -> str:
        table = name.rpartition(".")[0]
        match self.kind:
            case "environment":
                return f"environment variable {variable_of(name)}"
            case "file":
                return f"{self.path}, [{table}]" if table else f"{self.path}, top level"
            case "code":
                return "code"

    def spelt(self, name: str) -> str:
        if self.kind == "environment":
            return variable_of(name)
        table, _, field = name.rpartition(".")
        return f"{field} in [{table}]" if self.kind == "file" and table else name


@final
class _Loading:
    """What the layers have given so far, and what is wrong with it."""

    def __init__(self) -> None:
        self._values = {name: known.default for name, known in names_of(Settings).items()}
        self._origins: dict[str, str] = {}
        self._problems: list[SettingsProblem] = []
        self._doubtful: set[str] = set()

    def read_file(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                given = tomllib.load(file)
        except OSError as error:
            self._unread(path, f"can't be read: {error.strerror or error}", "check the path")
        except (ValueError, RecursionError) as error:
            # Not only TOMLDecodeError: bytes that are no text and endless numbers end here, too.
            self._unread(path, f"is not valid TOML: {error}", "correct the file")
        else:
            self.read_nested(given, _Layer("file", path))

    def _unread(self, path: str, problem: str, hint: str) -> None:
        self._note("", path, problem, hint)
        self._doubtful |= self._values.keys()  # whatever it was to say, defaults are not it

    def read_environment(self, environ: Mapping[str, str]) -> None:
        layer = _Layer("environment")
        variables = {variable_of(name): name for name in names_of(Settings)}
        for variable in sorted(environ):
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_SETTINGS:
                continue
            if variable in variables:
                self._take(variables[variable], environ[variable], layer)
            else:
                bare = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
                self._unknown(variable, nearest(bare), "environment variable", layer)

    def read_nested(self, given: Mapping[str, object], layer: _Layer) -> None:
        names, tables = names_of(Settings), table_names()
        taken: set[str] = set()
        for key, value in given.items():
            inside = _as_table(value)
            if key in tables and inside is not None:
                for field, one in inside.items():
                    self._take_once(f"{key}.{field}", one, layer, taken)
            elif key in tables:
                problem = f"given {shown(value)}, expected a table of names"
                self._note(key, layer.origin(key), problem, f"the names of {key} go inside of it")
                self._doubtful |= {name for name in names if names[name].table == key}
            elif inside is not None and key not in names:
                close = get_close_matches(key, tables, 1)
                hint = f"did you mean {close[0]}?" if close else f"tables are {', '.join(tables)}"
                self._note(key, layer.origin(""), "no such table", hint)
                self._doubtful |= {name for name in names if names[name].table in close}
            else:
                self._take_once(key, value, layer, taken)

    def _take_once(self, name: str, value: object, layer: _Layer, taken: set[str]) -> None:
        if name in taken:
            self._note(name, layer.origin(name), "given twice", "keep one of the two")
        elif name in self._values:
            taken.add(name)
            self._take(name, value, layer)
        else:
            self._unknown(name, nearest(name), layer.origin(name), layer)

    def _take(self, name: str, value: object, layer: _Layer) -> None:
        known = names_of(Settings)[name]
        try:
            self._values[name] = known.read(value, text=layer.kind == "environment")
            self._origins[name] = layer.origin(name)
        except ValueError:
            self._problems.append(wrong_value(known, value, layer.origin(name)))
            self._doubtful.add(name)

    def _unknown(self, given: str, meant: str | None, origin: str, layer: _Layer) -> None:
        hint = "nothing known is like it"
        if meant is not None:
            hint = f"did you mean {layer.spelt(meant)}?"
            self._doubtful.add(meant)  # its value is the one that was not understood
        self._note(given, origin, "no such setting", hint)

    def _note(self, name: str, origin: str, problem: str, hint: str) -> None:
        self._problems.append(SettingsProblem(name=name, origin=origin, problem=problem, hint=hint))

    def settings(self) -> Settings:
        # A relation to a value that nobody meant would be a second complaint about one mistake.
        sound = {name: self._values[name] for name in self._values if name not in self._doubtful}
        follow(sound, self._origins)
        self._problems += misfits(sound, self._origins)
        if self._problems:
            raise SettingsError(tuple(self._problems))
        return page_of(sound)
