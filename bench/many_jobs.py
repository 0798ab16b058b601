"""Measure how long the site's batch system needs for many short jobs.

The time is from the first submission to the last end. Run it as a user, on a submit host whose home
directories are shared with the nodes::

    python3 bench/many_jobs.py --jobs 10 -- vsub -vm ram=256M
    python3 bench/many_jobs.py --jobs 10 -- qsub

To measure jobs of several users, run it as each of them at the same time.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

SCRIPT = "#!/bin/sh\nsleep {seconds}\nuname -n > {place}/$PBS_JOBID$SLURM_JOB_ID\n"


def main() -> None:
    """Submit the jobs, wait until each has written its file, and print the time and the hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=2, help="seconds that each job sleeps")
    parser.add_argument("--limit", type=int, default=1800, help="timeout in seconds")
    parser.add_argument("submit", nargs="+", help="the submit command and its options, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="many-jobs-") as top:
        place = Path(top, "ended")
        place.mkdir()
        script = Path(top, "job.sh")
        script.write_text(SCRIPT.format(seconds=args.seconds, place=place))
        start = time.monotonic()
        command = (*args.submit, "-o", "/dev/null", "-e", "/dev/null", str(script))
        for _ in range(args.jobs):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        submitted = time.monotonic() - start
        # The nodes write these files, so this host gets no events for them.
        while (ended := len(list(place.iterdir()))) < args.jobs:
            if time.monotonic() - start > args.limit:
                raise SystemExit(f"{ended} of {args.jobs} jobs ended in {args.limit} s")
            time.sleep(0.2)
        total = time.monotonic() - start
        hosts = sorted({path.read_text().strip() for path in place.iterdir()})
    print(
        f"{args.jobs} jobs: submitted in {submitted:.1f} s, ended after {total:.1f} s, on {hosts}"
    )


if __name__ == "__main__":
    main()
