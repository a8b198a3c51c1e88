#!/usr/bin/env bash
# The image runs of the study of four papers: five seeds, and five seeds of a control trained on shuffled labels.
#
# Time:       4 to 5 minutes per run on one of two CPU cores.
# Run:        bash recipes/studies/four_papers_images.sh
# Then:       lit-layers report checkpoints/four_papers_images/*/ --group data.shuffle_labels
#             lit-layers emerge checkpoints/four_papers_images/shuffle_labels=False*/ --seeds --root four_papers_images
root=checkpoints/four_papers_images
source "$(dirname "$0")/../sweeps/loop.sh"

for shuffle_labels in False True; do
  for seed in 0 1 2 3 4; do
    train "shuffle_labels=$shuffle_labels,seed_everything=$seed" --config recipes/studies/vit.yaml --wandb=null \
      --data.shuffle_labels="$shuffle_labels" --seed_everything="$seed" "$@"
  done
done
finish
