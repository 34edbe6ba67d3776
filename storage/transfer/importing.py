"""How a file becomes units: checked, compared, staged, published. A generator of what it needs.

| stage   | what is done                                                   | written     |
| ------- | -------------------------------------------------------------- | ----------- |
| check   | every line of the file (`checking.py`)                         | nothing     |
| compare | with what is stored under the same ids (`comparing.py`)        | nothing     |
| stage   | rows of new sessions, hidden, in slices (`staging.py`)         | unseen      |
| extend  | rows of sessions that are here, behind theirs (`extending.py`) | what is new |
| publish | a lineage at a time, in one unit                               | what is new |

Keeps: whoever drives it does what it asks for, in order, and hands back the answer: `Read` a view,
`Write` a unit and wait until it is durable, `Hold` a key so that nobody else writes to it until
`Release`. Everything that it asks for can be asked for again: an import that was cut off is begun
again and goes on where it was.

Must never know who drives it: it opens nothing but the file, and takes no lock.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from msgspec import Struct
from msgspec.structs import replace

from ..commands import CreateSession, DropStaged, OpenIncarnation, PublishSession, SetRoute
from ..identity import Incarnation, Seq, SessionId, SessionKey
from . import looking
from .asking import Ask, Asking, Hold, Release, Told, write
from .checking import Checker
from .comparing import block_of, compare, rows_in
from .extending import extending
from .format import SessionLine, decoded
from .staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ..commands import AnyCommand
    from ..records import SessionFacts
    from ..sqlite.scratch import Planned, Scratch, Status
    from .files import Source

_SESSIONS_PER_UNIT = 64
_PAGE = 200
_DROPPED_PER_UNIT = 500
_TITLES_TOLD_MAX = 100
_FIRST = Incarnation(1)  # below that of every actor


class ImportReport(Struct, frozen=True, kw_only=True):
    """What was imported, or what would be.

    `deleted` sessions are tombstones here and stay so. `titles` tells, for a hundred sessions at
    most, which title they were to have and which they got, because it was taken. `reopened` ones
    had ended by a compression whose child is nowhere.
    """

    sessions_new: int = 0
    sessions_extended: int = 0
    sessions_unchanged: int = 0
    sessions_deleted: int = 0
    messages: int = 0
    blobs: int = 0
    reopened: int = 0
    routes: int = 0
    titles_changed: int = 0
    titles: tuple[tuple[SessionId, str, str | None], ...] = ()
    left_over: int = 0


@final
class _Counts(Struct):
    sessions_new: int = 0
    sessions_extended: int = 0
    sessions_unchanged: int = 0
    sessions_deleted: int = 0
    messages: int = 0
    reopened: int = 0
    routes: int = 0
    titles_changed: int = 0
    left_over: int = 0


def importing(
    source: Source,
    scratch: Scratch,
    *,
    dry_run: bool = False,
    is_live: Callable[[SessionKey], bool] = lambda _: False,
) -> Generator[Ask, Any, ImportReport]:
    """Import a file. `is_live` tells whether somebody serves a key at this moment.

    Raises `ImportFileError` and `ConflictError` before anything is written.
    """
    steps = _Import(source, scratch, is_live)
    yield from steps.check()
    yield from steps.compare()
    if not dry_run:
        yield from steps.drop_left_overs()
        yield from steps.import_all()
    return steps.report()


@final
class _Import:
    def __init__(
        self,
        source: Source,
        scratch: Scratch,
        is_live: Callable[[SessionKey], bool],
    ) -> None:
        self._source = source
        self._scratch = scratch
        self._is_live = is_live
        self._count = _Counts()
        self._titles: list[tuple[SessionId, str, str | None]] = []
        self._rows_total = 0
        self._staging = Staging()
        self._group: list[tuple[SessionLine, SessionFacts]] = []  # is published together

    def report(self) -> ImportReport:
        counts = {name: getattr(self._count, name) for name in _Counts.__struct_fields__}
        return ImportReport(**counts, blobs=self._staging.blobs, titles=tuple(self._titles))

    def _told(self) -> Told:
        return Told("import", min(self._staging.rows, self._rows_total), self._rows_total)

    # Check -----------------------------------------------------------------------------------

    def check(self) -> Asking:
        checker = Checker(self._source, self._scratch)
        for _ in checker.check():
            yield Told("check", self._source.position, self._source.size_bytes)
        self._rows_total = checker.counted.messages
        self._source.check_unchanged()
        yield Told("check", self._source.size_bytes, self._source.size_bytes)

    # Compare ---------------------------------------------------------------------------------

    def compare(self) -> Asking:
        sessions = self._scratch.sessions()
        done = 0
        while page := list(islice(sessions, _PAGE)):
            lines = [decoded(planned.line) for planned in page]
            found = yield looking.standings_of(lines)
            for planned, line, standing in zip(page, lines, found, strict=True):
                status, start = yield from compare(self._source, planned, line, standing)
                self._scratch.plan(planned.place, status, start)
                self._count_session(line, status, start)
                done += line.messages
            yield Told("compare", min(done, self._rows_total), self._rows_total)

    def _count_session(self, line: SessionLine, status: Status, start: int) -> None:
        count = self._count
        count.sessions_new += status in ("new", "restart")
        count.sessions_extended += status == "extend"
        count.sessions_unchanged += status == "same"
        count.sessions_deleted += status == "kept"
        if status in ("new", "restart", "extend") and not line.deleted:
            count.messages += line.messages - (start if status == "extend" else 0)

    # Left-overs ------------------------------------------------------------------------------

    def drop_left_overs(self) -> Asking:
        """What an import has staged that nobody goes on with."""
        after = ""
        while page := (yield looking.staged_behind(after)):
            for staged in page:
                if not staged.is_parent and not self._scratch.has_session(staged.id):
                    yield from self._drop(staged.id, staged.next_seq, whole=True)
                    self._count.left_over += 1
            after = page[-1].id

    def _drop(self, session_id: SessionId, next_seq: int, *, whole: bool) -> Asking:
        while next_seq > 0:
            next_seq = max(0, next_seq - _DROPPED_PER_UNIT)
            yield write(DropStaged(session_id=session_id, from_seq=Seq(next_seq)))
        if not whole:
            return
        while True:
            usage, turns = yield looking.work_in(session_id)
            if not usage and not turns:
                break
            calls = tuple(one.call_id for one in usage)
            ids = tuple(turn.id for turn in turns)
            yield write(DropStaged(session_id=session_id, from_seq=Seq(0), calls=calls, turns=ids))
        yield write(DropStaged(session_id=session_id, from_seq=Seq(0), whole=True))

    # Stage and publish -----------------------------------------------------------------------

    def import_all(self) -> Asking:
        for planned in self._scratch.sessions():
            line: SessionLine = decoded(planned.line)
            if self._begins_group(line):
                yield from self._publish()
            if planned.status in ("new", "restart"):
                yield from self._stage(planned, line)
            elif planned.status == "extend":
                yield from self._publish()
                yield from self._extend(planned, line)
            yield self._told()
        yield from self._publish()
        self._source.check_unchanged()

    def _begins_group(self, line: SessionLine) -> bool:
        """A lineage is published at once; only where nothing is rotated a long one may be cut."""
        if line.edge != "rotation" or line.parent_id is None:
            return len(self._group) >= _SESSIONS_PER_UNIT
        return self._scratch.status_of(line.parent_id) not in ("new", "restart")

    def _stage(self, planned: Planned, line: SessionLine) -> Asking:
        facts = line.facts()
        if line.end_kind == "rotation" and not self._scratch.is_rotated(line.id):
            found = yield looking.successor_of(line.id)
            if found is None:
                ended: tuple[Any, Any, Any] = (None, None, None)
                if line.deleted:
                    ended = (line.ended_ms, "deleted", "boundary")
                self._count.reopened += not line.deleted
                facts = replace(facts, ended_ms=ended[0], end_reason=ended[1], end_kind=ended[2])
        (stored,) = yield looking.session_of(line.id)
        if stored is None:
            yield from self._staging.add(
                CreateSession(
                    session_id=line.id,
                    key=line.key,
                    at_ms=line.started_ms,
                    source=line.source,
                    hidden=True,
                )
            )
        elif planned.status == "restart":
            yield from self._drop(line.id, stored.next_seq, whole=False)
        staging = self._staging
        yield from staging.surroundings(line, block_of(self._source, planned))
        rows = rows_in(self._source, planned, line)
        staging.rows += sum(1 for _ in islice(rows, planned.start))
        yield from staging.stage_rows(line, rows)
        self._group.append((line, facts))

    def _extend(self, planned: Planned, line: SessionLine) -> Asking:
        staging = self._staging
        yield Hold(line.key)
        yield from staging.surroundings(line, block_of(self._source, planned))
        yield from staging.flush()
        rows = rows_in(self._source, planned, line)
        prepared = partial(staging.prepared, line)
        yield from extending(line.id, rows, planned.start, line.messages, line.last_ms, prepared)
        staging.rows += line.messages
        yield Release()

    # Publishing ------------------------------------------------------------------------------

    def _publish(self) -> Asking:
        """All that is staged of a few lineages, in one unit."""
        yield from self._staging.flush()
        group, self._group = self._group, []
        if not group:
            return
        border = yield looking.border_of([line for line, _ in group])
        commands: list[AnyCommand] = []
        inside = {line.id for line, _ in group}
        for line, facts in group:
            if line.parent_id is not None and line.parent_id not in inside:
                (parent,) = yield looking.session_of(line.parent_id)
                if parent is None:
                    inside.add(line.parent_id)
                    commands.append(
                        CreateSession(
                            session_id=line.parent_id,
                            key=line.key,
                            at_ms=line.started_ms,
                            hidden=True,
                        )
                    )
            commands.append(PublishSession(session_id=line.id, facts=facts))
        if border is not None:
            yield Hold(border)
        commands += yield from self._routes([line for line, _ in group], border)
        yield write(*commands)
        if border is not None:
            yield Release()
        yield from self._look_at_titles([line for line, _ in group])

    def _routes(
        self, lines: list[SessionLine], border: SessionKey | None
    ) -> Generator[Ask, Any, list[AnyCommand]]:
        """A key that has no session, and that nobody serves, gets the one that it had."""
        wanted = [line for line in lines if line.current and line.key != border]
        routes = yield looking.routes_of([line.key for line in wanted])
        commands: list[AnyCommand] = []
        for line, route in zip(wanted, routes, strict=True):
            if (route is not None and route.session_id is not None) or self._is_live(line.key):
                continue
            if route is None:
                commands.append(OpenIncarnation(key=line.key, incarnation=_FIRST))
            commands.append(
                SetRoute(
                    key=line.key,
                    session_id=line.id,
                    replaces=0 if route is None else route.route_version,
                    at_ms=line.started_ms,
                )
            )
            self._count.routes += 1
        return commands

    def _look_at_titles(self, lines: list[SessionLine]) -> Asking:
        titled = [line for line in lines if line.title is not None]
        if not titled:
            return
        found = yield looking.sessions_of([line.id for line in titled])
        for line, session in zip(titled, found, strict=True):
            given = None if session is None else session.title
            if line.title is not None and given != line.title:
                self._count.titles_changed += 1
                if len(self._titles) < _TITLES_TOLD_MAX:
                    self._titles.append((line.id, line.title, given))
