"""Tasks: one catalogue, local copies, how rows are read and split, and scores of layers and running orders on them."""
