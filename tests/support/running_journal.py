"""Journals of running jobs without real guests."""

import os
from pathlib import Path

from vtorque_core.api import kept_records
from vtorque_core.base.names import JobAttempt, Paths, guest_name, guest_uuid
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_core.resources.domain import Domain


def paths_below(top):
    paths = Paths(top / "state", top / "run")
    for directory in (paths.state, paths.run, paths.journal):
        directory.mkdir(mode=0o700, parents=True)
    return paths


class JournalledJob:
    """A job that runs on this node according to its journal; it has no real guest."""

    def __init__(self, paths, job_id="42.srv", guests=1, uid=None, ranks=0, owner="ada", node="n1"):
        self.id = job_id
        self.paths = paths
        self.uid = os.geteuid() if uid is None else uid
        self.journal = Journal.start(
            paths, JobHeader(JobAttempt(job_id, 0, owner, self.uid), "local")
        )
        self.kept = kept_records.place(paths, JobAttempt(job_id, 0, owner, self.uid))
        self.names = [guest_name(job_id, 0, node, i) for i in range(guests)]
        self.uuids = [guest_uuid(name) for name in self.names]
        facts = [
            {"rank": ranks + i, "index": i, "hostname": f"v{node}-{i}", "domain": name}
            | {"vcpus": 1, "ram_mib": 256}
            for i, name in enumerate(self.names)
        ]
        self.kept.add_facts(job=job_id, node=node, guests=facts)
        self.journal.phase("plan")
        self.journal.phase("boot")
        for index in range(guests):
            record = Domain(self.names[index], self.uuids[index], "qemu:///system")
            (seq,) = self.journal._record([(record, index)], "core", "boot", ())
            self.journal._append({"op": "created", "seq": seq})
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
