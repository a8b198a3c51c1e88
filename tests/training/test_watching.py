"""One tiny run in four trainers has the same measurements, and the same weights as without measuring."""

import contextlib
import re

import lightning as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import lit_layers
from lit_layers import records
from lit_layers.analyses import LayerSimilarity, Lens, Trajectory
from lit_layers.errors import InputError
from lit_layers.integrations import EmergenceTrainerCallback
from lit_layers.models.build import weights_hash
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.support.random_text import RandomText
from tests.support.tiny_training import CONTEXT, VOCABULARY

STEPS, LAST, SIZE = [0, 2], 3, 4  # the last step is always included
TOKENS = torch.randint(VOCABULARY, (LAST * SIZE, CONTEXT), generator=torch.Generator().manual_seed(3))
DATA = [{"input_ids": ids, "labels": ids} for ids in TOKENS]


def network(dropout: float) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def loader() -> DataLoader:
    return DataLoader(DATA, batch_size=SIZE)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def analyses() -> list:
    return [Trajectory(batches=RandomText()), Lens(batches=RandomText())]


def train_loop(model, root, watched, **options) -> None:
    optimizer = optimizer_of(model)
    watching = lit_layers.watch(model, analyses(), steps=STEPS, root=root, save=True, **options) if watched else None
    with watching or contextlib.nullcontext():
        for batch in loader():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watching:
                watching.step()


def module_of(model, package=L):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, _):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return optimizer_of(self.net)

    return Module()


def train_lightning(model, root, watched, package=L, **options) -> None:
    both = [
        SeriesCheckpoint(STEPS, root, model="net"),
        EmergenceCallback(analyses(), STEPS, root, model="net", **options),
    ]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = package.Trainer(
        max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=both if watched else [], **quiet
    )
    model.train()
    trainer.fit(module_of(model, package), loader())


def train_old_lightning(model, root, watched) -> None:
    train_lightning(model, root, watched, pytorch_lightning)


class OrderedTrainer(Trainer):
    """A transformers Trainer with the batch order and the mean loss of the plain loop."""

    def _get_train_sampler(self, *_, **__):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, **_):
        return model(**inputs).loss


def train_transformers(model, root, watched, if_exists="refuse", **options) -> None:
    callbacks = [EmergenceTrainerCallback(analyses(), STEPS, root, save=True, if_exists=if_exists)] if watched else []
    arguments = TrainingArguments(
        str(root.parent / "hf"), num_train_epochs=1, per_device_train_batch_size=SIZE, report_to=[], use_cpu=True,
        disable_tqdm=True, max_grad_norm=0, seed=7, save_strategy="no", logging_strategy="no", **options,
    )  # fmt: skip
    optimizer = optimizer_of(model)
    both = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    OrderedTrainer(model, arguments, train_dataset=DATA, optimizers=both, callbacks=callbacks).train()


TRAINERS = [train_loop, train_lightning, train_old_lightning, train_transformers]


def trained(train, root, *, dropout: float, watched: bool) -> dict[str, torch.Tensor]:
    model = network(dropout).train()
    torch.manual_seed(5)
    train(model, root, watched)
    return model.state_dict()


def test_four_trainers_measure_equal_values_at_the_same_steps(tmp_path):
    found = {}
    for train in TRAINERS:
        root = tmp_path / train.__name__ / "run"
        trained(train, root, dropout=0.0, watched=True)
        measurements = records.read(root / "measurements.jsonl")
        assert not [m.error for m in measurements if m.error]
        found[train] = [(m.step, m.analysis, m.provenance["weights_hash"], m.records) for m in measurements]
        assert saved_steps(root) == [0, 2, 3]
        assert weights_hash(AutoModelForCausalLM.from_pretrained(step_folder(root, 2))) == found[train][2][2]
    assert [(step, name) for step, name, *_ in found[train_loop]] == [
        (step, name) for step in (0, 2, 3) for name in ("trajectory", "lens")
    ]
    assert found[train_loop][0][2] == weights_hash(network(0.0)), "step 0 is measured before the first update"
    for train in TRAINERS[1:]:
        assert found[train] == found[train_loop], train.__name__


