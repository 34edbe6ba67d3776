"""The edge does what `docs/edge.md` says: every row of its tables is a case here."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from onepen.runtime.system import SystemClock
from onepen.runtime.testing.conversation import Conversation, uid_of
from onepen.runtime.testing.model.transcripts import as_given
from onepen.storage import commands as c
from onepen.storage.edge import (
    CHUNK_BYTES_MAX,
    DEPTH_MAX,
    TEXT_BYTES_MAX,
    check_title,
    check_unit,
    clean_title,
)
from onepen.storage.errors import InvalidContentError, InvalidUnitError
from onepen.storage.identity import BlobId, Seq, SessionId, SessionKey, TurnId
from onepen.storage.records import Draft, Inbound, Message, Tokens, ToolCall
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.units import Durable, Guard, Unit

from ..test_layout import ROOT

PAGE = ROOT / "docs" / "edge.md"
MIB = 1024 * 1024


class Text(str):
    """A subclass of str."""

    __slots__ = ()


def nested(depth: int) -> dict[str, Any]:
    root: dict[str, Any] = {}
    inner = root
    for _ in range(depth - 1):
        inner["x"] = {}
        inner = inner["x"]
    return root


def endless() -> dict[str, Any]:
    root: dict[str, Any] = {}
    root["x"] = [root]
    return root


def everywhere(text: str) -> dict[str, Any]:
    return {"text": text, "user": text, "name": text, "meta": {text: [text]}}


NO_COUNTS: tuple[Any, ...] = (1.0, True, "1", 2**63)

# Fields of a message, by the name of the row; several are several messages.
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "NUL characters": [everywhere("\0"), everywhere("a\0b")],
    "emoji, joined emoji, flags": [everywhere("👩\u200d👧 🏳️\u200d🌈 🇪🇺")],
    "right-to-left text and its controls": [{"text": "\u05e9\u05dc \u202eabc\u202c\u2066x\u2069"}],
    "combining characters, composed or not": [{"text": "é e\u0301"}, {"text": "e\u0301 é"}],
    "control characters and line separators": [{"text": "\x01\x1b\r\n\x7f\x85\u2028\u2029\ufeff"}],
    "the last code points of Unicode": [{"text": "\U0010ffff\uffff\ufffe\ufffd"}],
    "empty text, and no text": [{"text": ""}, {"text": None}, {"text": None, "parts": ()}],
    "one MiB of text": [{"text": "x" * MIB}, {"text": "é" * (MIB // 2)}],
    "more than one MiB of text": [{"text": "x" * (MIB + 1)}, {"text": "é" * (MIB // 2 + 1)}],
    "half of a surrogate pair": [{"text": "\ud800"}, {"text": "a\udfffb"}],
    "half of a surrogate pair in a name": [{"user": "\ud800"}],
    "half of a surrogate pair in JSON": [{"meta": {"a": ["\ud800"]}}],
    "half of a surrogate pair in a member name": [{"meta": {"\ud800": 1}}],
    "bytes as text": [{"text": b"x"}, {"text": bytearray(b"x")}],
    "a subclass of str": [{"text": Text("x")}],
    "the largest and smallest 64-bit integers": [
        {"created_ms": 2**63 - 1, "meta": {"n": 2**63 - 1}},
        {"created_ms": -(2**63), "meta": {"n": -(2**63)}},
    ],
    "an integer beyond 64 bits": [{"created_ms": 2**63}, {"created_ms": -(2**63) - 1}],
    "an integer beyond 64 bits in JSON": [{"meta": {"n": n}} for n in (2**63, 2**64, 10**400)],
    "true as a number": [{"created_ms": True}],
    "a float as a time": [{"created_ms": 1.0}],
    "1, 1.0 and true": [{"meta": {"n": n}} for n in (1, 1.0, True)],
    "minus zero, tiny and huge floats": [{"meta": {"n": [-0.0, 5e-324, 1.7e308, 0.1, 1e22]}}],
    "NaN": [{"meta": {"n": float("nan")}}],
    "infinity": [{"meta": {"n": float("inf")}}, {"meta": {"n": [float("-inf")]}}],
    "the order of an object's members": [{"meta": {"z": 1, "a": 2}}],
    "64 levels of nesting": [{"meta": nested(DEPTH_MAX)}],
    "65 levels of nesting": [{"meta": nested(DEPTH_MAX + 1)}],
    "an object that holds itself": [{"meta": endless()}],
    "a hundred thousand levels of nesting": [{"meta": nested(100_000)}],
    "a member name that is not text": [{"meta": {name: 1}} for name in (1, None, b"x", Text("x"))],
    "a tuple, a set or bytes in JSON": [{"meta": {"x": x}} for x in ((1,), {1}, b"x", object())],
    "a list where an object belongs": [{"meta": []}, {"meta": "x"}],
    "more than one MiB of JSON": [{"meta": {"x": ["y" * MIB]}}, {"meta": {"x": [None] * MIB}}],
    "more than one MiB of details together": [
        {"reasoning": "x" * (MIB // 2), "meta": {"x": "y" * (MIB // 2)}}
    ],
    "one MiB of control characters in JSON": [{"meta": {"x": "\0" * (MIB - 64)}}],
    "a list where a tuple belongs": [{"text": None, "parts": [{}]}],
    "text and parts together": [{"text": "", "parts": ()}],
    "an unknown role": [
        {"role": "judge"},
        {"role": None},
        {"role": ["user"]},
        {"role": nested(100_000)},
    ],
    "a uid that is not 32 hexadecimal digits": [
        {"uid": uid} for uid in ("", "a" * 31, "A" * 32, "g" * 32, "a" * 32 + "\n", None, 7)
    ],
    "a name of more than 1,024 bytes": [{"user": "x" * 1025}],
    "token counts that are no integers": [{"tokens": Tokens(input=n)} for n in NO_COUNTS],
    "a tool call that is none": [{"tool_calls": ({"id": "1", "name": "look"},)}],
    "arguments of a tool call that are not JSON": [
        {"tool_calls": (ToolCall(id="", name="", arguments="{not json \0"),)}
    ],
}


def draft_of(fields: dict[str, Any], number: int = 0) -> Draft:
    given: dict[str, Any] = {"uid": uid_of(f"edge {number}"), "role": "user", "text": "x"}
    return Draft(**{**given, **fields})


def unit_of(*drafts: Draft) -> Unit:
    chat = Conversation("edge")
    return chat.guarded(chat.guard(), chat.append(*drafts))


def title(text: str) -> c.SetTitle:
    return c.SetTitle(session_id=SessionId("s"), title=text, origin="person", replaces=0, at_ms=1)


def chunk(size: int) -> c.PutChunk:
    return c.PutChunk(blob_id=BlobId("b"), index=0, data=bytes(size))


def staged(**marks: Any) -> c.StageMessages:
    given: dict[str, Any] = {"session_id": SessionId("s"), "seq": Seq(0), "text": "x", **marks}
    message = Message(uid=uid_of("staged"), role="user", **given)
    return c.StageMessages(session_id=SessionId("s"), messages=(message,))


def created(session_id: str) -> c.CreateSession:
    return c.CreateSession(session_id=SessionId(session_id), key=SessionKey("k"), at_ms=1)


def accepted(body: Inbound) -> c.AcceptInbound:
    return c.AcceptInbound(
        source="s",
        inbound_id="1",
        key=SessionKey("k"),
        turn_id=TurnId("t"),
        disposition="queued",
        digest="d",
        at_ms=1,
        body=body,
    )


def created_alone(name: str) -> Unit:
    return Unit((created(name),))


def titled_alone(text: str) -> Unit:
    return Unit((title(text),))


OTHERS: dict[str, list[Callable[[], Unit]]] = {
    "a session id of other characters, or too long": [
        partial(created_alone, name) for name in ("", "a b", "é", "a" * 65, "a\n")
    ],
    "a title with outer blanks, control or zero-width characters": [
        partial(titled_alone, text)
        for text in (" a", "a ", "a\0b", "a\u200bb", "a\nb", "a\u202eb", "\ufeffa", "a\u2028b")
    ],
    "a title of 100 characters": [lambda: Unit((title("é" * 100),))],
    "a title of 101 characters": [lambda: Unit((title("x" * 101),))],
    "an empty title": [lambda: Unit((title(""),))],
    "a piece of a blob of 256 KiB": [lambda: Unit((chunk(CHUNK_BYTES_MAX),))],
    "a larger piece of a blob": [lambda: Unit((chunk(CHUNK_BYTES_MAX + 1),))],
    "an integer beyond 64 bits in a guard": [
        lambda: replace(
            unit_of(draft_of({})),
            guards=(
                Guard(
                    key=SessionKey("k"),
                    incarnation=Conversation("edge").incarnation,
                    session_id=Conversation("edge").session_id,
                    revision=2**63,
                ),
            ),
        )
    ],
    "half of a surrogate pair in a key": [
        lambda: Unit((c.OpenIncarnation(key=SessionKey("\ud800"), incarnation=1),))  # type: ignore[arg-type]
    ],
    "an append without messages": [unit_of],
    "a staged message of another session": [lambda: Unit((staged(session_id="other"),))],
    "a staged message marked as damaged": [lambda: Unit((staged(damaged=True),))],
    "an inbound message of several MiB": [
        lambda: Unit((accepted(Inbound(parts=({"x": "y" * (MIB - 99)},) * 3)),))
    ],
}


def rows_of_the_page() -> dict[str, str]:
    """The tables of the page: input -> outcome."""
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: outcome for name, outcome in rows if name != "input"}


OUTCOMES = rows_of_the_page()


def test_every_row_of_the_page_is_a_case() -> None:
    """INV-20: the page promises nothing that is not tried, and nothing is tried in secret."""
    assert list(OUTCOMES) == [*MESSAGES, *OTHERS]
    assert all(re.match("kept exactly|refused: `", outcome) for outcome in OUTCOMES.values())


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_kept_exactly_or_refused(name: str) -> None:
    """INV-20: as the row says, through a real engine."""
    drafts = [draft_of(fields, number) for number, fields in enumerate(MESSAGES[name])]
    if OUTCOMES[name].startswith("refused"):
        for draft in drafts:
            assert_refused(unit_of(draft), OUTCOMES[name])
        return
    engine = open_sqlite(None, SystemClock())
    try:
        chat = Conversation("edge")
        unit = unit_of(*drafts)
        assert check_unit(unit) > 0
        engine.stage([*chat.opening(), replace(unit, guards=())])
        engine.commit()
        with engine.reading() as reader:
            found = reader.transcript(chat.session_id).messages
        assert [repr(as_given(message)) for message in found] == [repr(draft) for draft in drafts]
    finally:
        engine.close()


@pytest.mark.parametrize("name", OTHERS)
def test_other_commands_are_kept_or_refused(name: str) -> None:
    """INV-20, E4, D2: as the row says."""
    for make in OTHERS[name]:
        if OUTCOMES[name].startswith("refused"):
            assert_refused(make(), OUTCOMES[name])
        else:
            assert check_unit(make()) > 0


def assert_refused(unit: Unit, outcome: str) -> None:
    with pytest.raises(InvalidContentError) as caught:
        check_unit(unit)
    assert f"refused: `{caught.value.field}`" == outcome
    assert caught.value.hint
    assert "\ud800" not in str(caught.value)


def test_a_piece_of_a_blob_comes_back() -> None:
    """INV-20: the largest piece, byte by byte."""
    engine = open_sqlite(None, SystemClock())
    try:
        put = c.PutChunk(blob_id=BlobId("b"), index=0, data=bytes(range(256)) * 1024)
        (receipt,) = engine.stage([Unit((put,))])
        engine.commit()
        assert isinstance(receipt, Durable)
        with engine.reading() as reader:
            assert reader.blob_chunk(BlobId("b"), 0) == put.data
    finally:
        engine.close()


def test_a_transcript_is_not_written_around_its_guard() -> None:
    """A5: there is no way to append behind the session actor's back."""
    unit = unit_of(draft_of({}))
    with pytest.raises(InvalidUnitError):
        check_unit(replace(unit, guards=()))
    with pytest.raises(InvalidUnitError):
        check_unit(Unit(()))
    other = replace(unit.guards[0], session_id=SessionId("other"))
    with pytest.raises(InvalidUnitError):
        check_unit(replace(unit, guards=(other,)))


def test_a_cleaned_title_is_a_title() -> None:
    """E4: what is left after cleaning passes, whatever it was."""
    for text in (" a\0b\u200b ", "x" * 200, "é" * 99 + "  b", "\ufeff\u202eabc", "a\n\nb"):
        check_title(clean_title(text))
    assert clean_title("\u200b \0") == ""


def test_the_size_grows_with_the_content() -> None:
    """INV-14: the bound of the queue counts what is really held."""
    small, large = draft_of({}), draft_of({"text": "x" * TEXT_BYTES_MAX})
    assert check_unit(unit_of(large)) - check_unit(unit_of(small)) == TEXT_BYTES_MAX - 1


def test_what_an_import_says_is_of_its_type() -> None:
    """INV-20: found by a property, in one of many examples."""
    facts: Any = {"title": "Chat"}
    publish = c.PublishSession(session_id=SessionId("s"), facts=facts)
    calls: Any = None
    drop = c.DropStaged(session_id=SessionId("s"), from_seq=Seq(0), calls=calls)
    for command, field in ((publish, "facts"), (drop, "calls")):
        with pytest.raises(InvalidContentError) as caught:
            check_unit(Unit((command,)))
        assert caught.value.field == field
