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

/bin/bash @HOME@/.psij/work/f65b111560da52a6d41f52a732be0faf4914eb6d7af2230a8de326017979e684/single_launch.sh d2c49789-070c-40d0-90b0-a88fb3c51049 '' '' '' /dev/null psij.out psij.err /bin/echo hello 'it'"'"'s $HOME' 

echo "$?" > "@HOME@/.psij/work/slurm/$SLURM_JOB_ID.ec"
