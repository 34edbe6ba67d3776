"""What must hold in every state, and over every step. The page's third table.

Keeps: each rule is judged from the data alone, with no help from the rules that made them, so that
a mistake there does not hide itself here. A rule returns what is wrong, or nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .state import message_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .state import Actor, Content, Label, Session, State, Unit


def violations(state: State) -> Iterator[str]:
    """What is wrong with a state."""
    promised = {c.message for c in state.clients if c.status == "acknowledged"}
    for content in state.disk.possible:
        yield from _content(content)
        yield from _promises(content, promised, state.denied)
    if state.disk.shown and any(p.up for p in state.processes):
        yield "what is read is durable (INV-2): a commit can be read whose sync nobody has seen"
    visible = state.disk.visible
    owners = [p for p in state.processes if p.up and p.epoch == visible.epoch]
    if len(owners) > 1:
        yield "one writer (INV-12): two processes have the stored epoch"
    for process in owners:
        for actor in process.actors:
            yield from _memory(visible, actor)


def _content(content: Content) -> Iterator[str]:
    originals = Counter(
        message_of(uid) for session in content.sessions for uid in session.rows[session.carried :]
    )
    for message, count in originals.items():
        if count > 1:
            yield f"exactly once (INV-1): {message} is stored {count} times"
    routed = Counter(key.session for key in content.keys)
    for key in content.keys:
        session = content.session(key.session)
        if routed[key.session] > 1:
            yield f"one current session (INV-6): {key.session} is in two routes"
        if session is not None and session.ended:
            yield f"one current session (INV-6): {key.name} names {session.id}, rotated away"
        if session is not None and session.key != key.name:
            yield f"one current session (INV-6): {key.name} names {session.id} of {session.key}"
    for session in content.sessions:
        yield from _lineage(content, session)


def _lineage(content: Content, session: Session) -> Iterator[str]:
    children = [child for child in content.sessions if child.parent == session.id]
    if len(children) != session.ended:
        yield f"rotation is whole (INV-6): {session.id} has {len(children)} children"
    for child in children:
        # The summary stands for the first row. Whatever came behind it is in the child, in order;
        # what is not came behind the rotation (INV-7).
        if child.rows[1 : child.carried] != session.rows[1:]:
            yield f"no write behind a rotation (INV-7): {session.id} has rows that {child.id} lacks"


def _promises(content: Content, promised: set[str], denied: tuple[str, ...]) -> Iterator[str]:
    rows = {uid for session in content.sessions for uid in session.rows}
    stored = {message_of(uid) for uid in rows}
    lost = sorted(promised - stored)
    if lost:
        yield f"acknowledged is durable (INV-2): {', '.join(lost)} may be lost"
    things = rows | {session.id for session in content.sessions} | {*content.switched}
    told = sorted(things.intersection(denied))
    if told:
        yield f"never told wrong (INV-11): {', '.join(told)} was told to be not stored"


def _memory(visible: Content, actor: Actor) -> Iterator[str]:
    """Of an actor whose incarnation is the key's: durable prefix and posted tail (INV-4, 10)."""
    key = visible.key(actor.key)
    if actor.stage != "ready" or key.incarnation != actor.incarnation:
        return
    who = f"the actor of {actor.key}"
    if actor.session != key.session:
        # It may have moved already: its receipt is on the way, and appends are held until then.
        if actor.moving != key.session:
            yield f"memory follows storage (INV-8): {who} is in {actor.session}, not {key.session}"
        return
    session = visible.session(actor.session)
    rows = () if session is None else session.rows
    if actor.rows[: len(rows)] != rows:
        yield f"memory is prefix and tail (INV-4): {who} has {actor.rows}, stored is {rows}"


def step_violations(before: State, label: Label, after: State) -> Iterator[str]:
    """What is wrong with a step."""
    old, new = before.disk.visible, after.disk.visible
    if label[0] == "apply":
        yield from _authors(old, before, after)
    if old is new or label[0] == "power loss":
        return
    for process, next_process in zip(before.processes, after.processes, strict=True):
        committed = process.phase == "staged" and next_process.phase in ("committed", "staged")
        if committed and old != new and process.epoch != old.epoch:
            yield "one writer (INV-12): a commit under an epoch that is no longer the stored one"
    if new.epoch < old.epoch:
        yield "the epoch never goes back (INV-12)"
    for key in old.keys:
        moved = new.key(key.name)
        if moved.incarnation < key.incarnation or moved.version < key.version:
            yield f"incarnation and version never go back (INV-12): {key.name}"
    for session in old.sessions:
        later = new.session(session.id)
        if later is None or later.rows[: len(session.rows)] != session.rows:
            yield f"a transcript only grows (INV-4): {session.id}"
        elif session.ended and later.rows != session.rows:
            yield f"no write behind a rotation (INV-7): {session.id} has grown"


def _authors(stored: Content, before: State, after: State) -> Iterator[str]:
    """Each unit that changes something is of the key's incarnation, as it is by then."""
    at = next(n for n, p in enumerate(after.processes) if p != before.processes[n])
    process = after.processes[at]
    current = {key.name: key.incarnation for key in stored.keys}
    for unit, receipt in zip(process.ledger, process.receipts, strict=False):
        if receipt == "durable":
            yield from _author(current, unit)


def _author(current: dict[str, tuple[int, int]], unit: Unit) -> Iterator[str]:
    if unit.kind == "open":
        current[unit.key] = unit.incarnation
    elif current[unit.key] != unit.incarnation:
        yield f"no late write (INV-12): a unit of {unit.incarnation} changes {unit.key}"
    if unit.kind == "switch":
        current[unit.loser] = unit.loser_incarnation


def is_settled(state: State) -> bool:
    """Whether everything that was posted or asked for has found its end."""
    answered = all(c.status in ("acknowledged", "refused") for c in state.clients)
    return answered and all(
        not process.ledger and not any(actor.moving or actor.held for actor in process.actors)
        for process in state.processes
    )
