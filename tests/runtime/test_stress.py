"""`onepen stress`: sound on the library as it is, and red for each bug that is planted into it.

The command is run as people run it, with real processes and real kills. What can't be planted in a
process is done to the file that it has left, or to what it has told.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import apsw
import msgspec
import pytest
import trio

from onepen import SourcePolicy, SystemClock, open_runtime, open_sqlite
from onepen.runtime.stress.before import before_of
from onepen.runtime.stress.figures import Figures
from onepen.runtime.stress.health import judge_health
from onepen.runtime.stress.ledger import Ledger, Promise, Said
from onepen.runtime.stress.link import Life
from onepen.runtime.stress.page import page_of
from onepen.runtime.stress.plan import PROFILES, Plan, PlanError, command_of, plan_of, settings_of
from onepen.runtime.stress.plots import chart
from onepen.runtime.stress.report import report_of
from onepen.runtime.stress.run import Test as Stress
from onepen.runtime.stress.script import (
    end_of,
    inbound_id_of,
    part_of,
    place_of,
    step_of,
    text_of,
    word_of,
)
from onepen.runtime.stress.stored import Stored, broken, look
from onepen.runtime.stress.verdict import Verdict, out_of_order
from onepen.runtime.stress.wire import (
    Accepted,
    Ended,
    Pulse,
    Ready,
    Send,
    Shown,
    decode_line,
    decode_order,
)

from ..test_layout import ROOT
from .planted import BUGS
from .scripted import echo
from .typed import refused, typed

if TYPE_CHECKING:
    from pathlib import Path

    from onepen.runtime.stress.run import Result

SMALL = ("--sessions", "6", "--duration", "3", "--kill-every", "1", "--latency-max", "0.05")
LIMIT_S = 120  # of one run, however busy the machine is


def run(*words: object, bug: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "onepen", "stress", *map(str, words)]
    surroundings = {**os.environ}
    if bug is not None:
        command += ["--child-module", "tests.runtime.planted"]
        surroundings["PLANTED_BUG"] = bug
    return subprocess.run(
        command,
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_the_library_as_it_is_is_sound(tmp_path: Path) -> None:
    """INV-1 to INV-21, as far as the world outside sees them; killed, and asked to end."""
    path, page = tmp_path / "stress.db", tmp_path / "report.html"
    # This seed has a SIGKILL, a SIGTERM and a SIGINT, in this order; a slow machine sees the first.
    words: tuple[object, ...] = (
        "--seed",
        59,
        "--sessions",
        8,
        "--duration",
        4,
        "--kill-every",
        0.9,
        "--early",
        0,
    )
    words += ("--intruders", 1, "--orderly", 0.4)
    done = run(*words, "--database", path, "--json", "-", "--html", page)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(done.stdout)
    assert report["sound"] is True
    assert report["counts"]["ends"]["SIGKILL"] > 0
    assert report["counts"]["ends"]["finish"] == 1
    assert report["counts"]["acknowledged"] > 50
    seen = {one["rule"]: one for one in report["verdict"]}
    for rule in ("acknowledged messages are stored", "a second writer is kept out"):
        assert seen[rule]["verdict"] == "holds", seen[rule]
    assert "people talk" in done.stderr  # plain lines, as nobody looks at a terminal
    assert path.exists()
    check_page(page.read_text(encoding="utf-8"))

    again = run(*SMALL, "--database", path)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    goes_on = run(*SMALL, "--database", path, "--continue", "--seed", 9)
    assert goes_on.returncode == 0, goes_on.stdout + goes_on.stderr
    assert "sound" in goes_on.stdout
    assert "onepen stress --seed 9" in goes_on.stdout


@pytest.mark.slow
def test_starts_that_are_killed_half_way_are_sound() -> None:
    """INV-19; and those who wait for a process wait for the next one."""
    done = run(*SMALL, "--seed", 5, "--early", 1, "--set", "sessions.recovery=resume")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_and_named(bug: str, tmp_path: Path) -> None:
    """PROOF-8, for what a process can be seen to do wrong."""
    _, rule, more = BUGS[bug]
    words = (*SMALL, "--seed", 1, "--orderly", 0, "--early", 0, *more)
    done = run(*words, "--json", tmp_path / "report.json", bug=bug)
    assert done.returncode == 1, done.stdout + done.stderr
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    wrong = {one["rule"] for one in report["verdict"] if one["wrong"]}
    assert rule in wrong
    assert f"{rule}: " in done.stdout
    assert "NOT SOUND" in done.stdout
    assert "the same plan again: onepen stress --seed 1 --sessions 6" in done.stdout
    kept = report["database"]  # there is something to look at
    assert os.path.exists(kept)
    shutil.rmtree(os.path.dirname(kept))


@pytest.mark.slow
def test_an_interrupt_ends_it_in_order_with_the_verdict_so_far() -> None:
    command = [sys.executable, "-m", "onepen", "stress", "--sessions", "4", "--duration", "10m"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = ""
        while "acknowledged" not in said:
            said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, out + err
    assert "interrupted; sound so far" in out


@pytest.mark.slow
def test_a_process_that_does_not_end_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-15: an orderly end has a limit as well."""
    monkeypatch.setattr("onepen.runtime.stress.trouble._END_GRACE_S", 0.1)
    monkeypatch.setenv("PLANTED_BUG", "stays")
    monkeypatch.chdir(ROOT)
    given = {"sessions": 2, "duration_s": 0.3, "kill_every_s": 0.2, "orderly": 1.0, "drain_s": 20.0}
    plan = plan_of({**given, "settings": {"shutdown_s": "0.5"}}, "smoke")
    module = "tests.runtime.planted"

    async def run_it() -> Result:
        return await Stress(plan, tmp_path / "stress.db", lambda _: None, module=module).run()

    result = trio.run(run_it)
    wrong = {one.rule for one in result.findings if one.wrong}
    assert "orderly ends are in time" in wrong
    assert result.ledger.acknowledged


