"""A published score of a released model, in every digit."""

import pandas as pd
import pytest

from lit_layers.cli.main import main

pytestmark = [pytest.mark.realmodel, pytest.mark.realdata, pytest.mark.soak]  # 1,379 pairs at seven layers
PUBLISHED = 0.8203246731235654  # Spearman correlation of cosines, as the model's own page has it


def test_minilm_scores_at_every_layer_and_at_the_last_what_was_published(minilm, realdata, tmp_path):
    command = ["mteb", minilm, "--tasks", "STSBenchmark", "--folder", realdata, "--root", tmp_path]
    assert main([str(part) for part in command]) == 0
    (scores,) = pd.read_csv(tmp_path / "mteb" / "scores.csv").to_dict("records")
    layers = [scores[f"layer_{layer:03d}"] for layer in range(7)]
    expected = [0.5560, 0.5670, 0.5610, 0.5586, 0.5959, 0.6648, 0.8203]
    assert layers == pytest.approx(expected, abs=5e-5 + 1e-9)  # four digits: half a unit of the last
    assert layers[6] == pytest.approx(PUBLISHED, abs=1e-6)  # ranks of 1,379 cosines: rounding may swap neighbours
