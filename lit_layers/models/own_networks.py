"""Wrappers that give the user's own networks (such as nanoGPT) the interface of a transformers model.

The network must accept a call with token ids, or with images of the size that it states. The wrapper learns everything
else from that call. `structure` then finds and checks its blocks as in any other model.
"""

import contextlib
import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError, kind_and_words
from lit_layers.functional.jacobian.block_call import evaluating
from lit_layers.models.families import Network, row_of, side_length
from lit_layers.models.proof import CANNOT_CALL, PositionTables, is_timm

NUM_TOKENS = 6
# Names that training scripts use for the maximum length of a text, the targets of the loss, and the image size.
_LENGTHS = (
    *("block_size", "max_seq_length", "max_seq_len", "context_length", "context_size", "seq_len", "n_ctx"),
    *("max_position_embeddings", "n_positions", "max_len"),
)
_TARGETS = ("targets", "target", "labels")
_SIDES = ("image_size", "img_size")


@dataclass(frozen=True)
class _Facts:
    """Facts about a user's network, learned from one call: how to call it, and where its output holds the scores."""

    column: str | None  # name of the argument for token ids or images; None to pass them as the first argument
    config: Any
    takes_mask: bool = False
    needs_mask: bool = False  # whether the mask has no default, so that texts without padding also need one
    targets: str | None = None  # name of an argument without which some tokens get no scores (nanoGPT), or None
    key: Any = None  # name or index of the scores in the output; None if the output is the scores
    scores_words: bool = False  # whether the network returns logits over the vocabulary for each token

    @property
    def takes_images(self) -> bool:
        return hasattr(self.config, "image_size")


class OwnNetwork(nn.Module):
    """A user's network with a config. It is called with `input_ids` and returns only its scores (logits).

    Its class has the name of the network's class. Weights, buffers and hooks are those of the network.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""

    def __init__(self, network: nn.Module, facts: _Facts) -> None:
        super().__init__()
        self.network, self.config, self._facts = network, facts.config, facts
        self.training = network.training

    @property
    def base_model(self) -> "OwnNetwork":
        """The model itself, as it is unknown which modules are the head."""
        return self

    def forward(self, input_ids: Tensor, return_dict: bool = True) -> Tensor:
        """Return the logits: (batch, tokens, words or classes) for each token, or (batch, classes) for each text."""
        return self._scores(input_ids)

    def _scores(self, given: Tensor, mask: Tensor | None = None) -> Tensor:
        try:
            return _floats(_call(self.network, self._facts, given, mask))[self._facts.key]
        except (InputError, torch.OutOfMemoryError):
            raise
        except CANNOT_CALL as error:
            raise InputError(
                f"{type(self).__name__} cannot be called with {self.main_input_name} of shape {tuple(given.shape)} "
                f"({kind_and_words(error)[:240]})"
            ) from error

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last linear or embedding module whose weight has one row per entry of the vocabulary.

        Return None if the network returns no logits over a vocabulary.
        """
        if not self._facts.scores_words:
            return None
        size = self.config.num_scores
        rows = [module for module in self.network.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        return next((module for module in reversed(rows) if len(module.weight) == size), None)

    def get_input_embeddings(self) -> None:
        """Return None, as the embedding is only needed for padded vocabularies, which own networks never have."""

    def can_generate(self) -> bool:
        return self.get_output_embeddings() is not None

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> nn.Module:
        raise InputError(f"{cls.__name__} is of neither transformers nor timm, and nothing says how it is built anew")


class OwnMaskedNetwork(OwnNetwork):
    """An `OwnNetwork` that also takes an attention mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True) -> Tensor:
        return self._scores(input_ids, attention_mask)


class OwnImageNetwork(OwnNetwork):
    """An `OwnNetwork` for images, called with `pixel_values`."""

    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> Tensor:
        """Return scores (batch, classes) or any other floating-point output of the network."""
        return self._scores(pixel_values)


def is_known(model: nn.Module) -> bool:
    """Return whether a model is from transformers or timm, or an `OwnNetwork`: its config then says how to call it."""
    of_transformers = hasattr(model, "base_model") and hasattr(getattr(model, "config", None), "to_json_string")
    return is_timm(model) or of_transformers or isinstance(model, OwnNetwork) or row_of(model) is not None


def known_inside(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost transformers and timm models inside a module, by path.

    Single layers of timm inside a user's network do not count.
    """
    known: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        is_model = is_known(part) and (not is_timm(part) or hasattr(part, "reset_classifier"))
        if name and is_model and not any(name.startswith(f"{outer}.") for outer in known):
            known[name] = part
    return known


# Caches: network -> (shapes of its weights, facts); class of networks -> wrapper classes that were created for it.
_FACTS: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, _Facts]]" = weakref.WeakKeyDictionary()
_KINDS: "weakref.WeakKeyDictionary[type, dict[type[OwnNetwork], Any]]" = weakref.WeakKeyDictionary()


