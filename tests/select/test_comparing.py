"""Several models at the layer chosen for each: what is paired, against whom, and what is drawn."""

import math

import numpy as np
import pytest
import torch

from lit_layers.select.choosing import Choice, Score
from lit_layers.select.selection import (
    Candidate,
    chosen_layers,
    comparison_table,
    difference,
    reference,
    write_comparison,
)

TARGETS = torch.arange(40) % 2


def candidate(
    name: str, validation: float, hits: torch.Tensor, *, metric="accuracy", targets=TARGETS, milliseconds=2.0
) -> Candidate:
    choice = Choice(
        layer=2,
        num_layers=4,
        metric=metric,
        rule="best",
        tolerance=0.0,
        validation={2: Score(validation, 0.1, 0.9), 4: Score(0.75, 0.1, 0.9)},
        baseline=0.5,
        shares={},
        test={2: Score(float(hits.double().mean()), 0.1, 0.9), 4: Score(0.7, 0.6, 0.8)},
        difference=Score(-0.05, -0.1, 0.0),
        probe=None,
        test_rows=hits.double(),
    )
    seconds = {2: milliseconds / 1e3, 4: 0.004}
    return Candidate(name=name, choice=choice, seconds=seconds, tokens=9, test_targets=targets)


def hits(seed: int, share: float) -> torch.Tensor:
    return torch.rand(40, generator=torch.Generator().manual_seed(seed)) < share


def test_models_are_set_against_the_best_on_validation_whatever_test_says():
    first, better, luckier = candidate("a", 0.6, hits(0, 0.5)), candidate("b", 0.8, hits(1, 0.5)), None
    luckier = candidate("c", 0.7, torch.ones(40))
    assert reference([first, better, luckier]) is better
    errors = [candidate(str(n), value, hits(n, 0.5), metric="mean_squared_error") for n, value in enumerate((3.0, 1.0))]
    assert reference(errors) is errors[1]


def test_a_difference_is_that_of_the_same_rows_with_the_interval_of_resampled_rows():
    one, other = hits(0, 0.8), hits(1, 0.6)
    found = difference(candidate("a", 0.6, one), candidate("b", 0.8, other))
    gaps = one.numpy().astype(float) - other.numpy().astype(float)
    means = np.random.default_rng(0).choice(gaps, (20_000, 40)).mean(1)
    assert found is not None
    assert found.value == pytest.approx(gaps.mean())
    assert (found.low, found.high) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.03)


@pytest.mark.parametrize("targets", [TARGETS[:30], 1 - TARGETS])
def test_models_with_other_test_rows_are_not_paired(targets):
    other = candidate("b", 0.8, torch.ones(len(targets)), targets=targets)
    assert difference(candidate("a", 0.6, hits(0, 0.8)), other) is None


def test_the_table_has_a_row_a_model_and_says_why_another_has_none(tmp_path):
    models = [candidate("a", 0.6, hits(0, 0.8)), candidate("b", 0.8, hits(1, 0.6))]
    rows = comparison_table(models, {"c": "no layer can be chosen"}).to_dict("records")
    assert [row["model"] for row in rows] == ["a", "b", "c"]
    assert (rows[0]["milliseconds"], rows[0]["milliseconds_last"], rows[0]["reference"]) == (2.0, 4.0, "b")
    gap = float((hits(0, 0.8).double() - hits(1, 0.6).double()).mean())
    assert rows[0]["difference_to_reference"] == pytest.approx(gap)
    assert math.isnan(rows[1]["difference_to_reference"])
    assert (rows[2]["left_out"], math.isnan(rows[2]["test"])) == ("no layer can be chosen", True)


def test_a_model_is_a_filled_mark_at_its_layer_a_hollow_one_at_its_last_and_a_line_between():
    right = torch.arange(40) < 32
    chart = chosen_layers([candidate("a", 0.6, right), candidate("b", 0.8, right, milliseconds=3.0)], "t")
    line, last, chosen = chart.series[:3]
    assert ([*line.x], [*line.y], [*chosen.x], [*last.x]) == ([2, 4], [0.8, 0.7], [2], [4])
    assert (chosen.mark, last.mark, chosen.labels) == ("circle", "circle-open", ["2 of 4"])
    assert ([*chosen.low], [*chosen.high], [*last.low]) == ([0.1], [0.9], [0.6])
    assert chart.series[3].color != line.color


@pytest.mark.soak
def test_the_pictures_are_written_beside_the_table(tmp_path):
    paths = write_comparison(
        [candidate("a", 0.6, hits(0, 0.8)), candidate("b", 0.8, hits(1, 0.6))], {}, "task", tmp_path
    )
    assert [path.name for path in paths] == ["models.png", "models.svg", "models.pdf", "models.csv"]
    assert all(path.stat().st_size for path in paths)
