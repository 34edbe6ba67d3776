"""What a stress test does, as one page of numbers: the options of the command, and the profiles.

Keeps: a plan is data, its fields carry their own limits and descriptions, and the command line is
made of them; whatever two processes must agree on is in it. `command_of` writes the command that
runs the same plan again.

Must never draw anything: `script` does.
"""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ...actors.sources import BUSY_POLICIES
from ...storage.errors import OnepenError
from ..settings import ENVIRONMENT_PREFIX, Settings, load_settings

CHILD = "onepen.runtime.stress.child"
"""The process under test."""

_SHARE_SUM_MAX = 1.0


class PlanError(OnepenError):
    """A plan that can't be carried out."""

    hint = "see onepen stress --help"


def _share(description: str) -> Meta:
    return Meta(ge=0, le=1, description=description)


def _count(description: str) -> Meta:
    return Meta(ge=1, le=100_000, description=description)


def _seconds(description: str) -> Meta:
    return Meta(ge=0, le=31_536_000, description=description)


class Plan(Struct, frozen=True, kw_only=True):
    """Every number of a stress test. Shares are of messages, or of steps, from 0 to 1."""

    seed: Annotated[int, Meta(ge=0, le=2**53, description="Everything is drawn from it.")] = 1
    sessions: Annotated[int, _count("Conversations at the same time.")] = 50
    duration_s: Annotated[
        float, _seconds("How long people begin anything new, from when it serves.")
    ] = 30.0

    # What ends the process
    kill_every_s: Annotated[
        float, _seconds("Mean time between two ends of the process, mostly SIGKILL; 0 for none.")
    ] = 5.0
    orderly: Annotated[
        float, _share("Ends that are asked for, by SIGTERM or SIGINT, and not SIGKILL.")
    ] = 0.2
    early: Annotated[float, _share("Starts that are killed before or while they recover.")] = 0.15

    # Messages
    rate: Annotated[
        float, Meta(ge=0, le=1e6, description="Messages per second, all together; 0 for no pause.")
    ] = 0.0
    unanswered_max: Annotated[
        int, _count("Messages of one conversation that may wait for an answer.")
    ] = 3
    size_min: Annotated[int, Meta(ge=1, le=500_000, description="Characters of a message.")] = 20
    size_max: Annotated[
        int, Meta(ge=1, le=500_000, description="At most; drawn evenly on a logarithmic scale.")
    ] = 4_000
    duplicates: Annotated[float, _share("Messages that are sent again, now or later.")] = 0.1
    reordered: Annotated[float, _share("Messages that are overtaken by the next one.")] = 0.05
    cancels: Annotated[float, _share("Messages whose caller is cancelled, and sends again.")] = 0.05
    busy: Annotated[str, Meta(description="Mix of busy policies, with their weights.")] = (
        "queue=8,collect=1,steer=1,interrupt=0.5,latest=0.5,reject=0.5"
    )

    # The agent
    latency_min_s: Annotated[float, _seconds("How long an agent takes.")] = 0.001
    latency_max_s: Annotated[float, _seconds("At most; drawn evenly on a logarithmic scale.")] = 0.2
    failing: Annotated[float, _share("Turns whose agent raises.")] = 0.03
    hanging: Annotated[float, _share("Turns whose agent hangs until the deadline.")] = 0.002
    turn_deadline_s: Annotated[
        float, Meta(gt=0, le=86_400, description="How long a turn may run.")
    ] = 3.0
    streaming: Annotated[float, _share("Turns that are answered piece by piece.")] = 0.2
    saying: Annotated[float, _share("Turns with an interim message.")] = 0.1
    tools: Annotated[float, _share("Turns with a tool call and a side effect.")] = 0.25
    questions: Annotated[float, _share("Turns that ask a person.")] = 0.02
    history_max: Annotated[
        int, _count("Messages of history from which on an agent rotates, or compacts.")
    ] = 24

    # What is done to conversations, as shares of steps
    interrupts: Annotated[float, _share("Messages behind which the turn is interrupted.")] = 0.05
    rotations: Annotated[float, _share("Rotations on request.")] = 0.01
    compactions: Annotated[float, _share("Compactions on request.")] = 0.01
    switches: Annotated[float, _share("Switches between two sessions.")] = 0.03
    resets: Annotated[float, _share("Resets.")] = 0.01
    rewinds: Annotated[float, _share("Rewinds.")] = 0.02

    # The world around
    refusing: Annotated[float, _share("Deliveries that the platform refuses at first.")] = 0.03
    losing: Annotated[float, _share("Deliveries that are shown, and their receipt is lost.")] = 0.03
    following: Annotated[float, _share("Conversations whose events are followed.")] = 0.2
    intruders: Annotated[
        float, _share("Ends before which a second process tries to open the file.")
    ] = 0.3

    # The runtime
    synchronous: Annotated[
        Literal["FULL", "NORMAL"], Meta(description="As the setting engine.synchronous.")
    ] = "FULL"
    settings: Annotated[
        dict[str, str], Meta(description="Settings by name, over those of the plan.")
    ] = {}

    # Limits
    drain_s: Annotated[
        float, Meta(gt=0, le=86_400, description="How long everything may take to come to an end.")
    ] = 30.0
    request_s: Annotated[
        float, Meta(gt=0, le=86_400, description="How long an acknowledgement may take.")
    ] = 30.0
    memory_max_mb: Annotated[
        int, Meta(ge=0, description="Memory of the process, in MiB; 0 for no limit.")
    ] = 1_024
    memory_growth_max: Annotated[
        float,
        Meta(ge=0, description="Growth of memory in half of a long life; 0 is not judged."),
    ] = 0.0
    loop_gap_p99_max_ms: Annotated[
        float, Meta(ge=0, description="99 of 100 gaps of the event loop; 0 is not judged.")
    ] = 0.0


