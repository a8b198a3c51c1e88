"""Analyses that train with blocks in other orders: their records, hashes, interruption and errors."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from lit_layers.errors import InputError
from lit_layers.measuring.one_model import measure
from lit_layers.models.build import weights_hash
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.schema import read_yaml
from lit_layers.training.finetuning import LitAnswers, TaskFinetuning, TaskFinetuningRecipe
from lit_layers.training.glue import GlueRecipe, GlueScores, LitGlue
from tests.support.data_mapping import write_mapping
from tests.support.glue_files import saved_bert_of_pairs, write_glue, write_rows
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.tiny_models import tiny


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    saved_gpt2(root / "gpt2")
    saved_bert_of_pairs(root / "bert")
    write_glue(root)
    (root / "arc").mkdir()
    write_arc(root / "arc")
    return root


def write_arc(folder, first=0):
    """Write rows of ARC for training and scoring."""
    for split, start in (("train", first), ("test", 20)):
        rows = [
            {"question": text, "choices": ["merry", "calm", "sad"], "label": ["merry", "calm", "sad"].index(mood)}
            for text, mood in labelled(6, start)
        ]
        pd.DataFrame(rows).to_parquet(folder / f"arc_{split}.parquet")
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"benchmark": {"arc_challenge": "arc_{split}.parquet"}}))
    return folder


def finetuning(home, root, recipe=None, **options):
    made = TaskFinetuningRecipe(**({"task": "arc_challenge", "batch_size": 3, "num_tokens": 24} | (recipe or {})))
    options = {"variants": ("skip",), "tokenizer": str(home / "gpt2"), "folder": home / "arc", **options}
    return TaskFinetuning(recipe=made, root=root, **options)


def glue(home, root, recipe=None, **options):
    made = GlueRecipe(**({"max_steps": 2, "batch_size": 4, "num_tokens": 30} | (recipe or {})))
    options = {"variants": ("skip",), "folder": home, **options}
    return GlueScores(
        task="mrpc", recipe=made, model=str(home / "bert"), tokenizer=str(home / "bert"), root=root, **options
    )


def both(home, root, **options):
    yield finetuning(home, root / "finetuned", **options), load(home / "gpt2"), LitAnswers
    yield glue(home, root, **options), load(home / "bert"), LitGlue


def test_every_variant_has_records_and_the_model_and_random_state_stay(home, tmp_path):
    for analysis, model, _ in both(home, tmp_path):
        said, before, drawn = [], weights_hash(model), torch.get_rng_state()
        analysis.tell = said.append
        found = measure(model, analysis, run="r", step=None)
        assert found.error is None
        assert weights_hash(model) == before
        assert torch.equal(torch.get_rng_state(), drawn)
        assert not model.training
        assert {(r.tags["variant"], r.tags.get("middle")) for r in found.records} == {("baseline", None), ("skip", 2)}
        assert len(said) == 2
    assert {record.metric for record in found.records} == {"accuracy", "f1", "task_score"}
    assert {(record.tags["task"], record.tags["training"]) for record in found.records} == {("mrpc", "full")}


def test_config_and_data_hashes_change_exactly_with_what_decides_the_values(home, tmp_path):
    one = finetuning(home, tmp_path / "a")
    assert one.config_hash() == finetuning(home, tmp_path / "b", tell=print).config_hash()
    assert one.config_hash() != finetuning(home, tmp_path / "a", {"num_epochs": 3}).config_hash()
    assert one.data_hash() != finetuning(home, tmp_path, folder=write_arc(tmp_path, first=5)).data_hash()
    assert glue(home, tmp_path / "a").config_hash() == glue(home, tmp_path / "b", folder=tmp_path).config_hash()
    copy = write_mapping(tmp_path / "copy")
    shutil.copytree(home / "glue", copy / "glue")
    assert glue(home, tmp_path, folder=copy).data_hash() == glue(home, tmp_path).data_hash()
    texts, moods = map(list, zip(*labelled(10, 31), strict=True))
    write_rows(copy, "mrpc_validation", sentence1=texts, sentence2=texts, label=[int(m == "sad") for m in moods])
    assert glue(home, tmp_path, folder=copy).data_hash() != glue(home, tmp_path).data_hash()


NO_NAME = "recipe: task: expected a name of lm-eval such as arc_challenge, got"
WRONG = (
    (TaskFinetuningRecipe, {}, "task: Field required"),
    (TaskFinetuningRecipe, {"task": "c", "num_epoch": 3}, "num_epoch: Unexpected keyword argument, got 3"),
    (TaskFinetuningRecipe, {"task": "c", "num_epochs": 0}, "recipe: num_epochs: expected at least 1, got 0"),
    (TaskFinetuningRecipe, {"task": "c", "limit": 0}, "recipe: limit: expected at least 1, got 0"),
    (TaskFinetuningRecipe, {"task": "c", "warmup_steps": -1}, "recipe: warmup_steps: expected at least 0, got -1"),
    (TaskFinetuningRecipe, {"task": "c", "learning_rate": 0}, "recipe: learning_rate: expected more than 0, got 0"),
    (TaskFinetuningRecipe, {"task": "c", "min_lr_ratio": 2}, "recipe: min_lr_ratio: expected at most 1, got 2"),
    *((TaskFinetuningRecipe, {"task": name}, NO_NAME) for name in ("mine.yaml", "../arc", "rows.jsonl", "")),
    (TaskFinetuningRecipe, [1], "Input should be an object, got [1]"),
    (GlueRecipe, {"max_steps": 0}, "recipe: max_steps: expected at least 1, got 0"),
    (GlueRecipe, {"frozen_learning_rate": 0}, "recipe: frozen_learning_rate: expected more than 0, got 0"),
)


def test_recipes_with_wrong_keys_or_values_are_refused_and_those_of_the_package_load(tmp_path):
    for kind, content, sentence in WRONG:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(InputError) as refused:
            read_yaml(tmp_path / "recipe.yaml", kind, "")
        assert sentence in str(refused.value), content
    (tmp_path / "recipe.yaml").write_text("task: c\nlearning_rate: 5e-5\n")  # YAML reads 5e-5 as text
    assert read_yaml(tmp_path / "recipe.yaml", TaskFinetuningRecipe, "").learning_rate == 5e-5
    assert read_yaml(Path("recipes/finetune/arc.yaml"), TaskFinetuningRecipe, "").num_epochs == 1
    for name in ("paper", "small_steps"):
        assert read_yaml(Path(f"recipes/glue/{name}.yaml"), GlueRecipe, "").seed == 0


def test_ctrl_c_in_training_raises_keyboard_interrupt_and_finished_variants_stay(home, tmp_path, monkeypatch):
    for analysis, model, module in both(home, tmp_path):
        plain, steps, before = module.training_step, [], weights_hash(model)

        def pressed(self, batch, number, plain=plain, steps=steps):
            steps.append(number)
            if len(steps) == 4:  # the second step of the second variant
                raise KeyboardInterrupt
            return plain(self, batch, number)

        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patch:
            patch.setattr(module, "training_step", pressed)
            with pytest.raises(KeyboardInterrupt):
                measure(model, analysis, run="r", step=None)
            assert signal.getsignal(signal.SIGINT) is handler
            assert weights_hash(model) == before
            assert "_running_order" not in model.__dict__
            assert measure(model, analysis, run="r", step=None).error is None
        assert len(steps) == 4 + 2


def test_wrong_options_are_refused_before_training(home, tmp_path):
    gpt2, bert = LayeredModel(load(home / "gpt2")), LayeredModel(load(home / "bert"))
    cases = [
        (finetuning(home, tmp_path, middles=(1,)), gpt2, "middles: of 3 blocks the middle has 2 blocks, got 1"),
        (finetuning(home, tmp_path, custom=("1 4",)), gpt2, "block: expected 1..3, got 4"),
        (finetuning(home, tmp_path, folder=tmp_path), gpt2, "folder: expected a file tasks.yaml in"),
        (glue(home, tmp_path), LayeredModel(tiny("vit")), "glue: expected an encoder .*, got VisionTransformer"),
        (glue(home, tmp_path, {"precision": "x"}), bert, "recipe: precision: Precision 'x' is invalid"),
        (replace(glue(home, tmp_path), tokenizer="nowhere.json"), bert, "no tokenizer 'nowhere.json'"),
    ]
    for analysis, view, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            analysis.check(view)
    finetuning(home, tmp_path, {"num_tokens": 32}).check(gpt2)
    few = tiny("bert")  # 61 tokens
    with pytest.raises(InputError, match="tokenizer: BertForMaskedLM knows 61 tokens, the tokenizer has"):
        glue(home, tmp_path).check(LayeredModel(few))
    assert sorted(path.name for path in tmp_path.iterdir()) == []
