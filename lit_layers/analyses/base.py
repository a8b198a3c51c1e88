"""What an analysis is: data in, records out; its options, and the hidden states that it measures."""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from lit_layers.analyses.states import States, at_least_float32, first_rows, in_convention
from lit_layers.analyses.statistics import with_a_value
from lit_layers.data.batches import Batches, EvalText
from lit_layers.data.given_batches import GivenBatches, as_batches
from lit_layers.data.images import EvalImages
from lit_layers.data.prompt_texts import GivenTexts, Texts
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.identity import hash_of
from lit_layers.models.bfloat16 import BFloat16View
from lit_layers.models.pixels import refuse_unlike_training
from lit_layers.models.shared_pass import SharedPass, pieces
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

ALL = range(2**62)  # numbers of parts
_ORDERS = ("alpha", "p")  # of an entropy, of a norm: these may be infinite
Dtype = Literal["float32", "bfloat16"]
NUM_CHECKED = 16  # prompts, texts or rows that are measured in float32, too, where the blocks multiply in bfloat16
Key = tuple[str | float | None, ...]  # of values: a metric, say, and what else tells them apart
Name = TypeVar("Name", Key, str)


class Analysis(ABC):
    """One way to measure every layer of a model.

    Subclasses are dataclasses: their fields are the options of a recipe and, with `name`, all that decides the
    numbers. Constructors are cheap; data loads on first use. `name` is unique within a run, e.g. `probe/ag_news`.
    """

    name: str
    SEES: ClassVar[Literal["text", "images"] | None] = None  # models of these alone
    NEXT_TOKEN: ClassVar[bool] = False  # models that predict the next token alone
    LEAST: ClassVar[Mapping[str, float]] = {}  # the lowest value of options that are numbers or lists of them
    POSITIVE: ClassVar[Sequence[str]] = ()  # options that are above 0
    LISTS: ClassVar[Sequence[str]] = ()  # options that are different values, at least one
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the options that each value of `preset` sets
    UNMEASURED: ClassVar[Sequence[str]] = ()  # options that decide no number: no part of the config

    @abstractmethod
    def run(self, model: LayeredModel) -> Iterable[Record]:
        """Yields the records of one checkpoint. May draw random numbers and switch modes: the driver restores both."""

    def announced(self) -> Iterable[Batch]:
        """The batches that `run` will ask a model in float32 or wider for, where they are known beforehand: what others
        look at, too, is then kept for it. Of analyses in stages those that later stages ask for; parts have `reads`.
        """
        return ()

    def first_share(self, rows: int) -> "tuple[Analysis, float] | None":
        """Return the analysis on the first rows of its data and the share of the data that they are, for a plan.

        The default cuts batches, texts and `num_prompts`; an analysis without any is returned whole, with the share 1.
        None: a share would take nearly as long as the whole.
        """
        self.adopt_batches_()
        most = getattr(self, "num_prompts", sys.maxsize)
        totals: list[int] = []
        changes: dict[str, Any] = {"num_prompts": min(rows, most)} if most < sys.maxsize else {}
        for name, value in vars(self).items():
            if isinstance(value, Texts):
                totals.append(min(most, len(value.texts())))
                changes[name] = GivenTexts(value.texts()[:rows])
            elif isinstance(value, Batches):
                totals.append(min(most, sum(len(next(iter(batch.values()))) for batch in value)))
                changes[name] = GivenBatches([*first_rows(value, rows)], tokenizer_hash=value.tokenizer_hash())
        totals = totals or [most if most < sys.maxsize else 1]
        share = sum(min(rows, total) for total in totals) / sum(totals)
        return (self, 1.0) if share == 1 else (dataclasses.replace(cast("Any", self), **changes), share)

    def adopt_batches_(self) -> None:
        """Makes `Batches` of data loaders, data sets and lists among the fields that are batches.

        Raises:
            InputError: something else there.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            if field.type in (Batches, "Batches"):
                try:
                    setattr(self, field.name, as_batches(getattr(self, field.name)))
                except InputError as error:
                    raise InputError(f"{self.name}: {str(error).replace('batches', field.name, 1)}") from error

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
            if isinstance(value, GivenBatches):
                self._check_given(value, model)
            if isinstance(value, EvalImages):
                refuse_unlike_training(self.name, value, model)
        self.check_data()

    def _check_given(self, batches: GivenBatches, model: LayeredModel) -> None:
        needed = "pixel_values" if model.family.sees_images else "input_ids"
        for number, batch in enumerate(batches):
            if needed not in batch:
                name = type(model.model).__name__
                raise InputError(f"{self.name}: batches: {name} needs {needed}, batch {number} has {', '.join(batch)}")
            if needed == "input_ids":
                try:
                    model.check_tokens(batch[needed])
                except InputError as error:
                    raise InputError(f"{self.name}: batches: {error}") from error

    def check_options(self, model: LayeredModel) -> None:
        """Refuses options that do not fit, whatever the data; a subclass adds what depends on the model.

        Raises:
            InputError: one sentence naming the option. The default is `check_fields`, `SEES`, `NEXT_TOKEN` and
                `resolved`.
        """
        self.check_fields()
        kind = "images" if model.family.sees_images else "text"
        if self.SEES not in (None, kind):
            raise InputError(f"{self.name}: expected a model of {self.SEES}, got {type(model.model).__name__}")
        if self.NEXT_TOKEN and not model.predicts_next_token:
            raise InputError(
                f"{self.name}: expected a model that predicts the next token, got {type(model.model).__name__}"
            )
        self.resolved(model)

    def resolved(self, model: LayeredModel) -> Self:
        """The analysis with the options of its preset in place; itself where it has none.

        Raises:
            InputError: an option given that the preset sets otherwise.
        """
        fields: Any = self
        preset = getattr(fields, "preset", None)
        if preset is None:
            return self
        defaults = {field.name: field.default for field in dataclasses.fields(fields)}
        options = self.preset_options(preset, model)
        for option, value in options.items():
            if (given := getattr(self, option)) not in (defaults[option], value):
                raise InputError(
                    f"{self.name}: preset {preset} sets {option} to {value}, got {option} {given} as well: leave one "
                    "of them out"
                )
        return dataclasses.replace(fields, **options)

    def preset_options(self, preset: str, model: LayeredModel) -> Mapping[str, Any]:
        """What a preset sets for a model."""
        return self.PRESETS[preset]

    def tags_of(self, *options: str) -> dict[str, str | int | float]:
        """What a result of other than the default options must say of itself: those of some names, as tags."""
        defaults = {field.name: field.default for field in dataclasses.fields(cast("Any", self))}
        tags: dict[str, str | int | float] = {}
        for option in options:
            value = getattr(self, option)
            if value != defaults[option]:
                value = " ".join(value) if isinstance(value, tuple | list) else value
                tags[option] = int(value) if isinstance(value, bool) else value
        return tags

    def check_fields(self) -> None:
        """Refuses options that are none of those that their `Literal` names, or not as the class says they have to be.

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
        for option in self.LISTS:
            if (values := getattr(self, option)) is None:
                continue
            if not len(values):
                raise InputError(f"{self.name}: expected at least one of {option}, got none")
            if len(set(values)) < len(values):
                raise InputError(f"{self.name}: expected {option} to be different values, got {list(values)}")
        for option, least in self.LEAST.items():
            value = getattr(self, option)
            for number in value if isinstance(value, list | tuple) else (value,):
                if number is not None and not (least <= number and (number < math.inf or option in _ORDERS)):
                    raise InputError(f"{self.name}: expected {option} of at least {least}, got {number}")
        for option in self.POSITIVE:
            value = getattr(self, option)
            if not (value > 0 and (value < math.inf or option in _ORDERS)):
                raise InputError(f"{self.name}: expected a positive {option}, got {value}")
        num_halves = getattr(self, "num_halves", 0)
        if num_halves < 0 or num_halves == 1:  # one has no spread
            raise InputError(f"{self.name}: expected num_halves to be 0 or at least 2, got {num_halves}")

    def check_data(self) -> None:
        """Refuses data that is not there or not enough, for which no model is needed.

        Raises:
            InputError: one sentence. The default loads every field that is data.
        """
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """The class and its options, ready for JSON: equal configs measure the same thing."""
        config = describe(self)
        options = {name: value for name, value in config["init_args"].items() if name not in self.UNMEASURED}
        return {**config, "init_args": options}

    def config_hash(self) -> str:
        """Return sixteen hex digits of the config: a change of any option, also of the data's, changes it.

        A tokenizer counts by its content, wherever its files are.
        """
        return hash_of(_with_tokenizer_hashes(self.config()))

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

    batches: Batches

    def parts(self, model: LayeredModel) -> Iterable[Any]:
        """The parts in order, each made when its turn comes; the options have been checked.

        Called twice, to say what will be read and to measure it: both times the same. Between two parts other analyses
        have their turn, so that nothing that is set up for the model here holds inside `of_part`.
        """
        return pieces(model, self.batches)

    def reads(self, model: LayeredModel, part: Any) -> Sequence[Batch]:
        """The batches whose states `of_part` asks the model for, so that they can be shared; none: nobody knows."""
        return [part] if isinstance(part, Mapping) else []

    @abstractmethod
    def of_part(self, model: LayeredModel, part: Any) -> Any:
        """What one part gives: plain values and tensors on the CPU, to be sent to another process."""

    @abstractmethod
    def combine(self, model: LayeredModel, results: list[Any]) -> Iterable[Record]:
        """Yields the records of all parts, of which there is at least one, in their order."""

    def run(self, model: LayeredModel) -> Iterable[Record]:
        yield from self.join(model, [self.of_parts(model)])

    def prepared(self, model: LayeredModel) -> LayeredModel:
        """The model as it is measured."""
        return at_least_float32(model)

    def num_parts(self, model: LayeredModel) -> int:
        """Return the number of parts; options are checked."""
        self.check_options(model)
        return sum(1 for _ in self.parts(self.prepared(SharedPass.of(model))))

    def of_parts(self, model: LayeredModel, numbers: Container[int] = ALL) -> dict[int, Any]:
        """What the parts of these numbers give, by their number."""
        results: dict[int, Any] = {}
        view = SharedPass.of(model)
        view.turn(self.name)  # so that what it announces is let go once it has had it
        for _ in self.turns(view, numbers, results):
            pass
        return results

    def turns(self, model: SharedPass, numbers: Container[int], results: dict[int, Any]) -> Iterator[float]:
        """`of_parts` in turns with others that look at the same model, all of which announce first what they will read.

        Before each part yields its place in the pass, and then adds what it gives.
        """
        self.check_options(model)
        view = self.prepared(model)
        announced = view if isinstance(view, SharedPass) else None
        if announced is not None:
            batches = (b for n, part in enumerate(self.parts(view)) if n in numbers for b in self.reads(view, part))
            announced.announce(self.name, itertools.chain(batches, self.announced()))
        for number, part in enumerate(self.parts(view)):
            if number not in numbers:
                continue
            yield math.inf if announced is None else announced.place(self.reads(view, part))
            results[number] = self.of_part(view, part)

    def join(self, model: LayeredModel, shares: Iterable[dict[int, Any]]) -> Iterable[Record]:
        """Yields the records of all shares together.

        Raises:
            InputError: data without prompts.
            ValueError: nothing is defined.
        """
        yield from with_a_value(self.name, self.combine(self.prepared(model), self.in_order(shares)))

    def in_order(self, shares: Iterable[dict[int, Any]]) -> list[Any]:
        """The results of all parts, which the shares give up: they may be large.

        Raises:
            InputError: data without prompts.
        """
        results: dict[int, Any] = {}
        for share in shares:
            results |= share
            share.clear()
        if not results:
            raise InputError(f"{self.name}: the data holds no prompts")
        return [results.pop(number) for number in sorted(results)]


