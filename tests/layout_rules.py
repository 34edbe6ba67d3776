"""The repository's own rules, as functions on source text.

Each rule takes the text of one module (and its path, where the place matters) and returns what is
wrong with it as `line: reason` strings; an empty list is a pass. They look at the syntax tree,
never at formatting, so that neither a comment nor a line break can hide a violation.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

# Which folders a folder may import from; storage <- actors <- runtime.
LAYERS = {
    "storage": {"storage"},
    "actors": {"storage", "actors"},
    "runtime": {"storage", "actors", "runtime"},
}

# Event loops and what wraps them: storage is plain synchronous code.
EVENT_LOOPS = {"trio", "trio_asyncio", "asyncio", "anyio", "outcome", "sniffio"}

# Opening a second SQLite library on a file drops the first one's locks when it closes.
OTHER_SQLITES = {"sqlite3", "_sqlite3", "aiosqlite", "pysqlite3"}

# Modules that are nothing but clock or chance. `time` goes as a whole: its sleeps and clocks are
# both things that a simulated run must own.
_AMBIENT_MODULES = {"time", "uuid", "random", "secrets"}
_AMBIENT_NAMES = {
    "os.urandom",
    "os.getrandom",
    "os.times",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
}
# The same things taken through SQL.
_AMBIENT_SQL = re.compile(
    r"\bcurrent_(?:timestamp|time|date)\b|\brandom(?:blob)?\s*\(|\bunixepoch\s*\(|'now'",
    re.IGNORECASE,
)

_DATABASE_FILE = re.compile(r"(?:\.db|-wal|-shm|-journal)$")
_DATABASE_NAME = re.compile(r"(?:^|_)(?:db|database|wal|shm)(?:_|$)")
_OPENERS = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "touch"}
_EXEMPT = re.compile(r"#\s*opens by hand:\s*\S")


class Import(NamedTuple):
    """One imported name: `from a.b import c` is module `a.b`, name `c`."""

    line: int
    level: int
    module: str
    name: str | None
    bound_as: str | None


def imports_of(source: str) -> Iterator[Import]:
    """Every import anywhere in the module, lazy and literal dynamic ones included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield Import(node.lineno, 0, alias.name, None, bound)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound = alias.asname or alias.name
                yield Import(node.lineno, node.level, node.module or "", alias.name, bound)
        elif isinstance(node, ast.Call) and node.args:
            called = _last_name(node.func)
            target = node.args[0]
            if (
                called in {"import_module", "__import__", "importorskip"}
                and isinstance(target, ast.Constant)
                and isinstance(target.value, str)
            ):
                name = target.value
                level = len(name) - len(name.lstrip("."))
                yield Import(node.lineno, level, name[level:], None, None)


def resolved(found: Import, path: PurePosixPath) -> tuple[str, ...]:
    """The parts of what a relative import names, counted from the folder that `path` starts in.

    `from ..storage import x` in actors/writer.py gives `("storage", "x")`. An import that climbs
    above that folder starts with `..`.
    """
    assert found.level > 0
    parents = path.parent.parts
    climb = found.level - 1
    named = [*found.module.split("."), found.name or ""]
    tail = tuple(part for part in named if part)
    if climb > len(parents):
        return ("..", *tail)
    return (*parents[: len(parents) - climb], *tail)


def layer_violations(source: str, path: PurePosixPath) -> list[str]:
    """Imports of a library module that go against storage <- actors <- runtime.

    The package's own root counts as above every layer: it re-exports them, so importing it from
    inside is a cycle.
    """
    allowed = LAYERS[path.parts[0]]
    problems: list[str] = []
    for found in imports_of(source):
        if found.level == 0:
            continue
        target = resolved(found, path)
        if not target or target[0] not in allowed:
            problems.append(f"{found.line}: {path.parts[0]} imports {'.'.join(target) or 'onepen'}")
    return problems


def absolute_own_imports(source: str) -> list[str]:
    """Absolute imports of our own modules inside the library, which must be relative there."""
    own = {"onepen", "tests", "benchmarks", "examples", *LAYERS}
    return [
        f"{found.line}: absolute import of {found.module}"
        for found in imports_of(source)
        if found.level == 0 and _top(found.module) in own
    ]


def outside_import_violations(source: str, path: PurePosixPath) -> list[str]:
    """Imports of a test, example or benchmark that reach the library other than as `onepen.…`.

    Relative imports are for the folder's own helpers, so they must stay inside the folder.
    """
    problems: list[str] = []
    for found in imports_of(source):
        if found.level == 0 and _top(found.module) in {"src", *LAYERS}:
            problems.append(f"{found.line}: {found.module} instead of onepen.{found.module}")
        elif found.level > 0 and resolved(found, path)[:1] != path.parts[:1]:
            problems.append(f"{found.line}: a relative import that leaves {path.parts[0]}/")
    return problems


