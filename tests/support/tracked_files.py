"""List the files of this repository."""

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def tracked():
    """Yield each file in git's index that exists."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=REPO,
        capture_output=True,
        check=True,
        timeout=180,
    )
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (REPO / name).is_file():
            yield REPO / name
