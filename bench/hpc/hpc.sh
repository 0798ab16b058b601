#!/bin/bash
# HPC Challenge over the job's ranks with a matrix of N by N (its input: hpcc(1)), then fio with a file
# of SIZE where the job was submitted, for guests a share. hpc.toml says what is taken out of the results.
set -e
ranks=$(mpirun hostname | wc -l)
{
  printf '%s\n' "two lines" "that are not read" HPL.out 8 1 "$N" 1 80 0 1 1 "$ranks"
  printf '%s\n' 16.0 1 2 1 4 1 2 1 1 1 1 1 1 2 64 0 0 1 8 "a line between" 0 0 0 0
} > hpccinf.txt
mpirun hpcc
grep -q '^Success=1' hpccoutf.txt

try() { fio --name="$1" --filename=data --size="$SIZE" --rw="$1" --bs="$2" --end_fsync=1 --output-format=json --output="$1.json"; }
try write 1M
try read 1M
try randread 4k
try randwrite 4k
rm data
