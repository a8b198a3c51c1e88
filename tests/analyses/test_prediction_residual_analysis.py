"""The residual of next-token ids against scikit-learn on captured states, and its protocol."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from lit_layers.analyses.probes.next_token_residual import MAX_BYTES, NextTokenResidual
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import prompts_of, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import DIM, LAYERS, VOCAB, tiny, tiny_batch

BATCHES = [
    tiny_batch("gpt2", batch=4, tokens=30, padding="left", seed=1),
    tiny_batch("gpt2", batch=3, tokens=25, seed=2),
    tiny_batch("gpt2", batch=5, tokens=28, padding="right", seed=3),
    {"input_ids": torch.tensor([[7, 9], [5, 5]]), "attention_mask": torch.tensor([[1, 0], [1, 1]])},
]
NUM_TEXTS = 4 + 3 + 5 + 1  # the text of one token has nothing to predict


def run(model, batches=BATCHES, **options):
    options = {"num_halves": 0} | options
    records = records_of(NextTokenResidual(batches=Listed(*batches), **options), model)
    keys = [(r.metric, r.layer, *(("control",) if "control" in r.tags else ())) for r in records]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, records, strict=True))


def rows_of(model, *, final_norm=False):
    """Return states (layers + 1, rows, dim), next tokens and text index of each row, from single texts."""
    states, targets, texts = [], [], []
    found = states_of_each_prompt(model, BATCHES, final_norm=final_norm)
    for ids, prompt in zip(prompts_of(BATCHES), found, strict=True):
        if len(ids) > 1:
            texts += [len(set(texts))] * (len(ids) - 1)
            states.append(prompt[:, :-1])
            targets += ids[1:].tolist()
    return np.concatenate(states, axis=1), np.array(targets), np.array(texts)


def layer_norm(rows, eps=1e-5):
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + eps)


def fitted_texts(num_texts, count, seed):
    draws = [np.random.default_rng([seed, number]).random() for number in range(num_texts)]
    return set(np.argsort(draws)[:count].tolist())


def test_every_record_equals_that_of_scikit_learn_on_states_of_the_running_model(model):
    records = run(model, split=0.6, seed=3)
    states, targets, texts = rows_of(model)
    assert len(set(texts)) == NUM_TEXTS
    fitted = np.isin(texts, list(fitted_texts(NUM_TEXTS, 8, seed=3)))  # 0.6 x 13
    relabelled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).numpy()[targets]
    size = len(targets)
    for layer in range(LAYERS + 1):
        rows = layer_norm(states[layer])
        rank = np.linalg.matrix_rank(rows - rows.mean(0))
        assert records["rank", layer].value == rank == DIM - 1
        for ids, control in ((targets, ()), (relabelled, ("control",))):
            value = 1 - LinearRegression().fit(rows, ids).score(rows, ids)
            held_out = 1 - LinearRegression().fit(rows[fitted], ids[fitted]).score(rows[~fitted], ids[~fitted])
            adjusted = value * (size - 1) / (size - 1 - rank)
            for metric, expected, n in (
                ("prediction_residual", value, size),
                ("adjusted", adjusted, size),
                ("held_out", held_out, (~fitted).sum()),
            ):
                record = records[metric, layer, *control]
                assert record.value == pytest.approx(expected, rel=1e-7)
                assert record.n == n
                control_tag = {"control": "relabelled_vocabulary"} if control else {}
                assert record.tags == {"num_texts": NUM_TEXTS} | control_tag
    assert len(records) == 7 * (LAYERS + 1) + 3


def test_the_exponential_law_is_fitted_to_layers_1_to_the_last(model):
    records = run(model)
    logs = [math.log10(records["prediction_residual", layer].value) for layer in range(1, LAYERS + 1)]
    slope, _ = np.polyfit(range(LAYERS), logs, 1)
    assert records["residual_ratio", None].value == pytest.approx(10**slope)
    pearson = np.corrcoef(range(LAYERS), logs)[0, 1]
    assert records["pearson", None].value == pytest.approx(pearson)
    assert records["r_squared", None].value == pytest.approx(pearson**2)
    assert records["residual_ratio", None].n == NUM_TEXTS
    held_out = ~np.isin(rows_of(model)[2], list(fitted_texts(NUM_TEXTS, 10, seed=0)))
    assert records["held_out", 1].n == held_out.sum(), "0.8 x 13 texts are fitted"


def test_intervals_are_the_spread_of_random_halves_of_the_texts(model):
    batches = [tiny_batch("gpt2", batch=6, tokens=20, seed=seed) for seed in (1, 2)]
    records = run(model, batches, num_halves=5, seed=2)
    states = np.concatenate(states_of_each_prompt(model, batches), axis=1)
    keep = np.arange(states.shape[1]) % 20 != 19
    states, texts = states[:, keep], np.repeat(np.arange(12), 19)
    targets = torch.cat([batch["input_ids"][:, 1:].flatten() for batch in batches]).numpy()
    curves = []
    for number in range(5):
        half = np.isin(texts, np.random.default_rng([2, number]).permutation(12)[:6])
        rows = [layer_norm(layer[half]) for layer in states]
        curves.append([1 - LinearRegression().fit(r, targets[half]).score(r, targets[half]) for r in rows])
    curves = np.array(curves)  # (halves, layers + 1)
    freed = curves * (6 * 19 - 1) / (6 * 19 - DIM)
    slopes = [10 ** np.polyfit(range(LAYERS), np.log10(curve[1:]), 1)[0] for curve in curves]
    for metric, layer, half_values in (
        ("prediction_residual", 2, curves[:, 2]),
        ("adjusted", 2, freed[:, 2]),
        ("residual_ratio", None, np.array(slopes)),
    ):
        record, half = records[metric, layer], records[f"{metric}_of_half", layer]
        low, high = np.quantile(half_values, [0.025, 0.975]) - half_values.mean()
        assert record.stderr == half.stderr == pytest.approx(half_values.std(ddof=1))
        assert (record.low, record.high) == pytest.approx((record.value + low, record.value + high))
        assert half.value == pytest.approx(half_values.mean())
        assert (half.low, half.high) == pytest.approx((half_values.mean() + low, half_values.mean() + high))
        assert record.tags == {"num_texts": 12, "num_half_texts": 6}
    assert records["held_out", 2].low is None
    assert records["prediction_residual", 2, "control"].low is None


def test_after_the_final_norm_the_last_layer_is_not_normed_again_and_fits_are_equal(model):
    plain, with_norm = run(model), run(model, states="hf")
    states, targets, _ = rows_of(model, final_norm=True)
    value = 1 - LinearRegression().fit(states[-1], targets).score(states[-1], targets)
    assert with_norm["prediction_residual", LAYERS].value == pytest.approx(value, rel=1e-7)
    for layer in range(LAYERS + 1):  # an invertible map of normed states changes no fit
        assert with_norm["prediction_residual", layer].value == pytest.approx(
            plain["prediction_residual", layer].value, rel=1e-6
        )
        assert with_norm["prediction_residual", layer].tags["states"] == "hf"


@pytest.mark.parametrize(("name", "centred", "eps"), [("llama", 0, 1e-6), ("gpt_neox", 1, 1e-5), ("olmo2", 0, 1e-5)])
def test_other_families_use_their_own_norm(name, centred, eps):
    model = tiny(name)  # transformers' masks of some families need float32
    records, view = run(model), LayeredModel(model)
    rows, targets = [], []
    for ids in prompts_of(BATCHES):
        rows.append(view.trajectory({"input_ids": ids[None]}).hidden[:, 0, :-1].double().numpy())
        targets += ids[1:].tolist()
    for layer in (0, 2):
        states = np.concatenate(rows, axis=1)[layer]
        states -= centred * states.mean(-1, keepdims=True)
        normed = states / np.sqrt((states**2).mean(-1, keepdims=True) + eps)
        value = 1 - LinearRegression().fit(normed, targets).score(normed, targets)
        assert records["prediction_residual", layer].value == pytest.approx(value, rel=1e-4)


def test_a_linearly_predictable_token_leaves_little_residual_and_its_relabelling_more():
    model = tiny("gpt2", torch.float64, n_embd=32)
    with torch.no_grad():  # embeddings on a line: the id itself is a feature
        model.transformer.wte.weight[:, 0] = torch.arange(VOCAB, dtype=torch.float64) * 10
        model.transformer.wte.weight[:, 1], model.transformer.wte.weight[:, 2] = 1e6, -1e6  # all rows have one scale
    generator = torch.Generator().manual_seed(0)
    rises = torch.randint(0, VOCAB - 26, (12, 1), generator=generator) + torch.arange(25)  # token + 1
    records = run(model, [{"input_ids": rises}])
    assert records["prediction_residual", 0].value < 1e-5
    assert records["held_out", 0].value < 1e-5
    assert records["prediction_residual", 0, "control"].value > 0.1


def test_there_are_no_intervals_if_halves_have_too_few_texts_or_rows(model):
    few = run(model, [tiny_batch("gpt2", batch=3, tokens=30)], num_halves=20)
    narrow = run(model, [tiny_batch("gpt2", batch=4, tokens=12)], num_halves=20)  # halves of 22 rows for width 32
    for records in (few, narrow):
        assert all(record.low is None for record in records.values())
        assert ("prediction_residual", 1) in records


def test_a_model_of_two_blocks_has_no_exponential_law():
    found = run(tiny("gpt2", torch.float64, n_layer=2))
    assert {metric for metric, *_ in found} == {"prediction_residual", "adjusted", "held_out", "rank"}


def test_too_few_texts_or_positions_are_refused_in_one_sentence(model):
    for batches, message in (
        ([tiny_batch("gpt2", batch=1, tokens=40)], "expected at least 2 texts, .*, got 1"),
        (
            [tiny_batch("gpt2", batch=3, tokens=10)],
            "27 positions are fitted exactly by states of width 32: give many times 33 positions",
        ),
        ([{"input_ids": torch.tensor([[4], [5]])}], "no text has a next token to predict"),
    ):
        with pytest.raises(InputError, match=f"^prediction_residual: {message}"):
            NextTokenResidual(batches=Listed(*batches)).check(LayeredModel(model))


def test_states_that_would_not_fit_in_memory_are_refused_before_any_forward_pass(model, monkeypatch):
    monkeypatch.setattr("lit_layers.analyses.probes.next_token_residual.MAX_BYTES", 50_000)
    monkeypatch.setattr(LayeredModel, "trajectory", None)
    positions = (29 + 27 + 25 + 23) + 3 * 24 + (27 + 25 + 23 + 21 + 19) + 1
    share = 50_000 / (positions * DIM * (LAYERS + 1) * 8)
    with pytest.raises(InputError, match=f"the states of {positions} positions take 0.0 GB: give {share:.0%} of the"):
        run(model)
    assert MAX_BYTES >= 25 * 1024 * 4 * 78_000
