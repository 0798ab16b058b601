"""The summary at the end of a job's error output. As the job's owner, in the job's last second.

``python -I -m vtorque_report DIRECTORY EXIT_CODE``. It prints all or nothing, and ends by itself
after a second even if nobody waits for it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from pathlib import Path

_SECONDS = 1


def main(argv: list[str]) -> int:
    """Print the summary to the standard output, which is the job's error output."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(_SECONDS)
    from vtorque_report import load, text  # noqa: PLC0415 - within the second

    status = int(argv[1])
    report = load.report([Path(argv[0])], time.time(), load.FEW_LINES, status)
    page = io.StringIO()
    text.show(report, page)
    lines = [f"vtorque: {line}".rstrip() for line in page.getvalue().splitlines()]
    data = "".join(f"{line}\n" for line in lines).encode()
    while data:
        data = data[os.write(1, data) :]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
