"""A callback of the Trainer of transformers, and so of the trainers of TRL."""

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

STATE = "lit_layers"  # what the Trainer saves beside the states of callbacks: the id of the training


class EmergenceTrainerCallback(TrainerCallback):
    """Measures every layer at the steps of a schedule, and leaves the training as if it had not.

        Trainer(model, arguments, train_dataset=data, callbacks=[
            EmergenceTrainerCallback([Lens(batches=text)], steps={"every": 100}, root="checkpoints/mine")])

    Step 0 is measured before the first update, and the last step always, unless training stops early and an earlier
    step's weights are loaded then (`load_best_model_at_end`); a training that is resumed goes on in the same file,
    with `if_exists="resume"`. After an exception the callback holds the folder until the process ends or it trains
    again. The run of W&B that the Trainer reports to is its logger, where no others are
    given.

    Args:
        options: all others of `lit_layers.watch`, but `first_step` and `max_steps`, which the Trainer says.
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
        model: str | None = None,
        loggers: Sequence[MetricsLogger] = (),
        **options: Any,
    ) -> None:
        self.analyses, self.model, self.loggers = list(analyses), model, list(loggers)
        self._options = {"steps": steps, "root": root, **options}
        inspect.signature(watch).bind(model, analyses, **self._options)  # an unknown option is refused at once
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        before, options = self._watch, self._options | {"_saved_by": state.stateful_callbacks.get(STATE)}  # pyright: ignore
        if before is not None and before.is_open:  # left by an exception, or because its batches did not fit
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
            # The Trainer has the best checkpoint in its model by now, which may be that of an earlier step.
            self._watch.close(is_last=not (args.load_best_model_at_end and state.best_model_checkpoint))
            self._watch = None
