"""Lightning modules around plain models."""

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, true_vocab_size
from lit_layers.models.families import causal_by_flag
from lit_layers.ranges import (
    BETA,
    COUNT,
    COUNT_OR_NONE,
    LEARNING_RATE,
    SEED,
    SHARE,
    WEIGHT_DECAY,
    Range,
    refuse_outside,
)
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.training.loss import next_token_loss
from lit_layers.training.optim import adamw, may_fuse, scheduled, warmup_cosine
from lit_layers.training.origin import Origin, published, refuse_another_tokenizer
from lit_layers.training.sharding import full, shard_, sharding_mesh
from lit_layers.training.weighted_mean import WeightedMean

_NOT_OF_CONFIG = {"name", "seed", "pad_vocab_to", "attention"}  # arguments of `causal_lm` beside the configuration
_RANGES = {
    "init_seed": SEED,
    "pad_vocab_to": Range(1, 2**16, whole=True),
    "lr": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "betas": BETA,
    "warmup_steps": COUNT_OR_NONE,
    "decay_steps": COUNT,
    "min_lr_ratio": SHARE,
}


class LitCausalLM(L.LightningModule):
    """Next-token training of a plain Hugging Face causal language model, kept eager at `.model`.

    Args:
        architecture: a transformers model type (`gpt2`, `gpt_neox`, `llama`, ...), or a local folder whose config.json
            is used; the weights are new.
        init_from: a folder with a model, or NAME@REVISION of the Hub (`EleutherAI/pythia-70m@step1000`), whose
            architecture and weights are taken instead; its step and tokens are where the axes of this run begin. The
            optimizer starts afresh.
        allow_suspect: begins also with a checkpoint that the audit of its series finds suspect.
        config: overrides of the model's configuration, by its own field names; unknown ones are refused.
        init_seed: of the initial weights, independent of every other seed.
        pad_vocab_to: rounds the embedding up to a multiple (tensor cores want 64); padding rows never take part in a
            loss, a measurement or a saved model. None leaves the vocabulary as it is.
        lr: peak learning rate.
        weight_decay: on matrices and embeddings only.
        betas: of AdamW.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: step at which the cosine ends; None: the last step of the run.
        min_lr_ratio: final learning rate over the peak.
        compile: trains through `torch.compile`; `.model` stays eager, and the analyses use that.
    """

    def __init__(
        self,
        architecture: str = "gpt2",
        config: dict[str, Any] | None = None,
        *,
        init_from: str | None = None,
        allow_suspect: bool = False,
        init_seed: int = 0,
        pad_vocab_to: int | None = 64,
        lr: float = 6e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 2000,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        compile: bool = False,
    ) -> None:
        super().__init__()
        for name in _NOT_OF_CONFIG & set(config or {}):
            raise InputError(
                f"model.config.{name}: no field of a configuration; the module has options of its own for it"
            )
        self.init_from, self.allow_suspect = init_from, allow_suspect
        self.architecture, self.config, self.init_seed = architecture, dict(config or {}), init_seed
        self.pad_vocab_to, self.compile_model = pad_vocab_to, compile
        self.lr, self.weight_decay, self.betas = lr, weight_decay, betas
        self.warmup_steps, self.decay_steps, self.min_lr_ratio = warmup_steps, decay_steps, min_lr_ratio
        refuse_outside("model.", _RANGES, vars(self))
        self.validation_loss = WeightedMean()
        self.grad_norm: Tensor | None = None

    @property
    def origin(self) -> Origin:
        """Where this run begins on the axes of steps and tokens."""
        return Origin() if self.init_from is None else self.beginning[1]

    @functools.cached_property
    def beginning(self) -> tuple[Checkpoint, Origin]:
        """The checkpoint that `init_from` names; a resumed run sets the one that it began with."""
        assert self.init_from is not None
        return published(self.init_from, allow_suspect=self.allow_suspect)

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        data = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self.model = self._new_model(data) if self.init_from is None else self._continued_model(data)
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and context < data.num_tokens:
            raise InputError(
                f"data.num_tokens: expected at most {context}, the model's context, got {data.num_tokens}; "
                "choose shorter blocks or a longer context in model.config"
            )
        mesh = sharding_mesh(self.trainer.strategy)
        if mesh is not None:
            shard_(self.model, mesh)
        self.train_given(self.model)

    def train_given(self, model: nn.Module) -> None:
        """Trains this model, whatever the options say of a new one."""
        self.model = model
        # Kept out of the module tree: the compiled copy shares every weight and must not double the state dict.
        self.__dict__["_network"] = torch.compile(model) if self.compile_model else model

    def _new_model(self, data: Any) -> nn.Module:
        vocab_size = self.config.get("vocab_size", data.shards.vocab_size)
        if not isinstance(vocab_size, int) or vocab_size < data.shards.vocab_size:
            raise InputError(
                f"model.config.vocab_size: expected at least {data.shards.vocab_size}, the tokenizer's vocabulary, "
                f"got {vocab_size}; leave it out to take the tokenizer's"
            )
        options = {**self.config, "vocab_size": vocab_size}
        return causal_lm(self.architecture, seed=self.init_seed, pad_vocab_to=self.pad_vocab_to, **options)

    def _continued_model(self, data: Any) -> nn.Module:
        checkpoint = self.beginning[0]
        folder, trained = checkpoint.fetch(), checkpoint.load()
        refuse_another_tokenizer(folder, data, self.init_from)
        for field, value in self.config.items():
            known = getattr(trained.config, field, None)
            if "drop" not in field and value != known:
                raise InputError(
                    f"model.config.{field}: {self.init_from} has {known} and keeps it, got {value}; only dropout is "
                    "free where a checkpoint is begun with: leave the others out, or say --model.config null"
                )
        model = causal_lm(folder, seed=self.init_seed, pad_vocab_to=self.pad_vocab_to, weights=trained, **self.config)
        if true_vocab_size(model) < data.shards.vocab_size:
            raise InputError(
                f"tokenizer: expected at most {true_vocab_size(model)} tokens, as many as {self.init_from} knows, got "
                f"{data.shards.vocab_size}; name the model's own with --tokenizer"
            )
        return model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns logits over the true vocabulary, without its padding rows."""
        network: Callable = self.__dict__["_network"]
        logits = network(input_ids=input_ids, use_cache=False).logits  # (batch, tokens, padded vocabulary)
        return logits[..., : true_vocab_size(self.model)]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean next-token cross-entropy in nats over a batch of `num_tokens` + 1 ids a row."""
        tokens = batch["input_ids"]
        # The blocks are full, so that no padding needs a mask.
        with causal_by_flag(self.model):
            logits = self.__dict__["_network"](input_ids=tokens[:, :-1], use_cache=False).logits
        return next_token_loss(logits, tokens[:, 1:], true_vocab_size(self.model))

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.validation_loss.update(self.loss(batch), weight=batch["input_ids"][:, 1:].numel())

    def on_validation_epoch_end(self) -> None:
        loss = self.validation_loss.compute()  # over all ranks, weighted by tokens
        self.validation_loss.reset()
        self.log_dict({"validation/loss": loss.float(), "validation/perplexity": loss.exp().float()})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            # Lightning's own clipping throws the norm away; it is worth a curve and stays on the device here.
            self.grad_norm = full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val))
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(
            self.model, lr=self.lr, weight_decay=self.weight_decay, betas=self.betas, fused=may_fuse(self.trainer)
        )
        factor = warmup_cosine(
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps or self.trainer.max_steps,
            min_ratio=self.min_lr_ratio,
        )
        return scheduled(optimizer, factor)

    def flops_per_token(self, num_tokens: int) -> float:
        """Returns floating-point operations per trained token: 6 N + 12 L d T, N without position embeddings.

        Source: Chowdhery et al. 2022 (PaLM), appendix B.
        """
        config: Any = self.model.config
        positions = sum(p.numel() for name, p in self.model.named_parameters() if name.endswith("wpe.weight"))
        size = sum(parameter.numel() for parameter in self.model.parameters()) - positions
        return 6 * size + 12 * config.num_hidden_layers * config.hidden_size * num_tokens