@pytest.mark.parametrize("train", [train_loop, train_lightning, train_transformers])
def test_training_with_dropout_ends_in_the_same_bits_with_and_without_watching(tmp_path, train):
    watched = trained(train, tmp_path / "run", dropout=0.3, watched=True)
    alone = trained(train, tmp_path / "other", dropout=0.3, watched=False)
    assert (tmp_path / "run" / "measurements.jsonl").exists()
    assert not (tmp_path / "other").exists()
    for name, weights in alone.items():
        assert torch.equal(weights, watched[name]), name


def test_a_resumed_loop_measures_only_missing_steps(tmp_path):
    model = network(0.0)
    first = lit_layers.watch(model, analyses()[:1], steps=[0, 2, 4], root=tmp_path / "run", tokens_per_step=10)
    first.step(2)
    first.close()
    with lit_layers.watch(
        model, analyses()[:1], steps=[0, 2, 4], root=tmp_path / "run", first_step=2, tokens_per_step=10,
        if_exists="resume",
    ) as second:  # fmt: skip
        second.step(3)
        second.step()
    measurements = records.read(tmp_path / "run" / "measurements.jsonl")
    assert [(m.step, m.tokens) for m in measurements] == [(0, 0), (2, 20), (4, 40)]


def test_an_exception_in_the_loop_unlocks_the_folder_and_stops_measuring(tmp_path):
    def broken_loop() -> None:
        with lit_layers.watch(network(0.0), analyses()[:1], steps=[0], root=tmp_path / "run") as watching:
            watching.step()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        broken_loop()
    assert [m.step for m in records.read(tmp_path / "run" / "measurements.jsonl")] == [0]
    assert not list((tmp_path / "run").glob("*.lock"))


def test_models_and_batches_that_cannot_be_measured_are_refused_before_the_first_step(tmp_path):
    for model, batches, said in (
        (torch.nn.Linear(2, 2), RandomText(), "Linear"),
        (network(0.0), "some text", "lens: batches: expected `Batches`, or a DataLoader.*got a str"),
        (network(0.0), [{"text": ["a"]}], "batch 0 has text"),
    ):
        with pytest.raises(InputError, match=said):
            lit_layers.watch(model, [Lens(batches=batches)], steps=[0], root=tmp_path / "run")
    assert not (tmp_path / "run" / "measurements.jsonl").exists()


WRONG = (
    ("analyses", [TOKENS[:2] + VOCABULARY], f"GPT2LMHeadModel knows {VOCABULARY} tokens, got token"),
    ("analyses", [TOKENS[:2] - VOCABULARY], f"knows {VOCABULARY} tokens, got token -"),
    ("analyses", [TOKENS[:2].repeat(1, 2)], f"GPT2LMHeadModel takes at most {CONTEXT} tokens, got {2 * CONTEXT}"),
    ("analyses", [torch.zeros(2, 3, 8, 8)], "trajectory: expected batches with input_ids, got one with pixel_values"),
    ("analyses", "lens", "analyses: expected a list of them, such as [Lens(batches=data)], got a str"),
    ("root", "", "root: expected a folder, got ''"),
    ("loggers", "wandb", "or runs of W&B, got 'w'"),
    ("loggers", [3], "or runs of W&B, got 3"),
    ("root", "s3://bucket/run", "s3:/bucket/run: mount the store"),
    ("root", "x" * 300, "(File name too long); choose another folder"),
)


def test_a_wrong_option_is_refused_in_one_sentence_before_the_first_step(tmp_path):
    for option, value, said in WRONG:
        options = {"analyses": [Trajectory(batches=TOKENS)], "steps": [0], "root": tmp_path / "run", option: value}
        if option == "analyses":
            options["analyses"] = [value if isinstance(value, str) else Trajectory(batches=value)]
        with pytest.raises(InputError, match=re.escape(said)):
            lit_layers.watch(network(0.0), options.pop("analyses"), **options)
        assert not (tmp_path / "run").exists(), said


