"""Tasks: the catalogue of them, local copies, and how their rows are read and split."""
