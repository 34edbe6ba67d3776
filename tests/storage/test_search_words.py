"""Words, queries and snippets: the parts of search that know no database."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen.storage.snippets import SNIPPET_LENGTH, snippet_of
from onepen.storage.wanted import TERMS_MAX, WORDS_MAX, wanted_of
from onepen.storage.words import WORD_LENGTH_MAX, indexed_form, words_of

ANY_TEXT = st.text(max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  ,;!? ", []),
        ("Hello, World!", ["hello", "world"]),
        ("it's 3.14", ["it", "s", "3", "14"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("Café cafe\u0301", ["cafe", "cafe"]),
        ("ΣΊΣΥΦΟΣ Σίσυφος", ["σισυφοσ", "σισυφοσ"]),
        ("\ufb01ne \uff11\uff12\uff13", ["fine", "123"]),
        ("北京市", ["北京", "京市", "市"]),
        ("我", ["我"]),
        ("東京tower", ["東京", "京", "tower"]),
        ("한국어 문서", ["한국", "국어", "어", "문서", "서"]),
        ("ばか\u3002", ["ばか", "か"]),
        ("हिन्दी", ["हिन्दी"]),
        ("so 👍🏽 good", ["so", "👍", "good"]),
        ("a\0b", ["a", "b"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    """K2: case, accents and width don't matter; what has no blanks is found by its pairs."""
    assert words_of(text) == words


def test_a_word_that_is_too_long_is_cut() -> None:
    for long in ("x" * 500, "é" * 500):
        (word,) = words_of(long)
        assert len(word) == WORD_LENGTH_MAX
        assert indexed_form(long) == word


@given(ANY_TEXT)
def test_the_index_is_given_the_same_words(text: str) -> None:
    """What the index splits at is neither a letter nor a digit of ASCII."""
    given_words: list[str] = []
    word = ""
    for character in indexed_form(text) + " ":
        if character.isascii() and not character.isalnum():
            given_words += [word.lower()] if word else []
            word = ""
        else:
            word += character
    assert given_words == words_of(text)


@pytest.mark.parametrize(
    ("query", "text", "found"),
    [
        ("cat dog", "dogs and cats", False),
        ("cat dog", "a dog, a cat", True),
        ("cat* dog*", "dogs and cats", True),
        ('"a dog"', "a big dog", False),
        ('"a dog"', "is it a dog?", True),
        ('"a dog', "is it a dog?", True),
        ("cat OR dog", "one dog", True),
        ("cat or dog", "one dog", False),
        ("cat -dog", "a cat", True),
        ("cat -dog", "a cat, a dog", False),
        ("cat NOT dog", "a cat, a dog", False),
        ("-dog", "the dog", True),
        ("OR OR", "or", False),
        ("it's", "it's", True),
        ("it's", "s it", False),
        ("example.com/path", "see https://example.com/path?x", True),
        ("北京", "我在北京市", True),
        ("京", "北京市", True),
        ("市北", "北京市", False),
        ("北京市", "北京", False),
        ("大学", "東京大学に", True),
        ("学", "東京大学", True),
        ("naïve", "NAIVE", True),
        ("(NEAR( ^col:", "near col", True),
        ("", "anything", False),
        ('"', "anything", False),
        ("*", "anything", False),
    ],
)
def test_queries(query: str, text: str, found: bool) -> None:  # noqa: FBT001
    """K2: any text is a query."""
    assert wanted_of(query).matches(text) is found


def test_a_query_is_bounded() -> None:
    wanted = wanted_of(" ".join(f"w{number}" for number in range(10_000)))
    assert len(wanted.terms) == TERMS_MAX
    assert sum(len(term.words) for term in wanted_of("北" * 9_000).terms) <= WORDS_MAX


@given(text=ANY_TEXT, query=ANY_TEXT)
def test_a_snippet_is_a_piece_of_the_text(text: str, query: str) -> None:
    """Marks taken out, it is the text's, with one blank for each run of them; and it is short."""
    snippet = snippet_of(text, wanted_of(query), marks=("\ue000", "\ue001"))
    plain = snippet.replace("\ue000", "").replace("\ue001", "").strip("…")
    if "\ue000" not in text and "\ue001" not in text:
        assert " ".join(plain.split()) in " ".join(text.replace("…", "…").split())
        assert snippet.count("\ue000") == snippet.count("\ue001")
    assert len(plain) <= SNIPPET_LENGTH + len(text)


def test_a_snippet_shows_the_place_where_most_is_found() -> None:
    text = "apple " + "filler " * 100 + "an apple and a pear\nin a bowl " + "filler " * 100
    snippet = snippet_of(text, wanted_of("apple pear"), marks=("[", "]"))
    assert "an [apple] and a [pear] in a bowl" in snippet
    assert snippet.startswith("…")
    assert snippet.endswith("…")
    assert len(snippet) < SNIPPET_LENGTH + 10


def test_marks_stand_around_what_was_looked_for() -> None:
    for query, text, marked in (
        ("pear", "a (pear), and Pears", "a ([pear]), and Pears"),
        ("pear*", "a pear, and Pears!", "a [pear], and [Pears]!"),
        ("it's", "so it's true", "so [it's] true"),
        ("京", "我在北京市", "我在北[京]市"),
        ("北京", "北京、北京市", "[北京]、[北京]市"),
        ("CAFÉ", "le café.", "le [café]."),
    ):
        assert snippet_of(text, wanted_of(query), marks=("[", "]")) == marked


def test_plain_texts_are_marked_as_all_others_are() -> None:
    """There is a faster way for ASCII, which must not show."""
    dice = random.Random(7)
    for _ in range(500):
        words = [dice.choice(("ab", "b-a", "a_b", "Abc.", "(c)", "x")) for _ in range(8)]
        text = dice.choice((" ", "\n", ", ")).join(words)
        query = " ".join(dice.choices(("ab", "a", "b*", "c", '"b a"'), k=2))
        plain = snippet_of(text, wanted_of(query), marks=("[", "]"))
        other = snippet_of(text + " é", wanted_of(query), marks=("[", "]"))
        assert other == plain + " é"
