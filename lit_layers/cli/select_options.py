"""The options of `lit-layers select`: refused where they do not fit, and the task that they name."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_layers.errors import InputError
from lit_layers.schema import COUNT, Range, refuse_outside

if TYPE_CHECKING:
    from lit_layers.tasks.probe_task import ProbeTask

WITHOUT_TOLERANCE = ("knee", "best")
OF_TEXTS = ("folder", "tokenizer", "max_tokens", "cache")
OF_IMAGES = ("num_train", "num_test")
OF_FILES = ("text", "label", "regression")
OF_EXPORT = ("keep_lm_head", "overwrite")
OF_CLASSES, OF_NUMBERS = ("c", "max_iterations"), ("penalty",)
DEFAULTS = {"max_tokens": 512, "c": 1.0, "penalty": 1.0, "max_iterations": 1000, "tolerance": 0.01}


@dataclass(kw_only=True)
class SelectOptions:
    """How the layer of a task is chosen.

    Args:
        revision: branch, tag or commit of the Hub
        task: labelled texts: banking77 (docs/tasks.md lists them), or a .jsonl, .csv or .parquet file, or a folder of
            such files named after the splits
        text: their column of text, or a format such as 'Subject: {subject}' (default: text)
        label: their column of labels (default: label)
        regression: their labels are numbers to predict
        folder: local data that hold a task of the catalogue (default: the Hub)
        images: instead, for a vision model: digits, cifar10, a local path, ORG/NAME
        tokenizer: of texts (default: the model's own)
        rule: which layer is enough
        tolerance: of the rule, in units of the score (default: 0.01)
        pooling: of a layer's states (default: last for texts, cls for images)
        max_tokens: a longer text loses its end (default: 512)
        num_train: images to fit and choose on (default: all)
        num_test: images to report on (default: all)
        c: inverse regularisation of the logistic probe (default: 1)
        penalty: of the ridge probe of a regression (default: 1)
        max_iterations: of the logistic probe (default: 1000)
        cache: keep features of texts in this folder for the next call
        device: auto: a GPU if there is one
        out: folder of pictures and numbers (default: selected/MODEL-TASK)
        export: write the model cut there to this folder, with its probe and its page
        keep_lm_head: export the model's own head, too
        overwrite: replace an earlier export in the folder of --export
        rounds: in which times are measured
    """

    revision: str | None = None
    task: str | None = None
    text: str | None = None
    label: str | None = None
    regression: bool = False
    folder: str | None = None
    images: str | None = None
    tokenizer: str | None = None
    rule: Literal["within_tolerance", "fraction_of_last", "plateau", "knee", "best"] = "within_tolerance"
    tolerance: float | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    max_tokens: int | None = None
    num_train: int | None = None
    num_test: int | None = None
    c: float | None = None
    penalty: float | None = None
    max_iterations: int | None = None
    cache: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    export: Path | None = None
    keep_lm_head: bool = False
    overwrite: bool = False
    rounds: int = 20

    def settle(self) -> "ProbeTask | None":
        """Fills in the defaults that depend on other options, and returns the task of texts; None for images.

        Raises:
            InputError: options that are out of range or do not fit together.
        """
        if (self.task is None) == (self.images is None):
            raise InputError("task: expected --task NAME, or --images SOURCE for a vision model, and not both")
        _refuse_what_does_not_fit(self)
        _check_numbers(self)
        for name in ("out", "export"):
            _check_folder(name, getattr(self, name))
        if self.out and self.export and self.out.resolve().is_relative_to(self.export.resolve()):
            raise InputError(f"out: {self.out} is where the export goes: name another folder")
        self.pooling = self.pooling or ("last" if self.images is None else "cls")
        task = None if self.task is None else _task(self, self.task)
        _check_kind(self, task)
        for name, value in DEFAULTS.items():
            if getattr(self, name) is None and not (name == "tolerance" and self.rule in WITHOUT_TOLERANCE):
                setattr(self, name, value)
        return task


def _given(options: SelectOptions, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if (value := getattr(options, name)) is not None and value is not False), None)


def _refuse_what_does_not_fit(options: SelectOptions) -> None:
    if options.images is not None and (name := _given(options, OF_TEXTS + OF_FILES)):
        raise InputError(f"{name}: is for texts, and --images was given: leave it out")
    if options.images is None and (name := _given(options, OF_IMAGES)):
        raise InputError(f"{name}: is for --images, and a task of texts was given: leave it out")
    if options.export is None and (name := _given(options, OF_EXPORT)):
        raise InputError(f"{name}: is for --export DIR, which was not given: leave it out")
    if options.rule in WITHOUT_TOLERANCE and options.tolerance is not None:
        raise InputError(f"tolerance: the rule {options.rule} has none: leave it out")


def _check_kind(options: SelectOptions, task: "ProbeTask | None") -> None:
    is_regression = task is not None and task.kind == "regression"
    if is_regression and options.rule == "fraction_of_last":
        raise InputError("rule: fraction_of_last is for accuracies, and this task is a regression: take another")
    if name := _given(options, OF_CLASSES if is_regression else OF_NUMBERS):
        kind, is_one = ("classifications", "a regression") if is_regression else ("regressions", "a classification")
        raise InputError(f"{name}: is for {kind}, and this task is {is_one}: leave it out")


def _check_numbers(options: SelectOptions) -> None:
    below = options.rule == "fraction_of_last"
    tolerance = Range(0, 1, below=True, words="at least 0 and below 1") if below else Range(0, math.inf)
    ranges = {"max_tokens": COUNT, "max_iterations": COUNT, "rounds": COUNT, "tolerance": tolerance}
    ranges |= {"c": Range(0, math.inf, above=True, words="a positive number"), "penalty": Range(0, math.inf)}
    refuse_outside("", ranges, vars(options))


def _check_folder(name: str, folder: Path | None) -> None:
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"{name}: expected a folder, {there} is a file")


def _task(options: SelectOptions, name: str) -> "ProbeTask":
    """A task of the catalogue, or labelled texts on this machine."""
    from lit_layers.tasks.catalogue import TASKS, unknown_task
    from lit_layers.tasks.task_files import SUFFIXES, is_local

    if name in TASKS:
        if option := _given(options, OF_FILES):
            raise InputError(f"{option}: is for files of your own, and {name} is of the catalogue: leave it out")
        return TASKS[name]
    if not is_local(name):
        raise unknown_task(name, TASKS, f"name a {', '.join(SUFFIXES)} file")
    if options.folder is not None:
        raise InputError(f"folder: is for tasks of the catalogue, and {name} is a file of your own: leave it out")
    return _own_task(options, Path(name).expanduser())


def _own_task(options: SelectOptions, path: Path) -> "ProbeTask":
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
