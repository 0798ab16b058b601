"""A user's home, a job in it that does not run, and its companion as a real process."""

import os
import subprocess
import sys
import time

from vtorque_login import companion

KEY = "5a" * 32


def a_request(**changed):
    """Return a valid request in the form of a waiting command, with changes."""
    return {
        "words": ["logs", "--follow", "--level=info", "--", "42.srv"], "node": "", "term": "",
        "rows": 24, "columns": 80, "host": "10.1.2.3", "port": 40000, "key": KEY,
        "expires": time.time() + 60,
    } | changed  # fmt: skip


def python(code):
    """Return a command that runs code with this interpreter, isolated like vTorque's."""
    return [sys.executable, "-I", "-c", code]


def companion_of(config, job_id, node="n1", look="0.1"):
    """Start a companion like the job shell; this process is its job shell."""
    words = [str(config), job_id, node, look, str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "vtorque_login.companion", *words], cwd="/",
        start_new_session=True, stdin=subprocess.DEVNULL, env=companion.answer_environ(),
    )  # fmt: skip
