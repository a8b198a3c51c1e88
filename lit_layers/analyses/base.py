"""What an analysis is: data in, records out; its options, and the hidden states that it measures."""

import dataclasses
import functools
import hashlib
import itertools
import os
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from lit_layers.data.batches import Batches, EvalText, GivenBatches, to_batches
from lit_layers.data.images import EvalImages
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.identity import hash_of
from lit_layers.models.pixels import refuse_unlike_training
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

Dtype = Literal["float32", "bfloat16"]
NUM_CHECKED = 16  # prompts, texts or rows that are measured in float32, too, where the blocks multiply in bfloat16
Key = tuple[str | float | None, ...]  # of values: a metric, say, and what else tells them apart


Precision = Literal["float32", "own", "bfloat16"]
Values = dict[Any, Tensor]  # (..., prompts) on the CPU, by any key: prompts are the last dimension


class Rows(NamedTuple):
    """The rows that an analysis reads. Analyses that read the same batches share one pass.

    Args:
        batches: what is read, in an order that stays.
        limit: the first so many rows; None: all.
        at_once: the most rows that one `update` sees; None: as many as a pass has at a time.
        precision: what the model runs in: float32 or wider, its own, or with products within blocks in bfloat16.
    """

    batches: Iterable[Batch]
    limit: int | None = None
    at_once: int | None = None
    precision: Precision = "float32"


class Jobs(NamedTuple):
    """Independent jobs, such as one per layer, whose results can be sent to another process.

    Args:
        parts: the jobs; the values of one that yields are collected in a list.
        records: makes the records from their results, in the order of the jobs; by default they are lists of records.
    """

    calls: Sequence[Callable[[], Any]]
    records: Callable[[list[Any]], Iterable[Record]] = itertools.chain.from_iterable


def joined(updates: Sequence[Values]) -> Values:
    """Join the values of several microbatches along the prompts; a microbatch may lack some keys."""
    keys = dict.fromkeys(key for values in updates for key in values)
    return {key: torch.cat([values[key] for values in updates if key in values], dim=-1) for key in keys}


