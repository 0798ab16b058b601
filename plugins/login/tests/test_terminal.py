"""The terminal of ``vmgr ssh`` and ``console`` if requests go through the job."""

import os
import pty
import subprocess
import sys

CODE = """
import os
from vtorque_login import await_answer
with await_answer._set_raw_mode(None):
    os.write(1, os.read(0, 100))
"""


def test_input_typed_before_the_session_starts_is_kept():
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"hostname\n")
        said = subprocess.run(
            [sys.executable, "-c", CODE], stdin=theirs, capture_output=True, check=True, timeout=60
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert said.stdout == b"hostname\n"
