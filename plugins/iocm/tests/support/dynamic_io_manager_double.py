"""Stands for io_manager.py and reconfigure.py of the dynamic-io-manager.

The real ones need Python 2 and a patched kernel. Command lines, files and behaviour are as in their
source. ``reconfigure.py F -p interval:X`` moves every vhost device to a worker of its own and
writes F again. ``io_manager.py -s F -p`` runs in the foreground until it is killed. It moves the
devices to shared workers, at least ``io_cores_restrictions.min`` of them, and dies of a vhost
device that F does not name. The file ``vhost`` beside it says where the sysfs of this double is;
with a file ``stubborn`` there it does not end by TERM.
"""

import getopt
import json
import signal
import sys
import time
from pathlib import Path

SOURCE = Path(sys.argv[0]).resolve().parent


def vhost():
    return Path((SOURCE / "vhost").read_text())


def devices_of(conf):
    return {dev["id"]: vm for vm in conf["vms"] for dev in vm["devices"]}


def reconfigure(argv):
    path = Path(argv[0])
    options, _ = getopt.getopt(argv[1:], "p:h", ["param=", "help"])
    conf = json.loads(path.read_text())
    for _, value in options:
        key, text = value.split(":")
        conf[key] = text
    for number, (device, vm) in enumerate(sorted(devices_of(conf).items())):
        assert Path("/proc", vm["pid"]).exists()
        (vhost() / "dev" / device / "worker").write_text(f"w.{number + 1}")
        vm["devices"][0]["vhost_worker"] = f"w.{number + 1}"
    path.write_text(json.dumps(conf))


def io_manager(argv):
    options = dict(getopt.getopt(argv, "s:kph", ["start=", "kill", "process", "help"])[0])
    conf = json.loads(Path(options["-s"]).read_text())
    assert "-p" in options, "it would be a daemon, with a pid file in /tmp"
    if (SOURCE / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cores = max(1, conf["io_cores_restrictions"]["min"])
    balance = {c["id"]: c for c in conf["io_cores_balance_policy"]["configurations"]}
    workers = {vm["id"]: vm["vhost_worker"] for vm in balance[f"elvis-{cores}"]["vms"]}
    cpus = {c["id"]: c["cores"] for c in conf["vms_balance_policy"]["configurations"]}
    assert f"elvis-{cores}" in cpus
    mine = devices_of(conf)
    for device in (vhost() / "dev").iterdir():
        (device / "worker").write_text(workers[mine[device.name]["id"]])
    while True:
        time.sleep(float(conf["interval"]))


if __name__ == "__main__":
    {"reconfigure.py": reconfigure, "io_manager.py": io_manager}[Path(sys.argv[0]).name](
        sys.argv[1:]
    )
