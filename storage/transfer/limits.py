"""How large an export may be that is imported: what is beyond is refused, and nothing kept."""

from __future__ import annotations

from msgspec import Struct


class ImportLimits(Struct, frozen=True, kw_only=True):
    """The defaults hold whatever an export of onepen's has in it."""

    line_bytes_max: int = 16 * 1024 * 1024
    """Of one line: the largest message, with every character of it escaped, is below it."""

    total_bytes_max: int = 1024 * 1024 * 1024 * 1024
    """Of the whole, unpacked: a small packed file may unfold to anything."""

    sessions_max: int = 10_000_000

    messages_max: int = 10_000_000
    """Of one session."""
