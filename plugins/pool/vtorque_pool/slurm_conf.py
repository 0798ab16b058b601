"""The pool's lines for slurm.conf(5), and the setup steps that write them.

The lines are in a separate file that slurm.conf includes. They never override the site's settings.
If settings conflict, the setup step says what to change.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from vtorque_admin.steps import MARK, Change, Check, ReplacedFile, edit_file, hook_script
from vtorque_core.api import HostFault, name_errors
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_pool import unit
from vtorque_pool.settings import Settings

NAME = "vtorque-pool.conf"
_PROGRAMS = {"ResumeProgram": "resume", "SuspendProgram": "suspend", "ResumeFailProgram": "failed"}
_INCLUDE = f"include {NAME}  # {MARK.decode()}\n"
_WORDS = {  # values that list options must contain, here or in the site's slurm.conf
    "SlurmctldParameters": "idle_on_node_suspend",
    "PrivateData": "cloud",
    "CommunicationParameters": "NoAddrCache",
}
_DEPTH = 8


def lines(settings: Settings, conf: Path) -> list[str]:
    """Return the pool's lines, without options such as TreeWidth that the site itself sets."""
    said = dict(_iter_values(conf, _DEPTH, but=NAME))
    programs = conf.parent / "vtorque-pool"
    found = [f"{key}={programs / word}" for key, word in _PROGRAMS.items()]
    found += [
        f"ResumeTimeout={round(settings.boot_timeout)}",
        f"SuspendTimeout={round(settings.delete_timeout)}",
        f"SuspendTime={round(settings.idle_timeout)}",
        "ResumeRate=0",
        "SuspendRate=0",
    ]
    if exceptions := _exceptions(settings, conf):
        found.append(f"SuspendExcNodes={exceptions}")
    if "ReturnToService" not in said:
        found.append("ReturnToService=2")
    if "TreeWidth" not in said:
        found.append("TreeWidth=65533")
    found += [f"{key}={word}" for key, word in _WORDS.items() if key not in said]
    for shape in settings.shapes:
        features = f" Feature={','.join(shape.features)}" if shape.features else ""
        found.append(
            f"NodeName={shape.nodes} State=CLOUD CPUs={shape.cpus} "
            f"RealMemory={shape.memory}{features}"
        )
    return found


def _exceptions(settings: Settings, conf: Path) -> str:
    """Return SuspendExcNodes: ``NODES:min_nodes`` per shape, and the nodes outside the pool."""
    counted = [f"{shape.nodes}:{shape.min_nodes}" for shape in settings.shapes if shape.min_nodes]
    ours = {shape.nodes for shape in settings.shapes}
    others = [
        value
        for key, value in _iter_values(conf, _DEPTH, but=NAME)
        if key == "NodeName" and value not in ours and value.upper() != "DEFAULT"
    ]
    return ",".join((*counted, *dict.fromkeys(others)))


def steps(settings: Settings, place: Installation) -> list[SetupStep]:
    """Return the setup steps for slurmctld's host, in order."""
    conf = Path(settings.slurm_conf)
    said = dict(_iter_values(conf, _DEPTH, but=NAME))
    user = said.get("SlurmUser", "root").partition("(")[0]
    found: list[SetupStep] = list(_checks(said, conf))
    for word in _PROGRAMS.values():
        program = hook_script(f'exec {shlex.join(_call(place, word))} "$@"')
        found.append(ReplacedFile(conf.parent / "vtorque-pool" / word, program))
    found.append(_owner_step(Path(settings.state), user, os.O_DIRECTORY))
    found.append(_owner_step(Path(settings.log), user, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW))
    text = "\n".join((f"# Written by {MARK.decode()}.", *lines(settings, conf), ""))
    found.append(ReplacedFile(conf.parent / NAME, text.encode(), mode=0o644))
    found.append(_include(conf))
    found += unit.steps(place, user)
    return found


def _call(place: Installation, word: str) -> tuple[str, ...]:
    words = (word, "--config", str(place.config))
    if place.python is None:
        return (str(place.program.with_name("vtorque-pool")), *words)
    return (str(place.python), "-I", "-m", "vtorque_pool", *words)


def _checks(said: dict[str, str], conf: Path) -> Iterator[Check]:
    for key, ours in _WORDS.items():
        words = {word.strip().lower() for word in said.get(key, ours).split(",")}
        problem = f"{conf}: add {ours} to {key}={said.get(key, '')}"
        yield Check(f"{key} with {ours}", "" if ours.lower() in words else problem)
    for key in _PROGRAMS:
        problem = (
            f"{conf}: the site sets {key}={said.get(key)}, but only one program can start "
            "nodes; remove it"
        )
        yield Check(f"{key} is the pool's", problem if key in said else "")


def _owner_step(path: Path, user: str, flags: int) -> Change:
    def done() -> bool:
        return path.exists() and path.stat().st_uid == _uid(user)

    def make() -> None:
        with name_errors(path):
            if flags & os.O_DIRECTORY:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o640)
            os.fchown(descriptor, _uid(user), -1)
            os.close(descriptor)

    return Change(f"create {path}, owned by {user}", done, make, lambda: None)


def _uid(user: str) -> int:
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise HostFault(f"SlurmUser={user} is not a user of this host") from None


def _include(conf: Path) -> Change:
    ours = _INCLUDE.encode()
    return Change(
        f"include {NAME} in {conf} (then restart slurmctld, because the nodes are new)",
        lambda: ours in _bytes(conf),
        lambda: _edit(conf, lambda text: text.replace(ours, b"") + _end(text) + ours),
        lambda: _edit(conf, lambda text: _remove_include(text, ours)),
    )


def _remove_include(text: bytes, ours: bytes) -> bytes:
    """Return slurm.conf without the pool's include line and the newline added before it."""
    return text.replace(b"\n# (no newline)\n" + ours, b"").replace(ours, b"")


def _end(text: bytes) -> bytes:
    """Return a newline and a comment if the last line of ``text`` has no newline.

    :func:`_remove_include` finds the added newline by this comment.
    """
    return b"" if not text or text.endswith(b"\n") else b"\n# (no newline)\n"


def _edit(conf: Path, change: Callable[[bytes], bytes]) -> None:
    edit_file(conf, change)


def _bytes(conf: Path) -> bytes:
    try:
        return conf.read_bytes()
    except OSError as error:
        raise HostFault(f"{conf}: {error.strerror}: set slurm_conf in [plugin.pool]") from None


def _iter_values(conf: Path, depth: int, *, but: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a slurm.conf and its includes, except the file ``but``."""
    for line in _bytes(conf).decode("utf-8", "surrogateescape").splitlines():
        include = re.match(r"\s*include\s+(\S+)", line, re.IGNORECASE)
        if include and depth and include[1] != but:
            yield from _iter_values(conf.parent / include[1], depth - 1, but=but)
        match = re.match(r"\s*(\w+)\s*=\s*([^#\s]*)", line)
        if match:
            yield _KEYS.get(match[1].lower(), match[1]), match[2].strip('"')


_KEYS: dict[str, str] = {
    key.lower(): key
    for key in (*_WORDS, *_PROGRAMS, "SlurmUser", "NodeName", "ReturnToService", "TreeWidth")
}
