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

/bin/bash @HOME@/.psij/work/7320ed7a0d18a112284ff1af3edb671beddf50a202fd32f52c5c61746b2015c4/multi_launch.sh 98faf553-9dd5-49c1-8cb0-7332e2cde794 '' '' '' /dev/null psij.out psij.err 1 /bin/echo hello 'it'"'"'s $HOME' 

echo "$?" > "@HOME@/.psij/work/slurm/$SLURM_JOB_ID.ec"
