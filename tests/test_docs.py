"""What the documents show is true: Python blocks run, commands exist.

Every fenced Python block of README.md, CONTRIBUTING.md and docs/ runs in a fresh process and an
empty folder. A block opts out only by `<!-- not run: reason -->` on the line above its fence.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from onepen.runtime.cli import main as onepen_main

from .test_layout import ROOT

README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

PYTHON_BLOCKS = {"python", "python3", "py"}
SHELL_BLOCKS = {"console", "sh", "bash", "shell"}
RUN_TIMEOUT_S = 60

# What a reader has before the first command: anything else would be a step that we forgot to name.
READER_PROGRAMS = {"cd", "git", "make", "pip", "python", "python3"}

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})[ ]*(?P<info>[^`\n]*)$")
_OPT_OUT = re.compile(r"^\s*<!--\s*not run:\s*(?P<reason>.*?)\s*-->\s*$")
_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_TARGET = re.compile(r"^(?P<name>[a-z][a-z-]*):(?!=)", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: what its fence says, the line of its first line of text, and the text."""

    language: str
    line: int
    text: str
    opt_out: str | None


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document; a stray opt-out or an unclosed fence raises ValueError."""
    lines = text.splitlines()
    blocks: list[Block] = []
    opt_out: str | None = None
    number = 0
    while number < len(lines):
        if match := _OPT_OUT.match(lines[number]):
            opt_out = match["reason"]
            if not opt_out:
                raise ValueError(f"line {number + 1}: an opt-out needs a reason")
            number += 1
            continue
        opening = _FENCE.match(lines[number])
        if opening is None:
            if opt_out is not None:
                raise ValueError(f"line {number}: an opt-out stands directly above its block")
            number += 1
            continue
        language = opening["info"].strip().partition(" ")[0].lower()
        if opt_out is not None and language not in PYTHON_BLOCKS:
            raise ValueError(f"line {number}: an opt-out above a block that is never run")
        end = number + 1
        while end < len(lines) and not _closes(lines[end], opening["fence"]):
            end += 1
        if end == len(lines):
            raise ValueError(f"line {number + 1}: the block is never closed")
        body = "\n".join(lines[number + 1 : end]) + "\n"
        blocks.append(Block(language, number + 2, body, opt_out))
        opt_out = None
        number = end + 1
    if opt_out is not None:
        raise ValueError("the last line is an opt-out of nothing")
    return blocks


def _closes(line: str, fence: str) -> bool:
    return len(line.strip()) >= len(fence) and set(line.strip()) == {fence[0]}


def commands_of(text: str) -> list[str]:
    """Commands of a document: lines of shell blocks, and code spans that begin with `make`."""
    blocks = blocks_of(text)
    found: list[str] = []
    for block in blocks:
        if block.language in SHELL_BLOCKS:
            found += commands_of_block(block)
    prose = text
    for block in blocks:
        prose = prose.replace(block.text, "\n")
    found += [span for span in _CODE_SPAN.findall(prose) if span.split()[0:1] == ["make"]]
    return found


def commands_of_block(block: Block) -> list[str]:
    """In a console block only the lines behind a `$`; in a script every line. Comments go."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    bare = [re.sub(r"(?:^|\s)#.*$", "", line).strip() for line in lines]
    return [command for line in bare for command in re.split(r"\s*(?:&&|;)\s*", line) if command]


def unknown_parts(command: str, *, targets: set[str], scripts: set[str]) -> list[str]:
    """What a command names that does not exist: a make target, a module, a program."""
    words = [word for word in command.split() if not re.match(r"^[A-Z_]+=", word)]
    if not words:
        return []
    program, *rest = words
    if program == "make":
        return [f"make {word}" for word in rest if not word.startswith("-") and word not in targets]
    if program == "onepen":
        return unknown_to_the_command_line(rest)
    if "-m" in rest[:1] and rest[1].partition(".")[0] == "onepen":
        return [] if importlib.util.find_spec(rest[1]) else [rest[1]]
    return [] if program in READER_PROGRAMS | scripts else [program]


def unknown_to_the_command_line(words: list[str]) -> list[str]:
    """A command or an option of `onepen` that does not exist."""
    command: click.Command = onepen_main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.commands.get(words[0])
        if found is None:
            return [words[0]]
        command, words = found, words[1:]
    known = {"--help", "--version", *(option for p in command.params for option in p.opts)}
    return [word for word in words if word.startswith("--") and word not in known]