def wrap_own(model: nn.Module) -> Network:
    """Return a transformers or timm model unchanged, and any other network in an `OwnNetwork`.

    Raises:
        InputError: if the network takes neither token ids nor images of a size that it declares.
    """
    if is_known(model):
        return model
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    if model not in _FACTS or _FACTS[model][0] != shapes:
        _FACTS[model] = shapes, _inspect(model)
    facts, kinds, kind = _FACTS[model][1], _KINDS.setdefault(type(model), {}), type(model)
    base = OwnImageNetwork if facts.takes_images else OwnMaskedNetwork if facts.takes_mask else OwnNetwork
    if base not in kinds:
        kinds[base] = type(kind.__name__, (base,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return kinds[base](model, facts)


def network_of(model: Network) -> nn.Module:
    """Return the network inside an `OwnNetwork`; any other model unchanged."""
    return model.network if isinstance(model, OwnNetwork) else model


def _inspect(network: nn.Module) -> _Facts:
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
        side = _declared(network, _SIDES)
        return _text_facts(network, like.device) if side is None else _image_facts(network, side, like)


def _image_facts(network: nn.Module, size: Any, like: Tensor) -> _Facts:
    from transformers import PretrainedConfig

    takes, patches = inspect.signature(network.forward).parameters, _declared(network, ("patch_size",))
    for sides, what in ((size, "images"), (patches, "patches")):
        if isinstance(sides, tuple | list) and len({*sides}) != 1:
            raise _refusal(network, f"its {what} are not squares: {tuple(sides)}")
    side = side_length(size)
    channels = next((part.in_channels for part in network.modules() if isinstance(part, nn.Conv2d)), 3)
    facts = _Facts("pixel_values" if "pixel_values" in takes else None, PretrainedConfig())
    noise = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0)).to(like)
    values = _try_call(network, noise, facts, f"images of shape {tuple(noise.shape[1:])}")
    sizes = {"image_size": side, "patch_size": patches, "num_channels": channels}
    return replace(facts, config=PretrainedConfig(**sizes), key=_pick_key(network, values, [*values]))


def _text_facts(network: nn.Module, device: torch.device) -> _Facts:
    from transformers import PretrainedConfig

    takes = inspect.signature(network.forward).parameters
    tables = [module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)]
    if not [size for size in tables if size > 1]:
        raise _refusal(network, "it has no table of embeddings of tokens (nn.Embedding), and says no image_size")
    limit = _declared(network, _LENGTHS)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    ids = _sample_ids(min(size for size in tables if size > 1), min(NUM_TOKENS, limit or NUM_TOKENS)).to(device)
    mask = takes.get("attention_mask")
    needs_mask = mask is not None and mask.default is inspect.Parameter.empty
    facts = _Facts("input_ids" if "input_ids" in takes else None, PretrainedConfig(), mask is not None, needs_mask)
    with _Lookups(ids) as lookups, PositionTables(ids.shape[1]) as keys:
        values = _try_call(network, ids, facts, "token ids")
    if lookups.size is None:
        raise _refusal(network, "it looks up the token ids in no table of embeddings")
    rank, fitting = _candidates(values, ids, lookups.size)
    if (targets := next((name for name in _TARGETS if name in takes), None)) is not None and rank:
        with contextlib.suppress(*CANNOT_CALL):  # the targets may have a wrong shape, as for a text classifier
            again = _floats(_call(network, replace(facts, targets=targets), ids))
            if (better := _candidates(again, ids, lookups.size))[0] < rank:
                facts, values, (rank, fitting) = replace(facts, targets=targets), again, better
    if not fitting:
        shapes = ", ".join(str(tuple(value.shape)) for value in values.values()) or "no scores"
        expected = f"({len(ids)}, {ids.shape[1]}, scores) or ({len(ids)}, classes)"
        raise _refusal(network, f"for ids of shape {tuple(ids.shape)} it returns {shapes}, expected {expected}")
    key = _pick_key(network, values, fitting)
    if rank == _CLASSES and ids.shape[1] > 1:
        fewer = _try_call(network, ids[:, 1:], facts, "token ids")
        if key not in fewer or fewer[key].shape != values[key].shape:
            raise _refusal(network, "what it returns is one number for each token, and no scores of words or classes")
    sizes = {
        "vocab_size": lookups.size,
        "num_scores": values[key].shape[-1],
        "max_position_embeddings": min((each for each in (limit, keys.limit) if each), default=None),
    }
    return replace(facts, config=PretrainedConfig(**sizes), key=key, scores_words=rank == _WORDS)


_WORDS, _TOKENS, _CLASSES, _NOTHING = range(4)


