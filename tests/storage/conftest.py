"""The conformance suite is library code; pytest explains its failures only if it is told to."""

import pytest

for _module in ("suite", "sessions", "transcripts", "work", "desk"):
    pytest.register_assert_rewrite(f"onepen.runtime.testing.conformance.{_module}")
