"""What a recipe may not say though its types allow it: refused after parsing, before anything is built."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.schema import COUNT, COUNT_OR_NONE, MANY, SEED, Range, refuse_outside

_TRAINER = {
    "max_steps": Range(1, MANY, whole=True, low_words="the number of steps to train"),
    "min_steps": COUNT_OR_NONE,
    "max_epochs": Range(-1, MANY, whole=True),
    "min_epochs": COUNT_OR_NONE,
    "accumulate_grad_batches": COUNT,
    "gradient_clip_val": Range(0, MANY),  # a negative one turns every gradient round
    "val_check_interval": Range(0, MANY, above=True),
    "check_val_every_n_epoch": COUNT,
    "log_every_n_steps": COUNT,
    "num_sanity_val_steps": Range(-1, MANY, whole=True),
    "limit_train_batches": Range(0, MANY, above=True),
    "limit_val_batches": Range(0, MANY),
    "overfit_batches": Range(0, MANY),
    "reload_dataloaders_every_n_epochs": COUNT_OR_NONE,
    "num_nodes": COUNT,
}
_MOST = 10**12


def refuse_harm(options: Mapping[str, Any]) -> None:
    """Refuses values that would train wrongly, write in the wrong place, or never end.

    Raises:
        InputError: naming the option and its value.
    """
    if options["root"] == "":
        raise InputError("root: expected a folder, got ''")
    refuse_outside("", {"seed_everything": SEED, "resume_every": COUNT}, options)
    trainer = options.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise InputError(f"trainer: expected the options of a Trainer, got {trainer!r}")
    if trainer.get("max_steps") is None:
        raise InputError("trainer.max_steps: expected the number of steps to train, got null")
    timed = {name: value for name, value in trainer.items() if isinstance(value, str | Mapping)}  # by the clock
    refuse_outside("trainer.", _TRAINER, {name: trainer[name] for name in trainer.keys() - timed.keys()})
    devices: Any = trainer.get("devices")
    if isinstance(devices, str) and not re.fullmatch(r"auto|-?\d+|\d+(,\d+)*,?", devices):
        raise InputError(f"trainer.devices: expected auto, a number, or numbers with commas between, got {devices!r}")
    if re.fullmatch(r"-?\d+", str(devices)) and (int(devices) == 0 or int(devices) < -1):
        raise InputError(f"trainer.devices: expected at least 1, or -1 for all, got {devices}")
    refuse_wild_numbers(options)


def refuse_wild_numbers(options: Mapping[str, Any]) -> None:
    """Refuses numbers that are infinite, not a number, or so large that something would count to them.

    Raises:
        InputError: naming the option and its value.
    """
    for path, value in _numbers(options, ()):
        name = ".".join(part for part in path if part != "init_args")
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value}")
        if abs(value) > _MOST and not path[-1].endswith("seed"):
            raise InputError(f"{name}: expected at most {_MOST:.0e}, got {value}")


def other_encoding(argv: list[str], error: UnicodeDecodeError) -> InputError:
    """The sentence for a recipe in another encoding than UTF-8, with its name."""
    for word in (part for argument in argv for part in (argument, argument.partition("=")[2])):
        if word and Path(word).is_file():
            try:
                Path(word).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                return InputError(f"{word} is not UTF-8 ({error.reason} at byte {error.start}): convert it with iconv")
    return InputError(f"a recipe is not UTF-8 ({error.reason} at byte {error.start}): convert it with iconv")


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int | float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
