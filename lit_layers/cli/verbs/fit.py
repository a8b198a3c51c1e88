"""`lit-layers fit`: train from a recipe, save and measure at each step of its schedule, draw the curves."""

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import yaml
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from rich.console import Console

from lit_layers.analyses.base import Analysis
from lit_layers.cli import DIVERGED, INTERRUPTED, TERMINATED, threads
from lit_layers.cli.console import show_table, verbosity
from lit_layers.cli.options import Recipe, Steps
from lit_layers.cli.stopping import finish_first
from lit_layers.cli.training_display import StepProgress, beginning, show_results
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.measuring.one_model import in_one_pass
from lit_layers.measuring.plan import Plan, sampled, share_of, stride_within
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.report import MirrorAside, WandbMirror, write_report
from lit_layers.schedule import Schedule
from lit_layers.schema import COUNT, COUNT_OR_NONE, KEPT_MB, MANY, RUN_FILE, SEED, VALUES_MB, Range
from lit_layers.training import EmergenceCallback, SeriesCheckpoint, run_folder
from lit_layers.training.callbacks import StepTimes, span_of
from lit_layers.training.checkpoints import Origin, axis_step, kept, save_step
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.resuming import DivergedError, ResumeCheckpoint, ResumePoint, resume_point
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import (
    DEFAULTS,
    StepSeed,
    best_precision,
    is_first_rank,
    plugins_with_cluster,
    quieten,
    refuse_another_number_of_ranks,
    refuse_another_order,
)

TRAINER = {
    "max_steps": Range(1, MANY, whole=True, low_words="the number of steps to train"),
    "min_steps": COUNT_OR_NONE,
    "max_epochs": Range(-1, MANY, whole=True),
    "min_epochs": COUNT_OR_NONE,
    "accumulate_grad_batches": COUNT,
    "gradient_clip_val": Range(0, MANY),  # a negative one turns every gradient round
    "val_check_interval": Range(0, MANY, above=True),
    "check_val_every_n_epoch": COUNT,
    "log_every_n_steps": COUNT,
    "num_sanity_val_steps": Range(-1, MANY, whole=True),
    "limit_train_batches": Range(0, MANY, above=True),
    "limit_val_batches": Range(0, MANY),
    "reload_dataloaders_every_n_epochs": COUNT_OR_NONE,
    "num_nodes": COUNT,
}


@dataclass(kw_only=True)
class RunOptions:
    """A watched run.

    Args:
        root: The run's folder, e.g. checkpoints/my_run.
        if_exists: What to do where root already holds a run; overwrite is heeded on the command line alone, not in a
            recipe.
        resume: Go on exactly where a run was stopped: last, a step, or a folder ROOT/resume/step-.... With last, a new
            folder starts the run.
        resume_every: Steps between two checkpoints to resume from; null: only at the end and on SIGTERM.
        steps: Steps to save and measure: pythia (0, 1, 2, 4, ... 512, 1000, 2000, ...), a list, {every: N} or {log: 2,
            until: N, then_every: N}; single steps may be added to a rule: {every: 500, also: [750]}.
        corpus: The text, as ${corpus} in recipes.
        tokenizer: The tokenizer, as ${tokenizer} in recipes.
        analyses: What to measure at these steps, as a list of classes with options.
        wandb: Send the run to W&B, as --config wandb_configs/default.yaml does.
        budget: The largest share of the training time for measuring, e.g. 5%: fewer of the scheduled steps are then
            measured.
        kept_mb: Most megabytes of hidden states to keep in memory for analyses that share them; the rest goes to disk.
        values_mb: Most megabytes of single prompts' values to keep beside the measurements, for emerge to compare
            curves by; 0: none.
        measure: sync: training waits while a step is measured. async: a second process measures the saved steps on the
            CPUs.
        plan: Say what it would take, by a first share of the data and a few steps; nothing is kept.
    """

    root: str
    if_exists: Literal["refuse", "overwrite"] = "refuse"
    resume: str | None = None
    resume_every: Annotated[int | None, COUNT] = 500
    steps: Steps = "pythia"
    corpus: str | None = None
    tokenizer: str | None = None
    analyses: list[Analysis] = field(default_factory=list)
    wandb: WandbMirror | None = None
    budget: str | float | None = None
    kept_mb: Annotated[int, COUNT_OR_NONE] = KEPT_MB
    values_mb: Annotated[int, COUNT_OR_NONE] = VALUES_MB
    measure: Literal["sync", "async"] = "sync"
    plan: bool = False


