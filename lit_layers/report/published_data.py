"""The numbers of runs as a data set in the layout of the Hugging Face Hub: tables that `datasets` loads, and a card."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.errors import InputError, refused
from lit_layers.identity import settings_of
from lit_layers.metrics import look_up
from lit_layers.records import Measurement

# What of provenance is published: what tells numbers apart, and nothing that names a place on somebody's machine.
PUBLIC = (
    *("weights_hash", "config_hash", "data_hash", "tokenizer_hash", "model_tokenizer_hash"),
    *("dtype", "attention", "device", "versions", "audit"),
)
OF_THE_HUB = ("checkpoint", "revision", "commit", "weight_files")  # where there is a commit: of a public repository
_CARD, _NUMBERS, _MEASUREMENTS = "README.md", "numbers", "measurements"
_DRAFTS = f".{_CARD}.*"  # of a process that was killed as it wrote the card
_PARTS = (_NUMBERS, _MEASUREMENTS)
_RUNS = "lit_layers_runs"  # field of the card: whose files this command wrote


def write_data_set(roots: Sequence[Path], folder: Path, *, title: str) -> int:
    """Writes the numbers of runs to a folder, a file a run, and returns how many there are.

    `numbers` are those of `records.frame(root, settings="all")` with the tags as JSON; `measurements` say what the
    numbers of one line share. What failed is left out.

    Raises:
        InputError: a folder that is no run's, or another of the same name; an `out` that holds what is not ours.
    """
    names = [root.resolve().name for root in roots]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"roots: two folders are called {twice[0]}: rename one, as the data set names runs so")
    earlier = _earlier(folder)
    files: dict[str, Any] = {}
    metrics: Counter[tuple[str, str]] = Counter()
    for name, root in zip(names, roots, strict=True):
        measured = [m for m in records.latest(_read(root)) if m.error is None]
        numbers = _numbers(measured)
        metrics.update((m.analysis, record.metric) for m in measured for record in m.records)
        files |= {f"{_NUMBERS}/{name}.parquet": numbers, f"{_MEASUREMENTS}/{name}.parquet": _shared(measured)}
    with refused(f"out: cannot write to {folder}"):
        for part in _PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
        for stale in earlier - files.keys():
            (folder / stale).unlink(missing_ok=True)
        for draft in folder.glob(_DRAFTS):
            draft.unlink(missing_ok=True)
    records.write_files(
        folder, {_CARD: _card(title, names, metrics), **files}
    )  # the card first: it says whose they are
    return metrics.total()


def _earlier(folder: Path) -> set[str]:
    """The tables that this command wrote to a folder before, by its card.

    Raises:
        InputError: something else lies there, which would be replaced, or be part of the data set.
    """
    if not folder.exists():
        return set()
    neither = f"out: expected a new folder, or a data set that this command made, {folder} is neither"
    with refused(f"out: cannot read {folder}"):
        if not folder.is_dir():
            raise InputError(neither)
        card = folder / _CARD
        earlier = _tables_of(card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "")
        others = {each.name for each in folder.iterdir()} - {*_PARTS, *(draft.name for draft in folder.glob(_DRAFTS))}
        if earlier is None and others:
            raise InputError(neither)
        there = {path.relative_to(folder).as_posix() for part in _PARTS for path in (folder / part).glob("*.parquet")}
    if foreign := sorted(there - (earlier or set())):
        raise InputError(f"{neither}: this command did not write {foreign[0]}")
    return there


def _tables_of(card: str) -> set[str] | None:
    """The tables of the runs that a card names; None for a card that is not ours."""
    line = re.search(rf"^{_RUNS}: (\[.*\])$", card, re.MULTILINE)
    try:
        names = json.loads(line[1]) if line else None
    except ValueError:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name == Path(name).name for name in names):
        return None
    return {f"{part}/{name}.parquet" for part in _PARTS for name in names}


def send(folder: Path, repository: str) -> str:
    """Sends a data set to the Hub, to a repository that is made, private, where there is none; returns its address.

    Raises:
        InputError: what the Hub refused, that it cannot be reached, or a data set there that is not ours.
    """
    from huggingface_hub import HfApi

    from lit_layers.files.hub import asking_the_hub  # which imports the client, too

    api, asking = HfApi(), (f"hub: {repository} took nothing", f"run the same command again; {folder} is whole")
    of_data: Any = {"repo_type": "dataset"}
    with asking_the_hub(*asking):
        api.create_repo(repository, private=True, exist_ok=True, **of_data)
        there = api.list_repo_files(repository, **of_data)
        card = Path(api.hf_hub_download(repository, _CARD, **of_data)).read_bytes() if _CARD in there else b""
    earlier = _tables_of(card.decode(errors="replace"))
    kept = (_CARD, ".gitattributes", *(earlier or ()))
    if foreign := sorted(name for name in there if name not in kept and (not earlier or name.endswith(".parquet"))):
        raise InputError(
            f"hub: {repository} holds {foreign[0]}, which this command did not write: name another data set"
        )
    with asking_the_hub(*asking):
        written = [_CARD, *(f"{part}/*.parquet" for part in _PARTS)]  # nothing else that lies there
        how: Any = {"allow_patterns": written, "delete_patterns": "*.parquet", **of_data}
        api.upload_folder(repo_id=repository, folder_path=folder, **how)
    return f"https://huggingface.co/datasets/{repository}"


def _read(root: Path) -> list[Measurement]:
    file = root / "measurements.jsonl"
    if not file.is_file():
        raise InputError(f"roots: expected a run's folder with measurements.jsonl, {root} is none")
    return records.read(file)


def _numbers(measured: Sequence[Measurement]) -> pd.DataFrame:
    pairs = [(m, record) for m in measured for record in m.records]
    kinds: dict[str, Any] = {"layer": "Int64", "other_layer": "Int64", "n": "Int64"}
    kinds |= dict.fromkeys(("value", "stderr", "low", "high"), "float64")
    columns: dict[str, Any] = {
        **_columns([m for m, _ in pairs]),
        "metric": pd.array([record.metric for _, record in pairs], dtype="str"),
        **{name: pd.array([getattr(record, name) for _, record in pairs], dtype=kind) for name, kind in kinds.items()},
        "tags": pd.array([json.dumps(record.tags, sort_keys=True) for _, record in pairs], dtype="str"),
    }
    return pd.DataFrame(columns)


def _shared(measured: Sequence[Measurement]) -> pd.DataFrame:
    provenance = [json.dumps(_public(m.provenance), sort_keys=True) for m in measured]
    seconds = pd.array([m.seconds for m in measured], dtype="float64")
    return pd.DataFrame({**_columns(measured), "seconds": seconds, "provenance": pd.array(provenance, dtype="str")})


def _columns(measured: Sequence[Measurement]) -> dict[str, Any]:
    """What tells the numbers of one line from those of others."""
    steps = {name: pd.array([getattr(m, name) for m in measured], dtype="Int64") for name in ("step", "tokens")}
    texts = {"analysis": [m.analysis for m in measured], "settings": [settings_of(m) for m in measured]}
    named = {name: pd.array(values, dtype="str") for name, values in texts.items()}
    return {"run": pd.array([m.run for m in measured], dtype="str"), **steps, **named}


def _public(provenance: dict[str, Any]) -> dict[str, Any]:
    names = PUBLIC + (OF_THE_HUB if provenance.get("commit") else ())
    return {name: provenance[name] for name in names if name in provenance}


def _card(title: str, names: Sequence[str], metrics: Mapping[tuple[str, str], int]) -> str:
    configs = "\n".join(
        f"- config_name: {part}\n  data_files: {part}/*.parquet" + "\n  default: true" * (part == _NUMBERS)
        for part in _PARTS
    )
    rows = "\n".join(
        f"| {analysis} | {metric} | {count:,} | {f'{look_up(metric).title}. {look_up(metric).meaning}'.strip()} |"
        for (analysis, metric), count in sorted(metrics.items())
    )
    return f"""---
pretty_name: {json.dumps(title)}
tags:
- interpretability
- training-dynamics
{_RUNS}: {json.dumps(names)}
configs:
{configs}
---

# {title}

What every layer of {len(names)} run{"s" * (len(names) > 1)} holds at each checkpoint, measured with lit_layers \
{version("lit_layers")}: {", ".join(names)}.

`numbers` has one row a number: `run`, `step` and `tokens` of the checkpoint, `analysis`, `metric`, `layer` (0 is the
embedding output, l the output of block l), `other_layer` of pairs, `value`, `stderr`, the 95% interval from `low` to
`high`, `n` (prompts or test rows), and `tags`, JSON that says which number it is. `settings` are the hashes of an
analysis' options and data: compare numbers of one settings alone. `measurements` has one row for each analysis of a
checkpoint: how long it took, the hash of the weights, the versions of the libraries.

| analysis | metric | numbers | what it is |
| --- | --- | --- | --- |
{rows}
"""
