"""Blocks in bfloat16, against the model's own modules under autocast; their reported difference, against float64."""

import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_layers import plots, records
from lit_layers.analyses import Interventions, Lens, Trajectory, base, readout_scores
from lit_layers.analyses.statistics import rounding_records
from lit_layers.cli.main import main
from lit_layers.functional.block_schedules import parse_schedule
from lit_layers.identity import split_shown
from lit_layers.measuring.one_model import measure
from lit_layers.models.copies import BFloat16View
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, Record
from lit_layers.tasks import mteb_scores
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task
from tests.support.benchmark_rows import tiny_causal_model, write_tasks, write_tokenizer
from tests.support.labelled_texts import saved_gpt2
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import EVERY, tiny, tiny_batch
from tests.tasks.tiny_tasks import saved_model, task, write_tiny_data
from tests.test_undisturbed import train

BATCHES = [tiny_batch("gpt2", batch=3, tokens=9), tiny_batch("gpt2", batch=3, tokens=7, seed=2)]
CHECKED = 4  # prompts: the last one is in the second batch
BOTH = ("bf16_difference", "bf16_largest_difference")


@pytest.fixture(autouse=True)
def few_checked(monkeypatch) -> None:
    monkeypatch.setattr(readout_scores, "NUM_CHECKED", CHECKED)


def autocast_blocks(model):
    """Make the model's own blocks run under autocast, without copies and without rounding their weights first."""
    for block in LayeredModel(model).blocks:
        block.forward = torch.autocast("cpu", torch.bfloat16)(block.forward)
    return model


def values(found, metric: str, **tags) -> dict[int | None, float]:
    return {r.layer: r.value for r in found if r.metric == metric and tags.items() <= r.tags.items()}


SOME = ("gpt2", "bert_classifier", "vit")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [SOME, pytest.param(EVERY, marks=pytest.mark.nightly)], ids=["some", "every"])
def test_blocks_compute_as_under_autocast_and_the_rest_in_float32(names):
    for name in names:
        model = tiny(name)
        batch = tiny_batch(name, padding=None if "pixel" in name else "right")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        view = BFloat16View(LayeredModel(model))
        rounded, full = view.trajectory(batch), LayeredModel(model).trajectory(batch)
        readout = view.readout(rounded.hidden)
        assert (rounded.hidden.dtype, readout.dtype, view.dtype) == (torch.float32,) * 3, name
        shared = {parameter.data_ptr() for parameter in model.parameters()}
        kinds = {parameter.data_ptr() in shared: parameter.dtype for parameter in view.model.parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16}, name
        assert 1e-6 < (rounded.hidden - full.hidden).norm() / full.hidden.norm() < 0.05, name
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        reference = LayeredModel(autocast_blocks(model)).trajectory(batch)
        assert torch.equal(rounded.hidden, reference.hidden), name  # weights rounded once, or at each use
        assert torch.equal(rounded.logits, reference.logits), name


def test_the_copy_is_freed_with_its_view_and_copies_only_matrices():
    model = tiny("gpt2")
    gc.disable()
    try:
        view = BFloat16View(LayeredModel(model))
        copy = weakref.ref(view.model)
        del view
        assert copy() is None
    finally:
        gc.enable()


def prompt_losses(model, order=(1, 2, 3)) -> np.ndarray:
    """Return the mean loss of every prompt, from the model's own modules and a log-softmax in float64."""
    losses = []
    for ids in (batch["input_ids"] for batch in BATCHES):
        with torch.no_grad():
            hidden = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
            for number in order:
                hidden = model.transformer.h[number - 1](hidden)
            logits = model.lm_head(model.transformer.ln_f(hidden))[:, :-1].double()
        losses += [F.cross_entropy(row, target[1:]).item() for row, target in zip(logits, ids, strict=True)]
    return np.array(losses)


@pytest.mark.parametrize("kind", [Lens, Interventions])
def test_the_reported_difference_is_that_of_losses_in_float64(kind):
    options = {"variants": ("skip_one",)} if kind is Interventions else {}
    found = list(records_of(kind(batches=Listed(*BATCHES), dtype="bfloat16", **options), LayeredModel(tiny("gpt2"))))
    assert {r.tags["dtype"] for r in found} == {"bfloat16"}
    metric, tags = ("variant_loss", {"variant": "skip_one"}) if options else ("logit_lens_loss", {})
    orders = {2: (1, 3)} if options else {1: (1,), 3: (1, 2, 3)}
    for layer, order in orders.items():
        rounded = prompt_losses(autocast_blocks(tiny("gpt2")), order)
        differences = np.abs(rounded - prompt_losses(tiny("gpt2", torch.float64), order))[:CHECKED]
        stated = [values(found, name, **tags)[layer] for name in BOTH]
        assert stated == pytest.approx([differences.mean(), differences.max()], rel=1e-3, abs=3e-6)  # of float32
        whole = np.average(rounded, weights=[8, 8, 8, 6, 6, 6])
        assert values(found, metric, **tags)[layer] == pytest.approx(whole, rel=1e-6)


