"""Means over tasks at each layer, of the whole list and of each domain; and the scores of all layers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lit_layers.embeddings.task_list import DOMAINS
from lit_layers.errors import InputError

RUN = ["run", "step", "pooling", "states"]  # what one curve belongs to


@dataclass(frozen=True, eq=False)
class Averages:
    """Of one checkpoint. Layer 0 stands apart: "best" and "last" are of layers 1 to L.

    `curve` has a row for each layer: `average`, the unweighted mean over tasks, and a column for each domain; NaN where
    a task has no score at that layer. `missing` names the tasks that were asked for and have no score of some layer
    from 1 on: they are in no mean. `best_per_task` chooses the layer on the very scores that it averages.
    """

    run: str
    step: int | None
    pooling: str
    states: str
    scores: pd.DataFrame  # a row for each task of the means: domain, score and a column for each layer
    curve: pd.DataFrame  # layer, average, classification, ...
    missing: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """The last layer that was scored, which is L where all were."""
        return max(self.curve["layer"].tolist())

    def at(self, layer: int, column: str = "average") -> float:
        """The mean at a layer."""
        found = self.curve.loc[self.curve["layer"] == layer, column]
        return float(found.iloc[0]) if len(found) else float("nan")

    def best_layer(self, column: str = "average") -> int:
        """The layer from 1 on of the highest mean; of several the first."""
        means = {layer: self.at(layer, column) for layer in self.curve["layer"].tolist() if layer > 0}
        return max(means, key=lambda layer: means[layer])

    def best_per_task(self, domain: str | None = None) -> float:
        """The mean over tasks of each task's own best layer from 1 on: an oracle."""
        rows: Any = self.scores if domain is None else self.scores[self.scores["domain"] == domain]
        return float(rows[[name for name in _layers(rows) if name > 0]].max(axis=1).mean())


def averages(frame: pd.DataFrame, *, expected: Sequence[str] = ()) -> list[Averages]:
    """The means of every checkpoint in a tidy table of measurements (`lit_layers.records.frame`), in step order.

    Args:
        frame: may hold other analyses, too.
        expected: names of the tasks that belong into the means, so that those that have no number are named.

    Raises:
        InputError: a table without a score of mteb.
    """
    table: Any = score_table(frame)
    found = []
    for (run, step, pooling, states), rows in table.groupby(RUN, dropna=False, sort=False):
        layers = [layer for layer in _layers(rows) if rows[layer].notna().any()]
        later = [layer for layer in layers if layer > 0]
        whole = rows[rows[later].notna().all(axis=1)] if later else rows.iloc[:0]
        missing = [name for name in dict.fromkeys([*rows["task"], *expected]) if name not in set(whole["task"])]
        scores = whole[["task", "domain", "score", "n", *layers]].reset_index(drop=True)
        curve = pd.DataFrame({"layer": layers, "average": _mean(scores, layers)})
        for domain in DOMAINS:
            if (of := scores[scores["domain"] == domain]).size:
                curve[domain] = _mean(of, layers)
        number = None if pd.isna(step) else int(step)
        found.append(Averages(str(run), number, str(pooling), str(states), scores, curve, tuple(missing)))
    return sorted(found, key=lambda each: (each.run, -1 if each.step is None else each.step))


def score_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The wide table: a row for each checkpoint and task, a column for each layer, named by its number.

    Raises:
        InputError: a table without a score of mteb.
    """
    rows: Any = frame[frame["analysis"].str.startswith("mteb/") & (frame["metric"] == "main_score")]
    if not len(rows):
        raise InputError("expected scores of mteb, the measurements hold none: run `lit-layers mteb` first")
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["task"]))}
    index = [*RUN, "task", "domain", "score", "n"]
    wide = rows.assign(step=rows["step"].astype("Int64"), layer=rows["layer"].astype(int)).pivot(
        index=index, columns="layer", values="value"
    )
    wide = wide.reset_index().rename_axis(columns=None)
    place = wide["domain"].map({name: at for at, name in enumerate(DOMAINS)})
    keys = wide.assign(_domain=place, _task=wide["task"].map(order))
    return wide.loc[keys.sort_values(["run", "step", "_domain", "_task"], kind="stable").index].reset_index(drop=True)


def _layers(table: Any) -> list[int]:
    return sorted(name for name in table.columns if isinstance(name, int))


def _mean(scores: Any, layers: list[int]) -> np.ndarray:
    """Over the tasks, NaN where one of them has no score."""
    return scores[layers].to_numpy(dtype=float).mean(axis=0) if len(scores) else np.full(len(layers), np.nan)
