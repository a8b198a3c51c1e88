"""Tasks: the catalogue, local copies, reading and splitting rows, and scores of layers and running orders."""
