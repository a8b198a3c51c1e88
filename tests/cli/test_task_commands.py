"""The documented commands on tasks, tables and texts run as they are written, with the inputs they name.

Models are repositories of a stand-in Hub with their published names, or folders. Each is tiny, with the published
number of blocks. Options added to a command (`LESS`) reduce rows, text lengths and orders of the blocks, and so does
the recipe of fine-tuning.
"""

import _pydecimal as decimal
import argparse
import inspect
import json
import pydoc
import re
import shlex
import shutil
import subprocess
import tarfile
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.preparing import TokenShards
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.models.build import save, vit
from lit_layers.records import Measurement, Record, ScalarLog
from tests.support import layer_scores
from tests.support.documented_commands import ROOT, documented_commands
from tests.support.labelled_texts import labelled, saved_gpt2, write_csv
from tests.support.papers_world import cached, wikitext_files, write_data, write_hub
from tests.support.series_hub import let_downloads_end, served
from tests.support.undrawn import leave_undrawn

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]
VERBS = ("intervene", "mteb", "select", "correlate", "prepare")
# Keys are a verb or a part of a command. The last key that matches is used.
LESS = {
    "intervene": "--limit 2 --max_new_tokens 2 --seeds 0 --loops 2",
    "--variants all": "--folder data --limit 1 --max_new_tokens 1 --seeds 0 --loops 2 --middles 1",
    "--corpus": "--num_sequences 4 --num_tokens 32 --seeds 0 --loops 2",
    "--finetune": "--folder data --middles 1",
    "--images": "--num_images 40",
    "mteb": "--max_tokens 16",
    "select": "--max_tokens 16 --max_iterations 100 --rounds 1",
    "banking77": "--folder data --max_tokens 8 --max_iterations 100 --rounds 1",
    "correlate": "--resamples 100",
    "prepare": "",
    "--regression": "--max_tokens 16 --rounds 1",
    "--num_train": "--images digits --num_train 400 --num_test 100 --rounds 1",  # not the classes of CIFAR-10
}


