"""The page of settings: its layers, its checks, and the document that shows it."""

from __future__ import annotations

import io
import math
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from msgspec import Struct
from msgspec.structs import replace

from onepen import EngineSettings, OnepenError, WriterSettings
from onepen.actors.limits import DeliverySettings, SessionSettings
from onepen.runtime.settings import (
    NOT_SETTINGS,
    Settings,
    SettingsError,
    SettingsProblem,
    check_settings,
    load_settings,
    names_of,
    settings_page,
)

from ..test_docs import blocks_of

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


class Switches(Struct, frozen=True, kw_only=True):
    """A page of its own, because no setting is a truth value yet."""

    loud: bool = False
    mood: Literal["calm", "cross"] = "calm"
    size_max: int = 3
    wait_s: float = 1.0


def problems_of(
    text: str | None = None,
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> tuple[SettingsProblem, ...]:
    path: Path | None = None
    if text is not None:
        assert folder is not None
        path = folder / "onepen.toml"
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ=environ or {}, overrides=overrides)
    return caught.value.problems


def the_problem(**given: Any) -> SettingsProblem:
    (problem,) = problems_of(given.pop("text", None), **given)
    return problem


def checked(**given: Any) -> tuple[SettingsProblem, ...]:
    with pytest.raises(SettingsError) as caught:
        check_settings(Settings(**given))
    return caught.value.problems


# Layers --------------------------------------------------------------------------------------


def test_without_anything_given_the_defaults_are_loaded() -> None:
    assert load_settings(environ={}) == Settings()


def test_each_layer_covers_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "onepen.toml"
    path.write_text(
        "shutdown_s = 41\n[sessions]\ncrashes_max = 2\nturns_running_max = 2\n"
        "[writer]\ndrain_s = 2.5\n"
    )
    environ = {"ONEPEN_SESSIONS__CRASHES_MAX": "3", "ONEPEN_SESSIONS__TURNS_RUNNING_MAX": "3"}
    loaded = load_settings(path, environ=environ, overrides={"sessions": {"turns_running_max": 4}})
    sessions = SessionSettings(crashes_max=3, turns_running_max=4)
    assert loaded == Settings(
        shutdown_s=41.0, sessions=sessions, writer=WriterSettings(drain_s=2.5)
    )


def test_a_path_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "onepen.toml"
    path.write_text('[engine]\nsynchronous = "NORMAL"\n')
    loaded = load_settings(str(path), environ={})
    assert loaded == Settings(engine=EngineSettings(synchronous="NORMAL"))


def test_the_processes_own_environment_is_read_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEPEN_SHUTDOWN_S", "44")
    assert load_settings().shutdown_s == 44.0
    assert load_settings(environ={}).shutdown_s == 30.0


@pytest.mark.parametrize(
    "overrides",
    [{"sessions.turn_deadline_s": 60}, {"sessions": {"turn_deadline_s": 60}}],
    ids=["dotted", "nested"],
)
def test_code_may_nest_names_or_dot_them(overrides: dict[str, object]) -> None:
    loaded = load_settings(environ={}, overrides=overrides)
    assert loaded.sessions == SessionSettings(turn_deadline_s=60.0)


def test_a_whole_number_of_seconds_becomes_a_float() -> None:
    loaded = load_settings(environ={}, overrides={"shutdown_s": 60})
    assert isinstance(loaded.shutdown_s, float)


def test_a_name_that_code_gives_twice_is_refused() -> None:
    twice = {"sessions": {"crashes_max": 3}, "sessions.crashes_max": 4}
    problem = the_problem(overrides=twice)
    assert (problem.name, problem.origin) == ("sessions.crashes_max", "code")
    assert problem.problem == "given twice"


