#!/usr/bin/env bash
# Train a grid on eight GPUs, one array task per GPU, through preemptions and time limits: sbatch recipes/slurm/sweep.sh
#
# Task i of n takes every n-th run of the loop. SLURM sends SIGTERM two minutes before the time limit, and when it
# preempts a task. The current run then saves, and the task exits with code 143 and requeues itself to continue. The
# task's log names failed runs: submit the array again to retry them.
#SBATCH --job-name=lit_layers_sweep
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# srun does not inherit --cpus-per-task.
SHARD="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  bash recipes/sweeps/vit_grid.sh "$@"
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
