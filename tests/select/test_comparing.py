"""The table of several models, each at its chosen layer."""

import math

import pytest
import torch

from lit_layers.select.choosing import Choice, Score
from lit_layers.select.selection import Candidate, chosen_layers, comparison_table


def candidate(name: str, validation: float, hits: torch.Tensor) -> Candidate:
    choice = Choice(
        layer=2,
        num_layers=4,
        metric="accuracy",
        rule="best",
        tolerance=0.0,
        validation={2: Score(validation, 0.1, 0.9), 4: Score(0.75, 0.1, 0.9)},
        baseline=0.5,
        shares={},
        test={2: Score(float(hits.double().mean()), 0.1, 0.9), 4: Score(0.7, 0.6, 0.8)},
        difference=Score(-0.05, -0.1, 0.0),
        probe=None,
    )
    return Candidate(name=name, choice=choice, seconds={2: 0.002, 4: 0.004}, tokens=9)


def hits(seed: int, share: float) -> torch.Tensor:
    return torch.rand(40, generator=torch.Generator().manual_seed(seed)) < share


def test_the_table_has_a_row_per_model_and_the_reason_for_a_missing_one(tmp_path):
    models = [candidate("a", 0.6, hits(0, 0.8)), candidate("b", 0.8, hits(1, 0.6))]
    rows = comparison_table(models, {"c": "no layer can be chosen"}).to_dict("records")
    assert [row["model"] for row in rows] == ["a", "b", "c"]
    assert (rows[0]["milliseconds"], rows[0]["milliseconds_last"]) == (2.0, 4.0)
    assert rows[1]["test"] == pytest.approx(float(hits(1, 0.6).double().mean()))
    assert (rows[2]["left_out"], math.isnan(rows[2]["test"])) == ("no layer can be chosen", True)


def test_a_model_is_drawn_at_its_chosen_and_its_last_layer_with_a_line_between():
    chart = chosen_layers([candidate("a", 0.6, torch.arange(40) < 32)], "t")
    line, last, chosen = chart.series
    assert ([*line.x], [*line.y], [*chosen.x], [*last.x]) == ([2, 4], [0.8, 0.7], [2], [4])
    assert ([*chosen.low], [*chosen.high], [*last.low]) == ([0.1], [0.9], [0.6])