class Run:
    """A training that is watched: its trainer with all callbacks, and what they have written when it ends.

    `held` is given the lock of the run's folder, before anything is read there.
    """

    def __init__(self, recipe: Recipe, held: contextlib.ExitStack) -> None:
        self.options = options = recipe.instantiated()
        self.root, self.module, self.datamodule = Path(options.root), options.model, options.data
        if is_first_rank():
            part: Any = "training" if options.measure == "async" else "all"
            held.enter_context(run_lock.writing(self.root, part=part))
        self.console = Console(quiet=verbosity() < 0)
        self.resume_from = self.resume_point(hashed=is_first_rank())
        goes_on = options.resume is not None and (self.root / RUN_FILE).is_file() and self._is_inside()
        self.mirror = None if options.wandb is None else MirrorAside(options.wandb)
        text = recipe.parser.dump(recipe.options, skip_none=False)
        given = yaml.safe_load(text)
        if goes_on:
            run_folder.refuse_another_run(self.root, given)
        going: Any = {"resume": goes_on, "goes_back": options.resume != "last"}
        self.folder = run_folder.RunFolder(self.root, config=text, options=given, mirror=self.mirror, **going)
        if (
            goes_on
            and getattr(self.module, "init_from", None)
            and (begun := kept(self.root, run_folder.origin_in(self.root)))
        ):
            self.module.beginning = begun
        self.trainer = self._trainer(dict(options.trainer))

    def _trainer(self, given: dict[str, Any]) -> L.Trainer:
        """Callbacks in this order: the folder is ready, scalars are noted, weights are on disk, then they are measured,
        and the checkpoint to resume from knows all that.
        """
        options = self.options
        run_log = RunLog(self.root, self.mirror, resume=self.folder.resume)
        progress = StepProgress(run_log, console=self.console)
        self.series = SeriesCheckpoint(options.steps, self.root)
        measuring: Any = {name: options[name] for name in ("budget", "kept_mb", "values_mb", "measure")}
        measuring["watchers"] = [run_log, progress]
        self.emergence = EmergenceCallback(options.analyses, options.steps, self.root, **measuring)
        self.resumable = ResumeCheckpoint(self.root, every=options.resume_every)
        theirs = given.get("callbacks") or []
        first = [_FinishStep(), self.folder, *(theirs if isinstance(theirs, list) else [theirs])]
        ours = [StepSeed(options.seed_everything), run_log, self.series, self.emergence, progress, self.resumable]
        given["callbacks"] = [*first, *ours]
        given["precision"] = given.get("precision") or best_precision(given["accelerator"])
        given["plugins"] = plugins_with_cluster(given.get("plugins"))
        given["default_root_dir"] = given.get("default_root_dir") or self.root
        try:
            trainer = L.Trainer(**given)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise InputError(f"trainer: {' '.join(str(error).split())}") from error
        refuse_another_number_of_ranks(trainer)
        if isinstance(self.datamodule, LitStepData):
            # The model is built when training begins, and the series holds the weights that were trained.
            refuse_another_order(trainer, also=(BaseFinetuning, ModelPruning, WeightAveraging))
        threads.settle(trainer.num_devices)
        if trainer.is_global_zero:
            self.console.print(threads.description(trainer.strategy.root_device), highlight=False)
        return trainer

    def resume_point(self, **options: bool) -> ResumePoint | None:
        """Told by hashes on the first rank alone: the others read what that one found whole."""
        resume = self.options.resume
        return None if resume is None else resume_point(self.root, resume, **options)

    def _is_inside(self) -> bool:
        """Whether the run goes on in its own folder, not from another run's state."""
        state = self.resume_from
        return state is None or state.state.resolve().is_relative_to(self.root.resolve())


