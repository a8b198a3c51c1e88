"""Representation on a small model, against the same numbers computed prompt by prompt from hooked states."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import LayerSimilarity, PromptStudies, Representation, Trajectory
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny, tiny_batch

BATCHES = [
    tiny_batch("gpt2", batch=3, tokens=9, padding="left", seed=1),
    tiny_batch("gpt2", batch=2, tokens=40, seed=2),  # more tokens than the 32 dimensions
    tiny_batch("gpt2", batch=3, tokens=10, padding="right", seed=3),
]
LAYERS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


@pytest.fixture(scope="module")
def records(model):
    return records_of(Representation(batches=Listed(*BATCHES), rankme=True), model)


@pytest.fixture(scope="module")
def prompts(model):
    return states_of_each_prompt(model, BATCHES)


def find(records, metric, layer=None, **tags):
    (record,) = [r for r in records if (r.metric, r.layer, r.tags) == (metric, layer, tags)]
    return record


def entropy(shares):
    shares = np.asarray(shares)[np.asarray(shares) > 1e-15]
    return -(shares * np.log(shares)).sum()


def row_metrics(rows):
    """Return each metric of one set of rows, from the eigenvalues of its Gram matrix."""
    variances = np.linalg.eigvalsh(rows @ rows.T)[::-1][: min(rows.shape)].clip(0)
    sizes = np.sqrt(variances) / np.sqrt(variances).sum()
    p = variances / variances.sum()
    return {
        "prompt_entropy": entropy(p),
        "effective_rank": math.exp(entropy(sizes)),
        "participation_ratio": 1 / (p**2).sum(),
        "rankme": math.exp(entropy(sizes + 1e-7)),
    }


def curvature(rows):
    steps = np.diff(rows, axis=0)
    steps = steps / np.linalg.norm(steps, axis=1, keepdims=True)
    return np.mean([math.acos(a @ b) for a, b in itertools.pairwise(steps)])


def check(records, values, metric, **tags):
    """Compare the records of a metric with `values` (layers + 1, prompts)."""
    rows = [(layer, values[layer]) for layer in LAYERS] + [(None, np.mean(values[1:], axis=0))]
    for layer, row in rows:
        record = find(records, metric, layer, **tags)
        assert record.value == pytest.approx(np.mean(row), rel=1e-7)
        assert record.stderr == pytest.approx(np.std(row, ddof=1) / math.sqrt(len(row)), rel=1e-6)
        assert record.n == len(row)
        assert record.low < record.value < record.high


@pytest.mark.parametrize("drop_first", [0, 1])
def test_ranks_and_entropies_are_means_over_prompts_of_their_own_real_tokens(records, prompts, drop_first):
    found = [[row_metrics(prompt[layer][drop_first:]) for prompt in prompts] for layer in LAYERS]
    for metric in ("effective_rank", "participation_ratio", "rankme"):
        check(records, [[f[metric] for f in row] for row in found], metric, drop_first=drop_first)
    raw = [[f["prompt_entropy"] for f in row] for row in found]
    most = [math.log(min(len(prompt[0]) - drop_first, 32)) for prompt in prompts]
    check(records, raw, "prompt_entropy", drop_first=drop_first, normalization="raw")
    shares = np.array(raw) / most
    check(records, shares, "prompt_entropy", drop_first=drop_first, normalization="maxEntropy")


def test_curvature_is_the_mean_over_prompts_of_the_mean_angle(records, prompts):
    check(records, [[curvature(prompt[layer]) for prompt in prompts] for layer in LAYERS], "token_curvature")


def test_undefined_angles_at_a_repeated_state_are_skipped_and_counted(model):
    class Stuttering(LayeredModel):
        def trajectory(self, batch):
            trajectory = super().trajectory(batch)
            trajectory.hidden[0, 1, 3] = trajectory.hidden[0, 1, 2]
            return trajectory

    records = records_of(Representation(batches=Listed(BATCHES[1])), Stuttering(model))
    first = find(records, "token_curvature", 0, num_missing_angles=2)
    prompts = states_of_each_prompt(model, BATCHES[1:2])
    changed = prompts[1][0].copy()
    changed[3] = changed[2]
    steps = np.diff(changed, axis=0)
    angles = [
        math.acos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for a, b in itertools.pairwise(steps)
        if np.linalg.norm(a) * np.linalg.norm(b) > 0
    ]
    assert first.value == pytest.approx((curvature(prompts[0][0]) + np.mean(angles)) / 2, rel=1e-9)
    assert find(records, "token_curvature", 1).n == 2


def test_dataset_entropy_is_that_of_mean_pooled_prompts_with_intervals_from_halves(records, prompts):
    pooled = np.array([[prompt[layer].mean(0) for prompt in prompts] for layer in LAYERS])
    values = [row_metrics(vectors)["prompt_entropy"] for vectors in pooled]
    for layer, value in [*zip(LAYERS, values, strict=True), (None, np.mean(values[1:]))]:
        raw = find(records, "dataset_entropy", layer, normalization="raw")
        share = find(records, "dataset_entropy", layer, normalization="maxEntropy")
        assert (raw.value, raw.n) == (pytest.approx(value, rel=1e-9), 8)
        assert share.value == pytest.approx(value / math.log(8), rel=1e-9)
        assert share.stderr == pytest.approx(find_half(records, layer, "maxEntropy").stderr, rel=1e-12)
        assert raw.low < raw.value < raw.high
    # the 20 drawn halves scatter about the mean of all 70
    halves = list(itertools.combinations(range(8), 4))
    for layer in LAYERS:
        every = [row_metrics(pooled[layer][list(half)])["prompt_entropy"] for half in halves]
        half = find_half(records, layer, "raw")
        assert half.n == 4
        assert half.value == pytest.approx(np.mean(every), abs=3.5 * np.std(every) / math.sqrt(20))
        assert np.min(every) <= half.low < half.value < half.high <= np.max(every)
        assert half.stderr == pytest.approx(np.std(every), rel=0.5)


def find_half(records, layer, normalization):
    return find(records, "dataset_entropy_of_half", layer, normalization=normalization)


def test_the_released_preset_gives_the_released_quantities(model):
    records = records_of(Representation(batches=Listed(*BATCHES), preset="released_code"), model)
    prompts = states_of_each_prompt(model, BATCHES, final_norm=True)
    metrics = {"prompt_entropy", "token_angle", "dataset_entropy", "dataset_entropy_of_half"}
    assert {r.metric for r in records} == metrics

    def unit(rows):
        rows = rows - rows.mean(0)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def clamped_entropy(rows):
        gram = rows.T @ rows if len(rows) > rows.shape[1] else rows @ rows.T
        eigenvalues = np.linalg.eigvalsh(np.maximum(gram, 0)).clip(0)
        return entropy(eigenvalues / eigenvalues.sum())

    def turn(rows):
        return np.mean([math.acos(np.clip(a @ b, -1, 1)) for a, b in itertools.pairwise(unit(rows))])

    each = [[clamped_entropy(unit(prompt[layer])) for prompt in prompts] for layer in LAYERS]
    tags = {"preset": "released_code"}
    check(records, each, "prompt_entropy", drop_first=0, normalization="raw", **tags)
    check(records, [[turn(prompt[layer]) for prompt in prompts] for layer in LAYERS], "token_angle", **tags)
    for layer in LAYERS:
        pooled = np.array([unit(prompt[layer]).mean(0) for prompt in prompts])
        value = find(records, "dataset_entropy", layer, normalization="raw", **tags).value
        assert value == pytest.approx(clamped_entropy(pooled), rel=1e-9)


def test_prompts_too_short_for_a_metric_are_left_out_of_only_that_metric(model):
    short = {"input_ids": torch.tensor([[5, 6, 7, 9], [8, 3, 0, 0], [4, 9, 9, 2]])}
    short["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    records = records_of(Representation(batches=Listed(short)), model)
    assert find(records, "token_curvature", 2, num_undefined=1).n == 2
    assert find(records, "effective_rank", 2, drop_first=1).n == 3
    one_left = {"drop_first": 1, "normalization": "maxEntropy", "num_undefined": 1}
    assert find(records, "prompt_entropy", 2, **one_left).n == 2
    assert find(records, "prompt_entropy", **one_left).n == 2
    assert find(records, "dataset_entropy", 2, normalization="raw").low is None


def test_a_single_prompt_has_values_without_intervals(model):
    records = records_of(Representation(batches=Listed(tiny_batch("gpt2", batch=1))), model)
    assert find(records, "dataset_entropy", 1, normalization="raw").value == 0
    assert {(record.n, record.stderr, record.low) for record in records} == {(1, None, None)}


def test_the_order_of_an_entropy_can_be_infinite(model):
    """An infinite order gives the min-entropy, minus the logarithm of the largest share of the variance."""
    batches, layer = Listed(*BATCHES), 2

    def entropy_of_order(alpha):
        run = records_of(Representation(batches=batches, states="resid", alpha=alpha), model)
        return next(record.value for record in run if (record.metric, record.layer) == ("prompt_entropy", layer))

    smallest, near = entropy_of_order(math.inf), entropy_of_order(1000.0)
    assert smallest == pytest.approx(near * 999 / 1000, rel=1e-6)  # the largest share dominates sum p^1000


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_every_option_of_the_entropies_is_available_and_tagged(model, prompts):
    options = {"center": True, "unit": True, "clamp": True, "side": "smaller", "alpha": 2.0, "alpha2": "frobenius"}
    options |= {"normalizations": ("logD",), "drop_first": (0, 2), "pooling": "last", "states": "normed"}
    records = records_of(Representation(batches=Listed(*BATCHES), **options), model)

    with torch.no_grad():
        prompts = [model.transformer.ln_f(torch.from_numpy(prompt)).numpy() for prompt in prompts]

    def value(rows):
        gram = np.maximum(rows.T @ rows if len(rows) > rows.shape[1] else rows @ rows.T, 0)
        return -math.log((gram**2).sum() / len(gram) ** 2) / math.log(32)

    own = {"states": "normed"}
    tags = {"normalization": "logD", "alpha": 2.0, "alpha2": "frobenius", "clamp": 1, "side": "smaller", **own}
    for layer, dropped in itertools.product(LAYERS, (0, 2)):
        rows = [unit(prompt[layer][dropped:] - prompt[layer][dropped:].mean(0)) for prompt in prompts]
        expected = np.mean([value(each) for each in rows])
        found = find(records, "prompt_entropy", layer, drop_first=dropped, **tags, center=1, unit=1).value
        assert found == pytest.approx(expected, rel=1e-9)
        expected = np.mean([row_metrics(each)["effective_rank"] for each in rows])
        found = find(records, "effective_rank", layer, drop_first=dropped, center=1, unit=1, **own).value
        assert found == pytest.approx(expected, rel=1e-6)
    for layer in LAYERS:
        expected = value(np.array([prompt[layer][-1] for prompt in prompts]))
        found = find(records, "dataset_entropy", layer, **tags, pooling="last").value
        assert found == pytest.approx(expected, rel=1e-9)
    assert find(records, "token_curvature", 1, **own).n == 8


def test_a_prompt_of_one_repeated_token_has_no_curvature_at_the_layer_without_positions():
    """All its states are equal at layer 0 of a rotary model."""
    batch = {"input_ids": torch.full((1, 9), 7)}
    model = tiny("llama", torch.float64)
    for kind in (LayerSimilarity, Trajectory):
        assert records_of(kind(batches=Listed(batch)), model)
    found = [record.metric for record in records_of(Representation(batches=Listed(batch)), model) if record.layer == 0]
    assert "token_curvature" not in found
    assert "effective_rank" in found


def test_a_text_of_one_token_is_in_no_normalization_of_the_entropy():
    lengths = (1, 6, 5)
    ids = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    model = tiny("gpt2", torch.float64)
    for alpha2 in ("spectrum", "frobenius"):
        options: dict[str, Any] = {"alpha": 2.0, "alpha2": alpha2, "drop_first": (0, 4)}
        given = Representation(batches=Listed({"input_ids": ids, "attention_mask": mask}), **options)
        found = [r for r in records_of(given, model) if r.metric == "prompt_entropy"]
        assert {(r.tags["drop_first"], r.n, r.tags.get("num_undefined")) for r in found} == {(0, 2, 1), (4, 1, 2)}
        assert {r.tags["normalization"] for r in found} == {"raw", "maxEntropy"}
    studies = PromptStudies(
        batches=Listed({"input_ids": ids, "attention_mask": mask}), studies=("repetition",), p=(0.0,), drop_first=(0,)
    )
    assert {(r.n, r.tags["num_undefined"]) for r in records_of(studies, model)} == {(2, 1)}
