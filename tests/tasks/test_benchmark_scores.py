"""The analysis of benchmark scores: its records, its files, how it resumes, and what it refuses."""

import copy
import json
import math
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import baseline, parse_schedule, random
from lit_layers.measuring.one_model import measure
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from lit_layers.tasks import benchmark_scores as module
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task
from tests.support.benchmark_rows import tiny_causal_model
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

BLOCKS = 6


@pytest.fixture(scope="module")
def model():
    return tiny_causal_model(blocks=BLOCKS, seed=3)


@pytest.fixture
def make(folder, tmp_path):
    def make(task="arc_challenge", **options):
        options = {"variants": ("skip",), "middles": (3,), "folder": folder / "local"} | options
        return BenchmarkScores(task=task, tokenizer=str(folder / "tokenizer"), results=tmp_path / "results", **options)

    return make


def row_values(folder, model, task, schedule, data=None):
    """Return the values of a task in one order of blocks, without the analysis."""
    rows = local_task(task, data or folder / "local")
    scorer = LmEvalScorer(rows, str(folder / "tokenizer"), max_length=600, max_new_tokens=8)
    with running_order(model, schedule):
        return scorer.score(model).values


def files(analysis):
    return sorted(analysis.results.rglob("*.json"))


def scored(analysis, model):
    """Return the records, and the variants that are scored now and not read from files."""
    seen = []
    analysis.tell = seen.append
    return list(records_of(analysis, LayeredModel(model))), seen


def test_records_are_means_over_the_rows(folder, model, make):
    analysis = make(variants=("skip", "skip_one"), middles=(3,), custom=("1 (2,3) 6",))
    found = measure(model, analysis, run="r", step=1)
    assert found.error is None
    assert found.analysis == "intervene/arc_challenge"
    orders = {"baseline": "1 2 3 4 5 6", "skip": "1 2 6", "custom": "1 (2,3) 6", "skip_one": "1 3 4 5 6"}
    for variant, order in orders.items():
        values = row_values(folder, model, "arc_challenge", parse_schedule(order, BLOCKS))
        own = [r for r in found.records if r.tags.get("variant") == variant and r.layer in (None, 2)]
        for metric in ("task_score", "task_score_norm"):
            (record,) = [r for r in own if r.metric == metric]
            mean = sum(values[metric]) / 4
            assert record.value == pytest.approx(mean)
            spread = sum((value - mean) ** 2 for value in values[metric]) / 3
            assert record.stderr == pytest.approx(math.sqrt(spread / 4))
            assert record.n == 4
            assert record.tags["task"] == "arc_challenge"
    (skip,) = [r for r in found.records if r.metric == "task_score" and r.tags.get("variant") == "skip"]
    assert skip.tags == {"variant": "skip", "middle": 3, "task": "arc_challenge"}
    layers = [r.layer for r in found.records if r.metric == "task_score" and r.tags.get("variant") == "skip_one"]
    assert layers == [1, 2, 3, 4, 5, 6]
    assert found.provenance["data_hash"]


