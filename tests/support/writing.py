"""A job that writes to all places where a checkpoint could lose data.

It reads the file ``part`` in its user's home directory, and keeps ten copies in memory. It ends
when the file ``enough`` exists.
"""

import os

from users import run

WRITES = """#!/bin/sh
# files that stay open, a pipe, and memory in use
exec 3>>counted 4>>{also}
for part in 0 1 2 3 4 5 6 7 8 9; do cat part; done > /dev/shm/much
i=0
until [ -e enough ]; do
  i=$((i + 1)); echo $i; echo $i >&3; echo $i >&4; sleep 0.05
done | {echoes}
cat {also}
md5sum < /dev/shm/much
date +%s > ended
exit 7
"""
OTHER_GUEST = "nc $(hostname | sed 's/0$/1/') 7000"  # over one connection everything is sent back
ECHOES = """#!/bin/sh
[ "$VTORQUE_RANK" = 0 ] || setsid nc -ll -p 7000 -e cat >/dev/null 2>&1 </dev/null &
"""
"""The site's script for guests: the second one echoes its input."""


def script(echoes="cat", also="also"):
    """Return the job's script: a pipe to ``echoes``, and another file."""
    return WRITES.format(echoes=echoes, also=also)


def give(home):
    """Write the job's input; return its expected output about its memory."""
    part = os.urandom(10_000_000)
    (home / "part").write_bytes(part)
    (home / "part").chmod(0o644)
    return run("md5sum", input=part * 10).stdout.decode().split()


def expected_output(counted, memory):
    """Return the words of the whole expected output."""
    return [*counted, *counted, *memory]
