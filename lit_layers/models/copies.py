"""Copies of a model: a model of some of its blocks, and a layered view whose blocks compute in bfloat16."""

import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError, first_sentence
from lit_layers.models.build import TIMM_OPTIONS, plain_model
from lit_layers.models.families import Network, trunk_of
from lit_layers.models.pixels import copy_pixel_statistics_
from lit_layers.models.proof import probe_of, rel_error
from lit_layers.models.running_order import running_order
from lit_layers.models.structure import family_of, rebuilt, rebuilt_error
from lit_layers.models.view import LayeredModel, evaluating

PER_BLOCK = ("layer_types", "attention_layers", "mlp_layer_types")  # config fields with one entry per block


def truncate(model: nn.Module, num_layers: int, *, head: bool = True) -> nn.Module:
    """Return a new model of the first `num_layers` blocks with copies of the weights; `model` does not change.

    The copy has the class, device, dtypes, training modes, tied weights and attention implementation of `model`. Its
    config states the smaller depth, so that it can be saved as an ordinary model. At layers 0..num_layers, its hidden
    states equal those of `model` bit by bit. The final norm and the head are copied. They were trained for the last
    layer, so the logits of the copy are the logit lens of layer `num_layers`.

    Args:
        model: a transformers or timm model.
        num_layers: number of blocks, 1..L.
        head: whether to copy the head. Without it, the result is the trunk, such as GPT2Model, BertModel or ViTModel; a
            timm model gets `num_classes=0`. If the trunk class has a pooler and `model` has none, the copy gets one
            with zero weights. Otherwise, loading the saved folder would draw random weights for it.

    Raises:
        InputError: if `num_layers` is out of range, the blocks share weights, or the model is not one sequence of
            blocks (encoder-decoder). Also if the config cannot describe the copy.
    """
    model = plain_model(model)
    depth = len(family_of(model).block_list(model))
    if not 1 <= num_layers <= depth:
        raise InputError(f"num_layers: {type(model).__name__} can be cut to 1..{depth} blocks, got {num_layers}")
    return _copy_of(model, range(num_layers), head)


def remove_blocks(model: nn.Module, blocks: Collection[int]) -> nn.Module:
    """Return a new model without some blocks, with copies of the other weights; `model` does not change.

    The copy has the class and head of `model`, and a config that states the smaller depth. It gives the same output as
    `model` in a `running_order` that skips these blocks, which is checked on example inputs.

    Args:
        model: a transformers or timm model.
        blocks: numbers of the blocks to remove, from 1. At least one block must remain.

    Raises:
        InputError: if a block does not exist, no block remains, or the model cannot be cut (see `truncate`). Also if a
            remaining block would compute something else under its new number, e.g. with a scale by its number.
    """
    model = plain_model(model)
    family = family_of(model)
    depth = len(family.block_list(model))
    kept = [index for index in range(depth) if index + 1 not in blocks]
    if not blocks or not kept or len(kept) + len({*blocks}) != depth:
        asked = ", ".join(map(str, blocks))
        raise InputError(f"without: expected some of the blocks 1..{depth}, but not all, got {asked or 'none'}")
    short = _copy_of(model, kept, head=True)
    if family.package != "timm":
        short = rebuilt(short)  # renumbers the blocks: each uses the key-value cache at its number
    inputs = probe_of(model).inputs
    with torch.no_grad(), evaluating(model), evaluating(short):
        with running_order(model, [index + 1 for index in kept]):
            expected = family.logits(model, inputs)
        error = rel_error(family.logits(short, inputs), expected)
    if not error < 1e-2:  # rounding errors are smaller, also in 16 bits
        kind = type(model).__name__
        raise InputError(f"without: the blocks of this {kind} depend on their position: removed, others would change")
    return short.train(model.training)


def _copy_of(model: Network, kept: Sequence[int], head: bool) -> Network:
    """Return a copy of a model with the blocks at these indices only, counted from 0."""
    source: Network = model if head else trunk_of(model)
    family = family_of(source)
    blocks = family.block_list(source)
    _check_cut(model, blocks)
    dropped = sorted({*range(len(blocks))}.difference(kept), reverse=True)
    # This memo makes deepcopy replace each dropped block by an Identity, so that its weights are never copied.
    stand_ins: dict[int, Any] = {id(blocks[index]): nn.Identity() for index in dropped}
    with torch.no_grad():
        short: Network = copy.deepcopy(source, stand_ins)
    container: Any = family.container(short)
    for index in dropped:
        del container[index]
    if family.package == "timm":
        _finish_timm(short, len(kept), head)
    else:
        _set_depth(short.config, kept)
        short.config.architectures = [type(short).__name__]
        copy_pixel_statistics_(model, short)
        if not head:
            _complete_pooler(short)
        if family.origin == "structure":
            _check_rebuild(short)
    return short


