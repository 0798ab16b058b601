"""What says inside every guest which guests the job has, and the batch commands there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.guest_context import ContextItem, GuestFile
from vtorque_pbs import nodefile

# pbsdsh(1B): -o and -v change nothing here, output is as it comes. As on the host the exit code is
# 0 when all could be started; what they ended with is said.
PBSDSH = rb"""#!/bin/sh
# pbsdsh(1B) among the guests of this job, by ssh; written by vTorque.
usage() {
  echo 'usage: pbsdsh [-c copies | -n node | -h hostname] [-o] [-s] [-u] [-v] program [arg ...]' >&2
  exit 1
}
quoted() {
  word=$(printf '%sx\n' "$1" | sed "s/'/'\\\\''/g")
  printf "'%s'" "${word%x}"
}
copies='' only='' host='' unique='' serial=''
while getopts c:n:h:osuv option; do
  case $option in
    c) copies=$OPTARG ;;
    n) only=$OPTARG ;;
    h) host=$OPTARG ;;
    u) unique=1 ;;
    s) serial=1 ;;
    o | v) ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || usage
case $copies$only in *[!0-9]*) usage ;; esac
if [ ! -r "${PBS_NODEFILE:-}" ]; then
  echo 'pbsdsh: PBS_NODEFILE is not set: this is no job' >&2
  exit 1
fi
nodes='' seen=' ' count=0
while read -r node; do
  if [ -n "$unique" ]; then
    case $seen in *" $node "*) continue ;; esac
    seen="$seen$node "
  fi
  [ -z "$host" ] || [ "$host" = "$node" ] || continue
  nodes="$nodes $node"
  count=$((count + 1))
  [ -z "$host" ] || break
done <"$PBS_NODEFILE"
if [ "$count" -eq 0 ]; then
  echo "pbsdsh: ${host:-a node} not found" >&2
  exit 1
fi
if [ -n "$only" ] && [ "$only" -ge "$count" ]; then
  echo "pbsdsh: there are only $count nodes" >&2
  exit 1
fi
here=$(hostname)
if ! command -v ssh >/dev/null && grep -qvx "$here" "$PBS_NODEFILE"; then
  echo "pbsdsh: this image has no ssh: of the job's guests only $here is reached" >&2
fi
line=''
for word; do line="$line $(quoted "$word")"; done
start() {  # number, node, program and arguments
  number=$1 node=$2
  shift 2
  if [ "$node" = "$here" ]; then
    cd || exit 254
    PBS_VNODENUM=$number
    export PBS_VNODENUM
    exec "$@" </dev/null
  fi
  set -- PBS_JOBID "$PBS_JOBID" PBS_NODEFILE "$PBS_NODEFILE" PBS_VNODENUM "$number" \
    PBS_O_WORKDIR "${PBS_O_WORKDIR:-}" PBS_JOBNAME "${PBS_JOBNAME:-}"
  given=env
  while [ $# -gt 0 ]; do
    given="$given $1=$(quoted "$2")"
    shift 2
  done
  exec ssh -n -o BatchMode=yes "$node" "exec $given$line"
}
tell() {
  [ "$2" -eq 0 ] || echo "pbsdsh: task $1 exit status $2" >&2
  [ "$2" -ne 255 ] || failed=1
}
failed=0 number=0 pids=''
[ -n "$copies" ] || copies=$count
while [ "$number" -lt "$copies" ]; do
  for node in $nodes; do
    [ "$number" -lt "$copies" ] || break
    if [ -z "$only" ] || [ "$only" -eq "$number" ]; then
      (start "$number" "$node" "$@") &
      if [ -n "$serial" ]; then
        wait $!
        tell "$number" $?
      else
        pids="$pids $number:$!"
      fi
    fi
    number=$((number + 1))
  done
done
for task in $pids; do
  wait "${task#*:}"
  tell "${task%%:*}" $?
done
exit $failed
"""

REFUSING = rb"""#!/bin/sh
# Written by vTorque: the batch system is not reached from inside its jobs' guests.
echo "${0##*/}: not available inside a job's virtual machine: use it on a login node" >&2
exit 1
"""
REFUSED = ("qsub", "qdel", "qstat", "qalter", "qhold", "qrls", "qrerun", "qsig", "qmove")


def items(job: BatchJob, guests: Sequence[PeerGuest], directory: str) -> Iterator[ContextItem]:
    """Yield the node file, where the host has it, ``pbsdsh``, and what refuses."""
    yield from nodefile.items(job.id, guests, directory, job.bare)
    yield GuestFile("/usr/bin/pbsdsh", PBSDSH, 0o755)
    for name in REFUSED:
        yield GuestFile(f"/usr/bin/{name}", REFUSING, 0o755)
