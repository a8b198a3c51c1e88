"""A function of states as an analysis: numbers of NumPy in float64, undefined prompts, recipes and refusals."""

import inspect
import json
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers import records
from lit_layers.analyses import StateMetric
from lit_layers.cli.main import main
from lit_layers.data import GivenTexts, TextBatches
from lit_layers.errors import InputError
from lit_layers.functional.entropy import effective_rank
from lit_layers.functional.state_geometry import anisotropy
from lit_layers.models import load
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import attention_of_each_prompt, states_of_each_prompt
from tests.support.every_analysis import prompts
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

LAYERS = 3


def stable_rank(states):
    """Return the stable rank of states (points, dim)."""
    return (states**2).sum() / torch.linalg.matrix_norm(states, 2) ** 2


@pytest.fixture(scope="module")
def states(model) -> list[np.ndarray]:
    """Return the states (layers + 1, tokens, dim) of each prompt, without padding."""
    return states_of_each_prompt(model, prompts().batches)


def values(records, metric="stable_rank") -> dict:
    return {record.layer: record.value for record in records if record.metric == metric}


def numpy_rank(points: np.ndarray) -> float:
    singular = np.linalg.svd(points, compute_uv=False)
    return float((singular**2).sum() / singular[0] ** 2)


@pytest.mark.parametrize("dropped", [0, 1])
def test_values_are_averaged_over_prompts_as_in_numpy(model, states, dropped):
    given = StateMetric(metric=stable_rank, batches=prompts(), drop_first=dropped)
    records = records_of(given, model)
    each = np.array([[numpy_rank(layer[dropped:]) for layer in prompt] for prompt in states])  # (prompts, layers + 1)
    found = values(records)
    assert [found[layer] for layer in range(LAYERS + 1)] == pytest.approx(each.mean(0), rel=1e-9)
    assert found[None] == pytest.approx(each[:, 1:].mean(), rel=1e-9)
    first = next(record for record in records if record.layer == 1)
    assert first.stderr == pytest.approx(each[:, 1].std(ddof=1) / len(states) ** 0.5, rel=1e-9)
    assert first.n == len(states) == 5
    assert (first.low or 0) < first.value < (first.high or 0)
    assert first.tags == ({"drop_first": 1} if dropped else {})


def test_a_metric_of_attention_is_that_of_its_outputs_and_has_no_value_at_the_embedding(model):
    records = records_of(StateMetric(metric=stable_rank, batches=prompts(), states="attention"), model)
    each = [[numpy_rank(layer) for layer in prompt] for prompt in attention_of_each_prompt(model, prompts().batches)]
    assert values(records) == pytest.approx(dict(enumerate(np.mean(each, 0), 1)) | {None: np.mean(each)}, rel=1e-9)
    with pytest.raises(InputError, match="^mine: states: expected blocks that add .* got block 1 of BertForMaskedLM"):
        StateMetric(metric=stable_rank, batches=prompts(), states="mlp", name="mine").check(LayeredModel(tiny("bert")))


def undefined_of_short(states):
    return torch.tensor(torch.nan) if len(states) < 8 else states.norm()


def test_a_prompt_without_a_value_is_left_out_and_counted(model):
    records = records_of(StateMetric(metric=undefined_of_short, batches=prompts()), model)
    counts = {(record.n, record.tags["num_undefined"]) for record in records}
    assert counts == {(3, 2)}
    short = records_of(StateMetric(metric=stable_rank, batches=prompts(), drop_first=5), model)
    assert {record.n for record in short} == {4}


def test_a_function_of_the_package_leaves_out_a_prompt_that_it_refuses(model):
    records = [*records_of(StateMetric(metric=anisotropy, batches=prompts(), drop_first=4), model)]
    assert {(record.n, record.tags["num_undefined"]) for record in records} == {(4, 1)}  # a prompt of one point
    assert all("undefined" not in record.tags for record in records)


def test_options_are_tags_and_settings_and_the_source_of_a_users_function_is_a_setting():
    text = prompts()
    plain = StateMetric(metric=effective_rank, batches=text)
    other = StateMetric(metric=effective_rank, batches=text, options={"center": True})
    assert plain.name == "effective_rank"
    assert other.tags() == {"center": 1}
    assert plain.config_hash() != other.config_hash()
    assert "source" not in plain.config()["init_args"]
    hashes = set()
    for body in ("states.norm()", "states.norm() + 1"):
        own = types.ModuleType("own_metric")
        exec(f"def norm(states):\n    return {body}\n", own.__dict__)
        hashes.add(StateMetric(metric=own.norm, batches=text).config_hash())
    assert len(hashes) == 2


def scatter(states):
    return states.std(dim=-1)


def breaks(states):
    raise RuntimeError("no luck")


def test_refusals_name_the_mistake(model):
    functions: list[tuple[Any, str]] = [
        (scatter, r"into one number.* got ValueError: shape \(64,\) from scatter on states \(64, 32\)"),
        (breaks, "got RuntimeError: no luck from breaks"),
        (lambda states: states.norm(), "metric: expected a function that has a name, got <function"),
    ]
    for metric, sentence in functions:
        with pytest.raises(InputError, match=sentence):
            StateMetric(metric=metric, batches=prompts(), name="mine").check(LayeredModel(model))


def mean_square(states):
    return (states**2).mean()


def test_a_recipe_names_a_function_by_its_import_path(tmp_path, monkeypatch, capsys):
    saved_gpt2(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "metric_of_a_user.py").write_text(inspect.getsource(mean_square))
    texts = [text for text, _ in labelled(5)]
    data = {"class_path": "lit_layers.data.GivenTexts", "init_args": {"texts": texts}}
    data = {"class_path": "lit_layers.data.TextBatches", "init_args": {"texts": data, "tokenizer": "model"}}

    def analyze(metric: str, *more: str) -> tuple[int, str]:
        spec = {"class_path": "lit_layers.analyses.StateMetric", "init_args": {"metric": metric, "batches": data}}
        (tmp_path / "recipe.yaml").write_text(json.dumps({"analyses": [spec]}))
        code = main(["analyze", "model", "--config", "recipe.yaml", "--root", "out", "--device", "cpu", *more])
        return code, capsys.readouterr().err

    code, errors = analyze("metric_of_a_user.mean_square", "--code", ".")
    assert code == 0, errors
    (found,) = records.read(tmp_path / "out" / "measurements.jsonl")
    given = StateMetric(metric=mean_square, batches=TextBatches(GivenTexts(texts), "model"))
    expected = records_of(given, load(tmp_path / "model"))
    assert values(found.records, "mean_square") == pytest.approx(values(expected, "mean_square"), rel=1e-5)
    for metric, sentence in (
        ("os.system", "os.system"),
        ("metric_of_a_user.nothing", "has no attribute 'nothing'. Got value: metric_of_a_user.nothing"),
        ("lit_layers.functional.entropy.nothing", "has no attribute 'nothing'"),
        ("nonsense", "Expected a dot import path string: nonsense"),
        ("torch.save", "a recipe names no torch.save"),
        # a function that writes to any path
        ("lit_layers.models.build.save", "but what lit_layers.functional or --code PACKAGE defines, got lit_layers"),
    ):
        code, errors = analyze(metric)
        assert code == 2, errors
        assert sentence in errors
        assert "Traceback" not in errors