def test_a_process_that_can_not_start_ends_the_test(tmp_path: Path) -> None:
    """There is no file to look at either."""
    plan = plan_of({"sessions": 2, "drain_s": 20.0}, "smoke")

    async def run_nothing() -> Result:
        return await Stress(plan, tmp_path / "stress.db", lambda _: None, module="nowhere").run()

    result = trio.run(run_nothing)
    wrong = {one.rule: one for one in result.findings if one.wrong}
    assert {*wrong} >= {"the process lives until it is asked to end", "the file can be read"}
    assert (
        "No module named nowhere" in wrong["the process lives until it is asked to end"].examples[0]
    )
    assert len(result.lives) < 6
    report = msgspec.json.decode(msgspec.json.encode(report_of(result)))
    check_page(page_of(report))


def test_what_a_process_says_of_itself_is_held_against_the_limits(tmp_path: Path) -> None:
    """INV-14: queues, memory, the event loop, and what is left behind."""
    given = {"memory_max_mb": 1, "loop_gap_p99_max_ms": 50.0, "memory_growth_max": 0.1}
    plan, path = plan_of(given), tmp_path / "stress.db"
    path.touch(mode=0o644)
    path.chmod(0o644)

    async def judge(*, ill: bool) -> set[str]:
        figures, life, next_life = Figures(), Life(0), Life(1)
        life.process = next_life.process = None
        life.ready = next_life.ready = Ready(3, 0.1, 100, 1_000, 10, 4)
        life.epoch, next_life.epoch = 3, 3 if ill else 4
        gaps_ms = (0.5,) * 50 + ((90.0,) if ill else ())
        sizes = {"units": 300, "bytes": 99, "live": 3, "running": 5} if ill else {}
        names = [name for name in Pulse.__struct_fields__ if name not in ("gaps_ms", "counters")]
        said = dict.fromkeys(names, 0) | sizes
        counters = {"crashes": 2} if ill else {"crashes": 0}
        figures.pulse(Pulse(gaps_ms=gaps_ms, counters=counters, **said), life)
        figures.peaks["memory"] = 2**21 if ill else 2**19
        threads = ("a thread",) if ill else ()
        life.left = Ended(0, threads, (), int(ill), (), in_time=not ill)
        verdict = Verdict(plan, Ledger(), Stored())
        judge_health(verdict, plan, figures, [life, next_life], path)
        return {one.rule for one in verdict.findings if one.wrong}

    assert trio.run(partial(judge, ill=True)) == {
        "each opening moves the epoch",
        "orderly ends leave nothing behind",
        "queues stay within their bounds",
        "the event loop is never held up for long",
        "memory stays under its limit",
        "nothing inside breaks",
        "nobody else may read the files",
    }
    path.chmod(0o600)
    assert trio.run(partial(judge, ill=False)) == set()


def test_memory_that_goes_on_growing_is_seen() -> None:
    """Only in a life that was long enough to have warmed up."""

    async def grown(age_s: int, last: int) -> list[tuple[int, float]]:
        figures = Figures()
        steady = [(float(at_s), 100) for at_s in range(age_s)]
        figures.remember(0, [*steady, *((float(age_s), last),) * 40])
        return figures.growth()

    assert trio.run(grown, 60, 500) == []
    assert trio.run(grown, 140, 100) == [(0, 0.0)]
    assert trio.run(grown, 140, 150) == [(0, 0.5)]


