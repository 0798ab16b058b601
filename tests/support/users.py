"""Run commands and show their output if they fail; remove the users of tests."""

import subprocess
import time

import pytest

TIMEOUT = 600  # seconds until a test times out


def run(*argv, timeout=TIMEOUT, check=True, **kwargs):
    """Run a command; the failure shows its output."""
    done = subprocess.run(argv, capture_output=True, timeout=timeout, check=False, **kwargs)
    if check and done.returncode != 0:
        pytest.fail(f"{argv}: exit {done.returncode}\n{done.stdout!r}\n{done.stderr!r}")
    return done


def remove_user(name, seconds=TIMEOUT):
    """Remove a user of these tests, once the last of their processes has ended."""
    deadline = time.monotonic() + seconds
    while run("pkill", "-9", "-u", name, check=False).returncode == 0:
        assert time.monotonic() < deadline, f"processes of {name} survive SIGKILL"
        time.sleep(0.05)
    subprocess.run(["userdel", "-r", name], capture_output=True, check=False)
