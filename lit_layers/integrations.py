"""A callback for the Trainer of transformers, and for TRL's trainers, which derive from it."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lit_layers.analyses.base import Analysis
from lit_layers.models.build import submodule
from lit_layers.report.logged_numbers import runs_of_trainer
from lit_layers.schedule import Steps
from lit_layers.training.watching import MetricsLogger, Watch, watch

STATE = "lit_layers"  # key in the Trainer's saved state; a resumed training finds its id there


class EmergenceTrainerCallback(TrainerCallback):
    """A Trainer callback that measures every layer at the steps of a schedule and does not change the training.

        Trainer(model, arguments, train_dataset=data, callbacks=[
            EmergenceTrainerCallback([Lens(batches=text)], steps={"every": 100}, root="checkpoints/mine")])

    Step 0 is measured before the first update, and the last step at the end of training. The last step is not measured
    if the Trainer loads earlier weights at the end (`load_best_model_at_end`). A resumed training continues in the same
    run folder if `options` contain `if_exists="resume"`. After an exception the callback keeps the lock of the folder
    until the process ends or trains again.

    Args:
        analyses: what to measure.
        steps: the schedule, e.g. `pythia` or `{"every": 100}`.
        root: the run folder.
        model: name of the submodule to measure; None: the Trainer's model.
        loggers: loggers that receive the numbers; empty: the W&B run that the Trainer reports to.
        options: other arguments of `lit_layers.watch`, except `first_step` and `max_steps`, which the Trainer sets.

    Raises:
        InputError: when `train` begins, for the reasons of `lit_layers.watch`.
    """

    def __init__(
        self,
        analyses: Sequence[Analysis],
        steps: Steps,
        root: str | Path,
        *,
        model: str | None = None,
        loggers: Sequence[MetricsLogger] = (),
        **options: Any,
    ) -> None:
        self.analyses, self.model, self.loggers = list(analyses), model, list(loggers)
        self._options = {"steps": steps, "root": root, **options}
        inspect.signature(watch).bind(model, analyses, **self._options)  # refuses an unknown option now, not in `train`
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        before, options = self._watch, self._options | {"_saved_by": state.stateful_callbacks.get(STATE)}  # pyright: ignore
        if before is not None and before.is_open:  # the last `train` ended in an exception, such as out of memory
            before.give_up()
            if args.auto_find_batch_size:
                options |= {"if_exists": "resume", "_saved_by": before.measurer.training}
        if self.model is not None:
            model = submodule(model, self.model)
        first, last = state.global_step, state.max_steps
        options["loggers"] = self.loggers or runs_of_trainer(args.report_to or ())
        self._watch = watch(model, self.analyses, first_step=first, max_steps=last, **options)
        state.stateful_callbacks[STATE] = self._watch.measurer.training  # pyright: ignore

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._watch.step(state.global_step)
            if control.should_log or control.should_evaluate:
                self._watch.measurer.join(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            # Do not measure the last step if the model now has the best weights (load_best_model_at_end), which may be
            # those of an earlier step.
            self._watch.close(is_last=not (args.load_best_model_at_end and state.best_model_checkpoint))
            self._watch = None
