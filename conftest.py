"""Tests without guests run on all cores; those with guests one after the other.

Each e2e test looks whether the whole machine is as before, so it has to be alone.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes ``-n auto`` is: 0, in this one, wherever e2e tests may be."""
    return (os.cpu_count() or 1) + 1 if "not e2e" in (config.option.markexpr or "") else 0


def pytest_configure(config: pytest.Config) -> None:
    """Make properties of ``scripts/test --full`` thorough, and teardowns know xdist.

    A teardown must not wait for the thread that every process of xdist's has. And have Python keep
    what it compiles, whatever the environment says: else each process compiles all, each time.
    Without ``full`` the examples are the same in each run.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    calm = [HealthCheck.too_slow]  # says how busy the machine is, as a deadline does
    settings.register_profile("fast", deadline=None, suppress_health_check=calm, derandomize=True)
    settings.load_profile("fast")
    if "e2e" in config.option.markexpr and "full" not in config.option.markexpr:
        more = {"max_examples": 4 * settings().max_examples, "derandomize": False}
        settings.register_profile("full", settings(), **more)
        settings.load_profile("full")
    if "PYTEST_XDIST_WORKER" in os.environ:
        from vtorque_core import teardown  # noqa: PLC0415

        teardown._THREADS_END = 0.0
