"""Let other users reach files below pytest's private directories."""

import os
from pathlib import Path


def reachable(path: Path) -> Path:
    """Let all users enter pytest's directories above this path; return it. /tmp is unchanged."""
    for part in path.parents:
        status = part.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o001:
            part.chmod(status.st_mode & 0o7777 | 0o111)
    return path
