"""A network of nobody's library (of a training script such as nanoGPT) in the words of transformers.

All that its code is asked for is one call with token ids, or with images of the size that it says. What else the
layered view has to know is seen in that call, and its blocks are then proven as those of any other model (`structure`).
"""

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_call import evaluating
from lit_layers.models.families.probe import CANNOT_CALL, is_timm
from lit_layers.models.families.rows import Network, one_side

NUM_TOKENS = 6
# What scripts call the length of their longest text, and the next tokens that they are given for the loss.
_LENGTHS = ("block_size", "max_seq_length", "max_seq_len", "context_length", "context_size", "seq_len", "n_ctx")
_TARGETS = ("targets", "target", "labels")
_SIDES = ("image_size", "img_size")


@dataclass(frozen=True)
class _Facts:
    """What one call has shown of a network."""

    column: str | None  # the name of the argument that takes token ids or images; None: the first one
    config: Any
    takes_mask: bool = False
    targets: str | None = None  # the argument without which the last token alone is scored (nanoGPT)

    @property
    def of_images(self) -> bool:
        return hasattr(self.config, "image_size")


class OwnNetwork(nn.Module):
    """The network with a config, called with `input_ids`, returning its scores alone.

    Its class has the name of the network's. Weights, buffers and hooks are the network's own.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""

    def __init__(self, network: nn.Module, facts: _Facts) -> None:
        super().__init__()
        self.network, self.config, self._facts = network, facts.config, facts
        self.training = network.training

    @property
    def base_model(self) -> "OwnNetwork":
        """Itself: where its head begins, nothing says."""
        return self

    def forward(self, input_ids: Tensor, return_dict: bool = True) -> Tensor:
        """(batch, tokens, scores), or (batch, classes)."""
        return _called(self.network, self._facts, input_ids)

    def get_output_embeddings(self) -> nn.Module | None:
        """The module with a row for each token that is scored; None where no vocabulary is."""
        size = getattr(self.config, "num_scores", 0)
        if size != getattr(self.config, "vocab_size", None):
            return None
        rows = [module for module in self.network.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        return next((module for module in reversed(rows) if len(module.weight) == size), None)

    def get_input_embeddings(self) -> None:
        """None: no vocabulary was padded here."""

    def can_generate(self) -> bool:
        return self.get_output_embeddings() is not None

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> nn.Module:
        raise InputError(f"{cls.__name__} is of neither transformers nor timm, and nothing says how it is built anew")


class OwnMaskedNetwork(OwnNetwork):
    """The same of a network that takes a mask, too."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return _called(self.network, self._facts, input_ids, mask)


class OwnImageNetwork(OwnNetwork):
    """The same of a network of images, called with `pixel_values`."""

    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> Tensor:
        """(batch, classes), or what else it returns."""
        return _called(self.network, self._facts, pixel_values)


def is_known(model: nn.Module) -> bool:
    """Whether transformers or timm made a model, so that its config or class says how to call it."""
    return is_timm(model) or hasattr(model, "base_model") or isinstance(model, OwnNetwork)


# Of each network what was seen of it, by the shapes of its weights; of each class of networks those made for it.
_FACTS: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, _Facts]]" = weakref.WeakKeyDictionary()
_KINDS: "weakref.WeakKeyDictionary[type, dict[type[OwnNetwork], Any]]" = weakref.WeakKeyDictionary()