def make_targets() -> set[str]:
    return set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


def script_names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project.get("scripts", {}))


def python_blocks() -> list[object]:
    """One parameter per Python block that is to run, named by file and line."""
    found: list[object] = []
    for document in DOCUMENTS:
        if not document.exists():
            continue  # test_every_document_exists says so
        for block in blocks_of(document.read_text(encoding="utf-8")):
            if block.language in PYTHON_BLOCKS and block.opt_out is None:
                name = f"{document.relative_to(ROOT)}:{block.line}"
                found.append(pytest.param(block, id=name))
    return found


def run_block(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block as a script of its own, padded so that tracebacks show the document's lines."""
    script = folder / "block.py"
    script.write_text("\n" * (block.line - 1) + block.text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=folder,
        check=False,
        timeout=RUN_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_document_exists(document: Path) -> None:
    assert document.exists()


@pytest.mark.parametrize("block", python_blocks())
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    done = run_block(block, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_exists(document: Path) -> None:
    targets, scripts = make_targets(), script_names()
    assert {"test", "check", "demo"} <= targets
    commands = commands_of(document.read_text(encoding="utf-8"))
    unknown = [unknown_parts(command, targets=targets, scripts=scripts) for command in commands]
    assert [part for parts in unknown for part in parts] == []


def test_the_readme_shows_commands_and_python() -> None:
    """Without any, the tests above would pass on an empty page."""
    text = README.read_text(encoding="utf-8")
    assert any(command.startswith("make") for command in commands_of(text))
    assert any(b.language in PYTHON_BLOCKS and b.opt_out is None for b in blocks_of(text))


# The reading itself.

SAMPLE = """\
Run `make test`, then `make nonsense`; `makefile` is a word.

<!-- not run: needs a network -->
```python
import antigravity
```

```python
raise SystemExit(3)
```

~~~~py title="x"
```
~~~~

```console
$ make demo WORKERS=1  # a comment
make: output, not a command
$ cd onepen && rm -rf everything
```

```sh
python -m onepen.nowhere
ONEPEN_PROFILE=ci make -s check
```
"""


def test_blocks_are_found_with_language_line_and_opt_out() -> None:
    found = [(block.language, block.line, block.opt_out) for block in blocks_of(SAMPLE)]
    assert found == [
        ("python", 5, "needs a network"),
        ("python", 9, None),
        ("py", 13, None),
        ("console", 17, None),
        ("sh", 23, None),
    ]
    assert blocks_of(SAMPLE)[2].text == "```\n"


def test_commands_are_found_and_the_unknown_ones_named() -> None:
    commands = commands_of(SAMPLE)
    assert commands == [
        "make demo WORKERS=1",
        "cd onepen",
        "rm -rf everything",
        "python -m onepen.nowhere",
        "ONEPEN_PROFILE=ci make -s check",
        "make test",
        "make nonsense",
    ]
    targets = {"demo", "test", "check"}
    unknown = [unknown_parts(command, targets=targets, scripts=set()) for command in commands]
    assert unknown == [[], [], ["rm"], ["onepen.nowhere"], [], [], ["make nonsense"]]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```python\nx\n```\n",
        "<!-- not run: too far away -->\n\n```python\nx\n```\n",
        "<!-- not run: not a Python block -->\n```sh\nls\n```\n",
        "<!-- not run: nothing below -->\n",
        "```python\nnever closed\n",
    ],
)
def test_a_document_that_could_hide_a_block_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"opt-out|closed"):
        blocks_of(text)


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "import warnings\nwarnings.warn('old')"])
def test_a_failing_block_fails(text: str, tmp_path: Path) -> None:
    assert run_block(Block("python", 1, text, None), tmp_path).returncode != 0


def test_a_block_runs_in_an_empty_folder(tmp_path: Path) -> None:
    text = "import os\nassert os.listdir() == ['block.py'], os.listdir()\n"
    assert run_block(Block("python", 1, text, None), tmp_path).returncode == 0


def test_a_command_line_that_does_not_exist_is_named() -> None:
    for command, unknown in (
        ("onepen search x --newest", []),
        ("onepen sessions list --database x.db", []),
        ("onepen sessions forget", ["forget"]),
        ("onepen search x --quickly", ["--quickly"]),
    ):
        assert unknown_parts(command, targets=set(), scripts={"onepen"}) == unknown


def test_make_variables_are_no_targets() -> None:
    assert {"PYTHON", "VENV", "BIN"}.isdisjoint(make_targets())
