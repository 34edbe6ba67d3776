"""How values must fit together, and the check of a whole page.

Keeps:
- Each relation is stated once, and holds for a page from code as for one that was loaded.
- A relation is judged only where all its sides are sound by themselves: one mistake, one problem.
- A default that nobody named follows a value that was given: a short `turn_deadline_s` alone is no
  contradiction.

Must never change a value that was given: it is taken as it is, or refused with everything that is
wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from .names import names_of, shown, table_names, wrong_value
from .page import Settings, SettingsError, SettingsProblem

if TYPE_CHECKING:
    from collections.abc import Mapping


class _AtMost(NamedTuple):
    """One setting that may not be larger than another; with `below`, not as large either."""

    low: str
    high: str
    why: str
    below: bool = False


class _GivesUp(NamedTuple):
    """Restarts that must fit into the period in which they are counted, pauses included."""

    restarts: str
    pause: str
    period: str


_RELATIONS = (
    _AtMost("sessions.finalize_deadline_s", "shutdown_s", "a session's close is a part of the end"),
    _AtMost("sessions.hook_deadline_s", "shutdown_s", "hooks are called at the end as well"),
    _AtMost("sessions.hook_deadline_s", "sessions.finalize_deadline_s", "a close calls hooks"),
    _AtMost("sessions.interrupt_grace_s", "shutdown_s", "the end interrupts what is running"),
    _AtMost("writer.drain_s", "shutdown_s", "the Writer's drain is a part of the end"),
    _AtMost(
        "sessions.interrupt_grace_s",
        "sessions.turn_deadline_s",
        "a turn would be given longer to stop than to run",
        below=True,
    ),
    _AtMost(
        "sessions.dedupe_kept_s",
        "sessions.history_kept_s",
        "a repeat may resume a turn, which needs what it did",
    ),
    _AtMost(
        "sessions.turns_running_max",
        "sessions.live_actors_max",
        "every running turn needs an actor in memory",
    ),
    _AtMost(
        "sessions.hold_bytes_max", "sessions.live_bytes_max", "what is held is in memory as well"
    ),
    _AtMost(
        "sessions.hold_bytes_max",
        "writer.bytes_waiting_max",
        "what one session holds must find room with the Writer",
    ),
    _AtMost(
        "writer.batch_bytes_max", "writer.bytes_waiting_max", "a batch is taken from what waits"
    ),
    _AtMost("sessions.crash_backoff_s", "sessions.crash_backoff_max_s", "pauses only grow"),
    _AtMost("deliveries.backoff_s", "deliveries.backoff_max_s", "pauses only grow"),
    _AtMost("writer.backoff_first_s", "writer.backoff_max_s", "pauses only grow"),
    _GivesUp("sessions.crashes_max", "sessions.crash_backoff_s", "sessions.crash_period_s"),
    _GivesUp("writer.restarts_max", "writer.backoff_first_s", "writer.restart_period_s"),
)


def follow(values: dict[str, object], origins: Mapping[str, str]) -> None:
    """Let defaults follow what was named, where a relation asks for it."""
    numbers = cast("dict[str, float]", values)
    limits = [relation for relation in _RELATIONS if isinstance(relation, _AtMost)]
    for relation in limits * len(limits):  # one may move what another one looks at
        if relation.low not in numbers or relation.high not in numbers:
            continue
        low, high = numbers[relation.low], numbers[relation.high]
        if low < high or (low == high and not relation.below):
            continue
        if relation.low not in origins:
            numbers[relation.low] = high / 2 if relation.below else high
        elif relation.high not in origins:
            numbers[relation.high] = low * 2 if relation.below else low


def misfits(
    values: Mapping[str, object], origins: Mapping[str, str]
) -> tuple[SettingsProblem, ...]:
    """Relations that do not hold, among the values that are there."""
    sound = cast("Mapping[str, float]", values)  # relations are between numbers only
    found: list[SettingsProblem] = []

    def told(name: str) -> str:
        return f"{name} ({sound[name]}, {origins.get(name, 'default')})"

    def note(name: str, problem: str, hint: str) -> None:
        origin = origins.get(name, "default")
        found.append(SettingsProblem(name=name, origin=origin, problem=problem, hint=hint))

    for relation in _RELATIONS:
        match relation:
            case _AtMost(low, high, why, below) if low in sound and high in sound:
                if sound[low] > sound[high] or (below and sound[low] == sound[high]):
                    must = "be less than" if below else "be at most"
                    problem = f"{sound[low]} is too much, it must {must} {told(high)}: {why}"
                    note(low, problem, f"lower {low} or raise {high}")
            case _GivesUp(restarts, pause, period) if {*relation} <= sound.keys():
                if sound[restarts] * sound[pause] >= sound[period]:
                    problem = (
                        f"{sound[restarts]} restarts with pauses of {told(pause)} never fall "
                        f"within {told(period)}, so that nothing would ever give up"
                    )
                    note(restarts, problem, f"lower {restarts} or {pause}, or raise {period}")
            case _:
                pass  # one side is wrong by itself, which was reported
    return tuple(found)


def check_settings(settings: Settings) -> Settings:
    """Types, ranges and relations of a page that was built in code; the page as it will be used.

    Raises `SettingsError`.
    """
    problems: list[SettingsProblem] = []
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    owners: dict[str, object] = {"": settings}
    for table in table_names():
        given: object = getattr(settings, table)
        default: object = getattr(Settings(), table)
        kind = type(default)
        if isinstance(given, kind):
            owners[table] = given
            continue
        problem = f"given {shown(given)}, expected {kind.__name__}"
        hint = f"leave it out to get {kind.__name__}()"
        problems.append(SettingsProblem(name=table, origin="code", problem=problem, hint=hint))
    for name, known in names_of(Settings).items():
        if known.table not in owners:
            continue
        given = getattr(owners[known.table], known.field)
        try:
            values[name] = known.read(given)
        except ValueError:
            problems.append(wrong_value(known, given, "code"))
            continue
        if given != known.default:
            origins[name] = "code"
    follow(values, origins)
    problems += misfits(values, origins)
    if problems:
        raise SettingsError(tuple(problems))
    return page_of(values)


def page_of(values: Mapping[str, object]) -> Settings:
    """The page that has these values, by dotted name."""
    page: dict[str, Any] = {table: {} for table in table_names()}
    for name, known in names_of(Settings).items():
        (page[known.table] if known.table else page)[known.field] = values[name]
    return msgspec.convert(page, Settings)
