#!/usr/bin/env bash
# Measure a series on the GPUs of four nodes by Ray, one command that hands the work out: sbatch recipes/slurm/analyze_ray.sh
#
# `ray symmetric-run` starts Ray on every node, runs the command on the first one and ends Ray with it. A node that is lost
# costs what was under way on it; what is there is not measured again: submit the job again to go on.
#SBATCH --job-name=lit_layers_ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300  # 30 s are few where Python lies on a network

# srun does not take --cpus-per-task over from above; without the other option the nodes that are left wait for a dead one.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  lit-layers analyze \
  --config recipes/series/pythia_70m.yaml \
  --config recipes/analyses/text.yaml \
  --engine ray "$@"
