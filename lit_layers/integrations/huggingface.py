"""A callback of the Trainer of transformers, and so of the trainers of TRL."""

import inspect
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lit_layers.analyses.base import Analysis
from lit_layers.models.build import submodule
from lit_layers.report.logged_numbers import runs_of_trainer
from lit_layers.schedule import Steps
from lit_layers.training.watching import MetricsLogger, Watch, watch

LOOK = 0.5  # seconds
STATE = "lit_layers"  # what the Trainer saves beside the states of callbacks: the id of the training


class EmergenceTrainerCallback(TrainerCallback):
    """Measures every layer at the steps of a schedule, and leaves the training as if it had not.

        Trainer(model, arguments, train_dataset=data, callbacks=[
            EmergenceTrainerCallback([Lens(batches=text)], steps={"every": 100}, root="checkpoints/mine")])

    Step 0 is measured before the first update, and the last step always, unless training stops early and an earlier
    step's weights are loaded then (`load_best_model_at_end`); a training that is resumed goes on in the same file,
    with `if_exists="resume"`.
    The runs of W&B and TensorBoard that the Trainer reports to are its loggers, where no others are
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
        self._training: FrameType | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        training = _frame_of_trainer()
        before, options = self._watch, self._options | {"_saved_by": state.stateful_callbacks.get(STATE)}  # pyright: ignore
        if before is not None and before.is_open and self._training is training:  # begins anew with smaller batches
            options |= {"if_exists": "resume", "_saved_by": before.measurer.training}
        self._give_up()  # also of a training that an exception has ended
        if self.model is not None:
            model = submodule(model, self.model)
        first, last = state.global_step, state.max_steps
        callbacks = training.f_locals["self"].callback_handler.callbacks if training is not None else ()
        options["loggers"] = self.loggers or runs_of_trainer(args.report_to or (), callbacks)
        self._watch = watch(model, self.analyses, first_step=first, max_steps=last, **options)
        self._training, state.stateful_callbacks[STATE] = training, self._watch.measurer.training  # pyright: ignore
        if training is not None:
            arguments = self._watch, training, threading.get_ident()
            threading.Thread(target=_give_up_after, args=arguments, name="lit_layers", daemon=True).start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._watch.step(state.global_step)
            if control.should_log or control.should_evaluate:
                self._watch.measurer.join(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            # The Trainer has the best checkpoint in its model by now, which may be that of an earlier step.
            self._watch.close(is_last=not (args.load_best_model_at_end and state.best_model_checkpoint))
            self._watch = self._training = None

    def _give_up(self) -> None:
        if self._watch is not None:
            self._watch.give_up()
            self._watch = self._training = None


def _frame_of_trainer() -> FrameType | None:
    """The call of `Trainer.train` under way; a Trainer tells its callbacks of no exception, but then leaves it."""
    frame = sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None:
        if any(kind.__name__ == "Trainer" for kind in type(frame.f_locals.get("self")).__mro__):
            found.append(frame)
        frame = frame.f_back
    return next((each for each in reversed(found) if each.f_code.co_name == "train"), found[0] if found else None)


def _give_up_after(watched: Watch, training: FrameType, thread: int) -> None:
    """Give a watch up when its training is left without a last word, e.g. so that another process may write there."""
    while watched.is_open:
        frame = sys._current_frames().get(thread)
        while frame is not None and frame is not training:
            frame = frame.f_back
        if frame is None:
            watched.give_up()
        else:
            del frame
            time.sleep(LOOK)