@pytest.mark.parametrize(
    "train", [train_loop, train_lightning, pytest.param(train_transformers, marks=pytest.mark.soak)]
)
def test_data_that_fit_no_step_end_a_training_before_it_begins(train, tmp_path, monkeypatch):
    model = network(0.0)
    untrained = weights_hash(model)
    given = [Trajectory(batches=TOKENS), LayerSimilarity(batches=TOKENS[:2], num_tokens=1)]
    monkeypatch.setitem(globals(), "analyses", lambda: given)
    with pytest.raises(InputError, match="layer_similarity: layer_cka needs 4 rows or more, got 2"):
        train(model, tmp_path / "run", watched=True)
    assert weights_hash(model) == untrained
    given[1] = LayerSimilarity(batches=TOKENS, num_tokens=1)
    train(model, tmp_path / "run", watched=True, if_exists="resume")
    measured = records.read(tmp_path / "run" / "measurements.jsonl")
    assert sorted((m.step, m.analysis) for m in measured if m.error is None) == [
        (step, name) for step in (*STEPS, LAST) for name in ("layer_similarity", "trajectory")
    ]


def test_an_impossible_step_number_is_refused_and_nothing_is_measured(tmp_path):
    with lit_layers.watch(network(0.0), analyses()[:1], steps={"every": 1}, root=tmp_path / "run") as watched:
        watched.step(5)
        for number, said in (
            (3, "at least 5, got 3"),
            ("6", "a whole number, got 6"),
            (6.5, "a whole number, got 6.5"),
        ):
            with pytest.raises(InputError, match=f"step: expected {said}"):
                watched.step(number)
    with pytest.raises(InputError, match="step: this watch is closed: make another one to go on"):
        watched.step()
    assert [m.step for m in records.read(tmp_path / "run" / "measurements.jsonl")] == [0, 5]


def test_a_skipped_scheduled_step_is_measured_at_the_next_number(tmp_path, caplog):
    with (
        caplog.at_level("INFO"),
        lit_layers.watch(network(0.0), analyses()[:1], steps=[3, 7, 8], root=tmp_path / "run") as watched,
    ):
        for number in (2, 3, 5, 9, 10):
            watched.step(number)
    assert [m.step for m in records.read(tmp_path / "run" / "measurements.jsonl")] == [0, 3, 9, 10]
    assert f"measured 3 of 5 scheduled steps, not 7, 8: lit-layers report {tmp_path / 'run'} draws them" in caplog.text


def test_a_compiled_network_is_unwrapped_for_measuring(tmp_path):
    model = network(0.0)
    compiled = torch.compile(model, backend="eager")
    with lit_layers.watch(compiled, analyses()[:1], steps=[0], root=tmp_path / "run") as watching:
        assert watching.model is model


@pytest.mark.parametrize("stops", [False, True])
def test_a_best_checkpoint_loaded_at_the_end_is_not_measured_as_the_last_step(stops, tmp_path):
    """If the transformers Trainer stops early, its last step is not measured, as it was not known in advance."""
    hashes = {}

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            hashes[state.global_step] = weights_hash(model)
            control.should_training_stop = stops and state.global_step == LAST

    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    each = {f"{what}_strategy": "steps" for what in ("eval", "save")} | {"eval_steps": 1, "save_steps": 1}
    arguments = TrainingArguments(
        str(tmp_path / "hf"), max_steps=LAST + stops, per_device_train_batch_size=SIZE, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-2, **options, **each,
    )  # fmt: skip
    watched = EmergenceTrainerCallback(analyses(), {"every": 100}, tmp_path / "run", save=True)
    trainer = Trainer(network(0.0), arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=[watched, Noting()])
    trainer.train()
    assert weights_hash(trainer.model) == hashes[1], "the worst is the first one"
    measured = {m.step: m.provenance["weights_hash"] for m in records.read(tmp_path / "run" / "measurements.jsonl")}
    assert measured.keys() == ({0} if stops else {0, LAST})
    assert stops or measured[LAST] == hashes[LAST]


