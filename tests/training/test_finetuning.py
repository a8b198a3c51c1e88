"""Fine-tuning on the rows of a task with blocks in another order, against losses and scores computed here."""

import json
import math

import pandas as pd
import pytest
import torch
import yaml
from torch.nn import functional as F

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Variant, baseline, skip
from lit_layers.models.build import causal_lm, weights_hash
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task
from lit_layers.training import finetuning
from lit_layers.training.finetuning import (
    AnswerData,
    LitAnswers,
    TaskFinetuning,
    TaskFinetuningRecipe,
    name_of,
    seed_means,
)
from lit_layers.training.trainer import StepSampler
from tests.support.benchmark_rows import tiny_causal_model, write_tokenizer
from tests.support.measured import records_of

ROWS = [([1, 2, 3], [4, 5]), ([6], [7])]
ORDER = Variant(name="skip", schedule=skip(6, 1), middle=3)


def recipe(**options) -> TaskFinetuningRecipe:
    usual = {"task": "arc_challenge", "learning_rate": 1e-2, "batch_size": 4, "num_tokens": 60, "min_lr_ratio": 1.0}
    return TaskFinetuningRecipe(**(usual | options))


def test_only_the_tokens_of_answers_have_a_loss():
    model = causal_lm("gpt2", seed=0, n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=20).double().eval()
    data = AnswerData(ROWS, recipe())
    batch = finetuning._collate(data.rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    with torch.no_grad():
        found = LitAnswers(model, recipe(), steps=1).training_step(batch, 0)
        expected = []
        for asked, answer in ROWS:  # one text at a time, without padding
            log_proba = model(torch.tensor([asked + answer])).logits[0].log_softmax(-1)
            expected += [-log_proba[len(asked) + place - 1, token] for place, token in enumerate(answer)]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_long_row_loses_its_beginning():
    (row,) = AnswerData([([1, 2, 3], [4, 5])], recipe(num_tokens=2)).rows
    assert (row["input_ids"].tolist(), row["labels"].tolist()) == ([3, 4, 5], [-100, 4, 5])
    assert F.cross_entropy(torch.zeros(3, 9), row["labels"], ignore_index=-100) == pytest.approx(math.log(9))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write ARC with eight rows that are both trained on and scored, so that a model can memorise the answers."""
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


MIDDLE = Variant(name="custom", schedule=(1, (2, 3), 5))


@pytest.fixture
def model():
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return tiny_causal_model(blocks=6, seed=3, **dropouts).double()


def run(home, model, root, variant=MIDDLE, **options):
    made = analysis(home[0], root, **options)
    made.check(LayeredModel(model))
    return made.variant_scores(LayeredModel(model), variant)


def trained(root, variant=MIDDLE):
    return load(root / name_of(variant) / "model", dtype=torch.float64)


def composed(model, ids):
    """Return the logits of the schedule block 1, mean of blocks 2 and 3, block 5, written out."""
    trunk = model.transformer
    hidden = trunk.wte(ids) + trunk.wpe(torch.arange(len(ids)))
    hidden = trunk.h[0](hidden[None])
    hidden = (trunk.h[1](hidden) + trunk.h[2](hidden)) / 2
    return model.lm_head(trunk.ln_f(trunk.h[4](hidden)))[0]


def stepped(parameter, scale, rate=1e-2):
    """Return a parameter after the first step of AdamW: its moments come from one gradient. Only matrices decay."""
    gradient = parameter.grad * scale
    decay = 0.1 if parameter.ndim > 1 else 0.0
    return parameter.detach() * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1e-8)


def test_a_step_is_adamw_on_the_composed_blocks_and_the_original_model_stays(home, model, tmp_path):
    before, modes = weights_hash(model), [part.training for part in model.modules()]
    run(home, model, tmp_path, num_train=2, batch_size=2, weight_decay=0.1, gradient_clip=0.5, seed=3)
    assert (weights_hash(model), modes) == (before, [part.training for part in model.modules()])
    assert all("forward" not in block.__dict__ for block in model.transformer.h)
    made = analysis(home[0], tmp_path, num_train=2)
    chosen, losses = StepSampler(2, global_batch_size=2, seed=3).global_batch(0), []
    for asked, answer in (made._token_ids(*made.texts[number]) for number in chosen):
        log_proba = composed(model, torch.tensor(asked + answer)).log_softmax(-1)
        losses += [-log_proba[len(asked) + place - 1, token] for place, token in enumerate(answer)]
    torch.stack(losses).mean().backward()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not [name for name in parameters if name.startswith(("transformer.h.3.", "transformer.h.5."))]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm()
    assert norm > 0.5
    found = dict(trained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        expected = stepped(parameter, 0.5 / (norm + 1e-6)) if name in parameters else parameter.detach()
        torch.testing.assert_close(
            found[name], expected, rtol=1e-8, atol=1e-8, msg=lambda told, name=name: f"{name}: {told}"
        )


def test_a_finished_variant_is_not_trained_again_and_other_settings_are_refused(home, model, tmp_path, monkeypatch):
    first = run(home, model, tmp_path, num_train=4)
    monkeypatch.setattr(LitAnswers, "training_step", lambda *_: pytest.fail("trained again"))
    assert run(home, model, tmp_path, num_train=4) == first
    with pytest.raises(InputError, match=r"finetuned.json is the result of other settings \(batch_size differs\)"):
        run(home, model, tmp_path, num_train=4, batch_size=2)
    model.config.layer_norm_epsilon = 0.5
    with pytest.raises(InputError, match=r"other settings \(architecture differs\)"):
        run(home, model, tmp_path, num_train=4)
    with torch.no_grad():
        model.transformer.wpe.weight.add_(1)
    with pytest.raises(InputError, match=r"other settings \(weights differs\): choose another root"):
        run(home, model, tmp_path, num_train=4)


def test_means_over_seeds_leave_out_nan_and_count_identical_orders():
    def record(seed, schedule, value, when="after"):
        tags = {"variant": "random", "middle": 2, "seed": seed, "schedule": schedule, "when": when}
        return Record(metric="variant_loss", value=value, tags=tags, n=6)

    rows = (0, "1 2 3 4", 1.0), (1, "1 3 2 4", 4.0), (2, "1 2 3 4", 4.0), (0, "1 3 2 4", 9.0, "before")
    records = [record(*row) for row in rows]
    records.append(Record(metric="variant_loss", value=7.0, tags={"variant": "skip", "middle": 2, "when": "after"}))
    after, before = seed_means(records, 4)
    assert after.value == 3.0
    assert after.stderr == pytest.approx(1.0)  # standard deviation sqrt(3) of 1, 4, 4, over sqrt(3)
    assert after.tags == {"variant": "random", "middle": 2, "when": "after", "num_seeds": 3, "num_identical": 2}
    assert (before.value, before.stderr) == (9.0, None)
    broken = (0, "1 2 3 4", math.nan), (1, "1 3 2 4", 4.0), (2, "1 2 3 4", 2.0), (0, "1 2 3 4", math.nan, "x")
    after, nothing = seed_means([record(*row) for row in broken], 4)
    assert (after.value, after.stderr) == (3.0, 1.0)
    assert after.tags["num_undefined"] == 1
    assert math.isnan(nothing.value)


@pytest.mark.soak
def test_memorised_rows_are_answered_and_scores_before_training_are_those_of_the_variant(home, tmp_path):
    folder, rows = home
    model = tiny_causal_model(blocks=6, seed=3)
    made, view = analysis(folder, tmp_path, num_epochs=40), LayeredModel(model)
    made.check(view)
    asked, answer = made.texts[1]
    assert (asked, answer) == ("Question: What is thing 1?\nAnswer:", f" {rows[1]['choices'][rows[1]['label']]}")
    assert made.steps == 40 * 8 / 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    records = {(r.metric, r.tags["variant"], r.tags["when"]): r for r in records_of(made, view)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    scorer = LmEvalScorer(local_task("arc_challenge", folder), str(folder / "tokenizer"), max_length=600)
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
    assert json.loads((tmp_path / "skip_M_3" / "finetuned.json").read_text())["schedule"] == "1 2 6"


@pytest.mark.soak
def test_tasks_without_usable_training_rows_are_refused(home, tmp_path):
    for split in ("train", "validation"):
        rows = [{"sentence": "The _ is red.", "choices": ["cup", "bag"], "label": 0}]
        pd.DataFrame(rows).to_parquet(tmp_path / f"w_{split}.parquet")
    of_test = {"files": {"test": "w_train.parquet"}}
    for task, files, sentence in (
        ("arc_challenge", "w_train.parquet", "w_train.parquet holds the rows that are scored: list files of train"),
        ("arc_challenge", of_test, "expected files of the split 'train', got test"),
        ("winogrande", "w_{split}.parquet", "do not stand behind what is asked"),
    ):
        (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"benchmark": {task: files}}))
        made = analysis(home[0], tmp_path, task=task)
        made.folder = tmp_path
        with pytest.raises(InputError, match=sentence):
            made.check(LayeredModel(tiny_causal_model(blocks=6)))
