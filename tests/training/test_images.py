"""The image classifier: its recipe against formulas, exact resume, and its logs."""

import copy
import math

import lightning as L
import numpy as np
import pytest
import torch
from timm.optim import param_groups_weight_decay

from lit_layers import records
from lit_layers.analyses import Lens, Trajectory
from lit_layers.data import EvalImages
from lit_layers.data.images import SmallPictures, image_source
from lit_layers.errors import InputError
from lit_layers.models.build import vit
from lit_layers.models.pixels import pixel_statistics
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.modules import parameter_groups
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_folder import step_folder
from lit_layers.training.run_log import RunLog
from tests.support.tiny_images import data, fit, module

MIXED = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
VALIDATED = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}
AUGMENTED = {"crop_padding": 1, "flip": True, "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "num_repeats": 3}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_biases_norms_class_token_and_positions_do_not_decay():
    model = vit("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, init_values=0.1)
    decayed, kept = ({id(each) for each in group["params"]} for group in parameter_groups(model, 0.05))
    names = {id(each): name for name, each in model.named_parameters()}
    assert not [names[each] for each in decayed if "norm" in names[each] or not names[each].endswith("weight")]
    assert decayed | kept == names.keys()
    theirs: list = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())  # pyright: ignore
    assert {group["weight_decay"]: {id(each) for each in group["params"]} for group in theirs} == {
        0.05: decayed,
        0.0: kept,
    }


class Step:
    """A module with one fixed batch: its training loss, and the loss expected for given images and targets."""

    def __init__(self, tmp_path, **options) -> None:
        _, self.lit = fit(tmp_path, lit=module(drop_path_rate=0.0, **options), steps=1)
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(6, 3, 8, 8, generator=generator)
        self.labels = torch.tensor([0, 3, 9, 2, 2, 7])

    def loss(self) -> float:
        np.random.seed(8)
        batch = {"pixel_values": self.images.clone(), "labels": self.labels}
        return float(self.lit.training_step(batch, 0).detach())

    def expected(self, images: torch.Tensor, targets: np.ndarray) -> float:
        with torch.no_grad():
            logits = copy.deepcopy(self.lit.model).double()(images.double()).numpy()
        shifted = logits - logits.max(1, keepdims=True)
        log_shares = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return float(-(targets * log_shares).sum(1).mean())

    def smoothed(self, smoothing: float) -> np.ndarray:
        return np.eye(10)[self.labels.numpy()] * (1 - smoothing) + smoothing / 10


def test_label_smoothing_spreads_its_share_over_all_classes(tmp_path):
    step = Step(tmp_path, label_smoothing=0.1)
    assert step.loss() == pytest.approx(step.expected(step.images, step.smoothed(0.1)), rel=1e-5)


def test_mixup_blends_images_and_targets_with_those_of_the_reversed_batch(tmp_path):
    step = Step(tmp_path, mixup=0.8, label_smoothing=0.1)
    found = step.loss()
    np.random.seed(8)
    np.random.rand()  # mix in every batch
    share = np.random.beta(0.8, 0.8)
    images = share * step.images.double() + (1 - share) * step.images.double().flip(0)
    targets = share * step.smoothed(0.1) + (1 - share) * step.smoothed(0.1)[::-1]
    assert found == pytest.approx(step.expected(images, targets), rel=1e-5)


def test_cutmix_pastes_a_rectangle_and_weights_the_targets_by_its_area(tmp_path):
    step = Step(tmp_path, cutmix=1.0)
    found = step.loss()
    np.random.seed(8)
    np.random.rand()
    side = int(8 * math.sqrt(1 - np.random.beta(1.0, 1.0)))
    down, across = np.random.randint(0, 8), np.random.randint(0, 8)
    rows = slice(max(0, down - side // 2), min(8, down + (side + 1) // 2))
    columns = slice(max(0, across - side // 2), min(8, across + (side + 1) // 2))
    images = step.images.double()
    images[:, :, rows, columns] = step.images.double().flip(0)[:, :, rows, columns]
    share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / 64
    assert 0 < share < 1
    targets = share * step.smoothed(0) + (1 - share) * step.smoothed(0)[::-1]
    assert found == pytest.approx(step.expected(images, targets), rel=1e-5)


def test_validation_measures_the_trained_weights(tmp_path):
    log = RunLog(tmp_path)
    lit = module(lr=2e-2, drop_path_rate=0.0)
    fit(tmp_path, log, lit=lit, steps=20, log_every_n_steps=1, **VALIDATED)
    row = records.rows(log.file)[-1]
    assert row.keys() >= {"train/loss", "train/learning_rate", "train/grad_norm", "train/images_per_second"}
    assert "tokens" not in row
    images = data()
    images.setup("fit")
    pixels = images._normalise(images.source.test.pixels[:40])
    labels = images.source.test.labels[:40]
    with torch.no_grad():
        logits = lit.eval().model(pixels).double()
    top5 = (logits.topk(5).indices == labels[:, None]).any(1).double().mean()
    assert row["validation/accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert row["validation/accuracy_top5"] == pytest.approx(float(top5))
    assert row["validation/loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path, accumulate, workers):
    def run(root, steps, images, resume_from=None):
        log = RunLog(root, resume=resume_from is not None)
        keep = ResumeCheckpoint(root, every=None)
        options = {"steps": steps, "accumulate_grad_batches": accumulate, "resume_from": resume_from}
        _, lit = fit(root, log, keep, lit=module(decay_steps=6, **MIXED), images=images, **options)
        rows = [{n: v for n, v in row.items() if "per_second" not in n} for row in records.rows(log.file)]
        return lit.model.state_dict(), rows

    whole = run(tmp_path / "whole", 6, data(**AUGMENTED))
    run(tmp_path / "parts", 3, data(**AUGMENTED, num_workers=workers))
    point = resume_point(tmp_path / "parts", "last")
    assert point is not None
    assert point.step == 3
    parts = run(tmp_path / "parts", 6, data(**AUGMENTED), point.state)
    assert same(parts[0], whole[0])
    assert parts[1] == whole[1]
    assert len(whole[1]) == 6


def test_saved_steps_are_timm_models_and_measuring_changes_no_bit(tmp_path):
    images = EvalImages("digits", num_images=12, batch_size=6)
    watched = EmergenceCallback([Trajectory(batches=images), Lens(batches=images)], {"every": 2}, tmp_path / "run")
    _, lit = fit(tmp_path, SeriesCheckpoint({"every": 2}, tmp_path / "run"), watched, lit=module(**MIXED), steps=3)
    _, plain = fit(tmp_path, lit=module(**MIXED), steps=3)
    assert same(lit.model.state_dict(), plain.model.state_dict())
    found = records.read(tmp_path / "run" / "measurements.jsonl")
    assert [(m.step, m.analysis, m.error) for m in found] == [
        (step, name, None) for step in (0, 2, 3) for name in ("trajectory", "lens")
    ]
    again = load(step_folder(tmp_path / "run", 3))
    assert same(again.state_dict(), lit.model.state_dict())
    (batch,) = list(EvalImages("digits", num_images=12, batch_size=12))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(again(batch["pixel_values"]).double(), batch["labels"])
    last = [r for r in found[-1].records if r.metric == "logit_lens_loss" and r.layer == 2]
    assert last[0].value == pytest.approx(float(loss), rel=1e-5)


def test_images_unlike_those_of_training_are_refused_and_the_saved_model_has_their_statistics(tmp_path):
    for options, sentence in (
        ({"normalisation": "imagenet"}, r"normalisation imagenet of digits gives mean \(0.485, 0.456, 0.406\)"),
        ({"image_size": 12}, "expected an image_size of 8, which the model takes, got images of 12 px"),
    ):
        images = EvalImages("digits", num_images=4, **options)
        watched = EmergenceCallback([Lens(batches=images)], [0], tmp_path / "no")
        with pytest.raises(InputError, match=sentence):
            fit(tmp_path, watched, steps=1)
    fit(tmp_path, SeriesCheckpoint([1], tmp_path / "run"), steps=1)
    again = load(step_folder(tmp_path / "run", 1))
    pictures, said = image_source("digits").train, pixel_statistics(again)
    assert isinstance(pictures, SmallPictures)
    assert said is not None
    pixels = pictures.pixels.double() / 255
    assert said[0] == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert said[1] == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())
    view = LayeredModel(again)
    Lens(batches=EvalImages("digits", num_images=4)).check(view)
    with pytest.raises(InputError, match="the model was trained with mean"):
        Lens(batches=EvalImages("digits", num_images=4, normalisation="half")).check(view)


def test_nan_logits_have_a_nan_accuracy(tmp_path):
    lit = module()
    trainer, _ = fit(tmp_path, lit=lit, steps=1, **VALIDATED)
    with torch.no_grad():
        lit.model.get_parameter("head.bias")[3] = torch.nan
    trainer.validate(lit, datamodule=data(), verbose=False)
    assert math.isnan(trainer.callback_metrics["validation/accuracy"])


def test_the_gradient_norm_is_measured_before_clipping_and_the_limit_holds(tmp_path):
    class Norms(L.Callback):
        @staticmethod
        def norm(model) -> float:
            return math.sqrt(sum(float(each.grad.double().square().sum()) for each in model.parameters()))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.before = self.norm(pl_module.model)

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.after = self.norm(pl_module.model)

    for limit in (None, 0.01):
        norms, log = Norms(), RunLog(tmp_path / str(limit))
        fit(tmp_path, norms, log, steps=1, gradient_clip_val=limit)
        (row,) = records.rows(log.file)
        assert row["train/grad_norm"] == pytest.approx(norms.before, rel=1e-5), limit
        assert norms.before > 0.05
        assert norms.after == pytest.approx(norms.before if limit is None else limit, rel=1e-3), limit
