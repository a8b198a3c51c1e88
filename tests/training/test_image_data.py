"""The images of a step and their augmentation depend only on the index of the sample."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_layers.data.images import image_source
from lit_layers.training.datamodules import LitImageData, SampleOrder
from tests.data.test_image_sources import write_folders

AUGMENTED = {"crop_padding": 1, "flip": True, "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5}


def batches(
    images: LitImageData, count: int, *, step: int = 0, rank: int = 0, world_size: int = 1, accumulate: int = 1
):
    """Return the batches that a rank trains on, as the Trainer reads them from the loader."""
    place = {"global_rank": rank, "world_size": world_size, "global_step": step, "accumulate_grad_batches": accumulate}
    usual = {"overfit_batches": 0, "limit_train_batches": 1.0, "max_epochs": -1, "min_epochs": None, "callbacks": []}
    usual |= {"_accelerator_connector": SimpleNamespace(use_distributed_sampler=False), "check_val_every_n_epoch": 1}
    images.trainer = SimpleNamespace(**place, **usual, training=True)  # pyright: ignore[reportAttributeAccessIssue]
    images.setup("fit")
    found, loader = [], iter(images.train_dataloader())
    for _ in range(count):
        batch = images.on_before_batch_transfer(next(loader), 0)
        batch = images.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        found.append(images.on_after_batch_transfer(batch, 0))
    return found


def joined(parts) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def assert_same(one, other):
    assert one.keys() == other.keys() == {"pixel_values", "labels"}
    assert all(torch.equal(one[name], other[name]) for name in one)


def digits(**options) -> LitImageData:
    return LitImageData("digits", **{"global_batch_size": 8, **AUGMENTED, **options})


def test_each_epoch_has_every_image_once_in_another_order():
    order = SampleOrder(50, seed=1)
    epochs = [[order.image(number) for number in range(start, start + 50)] for start in (0, 50)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 2
    assert epochs[0] != epochs[1]


def test_repeated_augmentation_gives_each_image_three_times_in_a_row_with_different_changes():
    order = SampleOrder(50, seed=1, num_repeats=3)
    epoch = [order.image(number) for number in range(50)]
    assert epoch == [image for image in epoch[::3] for _ in range(3)][:50]
    assert len(set(epoch)) == 17
    assert [order.image(number) for number in range(50, 100)] != epoch
    (batch,) = batches(digits(num_repeats=3, global_batch_size=6), 1)
    assert batch["labels"].tolist() == [label for label in batch["labels"].tolist()[::3] for _ in range(3)]
    first, second, third = batch["pixel_values"][:3]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_batch_has_the_requested_images_in_order_with_repeats():
    pictures = image_source("digits").train
    chosen = [5, 0, 5, len(pictures) - 1]
    assert torch.equal(pictures.batch(chosen), torch.stack([pictures.pixels[number] for number in chosen]))


def test_a_step_has_the_same_augmented_images_however_it_is_split():
    world_size = accumulate = 2
    (whole,) = batches(digits(), 1, step=3)
    parts = [
        batches(digits(), accumulate, step=3, rank=rank, world_size=world_size, accumulate=accumulate)
        for rank in range(world_size)
    ]
    assert_same(joined([parts[rank][micro] for micro in range(accumulate) for rank in range(world_size)]), whole)


def test_a_run_that_starts_at_a_step_has_the_images_of_an_uninterrupted_run():
    assert_same(batches(digits(), 1, step=2)[0], batches(digits(), 3)[2])


@pytest.mark.slow
def test_large_images_are_the_same_with_and_without_workers(tmp_path):
    write_folders(tmp_path, each=3)
    options = {"image_size": 48, "normalisation": "imagenet", "global_batch_size": 4, "flip": True, "erasing": 0.5}
    options |= {"rand_augment": "rand-m9-mstd0.5-inc1"}
    alone = batches(LitImageData(str(tmp_path), **options), 3)
    assert alone[0]["pixel_values"].shape == (4, 3, 48, 48)
    for one, other in zip(alone, batches(LitImageData(str(tmp_path), **options, num_workers=2), 3), strict=True):
        assert_same(one, other)
    assert_same(batches(LitImageData(str(tmp_path), **options), 1, step=2)[0], alone[2])


def test_augmentation_does_not_change_the_random_generators_of_training(tmp_path):
    write_folders(tmp_path, each=3)
    images = LitImageData(str(tmp_path), image_size=48, normalisation="half", global_batch_size=4, erasing=1.0)
    batches(images, 0)
    dataset = images.train_dataloader().dataset

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore

    before = state()
    first, again, other = (dataset.__getitems__(numbers) for numbers in ([0, 1], [0, 1], [6, 7]))
    assert state() == before
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    assert not torch.equal(first["pixel_values"], other["pixel_values"])


def test_without_augmentation_the_images_are_only_normalised():
    (batch,) = batches(LitImageData("digits", global_batch_size=16), 1)
    pictures, order = image_source("digits").train, SampleOrder(1442, seed=0)
    shares = pictures.pixels.double() / 255
    chosen = [order.image(number) for number in range(16)]
    expected = (shares[chosen] - shares.mean()) / shares.std(correction=0)
    torch.testing.assert_close(batch["pixel_values"].double(), expected, atol=1e-5, rtol=0)
    assert batch["labels"].tolist() == pictures.labels[chosen].tolist()


def test_small_images_are_crops_of_the_padded_image_and_may_be_flipped():
    images = LitImageData("digits", global_batch_size=60, normalisation="half", crop_padding=1, flip=True)
    (batch,) = batches(images, 1)
    pictures, order = image_source("digits").train, SampleOrder(1442, seed=0)
    wide = torch.nn.functional.pad(pictures.pixels[[order.image(number) for number in range(60)]], [1] * 4)
    places = []
    for image, crop in zip(wide, ((batch["pixel_values"] * 0.5 + 0.5) * 255).round(), strict=True):
        windows = [image[:, top : top + 8, left : left + 8] for top in range(3) for left in range(3)]
        windows += [window.flip(2) for window in windows]
        places.append(next(place for place, window in enumerate(windows) if torch.equal(window, crop)))
    assert len({*places}) > 12  # out of 18 possible crops
    assert min(places) < 9 <= max(places)


def test_validation_images_are_split_over_ranks_and_never_augmented():
    found = []
    for rank in range(2):
        images = digits(num_validation_images=9, validation_batch_size=2)
        images.trainer = SimpleNamespace(global_rank=rank, world_size=2)  # pyright: ignore[reportAttributeAccessIssue]
        images.setup("fit")
        parts = [images.on_after_batch_transfer(batch, 0) for batch in images.val_dataloader()]
        assert [len(part["labels"]) for part in parts] == [[2, 2, 1], [2, 2]][rank]
        found.append(joined(parts))
    test = image_source("digits").test
    assert found[0]["labels"].tolist() == test.labels[:9:2].tolist()
    assert found[1]["labels"].tolist() == test.labels[1:9:2].tolist()
    spread = found[0]["pixel_values"].flatten(1).std(1) / test.pixels[:9:2].double().flatten(1).std(1)
    assert (spread / spread[0] - 1).abs().max() < 1e-5  # the same scale for all images: they are only normalised


def test_shuffled_labels_are_a_permutation_and_validation_labels_stay():
    plain, shuffled, again = (
        LitImageData("digits", global_batch_size=64, shuffle_labels=shuffle) for shuffle in (False, True, True)
    )
    truth, changed = (joined(batches(images, 20)) for images in (plain, shuffled))
    assert torch.equal(truth["pixel_values"], changed["pixel_values"])
    same = (truth["labels"] == changed["labels"]).double().mean()
    assert same == pytest.approx(0.1, abs=0.05)  # chance of ten equal classes; 1,280 draws, an error of .008
    assert_same(joined(batches(again, 20)), changed)
    whole = [joined(batches(images, 23))["labels"][:1442] for images in (plain, shuffled)]  # the first epoch
    assert torch.equal(*(labels.bincount() for labels in whole))
    assert torch.equal(*(next(iter(images.val_dataloader()))["labels"] for images in (plain, shuffled)))
    assert shuffled.describe() == {**plain.describe(), "shuffle_labels": True}