def test_the_normalized_score_is_the_share_of_the_lead_over_guessing_that_remains(folder, model, make, tmp_path):
    rows = [{"query": f"The boy has {n}", "choices": ["nuts", f"{n} dogs"], "label": 0} for n in range(8)]
    (tmp_path / "tasks.yaml").write_text("benchmark: {hellaswag: mine.jsonl}")
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    full, skipped = (
        [int(not hit) for hit in row_values(folder, model, "hellaswag", order, tmp_path)["task_score"]]
        for order in (baseline(BLOCKS), (1, 2, 6))
    )
    for num_right in (7, 5, 1):
        for number, (row, choice) in enumerate(zip(rows, full, strict=True)):
            row["label"] = choice if number < num_right else 1 - choice
        (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found = measure(model, make("hellaswag", folder=tmp_path), run="r", step=1)
        assert (found.error, found.analysis) == (None, "intervene/hellaswag")
        (chance,) = [record for record in found.records if record.metric == "random_score"]
        left = [record for record in found.records if record.metric == "normalized_score"]
        assert chance.value == 0.5
        if num_right < 7:  # 5 of 8 is within its standard error of chance (0.125 < 0.18), 1 of 8 is worse than chance
            assert chance.tags == {"task": "hellaswag", "undefined": "normalized_score"}
            assert not left
            continue
        right = sum(choice == row["label"] for choice, row in zip(skipped, rows, strict=True)) / 8
        assert chance.tags == {"task": "hellaswag"}
        assert [record.value for record in left] == pytest.approx([1, (right - 0.5) / (7 / 8 - 0.5)])
        assert left[0].stderr == 0


def test_random_orders_have_a_mean_over_seeds_with_an_error_over_rows(folder, model, make):
    orders = [random(BLOCKS, 0, seed=seed) for seed in (0, 1, 2)]
    options = {"variants": ("random",), "middles": (5,), "seeds": (0, 1, 2)}
    found, _ = scored(make("lambada", **options), model)
    *single, mean = [r for r in found if r.metric == "task_perplexity" and r.tags["variant"] == "random"]
    rows = np.array([row_values(folder, model, "lambada", order)["task_perplexity"] for order in orders])
    expected = np.exp(-rows.mean(1))
    assert [record.value for record in single] == pytest.approx(expected)
    assert [record.tags["seed"] for record in single] == [0, 1, 2]
    assert mean.value == pytest.approx(expected.mean())
    # The perplexity of each seed is linearised in each row, then averaged over seeds.
    moves = (expected[:, None] * (rows - rows.mean(1, keepdims=True))).mean(0)
    assert mean.stderr == pytest.approx((moves @ moves / (len(moves) - 1) / len(moves)) ** 0.5)
    assert mean.tags == {"variant": "random", "middle": 5, "num_seeds": 3, "num_identical": 0, "task": "lambada"}
    found, _ = scored(make("arc_challenge", **options), model)
    (mean,) = [record for record in found if record.metric == "task_score" and "num_seeds" in record.tags]
    rows = np.mean([row_values(folder, model, "arc_challenge", order)["task_score"] for order in orders], axis=0)
    assert mean.value == pytest.approx(rows.mean())
    assert mean.stderr == pytest.approx(rows.std(ddof=1) / len(rows) ** 0.5)


def test_a_prompt_template_is_compiled_once_for_all_rows(folder, monkeypatch):
    from lm_eval.utils import env

    compiled, compile_ = [], type(env).compile
    monkeypatch.setattr(
        type(env), "compile", lambda env, source, *more: compiled.append(source) or compile_(env, source)
    )
    scorer = LmEvalScorer(local_task("gsm8k", folder / "local"), str(folder / "tokenizer"))
    once, again = ([each.arguments for each in scorer.requests()] for _ in range(2))
    assert len(compiled) == len(set(compiled))
    assert once == again
    assert once


def test_equal_orders_are_scored_once(model, make):
    analysis = make(variants=("reverse", "random", "parallel", "middle_repeat"), middles=(1,), seeds=(0, 1))
    records, messages = scored(analysis, model)
    assert messages == ["arc_challenge: baseline (1 of 6)"]
    assert len(files(analysis)) == 1
    (mean,) = [r for r in records if r.metric == "task_score" and "num_seeds" in r.tags]
    assert mean.tags["num_identical"] == 2


def test_an_interrupted_run_resumes_and_a_damaged_file_is_scored_again(model, make):
    first = make(variants=("skip", "reverse", "parallel"))

    def stop(message):
        if "reverse" in message:
            raise KeyboardInterrupt

    first.tell = stop
    with pytest.raises(KeyboardInterrupt):
        list(records_of(first, LayeredModel(model)))
    assert len(files(first)) == 2
    before = {path: path.stat().st_mtime_ns for path in files(first)}
    records, messages = scored(make(variants=("skip", "reverse", "parallel")), model)
    assert [message.split(": ")[1].split(" ")[0] for message in messages] == ["reverse", "parallel"]
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert scored(make(variants=("skip", "reverse", "parallel"), batch_size=2), model) == (records, [])
    files(first)[0].write_text("{")
    again, messages = scored(make(variants=("skip", "reverse", "parallel")), model)
    assert again == records
    assert len(messages) == 1


def test_results_of_other_weights_architectures_options_and_rows_are_separate(folder, model, make, tmp_path):
    scored(make(), model)
    other = copy.deepcopy(model)
    other.config.layer_norm_epsilon = 0.5
    for part in other.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = 0.5
    cases = [(tiny_causal_model(blocks=BLOCKS, seed=4), {}), (other, {}), (model, {"limit": 2})]
    cases += [(model, {"max_new_tokens": 9}), (model, {"task": "winogrande"})]
    for changed, options in cases:
        _, messages = scored(make(**options), changed)
        assert len(messages) == 2
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text((folder / "tokenizer" / "tokenizer.json").read_text())
    moved = make()
    moved.tokenizer = str(tokenizer)  # the same tokenizer under another path
    assert moved.tokenizer_hash() == make().tokenizer_hash()


def test_a_file_describes_its_contents(make):
    analysis = make("gsm8k", max_new_tokens=8)
    scored(analysis, tiny_causal_model(blocks=BLOCKS, positions=128))
    found = [json.loads(path.read_text()) for path in files(analysis)]
    (skip,) = [each for each in found if each["variant"] == "skip M=3"]
    assert skip["schedule"] == "1 2 6"
    assert skip["scorer"].startswith("lm-eval 0.")
    assert "examples drawn from 1,000 training questions" in skip["difference"]
    assert len(skip["texts"]) == 4
    assert set(skip["values"]) == {"task_score", "task_score_flexible"}


def test_a_failing_variant_does_not_stop_the_others(model, make, monkeypatch):
    whole = LmEvalScorer.score

    def score(self, network):
        scores = whole(self, network)
        if len(network._running_order) == 3:
            raise torch.OutOfMemoryError("out of\nmemory")
        return scores

    monkeypatch.setattr(LmEvalScorer, "score", score)
    analysis = make(variants=("skip", "reverse"))
    records, messages = scored(analysis, model)
    (failed,) = [record for record in records if record.metric == "failed"]
    tags = {"variant": "skip", "middle": 3, "task": "arc_challenge"}
    assert failed.tags == tags | {"error": "OutOfMemoryError: out of memory"}
    assert {r.tags["variant"] for r in records if r.metric == "task_score"} == {"baseline", "reverse"}
    assert messages[2] == "arc_challenge: skip M=3 failed: OutOfMemoryError: out of memory"
    assert len(files(analysis)) == 2
    monkeypatch.setattr(LmEvalScorer, "score", whole)
    records, messages = scored(make(variants=("skip", "reverse")), model)
    assert not [record for record in records if record.metric == "failed"]
    assert len(messages) == 1


def test_an_error_of_the_full_model_is_raised(make):
    broken = tiny_causal_model(blocks=BLOCKS)
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="4 of 4 rows have a log-likelihood that is not a number"):
        list(records_of(make(), LayeredModel(broken)))


