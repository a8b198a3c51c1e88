"""This package's scores against lm-eval's own of the same rows and model: row by row, in several running orders."""

import warnings

import numpy as np
import pytest

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.emergence import measure
from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.intervene import BenchmarkScores
from lit_layers.intervene.lm_eval_tasks import LmEvalScorer, refuse_unknown, task_file_hash
from lit_layers.intervene.own_scorer import OwnScorer
from lit_layers.intervene.prompt_tokens import PromptTokenizer
from lit_layers.intervene.scores import FLEXIBLE, NORMED, PERPLEXITY, SCORE, mean_and_error
from lit_layers.intervene.task_prompts import LOCAL_TASKS
from lit_layers.models.running_order import running_order
from tests.support.benchmark_rows import TASKS, lm_eval_file, tiny_speaker, write_tasks, write_tokenizer

BLOCKS, LENGTH, NEW = 5, 400, 16
ORDERS = {
    "baseline": schedules.baseline(BLOCKS),
    "reverse": schedules.reverse(BLOCKS, 0),
    "looped_parallel": schedules.looped_parallel(BLOCKS, 0, loops=2),
}
FAMILIES = {"gpt2": TASKS, "gpt_neox": ("lambada", "gsm8k")}
CASES = [(family, task) for family, tasks in FAMILIES.items() for task in tasks]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """By family, task and order: what lm-eval found and what this package found."""
    folder = tmp_path_factory.mktemp("tasks")
    local, tokenizer = write_tasks(folder / "local"), str(write_tokenizer(folder / "tokenizer"))
    found = {}
    with warnings.catch_warnings():
        # of files of lm-eval and what it imports, where nothing has compiled them yet
        warnings.filterwarnings("ignore", "invalid escape sequence")

        theirs = {
            task: LmEvalScorer(lm_eval_file(task, folder / "official"), tokenizer, batch_size=1, max_new_tokens=NEW)
            for task in TASKS
        }
        for family, tasks in FAMILIES.items():
            model = tiny_speaker(family, blocks=BLOCKS, positions=LENGTH)
            for task in tasks:
                ours = OwnScorer(
                    LOCAL_TASKS[task],
                    LOCAL_TASKS[task].items(local),
                    PromptTokenizer.of(load_tokenizer(tokenizer)),
                    max_length=LENGTH,
                    batch_size=3,
                    max_new_tokens=NEW,
                )
                for order, schedule in ORDERS.items():
                    with running_order(model, schedule):
                        found[family, task, order] = theirs[task].score(model), ours.score(model)
        analysis = BenchmarkScores(
            task=lm_eval_file("arc_challenge", folder / "official"),
            tokenizer=tokenizer,
            results=folder / "results",
            scorer="lm_eval",
            variants=("reverse",),
            middles=(4,),
            limit=3,
        )
        found["analysis"] = measure(tiny_speaker(blocks=BLOCKS, positions=LENGTH), analysis, run="r", step=1)
    return found


@pytest.mark.parametrize(("family", "task"), CASES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_row_scores_as_it_does_there(both, family, task, order):
    theirs, ours = both[family, task, order]
    assert set(ours.values) == set(theirs.values)
    assert set(ours.values) == {SCORE} | {
        "lambada": {PERPLEXITY},
        "arc_challenge": {NORMED},
        "hellaswag": {NORMED},
        "winogrande": set(),
        "gsm8k": {FLEXIBLE},
    }.get(task, set())
    for metric in set(ours.values) - {PERPLEXITY}:
        assert ours.values[metric] == theirs.values[metric]
    assert [len(row) for row in ours.log_likelihoods] == [len(row) for row in theirs.log_likelihoods]
    for own, other in zip(ours.log_likelihoods, theirs.log_likelihoods, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4, rtol=0)
    assert ours.texts == theirs.texts
    assert ours.random_score == pytest.approx(theirs.random_score, abs=1e-12)


def test_the_analysis_takes_the_scores_of_lm_eval(both):
    found = both["analysis"]
    assert (found.error, found.analysis) == (None, "intervene/arc_challenge")
    for order in ("baseline", "reverse"):
        theirs, _ = both["gpt2", "arc_challenge", order]
        for metric in (SCORE, NORMED):
            (record,) = [r for r in found.records if r.metric == metric and r.tags["variant"] == order]
            assert record.value == pytest.approx(np.mean(theirs.values[metric][:3]))
            assert (record.n, record.tags["task"]) == (3, "arc_challenge")
    (guess,) = [r.value for r in found.records if r.metric == "random_score"]
    assert guess == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)


def test_the_perplexity_is_that_of_lm_eval(both):
    for order in ORDERS:
        theirs, ours = both["gpt2", "lambada", order]
        own, _ = mean_and_error(PERPLEXITY, [ours.values[PERPLEXITY]])
        assert own == pytest.approx(np.exp(-np.mean(theirs.values[PERPLEXITY])), rel=1e-4)


def test_the_orders_and_rows_make_a_difference(both):
    for task in TASKS:
        found = [both["gpt2", task, order][1] for order in ORDERS]
        assert found[0].log_likelihoods != found[1].log_likelihoods or found[0].texts != found[1].texts
    assert any(sum(both["gpt2", task, order][1].values[SCORE]) > 0 for task in TASKS[1:4] for order in ORDERS)
    assert len({text for order in ORDERS for text in both["gpt2", "gsm8k", order][1].texts}) > 4


def test_a_task_file_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"^task: expected a task file of lm-eval, nowhere\.yaml does not exist"):
        refuse_unknown("nowhere.yaml")


@pytest.mark.soak  # reads the thousands of task files of lm-eval
def test_names_that_it_does_not_know_are_refused():
    with pytest.raises(InputError, match=r"^task: lm-eval has no task 'arc_chalenge'; did you mean .*arc_challenge"):
        refuse_unknown("arc_chalenge")
    refuse_unknown("lambada")


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
