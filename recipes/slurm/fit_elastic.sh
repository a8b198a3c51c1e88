#!/usr/bin/env bash
# Train on two nodes of eight GPUs; torchrun restarts all ranks when one is lost: sbatch recipes/slurm/fit_elastic.sh
#
# torchrun restarts the ranks at most three times, and `--resume last` resumes the run each time. SLURM sends SIGTERM
# two minutes before the time limit: all ranks save, for which torchrun gives them 30 s, and the job ends. Submit it
# again to continue. SLURM requeues a job whose node is lost.
#SBATCH --job-name=lit_layers_elastic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Without this, restarted ranks would use the addresses that their predecessors left in torchrun's TCP store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" --no-python \
  lit-layers fit \
  --config recipes/gpt2/124m_openwebtext.yaml \
  --config recipes/analyses/text.yaml \
  --trainer.num_nodes 2 --trainer.devices 8 --trainer.accumulate_grad_batches 5 \
  --data.global_batch_size 480 --resume last "$@"