PROFILES: dict[str, dict[str, Any]] = {
    "smoke": {"sessions": 12, "duration_s": 5.0, "kill_every_s": 1.5, "drain_s": 30.0},
    "default": {},
    "heavy": {
        "sessions": 500,
        "duration_s": 300.0,
        "kill_every_s": 8.0,
        "size_max": 40_000,
        "latency_max_s": 1.0,
        "unanswered_max": 6,
        "request_s": 120.0,
        "drain_s": 120.0,
    },
    # What is kept in memory on purpose is full soon, so that a leak shows.
    "soak": {
        "sessions": 200,
        "duration_s": 60.0,
        "kill_every_s": 15.0,
        "orderly": 0.5,
        "rate": 200.0,
        "cancels": 0.15,
        "size_max": 600,
        "history_max": 8,
        "settings": {"sessions.stream_window_events_max": "50"},
        "drain_s": 60.0,
        "memory_max_mb": 256,
        "memory_growth_max": 0.10,
        "loop_gap_p99_max_ms": 50.0,
    },
}


def plan_of(given: dict[str, Any], profile: str = "default") -> Plan:
    """A profile with what was given, checked. Raises `PlanError`."""
    try:
        values = {**PROFILES[profile], **given}
        values["settings"] = {**PROFILES[profile].get("settings", {}), **given.get("settings", {})}
        plan = msgspec.convert(values, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(f"the plan is wrong: {error}") from error
    for low, high in (("size_min", "size_max"), ("latency_min_s", "latency_max_s")):
        if getattr(plan, low) > getattr(plan, high):
            raise PlanError(f"{low} is more than {high}", hint=f"lower {low} or raise {high}")
    moves = plan.rotations + plan.compactions + plan.switches + plan.resets + plan.rewinds
    if moves + plan.reordered > _SHARE_SUM_MAX:
        what = "rotations, compactions, switches, resets, rewinds and reordered"
        raise PlanError(f"{what} are {moves + plan.reordered:g} together", hint="stay below 1")
    busy_mix(plan.busy)
    return plan


@lru_cache(maxsize=4)
def busy_mix(busy: str) -> dict[str, float]:
    """The weights of the busy policies. Raises `PlanError`."""
    mix: dict[str, float] = {}
    hint = f"write like queue=8,steer=1, of {', '.join(BUSY_POLICIES)}"
    for part in busy.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            mix[name] = float(weight or 1)
        except ValueError:
            raise PlanError(f"busy: {weight!r} is no weight", hint=hint) from None
        if name not in BUSY_POLICIES:
            raise PlanError(f"busy: {name!r} is no policy", hint=hint)
        if not 0 <= mix[name] < float("inf"):
            raise PlanError(f"busy: {weight} is no weight", hint=hint)
    if not sum(mix.values()):
        raise PlanError("busy: nothing has a weight", hint=hint)
    return mix


def option_of(field: str) -> str:
    """The name of a field on the command line: `kill_every_s` is `--kill-every`."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def command_of(plan: Plan) -> str:
    """The command that runs the same plan, on another file, in another time."""
    default, words = Plan(), ["onepen", "stress"]
    for field in plan.__struct_fields__:
        value = getattr(plan, field)
        if field == "settings":
            words += [part for one in value.items() for part in ("--set", "=".join(one))]
        elif value != getattr(default, field) or field in ("seed", "sessions", "duration_s"):
            words += [option_of(field), f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def settings_of(plan: Plan) -> Settings:
    """The runtime's settings under this plan. Raises `SettingsError`."""
    values: dict[str, object] = {
        "shutdown_s": min(30.0, plan.drain_s),
        "sessions.turn_deadline_s": plan.turn_deadline_s,
        "sessions.question_timeout_s": 10.0,
        "deliveries.backoff_s": 0.02,
        "deliveries.backoff_max_s": 0.5,
        "deliveries.tries_max": 1_000,  # so that none is given up, however bad the platform is
        "engine.synchronous": plan.synchronous,
    }
    variables = {
        ENVIRONMENT_PREFIX + name.replace(".", "__").upper(): value
        for name, value in plan.settings.items()
    }
    overrides = {name: value for name, value in values.items() if name not in plan.settings}
    return load_settings(environ=variables, overrides=overrides)
