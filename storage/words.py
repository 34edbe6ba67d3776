"""What a word is: the one tokeniser that the search index, its tail and every query share.

A text becomes a list of words: runs of letters and digits, without case and accents. Chinese,
Japanese and Korean have no blanks to go by, so a run of their characters becomes its pairs and,
behind them, its last character alone: `北京市` is `北京 京市 市`. Then any two characters in a
row are a word that can be looked up, and a single character is the beginning of one. A pictogram is
a word of its own.

Keeps: pure and total, any text has words, perhaps none; `EDITION` changes whenever the words of
some text do, so that an index of another edition is known for what it is.
"""

from __future__ import annotations

import re
import unicodedata

WORD_LENGTH_MAX = 128  # what is longer is no word that anybody types: encoded data, mostly
EDITION = f"1 unicode {unicodedata.unidata_version}"

_CJK = (
    "\u3005-\u3007\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U0001b000-\U0001b16f"
    "\U00020000-\U0003fffd"
)
_IS_CJK = re.compile(f"[{_CJK}]")
_RUN = re.compile(f"([{_CJK}]+)|([^ {_CJK}]+)")
_ASCII_WORD = re.compile("[0-9a-z]+")
_ASCII_TOO_LONG = re.compile(f"[0-9A-Za-z]{{{WORD_LENGTH_MAX + 1}}}")
_PICTOGRAMS = 0x1F000


class _Fold(dict[int, str]):
    """What becomes of each character; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        folded = self[code] = _folded(chr(code))
        return folded


def _folded(character: str) -> str:
    if _IS_CJK.match(character):
        return character
    category = unicodedata.category(character)
    if category == "So" and ord(character) >= _PICTOGRAMS:
        return f" {character} "
    if category[0] not in "LNM":
        return " "
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    # Accents go, vowel signs stay: without them a word of Hindi or Thai is another word.
    return "".join(
        one if unicodedata.category(one)[0] in "LN" else "" if _is_accent(one) else one
        for one in plain
        if unicodedata.category(one)[0] in "LNM"
    )


def _is_accent(character: str) -> bool:
    # The combining marks of Latin, Greek and Cyrillic stand in blocks of their own.
    return any(
        first <= character <= last
        for first, last in (
            ("\u0300", "\u036f"),
            ("\u0483", "\u0489"),
            ("\u1ab0", "\u1aff"),
            ("\u1dc0", "\u1dff"),
            ("\u20d0", "\u20ff"),
            ("\ufe00", "\ufe0f"),  # variation selectors, behind pictograms
            ("\ufe20", "\ufe2f"),
        )
    )


_FOLD = _Fold()


def words_of(text: str) -> list[str]:
    """The words of a text, in order."""
    if text.isascii():
        return [word[:WORD_LENGTH_MAX] for word in _ASCII_WORD.findall(text.lower())]
    words: list[str] = []
    for run, word in _RUN.findall(fold(text)):
        if word:
            words.append(word[:WORD_LENGTH_MAX])
            continue
        words += [run[place : place + 2] for place in range(len(run) - 1)]
        words.append(run[-1])
    return words


def fold(text: str) -> str:
    """The text with one form for each character, and a blank for what is part of no word."""
    return unicodedata.normalize("NFKC", text).translate(_FOLD)


def is_cjk(character: str) -> bool:
    """Whether it belongs to a script that is written without blanks."""
    return _IS_CJK.match(character) is not None


def indexed_form(text: str) -> str:
    """The text as the index is given it, which knows no more than blanks and ASCII.

    Plain English is handed over as it is: it is most of what there is, and the index splits it just
    as `words_of` does.
    """
    if text.isascii() and not _ASCII_TOO_LONG.search(text):
        return text
    return " ".join(words_of(text))
