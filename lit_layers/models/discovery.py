"""Find the blocks of a model among its lists of modules, from the recorded calls of one forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.models.block_calls import bypassed
from lit_layers.models.families import Family, Network, propose_blocks, text_config
from lit_layers.models.own_networks import OwnNetwork
from lit_layers.models.proof import Probe, SeenCall, Unproven, is_timm

TWO_ROWS = "an encoder and a decoder are two rows of blocks"


@dataclass(frozen=True)
class FoundFamily(Family):
    """A family that was found by watching a call of a model. It is valid for one class with one config.

    Unlike in the rows of `FAMILIES`, `blocks` and `norm` are paths below the model, not below its trunk. To
    read out states, the model itself is called with its blocks bypassed, so the field `head` is unused.
    """

    returned: tuple[int, ...] = ()  # for each block: length of the tuple it returns; 0 for a tensor
    dim: int = 0
    limit: int | None = None  # maximum number of tokens per text; None if there is no limit
    origin: str = "structure"
    takes_padding: bool = False
    is_causal: bool = False
    filler: int = 0  # id of an ordinary token, for inputs whose content has no effect
    order: tuple[int, ...] = ()  # indices of the blocks in their list, in running order
    scalar_scores: bool = False  # whether a call returns one number for each token, (batch, tokens)

    def container(self, model: Network) -> nn.Module:
        return model.get_submodule(self.blocks)

    def block_list(self, model: Network) -> tuple[nn.Module, ...]:
        modules = tuple(self.container(model).children())
        return tuple(modules[index] for index in self.order) or modules

    def width(self, model: Network) -> int:
        return self.dim

    def max_tokens(self, config: Any) -> int | None:
        return self.limit

    def final_norm(self, model: Network) -> nn.Module | None:
        return None if self.norm is None else model.get_submodule(self.norm)

    def num_returned(self, num_blocks: int) -> Sequence[int]:
        return self.returned

    def result(self, output: Any) -> Tensor:
        logits = super().result(output)
        return logits[..., None] if self.scalar_scores else logits

    def read_out(self, model: Network, hidden: Tensor) -> Tensor:
        """Return the logits of states (batch, tokens, dim), by calling the model with its blocks bypassed."""
        # If the head reads one token at a time, make each token a text of one token, so that `hidden` may hold any
        # selection of tokens.
        states = hidden if self.needs_all else hidden.reshape(-1, 1, hidden.shape[-1])
        blocks = self.block_list(model)
        with bypassed(blocks, self.identities(len(blocks), states)):
            logits = self.logits(model, self._dummy_inputs(model, states))
        return logits if self.needs_all else logits.reshape(*hidden.shape[:2], -1)

    def _dummy_inputs(self, model: Network, states: Tensor) -> dict[str, Tensor]:
        """Return inputs for a call with bypassed blocks, with the batch size and length of `states`.

        The logits of such a call do not depend on the content of the inputs.
        """
        if self.vision is None:
            return {"input_ids": torch.full(states.shape[:2], self.filler, device=states.device)}
        shape = len(states), self.vision.channels(model), *[self.vision.usual_side(model)] * 2
        return {"pixel_values": states.new_zeros(shape, dtype=next(model.parameters()).dtype)}


def scores_of(model: Network, output: Any, probe: Probe) -> dict[str, Any]:
    """Return the fields `results` and `scalar_scores` of a `FoundFamily`, found in the output of a call on `probe`.

    Logits of shape (batch, tokens) may be one number per token, or class scores if there happen to be as many classes
    as tokens. A second call on texts with one token less tells them apart: only numbers per token become fewer.

    Raises:
        Unproven: if the output has none of the fields that may hold logits.
    """
    if isinstance(output, Tensor):
        return {}
    results = tuple(name for name in Family.results if hasattr(output, name))
    if not results:
        given = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
        raise Unproven(f"it returns neither logits nor last_hidden_state, but {given}: open the model inside it")
    shape = getattr(output, results[0]).shape
    if not probe.is_text or shape != probe.needed.shape:
        return {"results": results}
    fewer = {name: column[:, :-1] for name, column in probe.inputs.items()}
    again = getattr(probe.call(model, fewer, dict(probe.options)), results[0])
    return {"results": results, "scalar_scores": again.shape != shape}


def is_encoder_decoder(model: Network) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def find_blocks(
    model: Network, calls: list[SeenCall], lists: dict[str, list[nn.Module]], probe: Probe
) -> tuple[str, list[SeenCall]]:
    """Return the path of the list of modules that holds the blocks, and the calls of these blocks.

    Raises:
        Unproven: if no list of modules is a sequence of blocks, or it is not clear which one holds the blocks.
    """
    chains: dict[str, list[SeenCall]] = {}
    reasons: dict[str, str] = {}
    depth = None if is_timm(model) else _depth(model, probe)
    for path, members in lists.items():
        if isinstance(model, OwnNetwork):
            members = _strip_ends(members)
        ids = {id(module) for module in members}
        row = [call for call in calls if id(call.module) in ids]
        if any(path.startswith(f"{outer}.") for outer in chains) or not row:
            continue  # leave out lists that lie inside a sequence of blocks, and lists whose modules do not run
        if (reason := _mismatch(path, members, row, probe)) is None:
            chains[path] = row
        else:
            reasons[path] = reason
    if not chains:
        likely = propose_blocks(model)
        reason = reasons.get(likely or "") or next(iter(reasons.values()), None)
        raise Unproven(reason or "no list of its modules runs in its own call")
    path = _choose(model, chains, depth)
    return path, chains[path]


def _strip_ends(members: list[nn.Module]) -> list[nn.Module]:
    """Return the modules of a list without the dropout and norm modules at its start and its end.

    Training scripts often put these into one Sequential with the blocks.
    """
    inner = [index for index, module in enumerate(members) if not _is_no_block(module)]
    return members[inner[0] : inner[-1] + 1] if inner else []


def _is_no_block(module: nn.Module) -> bool:
    return not [*module.children()] and all(parameter.ndim < 2 for parameter in module.parameters())


def _depth(model: Network, probe: Probe) -> int | None:
    config = text_config(model.config) if probe.is_text else getattr(model.config, "vision_config", model.config)
    depth = getattr(config, "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


def _mismatch(path: str, members: list[nn.Module], row: list[SeenCall], probe: Probe) -> str | None:
    """Return why the modules `members` of a list are not a sequence of blocks; None if they are.

    `row` are the recorded calls of these modules.
    """
    if [call.module for call in row] != members:
        return f"the {len(members)} modules of {path} run {len(row)} times in one pass, not once each, in order"
    states = [(call.state, call.result) for call in row]
    for number, (before, after) in enumerate(states, start=1):
        if before is None or after is None:
            return f"module {number} of {path} does not take a state and return one"
        if before.ndim != 3 or before.shape != states[0][0].shape or after.shape != before.shape:
            return (
                f"the states of {path} are not (batch, tokens, dim) of one shape: module {number} takes "
                f"{tuple(before.shape)} and gives {tuple(after.shape)}"
            )
    shape, given = states[0][0].shape, probe.needed.shape
    if shape[:2] != given if probe.is_text else shape[0] != given[0]:
        return f"the states of {path} are {tuple(shape)} for an input of {tuple(given)}"
    for number, (call, following) in enumerate(pairwise(row), start=1):
        if following.state is not call.result and not torch.equal(following.state, call.result):
            return f"module {number + 1} of {path} takes something else than module {number} gives"
    return None


def _choose(model: Network, chains: dict[str, list[SeenCall]], depth: int | None) -> str:
    """Choose among the lists of modules that are sequences of blocks (path -> calls); return the path of the blocks.

    Raises:
        Unproven: if several lists have more than one module. Also if every list has one module, but the depth in the
            config is not 1.
    """
    paths = [path for path, row in chains.items() if len(row) > 1]
    if len(paths) > 1:
        two_rows = f"{TWO_ROWS}: " if is_encoder_decoder(model) else ""
        raise Unproven(f"{two_rows}its states pass several rows of blocks: {', '.join(paths)}")
    fitting = [path for path, row in chains.items() if len(row) == depth] or paths
    if len(fitting) > 1:  # the model has one block, and several lists have one module: choose the most likely list
        fitting = [path for path in fitting if path == (propose_blocks(model) or fitting[0])]
    if not fitting:
        lengths = ", ".join(f"{path} of {len(row)}" for path, row in chains.items())
        raise Unproven(f"its config says {depth} blocks, and its states pass {lengths}")
    return fitting[0]
