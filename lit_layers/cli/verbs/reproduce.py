"""`lit-layers reproduce`: measure a published figure or table again, and compare with the printed numbers."""

import importlib
import sys
from pathlib import Path

import pandas as pd
import yaml

from lit_layers import records
from lit_layers.cli.command_line import run_verb
from lit_layers.cli.options import Recipe, find_recipe
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file
from lit_layers.papers import PAPERS, PaperRecipe, Row, Step, compare, read_recipe

STEPS = "steps"  # name of the subfolder with one recipe for each command to run
_STOPPED = 128  # exit codes above this mean that a signal ended the command


def reproduce(file: Path, *, reduced: bool = False, root: Path | None = None) -> int:
    """Run the commands of a published figure or table, and print its numbers next to the measured ones.

    Run the command again to continue after an interruption. Exit code: 0; 1 if anything failed; 2 for wrong input; 3 if
    a training diverged; 130 after Ctrl-C.

    Args:
        file: a recipe, e.g. recipes/papers/coupling/fig1b.yaml; docs/papers.md lists them
        reduced: measure at reduced sizes that a laptop can handle; the numbers then differ from the printed ones
        root: folder for all results (default: checkpoints/papers/PAPER/RECIPE; with --reduced: RECIPE-reduced)
    """
    file = find_recipe(file)
    recipe = read_recipe(file)
    if recipe.status == "cannot":
        raise InputError(f"{file}: {recipe.item} cannot be measured: {recipe.why}")
    if reduced and not recipe.reduced:
        raise InputError(f"reduced: {file} has no sizes below the published ones")
    root = root or Path("checkpoints", "papers", recipe.paper, f"{file.stem}{'-reduced' if reduced else ''}")
    steps = recipe.commands(root, file.parent, reduced=reduced)
    with refused(f"root: cannot make {root}"):
        (root / STEPS).mkdir(parents=True, exist_ok=True)
    commands = [_write_step(number, step, root) for number, step in enumerate(steps, start=1)]
    exit_code = 0
    for number, argv in enumerate(commands, start=1):
        print(f"step {number} of {len(commands)}: lit-layers {' '.join(argv)}", file=sys.stderr, flush=True)
        code = run_verb(argv[0], argv[1:])
        if code > _STOPPED:
            return code
        if code:
            print(f"step {number} ended with exit code {code}; the next one begins", file=sys.stderr)
        exit_code = exit_code or code
    _compare(recipe, root, reduced=reduced)
    return exit_code


def _write_step(number: int, step: Step, root: Path) -> list[str]:
    """Write the options of a step (one command) to a recipe, and return the command line, as a user would type it.

    Raises:
        InputError: the command refuses the options. All steps are checked before the first one runs.
    """
    path = root / STEPS / f"{number}-{step.verb}.yaml"
    replace_file(path, yaml.safe_dump(step.options, sort_keys=False, allow_unicode=True, width=120))
    argv = step.argv(path)
    verb = getattr(importlib.import_module(f"lit_layers.cli.verbs.{step.verb}"), step.verb)
    try:
        Recipe(verb, argv[1:]).read()
    except InputError as error:
        raise InputError(f"steps: {number}, {step.verb}: {error}") from error
    return argv


def _compare(recipe: PaperRecipe, root: Path, *, reduced: bool) -> None:
    rows = compare(recipe, root, reduced=reduced)
    if rows:
        print(f"{recipe.item}, {PAPERS[recipe.paper].partition(' (')[0]}")
        print(pd.DataFrame([row.cells() for row in rows]).to_string(index=False))
    else:
        print("The paper prints no number of this one: its figure is compared by eye.")
    if recipe.differs:
        print(f"Differs from the paper: {recipe.differs}")
    if reduced:
        print("Reduced: at other sizes than the published ones, so that nothing is said of the printed numbers.")
    print(*records.write_files(root, {"comparison.csv": pd.DataFrame(rows, columns=Row._fields)}))
