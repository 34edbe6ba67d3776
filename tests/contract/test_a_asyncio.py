"""Contract A with asyncio agents: every test of `test_a_persistence.py` whose agents only use their
turn, with the same agents behind the bridge.
"""

from __future__ import annotations

import pytest

from . import test_a_persistence as native
from .bridged import bridged, cases_of

LEFT_OUT = {
    # Their agents call trio by themselves.
    "test_the_agent_finds_its_user_message_in_storage",
    "test_a_draft_handed_over_twice_while_a_rotation_is_under_way_is_stored_once",
    "test_a_cancelled_wait_for_the_reply_leaves_the_turn_running",
    # Here each call is a batch of its own: more crashes than a Writer may have in a second.
    "test_a_turn_rides_out_a_failing_storage_actor",
}

globals().update(cases_of(native, LEFT_OUT))


@pytest.fixture(autouse=True)
def _behind_the_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "open_runtime", bridged)
