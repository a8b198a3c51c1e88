"""Rows of a task as features: each text or image alone, in the correct split and with the correct label."""

import functools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lit_layers.data import ProbeTask
from lit_layers.data.images import image_source
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.models.families import Network
from lit_layers.models.pixels import set_pixel_statistics_
from lit_layers.models.view import LayeredModel
from lit_layers.select.choosing import TaskFeatures, image_task, text_task
from tests.data.test_image_sources import write_arrays
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2, write_csv
from tests.support.tiny_models import tiny

PARTS = ("train", "validation", "test")
MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)


def single_features(view: LayeredModel, batches: list[dict[str, Tensor]], pooling: str, first: int = 0) -> Tensor:
    """Return features of shape (layers + 1, rows, dim), each row from its own pass."""
    rows = []
    for batch in batches:
        hidden = view.trajectory(batch).hidden[:, 0, first:]
        rows.append({"last": hidden[:, -1], "mean": hidden.mean(1), "cls": hidden[:, 0]}[pooling])
    return torch.stack(rows, dim=1)


def stack_layers(task: TaskFeatures, part: str) -> Tensor:
    features = task.features(part)
    return torch.stack([features.layer(layer) for layer in range(features.num_layers + 1)])


def truncate(ids: list[int], length: int) -> list[int]:
    """Return the first tokens. A final [SEP] (id 3 of the BERT) stays at the end."""
    ends = [3] if ids[-1] == 3 else []
    return ids if len(ids) <= length else ids[: length - len(ends)] + ends


def song_task(folder, *, test=None, **options) -> ProbeTask:
    write_csv(folder / "train.csv", labelled(45))
    write_csv(folder / "test.csv", test or labelled(15, first=45))
    return ProbeTask("songs", str(folder), **options)


@pytest.mark.parametrize(("saved", "pooling"), [(saved_gpt2, "last"), (saved_bert, "mean"), (saved_bert, "cls")])
def test_features_of_texts_equal_those_of_each_text_alone(saved, pooling, tmp_path):
    view, task = LayeredModel(saved(tmp_path / "model")), song_task(tmp_path / "songs")
    found = text_task(view, task, tokenizer=str(tmp_path / "model"), pooling=pooling, max_tokens=12)
    tokenizer = load_tokenizer(str(tmp_path / "model")).tokenizer
    data = task.load()
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    assert set(splits["train"].texts) & set(splits["validation"].texts) == set()
    for part, split in splits.items():
        ids = [truncate(tokenizer.encode(text).ids, 12) for text in split.texts]
        expected = single_features(view, [{"input_ids": torch.tensor([each])} for each in ids], pooling)
        torch.testing.assert_close(stack_layers(found, part), expected, rtol=1e-4, atol=1e-5)
        named = [found.classes[label] for label in found.targets[part].tolist()]
        assert named == [text.split()[1] for text in split.texts], "the label that stands in the text"
    assert (found.name, found.kind, found.num_classes, found.pooling) == ("songs", "classification", 3, pooling)


def test_a_text_is_cut_at_the_limit_of_the_model_and_problems_of_texts_are_reported(tmp_path):
    view = LayeredModel(saved_gpt2(tmp_path / "model", n_positions=8))
    test = [*labelled(15, first=45), labelled(1)[0]]  # equal to a training text
    found = text_task(view, song_task(tmp_path / "songs", test=test), tokenizer=str(tmp_path / "model"))
    assert found.max_tokens == 8
    assert found.notes == (
        "Train and validation rows dropped because test has their text: 1.",
        "Texts truncated to the limit of tokens: 60.",
    )
    assert sum(len(found.targets[part]) for part in PARTS) == 60
    assert found.batch["input_ids"].shape[1] == 8
    wide = text_task(view, song_task(tmp_path / "songs"), tokenizer=str(tmp_path / "model"), max_tokens=3)
    assert wide.max_tokens == 3


def test_the_batch_for_the_check_has_a_few_validation_texts_with_the_longest_first(tmp_path):
    view, task = LayeredModel(saved_gpt2(tmp_path / "model")), song_task(tmp_path / "songs")
    found = text_task(view, task, tokenizer=str(tmp_path / "model"))
    tokenizer = load_tokenizer(str(tmp_path / "model")).tokenizer
    texts = {tuple(tokenizer.encode(text).ids) for text in task.load().validation.texts}
    rows = zip(found.batch["input_ids"].tolist(), found.batch["attention_mask"].sum(1).tolist(), strict=True)
    given = [tuple(ids[:length]) for ids, length in rows]
    assert len(given) == 8
    assert set(given) <= texts
    assert len(given[0]) == max(map(len, texts)) == found.batch["input_ids"].shape[1]


def test_a_regression_keeps_its_values(tmp_path):
    rows = [(f"They sang song number {number} tonight", str(number / 10)) for number in range(40)]
    write_csv(tmp_path / "songs.csv", rows)
    task = ProbeTask("songs", str(tmp_path / "songs.csv"), kind="regression", test=None)
    found = text_task(LayeredModel(saved_gpt2(tmp_path / "model")), task, tokenizer=str(tmp_path / "model"))
    assert (found.kind, found.classes, found.num_classes) == ("regression", None, None)
    for part, split in zip(PARTS, (task.load().train, task.load().validation, task.load().test), strict=True):
        assert found.targets[part].tolist() == [int(text.split()[4]) / 10 for text in split.texts]


def normalised_model(name: str) -> Network:
    """A tiny vision transformer with stored pixel statistics."""
    model: Network = tiny(name, img_size=8)
    model.pretrained_cfg = {}
    set_pixel_statistics_(model, MEAN, STD)
    return model


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return np.rint(data.images * (255 / 16)), data.target