# Without the commands that score all 32 data sets of the Hub.
COMMANDS = [each for each in documented_commands() if each.startswith(VERBS) and "layerwise32" not in each]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a stand-in Hub, which this process uses as the Hub, and the inputs that the commands name."""
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("world")
    names = [f"EleutherAI/pythia-{size}" for size in ("70m", "160m", "410m")]
    hub = write_hub(folder / "hub", [*names, "gpt2", "bert-base-uncased"], series=("410m",))
    small: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "num_heads": 4, "num_classes": 10}
    published = hub / "timm" / "deit_tiny_patch16_224.fb_in1k" / "main"
    for depth, target in ((12, published), (6, folder / "models" / "checkpoints" / "vit")):
        save(vit("deit_tiny_patch16_224", depth=depth, **small).eval(), target)
    files, load = wikitext_files(folder / "wikitext"), datasets.load_dataset

    def loaded(path: str, *config: str | None, **options: Any) -> Any:
        if path == "Salesforce/wikitext":
            return load("parquet", data_files=files, split=options["split"], streaming=True)
        if path in TEXTS:
            rows = datasets.Dataset.from_dict({TEXTS[path]: [text for text, _ in labelled(200)]}).to_iterable_dataset()
            return rows if options["split"] else {"train": rows}
        return load(path, *config, **options)  # lm-eval also reads files with this function

    with pytest.MonkeyPatch.context() as patch, served(hub, folder / "home" / "hub", patch):
        patch.setattr(datasets, "load_dataset", loaded)
        patch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="abc", siblings=[]))
        leave_undrawn(patch)
        yield folder


TEXTS = {"Skylion007/openwebtext": "text", "ORG/NAME": "content"}


@pytest.fixture(scope="module")
def models_folder(world: Path, shared_cache: Path) -> Path:
    """A folder with local models, and data of the original size."""
    for step in (0, 10_000):
        saved_gpt2(world / "models" / "checkpoints" / "gpt2" / f"step-{step:09d}", n_layer=6, n_positions=256)
    rows = labelled(90)
    stars = [(text, {"merry": "5", "sad": "1", "calm": "3"}[mood]) for text, mood in rows]
    write_csv(world / "models" / "reviews" / "train.csv", stars, ("text", "stars"))
    tickets = [{"subject": text[:12], "body": text, "queue": mood} for text, mood in rows]
    (world / "models" / "tickets.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tickets))
    (world / "models" / "data").symlink_to(cached(shared_cache.with_name("papers") / "data", write_data))
    recipe = (ROOT / "recipes" / "finetune" / "arc.yaml").read_text()
    for name, less in (("limit: null", "limit: 8"), ("num_tokens: 128", "num_tokens: 16")):
        assert name in recipe
        recipe = recipe.replace(name, less)
    (world / "models" / "recipes" / "finetune").mkdir(parents=True)
    (world / "models" / "recipes" / "finetune" / "arc.yaml").write_text(recipe)
    return world / "models"


def measured(folder: Path, run: str, step: int | None, analysis: str, found: list[Record], **provenance: Any) -> None:
    line = Measurement(
        run=run, step=step, tokens=None, analysis=analysis, records=found, seconds=0, provenance=provenance
    )
    folder.mkdir(parents=True, exist_ok=True)
    records.append(folder / "measurements.jsonl", line)


def write_grid(root: Path, k: int) -> None:
    """Write trained models: one folder each, with the scalars and options that correlations need."""
    for number in range(8):
        drop, decay, cell = 0.1 * (number % 2), 0.01 * (number // 2), f"cell{number}"
        names = {"coupling": 0.3, "random_coupling": -0.05, "excess_coupling": 0.33}
        found = [
            Record(metric=m, value=value + 0.1 * drop + 0.01 * number**1.5, tags={"k": k}) for m, value in names.items()
        ]
        measured(root / cell, cell, 10, "coupling", found, width=192)
        log = ScalarLog(root / cell / "metrics.jsonl")
        log.log(10, {"validation/accuracy": 0.6 + drop + 0.02 * (number * 7 % 5)})
        log.close()
        config = {"model": {"class_path": "x.Y", "init_args": {"drop_path_rate": drop, "weight_decay": decay}}}
        (root / cell / "run.json").write_text(json.dumps({"run": cell, "config": config}))


@pytest.fixture(scope="module")
def tables_folder(world: Path) -> Path:
    """A folder with the measurements that the commands of correlations name."""
    folder, table = world / "tables", []
    for number in range(6):
        width, score = 40 + 20 * number, 40 + 3 * number + number % 4 / 2
        values = {"coupling": 0.2, "random_coupling": -0.05, "excess_coupling": 0.24}
        found = [
            Record(metric=metric, value=value + 0.05 * number + share, tags={"k": round(share * width)})
            for share in (0.05, 0.1, 0.2)
            for metric, value in values.items()
        ]
        measured(folder / "checkpoints" / "suite", f"org/m{number}", None, "coupling", found, width=width)
        table.append([f"m{number}", score, score, width, 6 + number % 4, number**1.5])
    columns = ["model", "average", "accuracy", "width", "depth", "coupling"]
    pd.DataFrame(table, columns=columns).to_csv(folder / "everything.csv", index=False)
    pd.DataFrame(table, columns=columns)[["model", "average"]].to_csv(folder / "scores.csv", index=False)
    for name, k in (("grid", 19), ("vit_grid", 30), ("digits_grid", 12)):
        write_grid(folder / "checkpoints" / name, k)
    for run, step in (("checkpoints/embeddings", None), ("RUN", 16_000)):
        values, scores = layer_scores.tables(8)
        layer_scores.add(folder / run, "m", step, metric=values, scores=scores, tags={"drop_first": 1})
        for metric in ("infonce", "dime", "dataset_entropy"):
            layer_scores.add(folder / run, "m", step, metric=values, name=metric, analysis=f"of_{metric}")
    return folder


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    texts = [text for text, _ in labelled(80)]
    table = {"sentence1": texts[::2], "sentence2": texts[1::2], "score": [float(n % 6) for n in range(40)]}
    pd.DataFrame(table).to_parquet(folder / "pairs.parquet")
    tasks = dict.fromkeys(("STSBenchmark", "STS16"), "pairs.parquet")
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"mteb": tasks}))


def run(command: str, capsys: pytest.CaptureFixture) -> str:
    more = next(options for key, options in reversed(LESS.items()) if key in command)
    code = main([*shlex.split(command), *shlex.split(more)])
    let_downloads_end()
    out = capsys.readouterr()
    assert code == 0, out.err[-3000:]
    return out.out


def commands_of(*verbs: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(verbs)]


@pytest.mark.parametrize("command", commands_of("intervene", "select"))
def test_intervene_and_select_commands_run(command, models_folder, monkeypatch, capsys):
    monkeypatch.chdir(models_folder)
    if command.startswith("intervene") and "--root" not in command:  # "gpt2" and "checkpoints/gpt2" share it
        command += f" --root roots/{commands_of('intervene', 'select').index(command)}"
    out = run(command, capsys)
    assert ("test, layer" in out or "models.csv" in out) if command.startswith("select") else "variants.csv" in out


@pytest.mark.parametrize("command", commands_of("mteb"))
def test_mteb_commands_run(command, models_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "data")
    (tmp_path / "checkpoints").symlink_to(models_folder / "checkpoints")
    if "STS16" in command:
        command = f"{command} --folder data"
    out = run(command, capsys)
    assert "texts" in out if "layerwise32" in command else "mean of " in out


@pytest.mark.parametrize("command", commands_of("correlate"))
def test_correlate_commands_run(command, tables_folder, monkeypatch, capsys):
    monkeypatch.chdir(tables_folder)
    out = run(command, capsys)
    assert "layers.html" in out or "correlation.html" in out


def test_texts_are_prepared_in_the_order_of_the_page(world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for book in (argparse, decimal, inspect, pydoc, subprocess, tarfile, typing):
        shutil.copy(inspect.getfile(book), tmp_path / "books" / f"{book.__name__}.txt")
    (tmp_path / "play.txt").write_text("\n\n".join(text for text, _ in labelled(900)))
    save_tokenizer(train_bpe([text for text, _ in labelled(60)], 300), tmp_path / "data" / "python" / "tokenizer")
    for command in commands_of("prepare"):
        run(command, capsys)
        TokenShards.open(shlex.split(command)[-1])


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("page", ["mteb.md", "correlate.md"])
def test_the_python_examples_run(page, tables_folder, tmp_path, monkeypatch, capsys):
    (text,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "data")
    (tmp_path / "checkpoints").symlink_to(tables_folder / "checkpoints")
    text = text.replace('resolve(["sts"])', 'resolve(["STSBenchmark"], DATA)')
    exec(compile(text, page, "exec"), {"DATA": Path("data")})
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_every_verb_has_a_command():
    assert {command.split()[0] for command in COMMANDS} == {*VERBS}
