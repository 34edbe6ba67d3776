"""What a search looks for: any text, read as a query, never refused.

    plain words          all of them, anywhere
    "a phrase"           words in a row; so is what is written without blanks, like it's or a.b
    begin*               words that begin so
    -word, NOT word      none of these
    one OR two           either; OR binds weaker than the blank

What makes no sense as an operator is a word or nothing at all: a lone quote, a minus in front of
everything, an OR at the end. A query without any word finds nothing.

Keeps: total; bounded (`TERMS_MAX`, `WORDS_MAX`), what is beyond is left out. The two readers of a
query, `matches` and `expression`, agree on every text.
"""

from __future__ import annotations

import re

from msgspec import Struct

from .words import fold, is_cjk, words_of

TERMS_MAX = 32
WORDS_MAX = 128
_QUERY_LENGTH_MAX = 8_192
_PIECE = re.compile(r'(-?)"([^"]*)(?:"|$)(\*?)|(\S+)')


class Term(Struct, frozen=True):
    """Words in a row; the last one may be the beginning of a word."""

    words: tuple[str, ...]
    prefix: bool = False

    def is_in(self, line: str) -> bool:
        """Whether a text has it, given as its words between blanks."""
        wanted = " " + " ".join(self.words)
        return (wanted if self.prefix else wanted + " ") in line

    @property
    def expression(self) -> str:
        # Words hold no quotes: nothing in a query can leave its string.
        return f'"{" ".join(self.words)}"' + (" *" if self.prefix else "")


class Alternative(Struct, frozen=True):
    """All of these and none of those."""

    required: tuple[Term, ...]
    excluded: tuple[Term, ...] = ()


class Wanted(Struct, frozen=True):
    """A query: one alternative must hold. Without any, nothing is found."""

    alternatives: tuple[Alternative, ...] = ()

    def matches(self, text: str) -> bool:
        """Whether a text is what is looked for."""
        line = f" {' '.join(words_of(text))} "
        return any(
            all(term.is_in(line) for term in one.required)
            and not any(term.is_in(line) for term in one.excluded)
            for one in self.alternatives
        )

    @property
    def expression(self) -> str:
        """The same in the language of the index."""
        return " OR ".join(map(_expression_of, self.alternatives))

    @property
    def terms(self) -> tuple[Term, ...]:
        """What a text that was found can be marked with."""
        return tuple(term for one in self.alternatives for term in one.required)


def _expression_of(one: Alternative) -> str:
    required = " AND ".join(term.expression for term in one.required)
    if not one.excluded:
        return f"({required})"
    return f"(({required}) NOT ({' OR '.join(term.expression for term in one.excluded)}))"


def wanted_of(query: str) -> Wanted:
    """A query as it is meant, as far as that can be told."""
    alternatives: list[Alternative] = []
    required: list[Term] = []
    excluded: list[Term] = []
    negated = False
    terms = words = 0

    def close() -> None:
        if not required:  # a minus without anything to take it from is only a dash
            required.extend(excluded)
            excluded.clear()
        if required:
            alternatives.append(Alternative(tuple(required), tuple(excluded)))
        required.clear()
        excluded.clear()

    for minus, phrase, star, word in _PIECE.findall(query[:_QUERY_LENGTH_MAX]):
        if word == "OR":
            close()
            negated = False
            continue
        if word in ("AND", "NOT"):
            negated = word == "NOT"
            continue
        if word.startswith("-") and len(word) > 1:
            minus, word = "-", word[1:]
        term = _term_of(word or phrase, prefix=word.endswith("*") or bool(star))
        if term is None:
            continue
        terms, words = terms + 1, words + len(term.words)
        if terms > TERMS_MAX or words > WORDS_MAX:
            break
        (excluded if minus or negated else required).append(term)
        negated = False
    close()
    return Wanted(tuple(alternatives))


def _term_of(text: str, *, prefix: bool) -> Term | None:
    words = words_of(text)
    if not words:
        return None
    # A run at the end goes on in the text, perhaps: its last character alone stands only where a
    # run ends. One character is the beginning of a pair, or stands alone.
    last = fold(text).rstrip()[-1:]
    if is_cjk(last):
        if len(words) > 1 and len(words[-2]) == 2 and is_cjk(words[-2][0]) and words[-2][1] == last:
            return Term(tuple(words[:-1]))
        return Term(tuple(words), prefix=True)
    return Term(tuple(words), prefix=prefix)
