"""Run a task farm with pbsdsh over two Debian guests, and compare the tasks' environments.

The batch system local has no pbsdsh. The job gets the one that the plugin pbs writes into guests.
"""

import pytest

from users import run
from vtorque_pbs.inside_guests import PBSDSH

pytestmark = [pytest.mark.e2e, pytest.mark.full]

# Each task prints its numbers and the variables that it has.
TASK = """#!/bin/sh
printf '%s %s %s %s|%s|%s|%s|%s\\n' "$PBS_TASKNUM" "$PBS_VNODENUM" "$PBS_NODENUM" \\
  "$VTORQUE_RANK" "$FARM" "$MADE" "$SHELL" "$(umask) $(pwd) $(hostname | sed s/.*-//)" >> farm.$1
"""
JOB = r"""#!/bin/bash
export PATH=~:$PATH
export MADE=$'it\'s\nexport PBS_TASKNUM=9\n"\377"'
pbsdsh -s sh ./task.sh all
pbsdsh -s -u sh ./task.sh each
pbsdsh -s -n 2 sh ./task.sh one
other=$(sort -u $PBS_NODEFILE | tail -n 1)
ssh -o BatchMode=yes $other 'echo "$0 $SHELL"' > farm.ssh
"""


@pytest.fixture(scope="module")
def debian(node):
    """Return the node with the image in its pool."""
    if node.root("vmgr", "images", "show", "debian", check=False).returncode:
        node.root("vmgr", "images", "build", "debian", "debian", timeout=1200)
    return node


def test_task_farm_runs_with_the_same_environment_on_every_guest(debian, guest):
    """If the image lacks the user's login shell, ssh and the tasks use /bin/sh."""
    run("usermod", "-s", "/bin/zsh", guest.user)
    try:
        guest.script(TASK, "task.sh")
        (guest.home / guest.script(PBSDSH, "pbsdsh")).chmod(0o755)
        result = guest.job(
            JOB, "-v", "FARM=a b", "-vm", "img=debian,ram=512M,vcpus=2,vms_per_node=2", timeout=900
        )
    finally:
        run("usermod", "-s", "/bin/bash", guest.user)
    assert (result.code, result.err) == (0, b""), result.out
    made = b'it\'s\nexport PBS_TASKNUM=9\n"\xff"'

    def line(numbers, index):
        where = f"0077 {guest.home} {index}".encode()
        return numbers.encode() + b"|a b|" + made + b"|/bin/sh|" + where + b"\n"

    tasks = [line("2 0 0 0", 0), line("3 1 0 0", 0), line("4 2 1 1", 1), line("5 3 1 1", 1)]
    assert (guest.home / "farm.all").read_bytes() == b"".join(tasks)
    assert (guest.home / "farm.each").read_bytes() == tasks[0] + line("3 2 1 1", 1)
    assert (guest.home / "farm.one").read_bytes() == line("2 2 1 1", 1)
    assert (guest.home / "farm.ssh").read_text() == "sh /bin/sh\n"
