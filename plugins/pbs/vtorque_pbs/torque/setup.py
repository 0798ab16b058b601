"""What makes a Torque node call vTorque: for ``vtorque setup`` and ``vtorque doctor``. As root."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api_node import Site
from vtorque_core.api_setup import (
    KEPT,
    MARK,
    Check,
    Installation,
    ReplacedFile,
    SetupStep,
    long_enough,
)
from vtorque_pbs import hooks
from vtorque_pbs.hooks import FIRST, SISTER
from vtorque_pbs.node import PbsNode
from vtorque_pbs.run import Commands
from vtorque_pbs.settings import Settings

_ALARM = re.compile(rb"^[ \t]*\$prologalarm[ \t]+([0-9]+)[ \t]*\r?$", re.MULTILINE)
_BESIDE_A_START = 70.0  # seconds; pbs_mom kills a prologue 10 s before $prologalarm
_OFF = b"#vtorque# "
_OURS = b"# Written by " + MARK + b"; with the next line"


def steps(
    node: PbsNode, site: Site, settings: Settings, place: Installation
) -> Sequence[SetupStep]:
    """Return the steps in order: what makes jobs come here is the last."""
    priv = node.home / "mom_priv"
    journal, proof = site.paths.journal, site.paths.run / "proof"
    names = ("prologue", "prologue.parallel", "epilogue", "epilogue.parallel")
    found: list[SetupStep] = [_is_node(priv), *(_trusted(priv / name) for name in names)]
    for name, kind in (("prologue", FIRST), ("prologue.parallel", SISTER)):
        path = priv / name
        found.append(ReplacedFile(path, hooks.torque_prologue(place, path, kind)))
    for name in ("epilogue", "epilogue.parallel"):
        path = priv / name
        found.append(ReplacedFile(path, hooks.torque_epilogue(place, path, journal, proof)))
    why = "a start, the site's own prologue and the 10 s that pbs_mom takes off"
    limit, least = settings.prologue_alarm, place.start_time + _BESIDE_A_START
    found.append(long_enough("[plugin.pbs] prologue_alarm", limit, least, why))
    found += [PrologAlarm(priv, math.ceil(limit)), rights(node.commands)]
    return [*found, Marked(node, settings.property)] if settings.property else found


def _is_node(priv: Path) -> Check:
    problem = "" if priv.is_dir() else (
        f"{priv} does not exist: is this a Torque node? If its PBS_HOME is elsewhere, set "
        "[plugin.pbs] home"
    )  # fmt: skip
    return Check(f"find {priv}", problem)


def _trusted(path: Path) -> Check:
    """Look at a script of the site's: chained, it would run as root whoever can change it."""
    problem = ""
    for each in (path, path.with_name(path.name + KEPT)):
        with contextlib.suppress(FileNotFoundError):
            status = each.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid or status.st_mode & 0o022:
                problem = f"{each} is no file that only root can change: Torque does not run it"
    return Check(f"look at {path}", problem)


@dataclass(frozen=True)
class PrologAlarm:
    """``$prologalarm`` of ``mom_priv/config`` leaves a start the time that it has."""

    priv: Path
    seconds: int

    @property
    def text(self) -> str:
        """Say what is set."""
        return f"set $prologalarm to {self.seconds} (s) in {self.priv / 'config'}"

    def done(self) -> bool:
        """Return True if the last line of that name allows as much."""
        found = _ALARM.findall(self._read())
        return bool(found) and int(found[-1]) >= self.seconds

    def apply(self) -> None:
        """Comment other lines of that name out, add ours, let pbs_mom read it."""
        text = _without_ours(self._read())
        text = _ALARM.sub(lambda match: _OFF + match[0], text)
        end = b"" if text.endswith(b"\n") or not text else b" and its newline before\n"
        if end:
            text += b"\n"
        text += _OURS + (end or b"\n") + b"$prologalarm %d\n" % self.seconds
        self._write(text)

    def undo(self) -> None:
        """Take our line out, and the others back in."""
        text = self._read()
        if (plain := _without_ours(text)) != text:
            self._write(plain)

    def _read(self) -> bytes:
        try:
            return (self.priv / "config").read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise HostFault(f"{self.priv / 'config'}: {error.strerror}") from None

    def _write(self, text: bytes) -> None:
        config = self.priv / "config"
        new = self.priv / ".config.vtorque-new"
        try:
            if not text and config.exists():
                config.unlink()  # there was none before
            else:
                mode = stat.S_IMODE(config.stat().st_mode) if config.exists() else 0o644
                new.unlink(missing_ok=True)
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                    os.fchmod(descriptor, mode)
                new.replace(config)
        except OSError as error:
            raise HostFault(f"{config}: {error.strerror}") from None
        reread(self.priv)


def _without_ours(text: bytes) -> bytes:
    """Return the config as it was before ours: byte for byte."""
    found = re.search(
        rb"^" + re.escape(_OURS) + rb"( and its newline before)?\n\$prologalarm [0-9]+\n",
        text,
        re.MULTILINE,
    )
    if found is None:
        return text
    before = text[: found.start()]
    if found[1] and before.endswith(b"\n"):
        before = before[:-1]
    return re.sub(rb"^" + _OFF, b"", before + text[found.end() :], flags=re.MULTILINE)


def reread(priv: Path) -> None:
    """Let a running pbs_mom read its config again: SIGHUP (pbs_mom(8B))."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((priv / "mom.lock").read_text())
        if Path("/proc", str(pid), "comm").read_text().strip() == "pbs_mom":
            os.kill(pid, signal.SIGHUP)


def rights(commands: Commands) -> Check:
    """Look whether root on this node is a manager, who may hold jobs and change nodes."""
    host = socket.gethostname()
    try:
        problem = "" if _is_manager(commands, host) else (
            f"root@{host} is no manager of the batch system; on its server, run: "
            f"qmgr -c 'set server managers += root@{host}'"
        )  # fmt: skip
    except HostFault as error:
        problem = f"the batch system's server does not answer: {error}"
    return Check(f"find root@{host} among the server's managers", problem)


def _is_manager(commands: Commands, host: str) -> bool:
    said = commands.tell("qmgr", "-c", "list server")
    names = re.search(r"^\s*managers = (.*)$", said, re.MULTILINE)
    managers = {each.strip() for each in (names[1] if names else "").split(",")}
    server = re.search(r"^Server:? (\S+)", said, re.MULTILINE)
    short = host.partition(".")[0]
    mine = {f"root@{name}" for name in (host, short, socket.getfqdn(), "*")}
    return bool(mine & managers) or (server is not None and server[1] in (host, short))


@dataclass(frozen=True)
class Marked:
    """This node has the property that VM jobs ask for."""

    node: PbsNode
    feature: str

    @property
    def text(self) -> str:
        """Say which."""
        return f"give this node {self.feature}, which VM jobs ask for"

    def done(self) -> bool:
        """Return whether it has. Raises HostFault if the server does not answer."""
        return self.node.is_marked(self.node.this_node()[1])

    def apply(self) -> None:
        """Have the server set it. Raises HostFault."""
        self.node.mark(True, "")

    def undo(self) -> None:
        """Have the server clear it, with no note. Raises HostFault."""
        self.node.unmark()
