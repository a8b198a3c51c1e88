"""Find what attention and MLP of each block add to the states, among the outputs of the block's submodules."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.functional._checks import widened
from lit_layers.functional.jacobian.block_call import Unsupported, record_attention
from lit_layers.models.block_calls import BlockCall, call_hooks, hooked, state_of
from lit_layers.models.proof import probe_of
from lit_layers.models.view import LayeredModel, Trajectory, states_of_layers, upcast

_TOLERANCE = 1e-5  # largest error of a sum that counts as rounding, relative to the norms of its terms
PARTS = "attention", "mlp", "after_attention"  # values of an option `states` that need contributions
StatesOrPart = Literal["resid", "hf", "normed", "attention", "mlp"]


def states_or_parts(seen: Trajectory, states: StatesOrPart) -> Iterator[Tensor]:
    """Yield the states of layers 0 to L, or what the attention or MLP of each block adds to them.

    Attention and MLP add nothing to layer 0, so it is NaN for them.

    Raises:
        InputError: as in `contributions`.
    """
    if states not in PARTS:
        yield from states_of_layers(seen, states)
        return
    yield torch.full_like(seen.hidden[0], math.nan)
    for layer in range(1, seen.num_layers + 1):
        yield contributions(seen, layer)[states == "mlp"]


def check_contributions(model: LayeredModel) -> None:
    """Check on example inputs, in float32 or wider, that every block adds attention and MLP to the state.

    Raises:
        InputError: if a block does not.
    """
    model = upcast(model)
    seen = model.trajectory(probe_of(model.model).inputs)
    for layer in range(1, model.num_layers + 1):
        contributions(seen, layer)


def contributions(seen: Trajectory, layer: int) -> tuple[Tensor, Tensor]:
    """Return what attention and MLP of block `layer` add to its input state, two tensors (batch, tokens, dim).

    The sum of input state and both contributions equals the output state at every real token, with a relative error of
    at most 1e-5. The contributions are the two outputs of submodules for which this is true. If attention and MLP are
    followed by norms or scales, these are the outputs of the norms or scales. The attention's contribution is computed
    after the attention weights. If both are, it is the first of the two. Both contributions are NaN at tokens whose
    state before or after the block is not finite.

    Raises:
        InputError: if no two outputs have this sum. Examples are blocks that normalize the sum (BERT), blocks without
            attention, and blocks that scale an output without a submodule (Granite). Also if different pairs of outputs
            have this sum, because the contributions are as small as rounding errors.
    """
    call, before, after = seen.block(layer), seen.hidden[layer - 1], seen.hidden[layer]
    finite = before.isfinite().all(-1) & after.isfinite().all(-1)
    real = finite & seen.mask
    change = widened(after[real]) - widened(before[real])
    eps = torch.finfo(seen.hidden.dtype).eps
    # The state is rounded at each addition, in proportion to its own size, which may be much larger than the change.
    rounding = 4 * eps * (widened(before[real]).norm(dim=-1) + widened(after[real]).norm(dim=-1))

    def is_sum(one: Tensor, other: Tensor, rows: slice) -> bool:
        at = tuple(index[rows] for index in real.nonzero(as_tuple=True))
        one, other = widened(one[at]), widened(other[at])
        allowed = _TOLERANCE * (one.norm(dim=-1) + other.norm(dim=-1)) + rounding[rows]
        return bool(((change[rows] - one - other).norm(dim=-1) <= allowed).all())

    early, late = _outputs(call, before)
    pairs = [(one, other) for index, one in enumerate(late) for other in (*late[index + 1 :], *early)]
    for rows in (slice(0, 1), slice(None)):  # the first token excludes most pairs
        pairs = [pair for pair in pairs if is_sum(*pair, rows)]
    # Several equal pairs may remain, for example before and after dropout. If pairs differ, the contributions are as
    # small as the rounding errors of the state, so it is not known which outputs are added.
    if pairs and all(torch.equal(one[real], pairs[0][i][real]) for pair in pairs for i, one in enumerate(pair)):
        attention, mlp = (each.where(finite[..., None], math.nan) for each in pairs[0])
        return attention, mlp
    reason = "they are too small to tell which outputs" if pairs else "no two submodule outputs add up to its change"
    raise InputError(
        f"expected blocks that add the outputs of attention and MLP to the state, got block {layer} of "
        f"{type(seen.model.model).__name__}: {reason}"
    )


def _outputs(call: BlockCall, before: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of a block's submodules that have the shape of the state, in the order of their computation.

    The first list has the outputs that are computed before the attention weights, the second those after them. In a
    block without attention, the first list has all outputs.
    """
    alignment, outputs = call.alignment, list[Tensor]()
    aligned, start = call.aligned(), before if alignment is None else alignment.align(before)

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        state = state_of(output)
        if isinstance(state, Tensor) and state.shape[-1:] == start.shape[-1:] and state.numel() == start.numel():
            # Copy the output, because the block may write to it later (Falcon adds the attention to the MLP's output).
            whole = state.reshape(start.shape).clone()
            outputs.append(whole if alignment is None else alignment.restore(whole))

    parts = [module for module in call.module.modules() if module is not call.module]
    with torch.no_grad(), hooked(call_hooks(parts, keep)):
        try:
            record_attention(aligned, start)  # stops the block at its attention
            num_early = len(outputs)
        except Unsupported:
            return outputs, []
        outputs.clear()
        aligned(start)
    return outputs[:num_early], outputs[num_early:]
