"""`lit-layers fit`: train from a recipe, save and measure checkpoints on a schedule, and write the report."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import yaml
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, LambdaCallback, ModelPruning, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.cli import DIVERGED, INTERRUPTED, TERMINATED, process
from lit_layers.cli.options import Recipe, Steps
from lit_layers.cli.process import Show, bar, finish_first
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.identity import latest
from lit_layers.models.null import Null
from lit_layers.report import WandbMirror, write_report
from lit_layers.schema import COUNT, RUN_FILE, SEED, refuse_outside
from lit_layers.training import EmergenceCallback, SeriesCheckpoint, run_folder
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.modules import use_optimizer_
from lit_layers.training.resuming import DivergedError, ResumeCheckpoint, ResumePoint, lightning_point, resume_point
from lit_layers.training.run_folder import Origin, axis_step, own_origin
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import (
    DEFAULTS,
    StepSeed,
    best_precision,
    cluster_plugins,
    is_first_rank,
    quieten,
    refuse_another_order,
)

SHOWN = {
    "train/loss": "loss {:.3f}",
    "train/tokens_per_second": "{:,.0f} tokens/s",
    "train/images_per_second": "{:,.0f} images/s",
    "validation/loss": "validation {:.3f}",
}


@dataclass(kw_only=True)
class RunOptions:
    """Options of a training run that is measured.

    Args:
        root: the run's folder, e.g. checkpoints/my_run
        if_exists: what to do if root already contains a run; overwrite works on the command line, not in a recipe
        resume: continue exactly where a run stopped: last, or a step. With last, training starts at step 0 if the
            folder has no run yet
        ckpt_path: continue from a .ckpt file of a Lightning Trainer, in a new root, with its weights, optimizer and
            step
        optimizer: the optimizer, by class_path and init_args; null uses the default of the module, AdamW
        lr_scheduler: the learning rate scheduler, by class_path and init_args; null uses that of the module
        resume_every: number of steps between checkpoints for resuming; null saves one only at the end and on SIGTERM
        steps: steps to save and measure: pythia (0, 1, 2, 4, ... 512, 1000, 2000, ...), a list, {every: N} or {log: 2,
            until: N, then_every: N}. A rule may be extended by single steps: {every: 500, also: [750]}
        corpus: the text; recipes refer to it as ${corpus}
        tokenizer: the tokenizer; recipes refer to it as ${tokenizer}
        analyses: what to measure at these steps, as a list of classes with options
        null: also measure once, at the end, a null, which is a baseline for the curves. blocks: the last model with new
            random weights in its blocks. all: with only new weights. labels: its probes with permuted labels.
            A recipe needs quotes around the key: "null": blocks
        wandb: send the run to W&B, as --config wandb_configs/default.yaml does
        expected: values that other runs reached, by scalar and step, such as {validation/loss: {600000: 2.85}}; the end
            of the run prints how far its own values are from them
    """

    root: Path
    if_exists: Literal["refuse", "overwrite"] = "refuse"
    resume: str | None = None
    ckpt_path: Path | None = None
    optimizer: Callable[[Any], Optimizer] | None = None
    lr_scheduler: Callable[[Any], LRScheduler] | None = None
    resume_every: Annotated[int | None, COUNT] = 500
    steps: Steps = "pythia"
    corpus: str | None = None
    tokenizer: str | None = None
    analyses: list[Analysis] = field(default_factory=list)
    null: Null | None = None
    wandb: WandbMirror | None = None
    expected: dict[str, dict[int, float]] | None = None


class Run:
    """A measured training run: its trainer with all callbacks, and the files they write.

    `stack` holds the lock of the run's folder, taken before any file of the folder is read. `code` is the exit code.
    `last_step` is the last step of a training that had already finished. `show` updates the progress bar.
    """

    code, last_step = 1, 0
    show: Show

    def __init__(self, recipe: Recipe, stack: contextlib.ExitStack) -> None:
        self.options = options = _instantiate(recipe)
        self.root, self.module, self.datamodule = options.root, options.model, options.data
        if is_first_rank():
            stack.enter_context(run_lock.writing(self.root, part="all" if options.analyses else "training"))
        # Only the first rank verifies the hashes of the checkpoints; the other ranks read those that it found intact.
        self.resume_from = _resume_point(options, verify=is_first_rank())
        resumes = options.resume is not None and (self.root / RUN_FILE).is_file()
        self.mirror = options.wandb
        text = recipe.parser.dump(recipe.options, skip_none=False)
        given = yaml.safe_load(text)
        if resumes:
            run_folder.check_same_run(self.root, given)
            init_from = getattr(self.module, "init_from", None)
            if init_from and (start := own_origin(self.root, run_folder.origin_in(self.root))):
                self.module.start = start
        modes: Any = {"resume": resumes, "goes_back": options.resume != "last"}
        self.folder = run_folder.RunFolder(self.root, config=text, options=given, mirror=self.mirror, **modes)
        self.trainer = self._trainer(dict(options.trainer))

    def _trainer(self, given: dict[str, Any]) -> L.Trainer:
        """Return the trainer. The order of its callbacks matters.

        First the run's folder is prepared, then scalars are logged, then the weights are saved, then they are measured.
        The checkpoint for resuming comes last, so that it includes the state of all other callbacks.
        """
        options = self.options
        run_log = RunLog(self.root, self.mirror, resume=self.folder.resume)
        self.series = SeriesCheckpoint(options.steps, self.root)
        measuring: Any = {"watchers": [run_log], "null": options.null}
        self.emergence = EmergenceCallback(options.analyses, options.steps, self.root, **measuring)
        self.resumable = ResumeCheckpoint(self.root, every=options.resume_every)
        theirs = given.get("callbacks") or []

        def show(trainer: L.Trainer, *_: Any) -> None:
            known = [form.format(run_log.shown[name]) for name, form in SHOWN.items() if name in run_log.shown]
            self.show(trainer.global_step, max(trainer.max_steps, 0) or None, "  ".join(known))

        # When training starts, stop exiting on SIGTERM: `ResumeCheckpoint` then ends the run at a step boundary.
        each_step = LambdaCallback(on_train_start=lambda trainer, pl_module: finish_first(), on_train_batch_end=show)
        first = [each_step, self.folder, run_log, *(theirs if isinstance(theirs, list) else [theirs])]
        ours = [StepSeed(options.seed_everything), self.series, self.emergence]
        given["callbacks"] = [*first, *ours, *([] if given.get("fast_dev_run") else [self.resumable])]
        is_asked = any(isinstance(each, Checkpoint) for each in first)
        given["enable_checkpointing"] = is_asked or given["enable_checkpointing"]
        trainer = _new_trainer(given, self.root)
        if isinstance(self.datamodule, LitStepData):
            # Refuse also callbacks that need the model before training begins, or do not save the trained weights.
            refuse_another_order(trainer, also=(BaseFinetuning, ModelPruning, WeightAveraging))
        if trainer.is_global_zero:
            process.set_threads(trainer.strategy.root_device, trainer.num_devices)
        return trainer


def _instantiate(recipe: Recipe) -> Any:
    counts: Any = dict.fromkeys(("max_steps", "accumulate_grad_batches"), COUNT)
    refuse_outside("trainer.", counts, vars(recipe.options.trainer))
    options = recipe.instantiate_all()
    use_optimizer_(options.model, options.optimizer, options.lr_scheduler)
    return options


def _resume_point(options: Any, **about: bool) -> ResumePoint | None:
    point = None if options.resume is None else resume_point(options.root, options.resume, **about)
    return lightning_point(options.ckpt_path) if point is None and options.ckpt_path is not None else point


def _new_trainer(given: dict[str, Any], root: str | Path) -> L.Trainer:
    given["default_root_dir"] = given.get("default_root_dir") or root
    given["precision"] = given.get("precision") or best_precision(given["accelerator"])
    given["plugins"] = cluster_plugins(given.get("plugins"))
    try:
        return L.Trainer(**given)
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise InputError(f"trainer: {' '.join(str(error).split())}") from error


def fit(
    recipe: Recipe,
    *,
    seed_everything: Annotated[int, SEED] = 0,
    trainer: Annotated[Mapping[str, Any], L.Trainer] = DEFAULTS,
    model: L.LightningModule,
    data: L.LightningDataModule,
    options: RunOptions,
) -> int:
    """Train from a recipe, and save and measure the model at each step of a schedule.

    `lit-layers fit quickstart/gpt2` uses a recipe of the package, `--config FILE` uses your own. The report is
    also written if the run fails. Exit code: 0; 2 for wrong input; 3 if training diverged; 130 after Ctrl-C; 143 after
    SIGTERM.

    Args:
        seed_everything: seed of all random number generators
        model: the module to train, by class_path and init_args; --model.help CLASS shows the options of a class
        data: the data to train on, by class_path and init_args; --data.help CLASS shows the options of a class
    """
    if not hasattr(trainer, "get"):
        raise InputError(f"trainer: expected the options of a Trainer, got {trainer!r}")
    quieten()
    L.seed_everything(seed_everything, workers=True)
    with contextlib.ExitStack() as stack:
        if trainer.get("fast_dev_run"):  # a trial run: its files go to a temporary folder
            root = stack.enter_context(tempfile.TemporaryDirectory())
            overrides = [f"--root={root}", "--wandb=null", "--resume=null"]
            recipe = Recipe(fit, [*recipe.argv, *overrides])
        run = Run(recipe, stack)
        if run.trainer.is_global_zero and not run.folder.resume:
            if_exists = options.if_exists if recipe.typed("if_exists") else "refuse"
            run_folder.refuse_used_folder(run.root, if_exists, is_fit=True)
        with _closing(run):
            point, is_over = _find_start(run)
            if is_over and point is not None:
                run.last_step = point.step
                # `_closing` writes the report, which is missing if the process was killed after training.
                if run.trainer.is_global_zero:
                    run.folder.reopen(point.step)
            else:
                state = None if point is None else point.state
                about: Any = {"hidden": not run.trainer.is_global_zero, "initial": 0 if point is None else point.step}
                with _option_errors(), bar("training", **about) as run.show:
                    run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=state, weights_only=True)
                if run.trainer.global_step == (0 if point is None or run.folder.resume else point.step):
                    ends = "max_steps, max_epochs or max_time ends the run before its first"
                    raise InputError(f"trainer: no step was trained: {ends}")
        return run.code


@contextlib.contextmanager
def _option_errors() -> Iterator[None]:
    try:
        yield
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        is_of_file = "loading state_dict" in str(error) or "loaded state dict" in str(error)
        is_of_callback = isinstance(error, MisconfigurationException) or "conditioned on metric" in str(error)
        if not (is_of_file or is_of_callback):
            raise
        option = "ckpt_path" if is_of_file else "trainer"
        raise InputError(f"{option}: {' '.join(str(error).split())[:300]}") from error


def _find_start(run: Run) -> tuple[ResumePoint | None, bool]:
    """Return the point to resume from and whether the training had already finished; print a line about it."""
    point, origin = run.resume_from, getattr(run.module, "origin", Origin())
    end = origin.step + run.trainer.max_steps
    # Only the first rank has verified the checkpoint. The others do it here: all ranks must agree on whether the
    # training is over.
    if point is not None and point.step >= end and not is_first_rank():
        point = _resume_point(run.options)
    has_ended = run.folder.resume and point is not None and point.step >= end
    if run.trainer.is_global_zero and point is not None:
        finished = f"trained up to step {point.step:,} already: the run in {run.root} is kept"
        print(finished if has_ended else f"resumed at step {point.step} from {point.state.parent}")
    elif run.trainer.is_global_zero and origin.source:
        begun = f"begins at step {origin.step:,} with the weights of {origin.source['init_from']}"
        print(f"{begun}; the optimizer starts afresh")
    return point, has_ended


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Set the exit code, and write the report and final files, however the training ends."""
    started = time.perf_counter()
    try:
        yield
        run.code = 0
    except SIGTERMException:
        run.code = TERMINATED
    except DivergedError as error:
        run.code = DIVERGED
        if run.trainer.is_global_zero:
            print(f"lit-layers fit: error: {error}", file=sys.stderr)
    except SystemExit:  # Lightning turns Ctrl-C into sys.exit(1) after closing its callbacks
        run.code = INTERRUPTED
    finally:
        if run.folder.started:
            _close(run, time.perf_counter() - started, run.code, run.last_step or axis_step(run.trainer))
        if run.code in (0, TERMINATED, DIVERGED):
            # torchrun and `srun --kill-on-bad-exit=1` kill the other ranks as soon as one exits with an error. So each
            # rank waits here until all ranks have closed the run.
            run.trainer.strategy.barrier()


