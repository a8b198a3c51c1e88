"""The Lightning module for language models, and the optimizer and learning-rate schedules of all modules."""

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_layers.errors import InputError, first_sentence
from lit_layers.models.build import causal_lm, true_vocab_size
from lit_layers.models.families import causal_by_flag
from lit_layers.models.saved import describe, rebuild
from lit_layers.models.view import LayeredModel
from lit_layers.schema import refuse_outside
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.local_series import DESCRIBED
from lit_layers.training.losses import WeightedMean, mean_of_step, network_loss
from lit_layers.training.run_folder import Origin, check_tokenizer, find_origin, planned_steps
from lit_layers.training.sharding import full, set_gradient_sync_, shard_, sharding_mesh
from lit_layers.training.trainer import RANGES


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
    fused: bool = True,
) -> torch.optim.AdamW:
    """Return an AdamW optimizer with weight decay on matrices and embeddings, not on biases and norm weights.

    Source: Brown et al. 2020 (GPT-3), appendix B. The split by number of axes follows nanoGPT and timm.
    """
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def parameter_groups(model: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with weight decay and a group without.

    Vectors (biases, norms, layer scales) have no weight decay, nor have parameters that the model itself exempts (timm:
    class token, position embedding). If `weight_decay` is None, all other parameters have the optimizer's default
    weight decay.
    """
    exempt = set(getattr(model, "no_weight_decay", set)())
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    decayed = [each for name, each in trained if each.ndim >= 2 and name not in exempt]
    others = [each for name, each in trained if each.ndim < 2 or name in exempt]
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups = [{"params": decayed, **decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def use_optimizer_(module: L.LightningModule, optimizer: Any, lr_scheduler: Any) -> None:
    """Set the optimizer and the learning-rate schedule of a module; None keeps the module's own.

    Args:
        optimizer: a function from parameters to an optimizer.
        lr_scheduler: a function from an optimizer to a scheduler, which steps with the optimizer.
    """
    if isinstance(module, LitModule):
        module.make_optimizer, module.make_scheduler = optimizer, lr_scheduler
    elif optimizer is not None:
        module.configure_optimizers = lambda: _config(
            _create("optimizer", optimizer, module.parameters()), lr_scheduler, module.trainer
        )
    elif lr_scheduler is not None:
        raise InputError(f"lr_scheduler: expected an optimizer with it, as {type(module).__name__} makes its own")


def _create(option: str, make: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return make(argument)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, InputError) else InputError(f"{option}: {first_sentence(error)}") from error


def _config(optimizer: torch.optim.Optimizer, make: Any, trainer: L.Trainer) -> Any:
    """Return Lightning's configuration of an optimizer and of the schedule that `make` builds for it."""
    if make is None:
        return {"optimizer": optimizer}
    about = {"scheduler": (scheduler := _create("lr_scheduler", make, optimizer)), "interval": "step"}
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):  # let it step after each validation
        every = trainer.val_check_interval
        about |= {"frequency": every} if isinstance(every, int) else {"interval": "epoch"}
        about["monitor"] = getattr(scheduler, "monitor", "validation/loss")
    return {"optimizer": optimizer, "lr_scheduler": about}


def warmup_linear(*, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Return a function from the optimizer step to a factor of the peak learning rate: linear warm-up and decay.

    The factor reaches 0 at step `steps`. As steps count from 0, the last one is `steps` - 1, so every update has a
    positive factor.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (steps - step) / max(1, steps - warmup_steps))

    return factor


