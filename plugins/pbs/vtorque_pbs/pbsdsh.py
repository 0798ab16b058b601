"""The job part: how Torque's and OpenPBS's job shells start, and reach the job's other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vtorque_core.api.batch_system import Started
from vtorque_pbs.qsub_dialect import VARIABLE
from vtorque_pbs.shell import PbsJobShell

# Both pbsdsh end with 0 whatever their tasks end with; they only say so: Torque on stderr
# "pbsdsh: task 1 exit status 120" or "error N on spawn", OpenPBS on stdout
# "pbsdsh: task 0x00000001 exit status 120" (src of both). The tasks' own output does not come this
# way: pbs_mom gives it to the job.
# pbs_mom's PATH need not lead to pbsdsh (Torque gives jobs /bin:/usr/bin); that of the submitting
# qsub does.
_EVERYWHERE = """
PATH=$PATH:/usr/bin:/usr/local/bin:/opt/torque/bin:/opt/pbs/bin:$PBS_O_PATH
said=$(pbsdsh "$@" 2>&1)
code=$?
[ -z "$said" ] || printf '%s\\n' "$said" >&2
[ $code -eq 0 ] || exit $code
case $said in
  *"exit status"* | *"on spawn"* | *"spawn failed"* | *"on obit"*) exit 1 ;;
esac
"""


class TorqueShell(PbsJobShell):
    """See :class:`vtorque_core.api.batch_system.JobShell`."""

    host_only = PbsJobShell.host_only | {VARIABLE}

    def on_every_node(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return the command by Torque's task manager, once per host: pbsdsh(1B)."""
        return ["/bin/sh", "-c", _EVERYWHERE, "pbsdsh", "-u", *command]


class OpenPbsShell(PbsJobShell):
    """See :class:`vtorque_core.api.batch_system.JobShell`."""

    host_only = PbsJobShell.host_only | {VARIABLE}

    def started(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> Started:
        """Return the job, its nodes counted in the node file. Raises UsageError."""
        job = super().started(argv, environ, stdin)
        try:
            lines = Path(environ.get("PBS_NODEFILE", "")).read_text().split()
        except OSError:
            lines = []
        return replace(job, nodes=max(1, len(set(lines))))

    def on_every_node(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return the command by OpenPBS's task manager, once per chunk: pbsdsh(1B)."""
        return ["/bin/sh", "-c", _EVERYWHERE, "pbsdsh", "--", *command]