class StagedAnalysis(DividedAnalysis):
    """A divided analysis whose parts are not the end: what follows on all of them together is divided, too."""

    @abstractmethod
    def then(self, model: LayeredModel, results: list[Any]) -> DividedAnalysis:
        """What follows on the results of all parts, in their order, whose list may be emptied; of the same name.

        Each of several processes calls it with the same results, and has to make the same of them.
        """

    def combine(self, model: LayeredModel, results: list[Any]) -> Iterable[Record]:
        return self.then(model, results).run(model)


class PromptAnalysis(DividedAnalysis):
    """An analysis of the first `num_prompts` prompts, whose parts are batches with the row of one prompt each."""

    num_prompts: int

    @abstractmethod
    def of_prompt(self, model: LayeredModel, trajectory: Trajectory) -> Any:
        """What one prompt gives, as `of_part`."""

    def parts(self, model: LayeredModel) -> Iterator[tuple[Batch, int]]:
        for batch in pieces(model, first_rows(self.batches, self.num_prompts)):
            yield from ((batch, row) for row in range(len(next(iter(batch.values())))))

    def reads(self, model: LayeredModel, part: tuple[Batch, int]) -> Sequence[Batch]:
        return [part[0]]

    def of_part(self, model: LayeredModel, part: tuple[Batch, int]) -> Any:
        batch, row = part
        return self.of_prompt(model, model.trajectory(batch).prompt(row))