def as_known(model: nn.Module) -> Network:
    """A model of transformers or timm as it is, any other network in their words.

    Raises:
        InputError: a network that takes neither token ids nor images of a size that it says.
    """
    if is_known(model):
        return model
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    if model not in _FACTS or _FACTS[model][0] != shapes:
        _FACTS[model] = shapes, _seen(model)
    facts, kinds, kind = _FACTS[model][1], _KINDS.setdefault(type(model), {}), type(model)
    base = OwnImageNetwork if facts.of_images else OwnMaskedNetwork if facts.takes_mask else OwnNetwork
    if base not in kinds:
        kinds[base] = type(kind.__name__, (base,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return kinds[base](model, facts)


def network_of(model: Network) -> nn.Module:
    """The network itself, of which others may be told in other words."""
    return model.network if isinstance(model, OwnNetwork) else model


def _seen(network: nn.Module) -> _Facts:
    like = next(network.parameters(), None)
    if like is None or like.device.type == "meta":
        raise _refusal(network, "it has no weights here")
    with (
        torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(like.device.type, enabled=False),
        evaluating(network),
    ):
        side = _said(network, _SIDES)
        return _of_texts(network, like.device) if side is None else _of_images(network, one_side(side))


def _of_images(network: nn.Module, side: int) -> _Facts:
    from transformers import PretrainedConfig

    takes = inspect.signature(network.forward).parameters
    channels = next((part.in_channels for part in network.modules() if isinstance(part, nn.Conv2d)), 3)
    sizes = {"image_size": side, "patch_size": _said(network, ("patch_size",)), "num_channels": channels}
    return _Facts("pixel_values" if "pixel_values" in takes else None, PretrainedConfig(**sizes))


def _of_texts(network: nn.Module, device: torch.device) -> _Facts:
    from transformers import PretrainedConfig

    takes = inspect.signature(network.forward).parameters
    tables = [module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise _refusal(network, "it has no table of embeddings of tokens (nn.Embedding), and says no image_size")
    ids = _few_tokens(min(tables)).to(device)
    facts = _Facts("input_ids" if "input_ids" in takes else None, PretrainedConfig(), "attention_mask" in takes)
    with _Lookups(ids) as lookups:
        scores = _scores(network, ids, facts)
    if lookups.size is None:
        raise _refusal(network, "it looks up the token ids in no table of embeddings")
    targets = next((name for name in _TARGETS if name in takes), None)
    if scores.ndim == 3 and scores.shape[:2] != ids.shape and targets is not None:
        facts = replace(facts, targets=targets)
        scores = _scores(network, ids, facts)
    if scores.shape[:2] != ids.shape and (scores.ndim != 2 or len(scores) != len(ids)):
        shape, expected = tuple(scores.shape), (*ids.shape, "scores")
        raise _refusal(network, f"for ids of shape {tuple(ids.shape)} it returns {shape}, expected {expected}")
    limit = _said(network, _LENGTHS)
    sizes = {
        "vocab_size": lookups.size,
        "num_scores": scores.shape[-1],
        "max_position_embeddings": limit if isinstance(limit, int) else None,
    }
    return replace(facts, config=PretrainedConfig(**sizes))


def _refusal(network: nn.Module, reason: str) -> InputError:
    return InputError(
        f"no layered view of {type(network).__name__}: it is neither of transformers nor of timm, and {reason}"
    )


def _said(network: nn.Module, names: tuple[str, ...]) -> Any:
    """What the network, its config or its patch embedding says of itself under one of these names."""
    for owner in (network, getattr(network, "config", None), getattr(network, "patch_embed", None)):
        values = owner if isinstance(owner, Mapping) else getattr(owner, "__dict__", {})
        for name in names:
            if isinstance(value := values.get(name), int | tuple | list):
                return value
    return None


def _few_tokens(num_rows: int) -> Tensor:
    """(2, tokens), of ids that any table of so many rows has, and which do not count up."""
    ids = 3 * torch.arange(1, NUM_TOKENS + 1) % num_rows
    return torch.stack([ids, ids.flip(0)])


class _Lookups(TorchFunctionMode):
    """Notes in which table token ids are looked up: `size` is the number of its rows, of several the fewest."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.size = ids, None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding and any(torch.equal(args[0], ids) for ids in (self.ids, self.ids.T)):
            self.size = len(args[1]) if self.size is None else min(self.size, len(args[1]))
        return func(*args, **(kwargs or {}))


def _scores(network: nn.Module, ids: Tensor, facts: _Facts) -> Tensor:
    try:
        return _called(network, facts, ids, torch.ones_like(ids) if facts.takes_mask else None)
    except torch.OutOfMemoryError:
        raise
    except CANNOT_CALL as error:
        words = " ".join(str(error).split())[:200]
        raise _refusal(
            network, f"it cannot be called with token ids alone ({type(error).__name__}: {words})"
        ) from error


def _called(network: nn.Module, facts: _Facts, given: Tensor, mask: Tensor | None = None) -> Tensor:
    """The scores that a call returns: a tensor, the `logits` in what it returns, or of several tensors the first."""
    given = given.contiguous()  # scripts take views of what they are given
    named = {} if facts.targets is None else {facts.targets: given}
    named |= {} if mask is None else {"attention_mask": mask}
    output = network(given, **named) if facts.column is None else network(**{facts.column: given}, **named)
    for value in _values(output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return value
    raise TypeError(f"it returns a {type(output).__name__} without scores of tokens or classes")


def _values(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    first = [named["logits"]] if "logits" in named else []
    return [
        *first,
        *(output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()),
    ]
