"""The piece of a text in which it was found, with marks around what was looked for.

Keeps: the text between the marks is the original's, character by character; line breaks become
blanks; the piece is bounded, whatever the text. It marks words, it doesn't judge: where a phrase
was wanted, its words are marked wherever they stand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .words import WORD_LENGTH_MAX, fold, is_cjk, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .wanted import Term, Wanted

SNIPPET_LENGTH = 160
MARKS = ("«", "»")
_LOOKED_AT = 65_536  # characters; a hit behind them is shown without marks
_CHUNK = re.compile(r"\S+")
_BLANK = re.compile(r"\s|$")
_EDGES = re.compile(r"^\W+|\W+$")


def snippet_of(
    text: str, wanted: Wanted, length: int = SNIPPET_LENGTH, marks: tuple[str, str] = MARKS
) -> str:
    """About `length` characters of the text, around the first place where most of it is found."""
    spans = list(_spans(text[:_LOOKED_AT], wanted.terms))
    start = _best_start(spans, length)
    start = max(0, min(start - length // 4, len(text) - length))
    start = _at_a_blank(text, start)
    end = min(len(text), start + length)
    pieces: list[str] = ["…"] if start else []
    place = start
    for first, last in spans:
        if first < place or last > end:
            continue
        pieces += [text[place:first], marks[0], text[first:last], marks[1]]
        place = last
    pieces.append(text[place:end])
    if end < len(text):
        pieces.append("…")
    return " ".join("".join(pieces).split())


def _best_start(spans: list[tuple[int, int]], length: int) -> int:
    """Where the window begins that holds most of the spans; the first one of those."""
    best, most, behind = 0, 0, 0
    for place, (first, _) in enumerate(spans):
        while behind < len(spans) and spans[behind][1] <= first + length * 3 // 4:
            behind += 1
        if behind - place > most:
            best, most = first, behind - place
    return best


def _at_a_blank(text: str, start: int) -> int:
    """A little further back, if a word would be cut in two there."""
    if start == 0:
        return 0
    blank = text.rfind(" ", max(0, start - 16), start + 1)
    return start if blank < 0 else blank + 1


def _spans(text: str, terms: tuple[Term, ...]) -> Iterator[tuple[int, int]]:
    """Where the words stand that were looked for, in order and without overlap."""
    whole = {word for term in terms for word in (term.words[:-1] if term.prefix else term.words)}
    begun = tuple(term.words[-1] for term in terms if term.prefix)
    if text.isascii() and all(len(word) < WORD_LENGTH_MAX for word in (*whole, *begun)):
        yield from _ascii_spans(text, whole, begun)
        return
    runs = [run for run in map(_run_of, terms) if run]
    for chunk in _CHUNK.finditer(text):
        found = chunk[0]
        if runs and any(map(is_cjk, fold(found))):
            yield from ((chunk.start() + a, chunk.start() + b) for a, b in _runs_in(found, runs))
            continue
        words = words_of(found)
        if any(word in whole or (begun and word.startswith(begun)) for word in words):
            yield _without_edges(found, chunk.start())


def _ascii_spans(text: str, whole: set[str], begun: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """The same where a word is what looks like one: most texts, and ten times as fast."""
    words = [word for word in whole if word.isascii()]
    words += [f"{word}[0-9a-z]*" for word in begun if word.isascii()]
    if not words:
        return
    # Letters and digits only: nothing in a word is special to an expression.
    pattern = f"(?<![0-9a-z])(?:{'|'.join(sorted(words))})(?![0-9a-z])"
    last = 0
    for found in re.finditer(pattern, text, re.ASCII | re.IGNORECASE):
        if found.start() < last:
            continue  # of the same chunk
        first = found.start()
        while first > last and not text[first - 1].isspace():
            first -= 1
        end = _BLANK.search(text, found.end())
        last = len(text) if end is None else end.start()
        yield _without_edges(text[first:last], first)


def _without_edges(chunk: str, start: int) -> tuple[int, int]:
    """The chunk's span without the punctuation around it."""
    first, last = 0, len(chunk)
    for edge in _EDGES.finditer(chunk):
        if edge.start() == 0:
            first = edge.end()
        else:
            last = edge.start()
    return (start + first, start + last) if first < last else (start, start + len(chunk))


def _run_of(term: Term) -> str:
    """The run of characters that a term's pairs were made of."""
    pairs = [word for word in term.words if is_cjk(word[0])]
    if not pairs:
        return ""
    return pairs[0] + "".join(pair[-1] for pair in pairs[1:] if len(pair) == 2)


def _runs_in(chunk: str, runs: list[str]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(chunk):
        longest = max((len(run) for run in runs if chunk.startswith(run, place)), default=0)
        if longest:
            found.append((place, place + longest))
        place += longest or 1
    return found
