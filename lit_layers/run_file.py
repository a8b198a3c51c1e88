"""`run.json`: what a run says of itself, written by training and read by whatever looks at its folder."""

from pathlib import Path
from typing import Any

from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.schema import Count, Real, Seconds

RUN_FILE = "run.json"


@with_config(schema.OPEN)
class _Origin(TypedDict, total=False):
    step: Count
    tokens: Count | None


_Model = with_config(schema.OPEN)(TypedDict("_Model", {"class": str, "parameters": Count}, total=False))


@with_config(schema.OPEN)
class _Data(TypedDict, total=False):
    corpus: str | None
    source: Any
    unigram_entropy: Real | None


@with_config(schema.OPEN)
class _Config(TypedDict, total=False):
    seed_everything: int | bool | None
    corpus: str | None
    tokenizer: str | None
    model: dict[str, Any] | None
    data: dict[str, Any] | None
    trainer: dict[str, Any] | None
    wandb: dict[str, Any] | None
    analyses: list[Any] | None


@with_config(schema.OPEN)
class _Resumed(TypedDict):
    step: Count
    at: str


@with_config(schema.OPEN)
class _RunFacts(TypedDict, total=False):
    run: str
    id: str
    started: str
    max_steps: Count
    origin: _Origin | None
    tokens_per_step: Count | None
    world_size: Count
    device: str
    precision: str
    model: _Model
    config: _Config
    data: _Data
    resumed: list[_Resumed]
    seconds: Seconds
    last_step: Count
    checkpoint_seconds: Seconds
    analysis_seconds: Seconds


def run_facts(root: Path, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns what a run says of itself in its folder; nothing where there is no run.json.

    Raises:
        InputError: a run.json that is damaged, or lacks what is needed.
    """
    path = root / RUN_FILE
    if not path.is_file():
        return {}
    facts: Any = schema.read(path, _RunFacts, "restore it, or delete it to go on without it")
    for field in needed:
        if field not in facts:
            raise InputError(f"{path}: {field}: this field is missing; restore it, or begin another run")
    return facts
