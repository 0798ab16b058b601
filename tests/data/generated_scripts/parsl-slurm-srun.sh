#!/bin/bash

#SBATCH --job-name=parsl.slurm.1795828811.8783612
#SBATCH --output=@HOME@/parsl/scripts/parsl.slurm.1795828811.8783612.stdout
#SBATCH --error=@HOME@/parsl/scripts/parsl.slurm.1795828811.8783612.stderr
#SBATCH --nodes=1
#SBATCH --time=5
#SBATCH --ntasks-per-node=1

#SBATCH --exclusive


export PATH="$HOME/bin:$PATH"



export JOBNAME="parsl.slurm.1795828811.8783612"

set -e
export CORES=$SLURM_CPUS_ON_NODE
export NODES=$SLURM_JOB_NUM_NODES

[[ "1" == "1" ]] && echo "Found cores : $CORES"
[[ "1" == "1" ]] && echo "Found nodes : $NODES"
WORKERCOUNT=1
SCRIPT_DIR="@HOME@/parsl/scripts"
[[ -d $SCRIPT_DIR ]] || SCRIPT_DIR=""

cat << SLURM_EOF > ${SCRIPT_DIR:+$SCRIPT_DIR/}cmd_$SLURM_JOB_NAME.sh
process_worker_pool.py --debug --max_workers_per_node=1 -a 127.0.0.1 -p 0 -c 1.0 -m None --poll 10 --task_port=54000 --result_port=54001 --block_id=0 --hb_period=30 --cert_dir=None --logdir=runinfo/000
SLURM_EOF
chmod a+x ${SCRIPT_DIR:+$SCRIPT_DIR/}cmd_$SLURM_JOB_NAME.sh

srun --ntasks 1 -l  bash ${SCRIPT_DIR:+$SCRIPT_DIR/}cmd_$SLURM_JOB_NAME.sh

[[ "1" == "1" ]] && echo "Done"

