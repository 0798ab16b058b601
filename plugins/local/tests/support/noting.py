"""The command that notifies a job's owner why the job ended."""

import json
import os
from pathlib import Path

from vtorque_local import become_job
from vtorque_local.client import GUARD


def noting(path: Path | str, text: str) -> tuple[list[str], tuple[int, int]]:
    """Return the command, to be started by this process, and the descriptors that it needs."""
    order = {"starter": os.getpid(), "names": ["x", "x"], "task": "", "text": text}
    files = []
    for content in (order, {"outputs": [["", 0], [str(path), 1]]}):
        files.append(os.memfd_create("given"))
        os.write(files[-1], json.dumps(content).encode())
    return [*GUARD, *become_job.command(*files)], tuple(files)
