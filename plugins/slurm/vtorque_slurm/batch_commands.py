"""Run Slurm commands as root on a node, with a fixed PATH and a timeout."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from vtorque_core.api import HostFault, printable
from vtorque_slurm.settings import Settings

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_TRIES, _PAUSE = 3, 2.0  # the controller may be busy


@dataclass(frozen=True)
class SlurmClient:
    """Client for Slurm's controller. SLURM_CONF is taken from ``environ``."""

    settings: Settings
    environ: Mapping[str, str] = field(default_factory=dict)

    def ask(self, *argv: str) -> str:
        """Run a read-only command with retries and return its output."""
        for left in reversed(range(_TRIES)):
            try:
                return self.run(*argv)
            except HostFault:
                if not left:
                    raise
                time.sleep(_PAUSE)
        raise AssertionError

    def run(self, *argv: str) -> str:
        """Run a command once and return its output.

        Raises:
            HostFault: The command failed or timed out. The message quotes its output.
        """
        name, *rest = argv
        try:
            done = subprocess.run(
                ["/usr/bin/env", name, *rest],
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.settings.timeout,
                check=False,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise HostFault(f"{name}: timed out after {self.settings.timeout:g} s") from None
        if done.returncode != 0:
            output = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise HostFault(f"{name}: exit code {done.returncode}: {printable(output, 300)}")
        return done.stdout.decode("utf-8", "surrogateescape")

    def start_detached(self, script: str, *args: str) -> None:
        """Start a POSIX sh script that outlives this process."""
        subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *args],
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # slurmd kills the process group of Prolog
            cwd="/",
        )

    def _environ(self) -> dict[str, str]:
        conf = self.environ.get("SLURM_CONF") or self.settings.conf
        path = f"{self.settings.bindir}:{_PATH}" if self.settings.bindir else _PATH
        environ = {"PATH": path, "LC_ALL": "C", "HOME": "/root"}
        if os.access(conf, os.R_OK):  # otherwise Slurm's default, or no file ("configless")
            environ["SLURM_CONF"] = conf
        return environ
