"""Lightning callbacks that save and measure the model at the steps of a schedule."""

import contextlib
import functools
import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import nn

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError, root_folder
from lit_layers.files import run_lock
from lit_layers.measuring.ranks import OneProcess, Ranks, ranks_of
from lit_layers.models.build import submodule, weights_hash
from lit_layers.models.null import Null
from lit_layers.models.own_networks import known_inside
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import refuse_below_one
from lit_layers.training.run_folder import (
    IfExists,
    RunFolder,
    axis_step,
    begin_training,
    origin_of,
    save_step,
)
from lit_layers.training.sharding import NoRoomError, is_sharded, whole_copy, whole_on_first_rank
from lit_layers.training.watching import Scalars, StepMeasurer, Watcher

logger = logging.getLogger(__name__)


class _Scheduled(L.Callback):
    """A callback that acts once at each optimizer step of a schedule, and at the first and the last step.

    A step is an update of the network, however many batches it accumulates. With manual optimization, only optimizers
    that hold the network's parameters count. If several optimizers step in one batch, the one with the most steps
    counts. If one of the steps of a batch is in the schedule, the callback acts at the end of that batch.

    The first rank locks the run's folder (`root`) for writing during training, if its process does not hold the lock
    already (`lit-layers fit` does). If several such callbacks write to one folder, the first of them starts a new run
    in the folder before the first step, or resumes the run in it. It refuses a folder that holds another training run.
    """

    def __init__(self, steps: Steps, root: str | Path, model: str | None) -> None:
        self.schedule, self.root, self.model = Schedule(steps), root_folder(root), model
        # Seconds that training has waited for this callback.
        self.paused_seconds = 0.0
        self._last_step, self._first, self._latest = -1, 0, 0
        # Optimizer steps of this run so far, counted only with manual optimization.
        self._updates: int | None = None
        self._new_steps, self._hooks = Counter[int](), contextlib.ExitStack()
        self._ranks: OneProcess | Ranks = OneProcess()
        self._lock = contextlib.ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._ranks = ranks_of(trainer.world_size)
        measures = any(isinstance(each, EmergenceCallback) and each.measurer.analyses for each in _callbacks(trainer))
        self._ranks.from_first(functools.partial(self._claim, "all" if measures else "training"))

    def _claim(self, part: run_lock.Part) -> None:
        if not run_lock.is_held(self.root):
            self._lock.enter_context(run_lock.writing(self.root, part=part))

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start or resume the run in the folder, unless an earlier callback of the same folder does that."""
        self._last_step = -1
        peers = [each for each in _callbacks(trainer) if isinstance(each, _Scheduled | RunFolder)]
        peers = [each for each in peers if each.root.resolve() == self.root.resolve()]
        if self is not peers[0]:
            return
        measuring = next((each for each in peers if isinstance(each, EmergenceCallback)), None)
        model = (measuring or self)._plain_model(pl_module)
        # Gather sharded weights only if the run is resumed: gathering takes time, and only a resumed run compares its
        # weights with earlier measurements.
        if is_sharded(model):
            strategy: Any = trainer.strategy
            model = whole_on_first_rank(model, strategy) if trainer.ckpt_path else None
        weights = None if model is None else functools.partial(weights_hash, model)
        if measuring is None:
            # `SeriesCheckpoint` stores no id of its training run. A different run in the folder is detected only if the
            # folder's checkpoint of this step has other weights.
            own = getattr(records.lineage_in(self.root), "training", None)
            options = "resume" if trainer.ckpt_path else "refuse", None, self.now(trainer), weights, own
        else:
            options = measuring.if_exists, measuring.run, self.now(trainer), weights, measuring.saved_by
        self._ranks.from_first(functools.partial(begin_training, self.root, *options))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._lock.close()
        self._hooks.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._lock.close()

    @abstractmethod
    def on_step(self, trainer: L.Trainer, model: nn.Module, step: int) -> None:
        """Save or measure the network after `step` optimizer steps.

        Every rank must call this method. The weights may be sharded.
        """

    def state_dict(self) -> dict[str, Any]:
        return {} if self._updates is None else {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = state_dict.get("updates")

    def now(self, trainer: L.Trainer) -> int:
        """Return the number of updates of the network, including those before this run."""
        return axis_step(trainer) if self._updates is None else origin_of(trainer).step + self._updates

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            self._count_updates(trainer, self._plain_model(pl_module))
        self._first = self._latest = self.now(trainer)
        self._begin(trainer, pl_module)
        self._act(trainer, pl_module, due=self._latest in self.schedule or trainer.global_step == 0)

    def _count_updates(self, trainer: L.Trainer, model: nn.Module) -> None:
        self._updates = trainer.global_step if self._updates is None else self._updates
        parameters = {*map(id, model.parameters())}

        def holds(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(each) in parameters for group in optimizer.param_groups for each in group["params"])

        for optimizer in [*filter(holds, trainer.optimizers)] or trainer.optimizers:
            hook = optimizer.register_step_post_hook(lambda made, *_: self._new_steps.update([id(made)]))
            self._hooks.callback(hook.remove)

    def end_batch(self, trainer: L.Trainer) -> None:
        """Prepare for `on_step`; called at the end of each batch, whether or not its step is in the schedule."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.end_batch(trainer)
        if self._updates is not None:
            self._updates += max(self._new_steps.values(), default=0)
            self._new_steps.clear()
        before, self._latest = self._latest, self.now(trainer)
        self._act(trainer, pl_module, due=self.schedule.is_due(self._latest, before))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._act(trainer, pl_module, due=True)

    def _act(self, trainer: L.Trainer, pl_module: L.LightningModule, due: bool) -> None:
        step, model = self.now(trainer), self._plain_model(pl_module)
        if due and step != self._last_step and not trainer.sanity_checking:
            self._last_step, started = step, time.perf_counter()
            self.on_step(trainer, model, step)
            self.paused_seconds += time.perf_counter() - started

    def _plain_model(self, pl_module: L.LightningModule) -> nn.Module:
        name = self.model or ("model" if isinstance(getattr(pl_module, "model", None), nn.Module) else None)
        return pl_module if name is None else submodule(pl_module, name)


