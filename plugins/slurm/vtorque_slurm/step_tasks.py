"""Generate the script that runs one node's tasks of a job step (``srun --vm=``) in a guest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# The first task gets standard input, as with srun in a guest. A signal interrupts wait(1). A signal
# that arrives before all tasks have started is passed on afterwards, so that each task gets it.
_SEVERAL = r"""#!/bin/sh
exec 3<&0
pids=
early=
for name in TERM INT HUP USR1 USR2; do
  trap "early=\"\$early $name\"" $name
done
{tasks}exec 3<&-
for name in TERM INT HUP USR1 USR2; do
  trap "kill -s $name $pids 2>/dev/null" $name
done
for name in $early; do
  kill -s $name $pids 2>/dev/null
done
code=0
for pid in $pids; do
  wait $pid
  ended=$?
  while [ $ended -gt 128 ] && kill -0 $pid 2>/dev/null; do
    wait $pid
    ended=$?
  done
  [ $ended -le $code ] || code=$ended
done
exit $code
"""
_TASK = """SLURM_PROCID={id} SLURM_LOCALID={local} {words} <&3 3<&- &
pids="$pids $!"
"""


def command(words: Sequence[str], ids: Sequence[str]) -> str:
    """Return a POSIX sh script that runs the command ``words`` once per task.

    ``ids`` are the tasks' values of SLURM_PROCID. The script's exit status is the largest exit
    status of a task.
    """
    line = shlex.join(words)
    if len(ids) < 2:
        return f"#!/bin/sh\nexec {line}\n"
    tasks = ""
    for local, each in enumerate(ids):
        text = _TASK if local == 0 else _TASK.replace("<&3", "</dev/null")
        tasks += text.format(id=shlex.quote(each), local=local, words=line)
    return _SEVERAL.replace("{tasks}", tasks)
