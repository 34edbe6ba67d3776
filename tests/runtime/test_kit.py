"""The testing kit that we give to others: it passes what is sound, and finds what is not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import apsw
import pytest
import trio

from onepen import SystemClock, WriterSettings, open_runtime, open_sqlite, open_writer
from onepen.actors import turn as turn_module
from onepen.actors.scribe import Scribe
from onepen.agents import AsyncioAgent
from onepen.storage.pen import Pen
from onepen.storage.units import Durable
from onepen.testing import (
    FAILPOINTS,
    CheckFailedError,
    FailpointError,
    FakePlatform,
    Trial,
    check_agent,
    check_database,
    explore,
    failpoint,
    run_until,
    simulate,
)

from ..actors.fixtures import Talk
from .scripted import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from onepen import Message, Turn
    from onepen.agents import AsyncioTurn

TALK = {"chat:1": ["hello", "again"], "chat:2": ["hi"]}


async def looking(turn: Turn) -> str:
    """Calls a tool, rests, and answers."""
    call = {"id": f"call {turn.text}", "name": "look", "arguments": "{}"}
    await turn.append({"role": "assistant", "tool_calls": [call]})
    await trio.sleep(1)
    await turn.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    return f"you said {turn.text}"


async def looking_by_asyncio(turn: AsyncioTurn) -> str:
    call = {"id": f"call {turn.text}", "name": "look", "arguments": "{}"}
    await turn.append({"role": "assistant", "tool_calls": [call]})
    await asyncio.sleep(1)
    await turn.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    return f"you said {turn.text}"


# check_agent -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "agent", [looking, AsyncioAgent(looking_by_asyncio)], ids=["native", "asyncio"]
)
def test_a_sound_agent_passes_whatever_goes_wrong(agent: Any) -> None:
    """INV-1, INV-2, INV-4, A10: for native agents and asyncio's."""
    ended: list[dict[str, list[Message]]] = []
    found = check_agent(agent, TALK, runs=24, expect=ended.append)
    assert found.runs == 24
    assert found.lives == len(ended) + 6  # each power cut has a first life, which is not checked
    assert found.crashes > 12
    assert found.schedules > 30
    said = [message.text for message in ended[-1]["chat:1"] if message.role == "user"]
    assert said == TALK["chat:1"]


def test_the_same_runs_are_the_same() -> None:
    """INV-22: a run is a function of its number."""
    assert check_agent(looking, TALK, runs=8) == check_agent(looking, TALK, runs=range(8))


def test_one_conversation_needs_no_key_and_crashes_can_be_left_out() -> None:
    found = check_agent(echo, ["one", "two"], runs=5, crashes=())
    assert (found.runs, found.lives, found.crashes) == (5, 5, 0)
    with pytest.raises(ValueError, match="fire"):
        check_agent(echo, runs=1, crashes=["fire"])  # type: ignore[list-item]


def test_an_agent_that_fails_is_told_with_the_run_that_replays_it() -> None:
    async def failing(turn: Turn) -> str:
        raise ValueError(turn.text)

    with pytest.raises(CheckFailedError, match="the agent has failed at message 0") as found:
        check_agent(failing, TALK)
    assert "check_agent(…, runs=[0])" in found.value.__notes__[-1]
    check_agent(failing, TALK, runs=4, may_fail=True)


class Counting:
    """Keeps a count in memory; whoever is restarted begins anew, and people see it."""

    def __init__(self, _: object = None) -> None:
        self.count = 0

    async def run(self, _: Turn) -> str:
        self.count += 1
        return f"number {self.count}"


def numbers_go_up(ended: dict[str, list[Message]]) -> None:
    said = [message.text for message in ended["chat:1"] if message.role == "assistant"]
    assert said == [f"number {n + 1}" for n in range(len(said))], said


def test_a_bug_that_only_a_crash_shows_is_found_and_replayed() -> None:
    """What an agent holds in memory is gone with it. Without a crash nothing is wrong."""
    talk = {"chat:1": ["one", "two", "three"]}
    check_agent(factory=Counting, messages=talk, runs=10, crashes=(), expect=numbers_go_up)
    with pytest.raises(AssertionError, match="number") as found:
        check_agent(factory=Counting, messages=talk, expect=numbers_go_up)
    (note,) = (note for note in found.value.__notes__ if "check_agent" in note)
    number = int(note.partition("runs=[")[2].partition("]")[0])
    with pytest.raises(AssertionError, match="number"):
        check_agent(factory=Counting, messages=talk, expect=numbers_go_up, runs=[number])


