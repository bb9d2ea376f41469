#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A batch job for Slurm: one rank per socket of two nodes.  Change the lines below
# to what your cluster has, or name it: sbatch --nodes=4 --time=2:00:00 ...
#
# usage: sbatch configs/slurm.sh PROGRAM CONFIG OUTPUT [option ...]
#   e.g. sbatch configs/slurm.sh build/models/gpt2 config.json runs/first
#
# Five minutes before the time limit the run saves a checkpoint and ends; the next
# job with the same OUTPUT goes on from there.  Jobs of one name wait for each
# other here, so several may be submitted at once.
#SBATCH --job-name=izar
#SBATCH --dependency=singleton
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300

program=${1:?a program, a config and a folder are needed}
config=${2:?a config and a folder are needed}
output=${3:?a folder is needed}
shift 3
# A job that ends before its first checkpoint leaves none, or what ends in .tmp.
for checkpoint in "$output"/checkpoints/step-*[!p]; do
    if [ -d "$checkpoint" ]; then
        set -- --resume "$@"
        break
    fi
done
# srun takes no number of cores from the lines above since Slurm 22.05, and Open
# MPI finds its ranks by PMIx.  One rank needs no srun, but the signal does.
exec srun --mpi=pmix ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "$program" "$config" --set "run.output=$output" "$@"