def _close(run: Run, seconds: float, code: int, last_step: int) -> None:
    """Write the end of the run to run.json and to the report, print failures, and finish the W&B mirror.

    If the report fails, the reason is printed. The exit code does not change, and the W&B mirror is still finished.
    """
    finish_first()
    root, mirror = run.root, run.mirror
    try:
        run.folder.close(
            seconds=seconds,
            last_step=last_step,
            checkpoint_seconds=run.series.paused_seconds + run.resumable.paused_seconds,
            analysis_seconds=run.emergence.paused_seconds,
        )
        for measurement in latest(records.read(root / "measurements.jsonl")):
            if measurement.error is not None:
                print(f"failed: {measurement.analysis} at step {measurement.step}: {measurement.error}")
        for line in _distances(run.options.expected or {}, root, last_step):
            print(line)
        is_dry = run.options.trainer.get("fast_dev_run")
        print("\nfast_dev_run: nothing is kept" if is_dry else f"\nreport: {write_report(root)}")
    except Exception as error:  # a failed report must not change the exit code
        print(f"\nno report: {str(error) or type(error).__name__}")
    if mirror is not None:
        mirror.finish(exit_code=code)
        print(mirror.closing_line)


def _distances(expected: Mapping[str, Mapping[int, float]], root: Path, last_step: int) -> Iterator[str]:
    """Yield for each expected value, up to the last step, how far the run's own value is from it."""
    found = {row["step"]: row for row in records.rows(root / "metrics.jsonl")} if expected else {}
    for name, values in expected.items():
        for step, value in sorted(values.items()):
            if step <= last_step:
                own = found.get(step, {}).get(name)
                text = "not logged" if own is None else f"{own:.4g} ({own - value:+.2g})"
                yield f"{name} at step {step:,}: {text}, expected {value:.4g}"
