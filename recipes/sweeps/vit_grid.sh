#!/usr/bin/env bash
# The 64 vision transformers of the coupling study: weight decay x stochastic depth, CIFAR-10, one GPU per model.
#
# Reproduces: Aubry et al., Transformer Block Coupling and its Correlation with Generalization in LLMs, arXiv
#             2407.07810, section 3.4 and appendix A.7: coupling rises with stochastic depth, and at fixed stochastic
#             depth it correlates with test accuracy. The paper reports 64 models but not their values. We chose eight
#             values for each axis, around DeiT's 0.05 and 0.1.
# Run:        bash recipes/sweeps/vit_grid.sh
#             sbatch recipes/slurm/sweep.sh
#             wandb_configs/sweeps/vit_grid.yaml is the same grid for W&B's agents
# Data:       CIFAR-10 is downloaded once. For your own folder: bash recipes/sweeps/vit_grid.sh --corpus=FOLDER
# Then:       lit-layers correlate checkpoints/vit_grid --metric 'coupling/coupling[k=30]'
#             --score validation/accuracy --group drop_path_rate
#
# Every run gets the options after the name of the script.
root=checkpoints/vit_grid
source "$(dirname "$0")/loop.sh"

for drop_path_rate in 0.0 0.05 0.1 0.15 0.2 0.3 0.4 0.5; do
  for weight_decay in 0.0 0.01 0.02 0.05 0.1 0.2 0.3 0.5; do
    train "drop_path_rate=$drop_path_rate,weight_decay=$weight_decay" \
      --config recipes/deit/tiny_cifar10.yaml --config recipes/analyses/images.yaml \
      --trainer.devices=1 --trainer.strategy=auto \
      --model.drop_path_rate="$drop_path_rate" --model.weight_decay="$weight_decay" "$@"
  done
done
finish
