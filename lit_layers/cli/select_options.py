"""The options of `lit-layers select`: read, refused where they do not fit, and the task that they name."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.tasks.probe_task import ProbeTask

RULES = ("within_tolerance", "fraction_of_last", "plateau", "knee", "best")
WITHOUT_TOLERANCE = ("knee", "best")
OF_TEXTS = ("folder", "tokenizer", "max_tokens", "cache")
OF_IMAGES = ("num_train", "num_test")
OF_FILES = ("text", "label", "regression")
OF_EXPORT = ("keep_lm_head", "overwrite")
OF_CLASSES, OF_NUMBERS = ("c", "max_iterations"), ("penalty",)
DEFAULTS = {"max_tokens": 512, "c": 1.0, "penalty": 1.0, "max_iterations": 1000, "tolerance": 0.01}


def read_options(argv: list[str]) -> argparse.Namespace:
    """What a command line says; `task` is None for images, else a `ProbeTask`, `tolerance` None for rules without one.

    Raises:
        InputError: options that are unknown, out of range or do not fit together.
    """
    options = _parser().parse_args(argv)
    if (options.task is None) == (options.images is None):
        raise InputError("task: expected --task NAME, or --images SOURCE for a vision model, and not both")
    _refuse_what_does_not_fit(options)
    _check_numbers(options)
    for name in ("out", "export"):
        _check_folder(name, getattr(options, name))
    if None not in (options.out, options.export) and options.out.resolve().is_relative_to(options.export.resolve()):
        raise InputError(f"out: {options.out} is where the export goes: name another folder")
    options.pooling = options.pooling or ("last" if options.images is None else "cls")
    if options.task is not None:
        options.task = _task(options)
    _check_kind(options)
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None and not (name == "tolerance" and options.rule in WITHOUT_TOLERANCE):
            setattr(options, name, value)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers select",
        description="Choose the layer that is enough for a task, on validation rows, and cut the model there.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with config.json and weights (a checkpoint), or a name on the Hub")
    add("--revision", help="branch, tag or commit of the Hub")
    add("--task", help="labelled texts: banking77 (docs/tasks.md lists them), or a .jsonl, .csv or .parquet file, or a "
        "folder of such files named after the splits")  # fmt: skip
    add("--text", help="their column of text, or a format such as 'Subject: {subject}' (default: text)")
    add("--label", help="their column of labels (default: label)")
    add("--regression", action="store_true", default=None, help="their labels are numbers to predict")
    add("--folder", help="local data that hold a task of the catalogue (default: the Hub)")
    add("--images", help="instead, for a vision model: digits, cifar10, a local path, ORG/NAME")
    add("--tokenizer", help="default: the model's own")
    add("--rule", choices=RULES, default=RULES[0], help=f"default: {RULES[0]}")
    add("--tolerance", type=float, help="of the rule, in units of the score (default: 0.01)")
    add("--pooling", choices=["last", "mean", "cls"], help="default: last for texts, cls for images")
    add("--max_tokens", type=int, help="a longer text loses its end (default: 512)")
    add("--num_train", type=int, help="images to fit and choose on (default: all)")
    add("--num_test", type=int, help="images to report on (default: all)")
    add("--c", type=float, help="inverse regularisation of the logistic probe (default: 1)")
    add("--penalty", type=float, help="of the ridge probe of a regression (default: 1)")
    add("--max_iterations", type=int, help="of the logistic probe (default: 1000)")
    add("--cache", metavar="FOLDER", help="keep features of texts there for the next call")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--out", type=Path, metavar="FOLDER", help="of pictures and numbers (default: selected/MODEL-TASK)")
    add("--export", type=Path, metavar="DIR", help="write the model cut there, with its probe and its page")
    add("--keep_lm_head", action="store_true", default=None, help="export the model's own head, too")
    add("--overwrite", action="store_true", default=None, help="replace an earlier export in DIR")
    add("--rounds", type=int, default=20, help="in which times are measured (default: 20)")
    return parser


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(options, name) is not None), None)


def _refuse_what_does_not_fit(options: argparse.Namespace) -> None:
    if options.images is not None and (name := _given(options, OF_TEXTS + OF_FILES)):
        raise InputError(f"{name}: is for texts, and --images was given: leave it out")
    if options.images is None and (name := _given(options, OF_IMAGES)):
        raise InputError(f"{name}: is for --images, and a task of texts was given: leave it out")
    if options.export is None and (name := _given(options, OF_EXPORT)):
        raise InputError(f"{name}: is for --export DIR, which was not given: leave it out")
    if options.rule in WITHOUT_TOLERANCE and options.tolerance is not None:
        raise InputError(f"tolerance: the rule {options.rule} has none: leave it out")


def _check_kind(options: argparse.Namespace) -> None:
    is_regression = options.task is not None and options.task.kind == "regression"
    if is_regression and options.rule == "fraction_of_last":
        raise InputError("rule: fraction_of_last is for accuracies, and this task is a regression: take another")
    if name := _given(options, OF_CLASSES if is_regression else OF_NUMBERS):
        kind, is_one = ("classifications", "a regression") if is_regression else ("regressions", "a classification")
        raise InputError(f"{name}: is for {kind}, and this task is {is_one}: leave it out")


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("max_tokens", "max_iterations", "rounds"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise InputError(f"{name}: expected at least 1, got {number}")
    limit = 1 if options.rule == "fraction_of_last" else math.inf
    if options.tolerance is not None and not 0 <= options.tolerance < limit:
        below = " and below 1" if limit == 1 else ""
        raise InputError(f"tolerance: expected at least 0{below}, got {options.tolerance:g}")
    if options.c is not None and not 0 < options.c < math.inf:
        raise InputError(f"c: expected a positive number, got {options.c:g}")
    if options.penalty is not None and not 0 <= options.penalty < math.inf:
        raise InputError(f"penalty: expected at least 0, got {options.penalty:g}")


def _check_folder(name: str, folder: Path | None) -> None:
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"{name}: expected a folder, {there} is a file")


def _task(options: argparse.Namespace) -> "ProbeTask":
    """A task of the catalogue, or labelled texts on this machine."""
    from lit_layers.tasks.catalogue import TASKS, unknown_task
    from lit_layers.tasks.task_files import SUFFIXES, is_local

    name: str = options.task
    if name in TASKS:
        if strange := [option for option in OF_FILES if getattr(options, option) is not None]:
            raise InputError(f"{strange[0]}: is for files of your own, and {name} is of the catalogue: leave it out")
        return TASKS[name]
    if not is_local(name):
        raise unknown_task(name, TASKS, f"name a {', '.join(SUFFIXES)} file")
    if options.folder is not None:
        raise InputError(f"folder: is for tasks of the catalogue, and {name} is a file of your own: leave it out")
    return _own_task(options, Path(name).expanduser())


def _own_task(options: argparse.Namespace, path: Path) -> "ProbeTask":
    """One file, of which test and validation are cut off, or a folder that may have files of those names."""
    from lit_layers.tasks.probe_task import ProbeTask

    if not path.exists():
        raise InputError(f"task: expected labelled texts in {path}, which does not exist")
    splits = {file.stem for file in path.iterdir()} if path.is_dir() else set()
    task = ProbeTask(
        path.resolve().name if path.is_dir() else path.stem,
        str(path),
        kind="regression" if options.regression else "classification",
        text=options.text or "text",
        label=options.label or "label",
        test="test" if "test" in splits else None,
        validation="validation" if "validation" in splits else None,
    )
    task.check()
    return task
