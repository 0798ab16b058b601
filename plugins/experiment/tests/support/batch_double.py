"""A double of vsub and of a batch system: files in a directory, jobs as processes of this user.

As a program it is vsub: ``python batch_double.py DIRECTORY ARGUMENT...``, with the job script on
standard input. The file ``DIRECTORY/mode`` selects a fault:

- ``mute``: every third submission is accepted, but vsub dies before it prints the id.
- ``refuse-odd``: points with odd numbers are refused.
- ``full``: each first try fails, as with a full queue.
- ``lost``: each job begins, then its node is lost.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(directory, argv):
    if argv[0] == "--dry-run":
        return _asked(directory, argv)
    mode = (directory / "mode").read_text() if (directory / "mode").exists() else ""
    name, out, err = (argv[argv.index(option) + 1] for option in ("-N", "-o", "-e"))
    number = int(name.rpartition("-")[2])
    script = sys.stdin.buffer.read()
    with (directory / "submissions").open("a") as log:
        log.write(" ".join(argv) + "\n")
    if mode == "refuse-odd" and number % 2:
        sys.stderr.write("vsub: ram=1T: is more than allowed (limit: 64G)\n")
        return 2
    if mode == "full" and not (directory / f"tried-{number}").exists():
        (directory / f"tried-{number}").touch()
        sys.stderr.write("qsub: would exceed the queue's limit\n")
        return 38
    job = _new(directory)
    there = directory / "jobs" / name
    there.write_text(job)
    if os.fork() == 0:
        os.setsid()
        os.closerange(3, 256)
        _run(directory, script, job, out, err, mode)
        there.unlink()
        os._exit(0)
    if mode == "mute" and int(job.partition(".")[0]) % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write(job + "\n")
    return 0


def _asked(directory, argv):
    with (directory / "asked").open("a") as log:
        log.write(" ".join(argv) + "\n")
    sys.stdout.write("<domain/>\n")
    if "vcpu=1" in argv or "vcpu=2" in argv:
        sys.stderr.write("vsub: there is no -vm key vcpu; did you mean vcpus?\n")
        return 2
    if argv[-2:] != ["-vm", "none"]:
        sys.stderr.write("vsub: warning: no working KVM\n")
    return 0


def _run(directory, script, job, out, err, mode):
    environ = {"PATH": "/usr/bin:/bin", "PBS_JOBID": job, "HOME": "/"}
    with (
        Path(out).open("wb") as stdout,
        Path(err).open("wb") as stderr,
        Path(os.devnull).open() as nothing,
    ):
        for stream, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
            os.dup2(stream.fileno(), number)
        if mode == "lost":
            stderr.write(b"=>> vtorque: 1.double: the node was lost\n")
            return
        spooled = Path(directory, "spool", job)
        spooled.parent.mkdir(exist_ok=True)
        spooled.write_bytes(script)
        subprocess.run(["/bin/sh", spooled], env=environ, check=False)


def _new(directory):
    """Return an id that no other job has."""
    (directory / "ids").mkdir(exist_ok=True)
    (directory / "jobs").mkdir(exist_ok=True)
    number = len(list((directory / "ids").iterdir())) + 1
    while True:
        try:
            (directory / "ids" / str(number)).touch(exist_ok=False)
            return f"{number}.double"
        except FileExistsError:
            number += 1


def jobs(directory):
    """Return the existing jobs, name to id, as a submitter would list them."""
    with (directory / "questions").open("a") as log:
        log.write(".")
    found = {}
    for path in (directory / "jobs").glob("*"):
        try:
            found[path.name] = path.read_text()
        except FileNotFoundError:  # it has just ended
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
