#!/usr/bin/env bash
# Measure a series on the GPUs of four nodes; Ray distributes the work: sbatch recipes/slurm/analyze_ray.sh
#
# `ray symmetric-run` starts Ray on every node, runs the command on the first one and then stops Ray. If a node is lost,
# only its unfinished work is lost. To continue, submit the job again: finished measurements are not repeated.
#SBATCH --job-name=lit_layers_ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300  # default: 30 s, too short for a network drive

# srun does not inherit --cpus-per-task. Without --kill-on-bad-exit the remaining nodes would wait for a dead one.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  lit-layers analyze \
  --config recipes/series/pythia_70m.yaml \
  --config recipes/analyses/text.yaml \
  --engine ray "$@"
