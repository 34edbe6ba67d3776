"""`onepen sessions`: what conversations there are, and what was said in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.text import Text

from ...storage.identity import SessionKey
from .database import looking_at
from .keeping import archive, delete, pin
from .screen import Screen, shown, table, when, with_database, with_screen

if TYPE_CHECKING:
    from pathlib import Path

    from ...storage.records import Listed, Message, Session

_PAGE = 500
_ID_SHOWN = 16  # a beginning is enough for the other commands


@click.group()
def sessions() -> None:
    """What conversations there are."""


for _command in (archive, delete, pin):
    sessions.add_command(_command)


@sessions.command("list")
@click.option("--source", help="Only those of a source, like telegram.")
@click.option("--key", help="Only those of a session key.")
@click.option("--archived", is_flag=True, help="Archived ones as well.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@with_database
@with_screen
def list_(
    screen: Screen,
    database: Path,
    source: str | None,
    key: str | None,
    archived: bool,  # noqa: FBT001
    limit: int,
) -> None:
    """Conversations, the most recent first."""
    with looking_at(database) as onlooker, onlooker.reading() as reader:
        listed, following = reader.listing(
            source=source,
            key=None if key is None else SessionKey(key),
            archived=None if archived else False,
            limit=limit,
        )
    screen.show(
        listed,
        lambda: table(
            ("id", "key", "title, or how it begins", "messages", "last", "state"),
            [_line_of(one) for one in listed],
        ),
    )
    if following is not None and not screen.as_json:
        screen.warn(f"there are more: --limit {limit * 4} shows more of them")


def _line_of(listed: Listed) -> tuple[object, ...]:
    session = listed.session
    preview = " ".join((listed.preview or "").split())
    return (
        session.id[:_ID_SHOWN],
        session.key,
        session.title or preview[:60],
        session.message_count,
        when(session.last_ms),
        state_of(session),
    )


def state_of(session: Session) -> str:
    """A session's state in a few words."""
    words = ["open" if session.end_kind is None else f"{session.end_reason}"]
    words += [
        word
        for word, holds in (
            ("archived", session.archived),
            ("pinned", session.pinned),
            ("deleted", session.deleted),
        )
        if holds
    ]
    return ", ".join(words)


@sessions.command()
@click.argument("session")
@click.option("--all", "everything", is_flag=True, help="Summarised and rewound messages as well.")
@click.option("--last", type=click.IntRange(1), help="Only so many messages, the last ones.")
@with_database
@with_screen
def show(
    screen: Screen,
    database: Path,
    session: str,
    everything: bool,  # noqa: FBT001
    last: int | None,
) -> None:
    """One conversation. SESSION is an id, the beginning of one, or a title."""
    with looking_at(database) as onlooker, onlooker.reading() as reader:
        found = reader.find_session(session)
        lineage = reader.lineage(found.id)
        messages: list[Message] = []
        position: tuple[int, int] | None = None
        while True:
            page = reader.transcript(
                found.id, include_inactive=everything, after=position, limit=_PAGE
            )
            messages.extend(page.messages)
            position = page.next
            if position is None:
                break
            if last is not None:
                messages = messages[-last:]
    if last is not None:
        messages = messages[-last:]
    value = {"session": found, "lineage": [one.id for one in lineage], "messages": messages}
    screen.show(value, lambda: _drawn(found, messages, len(lineage)))


def _drawn(session: Session, messages: list[Message], generations: int) -> Any:
    facts = table(
        ("", ""),
        (
            ("session", session.id),
            ("key", session.key),
            ("title", session.title),
            ("state", state_of(session)),
            ("generations", generations),
            ("began", when(session.started_ms)),
            ("last", when(session.last_ms)),
            ("messages", session.message_count),
            ("tokens in / out", f"{session.tokens.input:,} / {session.tokens.output:,}"),
        ),
    )
    facts.show_header = False
    return Group(facts, *(_said(message) for message in messages))


def _said(message: Message) -> Text:
    marks = [
        word
        for word, holds in (
            (message.state, message.state != "active"),
            ("summary", message.summary),
            ("carried", message.carried),
            ("erased", message.erased),
            ("damaged", message.damaged),
        )
        if holds
    ]
    who = f"{message.seq:>5}  {message.role}" + (f" ({', '.join(marks)})" if marks else "")
    said = Text(f"\n{who}  ", style="bold")
    said.append(when(message.created_ms), style="dim")
    if message.text:
        said.append(f"\n{shown(message.text)}", style="default not bold")
    for call in message.tool_calls:
        said.append(f"\n→ {shown(call.name)}({shown(call.arguments)})", style="cyan not bold")
    if message.parts:
        said.append(f"\n[{len(message.parts)} parts]", style="dim not bold")
    return said
