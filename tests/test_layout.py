"""The repository keeps its own rules, and each rule is able to find what it looks for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from . import layout_rules as rules

ROOT = Path(__file__).resolve().parent.parent
LIBRARY_FOLDERS = ("storage", "actors", "runtime")
OUTSIDE_FOLDERS = ("tests", "benchmarks", "examples")


def modules_of(*folders: str) -> list[PurePosixPath]:
    """The Python files of these top-level folders, as paths from the repository's root."""
    return [
        PurePosixPath(path.relative_to(ROOT).as_posix())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


FACADES = [
    PurePosixPath(path.relative_to(ROOT).as_posix())
    for pattern in ("*.py", "testing/*.py")
    for path in sorted((ROOT / "src/onepen").glob(pattern))
]
LIBRARY = modules_of(*LIBRARY_FOLDERS)
OUTSIDE = modules_of(*OUTSIDE_FOLDERS)


def source_of(path: PurePosixPath) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def every(paths: list[PurePosixPath]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=str)


def test_every_folder_has_modules_to_check() -> None:
    """An empty list of files would let each test below pass without looking at anything."""
    for folder in (*LIBRARY_FOLDERS, "tests"):
        assert modules_of(folder), folder
    assert FACADES


@pytest.mark.parametrize("folder", LIBRARY_FOLDERS)
def test_the_package_links_to_the_real_folder(folder: str) -> None:
    link = ROOT / "src" / "onepen" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{folder}"


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@every(LIBRARY)
def test_imports_go_one_way(path: PurePosixPath) -> None:
    assert rules.layer_violations(source_of(path), path) == []


@every([*LIBRARY, *FACADES])
def test_the_library_imports_itself_relatively(path: PurePosixPath) -> None:
    assert rules.absolute_own_imports(source_of(path)) == []


@every(OUTSIDE)
def test_outside_the_library_it_is_imported_as_onepen(path: PurePosixPath) -> None:
    assert rules.outside_import_violations(source_of(path), path) == []


@every(modules_of("storage"))
def test_storage_knows_no_event_loop(path: PurePosixPath) -> None:
    assert rules.forbidden_imports(source_of(path), rules.EVENT_LOOPS) == []


@every(modules_of("storage", "actors"))
def test_clock_ids_and_chance_are_handed_in(path: PurePosixPath) -> None:
    """Part of INV-22: a run is a function of its inputs."""
    assert rules.ambient_inputs(source_of(path)) == []


@every([*LIBRARY, *FACADES, *OUTSIDE])
def test_nobody_imports_another_sqlite(path: PurePosixPath) -> None:
    assert rules.forbidden_imports(source_of(path), rules.OTHER_SQLITES) == []


@every([*LIBRARY, *FACADES])
def test_the_library_opens_no_database_file_by_hand(path: PurePosixPath) -> None:
    assert rules.hand_opened_databases(source_of(path)) == []


@every([*LIBRARY, *FACADES])
def test_every_library_module_says_what_it_owns(path: PurePosixPath) -> None:
    assert rules.missing_docstring(source_of(path)) == []


def repository_files() -> list[Path]:
    """Tracked files, and those that would be if they were added now; links left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_file_mentions_a_machine_path_or_a_registry() -> None:
    problems: list[str] = []
    scanned = 0
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # pictures
        scanned += 1
        problems += [f"{path.relative_to(ROOT)}:{found}" for found in rules.private_text(text)]
    assert problems == []
    assert scanned > 10


# The rules themselves. Every sample is a violation that the rule must find; the pairs after them
# are look-alikes that it must leave alone.

AS_ACTORS = PurePosixPath("actors/sample.py")
AS_STORAGE = PurePosixPath("storage/sample.py")
AS_DEEP_STORAGE = PurePosixPath("storage/sqlite/sample.py")
AS_TEST = PurePosixPath("tests/storage/test_sample.py")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from ..actors import x", AS_STORAGE),
        ("from ..actors.writer import x", AS_STORAGE),
        ("from ...actors import x", AS_DEEP_STORAGE),
        ("from .. import actors", AS_STORAGE),
        ("from ... import runtime", AS_DEEP_STORAGE),
        ("def f():\n    from ..runtime import x", AS_ACTORS),
        ("if TYPE_CHECKING:\n    from ..runtime import x", AS_ACTORS),
        ("from .. import __version__", AS_ACTORS),
        ("from ..testing import x", AS_ACTORS),
        ("from .... import x", AS_DEEP_STORAGE),
        ("import_module('..runtime.demo', __package__)", AS_ACTORS),
    ],
)
def test_the_layer_rule_finds(source: str, path: PurePosixPath) -> None:
    assert rules.layer_violations(source, path)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from . import records", AS_STORAGE),
        ("from .. import records", AS_DEEP_STORAGE),
        ("from ..storage import Engine", AS_ACTORS),
        ("from .. import storage", AS_ACTORS),
        ("import trio", AS_ACTORS),
        ("from ..actors import Writer", PurePosixPath("runtime/sample.py")),
    ],
)
def test_the_layer_rule_allows(source: str, path: PurePosixPath) -> None:
    assert rules.layer_violations(source, path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import onepen",
        "import onepen.storage as s",
        "from onepen import storage",
        "from onepen.storage import x",
        "import storage",
        "from storage.commands import x",
        "def f():\n    import actors.writer",
        "importlib.import_module('onepen.storage')",
        "from tests import x",
    ],
)
def test_the_relative_import_rule_finds(source: str) -> None:
    assert rules.absolute_own_imports(source)


@pytest.mark.parametrize("source", ["from .storage import x", "import onepenknife", "import apsw"])
def test_the_relative_import_rule_allows(source: str) -> None:
    assert rules.absolute_own_imports(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import storage",
        "from storage import x",
        "from actors.writer import x",
        "import src.onepen",
        "from ...storage import x",
        "from ... import storage",
    ],
)
def test_the_outside_import_rule_finds(source: str) -> None:
    assert rules.outside_import_violations(source, AS_TEST)


@pytest.mark.parametrize(
    "source",
    ["import onepen", "from onepen.storage import x", "from .. import layout_rules", "import trio"],
)
def test_the_outside_import_rule_allows(source: str) -> None:
    assert rules.outside_import_violations(source, AS_TEST) == []


@pytest.mark.parametrize(
    "source",
    [
        "import trio",
        "import trio.lowlevel as low",
        "from trio import Event",
        "from trio.abc import Clock",
        "if TYPE_CHECKING:\n    import trio",
        "def f():\n    import asyncio",
        "__import__('trio')",
    ],
)
def test_the_event_loop_rule_finds(source: str) -> None:
    assert rules.forbidden_imports(source, rules.EVENT_LOOPS)


def test_the_event_loop_rule_allows_other_modules() -> None:
    assert rules.forbidden_imports("import triod, threading", rules.EVENT_LOOPS) == []
    assert rules.forbidden_imports("from . import trio", rules.EVENT_LOOPS) == []


@pytest.mark.parametrize(
    "source",
    [
        "import sqlite3",
        "import sqlite3.dbapi2",
        "from sqlite3 import connect",
        "def f():\n    import sqlite3 as s",
        "import _sqlite3",
        "importlib.import_module('sqlite3')",
        "pytest.importorskip('sqlite3')",
    ],
)
def test_the_sqlite_rule_finds(source: str) -> None:
    assert rules.forbidden_imports(source, rules.OTHER_SQLITES)


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t",
        "from time import time",
        "from time import monotonic as m",
        "def f():\n    from time import sleep",
        "import uuid",
        "from uuid import uuid4",
        "import random",
        "from random import Random",
        "import secrets",
        "import os\nos.urandom(8)",
        "import os as o\no.urandom(8)",
        "from os import urandom",
        "from os import urandom as u",
        "from os import *",
        "import datetime\ndatetime.datetime.now()",
        "import datetime as dt\ndt.datetime.now(dt.UTC)",
        "from datetime import datetime\ndatetime.now()",
        "from datetime import datetime as D\nclock = D.now",
        "from datetime import datetime\ndatetime.utcnow()",
        "from datetime import date\ndate.today()",
        "__import__('time').time()",
        "sql = 'INSERT INTO t VALUES (CURRENT_TIMESTAMP)'",
        "sql = \"SELECT datetime('now')\"",
        "sql = f'SELECT hex(randomblob({n}))'",
        "sql = 'SELECT unixepoch()'",
    ],
)
def test_the_rule_about_clock_and_chance_finds(source: str) -> None:
    assert rules.ambient_inputs(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(clock):\n    return clock.now(), clock.monotonic()",
        "import os\nos.path.exists('x')",
        "from datetime import UTC, datetime\ndatetime.fromtimestamp(0, UTC)",
        "from .time import x",
        '"""Never takes CURRENT_TIMESTAMP or datetime(\'now\')."""',
        "async def f():\n    await trio.sleep(1)",
    ],
)
def test_the_rule_about_clock_and_chance_allows(source: str) -> None:
    assert rules.ambient_inputs(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('chat.db')",
        "open(path + '-wal', 'rb')",
        "open(f'{path}-shm')",
        "open(file='chat.db')",
        "os.open(database_path, os.O_RDONLY)",
        "io.open(self._wal_path)",
        "Path('chat.db').read_bytes()",
        "self.db_path.open('rb')",
        "(folder / 'chat.db').touch()",
        "open(db)  # opens by hand:",
    ],
)
def test_the_rule_about_opening_by_hand_finds(source: str) -> None:
    assert rules.hand_opened_databases(source)