def joined(results: Sequence[Mapping[Name, Tensor]], dim: int = 1) -> dict[Name, Tensor]:
    """Join the values of all batches by their key, prompts along `dim`; a batch may lack some keys."""
    keys = dict.fromkeys(key for result in results for key in result)
    return {key: torch.cat([result[key] for result in results if key in result], dim) for key in keys}


class StatesAnalysis(DividedAnalysis):
    """An analysis that computes values of each prompt at every layer, then records of all prompts.

    Subclasses have the field `states` beside `batches`.
    """

    states: States

    @abstractmethod
    def of_layer(self, hidden: Tensor, mask: Tensor) -> dict[Key, Tensor]:
        """Values (batch, ...) by key, of one layer's states (batch, tokens, dim)."""

    @abstractmethod
    def of_prompts(self, values: dict[Key, Tensor]) -> Iterable[Record]:
        """Yield the records of the values (layers + 1, prompts, ...) of all prompts."""

    def of_part(self, model: LayeredModel, part: Batch) -> dict[Key, Tensor]:
        analysis, trajectory = self.resolved(model), model.trajectory(part)
        rows: dict[Key, list[Tensor]] = {}
        for layer, hidden in enumerate(trajectory.hidden):
            states = in_convention(model, analysis.states, layer, hidden)
            for key, row in analysis.of_layer(states, trajectory.mask).items():
                rows.setdefault(key, []).append(row.cpu())
        return {key: torch.stack(of_layers) for key, of_layers in rows.items()}

    def combine(self, model: LayeredModel, results: list[dict[Key, Tensor]]) -> Iterable[Record]:
        return self.resolved(model).of_prompts(joined(results))


