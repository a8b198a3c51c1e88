"""The Lightning module for image classifiers: vision transformers of timm, trained as in DeiT."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lit_layers.errors import InputError, first_sentence
from lit_layers.models.build import vit
from lit_layers.models.pixels import set_pixel_statistics_
from lit_layers.schema import refuse_outside
from lit_layers.training.datamodules import LitImageData
from lit_layers.training.losses import WeightedMean
from lit_layers.training.modules import LitModule, warmup_cosine
from lit_layers.training.trainer import RANGES

# Arguments of timm that `config` may not contain. They are set by options of the module or of the data module.
_MODULE_KEYS, _DATA_KEYS = {"patch_size", "drop_path_rate"}, {"img_size", "num_classes"}


class LitImageClassifier(LitModule):
    """A training module for timm vision transformers on labelled images. timm's own model is at `.model`.

    It implements the recipe of DeiT (Touvron et al. 2020, arXiv 2012.12877); every element is off by default. A batch
    holds `pixel_values` (batch, channels, height, width) and `labels` (batch,), by these names or as a pair. Without
    `LitImageData`, `config` (img_size, num_classes) or the architecture sets image size and classes.

    Args:
        architecture: a name of timm (`vit_tiny_patch16_224`, `deit_small_patch16_224`, ...); the weights are new.
        config: arguments of timm's VisionTransformer (embed_dim, depth, num_heads, ...); unknown ones are refused.
        init_from: a folder with a model, or a .ckpt that a Trainer saved, of this architecture. The weights are read
            from it, and this run continues from its step with a new optimizer.
        patch_size: patch size in px, a divisor of the image size; None keeps that of the architecture.
        drop_path_rate: stochastic depth rate of the last block; it grows linearly from 0 at the first block.
        init_seed: seed of the initial weights, independent of every other seed.
        lr: peak learning rate.
        weight_decay: weight decay of matrices and kernels; biases, norms, class token and position embedding have none.
        betas: betas of AdamW.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: step at which the cosine decay ends; None stands for the last step of the run.
        min_lr_ratio: final learning rate divided by the peak.
        label_smoothing: share of the target that is spread over all classes.
        mixup: alpha of the Beta distribution from which the weight of two blended images is drawn; 0 turns mixup off.
        cutmix: alpha of the Beta distribution from which the size of a pasted rectangle is drawn; 0 turns cutmix off.
            If both are on, each batch uses one of them. Both need an even number of images per micro-batch.
        compile: whether to train through `torch.compile`. `.model` is not compiled, and the analyses use it.
    """

    # Log the gradient norm even without clipping: DeiT does not clip gradients, but their norm is a useful curve.
    measures_unclipped_norm = True

    def __init__(
        self,
        architecture: str = "vit_tiny_patch16_224",
        config: dict[str, Any] | None = None,
        *,
        init_from: str | None = None,
        patch_size: int | None = None,
        drop_path_rate: float = 0.0,
        init_seed: int = 0,
        lr: float = 5e-4,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.02,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        compile: bool = False,
    ) -> None:
        super().__init__(locals())
        _refuse_repeated(config, _MODULE_KEYS)
        self.init_from = init_from
        self.architecture, self.config, self.patch_size = architecture, dict(config or {}), patch_size
        self.drop_path_rate, self.init_seed, self.compile_model = drop_path_rate, init_seed, compile
        self.lr, self.weight_decay, self.betas = lr, weight_decay, betas
        self.warmup_steps, self.decay_steps, self.min_lr_ratio = warmup_steps, decay_steps, min_lr_ratio
        self.label_smoothing = label_smoothing
        self.mixup, self.cutmix = mixup, cutmix
        refuse_outside("model.", RANGES, vars(self))
        self.validation_loss = WeightedMean()
        self._mix: Callable[..., tuple[Tensor, Tensor]] | None = None

    def build(self) -> nn.Module:
        options: dict[str, Any] = {"drop_path_rate": self.drop_path_rate, **self.config}
        if self.patch_size is not None:
            options["patch_size"] = self.patch_size
        if isinstance(self.data, LitImageData):
            _refuse_repeated(self.config, _DATA_KEYS)
            options |= {"img_size": self.data.image_size, "num_classes": self.data.num_classes}

        model: Any = vit(self.architecture, seed=self.init_seed, **options)
        if self.init_from is not None:
            try:
                model.load_state_dict(self.start[0].load().state_dict())
            except RuntimeError as error:
                about = f"{self.init_from} is of another network than this {self.architecture}"
                raise InputError(f"model.init_from: {about} ({first_sentence(error)})") from error
        if isinstance(self.data, LitImageData):
            side, patch = self.data.image_size, model.patch_embed.patch_size[0]
            if side % patch:  # timm would ignore the border without a warning
                raise InputError(f"model.patch_size: expected a divisor of the image size {side}, got {patch}")
            set_pixel_statistics_(model, *self.data.statistics)
        return model

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        count = model.num_classes
        if self.mixup or self.cutmix:
            from timm.data import Mixup  # imported only if needed, because it takes a second

            options: dict[str, Any] = {"label_smoothing": self.label_smoothing, "num_classes": count}
            self._mix = Mixup(mixup_alpha=self.mixup, cutmix_alpha=self.cutmix, **options)
        tops = {"accuracy": 1, "accuracy_top5": 5}
        self.validation_metrics = MetricCollection(
            {name: MulticlassAccuracy(count, top_k=k, average="micro") for name, k in tops.items() if k < count}
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        return self._network(pixel_values)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        images, labels = _unpack(batch)
        if self._mix is None:
            return F.cross_entropy(self(images).float(), labels, label_smoothing=self.label_smoothing)
        images, targets = self._mix(images, labels)
        # The targets are class probabilities: (batch, classes).
        return F.cross_entropy(self(images).float(), targets)

    def validation_step(self, batch: Any, batch_index: int) -> None:
        images, labels = _unpack(batch)
        logits = self(images).float()
        self.validation_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.validation_metrics.update(logits, labels)

    def scores(self) -> dict[str, Tensor]:
        loss = self.validation_loss.compute().float()  # mean over the images of all ranks
        self.validation_loss.reset()
        accuracies = self.validation_metrics.compute()
        self.validation_metrics.reset()
        # The argmax of NaN logits is the first class. Without this mask, a diverged model would score at chance.
        return {"loss": loss} | {name: each.where(~loss.isnan(), torch.nan) for name, each in accuracies.items()}

    def lr_factor(self, decay_steps: int) -> Callable[[int], float]:
        return warmup_cosine(warmup_steps=self.warmup_steps, decay_steps=decay_steps, min_ratio=self.min_lr_ratio)


def _refuse_repeated(config: Mapping[str, Any] | None, names: set[str]) -> None:
    for name in names & set(config or {}):
        raise InputError(f"model.config.{name}: the module or the data says it; use model.{name} where there is one")


def _unpack(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a batch, which holds them by name or as a pair.

    Raises:
        InputError: if the batch has neither form.
    """
    if isinstance(batch, Mapping) and {"pixel_values", "labels"} <= batch.keys():
        return batch["pixel_values"], batch["labels"]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(f"data: expected batches of images and labels, as a pair or by name, got a {type(batch).__name__}")
