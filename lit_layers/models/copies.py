"""Copies of a model: its first blocks as a model of its own, and a view whose blocks multiply in bfloat16."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError, first_sentence
from lit_layers.models.build import TIMM_OPTIONS, plain_model
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.pixels import copy_pixel_statistics_
from lit_layers.models.structure import family_of, rebuilt_error
from lit_layers.models.view import LayeredModel

PER_BLOCK = ("layer_types", "attention_layers", "mlp_layer_types")  # fields of a config with an entry for each block


def truncate(model: nn.Module, num_layers: int, *, head: bool = True) -> nn.Module:
    """A new model of the first `num_layers` blocks, with copies of the weights; the given one stays as it is.

    It has the class, device, dtypes, modes of its parts, ties between weights and attention implementation of `model`,
    and its config says the smaller depth, so that saving gives a folder of an ordinary model. Its hidden states are
    those of `model` at layers 0..num_layers, bit by bit. The final norm (and head) are kept as they are: they were made
    for the last layer, and what they say of an earlier one is the logit lens.

    With `head=False` the trunk alone is copied (GPT2Model, LlamaModel, BertModel, ViTModel; of a timm model the one
    with `num_classes=0`), which computes no scores of words or classes. A BertModel has a pooler, as has a ViTModel;
    where `model` has none, its weights are zeros, so that the saved folder is whole and loads without random numbers.

    Raises:
        InputError: fewer than 1 block or more than there are, a model of no known family, one with two rows of blocks
            (an encoder and a decoder), one whose blocks share weights.
    """
    model = plain_model(model)
    source: Network = model if head else trunk_of(model)
    family = family_of(source)
    blocks = family.block_list(source)
    _check_cut(model, blocks, num_layers)
    # A dropped block is a stand-in in the copy: its weights are never in memory twice.
    stand_ins: dict[int, Any] = {id(block): nn.Identity() for block in blocks[num_layers:]}
    with torch.no_grad():
        short: Network = copy.deepcopy(source, stand_ins)
    container: Any = family.container(short)
    del container[num_layers:]
    if family.package == "timm":
        _finish_timm(short, num_layers, head)
    else:
        _set_depth(short.config, num_layers)
        short.config.architectures = [type(short).__name__]
        copy_pixel_statistics_(model, short)
        if not head:
            _complete_pooler(short)
        if family.origin == "structure":
            _check_rebuild(short)
    return short


def _check_rebuild(short: Network) -> None:
    """Refuse a model of which only a row could say what else in its config goes by the number of blocks."""
    try:
        distance = rebuilt_error(short)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(short).__name__} is not cut: its config says nothing of fewer blocks ({first_sentence(error)})"
        ) from error
    if not distance < 1e-2:  # rotary tables and 16 bits round
        raise InputError(
            f"{type(short).__name__} is not cut: saved and opened again its states would be others (by {distance:.1e} "
            "of their length), as its blocks depend on how many there are"
        )


def _check_cut(model: Network, blocks: tuple[nn.Module, ...], num_layers: int) -> None:
    kind = type(model).__name__
    parameters = [id(parameter) for block in blocks for parameter in block.parameters()]
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", len(blocks))
    if len(set(parameters)) < len(parameters) or len(blocks) != depth:
        raise InputError(f"the blocks of this {kind} share weights, and it is not cut: dropping one saves nothing")
    if not 1 <= num_layers <= len(blocks):
        raise InputError(f"num_layers: {kind} can be cut to 1..{len(blocks)} blocks, got {num_layers}")


def _set_depth(config: Any, num_layers: int) -> None:
    """Whatever the family calls it: `num_hidden_layers` is an alias of it in every config of transformers."""
    for name in PER_BLOCK:  # a property is computed from the depth
        stored = getattr(type(config), "attribute_map", {}).get(name, name)
        if getattr(config, name, None) is not None and not isinstance(getattr(type(config), stored, None), property):
            setattr(config, name, list(getattr(config, name))[:num_layers])
    if getattr(config, "attention_types", None) is not None:  # GPT-Neo's own way of writing attention_layers
        config.attention_types = [[config.attention_layers, 1]]
    config.num_hidden_layers = num_layers
    if getattr(config, "stage_names", None) is not None:  # of which layers it would be a backbone: of the last one
        config.stage_names = list(config.stage_names)[: num_layers + 1]
        config.set_output_features_output_indices(None, None)


def _complete_pooler(trunk: Network) -> None:
    """Plain loading of a BertModel, and of any other trunk that may have a pooler, expects one."""
    if getattr(trunk, "pooler", trunk) is None:
        like: Tensor = next(trunk.parameters())
        with torch.device("meta"):
            pooler = type(trunk)(trunk.config).pooler
        pooler = pooler.to_empty(device=like.device).to(like.dtype).train(trunk.training)
        for parameter in pooler.parameters():
            nn.init.zeros_(parameter)
        trunk.pooler = pooler


def _finish_timm(model: Network, num_layers: int, head: bool) -> None:
    options = {**getattr(model, TIMM_OPTIONS, {}), "depth": num_layers}
    if not head:
        model.reset_classifier(0)
        options["num_classes"] = 0
    setattr(model, TIMM_OPTIONS, options)
    model.feature_info = model.feature_info[:num_layers]


MATRICES = ("Linear", "Conv1D", "Conv1d", "Conv2d")  # kinds whose weights autocast rounds whenever they are used


class BFloat16View(LayeredModel):
    """The layered view of a copy of a model, in whose blocks products of matrices and attention are of bfloat16.

    It is what torch's autocast makes of the blocks, and of them alone: norms, what blocks add to a state, the states
    that they hand on, embeddings, final norm and head are in float32. Weights of matrices are rounded once, not
    whenever they are used, and take half of their room besides; all others are those of the model, which nothing is
    written to. The copy's memory is free when the view is.
    """

    def __init__(self, exact: LayeredModel) -> None:
        shared = {id(tensor): tensor for tensor in (*exact.model.parameters(), *exact.model.buffers())}
        super().__init__(copy.deepcopy(exact.model, shared))
        self.exact = exact
        for block in self.blocks:
            for module in block.modules():
                _round_(module)
            block.forward = _autocast(block.forward, exact.device.type)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32  # of the states, whatever the first matrix is in

    @property
    def precision(self) -> str:
        return "bfloat16"


def _round_(module: nn.Module) -> None:
    """The matrix alone: a bias may be added outside of what autocast rounds."""
    weight = module._parameters.get("weight")
    if weight is not None and any(kind.__name__ in MATRICES for kind in type(module).__mro__):
        module._parameters["weight"] = nn.Parameter(weight.detach().to(torch.bfloat16), False)


def _autocast(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    method = weakref.WeakMethod(forward)  # a block that holds itself would outlive the view

    def run(*args: Any, **kwargs: Any) -> Any:
        bound: Any = method()
        with torch.autocast(device_type, torch.bfloat16):
            return bound(*args, **kwargs)

    return run
