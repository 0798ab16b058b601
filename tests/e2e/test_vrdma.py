"""Soft-RoCE in real guests and with a real filter: one job is a fabric, two jobs are separate."""

import subprocess
import sys

import pytest

from rdma_image import IMAGE, ensure
from running_jobs import beside_another

pytestmark = pytest.mark.e2e

# Which GID is of RoCE v2 and IPv4: ::ffff:a.b.c.d (rdma_rxe makes one for each address).
GID = (
    "gid() { grep -l 0000:0000:0000:0000:0000:ffff /sys/class/infiniband/rxe0/ports/1/gids/*"
    " | head -1 | sed 's,.*/,,'; }\n"
)


@pytest.fixture(scope="module")
def rdma(node):
    """Return the node with Debian's generic kernel and RDMA programs in an image."""
    ensure(node)
    return node


@pytest.mark.full
def test_two_guests_of_a_job_run_ping_pong(rdma, clean):
    """The program runs as the job's user; ``clean`` checks that the packet filter is removed."""
    result = clean.job(
        "#!/bin/bash\n" + GID + "declare -f gid >$HOME/gid.sh\n"
        "set -e\n"
        "id -un; ibv_devices | tail -n +3; stat -L -c %U /dev/vtorque/rdma0\n"
        'other=$(sort -u $PBS_NODEFILE | grep -v "^$(hostname)$")\n'
        "ibv_rc_pingpong -d rxe0 -g $(gid) >server.out 2>&1 & server=$!\n"
        "sleep 2\n"
        'ssh $other ". gid.sh; id -un; ibv_rc_pingpong -d rxe0 -g \\$(gid) $(hostname)"\n'
        "wait $server; cat server.out\n",
        "-vm", f"img={IMAGE},ram=768M,vms_per_node=2,vrdma=true",
    )  # fmt: skip
    assert result.code == 0, (result.out, result.err)
    said = result.out.decode()
    assert said.split()[0] == clean.user
    assert said.count(clean.user) == 3
    assert said.count("8192000 bytes in") == 2, said
    for name in ("gid.sh", "server.out"):
        (clean.home / name).unlink()


@pytest.mark.full
def test_rdma_to_a_guest_of_another_job_is_blocked(rdma, two_slots, clean):
    """RDMA is blocked for the same user, too; TCP, which sets up RDMA, passes."""
    args = ("-vm", f"img={IMAGE},ram=768M,vrdma=true")
    code, said, _ = beside_another(
        clean,
        GID + "ibv_rc_pingpong -d rxe0 -g $(gid) >server.out 2>&1 &\n",
        lambda ip: (
            f"#!/bin/bash\n{GID}"
            f"stdbuf -oL timeout 30 ibv_rc_pingpong -d rxe0 -g $(gid) {ip}\n"
        ),
        *args, timeout=600,
    )  # fmt: skip
    assert code != 0
    assert "remote address" in said, said  # so they had connected
    assert "bytes in" not in said
    (clean.home / "server.out").unlink(missing_ok=True)


@pytest.mark.full
def test_image_without_soft_roce_is_named_in_the_error(node, clean):
    """The micro image has no packages at all; a missing module: plugins/vrdma/tests."""
    result = clean.job("#!/bin/sh\necho RAN\n", "-vm", "img=micro,vrdma=true")
    assert result.code != 0
    assert b"RAN" not in result.out
    assert b"packages cannot be installed in image micro" in result.err


# -- The filter, between network namespaces on a bridge --------------------------------------------

HOSTS = r"""
import subprocess, sys, time
from pathlib import Path
from vtorque_vrdma.fence import ROCE, Fence

def run(*argv, check=True):
    return subprocess.run(argv, check=check, capture_output=True, text=True, timeout=180)

def inside(host, *argv, **more):
    return run("nsenter", "-t", str(host.pid), "-n", *argv, **more)

RECEIVE = '''
import select, socket, sys
open_ = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for port, each in zip((%d, 4792), open_):
    each.bind(("", port))
print("open", flush=True)
got = set()
while ready := select.select(open_, (), (), 1.5)[0]:
    for each in ready:
        text, (ip, _) = each.recvfrom(9)
        got.add(f"{ip}>{each.getsockname()[1]}")
print(*sorted(got))
''' % ROCE
SEND = '''
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in (%d, 4792):
    one.sendto(b"x", ("10.9.0.1", port))
''' % ROCE

run("ip", "link", "add", "br0", "type", "bridge")
run("ip", "link", "set", "br0", "up")
run("ip", "addr", "add", "10.9.0.9/24", "dev", "br0")
hosts = [subprocess.Popen(["unshare", "-n", "sleep", "60"]) for _ in range(3)]
spaces = [Path(f"/proc/{pid}/ns/net") for pid in ("self", *(host.pid for host in hosts))]
while len({space.readlink() for space in spaces}) < 4:
    time.sleep(0.05)
for n, host in enumerate(hosts, 1):
    peer = ("peer", "name", "eth0", "netns", str(host.pid))
    run("ip", "link", "add", f"v{n}", "type", "veth", *peer)
    run("ip", "link", "set", f"v{n}", "master", "br0", "up")
    inside(host, "ip", "addr", "add", f"10.9.0.{n}/24", "dev", "eth0")
    inside(host, "ip", "link", "set", "eth0", "address", f"52:54:00:00:00:0{n}", "up")

def received():
    argv = ["nsenter", "-t", str(hosts[0].pid), "-n", sys.executable, "-c", RECEIVE]
    listener = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    listener.stdout.readline()
    for host in hosts[1:]:
        inside(host, sys.executable, "-c", SEND)
    run(sys.executable, "-c", SEND)
    return listener.communicate(timeout=180)[0].strip()

fence = Fence("52:54:00:00:00:01", "10.9.0.1", ("10.9.0.1", "10.9.0.2"))
print("before", received())
fence.create()
fence.create()
print("fenced", received())
fence.release()
fence.release()
print("after", received())
print("left", run("nft", "list", "tables").stdout.strip())
for host in hosts:
    host.kill()
"""


def test_roce_packets_reach_a_guest_only_from_its_job(tmp_path):
    """Packets of a peer, a stranger and the node; another port passes. The kernel's filter."""
    argv = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    done = subprocess.run(
        [*argv, sys.executable, "-c", HOSTS],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    everyone = {f"10.9.0.{n}>{port}" for n in (2, 3, 9) for port in (4791, 4792)}
    assert set(said["before"].split()) == set(said["after"].split()) == everyone
    assert set(said["fenced"].split()) == everyone - {"10.9.0.3>4791", "10.9.0.9>4791"}
    assert said["left"] == ""
