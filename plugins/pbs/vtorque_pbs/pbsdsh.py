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


class TorqueShell(PbsJobShell):
    """Implementation of :class:`vtorque_core.api.batch_system.JobShell` for Torque."""

    host_only = PbsJobShell.host_only | {VARIABLE}
    dies_of_term = True  # like pbs_mom's login shell: exit status 271, a failure

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a pbsdsh(1B) command that runs ``command`` once per host."""
        return _pbsdsh_command(["-u"], "-n {}", command, environ, nodes)


class OpenPbsShell(PbsJobShell):
    """Implementation of :class:`vtorque_core.api.batch_system.JobShell` for OpenPBS."""

    host_only = PbsJobShell.host_only | {VARIABLE}
    dies_of_term = True  # like pbs_mom's login shell: exit status 271, a failure

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a pbsdsh(1B) command that runs ``command`` once per chunk."""
        return _pbsdsh_command(["--"], "-n {} --", command, environ, nodes)


def _pbsdsh_command(
    everywhere: list[str],
    one: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    nodes: Sequence[str],
) -> list[str]:
    """Return a shell command that runs ``command`` on a job's nodes with pbsdsh.

    pbsdsh runs once for all nodes or, if ``nodes`` names only some of them, once for each of these.
    ``everywhere`` are pbsdsh's options for all nodes. ``one`` are its options for one node, with
    ``{}`` for the number of the node's line in the node file. ``environ`` has this file's path.
    """
    try:
        lines = Path(environ.get("PBS_NODEFILE", "")).read_text().split()
    except (OSError, ValueError):
        lines = []
    short = [line.partition(".")[0] for line in lines]
    wanted = [node.partition(".")[0] for node in nodes]
    calls = everywhere
    if wanted and set(wanted) < set(short):
        calls = [one.format(short.index(name)) for name in wanted]
    return ["/bin/sh", "-c", _EVERYWHERE, "pbsdsh", "\n".join(calls), *command]
