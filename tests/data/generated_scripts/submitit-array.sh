#!/bin/bash

# Parameters
#SBATCH --array=0-2%3
#SBATCH --cpus-per-task=1
#SBATCH --error=@HOME@/log_test/%A_%a/%A_%a_0_log.err
#SBATCH --job-name=submitit
#SBATCH --mem=512MB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=@HOME@/log_test/%A_%a/%A_%a_0_log.out
#SBATCH --signal=USR2@90
#SBATCH --time=5
#SBATCH --wckey=submitit

# setup
export PATH="$HOME/bin:$PATH"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output @HOME@/log_test/%A_%a/%A_%a_%t_log.out --error @HOME@/log_test/%A_%a/%A_%a_%t_log.err python3 -u -m submitit.core._submit @HOME@/log_test/%j
