"""The page itself: every setting with its default, and the error that says what is wrong with one.

Keeps:
- A page is frozen, and its defaults are a page that `check_settings` accepts.
- One error carries all problems, each with its origin.

Must never read anything: what a page is filled from is the business of `loading`, and what its
values must be like that of `names` and `relations`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...actors.intake import WriterSettings
from ...actors.limits import DeliverySettings, SessionSettings
from ...storage.engine import EngineSettings
from ...storage.errors import OnepenError


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that can be set; the defaults are the safe ones."""

    shutdown_s: Annotated[
        float, Meta(gt=0, description="How long the whole end of the runtime may take.")
    ] = 30.0
    sessions: SessionSettings = SessionSettings()
    deliveries: DeliverySettings = DeliverySettings()
    writer: WriterSettings = WriterSettings()
    engine: EngineSettings = EngineSettings()


class SettingsProblem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong; `name` is empty where a whole file is."""

    name: str
    origin: str
    problem: str
    hint: str

    def __str__(self) -> str:
        where = f"{self.name} ({self.origin})" if self.name else self.origin
        return f"{where}: {self.problem}; {self.hint}"


class SettingsError(OnepenError):
    """Settings that can't be used, with everything that is wrong with them."""

    hint = "settings_page() lists every name with its default"

    def __init__(self, problems: tuple[SettingsProblem, ...]) -> None:
        head = "1 setting is wrong" if len(problems) == 1 else f"{len(problems)} settings are wrong"
        super().__init__("\n".join([f"{head}:", *(f"- {problem}" for problem in problems)]))
        self.problems = problems

    def __str__(self) -> str:
        return f"{self.message}\n({self.hint})"  # behind the last line it would look like a part