def _refuse_harm(options: RunOptions, trainer: Mapping[str, Any]) -> None:
    """Refuses values that would train wrongly, write in the wrong place, or never end.

    Raises:
        InputError: naming the option and its value.
    """
    if options.budget is not None:
        share_of(options.budget)
    devices: Any = trainer.get("devices")
    if isinstance(devices, str) and not re.fullmatch(r"auto|-?\d+|\d+(,\d+)*,?", devices):
        raise InputError(f"trainer.devices: expected auto, a number, or numbers with commas between, got {devices!r}")
    if re.fullmatch(r"-?\d+", str(devices)) and (int(devices) == 0 or int(devices) < -1):
        raise InputError(f"trainer.devices: expected at least 1, or -1 for all, got {devices}")


class _FinishStep(L.Callback):
    """From the first step on SIGTERM is for `ResumeCheckpoint`, which ends the run where a step is whole."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        finish_first()


def fit(
    recipe: Recipe,
    *,
    seed_everything: Annotated[int, SEED] = 0,
    trainer: Annotated[Mapping[str, Any], L.Trainer, TRAINER] = DEFAULTS,
    model: L.LightningModule,
    data: L.LightningDataModule,
    options: RunOptions,
) -> int:
    """Train from a recipe, and save and measure the model at each step of a schedule. `lit-layers fit quickstart/gpt2`
    takes a recipe of the package, `--config FILE` one of your own. Whatever ends the run, its report is written. Exit
    code: 0, 2 wrong input, 3 where it diverged, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        seed_everything: the seed of all random numbers
        model: the module to train, by class_path and init_args; --model.help CLASS shows the options of a class
        data: the data to train on, by class_path and init_args; --data.help CLASS shows the options of a class
    """
    _refuse_harm(options, trainer)
    quieten()
    L.seed_everything(seed_everything, workers=True)
    if options.plan:
        return _plan(recipe.instantiated())
    with contextlib.ExitStack() as held:
        run = Run(recipe, held)
        if run.trainer.is_global_zero and not run.folder.resume:
            if_exists = options.if_exists if recipe.typed("if_exists") else "refuse"
            run_folder.refuse_a_used_folder(run.root, if_exists, of_fit=True)
        if run.trainer.is_global_zero and recipe.typed("seed_everything"):
            run.console.print(_other_seeds(run, seed_everything), end="", highlight=False, soft_wrap=True)
        return _train(run)


def _other_seeds(run: Run, seed_everything: int) -> str:
    """A line where a seed that was typed decides neither weights nor data: such a run is no other seed's."""
    weights, order = getattr(run.module, "init_seed", None), getattr(run.datamodule, "seed", None)
    if None in (weights, order) or seed_everything in (weights, order):
        return ""
    begin = f"model.init_seed {weights}" if getattr(run.module, "init_from", None) is None else "model.init_from"
    return (
        f"seed_everything {seed_everything} is of dropout and such: {begin} decides the weights, data.seed {order} the "
        "order of the data\n"
    )


