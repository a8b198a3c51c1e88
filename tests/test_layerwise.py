"""Measure every layer of a model in one call: names, table, pictures, comparisons, errors."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import Tokenizer

import lit_layers
from lit_layers import layerwise, measure, records
from lit_layers.analyses import Lens, StateMetric, Trajectory, metric_names
from lit_layers.data.batches import GivenBatches, encode_texts
from lit_layers.errors import InputError
from lit_layers.functional import anisotropy
from lit_layers.metrics import METRICS
from lit_layers.models.build import causal_lm, save, vit
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.support.random_text import RandomText
from tests.support.tiny_training import VOCABULARY


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return causal_lm("gpt2", n_layer=3, n_embd=64, n_head=2, n_positions=16, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory) -> Path:
    """A tokenizer of the passages themselves."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([layerwise.DEFAULT_TEXTS.read_text()], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    return list(RandomText(tokens=10))


@pytest.fixture(scope="module")
def result(model, batches) -> layerwise.LayerResult:
    return lit_layers.layers(model, ["prompt_entropy", "lens"], batches=batches, name="tiny")


def test_the_table_has_the_metrics_of_analyses_or_only_the_named_metric(result, model, batches):
    lens = measure(model, Lens(batches=batches), run="tiny", step=None)
    assert set(result.frame["metric"]) == {"prompt_entropy"} | {record.metric for record in lens.records}
    table = result.frame.query("metric == 'logit_lens_loss' and layer == 2")
    assert table["value"].tolist() == [r.value for r in lens.records if r.metric == "logit_lens_loss" and r.layer == 2]
    assert records.frame(lens).equals(records.frame([lens]))


def test_a_notebook_shows_a_picture_and_an_analysis_is_drawn_by_its_first_metric(result):
    assert repr(result).startswith("LayerResult(tiny: representation, lens; 3 blocks, ")
    assert repr(result) in result._repr_svg_()
    single = result.plot("prompt_entropy")._repr_mimebundle_()
    assert single["image/svg+xml"].lstrip().startswith("<svg")
    assert single["application/vnd.vegalite.v6+json"]["title"]["text"]
    assert result.plot("lens").title == result.plot("logit_lens_loss").title
    assert result.plot("representation").title == result.plot("prompt_entropy").title  # the requested metric


@pytest.mark.soak
def test_every_metric_that_was_measured_can_be_drawn(model, batches):
    names = ["trajectory", "coupling", "layer_similarity", "paths_in_plane", "token_coupling", "attention"]
    result = lit_layers.layers(model, names, batches=[batches[0]["input_ids"][:2]], name="tiny")
    for metric in dict.fromkeys(result.frame["metric"]):
        drawn = result.plot(metric)
        assert all(chart.title for chart in getattr(drawn, "charts", [drawn])), metric
    assert "coupling_by_distance" in result.metrics
    assert result.plot("layer_cka").cells is not None
    assert result.plot("token_coupling_pair").cells is not None
    assert len(result.plot("singular_value").series) == 3  # a line a block
    for k in {*result.frame.query("metric == 'coupling_pair'")["k"]}:
        assert f"k = {int(k)}" in result.plot("coupling_pair", tags={"k": int(k)}).title


def test_a_metric_of_whole_models_has_a_row_for_each_with_its_interval(model, batches):
    result = lit_layers.layers(model, ["equidistance"], batches=batches, name="one")
    both = result.compare(lit_layers.layers(model, ["equidistance"], batches=batches, name="two"))
    chart = both.plot("equidistance")
    assert [*chart.x.labels.values()] == ["one", "two"]
    (marks,) = [series for series in chart.series if series.mark]
    measured = both.frame.query("metric == 'equidistance'")
    assert [*marks.x] == [0, 1]
    assert marks.y == pytest.approx(measured["value"].tolist(), rel=1e-3)
    assert marks.low == pytest.approx(measured["low"].tolist(), rel=1e-3)


def test_two_models_can_be_compared(result, model, batches):
    deeper = causal_lm("gpt2", n_layer=4, n_embd=64, n_head=2, n_positions=16, vocab_size=VOCABULARY)
    other = lit_layers.layers(deeper, ["prompt_entropy"], batches=batches, name="tiny")
    both = result.compare(other)
    assert set(both.frame["run"]) == {"tiny", "tiny (2)"}
    assert len(both.plot("prompt_entropy").series) >= 2
    assert len(both.frame) == len(result.frame) + len(other.frame)
    alone = lit_layers.layers(deeper, ["line_shape_score"], batches=batches)
    with pytest.raises(InputError, match="compare: expected an analysis that was made of both"):
        result.compare(alone)
    of_maps = lit_layers.layers(model, ["layer_cosine"], batches=batches, name="tiny")
    charts = of_maps.compare(of_maps).plot("layer_cosine").charts
    assert [chart.title.split(":")[0] for chart in charts] == ["tiny", "tiny (2)"]


