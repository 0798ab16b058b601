#!/usr/bin/env bash

#PBS -N dask-worker
#PBS -l select=1:ncpus=1:mem=489MB
#PBS -l walltime=00:05:00
#PBS -e logs/
#PBS -o logs/
export PATH="$HOME/bin:$PATH"
python3 -m distributed.cli.dask_worker tcp://192.0.2.2:40001 --name PBSCluster-0 --nthreads 1 --memory-limit 488.28MiB --nanny --death-timeout 60