def test_the_config_has_only_options_that_change_the_numbers(make):
    analysis = make()
    assert not {"results", "folder", "tell", "batch_size"} & set(analysis.config()["init_args"])
    assert make(limit=1).config_hash() != analysis.config_hash() == make(batch_size=1).config_hash()


def test_wrong_options_are_refused(folder, model, make, monkeypatch):
    view = LayeredModel(model)
    make().check(view)
    cases = [
        (make(batch_size=0), "expected batch_size of at least 1, got 0"),
        (make(max_new_tokens=0), "expected max_new_tokens of at least 1, got 0"),
        (make(middles=(4,)), "of 6 blocks the middle has 1, 3, 5 blocks, got 4"),
        (make(limit=0), "expected limit of at least 1, got 0"),
        (make(custom=("1 9",)), "block: expected 1..6, got 9"),
    ]
    for analysis, message in cases:
        with pytest.raises(InputError, match=message):
            analysis.check(view)
    for name in ("bert", "vit"):
        with pytest.raises(InputError, match="expected a model that predicts the next token, got (BertForM|VisionTr)"):
            make().check(LayeredModel(tiny(name)))
    with pytest.raises(InputError, match="tokenizer: it has 400 tokens and the model 61"):
        make(middles=(2,)).check(LayeredModel(tiny("gpt2")))

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lit_layers.tasks.task_files.version", missing)
    with pytest.raises(InputError, match=r"lm_eval is needed .*: pip install 'lit_layers\[eval\]'"):
        make("lambada", folder=None).check(view)


def test_rows_that_change_between_variants_are_refused(model, make, monkeypatch):
    calls = iter(["a", "b"])
    whole = LmEvalScorer.score

    def score(self, network):
        return module.TaskScores(**vars(whole(self, network)) | {"rows_hash": next(calls)})

    monkeypatch.setattr(LmEvalScorer, "score", score)
    with pytest.raises(InputError, match="the task's rows changed between variants: remove "):
        list(records_of(make(), LayeredModel(model)))
