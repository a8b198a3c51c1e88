"""What a file that is read back must hold, run.json too, and the ranges of options: what is wrong is one sentence.

A file's kind is checked as it is parsed: a dataclass or a TypedDict of the types below, with one of the two
configurations. pydantic does both in less time than Python's own parser takes without a check.
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
STRICT = ConfigDict(strict=True, extra="forbid")  # a number in quotes is text, and an unknown field is a mistake
OPEN = ConfigDict(strict=True, extra="allow")  # more fields are welcome: they are shown, or of a later version
_LONG = 80  # characters of a value that a sentence shows


@dataclass(frozen=True)
class Expected:
    """Says in these words what was expected, where a type would list all that it tried."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(handler(source), "expected", custom_error_message=self.words)


_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # as a table can hold it
_NonFinite = Annotated[Literal["inf", "-inf", "nan"], AfterValidator(float)]
_first = Field(union_mode="left_to_right")
Count = Annotated[int, Field(ge=0, lt=2**63)]
_Real = Annotated[float | _NonFinite, _first, Expected("Input should be a number")]
Real = Annotated[float, GetPydanticSchema(lambda _, of: of(_Real))]
_Scalar = Annotated[_Integer | float | _NonFinite, _first, Expected("Input should be a number")]
Scalar = Annotated[float, GetPydanticSchema(lambda _, of: of(_Scalar))]
Tag = Annotated[str | _Integer | float | bool, _first, Expected("Input should be text or a number")]
Step = Annotated[int, Field(ge=0, le=10**8)]  # some are counted
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NotJson(InputError):
    """What was to be parsed is no JSON at all: damaged, or cut short."""


def parse(text: str | bytes, kind: type[T], where: str | Path, remedy: str) -> T:
    """Return the content of JSON text as `kind`; `place` and `remedy` begin and end the sentence of a refusal.

    Raises:
        NotJson: for what is none.
        InputError: for a field that is missing, unknown or of another kind.
    """
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None


def check(content: Any, kind: type[T], where: str | Path, remedy: str) -> T:
    """The same for what another parser has read, such as YAML."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None


def read(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file as `kind`.

    Raises:
        InputError: for a file that is none, or cannot be read.
    """
    with refused(f"cannot read {path}"):
        text = path.read_bytes()
    return parse(text, kind, path, remedy)


def read_yaml(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a YAML file as `kind`, whose keys are text, as those of JSON.

    Raises:
        InputError: for a file that is none, or cannot be read.
    """
    import yaml

    with refused(f"cannot read {path}"):
        text = path.read_bytes()
    try:
        content = json.dumps(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:  # bytes, dates
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())}); {remedy}") from error
    return parse(content, kind, path, remedy)


@functools.cache
def some_of(kind: type, *, without: tuple[str, ...] = ()) -> Any:
    """The type of a mapping of some of a dataclass's fields, of which `without` leaves some out; a list is a tuple,
    too.
    """
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
    """Return as much of a wrong value as a sentence shows."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


# Ranges of options: one table for each class that has them.

MANY = 10**9  # steps, sequences, tokens: more is a slip of the pen, and some loop would count them all


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both of them in it unless `above` or `below` leaves them out."""

    low: float
    high: float
    whole: bool = False
    above: bool = False
    below: bool = False

    def expected(self, value: Any) -> str | None:
        """What is expected in place of `value`; None where it is in the range."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return "a whole number" if self.whole else "a number"
        size: Any = value  # a whole number too large for a float compares, too
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
BATCH = Range(1, 2**24, whole=True)  # its numbers are listed before they are cut into micro-batches
WORKERS = Range(0, 256, whole=True)  # processes
SEED = Range(0, 2**32 - 1, whole=True)


def refuse_outside(where: str, ranges: Mapping[str, Range], values: Mapping[str, Any]) -> None:
    """Refuse the first value outside its range; None and what is not there are left to the types.

    Raises:
        InputError: naming it, what is expected and what came.
    """
    for name, allowed in ranges.items():
        value = values.get(name)
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if each is not None and (expected := allowed.expected(each)) is not None:
                raise InputError(f"{where}{name}: expected {expected}, got {value}")


def refuse_below_one(where: str = "", **counts: int | None) -> None:
    """Refuse the first option that is no count of at least 1; None is left to the types.

    Raises:
        InputError: naming it, what is expected and what came.
    """
    refuse_outside(where, dict.fromkeys(counts, COUNT), counts)


# `run.json`: what a run says of itself, written by training and read by whatever looks at its folder.

RUN_FILE = "run.json"


def run_facts(root: Path, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a run says of itself in its folder; nothing where there is no run.json.

    Raises:
        InputError: a run.json that is damaged, or lacks what is needed.
    """
    path = root / RUN_FILE
    if not path.is_file():
        return {}
    facts = read(path, dict[str, Any], "restore it, or delete it to go on without it")
    for field in needed:
        if field not in facts:
            raise InputError(f"{path}: {field}: this field is missing; restore it, or begin another run")
    return facts