def _callbacks(trainer: L.Trainer) -> list[Any]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _logging_step(trainer: L.Trainer) -> int:
    """Return the step at which Lightning logs the next loss.

    This step differs from `global_step`, because a batch in which several optimizers step counts only once.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _logs_batch(trainer: L.Trainer) -> bool:
    return bool(trainer._logger_connector.metrics["log"])


def _data(trainer: L.Trainer) -> Any:
    """Return the run's data module, or None if the run uses data loaders alone."""
    return getattr(trainer, "datamodule", None)


class SeriesCheckpoint(_Scheduled):
    """A callback that saves the model at each step of a schedule as a Hugging Face folder.

    A folder is complete or does not exist. `AutoModelForCausalLM.from_pretrained(root / "step-000001000")` loads such a
    folder. It also contains the tokenizer. Before the first step, the callback refuses a root that holds another run.
    With an `EmergenceCallback` on the same root, that callback's `if_exists` decides for both.

    Args:
        steps: the schedule, e.g. `pythia` or `{every: 500}`. The first and the last step are always included.
        root: the run's folder.
        tokenizer: a local tokenizer folder whose files are copied into each checkpoint. With None, the tokenizer of the
            data module is copied.
        model: name of the submodule to save. With None, it is `.model` if the module has one, otherwise the module
            itself.
    """

    def __init__(
        self, steps: Steps, root: str | Path, *, tokenizer: str | Path | None = None, model: str | None = None
    ) -> None:
        super().__init__(steps, root, model)
        self.tokenizer = Path(tokenizer) if tokenizer else None

    def on_step(self, trainer: L.Trainer, model: nn.Module, step: int) -> None:
        tokenizer = self.tokenizer or getattr(getattr(_data(trainer), "shards", None), "tokenizer_path", None)
        whole: Any = whole_on_first_rank(model, cast("Any", trainer.strategy)) if is_sharded(model) else model
        self._ranks.from_first(functools.partial(save_step, whole, self.root, step, tokenizer))


