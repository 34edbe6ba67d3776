"""Hypothesis profiles, chosen by ONEPEN_PROFILE (`ci` where CI is set, `dev` otherwise).

Every profile runs without a deadline, because a busy machine is not a bug, and prints the blob that
reproduces a failure. Only `ci` is derandomised: a merge must not depend on luck.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

# The conformance suite is library code; pytest shows what its assertions compared only if it is
# told before the first import.
pytest.register_assert_rewrite("onepen.runtime.testing.conformance")

_EXAMPLES_MAX = {
    "dev": 50,
    "ci": 200,  # keeps the whole suite well under ten minutes on two cores
    "proof": 2_000,
    "nightly": 20_000,
}

for _name, _examples_max in _EXAMPLES_MAX.items():
    settings.register_profile(
        _name,
        max_examples=_examples_max,
        deadline=None,
        derandomize=_name == "ci",
        print_blob=True,
        # Real files and real threads are slow to draw for; that says nothing about the code.
        suppress_health_check=[HealthCheck.too_slow],
    )

# An unknown name raises here, so that a misspelt profile never runs the wrong numbers.
settings.load_profile(os.environ.get("ONEPEN_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