@contextmanager
def replies_before_the_commit() -> Generator[None]:
    write = Scribe.write

    def early(self: Scribe, *arguments: Any, then: Any = None, **options: Any) -> Any:
        ticket = write(self, *arguments, **options)
        if then is not None:
            then(Durable(0))
        return ticket

    with patch.object(Scribe, "write", early):
        yield


def open_calls_stay_open() -> AbstractContextManager[object]:
    def none(*_: object) -> tuple[()]:
        return ()

    return patch.object(turn_module, "closing_results", none)


async def leaving_a_call_open(turn: Turn) -> str:
    call = {"id": f"call {turn.text}", "name": "look", "arguments": "{}"}
    await turn.append({"role": "assistant", "tool_calls": [call]})
    return "done"


@pytest.mark.parametrize(
    ("bug", "agent"),
    [(replies_before_the_commit, looking), (open_calls_stay_open, leaving_a_call_open)],
    ids=["replies before the commit", "open calls stay open"],
)
def test_a_bug_that_is_planted_in_the_runtime_is_found(
    bug: Callable[[], AbstractContextManager[object]], agent: Any
) -> None:
    """PROOF-8: the kit looks, and does not only run. Without the bug it finds nothing."""
    with bug(), pytest.raises((CheckFailedError, ExceptionGroup)):
        check_agent(agent, TALK, runs=100)
    check_agent(agent, TALK, runs=16)


def test_a_trial_can_be_searched_completely() -> None:
    found = explore(lambda: Trial(echo, ["hello"]).run, preemptions_max=0, runs_max=40)
    assert found.runs > 10
    trial = Trial(echo, ["hello"])
    simulate(trial.run)
    assert [reply.text for reply in trial.replies.values()] == ["re hello"]


def test_a_trial_notices_what_is_missing_doubled_or_out_of_order(tmp_path: Path) -> None:
    """Each against a file that is sound in itself."""
    for number, (sent, said) in enumerate(
        [(["a", "b"], ["a"]), (["a"], ["a", "b"]), (["b", "a"], ["a", "b"])]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        trial = Trial(echo, said)
        simulate(trial.live, [], folder)
        other = Trial(echo, sent)
        other.replies = trial.replies
        if sent == ["a"]:
            other.lanes["chat:1"] = ["a", "a", "b"]
        with pytest.raises(CheckFailedError, match="stored"):
            other.check(folder)
        trial.check(folder)


def test_a_trial_notices_a_reply_that_is_not_stored(tmp_path: Path) -> None:
    trial = Trial(echo, ["hello"])
    simulate(trial.live, [], tmp_path)
    db = apsw.Connection(str(tmp_path / "trial.db"))
    db.execute("UPDATE messages SET text = 'he said' WHERE text = 're hello'")
    db.execute("UPDATE heads SET active_bytes = active_bytes - 1")
    db.close()
    with pytest.raises(CheckFailedError, match="stored 0 times"):
        trial.check(tmp_path)


# Failpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["taken", "before commit", "committed", "acked"])
@pytest.mark.parametrize("inline", [False, True])
async def test_a_crash_at_a_failpoint_is_survived(
    tmp_path: Path, name: str, *, inline: bool
) -> None:
    """In a thread as well as in a task: the unit is sent again, and is there once."""
    path, talk, clock = tmp_path / "x.db", Talk(1), SystemClock()
    with failpoint(name, nth=2) as armed:
        async with open_writer(
            lambda: open_sqlite(path, clock), clock, WriterSettings(), inline=inline
        ) as writer:
            await writer.write(talk.opening())
            # The thread comes to its last point while the answer is on its way.
            assert armed.hits == 1 or (name == "acked" and not inline)
            for _ in range(3):
                await writer.write(talk.message())
    assert armed.fired
    assert armed.hits >= 4
    assert check_database(path) == []


def test_a_failpoint_is_gone_behind_its_block() -> None:
    before: Any = vars(Pen)["commit"]
    with failpoint("committed"):
        assert vars(Pen)["commit"] is not before
    assert vars(Pen)["commit"] is before
    with pytest.raises(FailpointError, match="no such thing"), failpoint("no such thing"):
        pass
    with pytest.raises(FailpointError), failpoint("committed", nth=0):
        pass


async def test_a_failpoint_can_look_instead_of_crashing(tmp_path: Path) -> None:
    """And the points around an opening are passed as well."""
    seen: list[str] = []
    with (
        failpoint("opening", do=lambda: seen.append("opening")),
        failpoint("opened", do=lambda: seen.append("opened")),
        failpoint("committed", do=lambda: seen.append("committed")),
        failpoint("closing", do=lambda: seen.append("closing")),
    ):
        async with open_runtime(tmp_path / "x.db", agent=echo) as runtime:
            await runtime.ask("test:1", "hello")
    assert seen == ["opening", "opened", "committed", "closing"]


GATEWAY = """
import sys, trio
from onepen import Inbound, open_runtime

async def agent(turn):
    return f"re {turn.text}"

async def main(path):
    async with open_runtime(path, agent=agent) as runtime:
        for number in range(5):
            reply = await runtime.ask("chat:1", Inbound(str(number), id=str(number)))
            print(reply.text, flush=True)

if __name__ == "__main__":
    trio.run(main, sys.argv[1])
"""


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name != "recovering"])
def test_a_program_is_killed_at_a_point_and_loses_nothing_that_it_told(
    tmp_path: Path, name: str
) -> None:
    """INV-2: a real SIGKILL; the next process answers the rest, and everything is there once."""
    program, path = tmp_path / "gateway.py", tmp_path / "chat.db"
    program.write_text(GATEWAY)
    nth = 1 if name in ("opening", "opened", "closing") else 4
    ended = run_until(f"{name}:{nth}", program, str(path))
    assert ended.killed, ended
    told = ended.output.splitlines()
    assert told == [f"re {n}" for n in range(len(told))]
    if path.exists():
        assert check_database(path) == []
    again = run_until("recovering", program, str(path))
    assert (again.killed, again.returncode) == (False, 0)
    assert again.output.splitlines() == [f"re {n}" for n in range(5)]
    assert check_database(path) == []


