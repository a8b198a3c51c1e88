"""`lit-layers reproduce`: a published figure or table again, and its printed numbers beside the measured ones."""

import importlib
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Literal

import yaml

from lit_layers.cli.command_line import run_verb
from lit_layers.cli.console import show_table
from lit_layers.cli.options import Recipe
from lit_layers.cli.recipes import find_recipe
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file
from lit_layers.papers import PAPERS, PaperRecipe, Step, compare, read_recipe, write_comparison

STEPS = "steps"  # folder of the options of each step
_STOPPED = 128  # exit codes above: Ctrl-C, SIGTERM


def reproduce(
    file: Path,
    *,
    reduced: bool = False,
    root: Path | None = None,
    engine: Literal["process", "ray"] = "process",
    plan: bool = False,
    compare: bool = False,
) -> int:
    """Run the commands of a published figure or table, and print its numbers beside the measured ones. Run it again to
    continue. Exit code: 0, 1 if something failed, 2 wrong input, 3 where a run diverged, 130 after Ctrl-C.

    Args:
        file: a recipe, e.g. recipes/papers/coupling/fig1b.yaml; docs/papers.md lists them
        reduced: measure at sizes for a laptop, at which the printed numbers cannot be expected
        root: folder of all results (default: checkpoints/papers/PAPER/RECIPE, with -reduced behind it)
        engine: ray: workers of a Ray cluster measure (docs/clusters.md), and this process does the rest
        plan: say what its commands would cost, and measure nothing
        compare: only compare what has been measured
    """
    if plan and compare:
        raise InputError("plan: --compare was given, which measures nothing either: leave one out")
    file = find_recipe(file)
    recipe = read_recipe(file)
    if recipe.status == "cannot":
        raise InputError(f"{file}: {recipe.item} cannot be measured: {recipe.why}")
    if reduced and not recipe.reduced:
        raise InputError(f"reduced: {file} has no sizes below the published ones: leave --reduced out")
    root = root or Path("checkpoints", "papers", recipe.paper, f"{file.stem}{'-reduced' if reduced else ''}")
    if compare and not root.is_dir():
        raise InputError(f"root: there is no {root} to compare with {recipe.item}: leave --compare out to measure it")
    steps = recipe.commands(root, file.parent, reduced=reduced)
    with refused(f"root: cannot make {root}"):
        (root / STEPS).mkdir(parents=True, exist_ok=True)
    commands = [_written(number, step, root) for number, step in enumerate(steps, start=1)]
    options = [_options(number, argv) for number, argv in enumerate(commands, start=1)]
    code = 0 if compare else _run(zip(commands, options, strict=True), plan=plan, engine=engine)
    if not plan and code < _STOPPED:
        _compare(recipe, root, reduced=reduced)
    return code


def _written(number: int, step: "Step", root: Path) -> list[str]:
    """The words of a step's command, whose options are written to a file: the same that a user could type."""
    path = root / STEPS / f"{number}-{step.verb}.yaml"
    replace_file(path, yaml.safe_dump(step.options, sort_keys=False, allow_unicode=True, width=120))
    return step.argv(path)


def _options(number: int, argv: list[str]) -> Container[str]:
    """The options of a command, read by its own parser: the last step's mistakes are told before the first runs."""
    verb, *rest = argv
    module = importlib.import_module(f"lit_layers.cli.verbs.{verb}")
    try:
        return Recipe(getattr(module, verb), rest).options
    except InputError as error:
        raise InputError(f"steps: {number}, {verb}: {error}") from error


def _run(commands: Iterable[tuple[list[str], Container[str]]], *, plan: bool, engine: str) -> int:
    """Runs all steps; one that failed or diverged, or whose model cannot be had, ends nothing: the others have numbers,
    too. A disk that takes no more ends all.
    """
    commands, whole = [*commands], 0
    for number, (argv, options) in enumerate(commands, start=1):
        if plan and "plan" not in options:
            continue
        argv = [*argv, *(["--plan"] if plan else [])]
        argv += ["--engine", engine] if engine != "process" and "engine" in options else []
        print(f"step {number} of {len(commands)}: lit-layers {' '.join(argv)}", file=sys.stderr, flush=True)
        code = run_verb(argv[0], argv[1:], passes_full=True)
        if code > _STOPPED:
            return code
        if code:
            print(f"step {number} ended with exit code {code}; the next one begins", file=sys.stderr)
        whole = whole or code
    return whole


def _compare(recipe: "PaperRecipe", root: Path, *, reduced: bool) -> None:
    rows = compare(recipe, root, reduced=reduced)
    notes = [recipe.shows]
    if recipe.differs:
        notes.append(f"Differs from the paper: {recipe.differs}")
    if reduced:
        notes.append("Reduced: at other sizes than the published ones, so that nothing is said of the printed numbers.")
    if not rows:
        notes.append("The paper prints no number of this one: its figure is compared by eye.")
    title = f"{recipe.item}, {PAPERS[recipe.paper].partition(' (')[0]}"
    if rows:
        show_table([row.cells() for row in rows], title)
    print(*notes[1:], *write_comparison(rows, root, title, notes), sep="\n")