def current_weights(root) -> dict[int | None, str]:
    """Return the weights hash of each step that report, emerge and tables draw."""
    measurements = records.latest(records.read(root / "measurements.jsonl"))
    assert {m.step for m in measurements} == set(records.frame(root)["step"])
    return {m.step: m.provenance["weights_hash"] for m in measurements}


@pytest.mark.parametrize(
    "train", [train_loop, train_lightning, pytest.param(train_transformers, marks=pytest.mark.soak)]
)
def test_a_second_training_in_a_root_is_refused_or_replaces_the_first(train, tmp_path):
    """A script that runs again, for each fold or each trial of a search, trains in the same root."""
    root = tmp_path / "run"
    train(network(0.0), root, watched=True)
    first = records.read(root / "measurements.jsonl")
    (training,) = {m.training for m in first}
    assert records.lineage_in(root) == ("run", training, ())
    other = GPT2LMHeadModel(network(0.0).config)
    untrained = weights_hash(other)
    sentence = f"root: {root} already holds a run with checkpoints up to step 3; choose another folder, if_exists="
    with pytest.raises(InputError, match=re.escape(sentence)):
        train(other, root, watched=True)
    with pytest.raises(InputError, match="with these weights at step 0: resume it from its own checkpoint"):
        train(other, root, watched=True, if_exists="resume")
    assert weights_hash(other) == untrained
    assert records.read(root / "measurements.jsonl") == first
    train(other, root, watched=True, if_exists="overwrite")
    second = records.read(root / "measurements.jsonl")
    assert [m.step for m in second] == [m.step for m in first]
    assert second[0].provenance["weights_hash"] == untrained
    assert training not in {m.training for m in second}


def test_a_transformers_trainer_that_trains_twice_is_refused_the_second_time(tmp_path):
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    callback = EmergenceTrainerCallback(analyses()[:1], [0], tmp_path / "run")
    trainer = Trainer(network(0.0), arguments, train_dataset=DATA, callbacks=[callback])
    trainer.train()
    with pytest.raises(InputError, match="already holds a run"):
        trainer.train()


def loop(root, weights, steps, *, change: float = 1.0, **options) -> dict[int, dict]:
    """Add a constant to the weights at each step, and return the weights after each step."""
    model = network(0.0)
    model.load_state_dict(weights)
    kept = {options.get("first_step", 0): weights}
    with lit_layers.watch(model, analyses()[:1], steps={"every": 2}, root=root, **options) as watched:
        for _ in range(steps):
            with torch.no_grad():
                model.transformer.wte.weight += change
            watched.step()
            kept[watched.now] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return kept


def hash_of(weights: dict) -> str:
    model = network(0.0)
    model.load_state_dict(weights)
    return weights_hash(model)


def test_a_training_that_goes_back_abandons_its_old_branch_and_keeps_the_lines(tmp_path):
    root = tmp_path / "run"
    first = loop(root, network(0.0).state_dict(), 10, save=True)
    with pytest.raises(InputError, match="not measured with these weights at step 4"):
        loop(root, first[6], 1, first_step=4, if_exists="resume")
    with pytest.raises(InputError, match="at step 5: .* .6, 8, 10."):
        loop(root, first[5], 1, first_step=5, if_exists="resume")
    second = loop(root, first[4], 3, first_step=4, if_exists="resume", change=7, save=True)
    assert current_weights(root) == {
        step: hash_of(weights[step]) for weights, steps in ((first, (0, 2, 4)), (second, (6, 7))) for step in steps
    }
    lines = records.read(root / "measurements.jsonl")
    assert len({m.training for m in lines}) == 1
    assert [m.step for m in lines] == [0, 2, 4, 6, 8, 10, 4, 6, 7]
    assert saved_steps(root) == [0, 2, 4, 6, 7]
    assert saved_steps(root / "abandoned") == [6, 8, 10]
    for m in lines:
        assert bool(records.read_values(root, m)) == (m.step != 6 or bool(m.resumed)), "of the branch that counts"
    with pytest.raises(InputError, match="not measured with these weights at step 6"):
        loop(root, first[6], 1, first_step=6, if_exists="resume")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty", "ignore:You're resuming from a checkpoint")
