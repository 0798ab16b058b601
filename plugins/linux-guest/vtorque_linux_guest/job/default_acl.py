"""Warn about default ACLs that the umask restricts in a guest, but not on bare metal.

A guest's kernel applies the umask before virtiofsd creates a file. On bare metal the kernel ignores
the umask in a directory that has a default ACL (acl(5)).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_ATTRIBUTE = "system.posix_acl_default"


def warnings(directories: Iterable[str], umask: int) -> list[str]:
    """Return a warning for each directory with a default ACL, unless the umask is 0.

    Privileges: the job's user, in the job shell.
    """
    if not umask:
        return []
    return [
        f"warning: {directory} has a default ACL. In a guest the umask {umask:04o} limits the ACL "
        'mask of what you create there; for the same mask as on bare metal put "umask 0" into the '
        'script (user manual, "Files in shared directories")'
        for directory in dict.fromkeys(directories)
        if _has_default_acl(directory)
    ]


def _has_default_acl(directory: str) -> bool:
    try:
        return bool(os.getxattr(directory, _ATTRIBUTE))
    except OSError:  # no default ACL, no ACLs on this file system, or no such directory
        return False
