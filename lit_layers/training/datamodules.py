"""Data modules for training and validation: blocks of tokens, and images."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from lit_layers.data.batches import TokenBlocks, unigram_entropy
from lit_layers.data.images import (
    ImageSource,
    Normalisation,
    Normalise,
    Pictures,
    SmallPictures,
    eval_pixels,
    image_size,
    image_source,
    resized,
    statistics,
)
from lit_layers.data.preparing import prepared
from lit_layers.errors import InputError
from lit_layers.measuring.undisturbed import restore_random_state
from lit_layers.schema import refuse_outside
from lit_layers.training.trainer import RANGES, StepSampler, refuse_another_order

Batch = dict[str, Tensor]


class LitStepData(L.LightningDataModule):
    """The base of all data modules. Training batches depend only on the step and the seed."""

    global_batch_size: int
    validation_batch_size: int
    num_workers: int
    seed: int

    def describe(self) -> dict[str, Any]:
        """Return facts about the data for run.json."""
        return {}

    def _get_trainer(self) -> L.Trainer:
        if self.trainer is None:
            name = type(self).__name__
            raise RuntimeError(f"the loaders of {name} need a Trainer: call trainer.fit(module, datamodule=...)")
        return self.trainer

    def _sampler(self, num_samples: int, kind: type[StepSampler] = StepSampler) -> StepSampler:
        """Return the sampler of this rank's micro-batches, which starts at the Trainer's current step."""
        trainer = self._get_trainer()
        refuse_another_order(trainer)
        try:
            return kind(
                num_samples,
                global_batch_size=self.global_batch_size,
                num_micro_batches=trainer.accumulate_grad_batches,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                seed=self.seed,
                first_step=lambda: trainer.global_step,
            )
        except ValueError as error:
            raise InputError(f"data.global_batch_size: {error}") from error

    def _validation_batches(self, count: int, option: str) -> list[list[int]]:
        """Return this rank's validation batches, as lists of sample indices."""
        trainer = self._get_trainer()
        # Refuse fewer samples than ranks: a rank without samples would skip validation, and the other ranks would wait
        # for it forever.
        if count < trainer.world_size:
            raise InputError(
                f"data.{option}: expected at least one for each of {trainer.world_size} ranks, got {count}"
            )
        ids = torch.arange(trainer.global_rank, count, trainer.world_size)
        return [batch.tolist() for batch in ids.split(self.validation_batch_size)]

    def _loader(self, dataset: Any, batches: Any, **options: Any) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **options,
        )


class LitTextData(LitStepData):
    """A data module for a prepared corpus. Each sample has `num_tokens` + 1 token ids, as inputs and targets overlap.

    Args:
        corpus: python, openwebtext, wikitext, a text source, or a folder made by `prepare`, as for `EvalText`.
        tokenizer: a Hub name, a local tokenizer, or `bpe:SIZE`.
        num_tokens: context length: predictions per sequence.
        global_batch_size: sequences per optimizer step, over all ranks and micro-batches.
        num_validation_sequences: number of validation blocks that are used, from the first on.
        validation_batch_size: sequences per validation batch and rank.
        seed: seed for the order of the training blocks.
        shuffle_tokens: whether to shuffle the tokens within each training block, as a control without word order. A
            block has the same order in every epoch. Validation blocks are not shuffled.
        num_workers: loader processes; 0 is fastest for memory-mapped tokens on few cores.
    """

    def __init__(
        self,
        corpus: str,
        tokenizer: str,
        *,
        num_tokens: int = 1024,
        global_batch_size: int = 480,
        num_validation_sequences: int = 256,
        validation_batch_size: int = 16,
        seed: int = 0,
        shuffle_tokens: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.corpus, self.tokenizer, self.num_tokens, self.seed = corpus, tokenizer, num_tokens, seed
        self.shuffle_tokens = shuffle_tokens
        self.global_batch_size, self.num_validation_sequences = global_batch_size, num_validation_sequences
        self.validation_batch_size, self.num_workers = validation_batch_size, num_workers
        refuse_outside("data.", RANGES, vars(self))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.num_tokens

    def describe(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus,
            "tokenizer": self.tokenizer,
            "corpus_hash": self.shards.corpus_hash,
            **({"corpus_revision": revision} if (revision := self.shards.header.get("revision")) else {}),
            "tokenizer_hash": self.shards.tokenizer_hash,
            "unigram_entropy": unigram_entropy(self.shards),
            **({"shuffle_tokens": True} if getattr(self, "shuffle_tokens", False) else {}),
        }

    def prepare_data(self) -> None:
        prepared(self.corpus, self.tokenizer)

    def setup(self, stage: str) -> None:
        self.shards = prepared(self.corpus, self.tokenizer)
        blocks = TokenBlocks(self.shards, split="train", num_tokens=self.num_tokens)
        self.train = _ShuffledBlocks(blocks, self.seed) if self.shuffle_tokens else blocks
        validation = TokenBlocks(self.shards, split="validation", num_tokens=self.num_tokens)
        self.validation = Subset(validation, range(min(len(validation), self.num_validation_sequences)))

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, self._sampler(len(self.train)))

    def val_dataloader(self) -> DataLoader:
        batches = self._validation_batches(len(self.validation), "num_validation_sequences")
        return self._loader(self.validation, batches)