def test_a_mistake_is_refused_in_one_sentence(model, batches):
    for options, said in (
        ({"metrics": ["coupling", "prompt_entropi"]}, "unknown name 'prompt_entropi'; did you mean prompt_entropy"),
        ({"metrics": "lens"}, "expected a list of names"),
        ({"metrics": []}, "expected a list of names"),
        ({"batches": None, "tokenizer": "t", "texts": "one text"}, "texts: expected a list of texts, got 'one text'"),
        (
            {"batches": None, "tokenizer": "t", "texts": ["a", "\ud800b"]},
            "text 1: expected letters, got half of a pair",
        ),
        ({"texts": ["a"]}, "texts and batches: expected one of them"),
        ({"batches": None}, "GPT2LMHeadModel in memory carries none"),
        ({"batches": "some text"}, "batches: expected `Batches`, or a DataLoader"),
    ):
        with pytest.raises(InputError, match=said):
            lit_layers.layers(**{"model": model, "metrics": ["lens"], "batches": batches, **options})
    with pytest.raises(InputError, match=r"analysis: expected one, such as Lens\(batches=data\), got a str"):
        measure(model, "lens", run="r", step=None)


def test_an_error_of_an_analysis_is_raised(model, batches, monkeypatch):
    monkeypatch.setattr(Trajectory, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lit_layers.layers(model, ["trajectory"], batches=batches)
    assert measure(model, Trajectory(batches=batches), run="r", step=None).error.startswith("ZeroDivisionError")


def test_texts_are_cut_to_the_models_length_and_default_texts_are_logged(tmp_path, bpe_folder, caplog):
    network = causal_lm("gpt2", n_layer=2, n_embd=64, n_head=2, n_positions=16, vocab_size=2048)
    save(network, tmp_path / "small", bpe_folder)
    with caplog.at_level(logging.WARNING):
        default = lit_layers.layers(tmp_path / "small", ["trajectory"])
    assert "it reads 16 passages of English novels and speeches, of up to 16 tokens" in caplog.text
    caplog.clear()
    passages = layerwise.DEFAULT_TEXTS.read_text().strip().split("\n\n")
    given = lit_layers.layers(str(tmp_path / "small"), ["trajectory"], texts=passages)
    assert not caplog.text
    assert given.measurements[0].records == default.measurements[0].records
    ids = list(encode_texts(str(tmp_path / "small"), passages, max_tokens=16).split(8))
    mine = measure(load(tmp_path / "small"), Trajectory(batches=ids), run="r", step=None)
    assert given.measurements[0].records == mine.records
    assert set(given.frame["run"]) == {"small"}


def test_a_vision_model_reads_images():
    model = vit("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=3, num_heads=2, num_classes=3)
    with pytest.raises(InputError, match="sees images: give a DataLoader"):
        lit_layers.layers(model, ["trajectory"])
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert "line_shape_score" in lit_layers.layers(model, ["trajectory"], batches=[(images, torch.arange(4))]).metrics


@pytest.mark.soak
def test_every_metric_name_is_measured_by_its_analysis():
    model = causal_lm("gpt2", n_layer=3, n_embd=24, n_head=2, n_positions=16, vocab_size=VOCABULARY)
    ids = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(2))
    of_metrics = metric_names.metric_names()
    of_states = {name for name, row in METRICS.items() if row.of_states}  # each is a separate analysis
    assert set(of_metrics.values()) - of_states == set(metric_names.NAMES)
    # `minimal_pairs` reads its own sentences and no batches: tests/analyses/test_minimal_pairs.py tests it.
    for name, kind in ((name, kind) for name, kind in metric_names.NAMES.items() if name != "minimal_pairs"):
        options = {"k": [4]} if name in ("coupling", "token_coupling") else {}
        measurement = measure(model, kind(batches=[ids], **options), run="r", step=None)
        given = {record.metric for record in measurement.records}
        assert {metric for metric, of in of_metrics.items() if of == name} <= given, (name, measurement.error)


def test_a_row_with_a_function_of_states_is_enough_to_measure_it(model, batches, monkeypatch):
    monkeypatch.setitem(METRICS, "anisotropy", replace(METRICS["anisotropy"], of_states=True))
    result = lit_layers.layers(model, ["anisotropy"], batches=batches)
    (measurement,), given = result.measurements, GivenBatches(batches)
    assert measurement.provenance["config_hash"] == StateMetric(metric=anisotropy, batches=given).config_hash()
    assert [record.layer for record in measurement.records] == [*range(LayeredModel(model).num_layers + 1), None]