# Environment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("loud", "true", True),
        ("loud", "FALSE", False),
        ("loud", "1", True),
        ("loud", "0", False),
        ("mood", "cross", "cross"),
        ("size_max", "10_000", 10_000),
        ("size_max", " 7 ", 7),
        ("wait_s", "2", 2.0),
        ("wait_s", "0.25", 0.25),
    ],
)
def test_text_is_read_as_the_type_of_its_name(name: str, text: str, value: object) -> None:
    read = names_of(Switches)[name].read(text, text=True)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("loud", "yes please"),
        ("loud", ""),
        ("mood", "CROSS"),
        ("size_max", "7.5"),
        ("size_max", "true"),
        ("size_max", ""),
        ("wait_s", "soon"),
        ("wait_s", "inf"),
        ("wait_s", "nan"),
    ],
)
def test_text_that_is_not_of_the_type_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller makes the message
        names_of(Switches)[name].read(text, text=True)


def test_text_stands_for_a_number_in_the_environment_only() -> None:
    """In a file and in code a number in quotes is a mistake."""
    with pytest.raises(ValueError):  # noqa: PT011 - the caller makes the message
        names_of(Switches)["size_max"].read("7")


def test_every_name_can_be_set_by_its_variable() -> None:
    for name, known in names_of(Settings).items():
        variable = "ONEPEN_" + name.upper().replace(".", "__")
        text = str(known.default)
        assert load_settings(environ={variable: text}) == Settings(), variable


def test_a_literal_and_a_number_come_from_the_environment() -> None:
    environ = {"ONEPEN_SESSIONS__RECOVERY": "resume", "ONEPEN_ENGINE__READERS_MAX": "9"}
    loaded = load_settings(environ=environ)
    assert (loaded.sessions.recovery, loaded.engine.readers_max) == ("resume", 9)


def test_variables_of_others_are_left_alone() -> None:
    environ = {
        "PATH": "x",
        "ONEPENCIL": "y",
        "onepen_shutdown_s": "z",
        "ONEPEN_PROFILE": "ci",
        "ONEPEN_DATABASE": "x",
    }
    assert load_settings(environ=environ) == Settings()
    assert set(NOT_SETTINGS) == {"ONEPEN_PROFILE", "ONEPEN_DATABASE"}


# Unknown names -------------------------------------------------------------------------------


def test_an_unknown_name_in_the_file_suggests_the_right_one(tmp_path: Path) -> None:
    problem = the_problem(text="[sessions]\nturn_dedline_s = 3\n", folder=tmp_path)
    assert problem == SettingsProblem(
        name="sessions.turn_dedline_s",
        origin=f"{tmp_path / 'onepen.toml'}, [sessions]",
        problem="no such setting",
        hint="did you mean turn_deadline_s in [sessions]?",
    )


def test_a_name_in_the_wrong_table_suggests_the_right_table(tmp_path: Path) -> None:
    text = "turn_deadline_s = 3\n[sessions]\nbatch_rows_max = 4\n"
    top, inside = problems_of(text, folder=tmp_path)
    assert top.origin == f"{tmp_path / 'onepen.toml'}, top level"
    assert top.hint == "did you mean turn_deadline_s in [sessions]?"
    assert inside.hint == "did you mean batch_rows_max in [writer]?"


def test_an_unknown_table_suggests_the_right_one(tmp_path: Path) -> None:
    problem = the_problem(text="[session]\na = 1\nb = 2\n", folder=tmp_path)
    assert (problem.name, problem.problem) == ("session", "no such table")
    assert problem.hint == "did you mean sessions?"


def test_an_unknown_table_that_is_like_no_other_lists_them() -> None:
    problem = the_problem(overrides={"zebra": {"stripes": 3}})
    assert problem.hint == "tables are sessions, deliveries, writer, engine"


@pytest.mark.parametrize(
    "variable",
    [
        "ONEPEN_SESSION__TURN_DEADLINE_S",
        "ONEPEN_SESSIONS_TURN_DEADLINE_S",
        "ONEPEN_SESSIONS__TURN_DEADLIN_S",
        "ONEPEN_TURN_DEADLINE_S",
        "ONEPEN_TURN_DEADLINES",
        "ONEPEN_sessions__turn_deadline_s",
    ],
)
def test_an_unknown_variable_suggests_the_right_one(variable: str) -> None:
    problem = the_problem(environ={variable: "a secret"})
    assert problem == SettingsProblem(
        name=variable,
        origin="environment variable",
        problem="no such setting",
        hint="did you mean ONEPEN_SESSIONS__TURN_DEADLINE_S?",
    )


