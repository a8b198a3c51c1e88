"""The training modules in a plain Lightning Trainer: loaders, loggers, validation at the end, checkpoints."""

import csv
import json
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.pixels import pixel_statistics
from lit_layers.training import LitCausalLM, LitImageClassifier
from lit_layers.training.run_log import RunLog
from tests.support import tiny_images
from tests.support.tiny_training import CONFIG, CONTEXT, VOCABULARY, RandomBlocks

BLOCKS = RandomBlocks(16)
PIXELS = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(12) % 3


def text(**options) -> LitCausalLM:
    config = {**CONFIG, "vocab_size": VOCABULARY, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return LitCausalLM("gpt2", config, lr=1e-2, warmup_steps=2, **options)


def images(**options) -> LitImageClassifier:
    config = {**tiny_images.CONFIG, "img_size": 8, "num_classes": 3}
    return LitImageClassifier("vit_tiny_patch16_224", config, patch_size=4, lr=1e-2, warmup_steps=0, **options)


def trainer(root, **options) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    usual = {"max_steps": 5, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return L.Trainer(default_root_dir=root, **(usual | quiet | options))


def one(batch) -> DataLoader:
    return DataLoader([batch], batch_size=1, collate_fn=lambda batches: batches[0])


def blocks(form) -> DataLoader:
    rows = {"dict": BLOCKS, "tensor": BLOCKS.tokens, "tuple": TensorDataset(BLOCKS.tokens)}
    return DataLoader(rows[form], batch_size=4)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_token_blocks_of_any_loader_give_the_same_training(tmp_path):
    hashes = set()
    for form in ("dict", "tensor", "tuple"):
        module = text()
        trainer(tmp_path).fit(module, blocks(form))
        hashes.add(weights_hash(module.model))
        with torch.no_grad():
            logits = module.eval()(BLOCKS.tokens[:, :-1])
            expected = F.cross_entropy(logits.flatten(0, 1), BLOCKS.tokens[:, 1:].flatten())
        (scores,) = trainer(tmp_path).validate(module, blocks(form), verbose=False)
        assert scores["validation/loss"] == pytest.approx(expected.item(), rel=1e-5), form
    assert len(hashes) == 1


def test_pairs_of_images_and_labels_can_be_trained_on(tmp_path):
    module = images(mixup=0.5)
    loader = DataLoader(TensorDataset(PIXELS, LABELS), batch_size=4)
    trainer(tmp_path).fit(module, loader)
    (scores,) = trainer(tmp_path).validate(module, loader, verbose=False)
    with torch.no_grad():
        hits = module.eval()(PIXELS).argmax(-1) == LABELS
    assert scores["validation/accuracy"] == pytest.approx(hits.float().mean().item())


def test_unsupported_batches_are_refused_in_one_sentence(tmp_path):
    padded = {"input_ids": BLOCKS.tokens, "attention_mask": BLOCKS.tokens * 0}
    for module, batch, sentence in (
        (text, {"labels": BLOCKS.tokens}, r"data: expected batches with input_ids \(batch, tokens\), got a dict"),
        (text, [torch.randn(2, 3)], r"expected batches with input_ids \(batch, tokens\), got a Tensor"),
        (text, padded, "expected blocks of tokens without padding"),
        (images, {"pixel_values": PIXELS}, "data: expected batches of images and labels, as a pair or by name, got"),
    ):
        with pytest.raises(InputError, match=sentence):
            trainer(tmp_path).fit(module(), one(batch))


class Noted(L.Callback):
    """A callback that records the learning rate of each step, the loss of each batch, and the validated steps."""

    def __init__(self):
        self.rates, self.losses, self.validated = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)


def test_the_loss_of_each_step_is_logged_and_the_last_step_is_validated(tmp_path):
    seen, logger = Noted(), CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run = trainer(
        tmp_path, logger=logger, callbacks=[seen], accumulate_grad_batches=2, log_every_n_steps=1, max_epochs=9
    )
    run.fit(text(), blocks("dict"), DataLoader(BLOCKS, batch_size=8))
    rows = [line.split(",") for line in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()]
    place = rows[0].index("train/loss")
    logged = [float(row[place]) for row in rows[1:] if row[place]]
    of_steps = [sum(pair) for pair in zip(seen.losses[::2], seen.losses[1::2], strict=True)]
    assert logged == pytest.approx(of_steps, rel=1e-6)
    assert seen.validated == [2, 4, 5]  # after each epoch of two steps, and after the last step


def test_the_learning_rate_falls_until_the_last_step_of_a_trainer_that_counts_epochs(tmp_path):
    shares = [(step - 2) / 7 for step in range(2, 9)]  # an epoch has 6 batches and 3 steps
    cosine = [1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * share))) for share in shares]
    for max_steps in (-1, 99):
        ends = {"max_epochs": 3, "max_steps": max_steps}
        run = trainer(tmp_path, callbacks=[seen := Noted()], accumulate_grad_batches=2, **ends)
        run.fit(text(), DataLoader(BLOCKS, batch_size=3))
        assert seen.rates == pytest.approx([0.5e-2, 1e-2, *cosine]), ends