@pytest.mark.parametrize(
    "source",
    [
        "apsw.Connection('chat.db')",
        "open(lock_path)",
        "os.open(f'{database_path}.lock', os.O_RDWR)",
        "os.stat('chat.db-wal')",
        "open('settings.toml')",
        "os.open(database_path, flags)  # opens by hand: no connection exists yet",
    ],
)
def test_the_rule_about_opening_by_hand_allows(source: str) -> None:
    assert rules.hand_opened_databases(source) == []


@pytest.mark.parametrize("source", ["", "x = 1", "# a comment", "import os\n'late'", "''"])
def test_the_docstring_rule_finds(source: str) -> None:
    assert rules.missing_docstring(source)


def test_the_docstring_rule_allows_a_docstring() -> None:
    assert rules.missing_docstring('"""Owns one thing."""') == []


@pytest.mark.parametrize(
    "pieces",
    [
        ("see ", "/ho", "me/ann/code"),
        ("'/wo", "rk/main'"),
        ("`/op", "t/tools`"),
        ("(/Us", "ers/ann)"),
        ("C:\\Us", "ers\\ann"),
        ("fi", "le:/", "//tmp/x"),
        ("https://py", "pi.o", "rg/simple"),
        ("https://files.python", "hosted.org"),
        ("pip install --index", "-url x"),
        ("pip install --extra-index", "-url x"),
        ("as in ../sha", "red/notes"),
    ],
)
def test_the_rule_about_private_text_finds(pieces: tuple[str, ...]) -> None:
    """The samples are in pieces because this file is scanned as well."""
    assert rules.private_text("first line\n" + "".join(pieces))


