"""``python login_machine.py PLAN``: a submit host and a Torque node without ssh, as one machine.

Run by ``unshare --mount --net``: only the plan uses the account's home and n1's address. The node's
companion is started as by the job shell; then each of the plan's command lines runs as on the
submit host. Prints the results as JSON.
"""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

from vtorque_core.api import JobAttempt, hooks
from vtorque_core.config.load import load
from vtorque_core.node.shell import around_script

PLAN = json.loads(Path(sys.argv[1]).read_text())


def bind(path, content):
    own = Path(PLAN["top"], Path(path).name)
    own.write_text(content)
    subprocess.run(["mount", "--bind", own, path], check=True)


def main():
    name = pwd.getpwuid(os.getuid()).pw_name
    bind("/etc/passwd", f"{name}:x:{os.getuid()}:{os.getgid()}::{PLAN['home']}:/bin/sh\n")
    bind("/etc/hosts", "127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")
    lower = f"{PLAN['top']}/tasks:/usr/local/bin"
    overlay = ["-t", "overlay", "overlay", "-o", f"lowerdir={lower}", "/usr/local/bin"]
    subprocess.run(["mount", *overlay], check=True)
    for words in ("link set lo up", "link add n1 type bridge", "address add 10.77.0.1/24 dev n1",
                  "link set n1 up"):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    site, plugins = load(Path(PLAN["node"]), node=False)
    job = JobAttempt(PLAN["job"], 0, name, os.getuid(), "n1")
    found = plugins.collect(
        hooks.vtorque_beside_script, job=job, batch=plugins.batch_system("torque"), site=site
    )
    said = []
    with around_script.keep_running([each.item for each in found]):
        for argv in PLAN["run"]:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            said.append([done.returncode, done.stdout, done.stderr])
    left = subprocess.run(["pgrep", "-f", "vtorque_login[.]"], capture_output=True, check=False)
    ours = [pid for pid in left.stdout.split() if PLAN["top"].encode() in
            Path(f"/proc/{pid.decode()}/cmdline").read_bytes()]  # fmt: skip
    json.dump({"said": said, "left": len(ours), "commands": len(found)}, sys.stdout)


if __name__ == "__main__":
    main()