class Analysis(ABC):
    """One way to measure every layer of a model, in two steps.

    `update` runs once per microbatch, on the rank that has it; `compute` once per checkpoint, on the values of all
    prompts. Both see the options of the preset in place. Neither knows of ranks, files or other analyses.

    Subclasses are dataclasses: their fields are the options of a recipe and, with `name`, all that decides the
    numbers. Constructors are cheap; data loads on first use. `name` is unique within a run, e.g. `probe/ag_news`.
    """

    name: str
    PRECISION: ClassVar[Precision] = "float32"  # of the model that `compute` and `jobs` see
    SEES: ClassVar[Literal["text", "images"] | None] = None  # models of these alone
    NEXT_TOKEN: ClassVar[bool] = False  # models that predict the next token alone
    LEAST: ClassVar[Mapping[str, float]] = {}  # the lowest value of some options
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the options that each value of `preset` sets
    UNMEASURED: ClassVar[Sequence[str]] = ()  # options that decide no number: no part of the config

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the rows to read, by the names of the arguments of `compute`; by default the field `batches`."""
        batches = getattr(self, "batches", None)
        return {} if batches is None else {"batches": Rows(batches)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the values of one microbatch: tensors whose last dimension is the prompts, or tokens in their order.

        Args:
            seen: `hidden` (layers + 1, prompts, tokens, dim), `mask` (prompts, tokens) and the blocks as functions;
                a copy, to which it may write.
            batch: the columns of these rows as they were given.
        """
        raise NotImplementedError(f"{self.name} reads rows and has no update")

    def compute(self, model: LayeredModel, **values: Values) -> Iterable[Record]:
        """Yield the records, from the values of all prompts in the order of the data. `jobs` may take its place."""
        raise NotImplementedError(f"{self.name} has neither compute nor jobs")

    def jobs(self, model: LayeredModel, **values: Values) -> Jobs:
        """Divide `compute` into jobs, which ranks share; by default one."""
        return Jobs([functools.partial(self.compute, model, **values)])

    def adopt_batches_(self) -> None:
        """Turn data loaders, data sets and lists in the fields of type `Batches` into `Batches`.

        Raises:
            InputError: something else there.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            if field.type in (Batches, "Batches"):
                try:
                    setattr(self, field.name, to_batches(getattr(self, field.name)))
                except InputError as error:
                    raise InputError(f"{self.name}: {str(error).replace('batches', field.name, 1)}") from error

    def check(self, model: LayeredModel) -> None:
        """Refuse, before the first step, options that do not fit the model and missing data.

        Raises:
            InputError: one sentence naming the option. The default loads every field that is data, and refuses images
                that are not as the model saw them in training and texts that are longer than it reads.
        """
        self.check_options(model)
        needed = "pixel_values" if model.family.sees_images else "input_ids"
        for value in vars(self).values():
            for batch in value if isinstance(value, GivenBatches) else ():
                if needed not in batch:
                    raise InputError(f"{self.name}: expected batches with {needed}, got one with {', '.join(batch)}")
                if needed == "input_ids":
                    model.check_tokens(batch[needed])
            if isinstance(value, EvalText) and value.num_tokens > (longest := model.max_tokens or value.num_tokens):
                raise InputError(
                    f"{self.name}: num_tokens: {type(model.model).__name__} takes at most {longest} tokens, got "
                    f"{value.num_tokens}: ask for {longest} or fewer"
                )
            if isinstance(value, EvalImages):
                refuse_unlike_training(self.name, value, model)
        self.check_data()

    def check_options(self, model: LayeredModel) -> None:
        """Refuse options that do not fit, whatever the data; a subclass adds checks that depend on the model.

        Raises:
            InputError: one sentence naming the option. The default is `check_fields`, `SEES`, `NEXT_TOKEN` and
                `resolved`.
        """
        self.check_fields()
        sees, kind = "images" if model.family.sees_images else "text", type(model.model).__name__
        if self.SEES not in (None, sees):
            raise InputError(f"{self.name}: expected a model of {self.SEES}, got {kind}")
        if self.NEXT_TOKEN and not model.predicts_next_token:
            raise InputError(f"{self.name}: expected a model that predicts the next token, got {kind}")
        self.resolved(model)

    def resolved(self, model: LayeredModel) -> Self:
        """Return the analysis with the options of its preset in place; itself without a preset.

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
        resolved = dataclasses.replace(fields, **options)
        vars(resolved).update({name: value for name, value in vars(self).items() if name not in defaults})  # is loaded
        return resolved

    def preset_options(self, preset: str, model: LayeredModel) -> Mapping[str, Any]:
        """Return the options that a preset sets for a model."""
        return self.PRESETS[preset]

    def tags_of(self, *options: str) -> dict[str, str | int | float]:
        """Return as tags those of the named options that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(cast("Any", self))}
        tags: dict[str, str | int | float] = {}
        for option in options:
            value = getattr(self, option)
            if value != defaults[option]:
                value = " ".join(value) if isinstance(value, tuple | list) else value
                tags[option] = int(value) if isinstance(value, bool) else value
        return tags

    def check_fields(self) -> None:
        """Refuse options outside their `Literal` or below `LEAST`.

        Raises:
            InputError: naming the option and what it may be.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            value, choices = getattr(self, field.name), _choices(field.type)
            is_list = isinstance(value, list | tuple) or get_origin(field.type) in (list, tuple)
            for choice in value if is_list else (value,):
                if choices and isinstance(choice, str | None) and choice not in choices:
                    raise InputError(f"{self.name}: expected {field.name} to be one of {choices}, got {choice!r}")
        for option, least in self.LEAST.items():
            if (value := getattr(self, option)) is not None and not value >= least:  # NaN is refused
                raise InputError(f"{self.name}: expected {option} of at least {least}, got {value}")

    def check_data(self) -> None:
        """Refuse missing or insufficient data, as far as that needs no model; the default loads every field."""
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """Return the class and its options, ready for JSON: equal configs measure the same thing."""
        config = describe(self)
        options = {name: value for name, value in config["init_args"].items() if name not in self.UNMEASURED}
        return {**config, "init_args": options}

    def config_hash(self) -> str:
        """Return sixteen hex digits of the config: a change of any option, also of the data's, changes it.

        A tokenizer counts by its content, wherever its files are.
        """
        return hash_of(_hash_tokenizers(self.config()))

    def data_hash(self) -> str | None:
        """Return a hash of the measured data, over every field with a `content_hash()`; None if there is none."""
        parts = [value.content_hash() for value in vars(self).values() if hasattr(value, "content_hash")]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16] if parts else None

    def tokenizer_hash(self) -> str | None:
        """Return a hash of the data's tokenizer, over every field with a `tokenizer_hash()`; None if there is none.

        Hashes of several tokenizers are joined by commas.
        """
        hashes = [
            value.tokenizer_hash() for value in vars(self).values() if callable(getattr(value, "tokenizer_hash", None))
        ]
        return ", ".join(dict.fromkeys(filter(None, hashes))) or None


def stack_layers(layers: Sequence[Mapping[Key, Tensor]]) -> Values:
    """Return the values (layers + 1, ..., prompts) by key from those of each layer."""
    return {key: torch.stack([values[key].cpu() for values in layers]) for key in layers[0]}


def to_bfloat16(analysis: Analysis) -> Analysis:
    """Return the analysis with its option `dtype` set to bfloat16.

    Raises:
        InputError: it has no such option: it runs in float32 or wider.
    """
    if not hasattr(analysis, "dtype"):
        raise InputError(
            f"dtype: {analysis.name} is measured in float32 or wider; bfloat16 is for Lens, Interventions and tasks"
        )
    return dataclasses.replace(cast("Any", analysis), dtype="bfloat16")


def _choices(kind: Any) -> list[Any]:
    """Return the values that a type's `Literal` allows, None first if the type allows it; empty without a `Literal`."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    choices = list(dict.fromkeys(choice for arg in get_args(kind) for choice in _choices(arg)))
    return [None, *choices] if choices and type(None) in get_args(kind) else choices


def _hash_tokenizers(config: Any) -> Any:
    """Return a config that has hashes in place of the paths of tokenizers."""
    if isinstance(config, list):
        return [_hash_tokenizers(each) for each in config]
    if not isinstance(config, dict):
        return config
    made = {name: _hash_tokenizers(value) for name, value in config.items()}
    if isinstance(path := config.get("tokenizer"), str) and os.path.exists(path):
        made["tokenizer"] = _tokenizer_hash(os.path.abspath(path))
    return made


@functools.cache
def _tokenizer_hash(path: str) -> str:
    return tokenizer_hash(load_tokenizer(path).tokenizer)


def describe(value: Any, *, in_data: bool = False) -> Any:
    """Return `value` as plain JSON data.

    An object is its class path and public fields, an array outside data is its hash.
    """
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
