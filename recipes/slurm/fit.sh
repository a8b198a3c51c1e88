#!/usr/bin/env bash
# Train on two nodes of eight GPUs, through preemptions and time limits: sbatch recipes/slurm/fit.sh
#
# SLURM sends SIGTERM two minutes before the time limit, and when it preempts the job. All ranks then save at the same
# step and exit with code 143, and the job requeues itself. `--resume last` resumes the run, or starts it if there is no
# checkpoint.
#SBATCH --job-name=lit_layers
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# srun does not inherit --cpus-per-task. Without --kill-on-bad-exit the remaining ranks would wait for a dead one.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  lit-layers fit \
  --config recipes/gpt2/124m_openwebtext.yaml \
  --config recipes/analyses/text.yaml \
  --config wandb_configs/default.yaml \
  --trainer.num_nodes 2 --trainer.devices 8 --trainer.accumulate_grad_batches 5 \
  --data.global_batch_size 480 --resume last "$@"
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
