#!/usr/bin/env bash
# Measure a series on up to eight GPUs, one array task per GPU: sbatch recipes/slurm/analyze.sh
#
# Task i of n takes every n-th checkpoint. All tasks append to one measurements.jsonl on a shared file system, which
# must support file locks, as NFS 4 and Lustre do. To continue, submit the script again: finished measurements are not
# repeated.
#SBATCH --job-name=lit_layers_analyze
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00

lit-layers analyze \
  --config recipes/series/pythia_70m.yaml \
  --config recipes/analyses/text.yaml \
  --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@"
