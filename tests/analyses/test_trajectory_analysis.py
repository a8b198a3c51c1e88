"""Trajectory on a small model, against the same numbers computed prompt by prompt from hooked states."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from lit_layers.analyses import Trajectory
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny, tiny_batch


def find(records, metric, layer=None, **tags):
    (record,) = [r for r in records if (r.metric, r.layer, r.tags) == (metric, layer, tags)]
    return record


def reference(prompt):
    """Return by (metric, layer) the values of each token of one prompt (layers + 1, tokens, dim)."""
    found = defaultdict(list)
    for points in prompt.transpose(1, 0, 2):
        norms, steps = np.linalg.norm(points, axis=-1), np.diff(points, axis=0)
        lengths, rates = np.linalg.norm(steps, axis=-1), np.diff(np.log(norms))
        units = steps / lengths[:, None]
        for layer in range(len(points)):
            found["state_norm", layer].append(norms[layer])
        for layer in range(1, len(points)):
            found["step_norm", layer].append(lengths[layer - 1])
            found["growth_rate", layer].append(rates[layer - 1])
            found["line_shape_score", layer].append(layer / np.linalg.norm(units[:layer].sum(0)))
        found["line_shape_score", None].append(found["line_shape_score", len(steps)][-1])
        found["expodistance", None].append(rates.std() / abs(rates.mean()))
        found["equidistance", None].append(lengths.std() / lengths.mean())
    del found["line_shape_score", 1]
    return found


@pytest.mark.parametrize("options", [{}, {"drop_first": 0}, {"tokens": "last"}, {"states": "hf"}, {"preset": "paper"}])
def test_every_record_is_the_mean_over_prompts_of_the_mean_over_their_real_tokens(model, options):
    records = records_of(Trajectory(batches=Listed(*BATCHES), **options), model)
    final_norm = "states" in options or "preset" in options
    prompts = states_of_each_prompt(model, BATCHES, final_norm=final_norm)
    assert len(prompts) == 8
    dropped = options.get("drop_first", 1)
    kept = [prompt[:, -1:] if "tokens" in options else prompt[:, dropped:] for prompt in prompts]
    each = [reference(prompt) for prompt in kept]
    tags = {"states": "hf"} if final_norm else {}
    medians = 0
    for metric, layer in each[0]:
        means = [np.mean(values[metric, layer]) for values in each]
        record = find(records, metric, layer, **tags)
        assert record.value == pytest.approx(np.mean(means), rel=1e-9)
        assert record.stderr == pytest.approx(np.std(means, ddof=1) / math.sqrt(8), rel=1e-7)
        assert record.n == 8
        assert record.low < record.value < record.high
        if metric in ("expodistance", "state_norm", "step_norm") or (metric, layer) == ("line_shape_score", None):
            medians += 1
            middle = find(records, metric, layer, statistic="median", **tags)
            assert middle.value == pytest.approx(np.median([np.median(v[metric, layer]) for v in each]), rel=1e-9)
    assert len(records) == len(each[0]) + medians


def test_a_prompt_without_a_remaining_token_is_left_out_and_counted(model):
    lonely = {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    records = records_of(Trajectory(batches=Listed(lonely)), model)
    assert {(record.n, record.tags["num_undefined"]) for record in records} == {(1, 1)}
    with pytest.raises(ValueError, match="trajectory is undefined for every prompt at every layer.* of too few tokens"):
        records_of(Trajectory(batches=Listed({"input_ids": torch.tensor([[8]])})), model)


def test_tokens_that_a_dead_block_does_not_move_are_counted(model):
    class Stuck(LayeredModel):
        def trajectory(self, batch):
            trajectory = super().trajectory(batch)
            trajectory.hidden[2, 0, 3] = trajectory.hidden[1, 0, 3]
            trajectory.hidden[2, 1, :] = trajectory.hidden[1, 1, :]
            return trajectory

    records = records_of(Trajectory(batches=Listed(tiny_batch("gpt2", batch=3, tokens=6))), Stuck(model))
    whole = find(records, "line_shape_score", num_undefined=1, num_undefined_tokens=6)
    assert whole.n == 2
    assert math.isfinite(whole.value)
    assert find(records, "equidistance").n == 3
    assert find(records, "step_norm", 2).n == 3


def test_one_block_has_a_straight_path_and_no_expodistance():
    one = LayeredModel(tiny("gpt2", torch.float64, n_layer=1))
    records = records_of(Trajectory(batches=Listed(*BATCHES)), one)
    assert find(records, "line_shape_score").value == pytest.approx(1, rel=1e-13)
    assert "expodistance" not in {record.metric for record in records}
    assert not [record for record in records if record.metric == "line_shape_score" and record.layer is not None]
