"""Heterogeneous jobs on the real Slurm: a guest in the first component, bare metal behind it."""

import re
from importlib.resources import files

import pytest

import slurm_cluster as slurm
from vtorque_slurm.hostlist import expand

pytestmark = [pytest.mark.e2e, pytest.mark.full]

# A double of ssh, because the micro image has no ssh and these machines no sshd. A shell of the
# user on the node reads the standard input. The network connection is real.
REMOTE = """#!/bin/sh
while [ $# -gt 4 ]; do shift; done
exec nc "$1" 7022
"""
SERVER = """
import socketserver, subprocess
class Shell(socketserver.StreamRequestHandler):
    def handle(self):
        fd = self.connection.fileno()
        subprocess.run(["/bin/sh", "-s"], stdin=fd, stdout=fd, stderr=fd, cwd="/")
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("", 7022), Shell).serve_forever()
"""
SCRIPT = """#!/bin/bash
#SBATCH -N1 -c2 -C vtorque
#VSUB -vm ram=256M
#SBATCH hetjob
#SBATCH -N2 --ntasks-per-node=2
PATH=$HOME/bin:$PATH
export VTORQUE_ON_GUEST=$HOME/bin/on-guest
echo "at $(hostname)" "$@"
echo "groups $SLURM_JOB_NODELIST_HET_GROUP_0 $SLURM_JOB_NODELIST_HET_GROUP_1"
echo "job $SLURM_JOB_NODELIST $SLURM_NNODES $SLURM_HET_SIZE"
echo "file" $(cat $VTORQUE_HOSTFILE)
echo from the guest | nc -l -p 8080 &
export SERVICE=$(hostname -i)
srun --het-group=0,1 -n2 sh -c 'echo "task $SLURM_PROCID/$SLURM_NTASKS $(hostname) $(id -un)"'
srun --het-group=1 -N1 -n1 python3 -c '
import os, socket, time
for _ in range(300):  # as long as nc is about to listen
    try:
        service = socket.create_connection((os.environ["SERVICE"], 8080))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
print("solver", service.makefile().readline().strip(), "at", os.uname().nodename)'
exit 3
"""


@pytest.fixture
def remote_commands(clean):
    """Let the nodes run the commands of the ssh double, as the user."""
    (clean.home / "bin").mkdir(exist_ok=True)
    clean.script(REMOTE, "bin/ssh")
    on_guest = files("vtorque_linux_guest.guest").joinpath("on-guest")  # images with ssh have it
    clean.script(on_guest.read_text(), "bin/on-guest")
    clean.script(SERVER, "server.py")
    for node in slurm.NODES:
        command = "exec setsid python3 server.py >/dev/null 2>&1 </dev/null &"
        clean.user("sh", "-c", command, machine=node)
    yield clean
    for node in slurm.NODES:
        for pid in clean.processes(node, "^python3 server.py"):
            clean.root(node, "kill", pid)


FIRST, SECOND = ("-N1", "-c2", "-Cvtorque", "--vm=ram=256M"), ("-N2", "--ntasks-per-node=2")
SPELLINGS = {
    "vsub": (("vsub",), SCRIPT),
    "directive": (("sbatch",), SCRIPT.replace("#VSUB -vm ", "#SBATCH --vm=")),
    "sbatch": (("sbatch", *FIRST, ":", *SECOND), re.sub("#(SBATCH|VSUB).*", "#", SCRIPT)),
}


@pytest.mark.parametrize(("command", "text"), SPELLINGS.values(), ids=SPELLINGS)
def test_service_in_a_guest_is_reached_from_bare_metal_nodes(remote_commands, command, text):
    """The script runs in the guest; ranks run there and on the nodes, where nothing is left."""
    argv = (command[0], "--parsable", "-oout", *command[1:], remote_commands.script(text), "a b")
    job_id = remote_commands.user(*argv).stdout.decode().strip()
    remote_commands.wait_state(job_id, "COMPLETED", "FAILED")
    assert remote_commands.show(job_id)["ExitCode"] == "3:0"
    rows = remote_commands.root("head", "scontrol", "show", "job", job_id)
    first, *bare = [hosts for line in re.findall(r"^   NodeList=(\S+)$", rows, re.MULTILINE)
                    for hosts in expand(line)]  # fmt: skip
    guest, tasks = f"v{first}", [first, *bare]
    lines = remote_commands.read("out").decode().splitlines()
    assert lines[:3] == [
        f"at {guest} a b",
        f"groups {guest} {re.findall(r'NodeList=(.*)', rows)[-1]}",
        f"job {guest} 1 2",
    ]
    assert lines[3] == "file " + " ".join(each for one in (guest, *bare) for each in (one, one))
    assert sorted(lines[4:8]) == [
        f"task {rank}/4 {host} {slurm.USER}" for rank, host in enumerate((guest, guest, *bare))
    ]
    assert lines[8] == f"solver from the guest at {bare[0]}"
    assert len(lines) == 9
    records = [remote_commands.root(node, "ls", f"/var/lib/vtorque/kept/{slurm.UID}", check=False)
               for node in tasks]  # fmt: skip
    assert [f"{job_id}.0" in names for names in records] == [True, False, False]
