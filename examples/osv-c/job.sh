#!/bin/sh
#PBS -N ising -j oe
#SBATCH -J ising
#VSUB -vm img=ising,vcpus=1,ram=64M,vms_per_node=2
/bin/ising 5000
