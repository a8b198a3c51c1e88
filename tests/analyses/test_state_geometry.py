"""StateGeometry on a small model, against the same numbers computed from hooked states by plain numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import PooledStates, StateGeometry
from lit_layers.analyses.statistics import half_records
from lit_layers.functional import alpha_req, two_nn_dimension
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import LAYERS, tiny


def run(model, **options) -> dict[Any, Any]:
    records = records_of(StateGeometry(batches=Listed(*BATCHES), first_rank=3, **options), model)
    return {(record.metric, record.layer): record for record in records}


def test_every_value_is_computed_from_the_real_tokens(model):
    found = run(model)
    prompts = states_of_each_prompt(model, BATCHES)  # (layers + 1, tokens, dim) each
    for layer in range(LAYERS + 1):
        states = [prompt[layer] for prompt in prompts]
        sizes = [np.abs(each).max() / np.median(np.abs(each)) for each in states]
        assert found["massive_activation", layer].value == pytest.approx(np.mean(sizes), rel=1e-9)
        # at most eight evenly spread tokens of each prompt, without the first
        kept = [
            each[1:][[round(i * (len(each) - 2) / 7) for i in range(8)] if len(each) > 9 else ...] for each in states
        ]
        rows = np.concatenate(kept)
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        cosines = (units @ units.T)[~np.eye(len(units), dtype=bool)]
        assert found["anisotropy", layer].value == pytest.approx(cosines.mean(), rel=1e-9)
        assert found["anisotropy", layer].n == 8
        points = torch.from_numpy(rows)
        assert found["alpha_req", layer].value == pytest.approx(alpha_req(points, fit_range=(3, 100)).item(), rel=1e-9)
        assert found["two_nn_dimension", layer].value == pytest.approx(two_nn_dimension(points).item(), rel=1e-9)
        if layer:
            moved = {"block_influence": [], "step_ratio": []}
            for prompt in prompts:
                before, after = prompt[layer - 1, 1:], prompt[layer, 1:]
                norms = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
                moved["block_influence"].append((1 - (before * after).sum(1) / norms[0] / norms[1]).mean())
                moved["step_ratio"].append((np.linalg.norm(after - before, axis=1) / norms[0]).mean())
            for metric, values in moved.items():
                record = found[metric, layer]
                assert record.value == pytest.approx(np.mean(values), rel=1e-9)
                assert record.stderr == pytest.approx(np.std(values, ddof=1) / 8**0.5, rel=1e-7)
    assert ("block_influence", 0) not in found


def test_equal_beginnings_of_prompts_count_once_in_any_batching():
    """Their states differ only by the rounding of products of other shapes."""
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(4))
    ids[1:4, :6] = ids[0, :6]
    lengths = (12, 10, 9, 12, 11, 12)
    prompts = [{"input_ids": row[None, :length]} for row, length in zip(ids, lengths, strict=True)]
    mask = torch.tensor([[1] * length + [0] * (12 - length) for length in lengths])
    together = {"input_ids": ids * mask, "attention_mask": mask}
    exact = states_of_each_prompt(tiny("gpt2", torch.float64), prompts)
    for dtype, rel in ((torch.float32, 1e-3), (torch.float64, 1e-9)):
        for batches in ([together], prompts):
            analysis = StateGeometry(batches=Listed(*batches), first_rank=3, num_tokens=11, num_halves=0)
            found = {(r.metric, r.layer): r.value for r in records_of(analysis, LayeredModel(tiny("gpt2", dtype)))}
            for layer in range(1, LAYERS + 1):
                points = [each[layer, 1:] for each in exact]
                different = [points[0], *(each[5:] for each in points[1:4]), *points[4:]]
                expected = two_nn_dimension(torch.from_numpy(np.concatenate(different))).item()
                assert found["two_nn_dimension", layer] == pytest.approx(expected, rel=rel), (dtype, layer)


def participation_ratio(rows: np.ndarray) -> float:
    """Compute (tr C)^2 / tr C^2 of the covariance of the rows, without any decomposition."""
    covariance = np.cov(rows, rowvar=False)
    return float(np.trace(covariance) ** 2 / (covariance**2).sum())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_dimension_of_prompts_is_that_of_the_covariance_of_their_pooled_states(model, pooling):
    analysis = PooledStates(batches=Listed(*BATCHES), pooling=pooling, num_halves=0)
    found = {(record.metric, record.layer): record for record in records_of(analysis, model)}
    prompts = states_of_each_prompt(model, BATCHES)  # (layers + 1, tokens, dim) each
    expected = []
    for layer in range(LAYERS + 1):
        rows = np.stack([each[layer].mean(0) if pooling == "mean" else each[layer, -1] for each in prompts])
        expected.append(participation_ratio(rows))
        assert found["pooled_dimension", layer].value == pytest.approx(expected[-1], rel=1e-9)
        assert 1 < expected[-1] < len(prompts) - 1
        assert found["pooled_dimension", layer].n == len(prompts)
    assert found["pooled_dimension", None].value == pytest.approx(np.mean(expected[1:]), rel=1e-9)


def test_intervals_come_from_halves_and_chance_is_reported(model):
    found = run(model, num_halves=6)
    for metric in ("alpha_req", "two_nn_dimension", "anisotropy"):
        whole, half = found[metric, 2], found[f"{metric}_of_half", 2]
        assert whole.low < whole.value < whole.high or whole.value in (whole.low, whole.high)
        assert (half.n, whole.n) == (4, 8)
    assert found["random_two_nn_dimension", 2].value > found["two_nn_dimension", 2].value
    assert found["random_massive_activation", 1].low <= found["random_massive_activation", 1].value


def test_an_interval_from_halves_stays_in_the_range_of_its_metric():
    halves = torch.tensor([0.1, 0.2, 4.0, 0.1], dtype=torch.float64)
    whole, half = half_records("two_nn_dimension", 0.5, halves, 8)
    low, high = np.quantile(halves.numpy(), [0.025, 0.975]) - 1.1
    assert 0.5 + low < 0
    assert (whole.low, half.low) == (0.0, pytest.approx(1.1 + low))
    assert whole.high == pytest.approx(0.5 + high)
    own, _ = half_records("my_own", 0.5, halves, 8)
    assert own.low == pytest.approx(0.5 + low)


def test_a_planted_massive_activation_is_found_at_its_layer_and_later():
    model = tiny("gpt2", torch.float64)
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_proj.bias")[5] = 5000.0
    found = {key: record.value for key, record in run(model).items()}
    assert found["massive_activation", 1] < 100 < 1000 < found["massive_activation", 2]
    assert found["block_influence", 2] > found["block_influence", 3]
    assert found["anisotropy", 2] > 0.99


def test_prompts_of_one_token_have_activations_and_no_set_of_points(model):
    found = records_of(StateGeometry(batches=Listed({"input_ids": torch.tensor([[5], [6]])})), model)
    undefined = {record.metric: record.tags["num_undefined"] for record in found if record.value != record.value}
    assert {record.metric for record in found} - {*undefined} == {"massive_activation", "random_massive_activation"}
    set_metrics = ["alpha_req", "random_alpha_req", "two_nn_dimension", "random_two_nn_dimension", "anisotropy"]
    assert {metric: undefined[metric] for metric in set_metrics} == dict.fromkeys(set_metrics, 2)