@dataclasses.dataclass(kw_only=True)
class RoundedAnalysis(Analysis):
    """An analysis whose blocks may multiply in bfloat16: its numbers are then checked in float32 on a sample.

    All its records are tagged `dtype` then, and `bf16_difference` with `bf16_largest_difference` stand beside them.

    Args:
        dtype: bfloat16: products of matrices within blocks are (`BFloat16View`), of a copy of the weights.
    """

    dtype: Dtype = "float32"

    def precision_of(self, model: LayeredModel) -> str:
        """What the blocks of a model compute in."""
        return model.precision if self.dtype == "float32" else self.dtype

    def in_bfloat16(self, model: LayeredModel) -> BFloat16View:
        """The view to run, with the one to check it by."""
        return BFloat16View(at_least_float32(model))


def in_bfloat16(analysis: Analysis) -> Analysis:
    """The analysis with its blocks in bfloat16.

    Raises:
        InputError: it has to run in float32 or wider.
    """
    if not isinstance(analysis, RoundedAnalysis):
        raise InputError(
            f"dtype: {analysis.name} ({type(analysis).__name__}) is measured in float32 or wider alone; bfloat16 is "
            "for Lens, Interventions and scores of tasks: leave one of them out"
        )
    return dataclasses.replace(analysis, dtype="bfloat16")


def _choices(kind: Any) -> list[Any]:
    """What a type's `Literal` names; None first where the type allows it; none where it has no `Literal`."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    choices = list(dict.fromkeys(choice for part in get_args(kind) for choice in _choices(part)))
    return [None, *choices] if choices and type(None) in get_args(kind) else choices


def _with_tokenizer_hashes(config: Any) -> Any:
    """Return a config that has hashes in place of the paths of tokenizers."""
    if isinstance(config, list):
        return [_with_tokenizer_hashes(each) for each in config]
    if not isinstance(config, dict):
        return config
    made = {name: _with_tokenizer_hashes(value) for name, value in config.items()}
    if isinstance(place := config.get("tokenizer"), str) and os.path.exists(place):
        made["tokenizer"] = _tokenizer_hash(os.path.abspath(place))
    return made


@functools.cache
def _tokenizer_hash(place: str) -> str:
    return tokenizer_hash(load_tokenizer(place).tokenizer)


def describe(value: Any, *, in_data: bool = False) -> Any:
    """`value` as plain JSON data: objects become class path and public fields, arrays that are not data a hash."""
    nested = functools.partial(describe, in_data=in_data or hasattr(value, "content_hash"))
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): nested(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [nested(item) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, np.ndarray | Tensor) and not in_data:
        fields = {"shape": value.shape, "dtype": str(value.dtype), "values": hash_of(str(value.tolist()))}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    else:
        fields = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    kind = type(value)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": nested(fields)}