def warmup_cosine(*, warmup_steps: int, decay_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Return a function from the optimizer step to a factor of the peak learning rate: linear warm-up, then a cosine.

    The factor is 1 / warmup_steps at step 0. From `decay_steps` on it stays at `min_ratio`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


# Devices where the in-place loss is faster than a compiled one, because its chunks stay in the CPU cache. On a GPU the
# in-place loss would read and write 48 bytes per logit. A loss compiled together with the network moves 10 to 12 bytes.
_EAGER_LOSS = ("cpu",)


class LitModule(L.LightningModule, ABC):
    """The base of all training modules: optimizer, schedule, gradient clipping and norm, checkpoints.

    The network is at `.model`, which is never compiled. The module works in any Trainer, with a data module of this
    package or with data loaders alone. It logs the loss as `train/loss` and validates after step `max_steps`.
    `load_from_checkpoint` opens checkpoints that the Trainer saved.

    Args:
        options: the module's arguments by name, as plain values, which are stored in the checkpoint.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    decay_steps: int | None
    compile_model = False
    grad_norm: Tensor | None = None
    # Whether to compute and log the gradient norm even if gradients are not clipped.
    measures_unclipped_norm = False
    init_from: str | None = None
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None  # None means AdamW
    make_scheduler: Callable[[Any], Any] | None = None  # None means the schedule of the method `lr_factor`

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters({name: value for name, value in options.items() if name not in ("self", "__class__")})
        self._step_losses: list[Tensor] = []  # losses of the step's micro-batches, for loggers
        self._weights: list[nn.Parameter] = []

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the network to train, from the options and the run's data."""

    @abstractmethod
    def scores(self) -> dict[str, Tensor]:
        """Return the scores of the validation batches since the last call, over all ranks, and reset them."""

    @abstractmethod
    def lr_factor(self, decay_steps: int) -> Callable[[int], float]:
        """Return a function from step to a factor of the peak learning rate. The decay ends at `decay_steps`."""

    @property
    def origin(self) -> Origin:
        """Return the steps and tokens of the model before this run."""
        return Origin() if self.init_from is None else self.start[1]

    @functools.cached_property
    def start(self) -> tuple[Checkpoint, Origin]:
        """Return the checkpoint that `init_from` names, and its origin: the steps and tokens before this run.

        If the command `fit` resumes a run, it overwrites this property. The checkpoint is then the copy of the
        `init_from` checkpoint in the run's folder.
        """
        assert self.init_from is not None
        return find_origin(self.init_from)

    @property
    def data(self) -> Any:
        """Return the run's data module, or None if the run uses data loaders alone."""
        return getattr(self.trainer, "datamodule", None)

    def configure_model(self) -> None:
        if hasattr(self, "model") or self._trainer is None:  # without a trainer, `on_load_checkpoint` sets the model
            return
        model = self.build()
        mesh = sharding_mesh(self.trainer.strategy)
        if mesh is not None:
            shard_(model, mesh, str(self.trainer.precision))
        self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Set the network to train; subclasses also set what depends on it, such as its number of classes."""
        self.model = model

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIBED] = json.dumps(describe(self.model))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network of the checkpoint if the module has none yet, as in `load_from_checkpoint`."""
        if hasattr(self, "model"):
            return
        if DESCRIBED not in checkpoint:
            raise InputError("checkpoint: it does not say which network it is of: open the folder of a step instead")
        self.set_model(rebuild(json.loads(checkpoint[DESCRIBED])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss of the step, and request a validation after the last step."""
        trainer = self.trainer
        if trainer.loggers:
            # Lightning has divided this loss by the number of micro-batches. `mean_of_step` corrects that.
            self._step_losses.append(outputs["loss"].detach())
            if not trainer.fit_loop._should_accumulate():
                self.log("train/loss", mean_of_step(self._step_losses, trainer.accumulate_grad_batches))
                self._step_losses = []
        if trainer.global_step == trainer.max_steps:
            # This flag makes Lightning validate after this step, whatever the validation interval.
            trainer.should_stop = True

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"validation/{name}": score for name, score in self.scores().items()})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        set_gradient_sync_(self.model, on=not self.trainer.fit_loop._should_accumulate())

    def on_fit_start(self) -> None:
        # Bypass `nn.Module.__setattr__`: as a submodule, the compiled module would put every weight into the state dict
        # a second time. Compile only now: a callback that averages weights copies this module before.
        vars(self)["_compiled"] = torch.compile(self.model) if self.compile_model else self.model
        # List the parameters once: walking through all modules takes a millisecond, too long for every step.
        self._weights = [*self.model.parameters()]

    @property
    def _network(self) -> Callable[..., Any]:
        """Return the model for training steps, compiled if `compile` is set."""
        return self.__dict__.get("_compiled", self.model)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_algorithm not in (None, "norm"):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        # Lightning's clipping discards the norm. Here the norm is kept on the device until it is logged.
        elif gradient_clip_val:
            self.grad_norm = full(torch.nn.utils.clip_grad_norm_(self._weights, gradient_clip_val))
        elif self.measures_unclipped_norm:
            gradients = [each.grad for each in self._weights if each.grad is not None]
            self.grad_norm = full(torch.nn.utils.get_total_norm(gradients))

    def configure_optimizers(self) -> Any:
        return _config(self._optimizer(), self.make_scheduler or self._schedule, self.trainer)

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.make_optimizer is not None:
            return _create("optimizer", self.make_optimizer, parameter_groups(self.model, None))
        # In 16-mixed, a fused optimizer divides the gradients by the loss scale only during its step. That is too late:
        # clipping and the norm need unscaled gradients. For other optimizers, Lightning unscales before both.
        return adamw(
            self.model,
            lr=self.lr,
            weight_decay=self.weight_decay,
            betas=self.betas,
            fused=self.trainer.scaler is None,
        )

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        decay_steps = self.decay_steps or planned_steps(self.trainer)
        if decay_steps is None:
            raise InputError(
                "model.decay_steps: expected a step, as neither trainer.max_steps nor trainer.max_epochs ends the run, "
                "got none"
            )
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor(decay_steps))


class LitCausalLM(LitModule):
    """A training module for Hugging Face causal language models. The transformers model is at `.model`.

    A batch holds `input_ids` (batch, tokens), by that name or as a tensor. Each token predicts the next one, and there
    is no padding. `labels` (by name, or second in a pair) must equal `input_ids`. Other tensors are refused. Without
    `LitTextData`, `config` or the architecture sets the vocabulary size.

    Args:
        architecture: a transformers model type (`gpt2`, `gpt_neox`, `llama`, ...), or a local folder with a
            config.json; the weights are new.
        init_from: a folder with a model, a .ckpt that a Trainer saved, or NAME@REVISION of the Hub
            (`EleutherAI/pythia-70m@step1000`). It replaces `architecture`, and the weights are read from it. This run
            continues from its step and tokens with a new optimizer.
        config: overrides of the model's configuration, by its own field names; unknown ones are refused.
        init_seed: seed of the initial weights, independent of every other seed.
        pad_vocab_to: pad the vocabulary to a multiple of this number (tensor cores prefer 64). None adds no padding.
            Padding rows never enter a loss, a measurement or a saved model.
        lr: peak learning rate.
        weight_decay: weight decay of matrices and embeddings; other parameters have none.
        betas: betas of AdamW.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: step at which the cosine decay ends; None stands for the last step of the run.
        min_lr_ratio: final learning rate divided by the peak.
        compile: whether to train through `torch.compile`; on a GPU, the loss is in the same graph. `.model` is not
            compiled, and the analyses use it.
        activation_checkpointing: whether to store only the input of each block in the forward pass, and to compute its
            other activations again in the backward pass. This takes less memory and about a third more time, and gives
            the same gradients.
    """

    def __init__(
        self,
        architecture: str = "gpt2",
        config: dict[str, Any] | None = None,
        *,
        init_from: str | None = None,
        init_seed: int = 0,
        pad_vocab_to: int | None = 64,
        lr: float = 6e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 2000,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(locals())
        self.architecture, self.config, self.init_from = architecture, dict(config or {}), init_from
        self.init_seed, self.pad_vocab_to, self.compile_model = init_seed, pad_vocab_to, compile
        self.activation_checkpointing = activation_checkpointing
        self.lr, self.weight_decay, self.betas = lr, weight_decay, betas
        self.warmup_steps, self.decay_steps, self.min_lr_ratio = warmup_steps, decay_steps, min_lr_ratio
        refuse_outside("model.", RANGES, vars(self))
        self.validation_loss = WeightedMean()

    def build(self) -> nn.Module:
        model: Any = self._new_model() if self.init_from is None else self._loaded_model()
        if not LayeredModel(model).predicts_next_token:
            raise InputError(
                f"model: expected one that predicts the next token, got a {type(model).__name__} that sees later ones"
            )
        context = getattr(model.config, "max_position_embeddings", None)
        num_tokens = getattr(self.data, "num_tokens", 0)
        if context is not None and context < num_tokens:
            raise InputError(
                f"data.num_tokens: expected at most {context}, the context of model.config, got {num_tokens}"
            )
        if self.activation_checkpointing:
            model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=False))
        return model

    @property
    def _vocab_size(self) -> int | None:
        """Return the vocabulary size of the run's data, or None if unknown."""
        return getattr(getattr(self.data, "shards", None), "vocab_size", None)

    def _new_model(self) -> nn.Module:
        options: dict[str, Any] = {**self.config, "pad_vocab_to": self.pad_vocab_to}
        if (least := self._vocab_size) is not None:
            vocab_size = options.setdefault("vocab_size", least)
            if not isinstance(vocab_size, int) or vocab_size < least:
                raise InputError(
                    f"model.config.vocab_size: expected at least the tokenizer's {least}, got {vocab_size}"
                )
        return causal_lm(self.architecture, seed=self.init_seed, **options)

    def _loaded_model(self) -> nn.Module:
        checkpoint = self.start[0]
        folder = checkpoint.fetch()
        trained: Any = checkpoint.load()
        check_tokenizer(folder, self.data, self.init_from)
        for field, value in self.config.items():
            stored = getattr(trained.config, field, None)
            if "drop" not in field and value != stored:
                raise InputError(
                    f"model.config.{field}: {self.init_from} has {stored} and keeps it, got {value}: leave it out, "
                    "or say --model.config null"
                )
        options = {**self.config, "pad_vocab_to": self.pad_vocab_to, "weights": trained}
        model = causal_lm(folder, seed=self.init_seed, **options)
        if (needed := self._vocab_size) is not None and true_vocab_size(model) < needed:
            raise InputError(
                f"tokenizer: expected at most the {true_vocab_size(model)} tokens of {self.init_from}, got {needed}: "
                "name its own with --tokenizer"
            )
        return model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits over the true vocabulary, without padding rows."""
        logits = self._network(input_ids=input_ids, use_cache=False).logits  # (batch, tokens, padded vocabulary)
        return logits[..., : true_vocab_size(self.model)]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.compile_model and self.device.type not in _EAGER_LOSS:
            loss = torch.compile(network_loss)
            vars(self)["_loss"] = functools.partial(loss, self.model)

    def loss(self, batch: Any) -> Tensor:
        """Return the mean next-token cross-entropy in nats over a batch of rows of `num_tokens` + 1 ids."""
        tokens = _token_ids(batch)
        loss = self.__dict__.get("_loss", functools.partial(network_loss, self._network))
        # Attention gets only its causal flag and no mask tensor, because batches have no padding.
        with causal_by_flag(self.model):
            return loss(tokens[:, :-1], tokens[:, 1:], true_vocab_size(self.model))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.validation_loss.update(self.loss(batch), weight=_token_ids(batch)[:, 1:].numel())

    def scores(self) -> dict[str, Tensor]:
        loss = self.validation_loss.compute()  # mean over the tokens of all ranks
        self.validation_loss.reset()
        return {"loss": loss.float(), "perplexity": loss.exp().float()}

    def lr_factor(self, decay_steps: int) -> Callable[[int], float]:
        return warmup_cosine(warmup_steps=self.warmup_steps, decay_steps=decay_steps, min_ratio=self.min_lr_ratio)


def _token_ids(batch: Any) -> Tensor:
    """Return the token ids of a batch from `LitTextData` or another loader.

    Raises:
        InputError: if the batch has no token ids, or has tensors that the loss would ignore, such as a padding mask or
            other labels.
    """
    first, *labels = batch if isinstance(batch, list | tuple) and batch else [batch]
    named = dict(first) if isinstance(first, Mapping) else {"input_ids": first}
    ids = named.pop("input_ids", None)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError(f"data: expected batches with input_ids (batch, tokens), got a {type(first).__name__}")
    for name, value in [*named.items(), *(("labels", each) for each in labels)]:
        if name == "attention_mask" and not value.all():
            raise InputError("data: expected blocks of tokens without padding, got an attention_mask with zeros")
        if name != "attention_mask" and isinstance(value, Tensor) and not torch.equal(value, ids):
            raise InputError(
                f"data: expected batches of input_ids, each of which predicts the next, got other {name}: a module of "
                "your own trains on them"
            )
    return ids
