"""Type checks of files that the package reads, and range checks of options; an error is one sentence.

A dataclass or TypedDict describes the content of a file. Its fields have the types below, and `STRICT` or `OPEN` says
whether other fields are allowed. Parsing and checking by pydantic is faster than parsing by Python's `json`.
"""

import dataclasses
import functools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import core_schema
from typing_extensions import TypedDict

from lit_layers.errors import InputError, refused

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid")  # refuse unknown fields, and numbers in quotes
OPEN = ConfigDict(strict=True, extra="allow")  # keep unknown fields, to show them or for a later version
_LONG = 80  # an error message shows this many characters of a wrong value


@dataclass(frozen=True)
class Expected:
    """Annotation of a union type with the words of its error message; pydantic's own would list every alternative."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(handler(source), "expected", custom_error_message=self.words)


_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # 64 bits, as the integers in a column of a pandas table
_NonFinite = Annotated[Literal["inf", "-inf", "nan"], AfterValidator(float)]
_first = Field(union_mode="left_to_right")
Count = Annotated[int, Field(ge=0, lt=2**63)]
_Real = Annotated[float | _NonFinite, _first, Expected("Input should be a number")]
Real = Annotated[float, GetPydanticSchema(lambda _, of: of(_Real))]
_Scalar = Annotated[_Integer | float | _NonFinite, _first, Expected("Input should be a number")]
Scalar = Annotated[float, GetPydanticSchema(lambda _, of: of(_Scalar))]
Tag = Annotated[str | _Integer | float | bool, _first, Expected("Input should be text or a number")]
Step = Annotated[int, Field(ge=0, le=10**8)]  # limited, because all steps of a range are listed in memory
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NotJson(InputError):
    """Raised for text that is not JSON at all: damaged or truncated."""


def parse(text: str | bytes, kind: type[T], where: str | Path, remedy: str) -> T:
    """Return the content of JSON text, checked against the type `kind`.

    The message of an error begins with `where`, the file, and ends with `remedy`, what the user should do.

    Raises:
        NotJson: the text is not JSON.
        InputError: a field is missing, unknown or of another type.
    """
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None


def check(content: Any, kind: type[T], where: str | Path, remedy: str) -> T:
    """Return data from another parser, such as a YAML parser, checked against the type `kind` as in `parse`."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None


def read(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file, checked against the type `kind` as in `parse`.

    Raises:
        InputError: the file is not a valid `kind` or cannot be read.
    """
    with refused(f"cannot read {path}"):
        text = path.read_bytes()
    return parse(text, kind, path, remedy)


def read_yaml(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a YAML file, checked against the type `kind` as in `parse`. Keys become text, as in JSON.

    Raises:
        InputError: the file is not a valid `kind` or cannot be read.
    """
    import yaml

    with refused(f"cannot read {path}"):
        text = path.read_bytes()
    try:
        content = json.dumps(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:  # bytes and dates are refused: JSON has neither
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())}); {remedy}") from error
    return parse(content, kind, path, remedy)


@functools.cache
def some_of(kind: type, *, without: tuple[str, ...] = ()) -> Any:
    """Return the type of a mapping that may have any fields of the dataclass `kind`, except those in `without`."""
    hints = get_type_hints(kind, include_extras=True)
    names = [each.name for each in dataclasses.fields(kind) if each.init and each.name not in without]
    typed: Any = {name: NotRequired[hints[name]] for name in names}
    return with_config(ConfigDict(extra="forbid"))(TypedDict(kind.__name__, typed))  # pyright: ignore[reportArgumentType]


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _refusal(error: ValidationError, where: str | Path, remedy: str) -> InputError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return NotJson(f"{where}: not valid JSON ({reason}); {remedy}")
    field = ".".join(map(str, first["loc"]))
    got = "" if first["type"] == "missing" else f", got {beginning(first['input'])}"
    return InputError(f"{where}: {field + ': ' if field else ''}{first['msg']}{got}; {remedy}")


def beginning(value: Any) -> str:
    """Return the beginning of a wrong value, for an error message."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


# Ranges of options. A class keeps the ranges of its options in one dictionary, for `refuse_outside`.

MANY = 10**9  # limit of steps, sequences, tokens: a larger number is a typo, and a loop over it takes too long


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`. `above` excludes `low`, `below` excludes `high`."""

    low: float
    high: float
    whole: bool = False
    above: bool = False
    below: bool = False

    def expected(self, value: Any) -> str | None:
        """Return the expected range in words if `value` is outside; None if it is inside."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return "a whole number" if self.whole else "a number"
        size: Any = value  # not converted to float: Python compares integers of any size exactly
        if not (size > self.low if self.above else size >= self.low):
            return f"{'more than' if self.above else 'at least'} {self.low:,}"
        if not (size < self.high if self.below else size <= self.high):
            return f"{'less than' if self.below else 'at most'} {self.high:,}"
        return None


Device = Literal["auto", "cpu", "cuda"]
Engine = Literal["process", "ray"]
COUNT = Range(1, MANY, whole=True)
COUNT_OR_NONE = Range(0, MANY, whole=True)
NOT_NEGATIVE = Range(0, math.inf)
SHARE = Range(0, 1)
SHARE_BELOW_1 = Range(0, 1, below=True)
LEARNING_RATE = Range(0, 1, above=True, below=True)
WEIGHT_DECAY = Range(0, 100)
BATCH = Range(1, 2**24, whole=True)  # limited, because a list of all indices of a batch must fit into memory
WORKERS = Range(0, 256, whole=True)  # number of processes that load data
SEED = Range(0, 2**32 - 1, whole=True)


def refuse_outside(where: str, ranges: Mapping[str, Range], values: Mapping[str, Any]) -> None:
    """Refuse the first value outside its range. None and missing values are not checked.

    Raises:
        InputError: a value, or an item of a list, is outside its range.
    """
    for name, allowed in ranges.items():
        value = values.get(name)
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if each is not None and (expected := allowed.expected(each)) is not None:
                raise InputError(f"{where}{name}: expected {expected}, got {value}")


def refuse_below_one(where: str = "", **counts: int | None) -> None:
    """Refuse the first option that is not a whole number of at least 1. An option that is None is not checked.

    `where` is put before the name of the option in the error message.

    Raises:
        InputError: there is such an option.
    """
    refuse_outside(where, dict.fromkeys(counts, COUNT), counts)


# `run.json` describes a run. Training writes it, and every command that opens the run folder reads it.

RUN_FILE = "run.json"


def run_facts(root: Path, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the content of run.json; empty if there is none.

    Raises:
        InputError: run.json is damaged, or lacks a `needed` field.
    """
    path = root / RUN_FILE
    if not path.is_file():
        return {}
    facts = read(path, dict[str, Any], "restore it, or delete it to go on without it")
    for field in needed:
        if field not in facts:
            raise InputError(f"{path}: {field}: this field is missing; restore it, or begin another run")
    return facts