@pytest.mark.parametrize(
    "overrides", [{"sessions.crash_max": 3}, {"sessions": {"crash_max": 3}}, {"crashes_max": 3}]
)
def test_an_unknown_name_in_code_suggests_the_right_one(overrides: dict[str, object]) -> None:
    problem = the_problem(overrides=overrides)
    assert problem.origin == "code"
    assert problem.hint == "did you mean sessions.crashes_max?"


def test_an_unknown_name_like_no_other_is_still_an_error() -> None:
    problem = the_problem(environ={"ONEPEN_QQQQ": "1"})
    assert problem.problem == "no such setting"
    assert "did you mean" not in problem.hint


def test_the_value_of_an_unknown_name_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={"ONEPEN_API_KEY": "hunter2"}, overrides={"key": "hunter2"})
    assert "hunter2" not in str(caught.value)


# Types and ranges ----------------------------------------------------------------------------


def test_a_wrong_type_says_name_origin_value_and_what_is_expected(tmp_path: Path) -> None:
    problem = the_problem(text='[sessions]\nturns_running_max = "64"\n', folder=tmp_path)
    assert problem == SettingsProblem(
        name="sessions.turns_running_max",
        origin=f"{tmp_path / 'onepen.toml'}, [sessions]",
        problem="given '64', expected a whole number of at least 1",
        hint="the default is 64",
    )


