"""What analyses of Jacobians between tokens share: single prompts, chosen tokens, chosen blocks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.coupling import Directions, num_directions
from lit_layers.functional.jacobian import block_jacobian
from lit_layers.models.view import LayeredModel, Trajectory

Options = TypeVar("Options", bound=Any)  # an analysis, a dataclass with the fields `name` and `preset`


def first_prompts(model: LayeredModel, batches: Batches, num_prompts: int) -> Iterator[Trajectory]:
    """The trajectories of the first prompts, one prompt at a time."""
    left = num_prompts
    for batch in batches:
        rows = min(left, len(next(iter(batch.values()))))
        trajectory = model.trajectory({name: values[:rows] for name, values in batch.items()})
        yield from (trajectory.prompt(row) for row in range(rows))
        left -= rows
        if left == 0:
            return


def num_real_tokens(trajectory: Trajectory) -> int:
    """Number of real tokens of a trajectory of one prompt."""
    return int(trajectory.mask.sum())


def evenly_spread(first: int, last: int, count: int) -> list[int]:
    """At most `count` whole numbers from `first` to `last`, both among them (the last alone for one)."""
    if count == 1 or first == last:
        return [last]
    count = min(count, last - first + 1)
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]


def jacobians_from(trajectory: Trajectory, layer: int, out_token: int, in_tokens: Sequence[int]) -> Tensor:
    """Jacobians (in, dim, dim) of block `layer` between real tokens of one prompt."""
    found = block_jacobian(
        trajectory.block(layer),
        trajectory.hidden[layer - 1],
        out_tokens=out_token,
        in_tokens=list(in_tokens),
        mask=trajectory.mask,
    )
    return found[0, 0]


def own_jacobians(trajectory: Trajectory, layer: int, tokens: Sequence[int]) -> Tensor:
    """Jacobians (tokens, dim, dim) of block `layer` from each of these real tokens of one prompt to itself."""
    block, hidden = trajectory.block(layer), trajectory.hidden[layer - 1]
    return block_jacobian(block, hidden, out_tokens=list(tokens), mask=trajectory.mask)[0]


def finite_or_zero(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """The Jacobians (.., dim, dim) with non-finite ones set to zero, and which are non-finite or zero: undefined."""
    broken = ~jacobians.isfinite().all(-1).all(-1)
    finite = jacobians.masked_fill(broken[..., None, None], 0)
    return finite, (finite == 0).all(-1).all(-1)


def check_pairs(name: str, pairs: Sequence[Sequence[int]], num_layers: int) -> None:
    """Refuses pairs of blocks that the model does not have.

    Raises:
        InputError: no pair, one that is not two block numbers, one out of range, one given twice.
    """
    if not pairs:
        raise InputError(f"{name}: expected at least one pair of blocks, got none")
    for pair in pairs:
        if len(pair) != 2 or not all(type(block) is int and 1 <= block <= num_layers for block in pair):
            raise InputError(f"{name}: expected pairs of blocks 1..{num_layers}, got {list(pair)}")
    if len({tuple(pair) for pair in pairs}) < len(pairs):
        raise InputError(f"{name}: expected each pair of blocks once, got {[list(pair) for pair in pairs]}")


def check_directions(name: str, k: Directions, dim: int) -> int:
    """The number of directions that `k` stands for in a model of this width.

    Raises:
        InputError: `k` does not fit.
    """
    try:
        return num_directions(k, dim)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}; the model is {dim} wide: choose another k") from error


def check_counts(name: str, **counts: int | None) -> None:
    """Refuses numbers of things below 1; None is no number.

    Raises:
        InputError: naming the option.
    """
    for option, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{name}: expected {option} of at least 1, got {value}")


def check_choice(name: str, option: str, value: object, allowed: Sequence[object]) -> None:
    """Refuses a value that is not among those allowed.

    Raises:
        InputError: naming the option and what it may be.
    """
    if value not in allowed:
        raise InputError(f"{name}: expected {option} to be one of {list(allowed)}, got {value!r}")


def with_preset(analysis: Options, presets: Mapping[str, Mapping[str, Any]]) -> Options:
    """The analysis with the options of its preset in place; itself where it has none.

    Raises:
        InputError: an unknown preset, or an option given that the preset sets otherwise.
    """
    name, preset = analysis.name, analysis.preset
    if preset is None:
        return analysis
    check_choice(name, "preset", preset, list(presets))
    defaults = {field.name: field.default for field in dataclasses.fields(analysis)}
    for option, value in presets[preset].items():
        given = getattr(analysis, option)
        if given not in (defaults[option], value):
            raise InputError(
                f"{name}: preset {preset} sets {option} to {value}, got {option} {given} as well: leave one of them out"
            )
    return dataclasses.replace(analysis, **presets[preset])
