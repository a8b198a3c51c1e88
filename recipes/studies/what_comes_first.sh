#!/usr/bin/env bash
# What comes first, structure or skill: text, shuffled tokens, images and shuffled labels, three seeds each.
#
# Time:       about 70 minutes on one core. Kill it and start it again: it goes on where it stopped.
# Run:        bash recipes/studies/what_comes_first.sh
# Result:     docs/studies/what_comes_first.md; the last command prints its table, and draws its figure in the folder
#             of the runs
root=checkpoints/what_comes_first
source "$(dirname "$0")/../sweeps/loop.sh"

for seed in 0 1 2; do
  for shuffle in False True; do
    train "shuffle_tokens=$shuffle,seed_everything=$seed" --config recipes/studies/gpt2.yaml \
      --config recipes/studies/first_text.yaml --wandb=null --data.shuffle_tokens="$shuffle" --seed_everything="$seed" "$@"
    train "shuffle_labels=$shuffle,seed_everything=$seed" --config recipes/studies/vit.yaml \
      --config recipes/studies/first_images.yaml --wandb=null --data.shuffle_labels="$shuffle" --seed_everything="$seed" "$@"
  done
done
finish
python docs/studies/what_comes_first.py "$root"
