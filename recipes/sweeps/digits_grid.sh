#!/usr/bin/env bash
# Four small vision transformers on handwritten digits, stochastic depth x weight decay: a miniature of the coupling
# study's grid, for trying `correlate`. Four models are too few for any conclusion.
#
# Time:       15 s per run on one CPU thread.
# Run:        bash recipes/sweeps/digits_grid.sh
# Then:       lit-layers correlate checkpoints/digits_grid --metric 'coupling/coupling[k=12]'
#             --score validation/accuracy --group drop_path_rate
#
# Every run gets the options after the name of the script, such as --trainer.max_steps=400.
root=checkpoints/digits_grid
source "$(dirname "$0")/loop.sh"

for drop_path_rate in 0.0 0.3; do
  for weight_decay in 0.0 0.5; do
    train "drop_path_rate=$drop_path_rate,weight_decay=$weight_decay" \
      --config recipes/quickstart/vit.yaml --steps=[0] --wandb=null --trainer.max_steps=100 \
      --model.drop_path_rate="$drop_path_rate" --model.weight_decay="$weight_decay" "$@"
  done
done
finish
