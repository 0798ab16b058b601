#!/bin/bash



#SBATCH --chdir="@HOME@/psij"


#SBATCH --nodes=1

#SBATCH --ntasks=1

#SBATCH --ntasks-per-node=1


#SBATCH --cpus-per-task=1


#SBATCH --time=0:5:0





#SBATCH -e /dev/null
#SBATCH -o /dev/null

#SBATCH --export=ALL

export GREETING='a b'

_PSIJ_PPN=1

_PSIJ_NC=`scontrol show hostnames | wc -l`

if [ "$_PSIJ_PPN" == "" ]; then
    if [ "$_PSIJ_NC" != "" ] && [ "$_PSIJ_PC" != "" ]; then
        _PSIJ_PPN=$((_PSIJ_PC/_PSIJ_NC))
    fi
fi

PSIJ_NODEFILE="@HOME@/.psij/work/slurm/$SLURM_JOB_ID.nodefile"
if [ "$_PSIJ_PPN" == "" ]; then
    scontrol show hostnames >"$PSIJ_NODEFILE"
else
    scontrol show hostnames | while read NODE; do for _ in $(seq 1 1 $_PSIJ_PPN); do echo "$NODE"; done; done > "$PSIJ_NODEFILE"
fi
export PSIJ_NODEFILE



exec &>> "@HOME@/.psij/work/slurm/$SLURM_JOB_ID.out"

/bin/bash @HOME@/.psij/work/41a218e1b707eefe6e43286b445f0f01286e6ea2bd4ead8c1b473c581e205f9d/srun_launch.sh aa00c446-12b8-4811-b0b3-eef5633fa39d '' '' '' /dev/null psij.out psij.err 1 /bin/echo hello 'it'"'"'s $HOME' 

echo "$?" > "@HOME@/.psij/work/slurm/$SLURM_JOB_ID.ec"
