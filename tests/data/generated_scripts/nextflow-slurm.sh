#!/bin/bash
#SBATCH -J nf-align_(1)
#SBATCH -o @HOME@/work/3f/9ac1d2/.command.log
#SBATCH --no-requeue
#SBATCH --signal B:USR2@30
#SBATCH -c 1
#SBATCH -t 00:05:00
#SBATCH --mem 512M
NXF_CHDIR=@HOME@/work/3f/9ac1d2
# TASK: align (1)
set -e
set -u
NXF_DEBUG=${NXF_DEBUG:=0}; [[ $NXF_DEBUG > 1 ]] && set -x
entry=${1:-run_task}

now_in_milliseconds() {
  local seconds nano
  read seconds nano < <(date '+%s %N')
  if [[ $nano =~ ^[0-9]+$ ]]; then
    nano=$(printf '%09d' "$((10#$nano))")
    echo "$((seconds * 1000 + 10#${nano:0:3}))"
  else
    echo "$((seconds * 1000))"
  fi
}

end_processes() {
  declare -a children
  while read P PP; do
    children[$PP]+=" $P"
  done < <(ps -e -o pid= -o ppid=)
  end_all() {
    [[ $1 != $$ ]] && kill $1 2>/dev/null || true
    for i in ${children[$1]:=}; do end_all $i; done
  }
  end_all $1
}

make_scratch() {
  local base=${1:-/tmp}
  mkdir -p "$base"
  TMPDIR="$base" mktemp -d -t nxf.XXXXXXXXXX
}

when_it_exits() {
  local last=$? status=${task_status:=0}
  [[ $status -eq 0 && ${copy_status:=0} -ne 0 ]] && status=$copy_status
  [[ $status -eq 0 && $last -ne 0 ]] && status=$last
  printf -- $status > @HOME@/work/3f/9ac1d2/.exitcode
  set +u
  rm -rf $NXF_SCRATCH || true
  sync || true
  exit $status
}

when_terminated() {
  set +e
  [[ "${pid:-}" ]] && end_processes $pid
}

launch() {
  /bin/bash -euo pipefail @HOME@/work/3f/9ac1d2/.command.sh
}

stage_in() {
  true
  rm -f reads.txt
  ln -s @HOME@/reads.txt reads.txt
}

copy_results() {
  true
  IFS=$'\n'
  for name in $(eval "ls -1d counts.txt" | sort | uniq); do
    mkdir -p @HOME@/work/3f/9ac1d2/$(dirname $name)
    cp -fRL $name @HOME@/work/3f/9ac1d2/
  done
  unset IFS
}

stage_out() {
  if [[ ${task_status:=0} == 0 ]]; then
    (set -e -o pipefail; (copy_results | tee -a .command.out) 3>&1 1>&2 2>&3 | tee -a .command.err) 3>&1 1>&2 2>&3
    copy_status=$?
  fi
}

run_task() {
  trap when_it_exits EXIT
  trap when_terminated TERM INT USR2
  trap '' USR1

  [[ "${NXF_CHDIR:-}" ]] && cd "$NXF_CHDIR"
  NXF_SCRATCH="$(set +u; make_scratch $TMPDIR)"
  touch .command.begin
  echo started $(now_in_milliseconds)
  set +u
  set -u
  [[ $NXF_SCRATCH ]] && cd $NXF_SCRATCH
  export NXF_TASK_WORKDIR="$PWD"
  stage_in

  set +e
  (set -o pipefail; (launch | tee .command.out) 3>&1 1>&2 2>&3 | tee .command.err) 3>&1 1>&2 2>&3 &
  pid=$!
  wait $pid || task_status=$?
  stage_out
}

$entry
