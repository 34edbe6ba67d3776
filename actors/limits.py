"""How much sessions may use and how long they may take: one page of numbers for everything that
has a key.

Keeps:
- Everything has a limit, so there is no value for "without end".
- A field says in its annotation what it is for and what it may be. The reference in the
  documents and the checks of `runtime/settings.py` are both made of that, so that they can't
  drift apart.

Must never read a file, the environment or a clock: values are handed in. A struct that was built
in code is as unchecked as any other struct until `check_settings` has seen it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


def _bound(description: str) -> Meta:
    return Meta(ge=1, description=description)


def _seconds(description: str) -> Meta:
    return Meta(gt=0, description=description)


class SessionSettings(Struct, frozen=True, kw_only=True):
    """Bounds and patience of sessions, their turns and their actors."""

    # Turns
    turns_running_max: Annotated[int, _bound("Running turns in the whole runtime.")] = 64
    turn_deadline_s: Annotated[float, _seconds("How long one turn may run.")] = 900.0
    interrupt_grace_s: Annotated[
        float,
        _seconds("How long an agent may take to end after an interrupt before it is reported."),
    ] = 5.0
    hook_deadline_s: Annotated[float, _seconds("How long one call of a hook may take.")] = 5.0

    turn_tries_max: Annotated[
        int, _bound("Times that a crash may cut one turn; then its message is set aside.")
    ] = 3
    question_timeout_s: Annotated[
        float, _seconds("How long a question to a person stays open, unless it says otherwise.")
    ] = 24 * 3600.0
    delta_interval_s: Annotated[
        float, _seconds("Pieces of a message that come faster are shown together.")
    ] = 0.05

    dedupe_kept_s: Annotated[
        float, _seconds("How long an inbound id is known after its message was accepted.")
    ] = 7 * 24 * 3600.0

    history_kept_s: Annotated[
        float,
        _seconds("How long what was sent, fired, done and answered is kept as history."),
    ] = 90 * 24 * 3600.0

    # Actors and what they keep in memory
    idle_evict_s: Annotated[
        float, _seconds("Without work for this long, an actor leaves memory; it is not closed.")
    ] = 600.0
    live_actors_max: Annotated[int, _bound("Actors in memory.")] = 10_000
    live_bytes_max: Annotated[
        int, _bound("Bytes of transcripts in memory, all actors together.")
    ] = 512 * 1024 * 1024
    waiting_per_key_max: Annotated[
        int, _bound("Messages that may wait for one key; the next one is refused.")
    ] = 100
    mailbox_size_max: Annotated[int, _bound("Commands in the mailbox of one actor.")] = 256
    stream_window_events_max: Annotated[
        int, _bound("Events of a stream that are kept for listeners who are late.")
    ] = 1_000

    stream_window_bytes_max: Annotated[int, _bound("The same in bytes.")] = 1024 * 1024

    # What waits for the Writer, and what is not worth repeating
    hold_rows_max: Annotated[int, _bound("Rows that a session holds until they are posted.")] = 256
    hold_bytes_max: Annotated[int, _bound("The same in bytes.")] = 4 * 1024 * 1024
    useless_compressions_max: Annotated[
        int, _bound("Compressions without gain, one after the other, before no more are tried.")
    ] = 3

    # Crashes and restarts
    recovery: Annotated[
        Literal["mark", "resume"],
        Meta(description="What a start does with turns that a crash cut: mark or resume them."),
    ] = "mark"
    crashes_max: Annotated[
        int, _bound("Crashes of one actor, within the period, before it is not restarted.")
    ] = 5
    crash_period_s: Annotated[float, _seconds("The period in which crashes are counted.")] = 60.0
    crash_backoff_s: Annotated[float, _seconds("The pause before the first restart.")] = 0.1
    crash_backoff_max_s: Annotated[float, _seconds("The longest pause before a restart.")] = 30.0

    # Beginning and end
    finalize_deadline_s: Annotated[float, _seconds("How long one session's close may take.")] = 10.0
    load_messages_page: Annotated[int, _bound("Messages per read while a session is loaded.")] = 500
    recovery_concurrency_max: Annotated[
        int, _bound("Keys that are recovered at the same time after a start.")
    ] = 64


class DeliverySettings(Struct, frozen=True, kw_only=True):
    """Bounds and patience of what is sent."""

    running_max: Annotated[int, _bound("Deliveries under way at once, for each source.")] = 64
    waiting_max: Annotated[
        int,
        _bound("Deliveries in memory, for each source; beyond that only the first of each key."),
    ] = 10_000
    deadline_s: Annotated[
        float,
        _seconds("How long one attempt may take, and whoever took a delivery to acknowledge it."),
    ] = 30.0
    tries_max: Annotated[int, _bound("Attempts before a delivery is given up.")] = 10
    backoff_s: Annotated[float, _seconds("The pause behind the first attempt that failed.")] = 0.5
    backoff_max_s: Annotated[float, _seconds("The longest pause between attempts.")] = 60.0
