#!/bin/bash

#PBS -S /bin/bash
#PBS -N parsl.1795828812.2554498
#PBS -m n
#PBS -l walltime=00:05:00
#PBS -l select=1:ncpus=1
#PBS -o @HOME@/parsl/scripts/parsl.1795828812.2554498.stdout
#PBS -e @HOME@/parsl/scripts/parsl.1795828812.2554498.stderr


export PATH="$HOME/bin:$PATH"


export JOBNAME="parsl.1795828812.2554498"

process_worker_pool.py --debug --max_workers_per_node=1 -a 127.0.0.1 -p 0 -c 1.0 -m None --poll 10 --task_port=54000 --result_port=54001 --block_id=0 --hb_period=30 --cert_dir=None --logdir=runinfo/000

