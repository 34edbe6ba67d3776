"""Ids and clocks of the real world."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from onepen import SystemClock, SystemIds
from onepen.storage.edge import check_session_id, check_uid

if TYPE_CHECKING:
    import pytest


def test_an_id_is_valid_as_uid_and_as_session_id_and_tells_its_time() -> None:
    """D2: ids sort by time and carry 80 random bits."""
    before, fresh, after = SystemClock().now(), SystemIds().fresh(), SystemClock().now()
    check_uid("uid", fresh)
    check_session_id(fresh)
    assert before <= int(fresh[:12], 16) <= after


def test_ids_differ_across_threads() -> None:
    """D2: one source, several threads, more ids than one piece of randomness holds."""
    ids = SystemIds()
    given: list[str] = []

    def take() -> None:
        given.extend([ids.fresh() for _ in range(2_000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one[12:] for one in given}) == 8_000


def test_a_forked_child_does_not_repeat_its_parents_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: what is left of the parent's randomness is thrown away."""
    ids = SystemIds()
    ids.fresh()
    pool = ids._pool  # pyright: ignore[reportPrivateUsage]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert ids.fresh()[12:] != pool[10:20].hex()
