#!/usr/bin/env bash
# Mechanism and geometry of the same weights, for the study of four papers: three seeds, and three seeds of a control
# trained on shuffled tokens.
#
# Time:       5 minutes per run on one of two CPU cores; 8 to 27 minutes on a busy machine.
# Run:        bash recipes/studies/four_papers_mechanism.sh
# Then:       python docs/studies/four_papers.py --pack-mechanism checkpoints/four_papers_mechanism
#             lit-layers emerge checkpoints/four_papers_mechanism/shuffle_tokens=False*/ --seeds --root four_papers_mechanism
root=checkpoints/four_papers_mechanism
source "$(dirname "$0")/../sweeps/loop.sh"

for shuffle_tokens in False True; do
  for seed in 0 1 2; do
    train "shuffle_tokens=$shuffle_tokens,seed_everything=$seed" --config recipes/studies/gpt2_mechanism.yaml --wandb=null \
      --data.shuffle_tokens="$shuffle_tokens" --seed_everything="$seed" "$@"
  done
done
finish