def test_a_trainer_without_an_end_needs_decay_steps(tmp_path):
    endless = {"max_epochs": -1, "max_steps": -1, "max_time": {"seconds": 0}}
    with pytest.raises(InputError, match="model.decay_steps: expected a step, as neither"):
        trainer(tmp_path, **endless).fit(text(), blocks("dict"))
    trainer(tmp_path, **endless).fit(text(decay_steps=9), blocks("dict"))


def test_the_loss_of_a_step_with_fewer_micro_batches_is_their_mean(tmp_path):
    seen, log = Noted(), RunLog(tmp_path)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    options = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 3, "log_every_n_steps": 1}
    trainer(tmp_path, callbacks=[seen, log], logger=logger, **options).fit(text(), blocks("dict"))
    raw = [3 * loss for loss in seen.losses]  # an epoch has 4 batches
    expected = [sum(raw[0:3]) / 3, raw[3], sum(raw[4:7]) / 3, raw[7]]
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        logged = [float(row["train/loss"]) for row in csv.DictReader(file)]
    assert logged == pytest.approx(expected, rel=1e-5)
    written = [json.loads(line)["train/loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a module with a padded vocabulary, and its checkpoint from a Trainer."""
    folder = tmp_path_factory.mktemp("saved")
    module, run = text(pad_vocab_to=64, weight_decay=0.3), trainer(folder)
    run.fit(module, blocks("dict"))
    run.save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


def test_a_module_loads_the_checkpoint_that_a_trainer_saved(saved, tmp_path):
    module, file = saved
    again = LitCausalLM.load_from_checkpoint(file, weights_only=True)
    assert again.weight_decay == 0.3
    assert again.hparams == module.hparams
    assert again.model.config.vocab_size == module.model.config.vocab_size == 64
    assert weights_hash(again.model) == weights_hash(module.model)
    with torch.no_grad():
        states = [each.eval()(BLOCKS.tokens[:, :CONTEXT]) for each in (module, again)]
    assert torch.equal(*states)
    trainer(tmp_path).fit(again.train(), blocks("dict"))


def test_an_unsafe_checkpoint_is_refused_in_one_sentence(saved, tmp_path):
    file, content = tmp_path / "last.ckpt", torch.load(saved[1], weights_only=True)
    network = json.loads(content["network"])
    for change, sentence in (
        ({"_attn_implementation": "somebody/evil"}, r"the checkpoint: expected _attn_implementation sdpa or eager"),
        ({"model_type": "none"}, "checkpoint: expected model_type that this transformers knows, got none"),
    ):
        torch.save({**content, "network": json.dumps(network | change)}, file)
        with pytest.raises(InputError, match=sentence):
            LitCausalLM.load_from_checkpoint(file, weights_only=True)
    del content["network"]
    torch.save(content, file)
    with pytest.raises(InputError, match="checkpoint: it does not say which network it is of"):
        LitCausalLM.load_from_checkpoint(file, weights_only=True)


@pytest.fixture(scope="module")
def saved_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    run, module = tiny_images.fit(folder, lit=tiny_images.module(), steps=2)
    run.save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


def test_an_image_classifier_loads_its_checkpoint_with_the_statistics_of_its_images(saved_images):
    module, file = saved_images
    again = LitImageClassifier.load_from_checkpoint(file, weights_only=True)
    assert weights_hash(again.model) == weights_hash(module.model)
    assert pixel_statistics(again.model) == pixel_statistics(module.model) is not None
    assert again.validation_metrics.keys() == module.validation_metrics.keys()


def test_an_image_classifier_starts_from_the_weights_of_the_same_network_only(saved_images, tmp_path):
    module, file = saved_images
    begun = tiny_images.module(init_from=str(file), init_seed=7)
    tiny_images.trainer(tmp_path).validate(begun, datamodule=tiny_images.data(), verbose=False)
    assert weights_hash(begun.model) == weights_hash(module.model)
    assert begun.origin.step == 2
    other = tiny_images.module(init_from=str(file), patch_size=8)
    with pytest.raises(InputError, match="model.init_from: .*last.ckpt is of another network than this vit_tiny"):
        tiny_images.trainer(tmp_path).validate(other, datamodule=tiny_images.data(), verbose=False)