def test_a_wrong_variable_says_which_one_it_is() -> None:
    problem = the_problem(environ={"ONEPEN_SHUTDOWN_S": "soon"})
    assert problem == SettingsProblem(
        name="shutdown_s",
        origin="environment variable ONEPEN_SHUTDOWN_S",
        problem="given 'soon', expected a number above 0",
        hint="the default is 30.0",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sessions.turns_running_max", True, "a whole number of at least 1"),
        ("sessions.turns_running_max", 3.0, "a whole number of at least 1"),
        ("sessions.turns_running_max", 0, "a whole number of at least 1"),
        ("sessions.turns_running_max", None, "a whole number of at least 1"),
        ("sessions.recovery", "retry", '"mark" or "resume"'),
        ("sessions.recovery", ["mark"], '"mark" or "resume"'),
        ("shutdown_s", True, "a number above 0"),
        ("shutdown_s", 0, "a number above 0"),
        ("shutdown_s", -1.5, "a number above 0"),
        ("shutdown_s", math.inf, "a number above 0"),
        ("shutdown_s", math.nan, "a number above 0"),
        ("shutdown_s", 10**400, "a number above 0"),
        ("shutdown_s", {"s": 3}, "a number above 0"),
        ("writer.batch_rows_max", 0, "a whole number of at least 1"),
        ("writer.restarts_max", -1, "a whole number of at least 0"),
        ("engine.synchronous", "OFF", '"FULL" or "NORMAL"'),
        ("engine.busy_timeout_s", 1e7, "a number of at least 0 and at most 86400"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_loading_and_by_checking(
    name: str, value: object, expected: str
) -> None:
    problem = the_problem(overrides={name: value})
    assert problem.name == name
    assert problem.origin == "code"
    assert problem.problem.startswith("given ")
    assert problem.problem.endswith(f", expected {expected}")
    table, _, field = name.rpartition(".")
    changes: dict[str, Any] = {field: value}
    if table:
        changes = {table: replace(getattr(Settings(), table), **changes)}
    assert checked(**changes) == (problem,)


def test_no_number_may_be_negative_and_three_may_be_zero() -> None:
    may_be_zero: set[str] = set()
    numbers = {name: k for name, k in names_of(Settings).items() if not isinstance(k.default, str)}
    for name, known in numbers.items():
        with pytest.raises(ValueError):  # noqa: PT011 - the caller makes the message
            known.read(-1)
        try:
            known.read(0)
        except ValueError:
            continue
        may_be_zero.add(name)
    assert may_be_zero == {"engine.busy_timeout_s", "engine.free_bytes_min", "writer.restarts_max"}


def test_a_long_value_is_cut() -> None:
    problem = the_problem(overrides={"shutdown_s": "x" * 5_000})
    assert len(problem.problem) < 200


@pytest.mark.parametrize("text", ["sessions = 3\n", "[[sessions]]\ncrashes_max = 3\n"])
def test_a_table_must_be_a_table(text: str, tmp_path: Path) -> None:
    problem = the_problem(text=text, folder=tmp_path)
    assert problem.name == "sessions"
    assert problem.problem.endswith("expected a table of names")


def test_a_table_of_another_kind_is_refused() -> None:
    (problem,) = checked(sessions=WriterSettings())
    assert (problem.name, problem.origin) == ("sessions", "code")
    assert problem.problem.endswith("expected SessionSettings")


# Relations -----------------------------------------------------------------------------------


def test_the_defaults_fit_together() -> None:
    check_settings(Settings())


@pytest.mark.parametrize(
    ("overrides", "name", "other"),
    [
        (
            {"sessions.finalize_deadline_s": 31, "shutdown_s": 29},
            "sessions.finalize_deadline_s",
            "shutdown_s",
        ),
        (
            {"sessions.hook_deadline_s": 31, "sessions.finalize_deadline_s": 29, "shutdown_s": 29},
            "sessions.hook_deadline_s",
            "shutdown_s",
        ),
        (
            {"sessions.hook_deadline_s": 11, "sessions.finalize_deadline_s": 9},
            "sessions.hook_deadline_s",
            "sessions.finalize_deadline_s",
        ),
        (
            {"sessions.interrupt_grace_s": 31, "shutdown_s": 29},
            "sessions.interrupt_grace_s",
            "shutdown_s",
        ),
        ({"writer.drain_s": 29.5, "shutdown_s": 29}, "writer.drain_s", "shutdown_s"),
        (
            {"sessions.turn_deadline_s": 6, "sessions.interrupt_grace_s": 6},
            "sessions.interrupt_grace_s",
            "sessions.turn_deadline_s",
        ),
        (
            {"sessions.live_actors_max": 65, "sessions.turns_running_max": 66},
            "sessions.turns_running_max",
            "sessions.live_actors_max",
        ),
        (
            {"sessions.live_bytes_max": 10_000, "sessions.hold_bytes_max": 10_001},
            "sessions.hold_bytes_max",
            "sessions.live_bytes_max",
        ),
        (
            {"writer.bytes_waiting_max": 10_000, "sessions.hold_bytes_max": 10_001},
            "sessions.hold_bytes_max",
            "writer.bytes_waiting_max",
        ),
        (
            {"writer.bytes_waiting_max": 10_000, "writer.batch_bytes_max": 10_001},
            "writer.batch_bytes_max",
            "writer.bytes_waiting_max",
        ),
        (
            {"sessions.crash_backoff_max_s": 0.05, "sessions.crash_backoff_s": 0.06},
            "sessions.crash_backoff_s",
            "sessions.crash_backoff_max_s",
        ),
        (
            {"writer.backoff_max_s": 0.01, "writer.backoff_first_s": 0.02},
            "writer.backoff_first_s",
            "writer.backoff_max_s",
        ),
        ({"sessions.crash_backoff_s": 12}, "sessions.crashes_max", "sessions.crash_period_s"),
        ({"writer.restart_period_s": 0.25}, "writer.restarts_max", "writer.restart_period_s"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    overrides: dict[str, object], name: str, other: str
) -> None:
    """Loading and checking agree, and both sides are named."""
    found = problems_of(overrides=overrides)
    problem = next(p for p in found if p.name == name and f"{other} (" in p.problem)
    assert name in problem.hint
    assert other in problem.hint
    page: dict[str, Any] = {}
    for dotted, value in overrides.items():
        table, _, field = dotted.rpartition(".")
        if not table:
            page[field] = value
            continue
        page[table] = replace(page.get(table, getattr(Settings(), table)), **{field: value})
    told = [(p.name, p.origin) for p in checked(**page)]
    assert told == [(p.name, p.origin) for p in found]


@pytest.mark.parametrize(
    "overrides",
    [
        {"sessions.finalize_deadline_s": 30, "sessions.hook_deadline_s": 30},
        {"sessions.interrupt_grace_s": 30},
        {"sessions.turn_deadline_s": 5.1},
        {"sessions.live_actors_max": 64},
        {"sessions.live_bytes_max": 4_194_304},
        {"writer.bytes_waiting_max": 8_388_608},
        {"writer.bytes_waiting_max": 4_194_304, "writer.batch_bytes_max": 1},
        {"sessions.crash_backoff_max_s": 0.1},
        {"writer.backoff_max_s": 0.05},
        {"sessions.crash_backoff_s": 11.9},
        {"writer.restarts_max": 0, "engine.free_bytes_min": 0, "engine.busy_timeout_s": 0},
    ],
)
def test_values_that_just_fit_are_taken(overrides: dict[str, object]) -> None:
    check_settings(load_settings(environ={}, overrides=overrides))


@pytest.mark.parametrize(
    ("name", "value", "follows", "expected"),
    [
        ("sessions.turn_deadline_s", 0.3, "sessions.interrupt_grace_s", 0.15),
        ("shutdown_s", 0.5, "writer.drain_s", 0.5),
        ("sessions.live_actors_max", 20, "sessions.turns_running_max", 20),
        ("sessions.finalize_deadline_s", 45, "shutdown_s", 45),
    ],
)
def test_a_default_that_nobody_named_follows_what_was_given(
    name: str, value: float, follows: str, expected: float
) -> None:
    """One small setting alone is no contradiction; loading and checking agree."""
    loaded = load_settings(environ={}, overrides={name: value})
    table, _, field = name.rpartition(".")
    given = (
        Settings(**{field: value})  # type: ignore[arg-type]
        if not table
        else Settings(**{table: replace(getattr(Settings(), table), **{field: value})})
    )
    for page in (loaded, check_settings(given)):
        owner, _, followed = follows.rpartition(".")
        assert getattr(getattr(page, owner) if owner else page, followed) == expected


def test_a_relation_says_where_both_sides_come_from(tmp_path: Path) -> None:
    problem = the_problem(
        text="[sessions]\nfinalize_deadline_s = 20\n",
        folder=tmp_path,
        environ={"ONEPEN_SHUTDOWN_S": "15"},
        overrides={"writer.drain_s": 5},
    )
    assert problem == SettingsProblem(
        name="sessions.finalize_deadline_s",
        origin=f"{tmp_path / 'onepen.toml'}, [sessions]",
        problem="20.0 is too much, it must be at most shutdown_s "
        "(15.0, environment variable ONEPEN_SHUTDOWN_S): a session's close is a part of the end",
        hint="lower sessions.finalize_deadline_s or raise shutdown_s",
    )


@pytest.mark.parametrize("wrong", ["shutdown_s = -1", "shutdwn_s = 60", 'shutdown_s = "60"'])
def test_one_mistake_is_reported_once(wrong: str, tmp_path: Path) -> None:
    """A value that was not understood is not compared as if it were the default."""
    problem = the_problem(text=f"{wrong}\n[sessions]\nfinalize_deadline_s = 50\n", folder=tmp_path)
    assert problem.name in wrong


# Reporting -----------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = problems_of(
        "shutdwn_s = 3\n[engine]\nreaders_max = 0\n",
        folder=tmp_path,
        environ={"ONEPEN_WRITER__DRAINS": "3", "ONEPEN_SESSIONS__RECOVERY": "no"},
        overrides={
            "sessions": {"crashes_max": "x", "turns_running_max": 3},
            "sessions.live_actors_max": 2,
        },
    )
    assert [problem.name for problem in found] == [
        "shutdwn_s",
        "engine.readers_max",
        "sessions.recovery",
        "ONEPEN_WRITER__DRAINS",
        "sessions.crashes_max",
        "sessions.turns_running_max",
    ]


def test_a_mistake_in_a_covered_layer_is_still_reported() -> None:
    environ = {"ONEPEN_SHUTDOWN_S": "soon"}
    problem = the_problem(environ=environ, overrides={"shutdown_s": 40})
    assert problem.origin == "environment variable ONEPEN_SHUTDOWN_S"


def test_checking_reports_all_problems_at_once() -> None:
    sessions = SessionSettings(crashes_max=0, hook_deadline_s=20.0, finalize_deadline_s=19.0)
    found = checked(sessions=sessions, engine=EngineSettings(readers_max=-1))
    assert [p.name for p in found] == [
        "sessions.crashes_max",
        "engine.readers_max",
        "sessions.hook_deadline_s",
    ]


def test_the_error_shows_every_problem_with_its_hint() -> None:
    with pytest.raises(OnepenError) as caught:
        load_settings(environ={}, overrides={"shutdown_s": 0, "sesions": {}})
    assert isinstance(caught.value, SettingsError)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
        assert problem.hint in str(problem)
    assert str(caught.value).startswith("2 settings are wrong:\n- shutdown_s (code): ")
    assert caught.value.hint in str(caught.value)


# Files that can't be used --------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ={})
    (problem,) = caught.value.problems
    assert (problem.name, problem.origin) == ("", str(path))
    assert problem.problem == "can't be read: No such file or directory"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        load_settings(tmp_path, environ={})


def test_broken_toml_says_the_line(tmp_path: Path) -> None:
    problem = the_problem(text="shutdown_s = 3\n[sessions\n", folder=tmp_path)
    assert problem.origin == str(tmp_path / "onepen.toml")
    assert problem.problem.startswith("is not valid TOML: ")
    assert "line 2" in problem.problem


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"shutdown_s = " + b"1" * 5_000, b"shutdown_s = " + b"[" * 5_000],
    ids=["no text", "endless number", "endless nesting"],
)
def test_whatever_a_file_holds_the_error_is_ours(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "onepen.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="is not valid TOML"):
        load_settings(path, environ={})


def test_a_file_that_is_not_read_hides_no_other_problem(tmp_path: Path) -> None:
    found = problems_of(
        "[",
        folder=tmp_path,
        environ={"ONEPEN_ENGINE__READERS": "3"},
        overrides={"sessions.finalize_deadline_s": 50},
    )
    assert [problem.name for problem in found] == ["", "ONEPEN_ENGINE__READERS"]


# The reference -------------------------------------------------------------------------------


def test_the_page_loads_back_to_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "onepen.toml"
    path.write_text(settings_page())
    assert load_settings(path, environ={}) == Settings()


def test_the_page_has_every_name() -> None:
    """A page that lost a name would still load to the defaults."""
    page = tomllib.loads(settings_page())
    tables = {"sessions": SessionSettings, "writer": WriterSettings, "engine": EngineSettings}
    assert set(page) == set(Settings.__struct_fields__)
    for table, kind in tables.items():
        assert list(page[table]) == list(kind.__struct_fields__)


def test_every_setting_of_sessions_and_of_the_whole_is_described() -> None:
    described = settings_page().partition("[writer]")[0].splitlines()
    lines = [number for number, line in enumerate(described) if " = " in line]
    fields = (*SessionSettings.__struct_fields__, *DeliverySettings.__struct_fields__)
    assert len(lines) == len(fields) + 1
    for number in lines:
        assert described[number - 1].startswith("# "), described[number]
        assert described[number - 1].endswith("."), described[number]


def test_the_document_shows_the_page() -> None:
    blocks = blocks_of(DOCUMENT.read_text(encoding="utf-8"))
    assert [block.text for block in blocks if block.language == "toml"] == [settings_page()]


def test_the_document_shows_the_error_that_its_example_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(DOCUMENT.read_text(encoding="utf-8"))
    (shown,) = [block.text for block in blocks if block.language == "text"]
    example = next(block.text for block in blocks if "print(error)" in block.text)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue() == shown
