"""The commands of pages and recipes on tasks, tables and texts run: each as it is written, with what it names there.

Models are repositories of a stand-in Hub by their own names, or folders; each is tiny, with the published number of
blocks. Options behind a command (`LESS`) take fewer rows of them, shorter
texts and fewer orders of the blocks, and so does the recipe of fine-tuning.
"""

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.cli.options import Recipe
from lit_layers.models.build import save, vit
from lit_layers.records import Measurement, Record, ScalarLog
from tests.support.documented_commands import ROOT, documented_commands
from tests.support.labelled_texts import labelled, saved_gpt2, write_csv
from tests.support.papers_world import once, wikitext_files, write_data, write_hub
from tests.support.series_hub import let_downloads_end, served
from tests.support.undrawn import leave_undrawn

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]
VERBS = ("intervene", "mteb", "select", "correlate", "prepare")
# By the verb, or what stands in a command of it: the last that fits.
LESS = {
    "intervene": "--limit 2 --max_new_tokens 2 --seeds 0 --loops 2",
    "--variants all": "--folder data --limit 1 --max_new_tokens 1 --seeds 0 --loops 2 --middles 1",
    "--corpus": "--num_sequences 4 --num_tokens 32 --seeds 0 --loops 2",
    "--finetune": "--folder data --middles 1",
    "--images": "--num_images 40",
    "mteb": "--max_tokens 16",
    "select": "--max_tokens 16 --max_iterations 100 --rounds 1",
    "banking77": "--folder data --max_tokens 8 --max_iterations 100 --rounds 1",
    "--regression": "--max_tokens 16 --rounds 1",
    "--num_train": "--images digits --num_train 400 --num_test 100 --rounds 1",  # not those of CIFAR-10
}


# Without those that score all 32 data sets of the Hub.
COMMANDS = [each for each in documented_commands() if each.startswith(VERBS) and "layerwise32" not in each]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a Hub, which this process takes for the real one, and what the commands name beside it."""
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("world")
    names = [f"EleutherAI/pythia-{size}" for size in ("70m", "160m", "410m")]
    hub = write_hub(folder / "hub", [*names, "gpt2", "bert-base-uncased"], series=("410m",))
    small: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "num_heads": 4, "num_classes": 10}
    published = hub / "timm" / "deit_tiny_patch16_224.fb_in1k" / "main"
    for depth, place in ((12, published), (6, folder / "models" / "checkpoints" / "vit")):
        save(vit("deit_tiny_patch16_224", depth=depth, **small).eval(), place)
    files, load = wikitext_files(folder / "wikitext"), datasets.load_dataset

    def loaded(path: str, *config: str | None, **options: Any) -> Any:
        if path == "Salesforce/wikitext":
            return load("parquet", data_files=files, split=options["split"], streaming=True)
        return load(path, *config, **options)  # lm-eval reads files by this, too

    with pytest.MonkeyPatch.context() as patch, served(hub, folder / "home" / "hub", patch):
        patch.setattr(datasets, "load_dataset", loaded)
        patch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="abc", siblings=[]))
        leave_undrawn(patch)
        yield folder


@pytest.fixture(scope="module")
def with_models(world: Path, shared_cache: Path) -> Path:
    """Where the models of this machine lie, and the data of true size."""
    for step in (0, 10_000):
        saved_gpt2(world / "models" / "checkpoints" / "gpt2" / f"step-{step:09d}", n_layer=6, n_positions=256)
    rows = labelled(90)
    stars = [(text, {"merry": "5", "sad": "1", "calm": "3"}[mood]) for text, mood in rows]
    write_csv(world / "models" / "reviews" / "train.csv", stars, ("text", "stars"))
    tickets = [{"subject": text[:12], "body": text, "queue": mood} for text, mood in rows]
    (world / "models" / "tickets.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tickets))
    (world / "models" / "data").symlink_to(once(shared_cache.with_name("papers") / "data", write_data))
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
    """Trained models: a folder each, with the scalars and options that correlations ask for."""
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


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    texts = [text for text, _ in labelled(80)]
    table = {"sentence1": texts[::2], "sentence2": texts[1::2], "score": [float(n % 6) for n in range(40)]}
    pd.DataFrame(table).to_parquet(folder / "pairs.parquet")
    tasks = dict.fromkeys(("STSBenchmark", "STS16"), "pairs.parquet")
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"mteb": tasks}))


def run(command: str, capsys: pytest.CaptureFixture) -> str:
    more = next(options for part, options in reversed(LESS.items()) if part in command)
    code = main([*shlex.split(command), *shlex.split(more)])
    let_downloads_end()
    said = capsys.readouterr()
    assert code == 0, said.err[-3000:]
    return said.out


def of(*verbs: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(verbs)]


@pytest.mark.parametrize("command", of("intervene", "select"))
def test_models_in_other_orders_and_cut_ones(command, with_models, monkeypatch, capsys):
    monkeypatch.chdir(with_models)
    if command.startswith("intervene") and "--root" not in command:  # "gpt2" and "checkpoints/gpt2" share the default
        command += f" --root roots/{of('intervene', 'select').index(command)}"
    said = run(command, capsys)
    assert ("test, layer" in said or "models.csv" in said) if command.startswith("select") else "variants.csv" in said


@pytest.mark.parametrize("command", of("mteb"))
def test_layers_as_embeddings(command, with_models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "data")
    (tmp_path / "checkpoints").symlink_to(with_models / "checkpoints")
    if "STS16" in command:
        command = f"{command} --folder data"
    said = run(command, capsys)
    assert "texts" in said if "layerwise32" in command else "mean of " in said


def test_tables_and_texts_are_read_whole():
    for command in of("correlate", "prepare"):
        verb, *words = shlex.split(command)
        Recipe(getattr(import_module(f"lit_layers.cli.verbs.{verb}"), verb), words).read()


@pytest.mark.usefixtures("world")
def test_the_example_in_python(tmp_path, monkeypatch, capsys):
    (text,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "mteb.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "data")
    text = text.replace('resolve(["sts"])', 'resolve(["STSBenchmark"], DATA)')
    exec(compile(text, "mteb.md", "exec"), {"DATA": Path("data")})
    assert len(capsys.readouterr().out.splitlines()) > 1