def forbidden_imports(source: str, forbidden: set[str]) -> list[str]:
    """Imports of any of these top-level modules, under whatever name."""
    return [
        f"{found.line}: imports {found.module}"
        for found in imports_of(source)
        if found.level == 0 and _top(found.module) in forbidden
    ]


def ambient_inputs(source: str) -> list[str]:
    """Wall clock, ids and chance that a module takes by itself instead of being handed them."""
    tree = ast.parse(source)
    problems = forbidden_imports(source, _AMBIENT_MODULES)
    origins: dict[str, str] = {}
    for found in imports_of(source):
        if found.level > 0 or found.bound_as is None:
            continue
        if found.name is not None:
            origin = f"{found.module}.{found.name}"
        elif found.bound_as == _top(found.module):
            origin = found.bound_as
        else:
            origin = found.module
        origins[found.bound_as] = origin
        if origin in _AMBIENT_NAMES:
            problems.append(f"{found.line}: imports {origin}")
        if found.name == "*" and found.module in {"os", "datetime"}:
            problems.append(f"{found.line}: imports everything from {found.module}")
    docstrings = _docstring_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node, origins)
            if dotted in _AMBIENT_NAMES:
                problems.append(f"{node.lineno}: uses {dotted}")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and (match := _AMBIENT_SQL.search(node.value))
        ):
            problems.append(f"{node.lineno}: SQL takes {match.group()} by itself")
    return problems


def hand_opened_databases(source: str) -> list[str]:
    """Calls that open a database file, its -wal or its -shm other than through SQLite.

    Closing such a descriptor drops the process's locks. Judged by the names and literals in the
    call, so a path that hides behind an innocent name gets through; a call that is right in spite
    of its looks says `# opens by hand: why` on its line.
    """
    lines = source.splitlines()
    problems: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or _last_name(node.func) not in _OPENERS:
            continue
        subjects: list[ast.expr] = [*node.args[:1], *(word.value for word in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            subjects.append(node.func.value)
        suspects = [name for subject in subjects for name in _database_names(subject)]
        if suspects and not _EXEMPT.search(lines[node.lineno - 1]):
            problems.append(f"{node.lineno}: opens {suspects[0]} by hand")
    return problems


def missing_docstring(source: str) -> list[str]:
    """A module must begin by saying what it owns."""
    return [] if (ast.get_docstring(ast.parse(source)) or "").strip() else ["1: no docstring"]


# Spelt in pieces, so that this file does not match itself.
_SLASH = "/"
_PRIVATE_TEXT = re.compile(
    "|".join(
        [
            rf"(?<![\w.}}/*-]){_SLASH}(?:home|Users|root|work|opt|mnt|srv){_SLASH}\w",
            r"\b[A-Za-z]:\\+Users\b",
            rf"\bfile:{_SLASH}{_SLASH}",
            rf"\.\.{_SLASH}" + "shared",
            r"\bpypi\.(?:org|io)\b",
            "python" + r"hosted\b",
            "npm" + r"js\b",
            "arti" + "factory",
            r"--(?:extra-)?" + "index-url",
            r"--find" + "-links",
        ]
    )
)


def private_text(text: str) -> list[str]:
    """Paths of somebody's machine and hosts of package registries, which have no place here."""
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _PRIVATE_TEXT.search(line))
    ]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _dotted(node: ast.expr, origins: dict[str, str]) -> str | None:
    """The full name of `a.b.c`, with its first part replaced by what the import bound it to."""
    match node:
        case ast.Name(id=name):
            return origins.get(name)
        case ast.Attribute(value=value, attr=attr):
            before = _dotted(value, origins)
            return None if before is None else f"{before}.{attr}"
        case _:
            return None


def _docstring_nodes(tree: ast.Module) -> set[int]:
    """Ids of the constants that stand alone as a statement: docstrings, of attributes as well."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _database_names(subject: ast.expr) -> list[str]:
    """Names and literals in an expression that look like a database file; none for a lock file."""
    names: list[str] = []
    for node in ast.walk(subject):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.endswith(".lock"):
                return []
            if _DATABASE_FILE.search(node.value):
                names.append(node.value)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = _last_name(node)
            if "lock" in name:
                return []
            if _DATABASE_NAME.search(name):
                names.append(name)
    return names
