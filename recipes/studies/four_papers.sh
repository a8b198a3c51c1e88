#!/usr/bin/env bash
# The text runs of the study of four papers: five seeds, and five seeds of a control trained on shuffled tokens.
#
# Time:       8 to 10 minutes per run on one of two CPU cores.
# Run:        bash recipes/studies/four_papers.sh
# Then:       lit-layers report checkpoints/four_papers/*/ --group data.shuffle_tokens
#             lit-layers emerge checkpoints/four_papers/shuffle_tokens=False*/ --seeds --root four_papers
root=checkpoints/four_papers
source "$(dirname "$0")/../sweeps/loop.sh"

for shuffle_tokens in False True; do
  for seed in 0 1 2 3 4; do
    train "shuffle_tokens=$shuffle_tokens,seed_everything=$seed" --config recipes/studies/gpt2.yaml --wandb=null \
      --data.shuffle_tokens="$shuffle_tokens" --seed_everything="$seed" "$@"
  done
done
finish