def test_a_failpoint_that_does_not_exist_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for point in ("nowhere", "committed:0", "committed:x"):
        with pytest.raises(FailpointError):
            run_until(point, tmp_path / "none.py")
    command = [sys.executable, "-m", "onepen.testing.failpoints"]
    done = subprocess.run([*command, "nowhere", "x.py"], check=False, capture_output=True)
    assert done.returncode == 1
    assert b"committed" in done.stderr


# The checker as a program ------------------------------------------------------------------------


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onepen.testing.check", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


async def test_the_checker_tells_sound_files_from_others(tmp_path: Path) -> None:
    sound, damaged, foreign = tmp_path / "sound.db", tmp_path / "damaged.db", tmp_path / "x.txt"
    for path in (sound, damaged):
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask("test:1", "hello")
    db = apsw.Connection(str(damaged))
    db.execute("UPDATE heads SET message_count = 7")
    db.close()
    foreign.write_text("a letter")

    done = await trio.to_thread.run_sync(check, str(sound))
    assert done.returncode == 0
    assert "sound" in done.stdout
    done = await trio.to_thread.run_sync(check, str(sound), str(damaged))
    assert done.returncode == 1
    assert "message_count counts the originals" in done.stdout
    done = await trio.to_thread.run_sync(check, "--json", str(damaged))
    assert json.loads(done.stdout)["violations"][str(damaged)][0]["rule"].startswith("message_")
    done = await trio.to_thread.run_sync(check, str(foreign), str(tmp_path / "missing.db"))
    assert done.returncode == 2
    assert "missing.db" in done.stderr


# Fixtures ----------------------------------------------------------------------------------------

CONFTEST = 'pytest_plugins = ["onepen.testing.fixtures"]\n'
SAMPLE = """
import apsw, pytest, trio
from onepen import open_runtime

@pytest.fixture
def onepen_agent():
    async def agent(turn):
        return turn.text.upper()
    return agent

@pytest.mark.trio
async def test_a_runtime(onepen_runtime):
    assert (await onepen_runtime.ask("a:1", "hello")).text == "HELLO"

async def serve(path, agent):
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask("a:1", "hello")

def test_a_database(onepen_database, onepen_agent):
    trio.run(serve, onepen_database, onepen_agent)

def test_a_damaged_database(onepen_database, onepen_agent):
    trio.run(serve, onepen_database, onepen_agent)
    db = apsw.Connection(str(onepen_database))
    db.execute("UPDATE heads SET message_count = 7")
    db.close()

def test_a_platform(fake_platform):
    assert fake_platform.texts("a") == []
"""
ECHO = """
import pytest

@pytest.mark.trio
async def test_the_agent_is_an_echo_unless_it_is_overridden(onepen_runtime):
    assert (await onepen_runtime.ask("a:1", "hello")).text == "you said hello"
"""


def test_the_fixtures_work_in_somebody_elses_tests(tmp_path: Path) -> None:
    """A pytest of its own, without this repository's settings."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_echo.py").write_text(ECHO)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "."],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "5 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR test_sample.py::test_a_damaged_database" in done.stdout
    assert "message_count counts the originals" in done.stdout


def test_a_platform_is_a_function_of_its_seed() -> None:
    updates = [FakePlatform(3).webhooks("a", ["one", "two"], shuffled=True) for _ in range(2)]
    assert updates[0] == updates[1]