class _ShuffledBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of tokens, each shuffled by its own permutation, so that it keeps its tokens but loses the word order."""

    def __init__(self, blocks: TokenBlocks, seed: int) -> None:
        self.blocks, self.seed = blocks, seed

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.blocks[index]["input_ids"]
        order = np.random.default_rng((self.seed, index)).permutation(len(ids))
        return {"input_ids": ids[torch.from_numpy(order)]}


class LitImageData(LitStepData):
    """A data module for labelled images: `{"pixel_values": (batch, 3, size, size), "labels": (batch,)}`.

    timm's pipeline augments images in the loader's workers: random resized crop, flip, RandAugment, erasing. For images
    up to 64 px, the crop has the size of the image and is taken from the padded image. The image of a sample and its
    augmentation depend only on the seed and on the sample's index in the endless training sequence.

    Args:
        source: `digits` (1,797 handwritten digits, no download), `cifar10`, `cifar100`, a local path (parquet
            files, train/CLASS/*.jpg), or `ORG/NAME` of the Hub.
        image_size: side of the model's input in px. With None, it is the size of the source's images, or 224 if they
            are larger than 64 px or in folders of files.
        normalisation: `imagenet`, `half` or `source`, as for `EvalImages`.
        global_batch_size: images per optimizer step, over all ranks and micro-batches.
        num_validation_images: number of images of the test split that are used, from the first on; None uses all.
        validation_batch_size: images per validation batch and rank.
        crop_padding: pixels of zeros that are added on each side of a small image before it is cropped to its original
            size; 0 turns cropping off.
        flip: whether to mirror each image with probability 0.5.
        rand_augment: RandAugment in timm's notation, e.g. rand-m9-mstd0.5-inc1; None turns it off.
        erasing: probability that a rectangle of an image is filled with noise.
        num_repeats: number of consecutive samples of the same image, each with its own augmentation (3 in DeiT's
            repeated augmentation). The number of samples per epoch does not change, so an epoch has fewer different
            images.
        seed: seed for the order of the images and their augmentation.
        shuffle_labels: whether to permute the labels of the training images once, as a control without structure.
            Validation labels are not permuted.
        num_workers: loader processes; 0 is fastest for small images without augmentation.
    """

    def __init__(
        self,
        source: str = "digits",
        *,
        image_size: int | None = None,
        normalisation: Normalisation = "source",
        global_batch_size: int = 512,
        num_validation_images: int | None = None,
        validation_batch_size: int = 256,
        crop_padding: int = 0,
        flip: bool = False,
        rand_augment: str | None = None,
        erasing: float = 0.0,
        num_repeats: int = 1,
        seed: int = 0,
        shuffle_labels: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.normalisation: Normalisation = normalisation
        self.source_name, self.size_option = source, image_size
        self.global_batch_size, self.num_validation_images = global_batch_size, num_validation_images
        self.validation_batch_size, self.crop_padding, self.flip = validation_batch_size, crop_padding, flip
        self.rand_augment, self.erasing, self.num_repeats = rand_augment, erasing, num_repeats
        self.seed, self.shuffle_labels, self.num_workers = seed, shuffle_labels, num_workers
        refuse_outside("data.", RANGES, {**vars(self), "image_size": image_size})

    @property
    def images_per_step(self) -> int:
        return self.global_batch_size

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source_name,
            "classes": list(self.source.classes) if self.num_classes <= 100 else self.num_classes,
            "train_images": len(self.source.train),
            "test_images": len(self.source.test),
            "image_size": self.image_size,
            "mean": list(self.statistics[0]),
            "std": list(self.statistics[1]),
            "data_hash": {"train": self.source.train.content_hash(), "test": self.source.test.content_hash()},
            **({"shuffle_labels": True} if self.shuffle_labels else {}),
        }

    def prepare_data(self) -> None:
        # This may download, so it belongs in this hook, which Lightning calls once per machine.
        image_source(self.source_name).check()

    def setup(self, stage: str) -> None:
        source = image_source(self.source_name)
        source.check()
        self.use(source)

    def use(self, source: ImageSource) -> None:
        """Use the images of `source`, after `source.check` has accepted it."""
        self.source = source
        self.image_size = image_size(self.source, self.size_option)
        self.statistics = statistics(self.source, self.normalisation)
        self._normalise = Normalise(*self.statistics)

    def train_dataloader(self) -> DataLoader:
        sampler = self._sampler(len(self.source.train), _SampleIds)
        return self._loader(self.training_images(), sampler, collate_fn=_identity)

    def training_images(self) -> "TrainingImages":
        """Return the training data set, indexed by position in the endless training sequence."""
        images = self.source.train
        order = SampleOrder(len(images), seed=self.seed, num_repeats=self.num_repeats)
        labels = images.labels
        if self.shuffle_labels:
            labels = labels[torch.from_numpy(np.random.default_rng(self.seed).permutation(len(labels)))]
        return TrainingImages(images, labels, order, self._transform(), self.seed)

    def val_dataloader(self) -> DataLoader:
        images = self.source.test
        count = min(len(images), self.num_validation_images or len(images))
        batches = self._validation_batches(count, "num_validation_images")
        return self._loader(_ValidationImages(images, self.image_size), batches, collate_fn=_identity)

    def on_before_batch_transfer(self, batch: Batch | InputError, dataloader_idx: int) -> Batch:
        if isinstance(batch, InputError):
            raise batch
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Resize and normalise raw pixels on the device. Augmented images are already normalised."""
        if "pixels" not in batch:
            return batch
        images = self._normalise(resized(batch["pixels"], self.image_size))
        return {"pixel_values": images, "labels": batch["labels"]}

    def _transform(self) -> Any:
        """Return the augmentation of one image; None if the images are small and no augmentation is on."""
        images = self.source.train
        is_small = isinstance(images, SmallPictures)
        if is_small and not (self.crop_padding or self.flip or self.rand_augment or self.erasing):
            return None
        from timm.data import create_transform  # imported only if needed, as it takes a second
        from torchvision.transforms import InterpolationMode, RandomCrop, Resize

        options: dict[str, Any] = {"color_jitter": 0.0, "interpolation": "bicubic", "re_mode": "pixel"}
        (mean, std), flip = self.statistics, 0.5 if self.flip else 0.0
        options |= {"mean": mean, "std": std, "hflip": flip, "re_prob": self.erasing}
        try:
            transform: Any = create_transform(
                self.image_size, is_training=True, auto_augment=self.rand_augment, **options
            )
        except AssertionError as error:
            raise InputError(f"data.rand_augment: timm does not know {self.rand_augment!r}") from error
        if is_small:  # DeiT crops images of CIFAR this way
            size = self.image_size, self.image_size
            crop = RandomCrop(tuple(images.pixels.shape[2:]), padding=self.crop_padding)
            transform.transforms[:1] = [crop, Resize(size, InterpolationMode.BICUBIC)]
        return transform


class SampleOrder:
    """The order of the training images: endless seeded permutations, with each image `num_repeats` times in a row."""

    def __init__(self, num_images: int, *, seed: int, num_repeats: int = 1) -> None:
        self.num_images, self.num_repeats = num_images, num_repeats
        self._permutations = StepSampler(num_images, global_batch_size=1, seed=seed)

    def image(self, index: int) -> int:
        epoch, offset = divmod(index, self.num_images)
        return self._permutations.sample(epoch * self.num_images + offset // self.num_repeats)


class _SampleIds(StepSampler):
    """A sampler of sample indices. The data set maps them to images and seeds the augmentation with them."""

    def sample(self, index: int) -> int:
        return index


class TrainingImages(Dataset):
    """Training images, loaded and augmented one micro-batch at a time."""

    def __init__(
        self,
        pictures: Pictures,
        labels: Tensor,
        order: SampleOrder,
        transform: Callable[..., Any] | None,
        seed: int,
    ) -> None:
        self.pictures, self.labels, self.order, self.transform, self.seed = pictures, labels, order, transform, seed

    def __getitems__(self, ids: Sequence[int]) -> Batch | InputError:
        chosen = [self.order.image(index) for index in ids]
        labels = self.labels[chosen]
        if self.transform is None:
            assert isinstance(self.pictures, SmallPictures)
            # Pin the memory only without workers, as the DataLoader itself pins the batches that workers load.
            pinned = torch.cuda.is_available() and get_worker_info() is None
            return {"pixels": self.pictures.batch(chosen, pinned=pinned), "labels": labels}
        try:
            return {"pixel_values": self._transformed(self.transform, chosen, ids), "labels": labels}
        except InputError as error:
            # Return the error instead of raising it: an exception in a worker would reach the user as a traceback.
            return error

    def _transformed(self, transform: Callable[..., Any], chosen: Sequence[int], ids: Sequence[int]) -> Tensor:
        images = []
        # Restore the states of the global random generators: without workers, training draws from them too.
        with restore_random_state():
            for index, position in zip(chosen, ids, strict=True):
                digest = hashlib.blake2b(f"{self.seed}/{position}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "big")
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002 - timm draws from it
                images.append(transform(self.pictures.picture(index)))
        return torch.stack(images)


class _ValidationImages(Dataset):
    def __init__(self, pictures: Pictures, size: int) -> None:
        self.pictures, self.size = pictures, size

    def __getitems__(self, chosen: list[int]) -> Batch | InputError:
        try:
            return {"pixels": eval_pixels(self.pictures, chosen, self.size), "labels": self.pictures.labels[chosen]}
        except InputError as error:
            return error


def _identity(batch: Any) -> Any:
    return batch
