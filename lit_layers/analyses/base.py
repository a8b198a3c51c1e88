"""What an analysis is: data in, records out; its options, and the hidden states that it measures."""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from lit_layers.analyses.statistics import with_a_value
from lit_layers.data.batches import Batches
from lit_layers.data.images import EvalImages
from lit_layers.data.text import EvalText
from lit_layers.errors import InputError
from lit_layers.models.families import trunk_of
from lit_layers.models.pixels import pixel_statistics
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.moved import public_path
from lit_layers.records import Record

# "resid": every layer as it leaves its block. "hf": the last one after the final norm, as in `hidden_states` of
# transformers and in much published code. "normed": every one after the final norm, as a model cut there would end.
States = Literal["resid", "hf", "normed"]
_ORDERS = ("alpha", "p")  # of an entropy, of a norm: these may be infinite
STATES: tuple[States, ...] = ("resid", "hf", "normed")


class Analysis(ABC):
    """One way to measure every layer of a model.

    Subclasses are dataclasses: their fields are the options of a recipe and, with `name`, all that decides the
    numbers. Constructors are cheap; data loads on first use. `name` is unique within a run, e.g. `probe/ag_news`.
    """

    name: str
    LEAST: ClassVar[Mapping[str, float]] = {}  # the lowest value of options that are numbers
    POSITIVE: ClassVar[Sequence[str]] = ()  # options that are above 0

    @abstractmethod
    def run(self, model: LayeredModel) -> Iterable[Record]:
        """Yields the records of one checkpoint. May draw random numbers and switch modes: the driver restores both."""

    def check(self, model: LayeredModel) -> None:
        """Refuses, before the first step, options that do not fit the model and data that is not there.

        Raises:
            InputError: one sentence naming the option. The default loads every field that is data, and refuses images
                that are not as the model saw them in training and texts that are longer than it reads.
        """
        self.check_options(model)
        for value in vars(self).values():
            if isinstance(value, EvalText) and value.num_tokens > (longest := model.max_tokens or value.num_tokens):
                raise InputError(
                    f"{self.name}: num_tokens: {type(model.model).__name__} takes at most {longest} tokens, got "
                    f"{value.num_tokens}: ask for {longest} or fewer"
                )
            if isinstance(value, EvalImages):
                refuse_unlike_training(self.name, value, model)
        self.check_data()

    def check_options(self, model: LayeredModel) -> None:
        """Refuses options that do not fit, whatever the data; a subclass adds what depends on the model.

        Raises:
            InputError: one sentence naming the option. The default is `check_fields`.
        """
        self.check_fields()

    def check_fields(self) -> None:
        """Refuses options that are none of those that their `Literal` names, or below what `LEAST` and `POSITIVE` say.

        Raises:
            InputError: naming the option and what it may be.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            value, choices = getattr(self, field.name), _choices(field.type)
            if choices and get_origin(field.type) in (list, tuple) and not isinstance(value, list | tuple):
                raise InputError(f"{self.name}: expected {field.name} to be a list of {choices}, got {value!r}")
            for choice in value if isinstance(value, list | tuple) else (value,):
                if choices and isinstance(choice, str | None) and choice not in choices:
                    kinds = "an int or " if int in get_args(field.type) else ""
                    raise InputError(
                        f"{self.name}: expected {field.name} to be {kinds}one of {choices}, got {choice!r}"
                    )
        for option, least in self.LEAST.items():
            value = getattr(self, option)
            if value is not None and not (least <= value and (value < math.inf or option in _ORDERS)):
                raise InputError(f"{self.name}: expected {option} of at least {least}, got {value}")
        for option in self.POSITIVE:
            value = getattr(self, option)
            if not (value > 0 and (value < math.inf or option in _ORDERS)):
                raise InputError(f"{self.name}: expected a positive {option}, got {value}")

    def check_data(self) -> None:
        """Refuses data that is not there or not enough, for which no model is needed.

        Raises:
            InputError: one sentence. The default loads every field that is data.
        """
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """The class and its options, ready for JSON: equal configs measure the same thing."""
        return describe(self)

    def config_hash(self) -> str:
        """Sixteen hex digits of the config: a change of any option, also of the data's, changes it."""
        return hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode()).hexdigest()[:16]

    def data_hash(self) -> str | None:
        """Hash of the data measured on, over every field that has a `content_hash()`; None where there is none."""
        parts = [
            value.content_hash() for value in vars(self).values() if callable(getattr(value, "content_hash", None))
        ]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16] if parts else None

    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer that made the data, over every field that has a `tokenizer_hash()`; None where there
        is none. Of several tokenizers the hashes stand side by side.
        """
        hashes = [
            value.tokenizer_hash() for value in vars(self).values() if callable(getattr(value, "tokenizer_hash", None))
        ]
        return ", ".join(dict.fromkeys(filter(None, hashes))) or None


class DividedAnalysis(Analysis):
    """An analysis whose work falls into parts that know nothing of each other: prompts, or batches of them.

    Several processes can share one such analysis. What the parts gave is put together in their order, so that the
    numbers do not depend on who measured which.
    """

    @abstractmethod
    def parts(self, model: LayeredModel) -> Iterable[Any]:
        """The parts in order, each made when its turn comes; the options have been checked."""

    @abstractmethod
    def of_part(self, model: LayeredModel, part: Any) -> Any:
        """What one part gives: plain values and tensors on the CPU, to be sent to another process."""

    @abstractmethod
    def combine(self, model: LayeredModel, results: list[Any]) -> Iterable[Record]:
        """Yields the records of all parts, of which there is at least one, in their order."""

    def run(self, model: LayeredModel) -> Iterable[Record]:
        share = self.share(model, 0, 1)
        yield from self.join(model, [share])

    def prepared(self, model: LayeredModel) -> LayeredModel:
        """The model as it is measured."""
        return at_least_float32(model)

    def share(self, model: LayeredModel, rank: int, world_size: int) -> dict[int, Any]:
        """What every `world_size`-th part gives, from number `rank` on, by its number."""
        self.check_options(model)
        model = self.prepared(model)
        mine = itertools.islice(enumerate(self.parts(model)), rank, None, world_size)
        return {number: self.of_part(model, part) for number, part in mine}

    def join(self, model: LayeredModel, shares: Iterable[dict[int, Any]]) -> Iterable[Record]:
        """Yields the records of all shares together.

        Raises:
            InputError: data without prompts.
            ValueError: nothing is defined.
        """
        results = {number: result for share in shares for number, result in share.items()}
        if not results:
            raise InputError(f"{self.name}: the data holds no prompts")
        yield from with_a_value(self.name, self.combine(self.prepared(model), [results[n] for n in sorted(results)]))


@dataclass(frozen=True, eq=False)
class Visit:
    """One block on one batch: what an analysis that goes layer by layer is shown."""

    layer: int  # of the block, 1..L
    batch: int
    block: Callable[[Tensor], Tensor]  # the batch's other arguments are in it
    before: Tensor  # (batch, tokens, dim): layer - 1
    after: Tensor
    mask: Tensor  # (batch, tokens), False on padding


class LayerwiseRun(ABC):
    """One measurement under way, shown every block on every batch: `start` a batch, then `visit` its blocks in order.

    Which comes first, the next block or the next batch, makes no difference. `state` is all that was found so far,
    plain tensors by name: a run that is given the state of another, which then lies on the CPU, goes on from there.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        """Takes layer 0 (batch, tokens, dim) of a batch."""

    @abstractmethod
    def visit(self, visit: Visit) -> None:
        """Takes one block on one batch."""

    def revisit(self, visit: Visit) -> None:
        """Takes it again, once every block has been visited: only for analyses of two passes."""
        raise NotImplementedError(f"{type(self).__name__} needs one pass")

    def release(self, batch: int) -> None:  # noqa: B027
        """Lets go of what only later visits of a batch would need; there are none."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yields what all visits together gave."""