# What is done to the file, and to what was told --------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run without an end in the middle: everything is told, and in its place."""
    path = tmp_path_factory.mktemp("stress") / "stress.db"
    given = {"sessions": 5, "duration_s": 1.5, "kill_every_s": 0.0, "tools": 0.6, "rewinds": 0.0}
    plan = plan_of({**given, "seed": 4, "history_max": 6, "interrupts": 0.0}, "smoke")

    async def serve() -> Result:
        return await Stress(plan, path, lambda _: None).run()

    result = trio.run(serve)
    assert result.sound, [one for one in result.findings if one.wrong]
    return path, result


FIRST = "(SELECT min(n) FROM messages WHERE role = 'user' AND carried = 0)"
DAMAGE = {
    "acknowledged messages are stored": f"DELETE FROM messages WHERE n = {FIRST}",
    "no message is stored twice": (
        "UPDATE messages SET role = 'user', text = (SELECT text FROM messages WHERE role = 'user' "
        "AND text LIKE '2/1 %') WHERE n = (SELECT min(n) FROM messages WHERE role = 'assistant' "
        "AND text LIKE 're 2/1 %')"
    ),
    "rows are as they were said, and where": (
        f"UPDATE messages SET text = text || '!' WHERE n = {FIRST}"
    ),
    "messages stand in the order of their sending": (
        "UPDATE inbox SET n = -1 WHERE n = (SELECT max(n) FROM inbox)"
    ),
    "replies are what is stored of their turns": (
        "UPDATE turns SET outcome = '{\"kind\":\"silent\"}' WHERE outcome LIKE '%answered%'"
    ),
    "answers are rows of their turns": "DELETE FROM messages WHERE role = 'assistant'",
    "no turn is left without an end": (
        "UPDATE turns SET state = 'running', outcome = NULL, ended_ms = NULL WHERE n = 1"
    ),
    "transcripts are valid for a model": "DELETE FROM messages WHERE role = 'tool'",
    "side effects were on record before": "DELETE FROM effects",
    "what was shown is stored": "DELETE FROM deliveries WHERE n = 1",
    "deliveries shown are stored as sent": "UPDATE deliveries SET state = 'pending' WHERE n = 1",
    "deliveries are shown": "UPDATE deliveries SET id = 'another' WHERE n = 1",
    "ends are in the outbox": "UPDATE deliveries SET body = '{}' WHERE turn IS NOT NULL",
    "deliveries are shown in order": (
        "UPDATE deliveries SET n = -1 WHERE n = (SELECT max(n) FROM deliveries)"
    ),
    "each key has one current session": "UPDATE routes SET session_id = NULL",
    "rotations told are stored": "UPDATE sessions SET edge = 'branch' WHERE edge = 'rotation'",
    "conversations are where they were told": "UPDATE routes SET session_id = key || '-x'",
    "the file keeps every rule of its own": "UPDATE heads SET next_seq = next_seq + 1",
}


def wrong_in(path: Path, result: Result) -> dict[str, int]:
    verdict = Verdict(result.plan, result.ledger, look(path, result.plan))
    verdict.judge()
    return {one.rule: one.wrong for one in verdict.findings if one.wrong}


@pytest.mark.slow
def test_damage_to_the_file_is_found_by_its_rule(
    served: tuple[Path, Result], tmp_path: Path
) -> None:
    path, result = served
    assert wrong_in(path, result) == {}
    for rule, damage in DAMAGE.items():
        copy = tmp_path / "copy.db"
        shutil.copyfile(path, copy)
        db = apsw.Connection(str(copy))
        db.execute("PRAGMA foreign_keys = off")
        db.execute(damage)
        assert db.changes() > 0, rule
        db.close()
        assert rule in wrong_in(copy, result), rule


@pytest.mark.slow
def test_a_promise_that_is_not_kept_is_found(served: tuple[Path, Result]) -> None:
    path, result = served
    uid = "0" * 32
    places = [place for place, said in result.ledger.messages.items() if said.accepted is not None]
    kept = Promise("message", inbound_id_of(places[0]), "")
    promises = [Promise(kind, uid, "") for kind in ("turn", "delivery", "session", "event")]
    promises.append(Promise("message", "7/7777", ""))
    assert broken(path, [kept, *promises]) == promises


