"""The base class of analyses: its options, the rows it reads and the records it makes."""

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
from lit_layers.models.contributions import PARTS, check_contributions
from lit_layers.models.pixels import refuse_unlike_training
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

Dtype = Literal["float32", "bfloat16"]
NUM_CHECKED = 16  # how many prompts, texts or rows are also measured in float32 if blocks multiply in bfloat16
Key = tuple[str | float | None, ...]  # a key of `Values`: the name of a metric, then e.g. its normalization


Precision = Literal["float32", "own", "bfloat16"]
Values = dict[Any, Tensor]  # tensors (..., prompts) on the CPU; each analysis chooses its keys


class Rows(NamedTuple):
    """Rows that an analysis reads.

    Analyses that read the same batches share one forward pass.

    Args:
        batches: the batches to read, in a fixed order.
        limit: read only the first `limit` rows. None means all rows.
        at_once: the most rows that one `update` receives. None means as many as the forward pass holds at a time.
        precision: how the model runs: "float32" in float32 or wider, "own" in its own dtype, "bfloat16" with the matrix
            products inside blocks in bfloat16.
    """

    batches: Iterable[Batch]
    limit: int | None = None
    at_once: int | None = None
    precision: Precision = "float32"


class Jobs(NamedTuple):
    """Independent jobs, such as one per layer.

    Ranks share the jobs, so their results must be picklable.

    Args:
        calls: functions without arguments, one per job. If a function returns an iterator, its items become a list.
        records: makes the records from the results in the order of the jobs. By default each result is a list of
            records.
    """

    calls: Sequence[Callable[[], Any]]
    records: Callable[[list[Any]], Iterable[Record]] = itertools.chain.from_iterable


def joined(updates: Sequence[Values]) -> Values:
    """Concatenate the values of several microbatches along the prompts.

    A microbatch may lack some keys.
    """
    keys = dict.fromkeys(key for values in updates for key in values)
    return {key: torch.cat([values[key] for values in updates if key in values], dim=-1) for key in keys}


