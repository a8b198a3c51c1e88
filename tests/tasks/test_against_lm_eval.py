"""Scores of this package equal those of lm-eval on the same rows and model: row by row, in several orders of blocks."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.measuring.one_model import measure
from lit_layers.models.running_order import running_order
from lit_layers.tasks import lm_eval_scorer
from lit_layers.tasks.benchmark_scores import BenchmarkScores, mean_and_error
from lit_layers.tasks.catalogue import LOCAL_TASKS
from lit_layers.tasks.lm_eval_scorer import (
    FLEXIBLE,
    NAMES,
    NORMED,
    PERPLEXITY,
    SCORE,
    LmEvalScorer,
    local_task,
    refuse_unknown,
    task_file_hash,
)
from tests.support.benchmark_rows import TASKS, lm_eval_file, tiny_causal_model

BLOCKS, LENGTH, NEW = 5, 400, 16
ORDERS = {
    "baseline": schedules.baseline(BLOCKS),
    "reverse": schedules.reverse(BLOCKS, 0),
    "looped_parallel": schedules.looped_parallel(BLOCKS, 0, loops=2),
}
CHEAP = ("lambada", "arc_challenge", "gsm8k")
CASES = [
    *(("gpt2", task) if task in CHEAP else pytest.param("gpt2", task, marks=pytest.mark.soak) for task in TASKS),
    *(pytest.param("gpt_neox", task, marks=pytest.mark.soak) for task in ("lambada", "gsm8k")),
]


def lm_eval_samples(file, tokenizer, model):
    """Evaluate a task file with lm-eval and its own wrapper of the model. Return the samples in order, by filter."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_defaults=False).load([file])
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=1234)
        if task.get_config("output_type") == "generate_until":
            task.set_config("generation_kwargs", {"max_gen_toks": NEW}, update=True)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype="float32")
    if wrapped.tokenizer.eos_token is None:
        wrapped.tokenizer.eos_token = wrapped.tokenizer.pad_token = "<|endoftext|>"
    (samples,) = evaluate(lm=wrapped, task_dict=loaded, bootstrap_iters=0)["samples"].values()
    return {
        name: sorted((each for each in samples if each["filter"] == name), key=lambda each: each["doc_id"])
        for name in {each["filter"] for each in samples}
    }


@pytest.mark.parametrize(("family", "task"), CASES)
def test_every_row_of_a_local_copy_scores_like_the_official_one_in_lm_eval(folder, tmp_path, family, task):
    tokenizer, file = str(folder / "tokenizer"), lm_eval_file(task, tmp_path)
    model, found = tiny_causal_model(family, blocks=BLOCKS, positions=LENGTH), []
    rows = local_task(task, folder / "local")
    scorer = LmEvalScorer(rows, tokenizer, batch_size=3, max_new_tokens=NEW, max_length=LENGTH)
    for schedule in ORDERS.values():
        with running_order(model, schedule), warnings.catch_warnings():
            # Files of lm-eval and its imports warn when Python compiles them for the first time.
            warnings.filterwarnings("ignore", "invalid escape sequence")
            found.append(scorer.score(model))
            compare(task, found[-1], lm_eval_samples(file, tokenizer, model))
    if family == "gpt2":
        assert found[0].log_likelihoods != found[1].log_likelihoods or found[0].texts != found[1].texts
    if (family, task) == ("gpt2", "gsm8k"):
        assert len({text for each in found for text in each.texts}) > 4, "the texts hardly differ"
    if task == "arc_challenge":
        assert any(sum(each.values[SCORE]) > 0 for each in found), "no row is right in any order"


def compare(task, ours, theirs):
    """Compare the metrics and the log-likelihoods or texts of each row, and the score of guessing."""
    rows = theirs["strict-match" if task == "gsm8k" else "none"]
    names = {SCORE: "exact_match" if task == "gsm8k" else "acc"}
    names |= {NORMED: "acc_norm"} if task in ("arc_challenge", "hellaswag") else {}
    assert set(ours.values) == {*names} | {"lambada": {PERPLEXITY}, "gsm8k": {FLEXIBLE}}.get(task, set())
    for name, metric in names.items():
        assert ours.values[name] == [float(row[metric]) for row in rows]
    if task == "gsm8k":
        assert ours.values[FLEXIBLE] == [float(row["exact_match"]) for row in theirs["flexible-extract"]]
        assert ours.texts == [row["resps"][0][0] for row in rows]
        assert (ours.log_likelihoods, ours.random_score) == ([], 0)
        return
    expected = [[float(choice[0]) for choice in row["filtered_resps"]] for row in rows]
    for own, other in zip(ours.log_likelihoods, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4, rtol=0)
    guessed = 0 if task == "lambada" else np.mean([1 / len(row) for row in expected])
    assert ours.random_score == pytest.approx(guessed, abs=1e-12)
    if task == "lambada":
        own, _ = mean_and_error(PERPLEXITY, [ours.values[PERPLEXITY]])
        assert own == pytest.approx(np.exp(-np.mean([row["perplexity"] for row in rows])), rel=1e-4)


@pytest.mark.soak
def test_the_analysis_records_the_scores_of_lm_eval(folder, tmp_path):
    tokenizer, file = str(folder / "tokenizer"), lm_eval_file("arc_challenge", tmp_path)
    model = tiny_causal_model(blocks=BLOCKS, positions=LENGTH)
    options = {"results": tmp_path / "results", "variants": ("reverse",), "middles": (4,), "limit": 3}
    found = measure(model, BenchmarkScores(task=file, tokenizer=tokenizer, **options), run="r", step=1)
    assert (found.error, found.analysis) == (None, "intervene/arc_challenge")
    for order in ("baseline", "reverse"):
        with running_order(model, ORDERS[order]):
            rows = lm_eval_samples(file, tokenizer, model)["none"][:3]
        for metric, name in ((SCORE, "acc"), (NORMED, "acc_norm")):
            (record,) = [r for r in found.records if r.metric == metric and r.tags["variant"] == order]
            assert record.value == pytest.approx(np.mean([row[name] for row in rows]))
            assert (record.n, record.tags["task"]) == (3, "arc_challenge")
    (guess,) = [r.value for r in found.records if r.metric == "random_score"]
    assert guess == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)


def test_an_unknown_task_of_lm_eval_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"^task: expected a task file of lm-eval, nowhere\.yaml does not exist"):
        refuse_unknown("nowhere.yaml")
    # Skip the ten seconds in which lm-eval reads the names of its thousands of task files.
    monkeypatch.setattr(
        lm_eval_scorer, "_manager", lambda defaults: SimpleNamespace(all_tasks=["toxigen", "truthfulqa"])
    )
    refuse_unknown("toxigen")
    with pytest.raises(InputError, match=r"^task: there is no 'toxigenn'; did you mean toxigen"):
        refuse_unknown("toxigenn")


@pytest.mark.nightly  # reads the thousands of task files of lm-eval
def test_lm_eval_has_every_name_of_the_catalogue_and_refuses_others():
    with pytest.raises(InputError, match=r"^task: there is no 'arc_chalenge'; did you mean .*arc_challenge"):
        refuse_unknown("arc_chalenge")
    # lm-eval must have all names of the catalogue, because these are not looked up.
    from lm_eval.tasks import TaskManager

    assert {NAMES.get(task, task) for task in LOCAL_TASKS} <= {*TaskManager().all_tasks}


def test_the_hash_of_a_task_file_depends_on_the_files_it_includes(tmp_path):
    (tmp_path / "base.yaml").write_text("output_type: multiple_choice\n")
    (tmp_path / "parts.py").write_text("x = 1\n")
    task = tmp_path / "task.yaml"
    task.write_text("include: base.yaml\ntask: mine\nprocess_docs: !function parts.x\n")
    found = [task_file_hash(task)]
    for name in ("task.yaml", "base.yaml", "parts.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# more\n")
        found.append(task_file_hash(task))
    assert len(set(found)) == 4
    assert task_file_hash(task) == found[-1]