class _Rehearsal(StepTimes):
    """Measures a share of the data on the untrained model, saves it once, and stops after the steps that are timed."""

    def __init__(self, options: Any, folder: Path) -> None:
        super().__init__()
        self.options, self.folder, self.plan, self.saving = options, folder, Plan({}), (0.0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = getattr(pl_module, "model", pl_module)
        for analysis in self.options.analyses:
            analysis.check(LayeredModel(model))

        def measure(analyses: Sequence[Analysis]) -> list[Measurement]:
            about: Any = {"run": "plan", "step": 0, "weights_hash": weights_hash(model), "folder": self.folder}
            return [*in_one_pass(model, analyses, lambda _: None, kept_mb=self.options.kept_mb, **about)]

        self.plan = sampled(self.options.analyses, measure)
        started = time.perf_counter()
        save_step(model, self.folder, 0, tokenizer=None)
        num_bytes = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self.saving = time.perf_counter() - started, num_bytes

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        trainer.should_stop = self.of_step is not None


def _plan(options: Any) -> int:
    """Print what the run would take, by a first share of it in a temporary folder."""
    given: dict[str, Any] = dict(options.trainer) | {"min_steps": None, "min_epochs": None}
    given["precision"] = given.get("precision") or best_precision(given["accelerator"])
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = _Rehearsal(options, Path(folder))
        trainer = L.Trainer(**given | {"callbacks": [rehearsal], "default_root_dir": folder})
        threads.settle(trainer.num_devices)
        trainer.fit(options.model, datamodule=options.data)
    if (of_step := rehearsal.of_step) is None or not trainer.is_global_zero:
        return 0
    plan, schedule, (first, last) = rehearsal.plan, Schedule(options.steps), span_of(trainer)
    training = (last - first) * of_step
    count = lambda stride: len([*schedule.thinned(stride, last, first).until(last, first)])  # noqa: E731
    seconds, num_bytes = (count(1) * part for part in rehearsal.saving)
    show_table(plan.table(count(1), {"training": (training, 0.0), "saving": (seconds, num_bytes)}), str(options.root))
    print(*plan.notes(), f"measuring takes {count(1) * plan.of_checkpoint / training:.1%} of training", sep="\n")
    if options.budget is not None:
        stride = stride_within(options.budget, training, plan.of_checkpoint, count)
        print(f"budget {options.budget}: {'all are' if stride == 1 else f'every {stride}-th is'} measured")
    return 0


def _train(run: Run) -> int:
    """Runs the training, then leaves what can be read, whatever ended it; returns the exit code."""
    started, code, last_step = time.perf_counter(), 1, 0
    try:
        point, origin = run.resume_from, getattr(run.module, "origin", Origin())
        end = origin.step + run.trainer.max_steps
        has_ended = run.folder.resume and point is not None and point.step >= end
        if run.trainer.is_global_zero and (sentence := beginning(point, origin, has_ended=has_ended)):
            run.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        if point is not None and point.step >= end and not is_first_rank():  # no two opinions on whether it has ended
            point = run.resume_point()
        if point is not None and run.folder.resume and point.step >= end:
            last_step = point.step
            if run.trainer.is_global_zero:  # killed after its last step: the page and the mirror may be missing
                run.folder.go_on(point.step, is_over=True)
        else:
            state = None if point is None else point.state
            run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=state, weights_only=True)
            if not run.trainer.global_step:
                raise InputError("trainer: no step was trained: max_epochs or max_time ends the run before its first")
        code = 0
    except SIGTERMException:
        code = TERMINATED
    except DivergedError as error:
        code = DIVERGED
        if run.trainer.is_global_zero:
            print(f"lit-layers fit: error: {error}", file=sys.stderr)
    except (MisconfigurationException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "conditioned on metric" not in str(error):
            raise
        raise InputError(f"trainer.callbacks: {' '.join(str(error).split())}") from error  # of a callback's option
    except SystemExit:  # Lightning turns Ctrl-C into sys.exit(1) after its callbacks have closed
        code = INTERRUPTED
    finally:
        if run.folder.started:
            _close(run, time.perf_counter() - started, code, last_step or axis_step(run.trainer))
        if code in (0, TERMINATED, DIVERGED):
            # Together: torchrun and `srun --kill-on-bad-exit=1` kill the rest when one ends with an error.
            run.trainer.strategy.barrier()
    return code


def _close(run: Run, seconds: float, code: int, last_step: int) -> None:
    """Facts, closing table, page, mirror. A trouble here is told and hides neither the run's own end nor the rest."""
    finish_first()
    root, mirror = run.root, run.mirror
    try:
        run.folder.close(
            seconds=seconds,
            last_step=last_step,
            checkpoint_seconds=run.series.paused_seconds + run.resumable.paused_seconds,
            analysis_seconds=run.emergence.paused_seconds,
        )
        if mirror is not None and code == 0:
            mirror.draw()  # in other processes, while the page is written
        show_results(root)
        print(f"\nreport: {write_report(root)}")
        if (sentence := run.emergence.under_way) is not None:
            print(sentence)
    except Exception as error:  # the training has ended: nothing in its account may change how
        print(f"\nno report: {str(error) or type(error).__name__}")
    if mirror is not None:
        mirror.finish(exit_code=code)
        print(mirror.closing_line())
