"""A grid of runs: one file that names the values, one run folder a cell, each run to its end once."""

from lit_layers.sweep.cells import TABLE, CellFolder, run_cells, share_of_gpus, visible_gpus, write_table
from lit_layers.sweep.grid import Cell, Grid, read_grid

__all__ = [
    "TABLE",
    "Cell",
    "CellFolder",
    "Grid",
    "read_grid",
    "run_cells",
    "share_of_gpus",
    "visible_gpus",
    "write_table",
]
