"""Run commands as root on another machine of scripts/cluster, instead of through ssh."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import slurm_cluster as slurm

PLACE = Path("/home/.reach")  # in every machine
COMMAND = f"{PLACE}/to {{node}}"
CLIENT = f"""#!/usr/bin/python3 -I
import json, socket, sys
to = socket.socket(socket.AF_UNIX)
to.connect("{PLACE}/socket")
socket.send_fds(to, [json.dumps(sys.argv[1:]).encode()], [0, 1, 2])
sys.exit(int(to.recv(16) or b"255"))
"""


@contextlib.contextmanager
def serving(cluster):
    """Run machines' commands on other machines; yield a set of unreachable nodes."""
    place = Path("/var/lib", slurm.NAME, "home", PLACE.name)
    place.mkdir(mode=0o700)
    client = place / "to"
    client.write_text(CLIENT)
    client.chmod(0o700)
    lost = set()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        thread = threading.Thread(target=_serve, args=(cluster, listener, lost), daemon=True)
        thread.start()
        yield lost
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    shutil.rmtree(place)


def _serve(cluster, listener, lost):
    while True:
        try:
            asks, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_run, args=(cluster, asks, lost), daemon=True).start()


def _run(cluster, asks, lost):
    said, files, _, _ = socket.recv_fds(asks, 1 << 16, 3)
    node, *argv = json.loads(said)
    environ = {"PATH": f"{slurm.PREFIX}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    code = 255
    if node not in lost:
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        command = [*cluster.enter(node), *argv]
        with subprocess.Popen(command, env=environ, **streams) as process:
            for file in files:
                os.close(file)
            code = process.wait()
    with asks, contextlib.suppress(OSError):
        asks.send(str(code).encode())
