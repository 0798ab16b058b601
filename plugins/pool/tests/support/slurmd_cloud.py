"""A double of a cloud, the driver slurmd-in-namespaces: slurmds in pid namespaces.

A machine is a file ``<id>.json`` and a process. Files beside them select faults: ``full``
(stock-out), ``down`` (no answer), ``never`` (machines without slurmd), ``kill-before`` and
``kill-after`` (the calling process is killed before or after a machine is made; once).
"""

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

from vtorque_pool.api import CloudFault, Machine, StockOut


def driver(options):
    return SlurmdInNamespaces(Path(options["directory"]))


class SlurmdInNamespaces:
    def __init__(self, directory):
        self.directory = directory

    def create(self, order):
        self._answer()
        if (self.directory / "full").exists():
            raise StockOut("no such machine to give")
        self._kill("kill-before")
        name = f"m-{uuid.uuid4().hex[:8]}"
        created = time.time()
        started = self._start(order.node)
        note = {"machine": [name, order.node, order.shape, created], "cluster": order.cluster}
        new = self.directory / f".{name}"
        new.write_text(json.dumps({**note, "pid": started}))
        new.rename(self.directory / f"{name}.json")
        self._kill("kill-after")
        return Machine(name, order.node, order.shape, created)

    def _start(self, node):
        words = ("sleep", "infinity")
        if not (self.directory / "never").exists():
            (self.directory / "spool" / node).mkdir(parents=True, exist_ok=True)
            words = ("slurmd", "-D", "-N", node, "-b")
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        process.returncode = 0  # it is not awaited
        return process.pid

    def machines(self, cluster):
        self._answer()
        found = []
        for path in self.directory.glob("m-*.json"):
            data = json.loads(path.read_text())
            if data["cluster"] == cluster:
                found.append(Machine(*data["machine"]))
        return found

    def destroy(self, machine):
        self._answer()
        path = self.directory / f"{machine}.json"
        if path.exists():
            end(json.loads(path.read_text())["pid"])
            path.unlink(missing_ok=True)

    def quota(self):
        return None

    def _answer(self):
        if (self.directory / "down").exists():
            raise CloudFault("the API is down")

    def _kill(self, name):
        if (self.directory / name).exists():
            (self.directory / name).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def end(pid):
    """Kill a machine; its processes end with its first process."""
    try:
        if b"unshare" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass
