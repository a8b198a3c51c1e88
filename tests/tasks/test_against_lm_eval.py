"""This package's scores against lm-eval's own of the same rows and model: row by row, in several running orders."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.measuring.one_model import measure
from lit_layers.models.running_order import running_order
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
from tests.support.benchmark_rows import TASKS, lm_eval_file, tiny_speaker, write_tasks, write_tokenizer

BLOCKS, LENGTH, NEW = 5, 400, 16
ORDERS = {
    "baseline": schedules.baseline(BLOCKS),
    "reverse": schedules.reverse(BLOCKS, 0),
    "looped_parallel": schedules.looped_parallel(BLOCKS, 0, loops=2),
}
FAMILIES = {"gpt2": TASKS, "gpt_neox": ("lambada", "gsm8k")}
CASES = [(family, task) for family, tasks in FAMILIES.items() for task in tasks]


GOLDEN = json.loads((Path(__file__).parent / "golden_scores.json").read_text())


def of_lm_eval(file, tokenizer, model):
    """What lm-eval itself, with its own wrapper of the model, makes of a task file: samples in order, by filter."""
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


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """By family, task and order: what this package finds."""
    folder = tmp_path_factory.mktemp("tasks")
    local, tokenizer = write_tasks(folder / "local" / "benchmarks").parent, str(write_tokenizer(folder / "tokenizer"))
    found = {}
    for family, tasks in FAMILIES.items():
        model = tiny_speaker(family, blocks=BLOCKS, positions=LENGTH)
        for task in tasks:
            rows = local_task(task, local)
            scorer = LmEvalScorer(rows, tokenizer, batch_size=3, max_new_tokens=NEW, max_length=LENGTH)
            for order, schedule in ORDERS.items():
                with running_order(model, schedule):
                    found[family, task, order] = scorer.score(model)
    return found


@pytest.fixture(scope="module")
def both(ours, tmp_path_factory):
    """What lm-eval finds, and what this package found; lm-eval takes seven seconds of CPU."""
    folder, found = tmp_path_factory.mktemp("official"), {}
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    with warnings.catch_warnings():
        # of files of lm-eval and what it imports, where nothing has compiled them yet
        warnings.filterwarnings("ignore", "invalid escape sequence")
        for family, tasks in FAMILIES.items():
            model = tiny_speaker(family, blocks=BLOCKS, positions=LENGTH)
            for task in tasks:
                file = lm_eval_file(task, folder)
                for order, schedule in ORDERS.items():
                    with running_order(model, schedule):
                        found[family, task, order] = of_lm_eval(file, tokenizer, model), ours[family, task, order]
        analysis = BenchmarkScores(
            task=lm_eval_file("arc_challenge", folder),
            tokenizer=tokenizer,
            results=folder / "results",
            variants=("reverse",),
            middles=(4,),
            limit=3,
        )
        found["analysis"] = measure(tiny_speaker(blocks=BLOCKS, positions=LENGTH), analysis, run="r", step=1)
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("family", "task"), CASES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_row_of_a_local_copy_scores_as_the_official_one_does_in_lm_eval(both, family, task, order):
    theirs, ours = both[family, task, order]
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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_scores_are_those_of_the_scorer_that_this_package_once_had(ours, task, order):
    """Which lm-eval gave, too: the short form of the test above."""
    found, expected = ours["gpt2", task, order], GOLDEN[task][order]
    for metric, values in expected["values"].items():
        assert found.values[metric] == values
    for own, other in zip(found.log_likelihoods, expected.get("log_likelihoods", []), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-3, rtol=0)  # they are kept with three digits


@pytest.mark.soak
def test_the_analysis_takes_the_scores_of_lm_eval(both):
    found = both["analysis"]
    assert (found.error, found.analysis) == (None, "intervene/arc_challenge")
    for order in ("baseline", "reverse"):
        _, ours = both["gpt2", "arc_challenge", order]
        for metric in (SCORE, NORMED):
            (record,) = [r for r in found.records if r.metric == metric and r.tags["variant"] == order]
            assert record.value == pytest.approx(np.mean(ours.values[metric][:3]))
            assert (record.n, record.tags["task"]) == (3, "arc_challenge")
    (guess,) = [r.value for r in found.records if r.metric == "random_score"]
    assert guess == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)


@pytest.mark.soak
def test_the_perplexity_is_that_of_lm_eval(both):
    for order in ORDERS:
        theirs, ours = both["gpt2", "lambada", order]
        own, _ = mean_and_error(PERPLEXITY, [ours.values[PERPLEXITY]])
        assert own == pytest.approx(np.exp(-np.mean([row["perplexity"] for row in theirs["none"]])), rel=1e-4)


def test_the_orders_and_rows_make_a_difference(ours):
    for task in TASKS:
        found = [ours["gpt2", task, order] for order in ORDERS]
        assert found[0].log_likelihoods != found[1].log_likelihoods or found[0].texts != found[1].texts
    assert any(sum(ours["gpt2", task, order].values[SCORE]) > 0 for task in TASKS[1:4] for order in ORDERS)
    assert len({text for order in ORDERS for text in ours["gpt2", "gsm8k", order].texts}) > 4


def test_a_task_file_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"^task: expected a task file of lm-eval, nowhere\.yaml does not exist"):
        refuse_unknown("nowhere.yaml")


@pytest.mark.soak  # reads the thousands of task files of lm-eval
def test_names_that_it_does_not_know_are_refused():
    with pytest.raises(InputError, match=r"^task: there is no 'arc_chalenge'; did you mean .*arc_challenge"):
        refuse_unknown("arc_chalenge")
    # names of the catalogue are not looked up, so lm-eval has to have them all
    from lm_eval.tasks import TaskManager

    assert {NAMES.get(task, task) for task in LOCAL_TASKS} <= {*TaskManager().all_tasks}


def test_a_task_file_is_known_by_what_it_and_its_parts_say(tmp_path):
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