def test_a_lightning_trainer_resumes_from_its_own_checkpoint_between_measured_steps(tmp_path):
    def train(steps: int, root, state=None, **options) -> None:
        watch = EmergenceCallback(analyses()[:1], {"every": 4}, root, model="net", **options)
        each = ModelCheckpoint(tmp_path / "states", "{step}", every_n_train_steps=1, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = L.Trainer(max_steps=steps, callbacks=[watch, each], **quiet)
        trainer.fit(module_of(network(0.0)), DataLoader(DATA * 2, batch_size=SIZE), ckpt_path=state)

    root, state = tmp_path / "run", tmp_path / "states" / "step=3.ckpt"
    train(5, root)
    assert current_weights(root).keys() == {0, 4, 5}
    with pytest.raises(InputError, match="already holds a run"):
        train(4, root, state)
    train(4, root, state, if_exists="resume")
    assert current_weights(root).keys() == {0, 4}
    train_loop(GPT2LMHeadModel(network(0.0).config), tmp_path / "other", watched=True)
    with pytest.raises(InputError, match="not measured with these weights at step 3"):
        train(4, tmp_path / "other", state, if_exists="resume")


def test_a_transformers_trainer_resumes_from_its_own_checkpoint(tmp_path):
    def train(steps: int, root, state=None, **options) -> None:
        arguments = TrainingArguments(
            str(tmp_path / "hf"), max_steps=steps, per_device_train_batch_size=SIZE, report_to=[], use_cpu=True,
            disable_tqdm=True, save_steps=1, seed=7,
        )  # fmt: skip
        watched = EmergenceTrainerCallback(analyses()[:1], {"every": 4}, root, **options)
        Trainer(network(0.0), arguments, train_dataset=DATA, callbacks=[watched]).train(resume_from_checkpoint=state)

    root, state = tmp_path / "run", str(tmp_path / "hf" / "checkpoint-3")
    train(5, root)
    with pytest.raises(InputError, match="already holds a run"):
        train(4, root, state)
    train(4, root, state, if_exists="resume")
    assert current_weights(root).keys() == {0, 4}
    assert not [m for m in records.read(root / "measurements.jsonl") if m.error]


def test_a_new_training_next_to_a_failed_one_is_separate(tmp_path):
    """A notebook cell that runs again leaves the earlier watch alive as long as its variable exists."""
    root = tmp_path / "run"
    failed = lit_layers.watch(network(0.0), analyses()[:1], steps={"every": 1}, root=root)
    failed.step()
    with pytest.raises(InputError, match="already holds a run"):
        lit_layers.watch(network(0.0), analyses()[:1], steps={"every": 1}, root=root)
    lit_layers.watch(network(0.0), analyses()[:1], steps={"every": 1}, root=root, if_exists="overwrite").close()
    with pytest.raises(InputError, match="this watch is closed"):
        failed.step()
    assert current_weights(root).keys() == {0}


def test_files_of_the_user_are_not_a_run_and_stay(tmp_path):
    root = tmp_path / "run"
    mine = [root / name for name in ("config.yaml", "metrics.jsonl", "wandb/run.txt", "resume/state.pt", "step-500/x")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for if_exists in ("refuse", "overwrite"):
        lit_layers.watch(network(0.0), analyses()[:1], steps=[0], root=root, if_exists=if_exists).close()
    assert all(path.read_text() == "mine" for path in mine)
