"""Every read view of an engine at once, for comparison with the model or with another run.

`names_in` gathers the names that units mention, `views_of` asks every view of a reader about each
of them. Two readers that agree on all of it hold the same data, as far as anybody can tell. Cursors
of pages are an engine's own business and left out: pages are followed to their end instead.

Must never look behind a reader: what no view shows is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from ....storage.errors import AmbiguousError, MissingError
from ....storage.records import DeliveryState, Draft, Search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ....storage.engine import Reader
    from ....storage.records import Message
    from ....storage.units import Unit

PAGE = 7  # small and odd, so that pages end in the middle of things


@dataclass
class Names:
    """Names that were mentioned, in the order of their appearance."""

    keys: dict[Any, None] = field(default_factory=dict)
    sessions: dict[Any, None] = field(default_factory=dict)
    uids: dict[Any, None] = field(default_factory=dict)
    turns: dict[Any, None] = field(default_factory=dict)
    inbound: dict[Any, None] = field(default_factory=dict)
    sources: dict[Any, None] = field(default_factory=dict)
    titles: dict[Any, None] = field(default_factory=dict)
    deliveries: dict[Any, None] = field(default_factory=dict)
    questions: dict[Any, None] = field(default_factory=dict)
    timers: dict[Any, None] = field(default_factory=dict)
    chunks: dict[Any, None] = field(default_factory=dict)
    marks: dict[Any, None] = field(default_factory=dict)
    times: dict[Any, None] = field(default_factory=dict)
    texts: dict[Any, None] = field(default_factory=dict)


_KIND_OF_FIELD = {
    "key": "keys",
    "session_id": "sessions",
    "parent_id": "sessions",
    "child_id": "sessions",
    "turn_id": "turns",
    "source": "sources",
    "title": "titles",
    "delivery_id": "deliveries",
    "timer_id": "timers",
    "at_ms": "times",
    "due_ms": "times",
    "next_ms": "times",
}


def names_in(units: Iterable[Unit], names: Names | None = None) -> Names:
    """The names in these units, added to those given."""
    names = Names() if names is None else names
    for unit in units:
        for command in unit.commands:
            _gather(command, names)
    return names


def _gather(command: Any, names: Names) -> None:
    for name in command.__struct_fields__:
        value: Any = getattr(command, name)
        if name in ("messages", "summary", "closing"):
            drafts = (value,) if isinstance(value, Draft) else value
            names.uids |= {draft.uid: None for draft in drafts}
            names.texts |= {draft.text: None for draft in drafts if draft.text}
        if value is not None and name in _KIND_OF_FIELD:
            getattr(names, _KIND_OF_FIELD[name])[value] = None
    if hasattr(command, "inbound_id"):
        names.inbound[command.source, command.inbound_id] = None
    if hasattr(command, "question_key"):
        names.questions[command.key, command.question_key] = None
    if hasattr(command, "blob_id"):
        names.chunks[command.blob_id, getattr(command, "index", 0)] = None
    if hasattr(command, "value"):
        names.marks[command.name] = None


def views_of(reader: Reader, names: Names) -> dict[str, Any]:
    """What the reader says about all of them; equal answers are equal values."""
    views: dict[str, Any] = {}

    def ask(view: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        asked = ", ".join([*map(repr, arguments), *(f"{k}={v!r}" for k, v in options.items())])
        try:
            answer = view(*arguments, **options)
        except (MissingError, AmbiguousError) as error:
            answer = f"{type(error).__name__}: {error}"
        views[f"{view.__name__}({asked})"] = _exact(answer)

    _ask_about_sessions(reader, names, ask)
    _ask_about_transfers(reader, names, ask)
    _ask_about_work(reader, names, ask)
    _ask_what_may_go(reader, names, ask)
    _search(reader, names, ask)
    return views


def _search(reader: Reader, names: Names, ask: Callable[..., None]) -> None:
    """Texts that were stored, as queries; each filter with one of them."""
    texts = list(names.texts)[:: max(1, len(names.texts) // 5)]
    for order in ("rank", "newest"):
        for text in texts:
            ask(_found(reader), text=text, order=order)
        ask(_found(reader), text=" OR ".join(texts), order=order)
    for text in texts[:1]:
        for field_, values in (
            ("session_id", names.sessions),
            ("key", names.keys),
            ("source", names.sources),
            ("role", ("user", "assistant")),
            ("since_ms", names.times),
            ("until_ms", names.times),
        ):
            for value in list(values)[:2]:
                ask(_found(reader), text=text, **{field_: value})
        ask(_found(reader), text=text, active=True)
    ask(reader.search_rebuilds)


def _found(reader: Reader) -> Callable[..., Any]:
    """All hits without their order, which is an engine's own; each message must be there once."""

    def found(**options: Any) -> Any:
        def page(after: Any) -> tuple[Iterable[Any], Any]:
            hits = reader.search(Search(**options, limit=PAGE, after=after))
            return hits.hits, hits.next

        hits = followed(page)
        places = sorted((hit.session_id, hit.message.seq) for hit in hits)
        if len(set(places)) < len(places):
            raise AssertionError(f"a message was found twice: {places}")
        return sorted(
            repr((_in_order(hit.message), hit.key, hit.source, hit.title)) for hit in hits
        )

    return found


