"""Wheel and source release hold plain files and import from where they are installed.

The tree is copied first, so that only what belongs to the repository can get in and building leaves
nothing behind in it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from .test_layout import LIBRARY_FOLDERS, ROOT

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel_of_sdist: Path
    wheel_of_tree: Path


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def only(paths: list[Path]) -> Path:
    assert len(paths) == 1, paths
    return paths[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("packaging")
    tree = place / "tree"
    listed = run(*("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), cwd=ROOT)
    for name in sorted({name for name in listed.split("\0") if name}):
        source, target = ROOT / name, tree / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    build = (sys.executable, "-m", "build", "--no-isolation")
    # Without a choice of its own, `build` makes the wheel from the source release it just made.
    run(*build, "--outdir", place / "both", ".", cwd=tree)
    run(*build, "--wheel", "--outdir", place / "direct", ".", cwd=tree)
    return Built(
        sdist=only(list((place / "both").glob("*.tar.gz"))),
        wheel_of_sdist=only(list((place / "both").glob("*.whl"))),
        wheel_of_tree=only(list((place / "direct").glob("*.whl"))),
    )


def expected_files() -> set[str]:
    """What the package must hold: every file of the library that is not a by-product."""
    package = ROOT / "src" / "onepen"
    files = {f"onepen/{path.name}" for path in package.iterdir() if path.is_file()}
    files |= {f"onepen/testing/{path.name}" for path in (package / "testing").glob("*.py")}
    for folder in LIBRARY_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files.add(f"onepen/{path.relative_to(ROOT).as_posix()}")
    return files


def test_the_wheel_holds_the_whole_library_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel_of_sdist) as wheel:
        entries = wheel.infolist()
    # The upper half of a zip entry's attributes is the Unix mode; 0o120000 marks a link.
    assert [entry.filename for entry in entries if entry.external_attr >> 28 == 0o12] == []
    names = {entry.filename for entry in entries if not entry.is_dir()}
    assert {name for name in names if ".dist-info/" not in name} == expected_files()
    assert {"onepen/py.typed", "onepen/storage/__init__.py"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_release_holds_plain_files_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        members = sdist.getmembers()
    assert [member.name for member in members if not (member.isfile() or member.isdir())] == []
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {f"src/{name}" for name in expected_files()} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    outside = ("tests/", "benchmarks/", "examples/")
    assert [name for name in names if name.startswith(outside)] == []


def test_wheels_from_tree_and_from_source_release_are_alike(built: Built) -> None:
    def contents(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if "RECORD" not in name}

    assert contents(built.wheel_of_tree) == contents(built.wheel_of_sdist)


IMPORT_EVERYTHING = """
import importlib, pathlib, pkgutil, sys
import onepen, onepen.storage
for found in pkgutil.walk_packages(onepen.__path__, "onepen."):
    if not found.name.endswith(".__main__"):
        importlib.import_module(found.name)
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "onepen"]
for module in ours:
    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
print(len(ours), onepen.__version__)
"""


def test_an_installed_wheel_imports_from_where_it_was_installed(
    built: Built, tmp_path: Path
) -> None:
    """Dependencies come from the environment at hand; onepen only from the fresh folder."""
    site = tmp_path / "site"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(
        *(*pip, "install", "--no-deps", "--no-index", "--target", site, built.wheel_of_sdist),
        cwd=elsewhere,
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONPATH"] = str(site)
    printed = run(sys.executable, "-P", "-c", IMPORT_EVERYTHING, site, cwd=elsewhere, env=env)
    count, version = printed.split()
    importable = [name for name in expected_files() if name.endswith(".py")]
    assert int(count) == sum(not name.endswith("/__main__.py") for name in importable)
    assert version == project()["version"]


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = table["project"]
    return found


def pins(name: str) -> dict[str, str]:
    """The `name==version` lines of a requirements file; any other kind of line fails."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
            assert match is not None, line
            found[canonical(match[1])] = match[2]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lowest_versions_are_the_bounds_of_the_metadata() -> None:
    bounds = {
        canonical(requirement.name): str(requirement.specifier)
        for requirement in map(Requirement, project()["dependencies"])
    }
    assert bounds == {name: f">={version}" for name, version in pins("lowest.txt").items()}


def test_the_pins_fit_every_requirement() -> None:
    pinned = pins("constraints.txt")
    extras = project()["optional-dependencies"]
    requirements = map(
        Requirement, [*project()["dependencies"], *extras["testing"], *extras["dev"]]
    )
    for requirement in requirements:
        if requirement.name != "onepen":
            assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement
