"""Journals of running jobs, and libvirt's counters of their guests, recorded from a real one."""

import os
from pathlib import Path

from vtorque_core import kept
from vtorque_core.journal import JobHeader, Journal
from vtorque_core.names import Paths, guest_name, guest_uuid
from vtorque_core.resources import Domain

# virsh domstats of a guest of one vCPU and one iothread (libvirt 9.0, QEMU 7.2), and its NIC's.
DOMSTATS = """
balloon.current=32768
balloon.maximum=32768
balloon.rss=44728
vcpu.current=1
vcpu.maximum=1
vcpu.0.state=1
vcpu.0.time=1020000000
vcpu.0.wait=0
vcpu.0.delay=6056497553
net.count=1
net.0.name=vnet0
net.0.rx.bytes=90
net.0.rx.pkts=1
net.0.rx.errs=0
net.0.rx.drop=0
net.0.tx.bytes=586
net.0.tx.pkts=7
net.0.tx.errs=0
net.0.tx.drop=2
block.count=1
block.0.name=vda
block.0.path=/var/lib/x/disk
block.0.backingIndex=1
block.0.rd.reqs=3493
block.0.rd.bytes=114426368
block.0.rd.times=4011505675
block.0.wr.reqs=0
block.0.wr.bytes=0
block.0.wr.times=0
block.0.fl.reqs=0
block.0.fl.times=0
block.0.allocation=0
block.0.capacity=1048576
block.0.physical=1052672
"""


PAIRS = (line.split("=") for line in DOMSTATS.split())
COUNTERS = {key: int(value) if value.isdigit() else value for key, value in PAIRS}
GROWS = [
    key
    for key in COUNTERS
    if key.endswith((".bytes", ".time", ".reqs", ".pkts", ".times", ".delay"))
]


def domstats(more=0):
    """Return the recorded counters as libvirt-python gives them, ``more`` added to each counter."""
    return {**COUNTERS, **{key: COUNTERS[key] + more for key in GROWS}}


def paths_below(top):
    paths = Paths(top / "state", top / "run")
    for directory in (paths.state, paths.run, paths.journal):
        directory.mkdir(mode=0o700, parents=True)
    return paths


class Job:
    """A job on this node as far as its journal says; no guest is really there."""

    def __init__(self, paths, job_id="42.srv", guests=1, uid=None, ranks=0, owner="ada"):
        self.id = job_id
        self.paths = paths
        self.uid = os.geteuid() if uid is None else uid
        self.journal = Journal.start(paths, JobHeader(job_id, 0, owner, self.uid, "local"))
        self.kept = kept.place(paths, self.uid, job_id, 0)
        self.names = [guest_name(job_id, 0, "n1", i) for i in range(guests)]
        self.uuids = [guest_uuid(name) for name in self.names]
        facts = [
            {"rank": ranks + i, "index": i, "hostname": f"vn1-{i}", "domain": name}
            | {"vcpus": 1, "ram_mib": 256}
            for i, name in enumerate(self.names)
        ]
        self.kept.add_facts(job=job_id, node="n1", guests=facts)
        self.journal.phase("plan")
        self.journal.phase("boot")
        for index in range(guests):
            record = Domain(self.names[index], self.uuids[index], "qemu:///system")
            (seq,) = self.journal._record([(record, index)], "core", "boot", ())
            self.journal._note({"op": "created", "seq": seq})
            self.journal.phase("ready", guest=index)
        self.journal.phase("run")

    @property
    def key(self):
        return f"{self.id}.0"

    def end(self):
        self.journal.close()
        self.journal.path.unlink()

    def run_dir(self, index=0):
        path = Path(self.paths.job_run(self.key)) / f"g{index}"
        path.mkdir(parents=True, exist_ok=True)
        return path
