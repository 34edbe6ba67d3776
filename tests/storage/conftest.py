"""The conformance suite is plain library code; pytest shows what its assertions compared."""

import pytest

for _module in ("", "_sessions", "_transcripts", "_work"):
    pytest.register_assert_rewrite(f"onepen.runtime.testing.conformance{_module}")
pytest.register_assert_rewrite("onepen.runtime.testing.desk")
