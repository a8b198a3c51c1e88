"""A grid of runs: one file that names the values, one run folder a cell, each run to its end once."""

from lit_layers.sweep.cells import CellFolder
from lit_layers.sweep.gpus import share_of_gpus, visible_gpus
from lit_layers.sweep.grid import Cell, Grid, read_grid
from lit_layers.sweep.running import run_cells
from lit_layers.sweep.table import Score, write_table

__all__ = [
    "Cell",
    "CellFolder",
    "Grid",
    "Score",
    "read_grid",
    "run_cells",
    "share_of_gpus",
    "visible_gpus",
    "write_table",
]
