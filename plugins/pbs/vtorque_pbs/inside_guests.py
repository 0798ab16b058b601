"""Node file and batch commands inside guests. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.guest_context import ContextItem, GuestFile
from vtorque_pbs import nodefile

# pbsdsh(1B) in guests: -o and -v have no effect, and output is printed as it arrives. A task gets
# the caller's environment (on the host, Torque gives it the job's). As on the host, the exit status
# is 0 if all tasks could be started, and the exit status of a failed task is printed.
PBSDSH = rb"""#!/bin/sh
# pbsdsh(1B) among the guests of this job, by ssh; written by vTorque. Variables begin with _vt_,
# because any other name could be a variable that the caller has exported.
_vt_usage() {
  echo 'usage: pbsdsh [-c copies | -n node | -h hostname] [-o] [-s] [-u] [-v] program [arg ...]' >&2
  exit 1
}
_vt_copies='' _vt_only='' _vt_wanted='' _vt_unique='' _vt_serial=''
while getopts c:n:h:osuv _vt_option; do
  case $_vt_option in
    c) _vt_copies=$OPTARG ;;
    n) _vt_only=$OPTARG ;;
    h) _vt_wanted=$OPTARG ;;
    u) _vt_unique=1 ;;
    s) _vt_serial=1 ;;
    o | v) ;;
    *) _vt_usage ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || _vt_usage
case $_vt_copies$_vt_only in *[!0-9]*) _vt_usage ;; esac
if [ ! -r "${PBS_NODEFILE:-}" ]; then
  echo 'pbsdsh: PBS_NODEFILE is not set or unreadable: run pbsdsh in a job' >&2
  exit 1
fi
# _vt_nodes: "LINE:HOST:NAME" of each node to run on, counted from 0.
_vt_nodes='' _vt_seen=' ' _vt_count=0 _vt_line=-1 _vt_hosts=0
while read -r _vt_node; do
  _vt_line=$((_vt_line + 1)) _vt_known=''
  case $_vt_seen in
    *" $_vt_node:"*)
      _vt_known=1 _vt_host=${_vt_seen##*" $_vt_node:"}
      _vt_host=${_vt_host%% *}
      ;;
    *)
      _vt_host=$_vt_hosts _vt_hosts=$((_vt_hosts + 1))
      _vt_seen="$_vt_seen$_vt_node:$_vt_host "
      ;;
  esac
  [ -z "$_vt_unique" ] || [ -z "$_vt_known" ] || continue
  [ -z "$_vt_wanted" ] || [ "$_vt_wanted" = "$_vt_node" ] || continue
  _vt_nodes="$_vt_nodes $_vt_line:$_vt_host:$_vt_node"
  _vt_count=$((_vt_count + 1))
  [ -z "$_vt_wanted" ] || break
done <"$PBS_NODEFILE"
if [ "$_vt_count" -eq 0 ]; then
  echo "pbsdsh: ${_vt_wanted:-a node} not found" >&2
  exit 1
fi
if [ -n "$_vt_only" ] && [ "$_vt_only" -ge "$_vt_count" ]; then
  echo "pbsdsh: -n $_vt_only: there are only $_vt_count nodes, counted from 0" >&2
  exit 1
fi
_vt_hostname=$(hostname)
if ! command -v ssh >/dev/null && grep -qvx "$_vt_hostname" "$PBS_NODEFILE"; then
  echo "pbsdsh: this image has no ssh, so tasks can run only in the guest $_vt_hostname" >&2
fi
# Task numbers are those of pbs_mom: the job's script is task 1 (Torque's src/resmom/mom_comm.c).
_vt_start() {  # task, node, program and arguments
  PBS_TASKNUM=$(($1 + 2)) PBS_VNODENUM=${2%%:*} PBS_NODENUM=${2#*:} _vt_node=${2##*:}
  PBS_NODENUM=${PBS_NODENUM%:*}
  export PBS_TASKNUM PBS_VNODENUM PBS_NODENUM
  shift 2
  cd || exit 254
  if [ "$_vt_node" = "$_vt_hostname" ]; then exec "$@" </dev/null; fi
  exec "${VTORQUE_ON_GUEST:-/usr/lib/vtorque/on-guest}" "$_vt_node" "$@"
}
_vt_report() {
  [ "$2" -eq 0 ] || echo "pbsdsh: task $1 exit status $2" >&2
  [ "$2" -ne 255 ] || _vt_failed=1
}
_vt_failed=0 _vt_task=0 _vt_started=0 _vt_pids=''
[ -n "$_vt_copies" ] || _vt_copies=$_vt_count
while [ "$_vt_task" -lt "$_vt_copies" ]; do
  for _vt_each in $_vt_nodes; do
    [ "$_vt_task" -lt "$_vt_copies" ] || break
    if [ -z "$_vt_only" ] || [ "$_vt_only" -eq "$_vt_task" ]; then
      (_vt_start "$_vt_started" "$_vt_each" "$@") &
      _vt_started=$((_vt_started + 1))
      if [ -n "$_vt_serial" ]; then
        wait $!
        _vt_report "$_vt_task" $?
      else
        _vt_pids="$_vt_pids $_vt_task:$!"
      fi
    fi
    _vt_task=$((_vt_task + 1))
  done
done
for _vt_each in $_vt_pids; do
  wait "${_vt_each#*:}"
  _vt_report "${_vt_each%%:*}" $?
done
exit $_vt_failed
"""

REFUSING = rb"""#!/bin/sh
# Written by vTorque: the batch system is not reached from inside its jobs' guests.
echo "${0##*/}: not available inside a job's virtual machine: use it on a login node" >&2
exit 1
"""
REFUSED = ("qsub", "qdel", "qstat", "qalter", "qhold", "qrls", "qrerun", "qsig", "qmove")


def items(job: BatchJob, guests: Sequence[PeerGuest], directory: str) -> Iterator[ContextItem]:
    """Yield the node file, ``pbsdsh``, and programs such as ``qsub`` that only print an error."""
    yield from nodefile.items(job.id, guests, directory, job.bare)
    yield GuestFile("/usr/bin/pbsdsh", PBSDSH, 0o755)
    for name in REFUSED:
        yield GuestFile(f"/usr/bin/{name}", REFUSING, 0o755)