@pytest.mark.slow
def test_a_file_that_goes_on_is_counted_and_one_of_others_is_refused(
    served: tuple[Path, Result], tmp_path: Path
) -> None:
    path, result = served
    sent = {place for place, said in result.ledger.messages.items() if said.accepted is not None}
    before = before_of(path)
    assert before.first == {c: max(n for d, n in sent if d == c) + 1 for c, _ in sent}
    assert look(path, result.plan, before).before == before.digest
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    db = apsw.Connection(str(copy))
    db.execute(f"UPDATE messages SET text = text || '!' WHERE n = {FIRST}")
    db.close()
    verdict = Verdict(result.plan, Ledger(), look(copy, result.plan, before), before)
    verdict.judge()
    wrong = {one.rule for one in verdict.findings if one.wrong}
    assert "what an older test has said is as it was" in wrong
    other = tmp_path / "chat.db"

    async def talk() -> None:
        async with open_runtime(other, agent=echo, sources={"a": SourcePolicy()}) as runtime:
            await runtime.ask("telegram:1", "mine")

    trio.run(talk)
    held = open_sqlite(path, SystemClock())
    refused("stress", "--database", path, "--continue", *SMALL, exit_code=3)
    held.close()
    assert "not of a stress test" in refused(
        "stress", "--database", other, "--continue", *SMALL, exit_code=2
    )


# The ledger --------------------------------------------------------------------------------------


def test_an_acknowledged_message_that_is_taken_as_new_is_noted() -> None:
    ledger = Ledger()
    ledger.sent((1, 2), "queue")
    ledger.accepted((1, 2), Accepted(1, "t", "started", repeated=False, seconds=0.1), 1)
    ledger.accepted((1, 2), Accepted(2, "t", "started", repeated=True, seconds=0.1), ledger.now)
    assert ledger.wrong.total() == 0
    assert ledger.repeats == 1
    ledger.accepted((1, 2), Accepted(3, "t", "started", repeated=False, seconds=0.1), ledger.now)
    assert ledger.wrong["recognised"] == 1


def test_two_that_were_sent_at_once_may_both_be_new() -> None:
    """The second was asked for before the first was acknowledged."""
    ledger = Ledger()
    ledger.sent((1, 2), "queue")
    asked = ledger.now
    for n in (1, 2):
        line = Accepted(n, "t", "started", repeated=False, seconds=0.1)
        ledger.accepted((1, 2), line, asked)
    assert ledger.wrong.total() == 0


def test_a_delivery_that_says_something_else_the_second_time_is_noted() -> None:
    ledger, line = Ledger(), Shown(1, "d", "reply", "hello", "t", "")
    assert ledger.shows(line)
    assert not ledger.shows(line)
    assert ledger.shown_again == 1
    assert ledger.wrong.total() == 0
    ledger.shows(msgspec.structs.replace(line, text="bye"))
    assert ledger.wrong["deliveries"] == 1


# The plan and the script -------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_a_plan_and_its_command_gives_it_again(profile: str) -> None:
    plan = plan_of({"seed": 7, "settings": {"engine.readers_max": "2"}}, profile)
    assert settings_of(plan).engine.readers_max == 2
    words = command_of(plan).split()[2:]
    given: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--set":
            given.setdefault("settings", {}).update([value.split("=")])
            continue
        name = option.removeprefix("--").replace("-", "_")
        field = name if name in Plan.__struct_fields__ else f"{name}_s"
        given[field] = type(getattr(plan, field))(value)
    assert plan_of(given) == plan


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"sessions": 0}, "sessions"),
        ({"failing": 1.5}, "failing"),
        ({"size_min": 50, "size_max": 40}, "size_min"),
        ({"latency_min_s": 2.0, "latency_max_s": 1.0}, "latency_min"),
        ({"switches": 0.7, "resets": 0.5}, "switches"),
        ({"busy": "quickly=1"}, "quickly"),
        ({"busy": "queue=many"}, "many"),
        ({"busy": "queue=0"}, "nothing"),
        ({"busy": "queue=nan"}, "weight"),
        ({"synchronous": "OFF"}, "synchronous"),
    ],
)
def test_a_plan_that_can_not_be_carried_out_is_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(PlanError, match=part):
        plan_of(given)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--duration", "soon"), "no time"),
        (("--sessions", "-1"), "sessions"),
        (("--profile", "mad"), "mad"),
        (("--set", "engine.readers_max"), "no value"),
        (("--set", "engine.reader_max=2"), "engine.readers_max"),
        (("--set", "engine.synchronous=OFF"), "synchronous"),
        (("--continue",), "--database"),
        (("--continue", "--database", "nothing.db"), "does not exist"),
        (("--database", "nowhere/at/all.db"), "no folder"),
        (("--html", "nowhere/at/all.html"), "no folder"),
    ],
)
def test_an_option_that_can_not_be_is_refused(words: tuple[str, ...], part: str) -> None:
    assert part in refused("stress", *words, exit_code=2)