class EmergenceCallback(_Scheduled):
    """A callback that measures every layer at the steps of a schedule and does not change the training.

    Each analysis adds one line per step to `root/measurements.jsonl`. The numbers also go to the trainer's loggers. If
    options or data of an analysis change during a run, its new curves have other names: `coupling@1a2b3c4d/...`. A
    measurement in the file with the same options, data and weights is not repeated.

    Under DDP, rank n % size runs the forward pass of micro-batch n. The numbers do not depend on the number of ranks.
    Sharded weights are gathered into an unsharded copy on each rank. If the copy does not fit into memory, every
    analysis records that as its error.

    Args:
        analyses: the analyses to run; their names must be unique.
        steps: the schedule, e.g. `pythia` or `{every: 500}`. The first and the last step are always included.
        root: the run's folder.
        if_exists: what to do if root already holds a run. "refuse" raises an error. "overwrite" removes the files that
            runs have written there. "resume" continues the run in root at the step of the Trainer's checkpoint. If the
            run measured or saved weights at this step, they must equal those of the checkpoint. If it did neither, the
            run must have written the checkpoint itself. The run's measurements of later steps no longer appear in the
            curves.
        run: the run's name in the records. With None, it is the folder's name.
        tokens_per_step: tokens per optimizer step, from which the number of tokens up to each step is recorded. With
            None, the value of the data module is used, if it has one.
        model: name of the submodule to measure. With None, it is `.model` if the module has one, otherwise the module
            itself.
        watchers: objects that are called when each analysis starts and ends.
        scalars: which numbers the trainer's loggers get as curves over steps. `plotted` logs each metric once (without
            its controls and other variants), and one curve per layer only for the main metric of each analysis. `all`
            logs all numbers except those per pair of layers or per token position. A W&B run also gets the numbers that
            are not logged as curves, as pictures and in a table.
        null: the kind of null to measure once, at the end. A null is a baseline for each curve. Figures draw it as
            a grey line. "blocks" measures the last model with new random weights in its blocks, except
            norms. "all" measures it with only new weights. "labels" measures probes that are fitted to permuted labels.
            The numbers are in `root/null-blocks`, `root/null-all` or `root/null-labels`.

    Raises:
        InputError: before the first step, if two analyses have the same name, the model's family is unknown, data are
            missing, or options do not fit the model. Also if root holds another run, is not writable, or another
            process writes there.
    """

    def __init__(
        self,
        analyses: Sequence[Analysis],
        steps: Steps,
        root: str | Path,
        *,
        if_exists: IfExists = "refuse",
        run: str | None = None,
        tokens_per_step: int | None = None,
        model: str | None = None,
        watchers: Sequence[Watcher] = (),
        scalars: Scalars = "plotted",
        null: Null | None = None,
    ) -> None:
        super().__init__(steps, root, model)
        self.if_exists, self.run, self.saved_by = if_exists, run, None
        self.measurer = StepMeasurer(analyses, root, run=run, watchers=watchers, scalars=scalars, null=null)
        refuse_below_one(tokens_per_step=tokens_per_step)
        self.tokens_per_step = tokens_per_step
        self._source: dict[str, Any] = {}
        # The step under which the trainer's loggers get the loss of the measured weights.
        self._log_step = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        network = self._plain_model(pl_module)
        try:
            self.measurer.check(network)
        except InputError as error:
            names = [name for name, _ in pl_module.named_children()]
            # Suggest a submodule that may be the network. If the module contains transformers or timm models, the error
            # already names them.
            if network is pl_module and names and not known_inside(pl_module):
                raise InputError(f"{error}; if the network is a part of it, name that: model={names[0]!r}") from error
            raise

    def state_dict(self) -> dict[str, Any]:
        return {"training": self.measurer.training} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.saved_by = state_dict.get("training")

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super()._begin(trainer, pl_module)
        self._log_step = _logging_step(trainer)
        self._source = self._ranks.from_first(lambda: origin_of(trainer).source)
        self.measurer.ranks = self._ranks
        self.measurer.begin(self.schedule.steps)

    def end_batch(self, trainer: Any) -> None:
        # This batch's loss is logged after this hook, and belongs to the weights before the update. The updated weights
        # give the next loss, one step later. Their measurements are logged under the same step as that loss.
        self._log_step = _logging_step(trainer) + 1
        if trainer.loggers and self._log_step % trainer.log_every_n_steps == 0 and _logs_batch(trainer):
            self.measurer.join(self._log_step - 1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_step = _logging_step(trainer)
        self._act(trainer, pl_module, due=True)
        self.measurer.finish()
        if self.measurer.analyses:
            self.measurer.log_summary(self.schedule.steps_to(self.now(trainer), self._first))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.measurer.finish(whole=False)
        super().on_exception(trainer, pl_module, exception)

    def on_step(self, trainer: L.Trainer, model: nn.Module, step: int) -> None:
        self.measurer.log_steps[step] = self._log_step
        try:
            whole = whole_copy(model, cast("Any", trainer.strategy)) if is_sharded(model) else model
        except NoRoomError as error:  # every rank raises it, so none waits for another
            if trainer.is_global_zero:
                self.measurer.fail(step, self._tokens(trainer, step), str(error), loggers=trainer.loggers)
            return
        provenance = {"init_from": self._source} if self._source else {}
        about: dict[str, Any] = {"loggers": trainer.loggers, "is_first": trainer.global_step == 0}
        self.measurer.measure(whole, step, self._tokens(trainer, step), provenance=provenance, **about)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the null after all callbacks have saved the end of the training."""
        if self.measurer.null is None:
            return
        model = self._plain_model(pl_module)
        step, started = self.now(trainer), time.perf_counter()
        with contextlib.suppress(NoRoomError):  # the last step recorded it as the error of each analysis
            whole = whole_copy(model, cast("Any", trainer.strategy)) if is_sharded(model) else model
            self.measurer.measure_null(whole, step, self._tokens(trainer, step), loggers=trainer.loggers)
        self.measurer.finish(whole=False)
        self.paused_seconds += time.perf_counter() - started

    def _tokens(self, trainer: L.Trainer, step: int) -> int | None:
        return origin_of(trainer).tokens_at(step, self._tokens_per_step(trainer))

    def _tokens_per_step(self, trainer: L.Trainer) -> int | None:
        return self.tokens_per_step or getattr(_data(trainer), "tokens_per_step", None)
