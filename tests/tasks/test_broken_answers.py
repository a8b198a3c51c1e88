"""Answers that other orders break: which are shown, by hand, and what of it is on disk and printed."""

from types import SimpleNamespace

import pandas as pd
import pytest

from lit_layers.functional.block_schedules import variants
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.benchmark_rows import (
    BROKEN_ANSWERS,
    TaskScores,
    broken_answers,
    questions_of,
    write_broken_answers,
)
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from tests.support.benchmark_rows import tiny_speaker, write_tasks, write_tokenizer
from tests.support.measured import records_of

ORDERS = variants(4, ("skip", "reverse", "skip_one"), middles=(3,))
QUESTIONS = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(4)]


def scores(right: str, name: str) -> TaskScores:
    texts = [f"\n{name} says {row}," for row in range(4)]
    return TaskScores(
        values={"task_score": [float(each) for each in right]},
        log_likelihoods=[],
        texts=texts,
        random_score=0,
        rows_hash="",
    )


def found(**by_name: str) -> dict:
    return {v.schedule: scores(by_name[str(v)], str(v)) for v in ORDERS if str(v) in by_name}


def test_of_each_variant_the_first_answer_that_it_alone_has_wrong_is_shown():
    scored = found(**{"baseline": "0111", "skip M=3": "1001", "reverse M=3": "1111", "skip_one block=2": "0000"})
    rows = broken_answers(ORDERS, scored, QUESTIONS)
    assert [(row["variant"], row["num_right"], row["num_broken"], row["row"]) for row in rows] == [
        ("skip", 3, 2, 1),
        ("skip_one", 3, 3, 1),
    ], "reverse breaks none, and the other single blocks failed"
    assert (rows[0]["schedule"], rows[0]["middle"], rows[1]["block"]) == ("1", 3, 2)
    assert rows[0]["question"] == "What is 1?"
    assert (rows[0]["full_model"], rows[0]["changed_model"]) == ("baseline says 1,", "skip M=3 says 1,")


def test_a_model_that_has_nothing_right_breaks_nothing():
    assert broken_answers(ORDERS, found(**{"baseline": "0000", "skip M=3": "0000"}), QUESTIONS) == []


def test_questions_are_in_the_order_of_the_rows_and_else_the_end_of_the_prompt():
    requests = [
        SimpleNamespace(doc_id=1, doc={"text": "x"}, arguments=("a" * 2000 + "b", {})),
        SimpleNamespace(doc_id=0, doc={"question": " why? ", "answer": "so"}, arguments=("prompt", {})),
    ]
    first, second = questions_of(requests)
    assert first == {"question": "why?", "answer": "so"}
    assert (second["question"], second["answer"]) == ("a" * 999 + "b", "")


def test_the_table_is_read_back(tmp_path):
    scored = found(**{"baseline": "0111", "skip M=3": "1001"})
    path = write_broken_answers(tmp_path, broken_answers(ORDERS, scored, QUESTIONS))
    row = pd.read_csv(path).iloc[0]
    assert (path.name, row["variant"], row["answer"]) == (BROKEN_ANSWERS, "skip", "#### 1")
    assert (row["num_broken"], row["num_right"], row["question"]) == (2, 3, "What is 1?")


@pytest.mark.soak
def test_a_task_that_is_written_leaves_the_table_beside_its_results(tmp_path, monkeypatch):
    """The model's own answers are taken as right: no random model answers GSM8K."""
    write_tasks(tmp_path / "local" / "benchmarks")
    write_tokenizer(tmp_path / "tokenizer")
    whole = LmEvalScorer.score

    def score(self, network, known):
        scores = whole(self, network, known)
        is_full = len(network._running_order) == 6
        scores.values["task_score"] = [float(is_full)] * 4
        return scores

    monkeypatch.setattr(LmEvalScorer, "score", score)
    options = {"variants": ("skip",), "middles": (3,), "folder": tmp_path / "local", "max_new_tokens": 4}
    analysis = BenchmarkScores(
        task="gsm8k", tokenizer=str(tmp_path / "tokenizer"), results=tmp_path / "results", **options
    )
    list(records_of(analysis, LayeredModel(tiny_speaker(blocks=6, positions=128))))
    (path,) = (tmp_path / "results").rglob(BROKEN_ANSWERS)
    (row,) = pd.read_csv(path).to_dict("records")
    assert (row["variant"], row["schedule"], row["num_broken"]) == ("skip", "1 2 6", 4)
    assert row["question"] == "Tom has 4 nuts and eats 2. How many are left?"
    assert row["answer"].endswith("#### 0")