def test_the_help_names_every_number() -> None:
    said = typed("stress", "--help").stdout
    for option in ("--sessions", "--duration", "--kill-every", "--database", "--seed", "--json"):
        assert option in said


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    """INV-22, as far as it is claimed."""
    plan, other = plan_of({"seed": 1}), plan_of({"seed": 2})

    def drawn(plan: Plan) -> list[object]:
        places = [(c, n) for c in range(3) for n in range(5)]
        steps = [step_of(plan, c, n, n) for c, n in places]
        parts = [(part_of(plan, place), text_of(plan, place)) for place in places]
        return [steps, parts, [end_of(plan, n) for n in range(5)]]

    assert drawn(plan) == drawn(plan_of({"seed": 1}))
    assert drawn(plan) != drawn(other)


def test_a_text_says_whose_it_is_whatever_else_is_in_it() -> None:
    plan = plan_of({"size_max": 300})
    for place in [(c, n) for c in range(12) for n in range(12)]:
        text = text_of(plan, place)
        assert place_of(text) == place_of(f"re {text}") == place
        assert word_of(place) in text
        text.encode()  # so that it goes through a pipe


def test_orders_and_lines_survive_the_pipe() -> None:
    order = Send(1, 2, 3, "queue", "\u0000\u202e 👩‍👩‍👧 \n")
    assert decode_order(msgspec.json.encode(order)) == order
    line = Shown(1, "d", "reply", "\n\u2028", "t", "")
    encoded = msgspec.json.encode(line)
    assert b"\n" not in encoded
    assert decode_line(encoded) == line


def test_order_is_only_claimed_behind_an_acknowledgement() -> None:
    def said(sent: int, accepted: int) -> Said:
        one = Said(sent, "queue")
        one.accepted = accepted
        return one

    first, second = said(1, 2), said(3, 4)
    assert out_of_order([(first, 1, (0, 0)), (second, 2, (0, 1))], "said") == []
    assert len(out_of_order([(first, 2, (0, 0)), (second, 1, (0, 1))], "said")) == 1
    at_once = said(1, 3), said(2, 4)
    assert out_of_order([(at_once[0], 2, (0, 0)), (at_once[1], 1, (0, 1))], "said") == []


# The page ----------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Everything in a page that could be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "xlink:href") or name.startswith("on"):
                self.foreign.append(f"{tag} {name}={value}")
            if value is not None and "://" in value:
                self.foreign.append(f"{tag} {name}={value}")


def check_page(text: str) -> None:
    """It needs nothing but itself, and runs nothing."""
    page = _Page()
    page.feed(text)
    assert page.foreign == []
    assert not {"script", "iframe", "link", "img", "object", "embed"} & {*page.tags}
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "svg" in page.tags
    assert "Content-Security-Policy" in text


HOSTILE = "</td><script>alert('x')</script><img src=//evil onerror=x>\" & '"


@pytest.mark.slow
def test_hostile_words_stay_words(served: tuple[Path, Result]) -> None:
    report = report_of(served[1])
    assert list(report) == REPORT
    report["verdict"][0] |= {"wrong": 3, "examples": [HOSTILE], "rule": HOSTILE}
    report["counts"]["refusals"] = {HOSTILE: 3}
    report["lives"][0]["end"] = HOSTILE
    report["command"] = report["caveat"] = HOSTILE
    text = page_of(report)
    check_page(text)
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;") >= 5


REPORT = [
    "format",
    "sound",
    "interrupted",
    "command",
    "caveat",
    "database",
    "plan",
    "versions",
    "verdict",
    "counts",
    "latency_ms",
    "recovery_ms",
    "opening_ms",
    "peaks",
    "memory_growth",
    "seconds",
    "looking_s",
    "judging_s",
    "per_second",
    "lives",
    "over_time",
]
"""What a program may rely on; see `docs/stress.md`."""


@pytest.mark.parametrize("values", [[], [None], [0.0], [1.0, None, 3.0], [1e-4, 2.5e7], [0.3] * 50])
def test_a_chart_can_be_drawn_of_anything(values: list[float | None]) -> None:
    drawn = chart("<name>", [float(n) for n in range(len(values))], {"a": values}, [(1.0, "<k>")])
    assert drawn.startswith("<svg")
    assert "<k>" not in drawn
    assert "nan" not in drawn
