"""Downstream tasks: their catalogue and local copies, reading and splitting their rows, and scoring models on them."""
