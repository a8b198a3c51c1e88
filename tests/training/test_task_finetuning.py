"""Training on the rows of a task while blocks run in another order, against losses and scores made here."""

import json
import math

import pandas as pd
import pytest
import torch
import yaml
from torch.nn import functional as F

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant, baseline, skip
from lit_layers.models.build import causal_lm
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.benchmark_rows import local_rows
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from lit_layers.training import finetuning
from lit_layers.training.finetuning import AnswerData, LitAnswers, TaskFinetuning, TaskFinetuningRecipe
from tests.support.benchmark_rows import tiny_speaker, write_tokenizer
from tests.support.measured import records_of

ROWS = [([1, 2, 3], [4, 5]), ([6], [7])]
ORDER = Variant(name="skip", schedule=skip(6, 1), middle=3)


def recipe(**options) -> TaskFinetuningRecipe:
    usual = {"task": "arc_challenge", "learning_rate": 1e-2, "batch_size": 4, "num_tokens": 60, "min_lr_ratio": 1.0}
    return TaskFinetuningRecipe(**(usual | options))


def test_the_loss_is_that_of_the_answers_tokens_alone():
    model = causal_lm("gpt2", seed=0, n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=20).double().eval()
    data = AnswerData(ROWS, recipe())
    batch = finetuning._padded(data.rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    with torch.no_grad():
        found = LitAnswers(model, recipe(), steps=1).training_step(batch, 0)
        expected = []
        for asked, answer in ROWS:  # one text alone, without padding
            log_proba = model(torch.tensor([asked + answer])).logits[0].log_softmax(-1)
            expected += [-log_proba[len(asked) + place - 1, token] for place, token in enumerate(answer)]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_long_row_loses_its_beginning():
    (row,) = AnswerData([([1, 2, 3], [4, 5])], recipe(num_tokens=2)).rows
    assert (row["input_ids"].tolist(), row["labels"].tolist()) == ([3, 4, 5], [-100, 4, 5])
    assert F.cross_entropy(torch.zeros(3, 9), row["labels"], ignore_index=-100) == pytest.approx(math.log(9))


def test_wrong_values_of_a_recipe_are_refused():
    with pytest.raises(InputError, match="recipe: num_epochs: expected at least 1, got 0"):
        recipe(num_epochs=0)
    with pytest.raises(InputError, match="recipe: limit: expected at least 1, got 0"):
        recipe(limit=0)
    for name in ("mine.yaml", "../arc", "rows.jsonl", ""):
        with pytest.raises(InputError, match="recipe: task: expected a name of lm-eval such as arc_challenge, got"):
            recipe(task=name)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """ARC with eight rows, which are trained on and scored: what is learnt by heart is answered."""
    folder = tmp_path_factory.mktemp("arc")
    names = ["red", "blue", "green", "old"]
    rows = [
        {"question": f"What is thing {n}?", "choices": names[n % 4 :] + names[: n % 4], "label": (3 * n) % 4}
        for n in range(8)
    ]
    for split in ("test", "train"):
        pd.DataFrame(rows).to_parquet(folder / f"arc_{split}.parquet")
    mapping = {"arc_challenge": "arc_{split}.parquet"}
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"benchmark": mapping}))
    write_tokenizer(folder / "tokenizer")
    return folder, rows


def analysis(home, root, **options) -> TaskFinetuning:
    tokenizer = str(home / "tokenizer")
    return TaskFinetuning(
        recipe=recipe(**options), root=root, tokenizer=tokenizer, folder=home, variants=("skip",), middles=(3,)
    )


@pytest.mark.soak
def test_rows_learnt_by_heart_are_answered_and_scores_before_are_those_of_the_order(home, tmp_path, monkeypatch):
    folder, rows = home
    model = tiny_speaker(blocks=6, seed=3)
    made, view = analysis(folder, tmp_path, num_epochs=40), LayeredModel(model)
    made.check(view)
    asked, answer = made.texts[1]
    assert (asked, answer) == ("Question: What is thing 1?\nAnswer:", f" {rows[1]['choices'][rows[1]['label']]}")
    assert made.steps == 40 * 8 / 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    records = {(r.metric, r.tags["variant"], r.tags["when"]): r for r in records_of(made, view)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    scorer = LmEvalScorer(local_rows("arc_challenge", folder), str(folder / "tokenizer"), max_length=600)
    for name, order in (("baseline", baseline(6)), ("skip", ORDER.schedule)):
        with running_order(model, order):
            values = scorer.score(model).values["task_score"]
        found = records["task_score", name, "before"]
        assert (found.value, found.n) == (pytest.approx(sum(values) / 8), 8)
        assert records["task_score", name, "after"].value == 1.0 > found.value
        trained = load(tmp_path / ("baseline" if name == "baseline" else "skip_M_3") / "model")
        with running_order(trained, order):
            assert scorer.score(trained).values["task_score"] == [1.0] * 8
    kept = load(tmp_path / "skip_M_3" / "model").state_dict()
    assert torch.equal(kept["transformer.h.3.mlp.c_fc.weight"], before["transformer.h.3.mlp.c_fc.weight"])
    assert not torch.equal(kept["transformer.h.0.mlp.c_fc.weight"], before["transformer.h.0.mlp.c_fc.weight"])
    monkeypatch.setattr(TaskFinetuning, "train", lambda *_: pytest.fail("trained again"))
    again = {
        (r.metric, r.tags["variant"], r.tags["when"]): r
        for r in records_of(analysis(folder, tmp_path, num_epochs=40), view)
    }
    assert again == records
    with pytest.raises(InputError, match=r"finetuned.json is the result of other settings \(num_epochs differs\)"):
        list(records_of(analysis(folder, tmp_path, num_epochs=41), view))
    assert json.loads((tmp_path / "skip_M_3" / "finetuned.json").read_text())["schedule"] == "1 2 6"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"arc_challenge": "w_train.parquet"},
            "w_train.parquet holds the rows that are scored: list files of train",
        ),
        ({"arc_challenge": {"files": {"test": "w_train.parquet"}}}, "expected files of the split 'train', got test"),
        (
            {"winogrande": "w_{split}.parquet"},
            "do not stand behind what is asked",
        ),
    ],
)
def test_tasks_that_cannot_be_trained_on_are_refused(home, tmp_path, content, sentence):
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"benchmark": content}))
    for split in ("train", "validation"):
        rows = [{"sentence": "The _ is red.", "choices": ["cup", "bag"], "label": 0}]
        pd.DataFrame(rows).to_parquet(tmp_path / f"w_{split}.parquet")
    made = analysis(home[0], tmp_path, task=next(iter(content)))
    made.folder = tmp_path
    with pytest.raises(InputError, match=sentence):
        made.check(LayeredModel(tiny_speaker(blocks=6)))