def _exact(answer: Any) -> str:
    """The answer as text, equal only for equal content: in Python 1, 1.0 and True are one."""
    text = repr(answer)
    return text if "{" not in text else repr(_in_order(answer))


def _in_order(value: Any) -> Any:
    """The same with the members of every JSON object in one order, because theirs means nothing."""
    if isinstance(value, msgspec.Struct):
        fields = {name: _in_order(getattr(value, name)) for name in value.__struct_fields__}
        return (type(value).__name__, fields)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: _in_order(members[name]) for name in sorted(members)}
    if isinstance(value, list | tuple):
        items = [_in_order(item) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _ask_about_transfers(reader: Reader, names: Names, ask: Callable[..., None]) -> None:
    """What exports and imports look at; all pages but the first are the same with another place."""
    for key in (None, *names.keys):
        ask(reader.root_sessions, key=key)
        ask(reader.root_sessions, "session-2", 2, key=key)
    ask(reader.stored_rows)
    ask(reader.staged_sessions)
    for session_id in names.sessions:
        ask(reader.child_sessions, session_id)
        ask(reader.successor, session_id)
        ask(reader.rows_of, session_id, 1, PAGE)
        ask(reader.blobs_of, session_id)
        turns = reader.turns_of(session_id)
        ask(reader.turns_of, session_id)
        used = reader.usage_of(session_id)
        ask(reader.usage_of, session_id)
        if turns and used:
            ask(reader.turns_of, session_id, (turns[0].opened_ms, turns[0].id), PAGE)
            ask(reader.usage_of, session_id, used[0].call_id, PAGE)

    def originals() -> Any:
        return sorted(reader.originals(tuple(names.uids)), key=lambda m: m.uid)

    ask(originals)


def _ask_about_sessions(reader: Reader, names: Names, ask: Callable[..., None]) -> None:
    for key in names.keys:
        ask(reader.route, key)
        ask(reader.session_of_key, key)
        ask(_listed(reader), key=key)
    for source in (None, *names.sources):
        for archived in (None, False, True):
            ask(_listed(reader), source=source, archived=archived)
    times = list(names.times)[:: max(1, len(names.times) // 3)]
    for time in times:
        ask(_listed(reader), since_ms=time, archived=None)
        ask(_listed(reader), until_ms=time, archived=None)
    for title in names.titles:
        for found in (title, title.rpartition(" #")[0] or title, f"{title} #2"):
            ask(reader.find_session, found)
    for uid in names.uids:
        ask(reader.message, uid)
    for session_id in names.sessions:
        ask(reader.session, session_id)
        ask(reader.find_session, session_id)
        ask(reader.find_session, session_id[:-1])
        ask(reader.lineage, session_id)
        ask(reader.tip, session_id)
        ask(reader.revision, session_id)
        ask(reader.seqs, session_id, tuple(names.uids))
        ask(reader.usage, session_id)
        for seq in (-1, 0, 2):
            ask(reader.said_since, session_id, seq, PAGE)
        for include_inactive in (False, True):
            ask(_transcript(reader), session_id, include_inactive=include_inactive)
        for uid in list(names.uids)[:: max(1, len(names.uids) // 4)]:
            ask(reader.around, session_id, uid, before=2, after=1)


def _ask_what_may_go(reader: Reader, names: Names, ask: Callable[..., None]) -> None:
    """Pages are followed, because where one ends is an engine's own business."""

    def followed_to_the_end(view: Callable[..., Any]) -> Callable[..., Any]:
        def all_of_it(*arguments: Any, **options: Any) -> Any:
            found: list[Any] = []
            place: dict[str, Any] = {}
            while True:
                page, following = view(*arguments, **options, **place, limit=PAGE)
                found += [getattr(one, "id", one) for one in page]
                if following is None:
                    return sorted(found, key=repr)
                place = {"after": following}

        all_of_it.__name__ = view.__name__
        return all_of_it

    times = list(names.times)
    for time in times[:: max(1, len(times) // 3)]:
        ask(followed_to_the_end(reader.orphaned_rotations), time)
        ask(followed_to_the_end(reader.empty_sessions), time)
        for options in ({}, {"archived_only": True}, {"ended_only": True}):
            ask(followed_to_the_end(reader.quiet_sessions), time, **options)
        for kind in ("deliveries", "timers", "turns"):
            ask(followed_to_the_end(reader.old_work), kind, time)
    ask(followed_to_the_end(reader.unused_blobs))
    for session_id in names.sessions:
        ask(reader.originals_given, session_id)
    ask(_sorted_work(reader), "ann")
    for user in ("ann", "bob"):
        for session_id in names.sessions:
            ask(_part(reader), session_id, user)
            ask(_part(reader), session_id, user, 1)


def _sorted_work(reader: Reader) -> Callable[..., Any]:
    def work_of_user(user: str) -> Any:
        work = reader.work_of_user(user)
        return [sorted(getattr(work, name)) for name in work.__struct_fields__]

    return work_of_user


def _part(reader: Reader) -> Callable[..., Any]:
    def part_of_user(session_id: Any, user: str, after: int = -1) -> Any:
        part = reader.part_of_user(session_id, user, after=after, limit=2)
        return part.only, part.seqs, sorted(part.turn_ids), sorted(part.blob_ids)

    return part_of_user


def _ask_about_work(reader: Reader, names: Names, ask: Callable[..., None]) -> None:
    for key in (None, *names.keys):
        ask(reader.unfinished_turns, key)
        ask(reader.questions, key)
        ask(reader.questions, key, open_only=True)
        ask(_posted(reader), key=key)
    for key in names.keys:
        ask(reader.waiting_inbound, key)
        ask(reader.timers, key=key)
        for source in names.sources:
            ask(reader.last_delivery, key, source)
    for key, question_key in names.questions:
        ask(reader.question, key, question_key)
    for timer_id in names.timers:
        ask(reader.timer, timer_id)
    for turn_id in names.turns:
        ask(reader.turn, turn_id)
        ask(reader.turn_messages, turn_id)
        ask(reader.inbound_of_turn, turn_id)
        ask(reader.effects, turn_id)
        ask(reader.turn_usage, turn_id)
    for source, inbound_id in names.inbound:
        ask(reader.inbound, source, inbound_id)
    for source in (None, *names.sources):
        ask(reader.open_deliveries, source)
        ask(_posted(reader), source=source)
        if source is not None:
            ask(reader.first_deliveries, source)
            for time in list(names.times)[:: max(1, len(names.times) // 3)]:
                ask(reader.first_deliveries, source, now_ms=time)
            for key in names.keys:
                for after in (None, *list(names.deliveries)[:: max(1, len(names.deliveries) // 3)]):
                    ask(reader.lane_deliveries, source, key, after)
    for state in get_args(DeliveryState):
        ask(_posted(reader), state=state)
    for delivery_id in names.deliveries:
        ask(reader.delivery, delivery_id)
    for blob_id, index in names.chunks:
        ask(reader.blob, blob_id)
        ask(reader.blob_chunk, blob_id, index)
    for name in names.marks:
        ask(reader.mark, name)
    for time in (None, *list(names.times)[:: max(1, len(names.times) // 3)]):
        ask(reader.timers, time)
        ask(reader.expired_questions, time or 0)
        ask(reader.due_timers, time or 0)
        ask(reader.next_due_ms, time or 0)
    ask(reader.oldest_ended_inbound_ms)
    ask(reader.inbox_pruned_version)
    ask(reader.dead_letters)
    ask(reader.usage)


def _listed(reader: Reader) -> Callable[..., Any]:
    def listing(**options: Any) -> Any:
        return followed(lambda after: reader.listing(**options, limit=PAGE, after=after))

    return listing


def _posted(reader: Reader) -> Callable[..., Any]:
    def deliveries(**options: Any) -> Any:
        return followed(lambda after: reader.deliveries(**options, limit=PAGE, after=after))

    return deliveries


def _transcript(reader: Reader) -> Callable[..., Any]:
    def transcript(session_id: Any, **options: Any) -> Any:
        def page(after: tuple[int, int] | None) -> tuple[Iterable[Message], Any]:
            found = reader.transcript(session_id, **options, limit=PAGE, after=after)
            return found.messages, found.next

        return followed(page)

    return transcript


def followed(page: Callable[[Any], tuple[Iterable[Any], Any]]) -> tuple[Any, ...]:
    """All pages, one after the other."""
    rows: list[Any] = []
    cursors: list[Any] = [None]
    while True:
        found, after = page(cursors[-1])
        rows.extend(found)
        if after is None:
            return tuple(rows)
        if after in cursors:
            raise AssertionError(f"the page after {after} leads back to itself")
        cursors.append(after)
