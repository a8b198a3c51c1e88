#!/usr/bin/env bash
# The study of four papers, images: five seeds, and five of a control that is trained on shuffled labels.
#
# Cost:       10 runs, each training 3.9e12 FLOP (0.603 M parameters, 960 steps, 61,440 images); 18 saved checkpoints
#             43.4 MB on the disk, two to resume from 14.5 MB. Measuring 8.2e10 FLOP a checkpoint: in all 38% of the
#             training's, most of it interventions.
# Time:       4 to 5 minutes a run on one CPU core of two.
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
