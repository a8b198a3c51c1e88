"""Writes down what users and earlier results rely on, of what is quick to ask for and the same on every machine.

    python -m tests.support.golden

writes `tests/golden/*.json` anew: the options of each verb with their defaults, the row of each metric with the name of
its curve (W&B's key), and what each analysis is hashed by. `tests/test_golden.py` compares; `git diff tests/golden`
shows what a change changed.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from lit_layers import metrics
from lit_layers.analyses.base import Analysis
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.records import Record, key
from lit_layers.report import wandb_mirror
from tests.support import every_analysis

GOLDEN = Path(__file__).parents[1] / "golden"


def options() -> dict[str, dict[str, str]]:
    """By verb: each option as its help names it, with its default; of `fit` those of this package."""
    classes = [
        ("model", "LitCausalLM"),
        ("model", "LitImageClassifier"),
        ("data", "LitTextData"),
        ("data", "LitImageData"),
    ]
    of_fit = {f"fit {kind}": _help("fit", f"--{part}.help=lit_layers.training.{kind}") for part, kind in classes}
    pages = {verb: _help(verb, "--help") for verb in sorted(COMMANDS)} | of_fit
    return {name: _options_in(page) for name, page in pages.items()}


def _help(*words: str) -> str:
    text = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100000", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(text),
        contextlib.suppress(SystemExit),
    ):
        main([*words])
    return text.getvalue()


_DEFAULT = re.compile(r"default: (\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|<[^>]*>|[^;,)]*)")


def _options_in(page: str) -> dict[str, str]:
    lines = re.sub(r"\n {20,}", "  ", page).splitlines()  # the help of a long name is on the next line
    table = {}
    for line in lines:
        named = re.match(r"  (-\S.*?|\w+)(?:  +(.*))?$", line)
        if named and not named[1].startswith(("--trainer.", "-h")):  # those are Lightning's
            table[named[1]] = "; ".join(dict.fromkeys(_DEFAULT.findall(named[2] or "")))
    return table


def metric_rows() -> dict[str, dict[str, Any]]:
    """By metric what of its row is not the default, and how a number of it is called."""
    rows = {}
    for row in metrics.METRICS.values():
        record = Record(metric=row.name, value=1.0, layer=3, other_layer=7, tags={"k": 12, "task": "news"})
        defaults = {field.name: field.default for field in dataclasses.fields(row)}
        said = {name: value for name, value in dataclasses.asdict(row).items() if value != defaults[name]}
        rows[row.name] = {**said, "curve": key("analysis", record)}
    return rows


def analyses() -> dict[str, Any]:
    """W&B's axis, and of every analysis what it is called and hashed by."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        inputs = every_analysis.save_inputs(Path())
        text = [{**_identity(one), "data_hash": one.data_hash()} for one in every_analysis.of_text(inputs)]
        images = [_identity(one) for one in every_analysis.of_images()]  # whose noise is not that of every CPU
    return {"axis": wandb_mirror.AXIS, "text": text, "images": images}


def _identity(analysis: Analysis) -> dict[str, Any]:
    config = analysis.config()
    options = {name: value for name, value in config["init_args"].items() if name not in ("name", "batches")}
    return {
        "name": analysis.name,
        "class_path": config["class_path"],
        "options": json.dumps(options, sort_keys=True),
        "config_hash": analysis.config_hash(),
    }


# By file what it holds.
FILES = {"options": options, "metrics": metric_rows, "analyses": analyses}

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, content in FILES.items():
        (GOLDEN / f"{file}.json").write_text(json.dumps(content(), indent=1, sort_keys=True, default=str) + "\n")
