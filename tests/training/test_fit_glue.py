"""`lit-layers fit` trains a classifier of texts by the same modules, trainer and folders as any other model."""

import json

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.models.saved import load
from lit_layers.training.run_folder import saved_steps
from tests.support.glue_files import saved_bert_of_pairs, write_glue


@pytest.fixture
def command(tmp_path):
    saved_bert_of_pairs(tmp_path / "bert")
    write_glue(tmp_path)
    encoder = str(tmp_path / "bert")
    data = {"task": "mrpc", "tokenizer": encoder, "folder": str(tmp_path), "num_tokens": 30, "global_batch_size": 4}
    recipe = {
        "steps": {"every": 2},
        "trainer": {"max_steps": 4, "accelerator": "cpu", "devices": 1, "val_check_interval": 2},
        "model": {"class_path": "lit_layers.training.LitSequenceClassifier", "init_args": {"encoder": encoder}},
        "data": {"class_path": "lit_layers.training.LitGlueData", "init_args": data},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return ["fit", "--config", str(tmp_path / "recipe.yaml"), "--root", str(tmp_path / "run")]


def test_a_task_of_glue_is_trained_saved_judged_and_resumed_to_the_same_bits(command, tmp_path):
    assert main([*command, "--resume_every", "2"]) == 0
    root = tmp_path / "run"
    assert saved_steps(root) == [0, 2, 4]
    rows = records.rows(root / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([2e-5, 1.5e-5, 1e-5, 5e-6])
    assert rows[3]["validation/task_score"] == pytest.approx(
        (rows[3]["validation/accuracy"] + rows[3]["validation/f1"]) / 2
    )
    assert json.loads((root / "run.json").read_text())["data"]["task"] == "mrpc"
    assert type(load(root / "step-000000004")).__name__ == "BertForSequenceClassification"
    weights = (root / "step-000000004" / "model.safetensors").read_bytes()
    assert main([*command, "--resume", "2"]) == 0
    assert (root / "step-000000004" / "model.safetensors").read_bytes() == weights
    assert records.rows(root / "metrics.jsonl") == rows


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data.num_tokens", "33"], "data.num_tokens: BertModel takes at most 32 tokens, got 33"),
        (["--data.task", "colla"], "task: there is no 'colla'; did you mean cola"),
        (["--model.lr", "0"], "model.lr: expected a positive learning rate, got 0"),
        (["--data", "LitImageData"], "data: LitSequenceClassifier needs LitGlueData, got LitImageData"),
    ],
)
def test_what_does_not_fit_is_one_sentence(options, sentence, command, tmp_path, capsys):
    assert main([*command, *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.json").exists()
