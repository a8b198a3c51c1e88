"""A layer that was chosen, written down: numbers, a picture, and the model cut there with its page."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_layers.figures.plane import LayerScores, layer_choice
from lit_layers.figures.vega import write_charts
from lit_layers.functional.probe import LogisticProbes
from lit_layers.metrics import look_up
from lit_layers.models.build import save
from lit_layers.models.shard_files import ShardFiles
from lit_layers.models.view import LayeredModel
from lit_layers.records import write_files
from lit_layers.select.choosing import Choice, TaskFeatures
from lit_layers.select.classifier import ProbeHead
from lit_layers.select.export import Card, compare_costs, cost_table, export, measured_on


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The layer that is enough for a task: of which model, by what it was chosen, and how long each layer takes."""

    name: str  # of the model, in the picture
    files: ShardFiles
    revision: str | None
    view: LayeredModel
    task: TaskFeatures
    tokenizer: str | None
    choice: Choice
    tolerance: float | None  # None of a rule that has none
    seconds: Mapping[int, float]  # from the beginning to each layer

    def write(self, folder: Path) -> list[Path]:
        """Writes layers.png, .svg, .pdf and select.json, and returns their paths, in that order.

        Raises:
            InputError: a folder that cannot be made.
        """
        task, choice = self.task, self.choice
        content = {
            "model": self.files.model,
            "revision": self.revision,
            "task": task.name,
            **{name: getattr(choice, name) for name in ("layer", "num_layers", "rule")},
            "tolerance": self.tolerance,
            "metric": choice.metric,
            "pooling": task.pooling,
            "max_tokens": task.max_tokens,
            "validation": {str(layer): asdict(score) for layer, score in choice.validation.items()},
            "baseline": choice.baseline,
            "chosen_in_share_of_resamples": {str(layer): share for layer, share in choice.shares.items()},
            "test": {str(layer): asdict(score) for layer, score in sorted(choice.test.items())},
            "test_difference_to_last": asdict(choice.difference),
            "seconds_to_layer": {str(layer): each for layer, each in self.seconds.items()},
            "rows": {part: len(targets) for part, targets in task.targets.items()},
            "notes": list(task.notes),
        }
        numbers = write_files(folder, {"select.json": content})  # before the pictures, which may fail
        return [*write_charts({folder / "layers": layer_choice(self._scores())}), *numbers]

    def _scores(self) -> LayerScores:
        choice, ids = self.choice, self.task.batch.get("input_ids")
        last = f"layer of {choice.num_layers}"
        where = (
            f"the last {last}" if choice.layer == choice.num_layers else f"layer {choice.layer} of {choice.num_layers}"
        )
        rule = choice.rule if self.tolerance is None else f"{choice.rule} {choice.tolerance:g}"
        return LayerScores(
            title=f"{self.name} on {self.task.name}: {where} is chosen ({rule.replace('_', ' ')})",
            score=f"validation {look_up(choice.metric).title.lower()}",
            values={layer: (each.value, each.low, each.high) for layer, each in choice.validation.items()},
            chosen=choice.layer,
            baseline=choice.baseline,
            baseline_name=choice.baseline_name,
            shares=choice.shares,
            seconds=self.seconds,
            timed="an image" if ids is None else f"a text of {ids.shape[1]} tokens",
        )

    def export(self, folder: Path, picture: Path, *, rounds: int, show: Callable[[str], None], **options: bool) -> None:
        """Writes the model cut at the layer, with its probe and its page; `options` are those of `export`.

        Args:
            picture: of the choice, for the page.
            rounds: in which the costs of the whole and the cut model are measured.
            show: is given the table of costs and how they were measured.
        """
        task, choice = self.task, self.choice
        facts: Any = {"task": task.name, "pooling": task.pooling, "max_tokens": task.max_tokens, "row": 0}
        if isinstance(choice.probe, LogisticProbes):
            head = ProbeHead.of_logistic(choice.probe, choice.layer, classes=task.classes or (), **facts)
        else:
            head = ProbeHead.of_ridge(choice.probe, choice.layer, **facts)
        card = Card(
            source=self.files.model,
            revision=self.revision,
            commit=self.files.commit,
            num_layers=choice.num_layers,
            rule=choice.rule,
            tolerance=self.tolerance,
            metric=choice.metric,
            validation={layer: score.value for layer, score in choice.validation.items()},
            test_chosen=choice.test[choice.layer].value,
            test_last=choice.test[choice.num_layers].value,
            picture=picture,
            notes=task.notes,
        )
        with self._whole_model() as whole:
            measured: Any = {"num_rounds": rounds, "device": self.view.device.type}
            measured |= {} if task.max_tokens is None else {"num_tokens": min(128, task.max_tokens)}

            def costs(cut: Path) -> Any:
                of_both = compare_costs(whole, cut, layer=choice.layer, num_layers=choice.num_layers, **measured)
                show(f"{cost_table(of_both)}\n\n{measured_on(of_both)}")
                return of_both

            how: Any = {"tokenizer": self.tokenizer, "card": card, "costs": costs, **options}
            export(self.view.model, choice.layer, head, folder, batches=[task.batch], **how)

    @contextmanager
    def _whole_model(self) -> Iterator[Path]:
        """A folder with the whole model: its own, or for a model of the Hub a copy that is removed afterwards."""
        if self.files.local:
            yield Path(self.files.model)
            return
        with tempfile.TemporaryDirectory(prefix="lit_layers-") as folder:
            save(self.view.model, folder)
            yield Path(folder)