def digit_of(pixels: Tensor) -> int:
    """Return the digit of the scikit-learn image with these pixels, 0 to 255 in the first channel."""
    images, labels = digits()
    (indices,) = np.where((images == pixels.round().numpy()).all((1, 2)))
    (label,) = set(labels[indices])
    return int(label)


@pytest.mark.parametrize(("name", "pooling"), [("vit", "cls"), ("vit", "mean"), ("vit_average", "mean")])
def test_features_of_images_equal_those_of_each_image_alone_normalised_as_in_training(name, pooling, monkeypatch):
    view = LayeredModel(normalised_model(name))
    seen: list[Tensor] = []
    original = LayeredModel.pass_states
    monkeypatch.setattr(
        LayeredModel, "pass_states", lambda self, b, look: (seen.append(b["pixel_values"]), original(self, b, look))
    )
    task = image_task(view, "digits", pooling=pooling, num_train=50, num_test=12)
    assert (task.name, task.classes, task.pooling) == ("digits", tuple("0123456789"), pooling)
    assert task.notes == ()
    pixels = torch.empty(0)
    for part in ("train", "test", "validation"):
        seen.clear()
        found = stack_layers(task, part)
        pixels = torch.cat(seen)
        one = [{"pixel_values": image[None]} for image in pixels]
        expected = single_features(view, one, pooling, first=1 if (name, pooling) == ("vit", "mean") else 0)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        for channel in range(3):  # grey images: 255 x (value x deviation + mean) in every channel
            grey = 255 * (pixels[:, channel] * STD[channel] + MEAN[channel])
            labels = [digit_of(image) for image in grey]
            assert labels == task.targets[part].tolist()
    assert [len(task.targets[part]) for part in PARTS] == [40, 10, 12]
    assert torch.equal(task.batch["pixel_values"], pixels[:8]), "the first validation images"


def test_no_image_is_in_two_splits_and_test_images_come_from_the_test_split(tmp_path):
    random = np.random.default_rng(0)
    images = random.integers(256, size=(60, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 3
    images[1] = images[0] = images[40]  # training images 0 and 1 equal test image 40
    labels[[0, 1, 40]] = 0
    images[5], labels[5] = images[4], labels[4]  # twice among the training images
    shapes = write_arrays(tmp_path / "shapes", (images[:40], labels[:40]), (images[40:], labels[40:]))
    task = image_task(LayeredModel(tiny("vit", img_size=8)), shapes, validation_share=0.4)
    assert task.notes == (
        f"Normalisation in training is unknown: pixel statistics of {shapes} are used.",
        "Training images dropped because test has them: 2.",
    )
    rows = {part: stack_layers(task, part)[1] for part in PARTS}  # at layer 0 the class token is the same for all
    kinds = {part: {tuple(row.tolist()) for row in each.round(decimals=3)} for part, each in rows.items()}
    assert [len(rows[part]) for part in PARTS] == [38 - len(rows["validation"]), len(rows["validation"]), 20]
    assert len(rows["validation"]) in (15, 16)
    assert kinds["train"] & kinds["validation"] == set()
    assert kinds["train"] & kinds["test"] == kinds["validation"] & kinds["test"] == set()
    assert len(kinds["train"]) + len(kinds["validation"]) == 37


def test_images_are_drawn_by_the_seed_and_a_smaller_set_is_part_of_a_larger_one():
    view = LayeredModel(tiny("vit", img_size=8))
    one, same, other = (image_task(view, "digits", num_train=30, num_test=10, seed=seed) for seed in (0, 0, 1))
    assert one.targets["test"].tolist() == same.targets["test"].tolist() != other.targets["test"].tolist()
    more = image_task(view, "digits", num_train=30, num_test=25)
    assert more.targets["test"][:10].tolist() == one.targets["test"].tolist()
    whole = image_source("digits")
    everything = image_task(view, "digits")
    assert len(everything.targets["test"]) == len(whole.test)


def test_wrong_models_options_and_images_are_refused_in_one_sentence(tmp_path):
    view = LayeredModel(tiny("vit", img_size=8))
    for call, sentence in (
        (
            lambda: image_task(LayeredModel(tiny("gpt2")), "digits"),
            "images: expected a vision model, got GPT2LMHeadMod",
        ),
        (lambda: text_task(view, "banking77", tokenizer="x"), "task: expected a model of text, got VisionTransformer"),
        (lambda: image_task(LayeredModel(tiny("vit_average", img_size=8)), "digits"), "no class token: choose mean"),
        (lambda: image_task(view, "digits", num_train=1), "num_train: expected 2 to 1442 images, got 1"),
        (lambda: image_task(view, "digits", num_test=5000), "num_test: expected 2 to 355 images, got 5000"),
        (lambda: image_task(view, "nowhere"), "source: expected digits, cifar10, cifar100, an existing path"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
    same = np.zeros((6, 8, 8), dtype=np.uint8)
    labels = np.array([0, 1, 0, 1, 0, 1])
    model = normalised_model("vit")
    alike = write_arrays(tmp_path / "a", (same, labels), (same, labels))
    with pytest.raises(InputError, match=r"every training image of .* is a test image, too: give other images"):
        image_task(LayeredModel(model), alike)


def test_features_that_are_not_finite_are_refused():
    model = tiny("vit", img_size=8)
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias[0] = torch.inf
    task = image_task(LayeredModel(model), "digits", num_train=20, num_test=4)
    with pytest.raises(InputError, match="the features of an image at layer 2 are not finite"):
        task.features("train")