@pytest.mark.parametrize(
    "text", ["tmp/chat.db", "make PYTHON=/path/to/python", "docs/work/plan", "rework", "/tmp/x"]
)
def test_the_rule_about_private_text_allows(text: str) -> None:
    assert rules.private_text(text) == []


# What `import onepen` does to the process that embeds it. Every probe is a process of its own,
# isolated from the environment, because pytest itself imports half of the standard library.

PROBE = """
import sys
before = set(sys.modules)
{imports}
loaded = set(sys.modules) - before
unwanted = sorted(loaded & {{"trio_asyncio", "sqlite3", "_sqlite3"}})
import asyncio
async def loop_class():
    kind = type(asyncio.get_running_loop())
    return kind.__module__ + "." + kind.__qualname__
print(unwanted, type(asyncio.get_event_loop_policy()).__qualname__, asyncio.run(loop_class()))
"""


def probe(imports: str) -> str:
    return subprocess.run(
        [sys.executable, "-I", "-c", PROBE.format(imports=imports)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.parametrize(
    "name",
    [
        "onepen",
        "onepen.agents",
        "onepen.storage",
        "onepen.actors",
        "onepen.runtime",
        "onepen.testing",
    ],
)
def test_importing_onepen_leaves_asyncio_and_sqlite_alone(name: str) -> None:
    assert probe(f"import {name}") == probe("")


@pytest.mark.parametrize("name", ["sqlite3", "trio_asyncio"])
def test_the_import_probe_notices(name: str) -> None:
    assert name in probe(f"import {name}")


def test_the_import_probe_notices_another_loop() -> None:
    imports = "import trio_asyncio\nimport asyncio"
    assert probe(imports).split()[-1] != probe("").split()[-1]


Rule = Callable[[str], list[str]]


@pytest.mark.parametrize(
    "rule", [rules.absolute_own_imports, rules.ambient_inputs, rules.hand_opened_databases]
)
def test_a_rule_says_where(rule: Rule) -> None:
    source = '"""Sample."""\n\nimport time, onepen\nopen("chat.db")\n'
    assert all(found.partition(":")[0] in {"3", "4"} for found in rule(source))
    assert rule(source)
