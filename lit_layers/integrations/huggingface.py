"""A callback of the Trainer of transformers, and so of the trainers of TRL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lit_layers.analyses.base import Analysis
from lit_layers.report.own_wandb_run import current_runs
from lit_layers.schedule import Steps
from lit_layers.schema import KEPT_MB, VALUES_MB
from lit_layers.training.watching import MetricsLogger, Scalars, Watch, Watcher, submodule, watch


class EmergenceTrainerCallback(TrainerCallback):
    """Measures every layer at the steps of a schedule, and leaves the training as if it had not.

        Trainer(model, arguments, train_dataset=data, callbacks=[
            EmergenceTrainerCallback([Lens(batches=text)], steps={"every": 100}, root="checkpoints/mine")])

    Step 0 is measured before the first update, and the last step always, unless training stops early and an earlier
    step's weights are loaded then (`load_best_model_at_end`); a training that is resumed goes on in the same file.
    A Trainer that reports to W&B has its run for a logger, where no others are given. Arguments are those of
    `lit_layers.watch`, and

    Args:
        model: name of the submodule to measure, as of `EmergenceCallback`; None: the Trainer's model itself.

    Raises:
        InputError: as `lit_layers.watch`, as `train` begins.
    """

    def __init__(
        self,
        analyses: Sequence[Analysis],
        steps: Steps,
        root: str | Path,
        *,
        save: bool = False,
        tokenizer: str | Path | None = None,
        run: str | None = None,
        tokens_per_step: int | None = None,
        model: str | None = None,
        loggers: Sequence[MetricsLogger] = (),
        watchers: Sequence[Watcher] = (),
        kept_mb: int = KEPT_MB,
        values_mb: int = VALUES_MB,
        scalars: Scalars = "plotted",
    ) -> None:
        self.analyses, self.model, self.loggers = list(analyses), model, list(loggers)
        self._options: dict[str, Any] = {
            "steps": steps,
            "root": root,
            "save": save,
            "tokenizer": tokenizer,
            "run": run,
            "tokens_per_step": tokens_per_step,
            "watchers": watchers,
            "kept_mb": kept_mb,
            "values_mb": values_mb,
            "scalars": scalars,
        }
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if self.model is not None:
            model = submodule(model, self.model)
        first, last = state.global_step, state.max_steps
        self._options["loggers"] = self.loggers or (current_runs() if "wandb" in (args.report_to or ()) else [])
        self._watch = watch(model, self.analyses, first_step=first, max_steps=last, **self._options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._watch.step(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            # The Trainer has the best checkpoint in its model by now, which may be that of an earlier step.
            self._watch.close(is_last=not (args.load_best_model_at_end and state.best_model_checkpoint))
            self._watch = None
