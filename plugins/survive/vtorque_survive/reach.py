"""Run commands as root on another node, with ``[plugin.survive] remote_command``.

``remote_command`` runs without a local shell. Requests are sent to its standard input, so that a
remote shell (ssh(1)) sees only fixed words.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vtorque_core.api import HostFault, Refused, printable
from vtorque_core.live import service
from vtorque_survive.settings import Settings

_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ANSWER = 120.0  # seconds; the answer may follow a release
_ENDS = 5.0  # seconds for the helper of a closed connection to end


def argv(settings: Settings, node: str, words: Sequence[str]) -> list[str]:
    """Return the command line that runs the command ``words`` on another node.

    Raises:
        Refused: If ``remote_command`` is empty, or ``node`` or a word is unsafe for a shell.
    """
    if not settings.remote_command:
        raise Refused(
            "migration between nodes is disabled on this site ([plugin.survive] "
            "remote_command is empty)"
        )
    if not _NODE.fullmatch(node):
        raise Refused(f"{printable(node)} is not a valid node name")
    if wrong := [word for word in words if not _WORD.fullmatch(word)]:
        raise Refused(f"{printable(wrong[0])} contains characters that are not safe for a shell")
    return [
        *(word.replace("{node}", node) for word in shlex.split(settings.remote_command)),
        *words,
    ]


def ask(config: Path, settings: Settings, node: str, what: Mapping[str, Any]) -> Any:
    """Send ``what`` to :mod:`vtorque_survive.arrival` on another node, and return the answer."""
    command = argv(settings, node, service.vmgr(config, "arrival"))
    try:
        done = subprocess.run(
            command, input=json.dumps(what).encode(), capture_output=True, timeout=_ANSWER,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout)["answer"]
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_ANSWER:g} s"
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error)
    raise HostFault(f"{node} did not answer the request: {printable(reason, 300)}")


class Bridge:
    """A context manager for a local socket that connects to another node's libvirtd.

    For each connection, ``remote_command`` runs libvirt's ``virt-ssh-helper`` on that node. If this
    process is killed, these commands and a migration over the connections continue.
    """

    def __init__(self, settings: Settings, node: str, uri: str, directory: Path) -> None:
        driver, separator, path = uri.partition(":///")
        if not separator or "+" in driver or "?" in path:
            raise Refused(
                f"[node] libvirt_uri={uri}: guests can only be migrated with a URI like "
                "qemu:///system"
            )
        self._argv = argv(settings, node, ("virt-ssh-helper", uri))
        self._socket = directory / "libvirt"
        self._carriers: list[subprocess.Popen[bytes]] = []
        self.uri = f"{driver}+unix:///{path}?socket={self._socket}"

    def __enter__(self) -> Self:
        """Listen on the socket."""
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._socket.parent.mkdir(mode=0o700, exist_ok=True)
            self._socket.unlink(missing_ok=True)
            self._listener.bind(str(self._socket))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise HostFault(f"{self._socket}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the socket and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for carrier in self._carriers:
            with suppress(subprocess.TimeoutExpired):
                carrier.wait(_ENDS)
            carrier.kill()
            carrier.wait()
        with suppress(OSError):
            self._socket.unlink(missing_ok=True)
            self._socket.parent.rmdir()

    def _carry(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                both = connection.fileno()
                null = subprocess.DEVNULL
                made = subprocess.Popen(
                    self._argv, stdin=both, stdout=both, stderr=null, start_new_session=True
                )
                self._carriers.append(made)