class Analysis(ABC):
    """One way to measure every layer of a model.

    `update` runs once per microbatch, on the rank that holds the microbatch. `compute` runs once per checkpoint, on the
    values of all prompts. Neither method knows of ranks, files or other analyses. If an analysis has an option
    `preset`, the options of the preset (`PRESETS`) are set on `self` before both methods run.

    Subclasses are dataclasses. Their fields are the options of a recipe and, together with `name`, determine every
    number. Constructors are cheap, and data loads on first use. `name` is unique within a run, e.g. `probe/ag_news`.
    """

    name: str
    PRECISION: ClassVar[Precision] = "float32"  # the precision in which `compute` and `jobs` receive the model
    SEES: ClassVar[Literal["text", "images"] | None] = None  # the input that a model must take; None allows both
    NEXT_TOKEN: ClassVar[bool] = False  # whether only models that predict the next token are accepted
    LEAST: ClassVar[Mapping[str, float]] = {}  # name of an option -> its smallest allowed value
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the options that each value of `preset` sets
    UNMEASURED: ClassVar[Sequence[str]] = ()  # options without effect on the measured values, left out of the config

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        """Return the rows on which the model runs, keyed by the argument of `compute` that receives their values.

        By default, these rows are the batches of the field `batches`, if it exists.
        """
        batches = getattr(self, "batches", None)
        return {} if batches is None else {"batches": Rows(batches)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the values of one microbatch.

        The last dimension of each tensor runs over the prompts of the batch, or over several rows of each prompt,
        prompt by prompt.

        Args:
            seen: the forward pass: `hidden` (layers + 1, prompts, tokens, dim), `mask` (prompts, tokens) and the blocks
                as functions. It is a copy, so `update` may write to it.
            batch: the columns of these rows, as the data returned them.
        """
        raise NotImplementedError(f"{self.name} reads rows and has no update")

    def compute(self, model: LayeredModel, **values: Values) -> Iterable[Record]:
        """Yield the records from the values of all prompts, which are in the order of the data.

        A subclass implements this method or `jobs`.
        """
        raise NotImplementedError(f"{self.name} has neither compute nor jobs")

    def jobs(self, model: LayeredModel, **values: Values) -> Jobs:
        """Return the jobs that ranks share; by default a single one, which runs `compute`."""
        return Jobs([functools.partial(self.compute, model, **values)])

    def adopt_batches_(self) -> None:
        """Convert data loaders, data sets and lists in fields of type `Batches` to `Batches`.

        Raises:
            InputError: if a field holds anything else.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            if field.type in (Batches, "Batches"):
                try:
                    setattr(self, field.name, to_batches(getattr(self, field.name)))
                except InputError as error:
                    raise InputError(f"{self.name}: {str(error).replace('batches', field.name, 1)}") from error

    def check(self, model: LayeredModel) -> None:
        """Check the options and the data against the model, before the first training step or checkpoint.

        The default loads every field that holds data. Batches must have the input of the model (token ids or pixels).
        Images must be preprocessed as in training, and texts must not be longer than the model reads.

        Raises:
            InputError: if an option or its data does not suit the model. The message names the option.
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
        """Check the options against the model without loading data.

        The default runs `check_fields`, compares `SEES` and `NEXT_TOKEN` with the model, and calls `resolved`. If the
        option `states` asks for attention or MLP, each block must add them to the state. A subclass adds checks that
        depend on the model.

        Raises:
            InputError: if an option does not suit the model. The message names the option.
        """
        self.check_fields()
        sees, kind = "images" if model.family.sees_images else "text", type(model.model).__name__
        if self.SEES not in (None, sees):
            raise InputError(f"{self.name}: expected a model of {self.SEES}, got {kind}")
        if self.NEXT_TOKEN and not model.predicts_next_token:
            raise InputError(f"{self.name}: expected a model that predicts the next token, got {kind}")
        self.resolved(model)
        if getattr(self, "states", None) in PARTS:
            try:
                check_contributions(model)
            except InputError as error:
                raise InputError(f"{self.name}: states: {error}") from error

    def resolved(self, model: LayeredModel) -> Self:
        """Return the analysis with the options of its preset or, if it has no preset, the analysis itself.

        Raises:
            InputError: if the user set an option to a value that differs from the preset's.
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
        # Keep attributes that are not options, such as data that is already loaded.
        vars(resolved).update({name: value for name, value in vars(self).items() if name not in defaults})
        return resolved

    def preset_options(self, preset: str, model: LayeredModel) -> Mapping[str, Any]:
        """Return the options that a preset sets for a model."""
        return self.PRESETS[preset]

    def tags_of(self, *options: str) -> dict[str, str | int | float]:
        """Return the named options that differ from their defaults, as tags."""
        defaults = {field.name: field.default for field in dataclasses.fields(cast("Any", self))}
        tags: dict[str, str | int | float] = {}
        for option in options:
            value = getattr(self, option)
            if value != defaults[option]:
                value = " ".join(value) if isinstance(value, tuple | list) else value
                tags[option] = int(value) if isinstance(value, bool) else value
        return tags

    def check_fields(self) -> None:
        """Check each option against its `Literal` type and against its smallest allowed value in `LEAST`.

        Raises:
            InputError: if a value is not allowed. The message names the option and its allowed values.
        """
        for field in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            value, choices = getattr(self, field.name), _choices(field.type)
            is_list = isinstance(value, list | tuple) or get_origin(field.type) in (list, tuple)
            for choice in value if is_list else (value,):
                if choices and isinstance(choice, str | None) and choice not in choices:
                    raise InputError(f"{self.name}: expected {field.name} to be one of {choices}, got {choice!r}")
        for option, least in self.LEAST.items():
            if (value := getattr(self, option)) is not None and not value >= least:  # `not >=` also refuses NaN
                raise InputError(f"{self.name}: expected {option} of at least {least}, got {value}")

    def check_data(self) -> None:
        """Check the data as far as that is possible without a model; by default, load the data of every field."""
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """Return the class and its options as JSON data; equal configs measure the same thing."""
        config = describe(self)
        options = {name: value for name, value in config["init_args"].items() if name not in self.UNMEASURED}
        return {**config, "init_args": options}

    def config_hash(self) -> str:
        """Return sixteen hex digits that identify the config.

        Any changed option changes the hash, including the options of the data. A tokenizer is hashed by content, so
        that its path does not matter.
        """
        return hash_of(_hash_tokenizers(self.config()))

    def data_hash(self) -> str | None:
        """Return a hash of the data, over every field with a `content_hash()`; None if there is no such field."""
        hashes = [value.content_hash() for value in vars(self).values() if hasattr(value, "content_hash")]
        return hashlib.sha256("/".join(hashes).encode()).hexdigest()[:16] if hashes else None

    def tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer of the data, or None if there is no tokenizer.

        The hashes come from all fields with a `tokenizer_hash()`; several different ones are joined by commas.
        """
        hashes = [
            value.tokenizer_hash() for value in vars(self).values() if callable(getattr(value, "tokenizer_hash", None))
        ]
        return ", ".join(dict.fromkeys(filter(None, hashes))) or None


def stack_layers(layers: Sequence[Mapping[Key, Tensor]]) -> Values:
    """Stack the values (..., prompts) of all layers into one tensor (layers + 1, ..., prompts) for each key."""
    return {key: torch.stack([values[key].cpu() for values in layers]) for key in layers[0]}


def to_bfloat16(analysis: Analysis) -> Analysis:
    """Return the analysis with its option `dtype` set to bfloat16.

    Raises:
        InputError: if the analysis has no such option, because it runs in float32 or wider.
    """
    if not hasattr(analysis, "dtype"):
        raise InputError(
            f"dtype: {analysis.name} is measured in float32 or wider; bfloat16 is for Lens, Interventions and tasks"
        )
    return dataclasses.replace(cast("Any", analysis), dtype="bfloat16")


def _choices(kind: Any) -> list[Any]:
    """Return the values that the `Literal` in a type allows, with None first if the type allows it.

    The list is empty if the type has no `Literal`.
    """
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    choices = list(dict.fromkeys(choice for arg in get_args(kind) for choice in _choices(arg)))
    return [None, *choices] if choices and type(None) in get_args(kind) else choices


def _hash_tokenizers(config: Any) -> Any:
    """Replace the paths of tokenizers in a config by hashes of their content, for `config_hash`."""
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

    An object becomes its class path and public fields. An array becomes a hash of its values. Inside data (an object
    with a `content_hash`), the values of arrays are left out, because `Analysis.data_hash` covers them.
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
