"""`lit-layers sweep`: every run of a grid, several at a time, each to its end once, and one table of them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_layers.cli.bar import bar
from lit_layers.cli.processes import shard_of
from lit_layers.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from lit_layers.sweep import CellFolder, Grid

FAILED = 1
_NAMED = 2  # running cells that the bar has room for


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def main(argv: list[str]) -> int:
    """Runs a grid's cells and returns 0, 1 where one failed, 130 after Ctrl-C, 143 after SIGTERM."""
    options = _parser().parse_args(argv)
    if options.workers < 1:
        raise InputError(f"workers: expected at least 1, got {options.workers}")
    index, count = _shard(options.shard)
    from lit_layers.sweep import CellFolder, read_grid, write_table
    from lit_layers.sweep.table import FILE

    grid, root = read_grid(options.file), options.root
    if not options.any_command:
        _refuse_another_program(grid)
    _make(root)
    made_by = [*grid.command, *([grid.program] if grid.program else [])]
    every = [CellFolder(root, cell, made_by) for cell in grid.cells()]
    own = every[index::count]
    for cell in own:
        cell.refuse_another()
        grid.command_line(cell.cell)
    stopped_by = _run(own, grid, options)
    frame = write_table(root, grid, every)
    _print_table(frame.drop(columns="run") if grid.values else frame)
    print(root / FILE)
    if stopped_by is not None:
        print("stopped: run the same command again to go on", file=sys.stderr)
        return 128 + stopped_by
    without = sum(isinstance(error, str) for error in list(frame["error"])[index::count])
    if without:
        print(f"{without} of {len(own)} cells failed; the same command tries failed runs again", file=sys.stderr)
    return FAILED if without else 0


def _run(cells: "list[CellFolder]", grid: "Grid", options: argparse.Namespace) -> int | None:
    """Runs what is not finished, and returns the signal that cut it short, if one did."""
    from lit_layers.sweep import run_cells, share_of_gpus, visible_gpus

    if all(cell.is_finished for cell in cells):
        return None
    gpus, workers = visible_gpus(os.environ), options.workers
    code = [f"--code={package}" for package in options.code]
    with bar("starting") as show:

        def tell(running: "Sequence[CellFolder]", ended: "CellFolder | None") -> None:
            if ended is not None:
                print(_line(ended), flush=True)
            show(sum(cell.is_finished for cell in cells), len(cells), _names(running))

        return run_cells(
            cells,
            lambda cell: [*grid.command_line(cell.cell), *code, "--root", str(cell.folder), "--resume", "last"],
            gpus=[share_of_gpus(gpus, worker, workers) for worker in range(workers)],
            tell=tell,
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers sweep",
        description="Run every cell of a grid, each to its end once. Run again it goes on where it was.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a W&B sweep with method: grid, e.g. recipes/sweeps/vit_grid.yaml")
    add("--root", type=Path, required=True, metavar="FOLDER", help="of all cells: a run folder each, and sweep.csv")
    add("--workers", type=int, default=1, help="cells that run at a time; they share the GPUs evenly (default: 1)")
    add("--code", action="append", default=[], metavar="PACKAGE", help="given to every cell: see lit-layers fit --help")
    add("--any_command", action="store_true", help="the file may start another program than lit-layers fit")
    add("--shard", default="0/1", metavar="i/n", help="every n-th cell from the i-th, from 0: for SLURM arrays")
    return parser


def _refuse_another_program(grid: "Grid") -> None:
    words = list(grid.command[1:] if grid.command[0] == "${env}" else grid.command)
    if words[:2] != ["lit-layers", "fit"]:
        raise InputError(
            f"command: the file starts {' '.join(words)}, expected lit-layers fit: say --any_command if you trust it"
        )
    if any(word.startswith("--code") for word in words) or {"code"} & {*grid.values, *grid.fixed}:
        raise InputError("command: whose code is run is said to lit-layers sweep alone: leave --code out of the file")


def _shard(text: str) -> tuple[int, int]:
    index, count = shard_of(text, os.environ)
    if not 0 <= index < count:
        raise InputError(f"shard: expected i/n with i from 0 to n - 1, got {index}/{count}")
    return index, count


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"root: cannot make {root}: {(error.strerror or str(error)).lower()}") from error


def _names(running: "Sequence[CellFolder]") -> str:
    names = [cell.cell.name for cell in running]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'  '.join(names[:_NAMED])}{more}" if names else "none is running here"


def _line(cell: "CellFolder") -> str:
    state = cell.state
    error = f": {state['error']}" if "error" in state else ""
    return f"{state['state']} {cell.cell.name}{error}"


def _print_table(frame: "pd.DataFrame") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in frame.columns:
        table.add_column(name, justify="left" if name in ("run", "error") else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*map(_shown, row))
    Console(highlight=False, markup=False).print(table)


def _shown(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
