"""`lit-layers sweep`: every run of a grid, several at a time, each to its end once, and one table of them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lit_layers.cli import DIVERGED, FAILED, threads
from lit_layers.cli.command_line import run_verb
from lit_layers.cli.console import bar, show_table
from lit_layers.cli.options import Recipe
from lit_layers.cli.own_code import trust_code
from lit_layers.cli.shipped_recipes import recipe_file
from lit_layers.errors import InputError, refused
from lit_layers.measuring.measuring_options import shard_of
from lit_layers.schema import Range, refuse_no_shard

if TYPE_CHECKING:
    from lit_layers.sweep import CellFolder, Grid

WORKERS = Range(1, 10_000, whole=True)
_NAMED = 2  # running cells that the bar has room for


def sweep(
    file: Path,
    *,
    root: Path,
    workers: Annotated[int, WORKERS] = 1,
    code: list[str] | None = None,
    any_command: bool = False,
    shard: str = "0/1",
    plan: bool = False,
) -> int:
    """Train every run of a grid of options, its cells, once each. Run it again to continue. Exit code: 0, 1 where a
    cell failed, 3 where all that failed diverged, 2 wrong input, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        file: a W&B sweep with method: grid, e.g. recipes/sweeps/vit_grid.yaml
        root: folder of the sweep: a run folder for each cell, and sweep.csv
        workers: how many cells run at a time; they share the GPUs evenly
        code: command line only, repeatable: a package that every cell may use (see lit-layers fit --help)
        any_command: command line only: the file may start another program than lit-layers fit
        shard: i/n: run only every n-th cell, from the i-th on, counted from 0; for SLURM arrays
        plan: say what the first cell that is left would cost, and how many are left; run nothing
    """
    index, count = shard_of(shard, os.environ)
    refuse_no_shard((index, count))
    from lit_layers.sweep import TABLE, CellFolder, read_grid, write_table

    trusted = [f"--code={package}" for package in code or ()]
    trust_code(trusted)  # refuses what is none, also where no cell is left to be run with it
    grid = read_grid(Path(recipe_file(file)))
    if not any_command:
        _refuse_another_program(grid)
    if not plan:
        with refused(f"root: cannot make {root}"):
            root.mkdir(parents=True, exist_ok=True)
    made_by = [*grid.command, *([grid.program] if grid.program else [])]
    every = [CellFolder(root, cell, made_by) for cell in grid.cells()]
    cells = every[index::count]
    for cell in cells:
        cell.refuse_another()
        grid.command_line(cell.cell)
    if plan:
        return _plan(cells, grid, trusted)
    _check_options(cells, grid, trusted)
    stopped_by = _run(cells, grid, workers, trusted)
    frame = write_table(root, grid, every)
    shown = frame.drop(columns="run") if grid.values else frame
    show_table(shown.map(_shown).to_dict("records"), text=("run", "error"))
    print(root / TABLE)
    if stopped_by is not None:
        print("stopped: run the same command again to go on", file=sys.stderr)
        return 128 + stopped_by
    errors = [error for error in list(frame["error"])[index::count] if isinstance(error, str)]
    diverged = sum(error.startswith("diverged: ") for error in errors)
    if errors:
        which = f", {diverged} of them diverged" if diverged else ""
        print(
            f"{len(errors)} of {len(cells)} cells failed{which}; the same command tries failed runs again",
            file=sys.stderr,
        )
    return DIVERGED if errors and diverged == len(errors) else FAILED if errors else 0


def _words_of_fit(cell: "CellFolder", grid: "Grid", code: list[str]) -> list[str] | None:
    """The words behind `fit` of a cell's command; None where it starts something else."""
    words = grid.command_line(cell.cell)
    at = words.index("fit") if "fit" in words[:3] else 0
    if not at or Path(words[at - 1]).name != "lit-layers":  # another program may have a command fit, too
        return None
    return [*words[at + 1 :], *code, "--root", str(cell.folder)]


def _check_options(cells: "list[CellFolder]", grid: "Grid", code: list[str]) -> None:
    """Reads the options of cells that are left, with each value of each parameter once, before the first cell runs.

    Raises:
        InputError: naming the cell, and what `fit` refuses.
    """
    seen: set[tuple[str, str]] = set()
    for cell in (cell for cell in cells if not cell.is_finished):
        options, words = {(name, repr(value)) for name, value in cell.cell.parameters.items()}, None
        if not seen or options - seen:
            words = _words_of_fit(cell, grid, code)
        seen |= options
        if words is None:
            continue
        from lit_layers.cli.verbs.fit import fit

        try:
            Recipe(fit, words).instantiated()
        except InputError as error:
            raise InputError(f"{cell.cell.name}: {error}") from error


def _plan(cells: "list[CellFolder]", grid: "Grid", code: list[str]) -> int:
    """Prints what the first cell that is left would cost: the others differ in their values alone."""
    left = [cell for cell in cells if not cell.is_finished]
    print(f"{len(left)} of {len(cells)} cells are left", flush=True)
    if not left:
        return 0
    words = _words_of_fit(left[0], grid, code)
    if words is None:
        started = " ".join(grid.command_line(left[0].cell)[:3])
        raise InputError(f"plan: it is made for lit-layers fit, and the file starts {started}: leave it out")
    return run_verb("fit", [*words, "--plan"])


def _run(cells: "list[CellFolder]", grid: "Grid", workers: int, code: list[str]) -> int | None:
    """Runs what is not finished, and returns the signal that cut it short, if one did."""
    from lit_layers.sweep import run_cells, share_of_gpus, visible_gpus

    if all(cell.is_finished for cell in cells):
        return None
    gpus = visible_gpus(os.environ)
    threads.settle(workers)
    with bar("starting") as show:

        def tell(running: "Sequence[CellFolder]", ended: "CellFolder | None") -> None:
            if ended is not None:
                print(_line(ended), flush=True)
            show(sum(cell.is_finished for cell in cells), len(cells), _names(running))

        def line_of(cell: "CellFolder") -> list[str]:
            return [*grid.command_line(cell.cell), *code, "--root", str(cell.folder), "--resume", "last"]

        return run_cells(
            cells,
            line_of,
            gpus=[share_of_gpus(gpus, worker, workers) for worker in range(workers)],
            tell=tell,
        )


def _refuse_another_program(grid: "Grid") -> None:
    words = list(grid.command[1:] if grid.command[0] == "${env}" else grid.command)
    if words[:2] != ["lit-layers", "fit"]:
        raise InputError(
            f"command: the file starts {' '.join(words)}, expected lit-layers fit: say --any_command if you trust it"
        )
    if any(word.startswith("--code") for word in words) or {"code"} & {*grid.values, *grid.fixed}:
        raise InputError("command: whose code is run is said to lit-layers sweep alone: leave --code out of the file")


def _names(running: "Sequence[CellFolder]") -> str:
    names = [cell.cell.name for cell in running]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'  '.join(names[:_NAMED])}{more}" if names else "none is running here"


def _line(cell: "CellFolder") -> str:
    state = cell.state
    error = f": {state['error']}" if "error" in state else ""
    return f"{state['state']} {cell.cell.name}{error}"


def _shown(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
