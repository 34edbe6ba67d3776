"""The edge is total: any input is stored exactly, or refused with one typed error."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen.runtime.testing.conversation import Conversation, uid_of
from onepen.runtime.testing.model.transcripts import as_given
from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage.edge import check_unit
from onepen.storage.errors import InvalidContentError, InvalidUnitError
from onepen.storage.records import Draft, Tokens, ToolCall
from onepen.storage.sqlite.engine import open_sqlite
from onepen.storage.units import Durable, Unit

from ..proving import PROOF
from .histories import Draw, StillClock

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
# One of each kind of trap, drawn often: chance alone would take too long to find them.
NASTY = st.sampled_from(
    (float("nan"), float("-inf"), 2**63, -(2**63) - 1, "\ud800", (1,), b"", -0.0, 1.0, True)
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    TEXT,
    st.binary(max_size=5),
    NASTY,
)
KEYS = st.one_of(TEXT, st.integers(), st.none(), st.booleans(), st.binary(max_size=3))


def _deep(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = {"x": value} if number % 2 else [value]
    return value


ANYTHING: st.SearchStrategy[Any] = st.one_of(
    SCALARS,
    st.integers(1, 200).map(_deep),
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(TEXT, inner, max_size=3),
        ),
        max_leaves=8,
    ),
)
# Most of it is JSON, with one thing in it that may not be.
OBJECTS: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries({"x": NASTY}),
    st.fixed_dictionaries({"x": st.lists(NASTY, min_size=1, max_size=1)}),
    st.dictionaries(TEXT, SCALARS, max_size=2),
    st.dictionaries(TEXT, ANYTHING, max_size=3),
)


def _structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """The struct with anything in its fields; msgspec looks at types only when it decodes."""
    names = kind.__struct_fields__
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, SCALARS)).map(
        lambda fields: kind(**{"id": "", "name": "", **fields} if kind is ToolCall else fields)
    )


# Each field with what belongs there, and now and then with anything at all.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("tool_call_id", "name", "reasoning", "finish_reason", "platform_id"), TEXT),
    "text": TEXT,
    "user": TEXT,
    "created_ms": st.integers(-(2**64), 2**64),
    "parts": st.lists(OBJECTS, max_size=2).map(tuple),
    "tool_calls": st.lists(_structs(ToolCall), max_size=2).map(tuple),
    "tokens": _structs(Tokens),
    "meta": OBJECTS,
    "blobs": st.lists(TEXT, max_size=2).map(tuple),
    "role": TEXT,
    "uid": TEXT,
}


@st.composite
def drafts(draw: Draw) -> Draft:
    """A sound message in which one or two fields are not what they should be."""
    fields: dict[str, Any] = {"uid": uid_of("any"), "role": "user"}
    # Structured content first: it has the most ways to be wrong.
    names = draw(
        st.lists(
            st.sampled_from(("meta",) * 6 + ("parts",) * 3 + tuple(FIELDS)), min_size=1, max_size=2
        )
    )
    for name in names:
        strays = draw(st.sampled_from((False, False, False, False, True)))
        fields[name] = draw(ANYTHING if strays else FIELDS[name])
    return Draft(**fields)


@pytest.mark.parametrize("shard", range(10 if PROOF else 1))
def test_a_message_is_kept_exactly_or_refused(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    """INV-20, PROOF-7: what passes the edge comes back the same; what does not is an
    InvalidContentError.
    """
    looked = Counter[str]()

    @given(draft=drafts())
    def any_message(draft: Draft) -> None:
        keep_or_refuse(draft)
        looked["bodies"] += 1

    any_message()
    record_property("message bodies", looked["bodies"])


def keep_or_refuse(draft: Draft) -> None:
    chat = Conversation("any")
    opening = chat.opening()
    unit = chat.guarded(chat.guard(), chat.append(draft))
    try:
        check_unit(unit)
    except InvalidContentError:
        return
    engine = open_sqlite(None, StillClock())
    try:
        *_, receipt = engine.stage([*opening, unit])
        engine.commit()
        (again,) = engine.stage([unit])
        engine.commit()
        if draft.blobs:  # well-formed, and not stored
            assert not isinstance(receipt, Durable)
            return
        assert isinstance(receipt, Durable)
        assert isinstance(again, Durable)
        assert again.again
        with engine.reading() as reader:
            (message,) = reader.transcript(chat.session_id).messages
        assert repr(as_given(message)) == repr(draft)
    finally:
        engine.close()


COMMANDS = [
    command
    for load in WORKLOADS.values()
    for batch in load.batches
    for unit in batch.units
    for command in unit.commands
]


@given(data=st.data(), number=st.integers(0, len(COMMANDS) - 1))
def test_any_command_is_accepted_or_refused_with_a_type(data: st.DataObject, number: int) -> None:
    """INV-20, INV-13: one field is anything; edge or receipt says so, and nothing breaks."""
    command: Any = COMMANDS[number]
    name = data.draw(st.sampled_from(command.__struct_fields__))
    value: Any = data.draw(OBJECTS | ANYTHING)
    fields = {field: getattr(command, field) for field in command.__struct_fields__}
    unit = Unit(
        (type(command)(**{**fields, name: value}),), Conversation("any").opening()[1].guards
    )
    try:
        check_unit(unit)
    except (InvalidContentError, InvalidUnitError):  # the latter for what is not guarded
        pass
    # Past the edge by mistake, it fails alone, whatever it is.
    engine = open_sqlite(None, StillClock())
    try:
        good = Conversation("good").opening()
        receipts = engine.stage([good[0], Unit(unit.commands), good[1]])
        engine.commit()
        assert isinstance(receipts[0], Durable)
        assert isinstance(receipts[2], Durable)
    finally:
        engine.close()