def _candidates(values: Mapping[Any, Tensor], ids: Tensor, num_words: int) -> tuple[int, list[Any]]:
    """Return the best kind of scores in the outputs of a call, and the keys of the outputs that may be the scores.

    The kinds are numbered 0 to 3, best first: vocabulary scores per token, other scores per token, class scores per
    text, none. If there are vocabulary scores, other outputs are not candidates. If an output is named "logits", only
    it is a candidate.
    """
    kinds = [
        [key for key, value in values.items() if value.shape == (*ids.shape, num_words)],
        [key for key, value in values.items() if value.ndim == 3 and value.shape[:2] == ids.shape],
        [key for key, value in values.items() if value.ndim == 2 and len(value) == len(ids)],
    ]
    if "logits" in values:
        kinds = [[key for key in keys if key == "logits"] for keys in kinds]
    rank = next((number for number, keys in enumerate(kinds) if keys), _NOTHING)
    return rank, kinds[_WORDS] if rank == _WORDS else kinds[_TOKENS] + kinds[_CLASSES]


def _pick_key(network: nn.Module, values: Mapping[Any, Tensor], fitting: list[Any]) -> Any:
    """Return the key of the scores among the outputs of a network: "logits", or the only key in `fitting`.

    `fitting` lists the keys of the outputs that have the shape of scores.

    Raises:
        InputError: if `fitting` is empty, or has several keys and none of them is "logits".
    """
    if "logits" in fitting or len(fitting) == 1:
        return "logits" if "logits" in fitting else fitting[0]
    shapes = ", ".join(str(tuple(values[key].shape)) for key in fitting) or "nothing"
    raise _refusal(
        network, f"nothing says which of what it returns are its scores ({shapes}): name them logits, as in a dict"
    )


def _refusal(network: nn.Module, reason: str) -> InputError:
    inside = known_inside(network)
    parts = " and ".join(f"{type(part).__name__} as {name!r}" for name, part in inside.items())
    which = "that part" if len(inside) == 1 else "one of them"
    hint = f"; it holds {parts}: give {which} alone, or name it, model={next(iter(inside))!r}" if inside else ""
    return InputError(
        f"no layered view of {type(network).__name__}: it is neither of transformers nor of timm, and {reason}{hint}"
    )


def _declared(network: nn.Module, names: tuple[str, ...]) -> Any:
    """Return the first int, tuple or list that the network, its config or patch embedding stores under these names."""
    for owner in (network, getattr(network, "config", None), getattr(network, "patch_embed", None)):
        values = owner if isinstance(owner, Mapping) else getattr(owner, "__dict__", {})
        for name in names:
            if isinstance(value := values.get(name), int | tuple | list):
                return value
    return None


def _sample_ids(num_rows: int, num_tokens: int) -> Tensor:
    """Return token ids (2, tokens) below `num_rows` that are neither consecutive nor all equal.

    `_Lookups` then cannot mistake the lookup of position ids or segment ids for that of the token ids.
    """
    ids = torch.arange(1, num_tokens + 1) ** 2 % num_rows
    return torch.stack([ids, ids.flip(0)])


class _Lookups(TorchFunctionMode):
    """A torch function mode that finds the embedding table of the token ids: `size` is its number of rows.

    If the token ids are looked up in several tables, `size` is the smallest number of rows.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.size = ids, None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding and any(torch.equal(args[0], ids) for ids in (self.ids, self.ids.T)):
            self.size = len(args[1]) if self.size is None else min(self.size, len(args[1]))
        return func(*args, **(kwargs or {}))


def _try_call(network: nn.Module, given: Tensor, facts: _Facts, what: str) -> dict[Any, Tensor]:
    try:
        return _floats(_call(network, facts, given))
    except torch.OutOfMemoryError:
        raise
    except CANNOT_CALL as error:
        raise _refusal(network, f"it cannot be called with {what} alone ({kind_and_words(error)[:240]})") from error


def _call(network: nn.Module, facts: _Facts, given: Tensor, mask: Tensor | None = None) -> Any:
    # Pass a contiguous copy, because many networks call `view` on their input, and some write to it.
    given = given.clone(memory_format=torch.contiguous_format)
    named = {} if facts.targets is None else {facts.targets: given.clone()}
    if mask is not None or facts.needs_mask:
        named["attention_mask"] = torch.ones_like(given) if mask is None else mask.clone()
    return network(given, **named) if facts.column is None else network(**{facts.column: given}, **named)


def _floats(output: Any) -> dict[Any, Tensor]:
    """Return the floating-point tensors with at least two dimensions in the output of a call, by name or index."""
    if isinstance(output, Tensor):
        values: dict[Any, Any] = {None: output}
    elif hasattr(output, "_asdict"):
        values = output._asdict()
    elif isinstance(output, tuple | list):
        values = dict(enumerate(output))
    else:
        values = dict(output if isinstance(output, Mapping) else getattr(output, "__dict__", {}))
    floats = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {name: value for name, value in floats.items() if value.ndim > 1}
