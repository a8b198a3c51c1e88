"""Invariance on a small model, against the same numbers from separately captured states of each view."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import Invariance
from lit_layers.data import GivenTexts, make_views
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.functional.entropy import dime, infonce, lidar
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2
from tests.support.measured import records_of

TEXTS = [text for text, _ in labelled(24)]
LAYERS = (0, 1, 2, 3)
OPTIONS: dict[str, Any] = {"num_views": 3, "max_tokens": 30, "num_halves": 3, "permutations": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder):
    return saved_gpt2(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def records(model, folder):
    return records_of(Invariance(texts=GivenTexts(TEXTS), tokenizer=str(folder), **OPTIONS), model)


@pytest.fixture(scope="module")
def states(model, folder):
    """Return states (layers + 1, tokens, dim) by view and text, without and with the final norm."""
    tokenizer = load_tokenizer(str(folder)).tokenizer
    ids = [[tokenizer.encode(text).ids[:30] for text in view] for view in make_views(TEXTS, 3).texts]
    batches = [[{"input_ids": torch.tensor([row])} for row in view] for view in ids]
    return [[states_of_each_prompt(model, view, final_norm=norm) for view in batches] for norm in (False, True)]


def find(records, metric, layer=None, **tags):
    if metric.startswith("lidar"):
        tags["views"] = 3
    elif metric.startswith("dime"):
        tags["permutations"] = 2
    (record,) = [r for r in records if (r.metric, r.layer, r.tags) == (metric, layer, tags)]
    return record


def vectors(views, layer, pool):
    return torch.from_numpy(np.array([[pool(text[layer]) for text in view] for view in views]))


def centered_unit_mean(rows):
    rows = rows - rows.mean(0)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(0)


def test_each_layer_has_the_metrics_of_its_mean_pooled_views(records, states):
    found = {"infonce": [], "lidar": [], "lidar_rank": [], "dime": []}
    for layer in LAYERS:
        rows = vectors(states[0], layer, lambda tokens: tokens.mean(0))
        found["infonce"].append(infonce(rows[0], rows[1]))
        found["lidar"].append(lidar(rows.transpose(0, 1)))
        found["lidar_rank"].append(lidar(rows.transpose(0, 1), output="rank"))
        found["dime"].append(dime(rows[0], rows[1], permutations=2))
        within = (rows - rows.mean(0)).square().sum() / (3 * 24 * 32 * 1e-4)
        record = find(records, "lidar_within_over_delta", layer)
        assert record.value == pytest.approx(within.item(), rel=1e-9)
    for metric, values in found.items():
        for layer, value in [*zip(LAYERS, values, strict=True), (None, np.mean(values[1:]))]:
            near = {}
            if "lidar" in metric:
                layers = LAYERS[1:] if layer is None else [layer]
                low = sum(find(records, "lidar_within_over_delta", each).value < 10 for each in layers)
                near = {"num_layers_near_delta": low} if low else {}
            record = find(records, metric, layer, **near)
            assert record.value == pytest.approx(float(value), rel=1e-9), (metric, layer)
            assert record.n == 24
            assert record.low <= record.value <= record.high or metric in ("infonce", "dime")
            assert find(records, f"{metric}_of_half", layer, **near).n == 12
    assert find(records, "infonce_chance").value == pytest.approx(math.log(47), rel=1e-12)
    assert find(records, "infonce_chance_of_half").value == pytest.approx(math.log(23), rel=1e-12)
    fraction = find(records, "changed_fraction", num_cut=find_cut(records))
    assert fraction.value == make_views(TEXTS, 3).changed_fraction


def find_cut(records):
    return next(r.tags["num_cut"] for r in records if r.metric == "changed_fraction")


def test_the_released_preset_uses_centred_unit_tokens_of_normed_last_states(model, folder, states):
    analysis = Invariance(texts=GivenTexts(TEXTS), tokenizer=str(folder), preset="released_code", **OPTIONS)
    records = records_of(analysis, model)
    tags = {"preset": "released_code"}
    for layer in LAYERS:
        rows = vectors(states[1], layer, centered_unit_mean)
        is_near = find(records, "lidar_within_over_delta", layer, **tags).value < 10
        near = {"num_layers_near_delta": 1} if is_near else {}
        value = find(records, "infonce", layer, **tags).value
        assert value == pytest.approx(infonce(rows[0], rows[1], unit=False).item(), rel=1e-9)
        value = find(records, "dime", layer, **tags).value
        assert value == pytest.approx(
            dime(rows[0], rows[1], unit=False, side="smaller", permutations=2).item(), abs=1e-9
        )
        value = find(records, "lidar", layer, **tags, **near).value
        assert value == pytest.approx(lidar(rows.transpose(0, 1)).item(), rel=1e-9)


def test_the_loss_between_views_is_reported_with_its_chance_and_share(model, folder, states):
    options = {**OPTIONS, "num_halves": 0, "form": "cross"}
    records = records_of(Invariance(texts=GivenTexts(TEXTS), tokenizer=str(folder), **options), model)
    chance = find(records, "infonce_chance", form="cross").value
    assert chance == pytest.approx(math.log(24), rel=1e-12)
    for layer in LAYERS:
        rows = vectors(states[0], layer, lambda tokens: tokens.mean(0))
        loss = infonce(rows[0], rows[1], form="cross").item()
        assert find(records, "infonce", layer, form="cross").value == pytest.approx(loss, rel=1e-9)
        assert find(records, "infonce_share", layer, form="cross").value == pytest.approx(1 - loss / chance, rel=1e-9)


def test_the_released_preset_has_its_own_form_of_alpha_2(model, folder, states):
    options = {**OPTIONS, "num_halves": 0, "alpha": 2.0}
    analysis = Invariance(texts=GivenTexts(TEXTS), tokenizer=str(folder), preset="released_code", **options)
    records = records_of(analysis, model)
    rows = vectors(states[1], 2, centered_unit_mean)
    (found,) = [record for record in records if (record.metric, record.layer) == ("lidar", 2)]
    means = rows.mean(0) - rows.mean((0, 1))
    scatter = (rows - rows.mean(0)).flatten(0, 1)
    within = scatter.T @ scatter / len(scatter) + 1e-4 * torch.eye(32, dtype=torch.float64)
    lambdas = torch.linalg.eigvals(torch.linalg.solve(within, means.T @ means / 24)).real
    assert found.value == pytest.approx(-math.log(lambdas.square().sum().item() / 32**2), rel=1e-8)


def test_a_layer_with_equal_prompts_has_no_value_and_the_other_layers_keep_theirs(tmp_path):
    model = saved_bert(tmp_path)
    analysis = Invariance(texts=GivenTexts(TEXTS), tokenizer=str(tmp_path), pooling="cls", **OPTIONS)
    records = records_of(analysis, model)
    for metric in ("lidar", "lidar_rank"):
        assert {record.layer for record in records if record.metric == metric} == {None, 1, 2, 3}
    infonce_at_0 = next(r for r in records if (r.metric, r.layer) == ("infonce", 0))
    assert infonce_at_0.value == pytest.approx(math.log(47), rel=1e-9)
    assert infonce_at_0.tags == {"pooling": "cls"}


def test_other_options_are_tagged_and_change_the_numbers(model, folder, records):
    options = {"temperature": 0.5, "states": "normed", "delta": 0.01, "unit": False}
    analysis = Invariance(texts=GivenTexts(TEXTS), tokenizer=str(folder), **{**OPTIONS, "num_halves": 0}, **options)
    others = records_of(analysis, model)
    found = find(others, "infonce", 2, temperature=0.5, states="normed", unit=0)
    assert found.value != find(records, "infonce", 2).value
    assert found.low is None
    assert find(others, "dime", 2, states="normed", unit=0).n == 24
    (rank,) = [record for record in others if (record.metric, record.layer) == ("lidar_rank", 2)]
    assert rank.tags.items() >= {"delta": 0.01, "states": "normed"}.items()


def test_hashes_depend_on_texts_and_options_and_the_config_contains_no_text(folder):
    def make(texts=TEXTS, **options):
        return Invariance(texts=GivenTexts(texts), tokenizer=str(folder), **(OPTIONS | options))

    plain = make()
    assert TEXTS[0] not in json.dumps(plain.config())
    assert plain.config_hash() == make().config_hash() != make(seed=1).config_hash()
    assert plain.data_hash() != make(TEXTS[1:]).data_hash()
    assert plain.data_hash() != make(seed=1).data_hash()
    assert plain.tokenizer_hash()