def _check_rebuild(short: Network) -> None:
    """Refuse a truncated model whose states change when it is built again from its config.

    Only classes without a row in `FAMILIES` are checked: it is unknown which of their config fields, besides the depth,
    depend on the number of blocks.
    """
    try:
        distance = rebuilt_error(short)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(short).__name__} is not cut: its config says nothing of fewer blocks ({first_sentence(error)})"
        ) from error
    if not distance < 1e-2:  # the rounding errors of rotary tables and of 16-bit weights are smaller
        raise InputError(
            f"{type(short).__name__} is not cut: saved and opened again its states would be others (by {distance:.1e} "
            "of their length), as its blocks depend on how many there are"
        )


def _check_cut(model: Network, blocks: tuple[nn.Module, ...]) -> None:
    kind = type(model).__name__
    parameters = [id(parameter) for block in blocks for parameter in block.parameters()]
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", len(blocks))
    if len(set(parameters)) < len(parameters) or len(blocks) != depth:
        raise InputError(f"the blocks of this {kind} share weights, and it is not cut: dropping one saves nothing")


def _set_depth(config: Any, kept: Sequence[int]) -> None:
    """Set the number of blocks in a config, and keep the entries of these blocks in fields with one entry per block."""
    for name in PER_BLOCK:  # shorten the stored fields; properties are left out, as the config computes them
        stored = getattr(type(config), "attribute_map", {}).get(name, name)
        if getattr(config, name, None) is not None and not isinstance(getattr(type(config), stored, None), property):
            setattr(config, name, [getattr(config, name)[index] for index in kept])
    if getattr(config, "attention_types", None) is not None:  # GPT-Neo: [[kinds of attention, repetitions]]
        config.attention_types = [[config.attention_layers, 1]]
    # Every config of transformers accepts the name `num_hidden_layers`; that of GPT-2 maps it to `n_layer`.
    config.num_hidden_layers = len(kept)
    # Configs of models that can serve as a backbone list the names of the layers (`stage_names`) and say which of them
    # are returned. Shorten the list, and let None select the last layer.
    if getattr(config, "stage_names", None) is not None:
        config.stage_names = list(config.stage_names)[: len(kept) + 1]
        config.set_output_features_output_indices(None, None)


def _complete_pooler(trunk: Network) -> None:
    """Add a pooler with zero weights to a trunk without one, if its class has one by default.

    Loading a saved BertModel would otherwise draw random weights for the missing pooler.
    """
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


MATRICES = ("Linear", "Conv1D", "Conv1d", "Conv2d")  # module classes whose weights autocast rounds at each use


class BFloat16View(LayeredModel):
    """The layered view of a copy of a model whose blocks compute matrix products and attention in bfloat16.

    The blocks run under torch.autocast. Embeddings, norms, residual additions, hidden states, final norm and head
    remain in float32. Weight matrices of the blocks are rounded to bfloat16 in the copy, so that autocast does not
    round them again at each use. The rounded matrices need additional memory, half of that of the originals, until the
    view is freed. The copy shares all other tensors with the model and does not write to them.
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
        return torch.float32  # the states are float32, even if the first parameter of a block is bfloat16

    @property
    def precision(self) -> str:
        return "bfloat16"


def _round_(module: nn.Module) -> None:
    """Round the weight of a module to bfloat16 if the class of the module is in `MATRICES`."""
    # The bias is not rounded, because some modules add it outside of the operation that autocast rounds.
    weight = module._parameters.get("weight")
    if weight is not None and any(kind.__name__ in MATRICES for kind in type(module).__mro__):
        module._parameters["weight"] = nn.Parameter(weight.detach().to(torch.bfloat16), False)


def _autocast(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    # Refer to the block only weakly: its new `forward` is stored in it. With a strong reference, the block would refer
    # to itself and would not be freed together with the view.
    method = weakref.WeakMethod(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound: Any = method()
        with torch.autocast(device_type, torch.bfloat16):
            return bound(*args, **kwargs)

    return run