class StatesRun(LayerwiseRun):
    """A run that needs each layer's states alone: `values` turns them into a row for each prompt of the batch.

    The state `NAME/BATCH` holds the rows (layers so far, batch, ...) of one name.
    """

    def __init__(self, model: LayeredModel, states: States) -> None:
        super().__init__()
        self.model = model
        self.states: States = states

    @abstractmethod
    def values(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Rows (batch, ...) by name, of one layer's states (batch, tokens, dim)."""

    def start(self, batch: int, hidden: Tensor, mask: Tensor) -> None:
        self._append(batch, 0, hidden, mask)

    def visit(self, visit: Visit) -> None:
        self._append(visit.batch, visit.layer, visit.after, visit.mask)

    def joined(self) -> dict[str, Tensor]:
        """The rows (layers + 1, prompts, ...) of all batches, by name."""
        batches: dict[str, list[Tensor]] = {}
        for name, rows in self.state.items():
            batches.setdefault(name.rpartition("/")[0], []).append(rows)
        return {name: torch.cat(rows, dim=1) for name, rows in batches.items()}

    def _append(self, batch: int, layer: int, hidden: Tensor, mask: Tensor) -> None:
        for name, values in self.values(in_convention(self.model, self.states, layer, hidden), mask).items():
            key, row = f"{name}/{batch}", values[None].cpu()
            self.state[key] = torch.cat([self.state[key], row]) if key in self.state else row


class LayerwiseAnalysis(DividedAnalysis):
    """An analysis that looks at one block at a time, so that a model need never be in memory as a whole.

    Subclasses have the field `batches` and say how a run begins; `run` shows it a model that is at hand, and
    `lit_layers.analyses.streamed` one that is read block by block: the numbers come from the same code.
    """

    batches: Batches
    passes: ClassVar[int] = 1  # 2: every block is shown again when all have been seen

    @abstractmethod
    def begin(self, model: LayeredModel, store: MutableMapping[str, Tensor] | None = None) -> LayerwiseRun:
        """A measurement that has seen nothing yet.

        `store` takes what is large and needed again in the second pass. None: all blocks of a batch come one after the
        other, and what is costly to compute twice is kept in memory meanwhile.
        """

    def prompts(self, model: LayeredModel) -> Iterable[Batch]:
        """The batches as they are measured."""
        return self.batches

    def parts(self, model: LayeredModel) -> Iterator[tuple[int, Batch]]:
        return enumerate(self.prompts(model))

    def of_part(self, model: LayeredModel, part: tuple[int, Batch]) -> dict[str, Tensor]:
        number, batch = part
        run, trajectory = self.begin(model), model.trajectory(batch)
        hidden = trajectory.hidden
        visits = [
            Visit(layer, number, trajectory.block(layer), hidden[layer - 1], hidden[layer], trajectory.mask)
            for layer in range(1, model.num_layers + 1)
        ]
        run.start(number, hidden[0], trajectory.mask)
        for visit in visits:
            run.visit(visit)
        if self.passes == 2:
            for visit in visits:
                run.revisit(visit)
        run.release(number)
        return {name: tensor.cpu() for name, tensor in run.state.items()}

    def combine(self, model: LayeredModel, results: list[dict[str, Tensor]]) -> Iterable[Record]:
        run = self.begin(model)
        for state in results:
            run.state.update(state)
        yield from run.records()


def _choices(kind: Any) -> list[Any]:
    """What a type's `Literal` names; None first where the type allows it; none where it has no `Literal`."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    choices = list(dict.fromkeys(choice for part in get_args(kind) for choice in _choices(part)))
    return [None, *choices] if choices and type(None) in get_args(kind) else choices


def describe(value: Any) -> Any:
    """`value` as plain JSON data: dataclasses and other objects become their class path and public fields."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    else:
        fields = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return {"class_path": public_path(type(value)), "init_args": describe(fields)}


def final_norm(model: LayeredModel) -> torch.nn.Module | None:
    """The norm after the last block; None where there is none (BERT)."""
    return None if model.family.norm is None else trunk_of(model.model).get_submodule(model.family.norm)


def in_convention(model: LayeredModel, states: States, layer: int, hidden: Tensor) -> Tensor:
    """The hidden states of a layer as the convention has them."""
    norm = final_norm(model)
    if states == "resid" or norm is None or (states == "hf" and layer < model.num_layers):
        return hidden
    with torch.no_grad():
        return norm(hidden)


def at_least_float32(model: LayeredModel) -> LayeredModel:
    """The model, or a float32 copy of one in half precision, whose rounding is as large as a late block's step.

    The copy is what loading the saved weights gives: what no checkpoint holds, such as rotary frequencies, is computed
    anew, as a cast has rounded it.
    """
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    fresh = copy.deepcopy(model.model).float()
    for module in fresh.modules() if hasattr(fresh, "_init_weights") else ():
        if module._non_persistent_buffers_set:
            kept = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
            with torch.no_grad():
                fresh._init_weights(module)  # how from_pretrained gives buffers their values; and weights new ones
                for parameter, value in kept:
                    parameter.copy_(value)
    return LayeredModel(fresh)


# Of 0..1: far above the rounding of six printed digits, far below what two sets of photographs differ by.
_NEGLIGIBLE = 1e-4


def refuse_unlike_training(name: str, images: EvalImages, model: LayeredModel) -> None:
    """Refuses images in another normalisation or size than the model's: its numbers would be wrong without a word.

    Raises:
        InputError: naming both; a model whose normalisation is unknown is taken as it is.
    """
    if not model.family.sees_images:
        return
    trained, given = pixel_statistics(model.model), images.mean_and_std()
    if trained is not None and len(trained[0]) != len(given[0]):
        raise InputError(
            f"{name}: the model takes images of {len(trained[0])} channels, {images.source} has {len(given[0])}"
        )
    if trained is not None and not all(
        math.isclose(a, b, abs_tol=_NEGLIGIBLE) for a, b in zip(sum(trained, ()), sum(given, ()), strict=True)
    ):
        raise InputError(
            f"{name}: normalisation {images.normalisation} of {images.source} gives mean {_digits(given[0])}, std "
            f"{_digits(given[1])}, and the model was trained with mean {_digits(trained[0])}, std "
            f"{_digits(trained[1])}: use the normalisation of its training data"
        )
    size, expected = images.images()[0].shape[-1], model.image_size
    if expected is not None and size != expected:
        raise InputError(
            f"{name}: expected an image_size of {expected}, which the model takes, got images of {size} px"
        )


def _digits(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"


def predicts_next_token(model: LayeredModel) -> bool:
    """Whether the model's own head predicts the next token, so that no state sees a later one."""
    return model.vocab_size is not None and model.model.can_generate()


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


def evenly_spread(first: int, last: int, count: int) -> list[int]:
    """At most `count` whole numbers from `first` to `last`, both among them (the last alone for one)."""
    if count == 1 or first == last:
        return [last]
    count = min(count, last - first + 1)
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]


Options = TypeVar("Options", bound=Any)  # an analysis, a dataclass with the fields `name` and `preset`


def with_preset(analysis: Options, presets: Mapping[str, Mapping[str, Any]]) -> Options:
    """The analysis with the options of its preset in place; itself where it has none.

    Raises:
        InputError: an option given that the preset sets otherwise.
    """
    name, preset = analysis.name, analysis.preset
    if preset is None:
        return analysis
    defaults = {field.name: field.default for field in dataclasses.fields(analysis)}
    for option, value in presets[preset].items():
        given = getattr(analysis, option)
        if given not in (defaults[option], value):
            raise InputError(
                f"{name}: preset {preset} sets {option} to {value}, got {option} {given} as well: leave one of them out"
            )
    return dataclasses.replace(analysis, **presets[preset])
