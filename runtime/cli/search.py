"""`onepen search`: messages that hold some words, in all conversations or in a few."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any, get_args

import click
import trio
from rich.text import Text

from ...storage.identity import SessionId, SessionKey
from ...storage.records import Role, Search
from ..searching import LIMIT_MAX, check_search, find_page
from .database import looking_at
from .screen import Screen, shown, table, when, with_database, with_screen

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

    from ...storage.engine import Reader
    from ...storage.records import Hit, Hits

_MARKS = ("\x02", "\x03")  # no text that is shown has them
_DAMAGED = "the index is damaged and the messages were read instead; try `onepen doctor`"
_BUILDING = "the index is still being made: what is not in it yet was read instead"


@click.command()
@click.argument("text")
@click.option("--newest", is_flag=True, help="The last one first, and not the best one.")
@click.option("--source", help="Only in a source, like telegram.")
@click.option("--key", help="Only under a session key.")
@click.option("--session", help="Only in a session: an id, the beginning of one, or a title.")
@click.option("--user", help="Only what a user said.")
@click.option("--role", type=click.Choice(get_args(Role)), help="Only messages of a role.")
@click.option("--since", type=click.DateTime(), help="Only from this local time on.")
@click.option("--until", type=click.DateTime(), help="Only before this local time.")
@click.option("--active", is_flag=True, help="Without what a summary stands for.")
@click.option("--limit", type=click.IntRange(1, LIMIT_MAX), default=20, show_default=True)
@with_database
@with_screen
def search(
    screen: Screen,
    database: Path,
    text: str,
    newest: bool,  # noqa: FBT001
    session: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    **filters: Any,
) -> None:
    """Messages that hold all the words of TEXT.

    \b
    "a phrase"   words in a row        begin*   words that begin so
    -word        without it            OR       either side of it
    """
    with looking_at(database) as onlooker:
        session_id: SessionId | None = None
        if session is not None:
            with onlooker.reading() as reader:
                session_id = reader.find_session(session).id
        wanted = Search(
            text=text,
            order="newest" if newest else "rank",
            session_id=session_id,
            key=None if key is None else SessionKey(key),
            since_ms=_ms(since),
            until_ms=_ms(until),
            marks=("«", "»") if screen.as_json else _MARKS,
            **filters,
        )
        check_search(wanted)

        async def read(view: Callable[[Reader], Hits]) -> Hits:
            with onlooker.reading() as reader:
                return view(reader)

        found = trio.run(find_page, read, wanted)
    screen.show(found, lambda: _drawn(found))
    if found.index != "ready":
        screen.warn(_DAMAGED if found.index == "damaged" else _BUILDING)
    if found.next is not None and not screen.as_json:
        screen.warn(f"there may be more: --limit {min(LIMIT_MAX, wanted.limit * 4)} shows them")


def _ms(time: datetime | None) -> int | None:
    if time is None:
        return None
    try:
        return int(time.timestamp() * 1000)
    except (ValueError, OverflowError):  # local time has no first day of the calendar
        return int(time.replace(tzinfo=UTC).timestamp() * 1000)


def _drawn(found: Hits) -> Any:
    if not found.hits:
        return Text("nothing was found", style="dim")
    return table(
        ("when", "who", "session", "key", "what was said"),
        [
            (
                when(hit.message.created_ms),
                hit.message.role,
                hit.title or hit.session_id[:16],
                hit.key,
                _marked(hit),
            )
            for hit in found.hits
        ],
    )


def _marked(hit: Hit) -> Text:
    """The snippet, with what was looked for in bold."""
    first, *rest = hit.snippet.split(_MARKS[0])
    said = Text(shown(first))
    for piece in rest:
        found, _, behind = piece.partition(_MARKS[1])
        said.append(shown(found), style="bold yellow")
        said.append(shown(behind))
    return said
