"""Print the report's summary at the end of a job's standard error.

Usage: ``python -I -m vtorque_report DIRECTORY EXIT_CODE``. The program prints the whole summary or
nothing, and ends after at most a second. Privileges: the job's owner.
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
    """Print the summary to standard output, which is the job's standard error."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(_SECONDS)
    from vtorque_report import load, text  # noqa: PLC0415 - the limit includes it

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
