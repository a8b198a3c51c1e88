"""A small batch made from a model's config, and what its modules are called with as it passes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError
from lit_layers.models.block_calls import Layout, first, hooked, split_arguments, watching
from lit_layers.models.families.rows import Network, by_name, by_pixels, side_length, text_config, without_mask
from lit_layers.models.offload import execution_device

NUM_TOKENS = 12
COLUMNS = ("input_ids", "attention_mask", "token_type_ids")
# What a model of transformers, or torch beneath it, raises for a call that does not fit.
CANNOT_CALL = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError),
    *(TypeError, ValueError, NotImplementedError),
)


@dataclass(frozen=True)
class Probe:
    """Inputs (3, tokens) or (2, channels, side, side) and how the model is called with them.

    The second text is the first with another last token; images are of noise.
    """

    inputs: Mapping[str, Tensor]
    columns: tuple[str, ...]  # that the model takes, the needed one first
    options: tuple[tuple[str, bool], ...]
    call: Callable[[Network, Mapping[str, Tensor], Mapping[str, Any]], Any]

    @property
    def needed(self) -> Tensor:
        return self.inputs[self.columns[0]]

    @property
    def of_texts(self) -> bool:
        return self.columns[0] == "input_ids"


class Watched(NamedTuple):
    """One call of a module."""

    module: nn.Module
    state: Any  # a tensor; None of a call that begins with none
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    @property
    def after(self) -> Any:
        """The state that it returns; None where it returns none."""
        output = first(self.output)
        return output if isinstance(output, Tensor) else None

    def seen(self, layout: Layout) -> "Watched":
        """The call with its states as (batch, tokens, dim)."""
        return self._replace(state=layout.taken(self.state, self.args), output=layout.given(self.output))


def is_timm(model: nn.Module) -> bool:
    return type(model).__module__.split(".")[0] == "timm"


def probe_of(model: Network) -> Probe:
    """The probe of a model of timm or transformers.

    Raises:
        InputError: another model, or one that takes neither texts nor images of a known size.
    """
    if is_timm(model):
        side, channels = _timm_size(model)
        return Probe({"pixel_values": _noise(model, channels, side)}, ("pixel_values",), (), by_pixels)
    takes = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    has_cache = "use_cache" in takes or (passes_on and hasattr(text_config(model.config), "use_cache"))
    options = (("use_cache", False),) if has_cache else ()
    if "input_ids" in takes:
        columns = tuple(name for name in COLUMNS if name in takes)
        call = by_name if "attention_mask" in columns else without_mask
        return Probe({"input_ids": probe_texts(model).to(execution_device(model))}, columns, options, call)
    side = _from_configs(model.config, "image_size")
    if "pixel_values" not in takes or side is None:
        raise InputError(
            f"no layered view of {type(model).__name__}: it takes neither texts (input_ids) nor images of a size that "
            "its config says (pixel_values)"
        )
    noise = _noise(model, int(_from_configs(model.config, "num_channels") or 3), side_length(side))
    return Probe({"pixel_values": noise}, ("pixel_values",), (), by_name)


def probe_texts(model: Network) -> Tensor:
    """(3, tokens), of real tokens that the config gives no meaning."""
    config = text_config(model.config)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"no layered view of {type(model).__name__}: its config says no vocab_size")
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_id", "_index", "_idx")) and isinstance(value, int)
    }
    tokens = range(min(getattr(model.config, "unpadded_vocab_size", None) or config.vocab_size, 4096))
    plain = [token for token in tokens if token not in special] or [*tokens]
    limit = getattr(config, "max_position_embeddings", None) or 0
    length = min(NUM_TOKENS, limit) if limit > 0 else NUM_TOKENS
    rows = [[plain[(7919 * (start + place)) % len(plain)] for place in range(length)] for start in (1, 1, 37)]
    rows[1][-1] = plain[(plain.index(rows[0][-1]) + 1) % len(plain)]
    return torch.tensor(rows)


def _noise(model: Network, channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    like = next(model.parameters())
    return torch.randn(2, channels, side, side, generator=generator).to(execution_device(model), like.dtype)


def _timm_size(model: Network) -> tuple[int, int]:
    """Side and channels of a timm model's images."""
    patches: Any = getattr(model, "patch_embed", None)
    if getattr(patches, "img_size", None) is not None and hasattr(patches, "proj"):
        return side_length(patches.img_size), patches.proj.in_channels
    channels, side, _ = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return side, channels


def _from_configs(config: Any, name: str) -> Any:
    """A field of a config, or of the part of it that is for images."""
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "backbone_config"))]
    return next((getattr(part, name) for part in parts if getattr(part, name, None) is not None), None)


@contextmanager
def watch(modules: Iterable[nn.Module]) -> Iterator[list[Watched]]:
    """What modules are called with and return inside, in the order in which they end."""
    calls: list[Watched] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        try:
            state, others, named = split_arguments(args, kwargs)
        except StopIteration:
            state, others, named = None, args, kwargs
        calls.append(Watched(module, state if isinstance(state, Tensor) else None, others, dict(named), output))

    with hooked(watching(modules, note)):
        yield calls


class PositionTables(TorchFunctionMode):
    """Notes how many tokens fit the tables that are looked up by counting: `limit` is the shortest one's."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.count, self.limit = torch.arange(num_tokens), None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding and len(args) > 1 and args[0].shape[-1:] == self.count.shape:
            places = args[0].reshape(-1, len(self.count))[0].cpu()
            if bool((places - places[0] == self.count).all()):
                fits = len(args[1]) - int(places[0])
                self.limit = fits if self.limit is None else min(self.limit, fits)
        return func(*args, **(kwargs or {}))
