"""Choose the directory below the user's home that guests of the user's own image can access.

By default, this is the directory of the submission. Code in a container can be hostile. With access
to the whole home, the code could change ``~/.bashrc``, ``~/.ssh`` and, on a user's own machine,
vTorque's files, and thus take over the account.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from vtorque_core.api import JobRequest, Refused
from vtorque_core.api.guest_plan import Share
from vtorque_own_images.plugin import HOME, WORK

_FIX = (
    "submit from a directory below your home, name one (-vm work=DIR), or share all of your home "
    "(-vm work=home)"
)
NAME = "own-work"


def choose_directory(value: str, home: Path | None = None, cwd: Path | None = None) -> str:
    """Return the value of the option ``work`` that vsub submits.

    It is the word ``home`` (:data:`HOME`) or an absolute path below the home directory. An empty
    ``value`` means the current directory. Refuses links below the home, because code in an earlier
    guest could have replaced a directory with a link, for example to ``~/.ssh``.
    Privileges: the user. Raises Refused.
    """
    if value == HOME:
        return value
    home = home or Path(pwd.getpwuid(os.geteuid()).pw_dir)
    try:
        written = (cwd or _current_directory()) / Path(value).expanduser()
        place = written.resolve(strict=True)
        below = place.relative_to(home.resolve())
    except (OSError, RuntimeError):
        raise Refused("does not exist", key=WORK.key, value=value, fix=_FIX) from None
    except ValueError:
        why = f"is not below your home {home}, so guests of your own image cannot get it"
        raise Refused(why, key=WORK.key, value=str(place), fix=_FIX) from None
    if below == Path():
        why = "is your home, which guests of your own image get only with work=home"
        raise Refused(why, key=WORK.key, value=str(place), fix=_FIX)
    plain = Path(os.path.normpath(written))
    for top in (home, home.resolve()):
        if plain.is_relative_to(top) and plain.relative_to(top) != below:
            why = f"contains a symbolic link to {place}: name the directory that you mean"
            raise Refused(why, key=WORK.key, value=str(plain), fix=_FIX)
    if not place.is_dir():
        raise Refused("is not a directory", key=WORK.key, value=str(place), fix=_FIX)
    return str(home / below)


def _current_directory() -> Path:
    """Return the current directory as the user's shell shows it, which may contain links."""
    shown = os.environ.get("PWD", "")
    with suppress(OSError):
        if shown.startswith("/") and os.path.samefile(shown, "."):  # noqa: PTH121 - as it is
            return Path(shown)
    return Path.cwd()


def request_shares(request: JobRequest, home: str, of_site: Sequence[Share]) -> list[Share]:
    """Return the shares of a request's guests; see :func:`shares`."""
    return shares(request[WORK], home, of_site)


def shares(value: str, home: str, of_site: Sequence[Share]) -> list[Share]:
    """Return a guest's shares: the site's shares, with the directory ``value`` instead of ``home``.

    ``value`` is untrusted. A user process opens the directory, and follows no link that the user
    can change. Raises Refused if the directory is not below the home, or if a share uses NFS.
    """
    if nfs := next((each for each in of_site if each.kind == "nfs"), None):
        # The guest itself mounts such a share, and its root would have the access of any user.
        raise Refused(f"share {nfs.name} uses NFS, which guests of your own image may not mount")
    if value == HOME:
        return list(of_site)
    place = PurePosixPath(value)
    inside = place.is_absolute() and ".." not in place.parts and place.is_relative_to(home)
    if not inside or place == PurePosixPath(home):
        raise Refused("is not a directory below your home", key=WORK.key, value=value, fix=_FIX)
    path, found = str(place), []
    for each in of_site:
        if each.name != "home" and not PurePosixPath(home).is_relative_to(each.source):
            found.append(each)
        elif all(other.name != NAME for other in found):
            found.append(Share(NAME, path, path, each.kind, each.readonly, each.user_owned))
    return found
