#!/usr/bin/env bash

#SBATCH -J dask-worker
#SBATCH -e logs/dask-worker-%J.err
#SBATCH -o logs/dask-worker-%J.out
#SBATCH -n 1
#SBATCH --cpus-per-task=1
#SBATCH --mem=489M
#SBATCH -t 00:05:00
export PATH="$HOME/bin:$PATH"
python3 -m distributed.cli.dask_worker tcp://192.0.2.2:40001 --name SLURMCluster-0 --nthreads 1 --memory-limit 488.28MiB --nanny --death-timeout 60
