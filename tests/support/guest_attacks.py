"""Helpers for tests that attack as root inside a guest.

A site's guest prologue, which administrators may configure, installs ``attacker.c`` setuid root. A
job's script runs it to become root in the guest.
"""

import base64
import contextlib
import os
import pwd
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from users import TIMEOUT

PLACE = Path("/srv/vtorque-e2e-attack")
MARK = b"\n# -- tests/e2e/guest_root: until here the node's own\n"
CONFIG = f"""
[plugin.linux-guest]
prologue = "{PLACE}/prologue"
[shares.home]
source = "{{home}}"
target = "/home/{{user}}"
user_owned = true
[shares.opt]
source = "{PLACE}/opt"
target = "/opt-hpc"
readonly = true
"""
HEAD = """#!/bin/rootsh sh
t() {
  name=$1; shift
  if "$@" >/tmp/said 2>&1; then echo "@@ $name ok"; else echo "@@ $name fail"; fi
}
meet() { touch $HOME/at-$1; while [ ! -e $HOME/go-$1 ]; do sleep 0.1; done; }
[ "$(id -u)" = 0 ] || exit 99
cd $HOME
"""


@contextlib.contextmanager
def armed(node):
    """Give the node a guest prologue that makes the job's user root, and a read-only share."""
    own = node.config.read_bytes().partition(MARK)[0]
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "prologue").mkdir(parents=True)
    (PLACE / "opt/lib").mkdir(parents=True)
    binary = PLACE / "rootsh"
    source = Path(__file__).with_name("attacker.c")
    build = ["musl-gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", binary, source]
    subprocess.run(build, check=True, timeout=180)
    coded = base64.encodebytes(binary.read_bytes()).decode()
    script = PLACE / "prologue/10-rootsh"
    script.write_text(
        f"#!/bin/sh\nbase64 -d >/bin/rootsh <<'END'\n{coded}END\nchmod 4755 /bin/rootsh\n"
    )
    entry = pwd.getpwnam(node.user)
    (PLACE / "opt/lib/data").write_text("of the site\n")
    (PLACE / "opt/users").write_text("of the user\n")
    os.chown(PLACE / "opt/users", entry.pw_uid, entry.pw_gid)
    for path in (PLACE, PLACE / "prologue", PLACE / "opt", PLACE / "opt/lib"):
        path.chmod(0o755)
    try:
        node.config.write_bytes(own + MARK + CONFIG.encode())
        yield node
    finally:
        node.config.write_bytes(own)
        shutil.rmtree(PLACE, ignore_errors=True)


def attack(node, text, *args, timeout=TIMEOUT):
    """Run a script as root in a guest; return the job's result and each attack's outcome."""
    result = node.job(HEAD + text, *args, timeout=timeout)
    assert result.code != 99, "the script was not root in the guest"
    said = dict(re.findall(rb"^@@ (\S+) (ok|fail)$", result.out, re.MULTILINE))
    return result, {name.decode(): how.decode() for name, how in said.items()}


class Meeting:
    """A running attack that waits for the test at named points."""

    def __init__(self, node, text):
        self.node = node
        self.pool = ThreadPoolExecutor(1)
        self.job = self.pool.submit(node.job, HEAD + text)

    def wait(self, point):
        def there():
            assert not self.job.done(), self.job.result().err
            return (self.node.home / f"at-{point}").exists()

        self.node.wait_for(there, what=f"attack at {point}")

    def go(self, point):
        (self.node.home / f"go-{point}").touch()

    def end(self):
        result = self.job.result(TIMEOUT)
        self.pool.shutdown()
        assert result.code != 99, "the script was not root in the guest"
        return result


def by_the_user(node, name, content="x\n", mode=0o644):
    path = node.home / name
    path.write_text(content)
    entry = pwd.getpwnam(node.user)
    os.chown(path, entry.pw_uid, entry.pw_gid)
    path.chmod(mode)
    return path


def tree(top):
    """Return the state of a directory: names, owners, modes, times and contents."""
    return {
        str(p): (s.st_uid, s.st_gid, s.st_mode, s.st_mtime_ns, s.st_ctime_ns,
                 p.read_bytes() if p.is_file() else None)
        for p in [top, *sorted(top.rglob("*"))] if (s := p.lstat())
    }  # fmt: skip
