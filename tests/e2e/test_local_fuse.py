"""``local`` and a file whose close(2) ends when a user likes: a real FUSE file system."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).parents[1]


def test_a_file_that_cannot_be_closed_holds_up_nobody_elses_job(tmp_path):
    """It is sent to the service; each process that is forked closes what it does not need."""
    program = TESTS / "support" / "hanging_fuse.py"
    support = TESTS / "support", TESTS.parent / "plugins" / "local" / "tests" / "support"
    done = subprocess.run(
        [sys.executable, program, tmp_path, *support],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "flush\n" in done.stdout  # the service has tried
    assert "in time 3\n" in done.stdout