def test_scores_of_a_task_are_those_under_autocast(tmp_path):
    write_tasks(tmp_path / "data" / "benchmarks")
    write_tokenizer(tmp_path / "tokenizer")
    model = tiny_causal_model(blocks=3, seed=3)
    options = {"tokenizer": str(tmp_path / "tokenizer"), "results": tmp_path / "results", "folder": tmp_path / "data"}
    analysis = BenchmarkScores(task="arc_challenge", variants=("skip_one",), dtype="bfloat16", limit=3, **options)
    found = list(records_of(analysis, LayeredModel(model)))
    assert list(records_of(analysis, LayeredModel(model))) == found  # from its files
    assert {r.tags["dtype"] for r in found} == {"bfloat16"}
    rows, network = local_task("arc_challenge", tmp_path / "data"), autocast_blocks(tiny_causal_model(blocks=3, seed=3))
    with running_order(network, parse_schedule("1 3", 3)):
        scored = LmEvalScorer(rows, options["tokenizer"], limit=3, max_length=600).score(network)
    expected = np.mean(scored.values["task_score_norm"])
    assert values(found, "task_score_norm", variant="skip_one")[2] == pytest.approx(expected)
    plain = list(records_of(replace(analysis, dtype="float32"), LayeredModel(model)))
    assert not any("dtype" in r.tags for r in plain)


@pytest.mark.soak
def test_embeddings_of_each_precision_have_their_own_cache(tmp_path):
    data, model = write_tiny_data(tmp_path / "data"), tmp_path / "model"
    view = saved_model(model)
    plain = list(records_of(task("STSBenchmark", data, model, tmp_path / "a"), view))
    found = list(records_of(task("STSBenchmark", data, model, tmp_path / "a", dtype="bfloat16"), view))
    alone = list(records_of(task("STSBenchmark", data, model, tmp_path / "b", dtype="bfloat16"), view))
    assert found == alone
    assert {r.tags.get("dtype") for r in plain} == {None}
    assert list(records_of(task("STSBenchmark", data, model, tmp_path / "a"), view)) == plain


def test_training_with_bfloat16_analyses_ends_in_the_same_bits():
    lens = Lens(batches=Listed(*BATCHES), dtype="bfloat16")
    alone, beside = train(None, steps=2), train(lambda model: list(records_of(lens, model)), steps=2)
    assert beside["bits"] == alone["bits"]
    assert all(map(torch.equal, beside["moments"], alone["moments"]))
    assert {measurement.error for measurement in beside["measurements"]} == {None}


def test_float32_has_another_hash_and_analyses_that_need_float32_are_refused_by_name(tmp_path, capsys):
    data = Listed(*BATCHES)
    assert Lens(batches=data).config_hash() != Lens(batches=data, dtype="bfloat16").config_hash()
    wrong = measure(tiny("gpt2"), Lens(batches=data, dtype="float16"), run="r", step=0)  # pyright: ignore
    assert "expected dtype to be one of ['float32', 'bfloat16'], got 'float16'" in str(wrong.error)
    with pytest.raises(base.InputError, match="trajectory"):
        base.to_bfloat16(Trajectory(batches=data))
    saved_gpt2(tmp_path / "model")
    command = ["analyze", str(tmp_path / "model"), "--root", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(command) == 2
    assert "dtype: trajectory is measured in float32 or wider" in capsys.readouterr().err
    assert not Path(tmp_path / "out" / "measurements.jsonl").exists()


def task_scores(name: str, value: float, dtype: dict[str, str], **variant) -> Measurement:
    """Return the measurement of a task's score at two layers, or of a variant."""
    about = {"domain": "sts", "score": "s", "pooling": "mean", "states": "resid"}
    analysis, metric = ("intervene", "normalized_score") if variant else ("mteb", "main_score")
    tags = {"task": name, **dtype, **(variant or about)}
    made = [Record(metric=metric, value=value, layer=n, n=5, tags=tags) for n in ([None] if variant else [0, 1])]
    place = {"run": "r", "step": None, "tokens": None, "analysis": f"{analysis}/{name}", "seconds": 1.0}
    return Measurement(**place, records=made, provenance={"config_hash": f"{name}{dtype}"})


def test_an_undefined_difference_reports_the_number_of_texts():
    found = [*rounding_records(torch.tensor([torch.nan, torch.inf]), "loss", layer=3)]
    assert [(r.metric, r.layer, r.n, r.tags["num_undefined"]) for r in found] == [(name, 3, 0, 2) for name in BOTH]
    assert all(math.isnan(r.value) for r in found)
    assert [*rounding_records(torch.tensor([]), "loss")] == []
    of_all, _ = rounding_records(torch.tensor([0.1, 0.2]), "loss", tags={"num_undefined": 1, "split": "test"})
    assert of_all.tags == {"dtype": "bfloat16", "of": "loss", "split": "test"}  # not the count of the other number


def test_no_curve_mean_or_median_is_over_two_precisions():
    rounded, skip = {"dtype": "bfloat16"}, {"variant": "skip", "middle": 2}
    measured = [task_scores("A", 0.2, {}), task_scores("B", 0.4, {}), task_scores("C", 0.9, rounded)]
    means = {
        str(each.options): each.curve.set_index("layer")["average"][1]
        for each in mteb_scores.averages(records.frame(measured))
    }
    assert means == {"{}": pytest.approx(0.3), str(rounded): pytest.approx(0.9)}
    drawn = plots.add_task_means(records.frame(measured)).frame
    assert sorted(set(drawn["value"].round(9))) == [0.3, 0.9]
    variants = [task_scores(name, value, {}, **skip) for name, value in (("A", 0.2), ("B", 0.4))]
    for others in (["C"], ["D", "C"]):  # two tasks of each precision: float32 is taken
        of_others = [task_scores(name, 0.9, rounded, **skip) for name in others]
        both = plots.add_task_medians(records.frame([*of_others, *variants]))
        medians = both.frame[both.frame["analysis"] == "intervene/median_over_tasks"]
        assert medians["value"].tolist() == pytest.approx([0.3])
        assert "Not included, because of another precision: " in both.notes["intervene/median_over_tasks"]
    curve, apart = split_shown([measured[0], task_scores("A", 0.8, rounded)])
    assert (len(curve), len(apart)) == (1, 1)  # so select, pages and exports see one precision of an analysis
