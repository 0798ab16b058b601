"""Job shell adapters of Torque and OpenPBS, which reach a job's other nodes with pbsdsh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vtorque_pbs.qsub_dialect import VARIABLE
from vtorque_pbs.shell import PbsJobShell

# Both pbsdsh always exit with 0 and only print the exit status of tasks. Torque prints on stderr
# "pbsdsh: task 1 exit status 120" or "error N on spawn". OpenPBS prints on stdout
# "pbsdsh: task 0x00000001 exit status 120" (source code of both). Output of tasks does not pass
# through pbsdsh: pbs_mom writes it to the job's output.
# pbs_mom's PATH may lack pbsdsh (Torque sets /bin:/usr/bin in jobs), but qsub's PATH contains it.
# The script's first argument lists pbsdsh's options, one word for each call.
_EVERYWHERE = """
PATH=$PATH:/usr/bin:/usr/local/bin:/opt/torque/bin:/opt/pbs/bin:$PBS_O_PATH
calls=$1 code=0
shift
while read -r options; do
  said=$(pbsdsh $options "$@" 2>&1 </dev/null) || code=$?
  [ -z "$said" ] || printf '%s\\n' "$said" >&2
  case $said in
    *"exit status"* | *"on spawn"* | *"spawn failed"* | *"on obit"*) [ $code -ne 0 ] || code=1 ;;
  esac
done <<CALLS
$calls
CALLS
exit $code
"""


class _PbsdshShell(PbsJobShell):
    """A job shell of a batch system with pbsdsh(1B).

    Attributes:
        everywhere: pbsdsh's options for all nodes.
        one_node: pbsdsh's options for one node, with ``{}`` for the number of the node's line in
            the node file.
    """

    host_only = PbsJobShell.host_only | {VARIABLE}
    dies_of_term = True  # like pbs_mom's login shell: exit status 271, a failure
    everywhere: str
    one_node: str

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a shell command that runs ``command`` on a job's nodes with pbsdsh.

        pbsdsh runs once for all nodes or, if ``nodes`` names only some of them, once for each of
        these. ``environ`` has the node file's path.
        """
        try:
            lines = Path(environ.get("PBS_NODEFILE", "")).read_text().split()
        except (OSError, ValueError):
            lines = []
        short = [line.partition(".")[0] for line in lines]
        wanted = [node.partition(".")[0] for node in nodes]
        calls = [self.everywhere]
        if wanted and set(wanted) < set(short):
            calls = [self.one_node.format(short.index(name)) for name in wanted]
        return ["/bin/sh", "-c", _EVERYWHERE, "pbsdsh", "\n".join(calls), *command]


class TorqueShell(_PbsdshShell):
    """The job shell of Torque. Without ``nodes``, a command runs once per host."""

    everywhere, one_node = "-u", "-n {}"


class OpenPbsShell(_PbsdshShell):
    """The job shell of OpenPBS. Without ``nodes``, a command runs once per chunk."""

    everywhere, one_node = "--", "-n {} --"
