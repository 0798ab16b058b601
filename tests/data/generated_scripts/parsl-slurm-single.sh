#!/bin/bash

#SBATCH --job-name=parsl.slurm.1795828812.042984
#SBATCH --output=@HOME@/parsl/scripts/parsl.slurm.1795828812.042984.stdout
#SBATCH --error=@HOME@/parsl/scripts/parsl.slurm.1795828812.042984.stderr
#SBATCH --nodes=1
#SBATCH --time=5
#SBATCH --ntasks-per-node=1

#SBATCH --exclusive


export PATH="$HOME/bin:$PATH"



export JOBNAME="parsl.slurm.1795828812.042984"

set -e
export CORES=$(getconf _NPROCESSORS_ONLN)
[[ "1" == "1" ]] && echo "Found cores : $CORES"
WORKERCOUNT=1
FAILONANY=0
PIDS=""

CMD() {
process_worker_pool.py --debug --max_workers_per_node=1 -a 127.0.0.1 -p 0 -c 1.0 -m None --poll 10 --task_port=54000 --result_port=54001 --block_id=0 --hb_period=30 --cert_dir=None --logdir=runinfo/000
}
for COUNT in $(seq 1 1 $WORKERCOUNT); do
    [[ "1" == "1" ]] && echo "Launching worker: $COUNT"
    CMD $COUNT &
    PIDS="$PIDS $!"
done

ALLFAILED=1
ANYFAILED=0
for PID in $PIDS ; do
    wait $PID
    if [ "$?" != "0" ]; then
        ANYFAILED=1
    else
        ALLFAILED=0
    fi
done

[[ "1" == "1" ]] && echo "All workers done"
if [ "$FAILONANY" == "1" ]; then
    exit $ANYFAILED
else
    exit $ALLFAILED
fi

