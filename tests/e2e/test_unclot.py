"""UNCLOT: guests of a job exchange data through shared memory; no other job sees it."""

import contextlib
import hashlib
import platform
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from vtorque_core.config.site_file import Node
from vtorque_core.plan import host_ids

pytestmark = pytest.mark.e2e

SHM = Path("/dev/shm")
DEFAULT = 64  # MiB
PCI = "cat /sys/bus/pci/devices/*/device | grep -c 0x1110"  # ivshmem
# Run by the site in every guest before the job: the second guest's part, as the job's user.
PEER = """#!/bin/sh
[ "$VTORQUE_RANK" = 1 ] || exit 0
cat >/run/peer <<'END'
. /etc/profile.d/vtorque.sh
cd ~
while [ ! -e written ]; do sleep 0.1; done
exec >peer 2>&1
id -un
./shmem read $VTORQUE_SHMEM | sha256sum
./shmem write $VTORQUE_SHMEM <second
touch answered
END
setsid su -s /bin/sh -c ". /run/peer" "$VTORQUE_USER" </dev/null >/dev/null 2>&1 &
"""
FIRST = f"""#!/bin/sh
id -un
stat -Lc '%U %a %s' $VTORQUE_SHMEM
echo $VTORQUE_SHMEM $VTORQUE_SHMEM_SIZE
{PCI}
./shmem read $VTORQUE_SHMEM | tr -d '\\0' | wc -c
./shmem write $VTORQUE_SHMEM <first && touch written
while [ ! -e answered ]; do sleep 0.1; done
./shmem read $VTORQUE_SHMEM | sha256sum
while [ ! -e stop ]; do sleep 0.1; done
"""
OTHER = f"""#!/bin/sh
echo "$VTORQUE_SHMEM."
{PCI}
[ -e /dev/vtorque ] || echo none
"""
OWN = """#!/bin/sh
./shmem read $VTORQUE_SHMEM | wc -c
./shmem read $VTORQUE_SHMEM | tr -d '\\0' | wc -c
"""


@pytest.fixture
def peer(guest):
    """Let the site start the second guest's part; give the user the program and the data."""
    place = guest.config.parent / "guest-prologue-unclot"
    place.mkdir()
    script = place / "10-peer"
    script.write_text(PEER)
    script.chmod(0o755)
    own = guest.config.read_text()
    guest.config.write_text(f'{own}\n[plugin.linux-guest]\nprologue = "{place}"\n')
    source = Path(__file__).parents[1] / "support" / "shmem.c"
    build = ["musl-gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*build, "-o", guest.home / "shmem", source], check=True, timeout=180)
    yield guest
    guest.config.write_text(own)
    shutil.rmtree(place)


def data(node, name, seed, size):
    """Write this many random bytes into the user's home; return their checksum."""
    content = random.Random(seed).randbytes(size)  # noqa: S311 - to tell apart, not to keep secret
    (node.home / name).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def running(node, *submitted):
    """Run a job until its second guest has answered; end it after the block."""
    job = node.submit(*submitted)
    try:
        node.wait_for((node.home / "answered").exists, what="the second guest's answer")
        yield
    finally:
        (node.home / "stop").touch()
        node.wait_for(lambda: node.state_of(job) in (None, "C"), what="the job's end")


def beside(node, text, *args):
    """Run a second job of the same user to its end; return its output and its errors."""
    out, err = node.home / "out2", node.home / "err2"
    for old in (out, err):
        old.unlink(missing_ok=True)
    node.as_user(
        "vsub", "-W", "block=true", "-N", "u", "-o", out.name, "-e", err.name, *args,
        node.script(text, "other.sh"),
    )  # fmt: skip
    return out.read_text(), err.read_text()


@pytest.mark.full
@pytest.mark.parametrize("mib", [8, DEFAULT])
def test_guests_of_a_job_share_memory_and_other_jobs_do_not(two_slots, peer, mib):
    size = mib << 20
    first, second = data(peer, "first", 1, size), data(peer, "second", 2, size)
    option = "" if mib == DEFAULT else f",unclot_shmem={mib}M"
    before = set(SHM.glob("vtorque-*"))
    with running(peer, FIRST, "-vm", f"unclot=true,vms_per_node=2{option}"):
        (region,) = set(SHM.glob("vtorque-*")) - before
        status = region.stat()
        assert (status.st_mode & 0o7707, status.st_size) == (0o600, size)
        assert status.st_uid - Node().guest_uids in range(host_ids.COUNT)
        assert peer.as_user("/bin/cat", str(region), check=False).returncode != 0
        assert beside(peer, OTHER)[0] == ".\n0\nnone\n"
        out, err = beside(peer, OWN, "-vm", "unclot=true,unclot_shmem=1M")
        assert out == f"{1 << 20}\n0\n"
        assert "one guest on each node" in err
    assert (peer.home / "peer").read_text() == f"{peer.user}\n{first}  -\n"
    assert (peer.home / "out").read_text().splitlines() == [
        peer.user, f"{peer.user} 600 {size}", f"/dev/vtorque/shmem {size}", "1", "0",
        f"{second}  -",
    ]  # fmt: skip
    assert (peer.home / "err").read_bytes() == b""
    assert set(SHM.glob("vtorque-*")) == before


def test_bad_size_is_refused_at_submission(node):
    script = node.script("#!/bin/sh\n")
    done = node.as_user("vsub", "-vm", "unclot=true,unclot_shmem=3M", script, check=False)
    assert done.returncode == 2
    assert b"unclot_shmem=3M: is not a power of two" in done.stderr
    assert b"request 2M or 4M" in done.stderr


@pytest.mark.full
def test_two_debian_guests_share_memory(guest):
    """The same with a complete distribution's kernel and udev; the second is reached by ssh."""
    if guest.root("vmgr", "images", "show", "debian", check=False).returncode:
        guest.root("vmgr", "images", "build", "debian", "debian", timeout=600)
    program = guest.home / "share.py"
    program.write_text(
        "import hashlib, mmap, os, random, sys\n"
        "with open(sys.argv[2], 'r+b') as file, mmap.mmap(file.fileno(), 0) as memory:\n"
        "    if sys.argv[1] == 'write':\n"
        "        memory[:] = random.Random(7).randbytes(len(memory))\n"
        "    print(os.getuid(), len(memory), hashlib.sha256(memory).hexdigest(), flush=True)\n"
    )
    host = platform.node().split(".")[0]
    result = guest.job(
        "#!/bin/sh\ncd\npython3 share.py write $VTORQUE_SHMEM\n"
        f"ssh v{host}-1 python3 share.py read $VTORQUE_SHMEM\n",
        "-vm", "img=debian,ram=512M,vms_per_node=2,unclot=true,unclot_shmem=128M",
    )  # fmt: skip
    uid = guest.home.stat().st_uid
    content = random.Random(7).randbytes(128 << 20)  # noqa: S311
    line = f"{uid} {128 << 20} {hashlib.sha256(content).hexdigest()}"
    assert result.out.decode().splitlines() == [line, line], result.err
