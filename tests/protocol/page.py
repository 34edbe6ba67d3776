"""What `docs/protocol.md` says in its tables, for comparison with what the programs find."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def tables() -> dict[str, list[list[str]]]:
    """The rows of the first table under each heading, without its head."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
        cells = [[cell.strip() for cell in row.split("|")] for row in rows]
        found[heading.strip()] = cells[2:]
    return found


def named(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)
