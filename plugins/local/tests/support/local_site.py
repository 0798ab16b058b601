"""The embedded batch system in a directory, with doubles of the hooks and of the job shell.

The hooks are shell scripts that record their arguments; the job shell runs the script here. Jobs
without a request blob are bare metal and need no double.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from as_root import with_a_shell
from patience import LONG
from vtorque_core.api import Paths
from vtorque_local.mom import JobPrograms
from vtorque_local.service import LocalService, Setup
from vtorque_local.submitter import LocalSubmitter
from vtorque_pbs import convention as pbs

HOST = socket.gethostname()
SUBMIT = """
import sys; from pathlib import Path; from vtorque_core.base.locks import Busy
from vtorque_core.api import Paths
from vtorque_local.submitter import LocalSubmitter
s = LocalSubmitter(Paths(run=Path(sys.argv[1])))
sys.exit(s.submit(s.split(sys.argv[2:]), None, None))
"""
HOOK = """#!/bin/sh
# records its arguments and environment; slow, held up or failing if the test says so
for a; do printf '%s\\n' "$a"; done > "{dir}/{name}.$1.new"
env > "{dir}/{name}.env"
mv "{dir}/{name}.$1.new" "{dir}/{name}.$1"
[ ! -e "{dir}/{name}.sleep" ] || sleep "$(cat "{dir}/{name}.sleep")"
while [ -e "{dir}/{name}.hold" ]; do sleep 0.02; done
[ ! -e "{dir}/{name}.says" ] || cat "{dir}/{name}.says"
[ ! -e "{dir}/{name}.exit" ] || exit "$(cat "{dir}/{name}.exit")"
"""
WRAPPER = """#!/bin/sh
# a double of the job shell: reads Torque's line, runs the script here
read -r line
printf '%s\\n' "$line" > "{dir}/wrapper.line"
eval "set -- $line"
exec sh "$@"
"""


def serve(config: dict, tell: int, log: int) -> None:
    """Run the service, in a separate process."""
    with_a_shell(pytest.MonkeyPatch())
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    service = LocalService(
        Setup(
            Path(config["run"]),
            Path(config["spool"]),
            JobPrograms(**config["programs"]),
            ["true"],
            slots=config["slots"],
            root_jobs=True,
            idle=config.get("idle"),
            **({"acceptor": config["acceptor"]} if "acceptor" in config else {}),
        )
    )
    service.open()
    os.write(tell, b"up\n")
    os.close(tell)
    service.serve()


class LocalSite:
    """A service in a separate directory, and a submitter for it."""

    def __init__(self, root: Path, slots: int = 2, kill_after: float = 0.4, **more: object) -> None:
        self.root = root
        self.paths = Paths(state=root / "state", run=root / "run")
        self.spool = root / "state" / "local"
        self.submitter = LocalSubmitter(self.paths)
        self.slots = slots
        commands = {}
        for name, text in (("prologue", HOOK), ("epilogue", HOOK), ("wrapper", WRAPPER)):
            path = root / name
            path.write_text(text.format(dir=root, name=name))
            path.chmod(0o755)
            commands[name] = [str(path)]
        self.config = {
            "run": str(self.paths.run),
            "spool": str(self.spool),
            "slots": slots,
            "programs": commands | {"kill_after": kill_after, "hook_timeout": 2 * LONG},
            **more,
        }
        self.start()

    def start(self) -> None:
        self.log = (self.root / "log").open("ab")
        told, tell = os.pipe()
        arguments = self.config, tell, self.log.fileno()
        # Forked: a new Python would spend most of the test's time on its imports.
        self.process = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
        self.process.start()
        os.close(tell)
        with os.fdopen(told, "rb") as up:
            assert up.read() == b"up\n", (self.root / "log").read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return self.ended()

    def ended(self) -> int | None:
        self.process.join(LONG)
        self.log.close()
        return self.process.exitcode

    def script(self, text: str, name: str = "job.sh") -> str:
        path = self.root / name
        path.write_text(text)
        return str(path)

    def submit(self, *argv: str, blob: bytes | None = None) -> int:
        return self.submitter.submit(self.submitter.split(argv), blob, None)

    def hook(self, name: str, job_id: str) -> list[str]:
        return self.wait_for(self.root / f"{name}.{job_id}").read_text().split("\n")[:-1]

    def wait_for(self, path: Path, text: str = "") -> Path:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            if path.exists() and text in path.read_text():
                return path
            time.sleep(0.01)
        raise AssertionError(f"{path} never had {text!r}; log: {(self.root / 'log').read_text()}")

    def done(self, number: str) -> int | None:
        """Wait for the end of the job; return its exit code, None if it never got a slot."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            if not (self.spool / "jobs" / number).exists():
                ended = self.root / f"epilogue.{number}.{HOST}"
                status = ended.read_text().split("\n")[9] if ended.exists() else None
                return None if status is None else pbs.shell_code(int(status))
            time.sleep(0.01)
        raise AssertionError(f"job {number} never ended; log: {(self.root / 'log').read_text()}")


@contextlib.contextmanager
def fresh_site(kill_after: float = 0.4, **more: object) -> Iterator[LocalSite]:
    """Yield a site in a separate directory, which is the working directory."""
    root = Path(tempfile.mkdtemp(prefix="vtl"))
    site = LocalSite(root, kill_after=kill_after, **more)
    try:
        with contextlib.chdir(root):
            yield site
    except BaseException:
        if site.process.exitcode is None:
            site.stop(signal.SIGKILL)  # otherwise a failed test waits for it at its end
        raise
    if site.process.exitcode is None:
        assert site.stop() == 0, (root / "log").read_text()
    shutil.rmtree(root)
