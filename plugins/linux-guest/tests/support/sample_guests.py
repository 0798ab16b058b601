"""For tests: guests as planned by the core, and a directory in which their setup.sh can run."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import JobAttempt
from vtorque_core.api.guest_plan import Address, GuestPlan, JobUser, Share
from vtorque_core.api.values import Image, JobRequest
from vtorque_linux_guest.boot import setup_script
from vtorque_linux_guest.settings import Settings
from vtorque_testing.planned import guest_plan

MICRO = Image("micro", "linux", "micro", "x86_64", "0" * 64, labels={"init": "micro"})
DEBIAN = Image(
    "deb", "linux", "debian", "x86_64", "0" * 64, disk=Path("/p/d"), labels={"agent": "builtin"}
)
ROCKY = Image("rocky9", "linux", "rocky", "x86_64", "0" * 64, disk=Path("/p/r"))
USER = JobUser("alice", 1000, 1000, (("alice", 1000), ("proj", 2000)), "/home/alice", "/bin/sh")
PLAN = guest_plan(
    job=JobAttempt("42.srv", 0, "alice", 1000, "n1"),
    ram_mib=256,
    image=MICRO,
    user=USER,
    request=JobRequest({"disk": ""}),
    addresses=(
        Address(
            "52:54:00:01:02:03", "10.86.0.16", 16, "10.86.0.1", ("10.0.0.53",), ("a.example", "b")
        ),
    ),
    peers=(("vn1", "10.86.0.16"), ("vn2", "10.86.0.80")),
    state_dir=Path("/nonexistent/state"),
    run_dir=Path("/nonexistent/run"),
    shares=(Share("home", "/home/alice", "/home/alice", user_owned=True),),
)

USER_CLOUD_CONFIG = """\
#cloud-config
packages: [gdb, "g++"]
write_files:
- path: /home/alice/.config/x
  content: |
    it's
  permissions: '0600'
- {path: /home/alice/b, encoding: b64, content: AAEC, append: true, defer: true}
runcmd:
- cd /; x=1
- [touch, "a b", "3"]
"""

STUB = """#!/bin/sh
printf '%s\\0' "$#" "${0##*/}" "$@" >>"$STUB_LOG"
"""
STUBBED = ("mount", "chown", "modprobe", "ip", "udhcpc", "ntpd", "systemctl", "restorecon")
NOBODY = 65534
AS_NOBODY: dict[str, Any] = (
    {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
)
SHELLS = (["/bin/dash"], ["/bin/busybox", "sh"])


@dataclass(frozen=True)
class SetupResult:
    """The effects of a setup.sh."""

    code: int
    steps: tuple[str, ...]
    output: str
    calls: tuple[tuple[str, ...], ...]

    def calls_of(self, name: str) -> list[tuple[str, ...]]:
        """Return the arguments of each call of a stub."""
        return [call[1:] for call in self.calls if call[0] == name]


@dataclass(frozen=True)
class FakeRoot:
    """A directory that a setup.sh uses as the guest's root, and commands that only write logs."""

    path: Path
    bin: Path
    shell: Sequence[str]

    def stub(self, name: str, text: str = STUB) -> None:
        """Put a command first on the script's PATH."""
        program = self.bin / name
        program.write_text(text)
        program.chmod(0o755)

    def write(self, path: str, text: str) -> None:
        """Write a file of the guest."""
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def read(self, path: str) -> str:
        """Return the text of a file of the guest."""
        return (self.path / path.lstrip("/")).read_text()

    def mode(self, path: str) -> int:
        """Return the permission bits of a file of the guest."""
        return stat.S_IMODE((self.path / path.lstrip("/")).stat().st_mode)

    def run(self, files: Mapping[str, bytes]) -> SetupResult:
        """Run setup.sh as the agent does: steps on fd 3, nothing of the caller's environment."""
        for name, content in files.items():
            target = self.path / "run/vtorque" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._stubbed(content) if name == "setup.sh" else content)
        _give(self.path)
        log, steps = self.path.parent / "calls", self.path.parent / "steps"
        log.unlink(missing_ok=True)
        opener = ["/bin/sh", "-c", 'exec 3>"$1"; shift; exec "$@"', "sh", str(steps)]
        done = subprocess.run(
            [*opener, *self.shell, str(self.path / "run/vtorque/setup.sh")],
            env={"PATH": f"{self.bin}:/usr/sbin:/usr/bin:/bin", "STUB_LOG": str(log)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=180,
            check=False,
            **AS_NOBODY,
        )
        return SetupResult(
            done.returncode,
            tuple(line.removeprefix("STEP ") for line in steps.read_text("utf-8").splitlines()),
            done.stdout.decode(errors="surrogateescape"),
            _calls(log.read_bytes() if log.exists() else b""),
        )

    def _stubbed(self, script: bytes) -> bytes:
        """Make the stubs functions too: busybox's shell prefers its own applets to the PATH."""
        names = (p.name for p in self.bin.iterdir() if p.name.isidentifier())
        functions = "".join(f'{name}() {{ {self.bin}/{name} "$@"; }}\n' for name in names)
        return script.replace(b"set -eu\n", f"set -eu\n{functions}".encode(), 1)

    def setup(self, guest: GuestPlan, items: Sequence[Any] = (), **more: Any) -> SetupResult:
        """Build and run a guest's setup.sh."""
        settings = more.pop("settings", Settings())
        files = setup_script.build(guest, items, settings, **more)
        below = f"\nR={shlex.quote(str(self.path))}\n".encode()
        return self.run(files | {"setup.sh": files["setup.sh"].replace(b"\nR=''\n", below, 1)})


def _calls(log: bytes) -> tuple[tuple[str, ...], ...]:
    words = iter(log.split(b"\0")[:-1])
    return tuple(tuple(os.fsdecode(next(words)) for _ in range(int(count) + 1)) for count in words)


@contextlib.contextmanager
def fake_guest(shell: Sequence[str]) -> Iterator[FakeRoot]:
    """Yield a root with one network card, a user database and stubs for programs that need a guest.

    Not below pytest's directory: scripts run as the user nobody if the tests run as root, so that
    no mistake in a script or stub can change this machine.
    """
    with tempfile.TemporaryDirectory(prefix="vtorque-guest-") as name:
        _give(Path(name))
        yield _make(FakeRoot(Path(name) / "it's a $(root)", Path(name) / "bin", shell))


def _give(path: Path) -> None:
    """Give the user nobody write access to everything below a path, if the tests run as root."""
    if os.geteuid() == 0:
        for each in (path, *path.rglob("*")):
            os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


def _make(root: FakeRoot) -> FakeRoot:
    for path in ("etc/profile.d", "proc/sys/kernel", "sys/class/net/eth0", "bin", "dev", "run"):
        (root.path / path).mkdir(parents=True)
    root.bin.mkdir()
    for name in STUBBED:
        root.stub(name)
    root.write("/sys/class/net/eth0/address", "52:54:00:01:02:03\n")
    root.write("/bin/sh", "")
    (root.path / "bin/sh").chmod(0o755)
    root.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nalice:x:7:7::/old:/bin/sh\n")
    root.write("/etc/group", "root:x:0:\nproj:x:9:bob\n")
    return root
