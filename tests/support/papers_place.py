"""Runs a recipe of a published figure: its command, and the names and branches that it has as published.

The world is a stand-in (`tests.support.papers_world`): repositories by their own names with as many blocks, with tiny
weights; data sets with few rows, as these are read at reduced sizes. The grid of vision transformers that is correlated
is trained by tests/test_grid_loops.py.
"""

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.papers import read_recipe
from lit_layers.tasks import mteb_scores
from tests.cli.test_task_commands import write_grid
from tests.support.paper_tables import ROOT, recipe_paths
from tests.support.papers_world import MODELS, once, wikitext_files, write_data, write_hub
from tests.support.series_hub import let_downloads_end, served

RECIPES = {f"{path.parent.name}/{path.stem}": path for path in recipe_paths()}
# Of recipes that train, however small the model is.
LIMITS = {"max_steps": 2, "steps": 2, "num_train": 24, "num_validation": 12, "num_validation_sequences": 8}
LIMITS |= {"num_tokens": 24, "batch_size": 4, "limit": 24}
FEW_ROWS = 1_000  # of a split to learn from: MTEB draws 8 of each of the 77 classes of Banking77
OF_EACH_PAPER = ("coupling/fig4", "monotonicity/fig3", "layers/fig4", "painters/fig2")  # run by CI, the others nightly
FEW_TEXTS = 40  # of each task, for metrics: DiME of 1,000 takes six seconds a layer
TROUBLE = ("error", "failed", "exit code", "select:")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Path]:
    """A working folder with the recipes, in a world that has this Hub, this WikiText and these data."""
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for path in [*folder.glob("recipes/glue/*.yaml"), *folder.glob("recipes/finetune/*.yaml")]:
        text = path.read_text()
        for name, most in LIMITS.items():
            text = re.sub(rf"^{name}: (\d+|null)(?= *(#|$))", f"{name}: {most}", text, flags=re.MULTILINE)
        if "num_epochs:" in text and "num_train:" not in text:
            text += f"num_train: {LIMITS['num_train']}\n"
        path.write_text(re.sub("16-mixed", "32-true", text))
    for path in (folder / "recipes" / "papers").glob("*/*.yaml"):
        path.with_name(f"{path.stem}_names.yaml").write_text(yaml.safe_dump(as_published(path), sort_keys=False))
    world = shared_cache.with_name("papers")
    hub, files = once(world / "hub", write_hub), wikitext_files(folder / "wikitext")
    load = datasets.load_dataset

    def wikitext(path: str, *config: str, **options: Any) -> Any:
        if path != "Salesforce/wikitext":  # lm-eval reads files by this, too
            return load(path, *config, **options)
        assert (config, options["revision"]) == (("wikitext-103-raw-v1",), "abc")
        return load("parquet", data_files=files, split=options["split"], streaming=options["streaming"])

    with pytest.MonkeyPatch.context() as patch, served(hub, folder / "home" / "hub", patch):
        patch.setattr(datasets, "load_dataset", wikitext)
        patch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="abc", siblings=[]))
        patch.setattr(mteb_scores, "NUM_METRIC_TEXTS", FEW_TEXTS)
        patch.setenv("LIT_LAYERS_BENCHMARKS", str(once(world / "few", few_rows)))
        patch.chdir(folder)
        write_grid(folder / "checkpoints" / "digits_grid", k=12)
        yield folder


def few_rows(folder: Path) -> Path:
    return write_data(folder, most=FEW_ROWS)


def cases() -> list[Any]:
    """Each recipe at reduced sizes; and with the published names, where these are others and nothing is trained.

    Items that cannot be measured are left out.
    """
    cases = []
    for name, path in RECIPES.items():
        if not read_recipe(path).steps:
            continue
        tier = pytest.mark.soak if name in OF_EACH_PAPER else pytest.mark.nightly
        cases.append(pytest.param(name, "reduced", id=f"{name}-reduced", marks=tier))
        reduced = yaml.safe_load(RECIPES[name].read_text()).get("reduced", {})
        if not trains(name) and as_published(RECIPES[name])["reduced"] != reduced:
            cases.append(pytest.param(name, "names", id=f"{name}-names", marks=pytest.mark.nightly))
    return cases


def trains(name: str) -> bool:
    return any("fit" in step for step in read_recipe(RECIPES[name]).steps)


def as_published(path: Path) -> dict[str, Any]:
    """The recipe with the published models, their layers, steps and branches, and all else reduced."""
    content = yaml.safe_load(path.read_text())
    sizes = content.get("sizes", {})
    kept = {name for name, value in sizes.items() if name in ("steps", "layers") or names_models(value)}
    content["reduced"] = {name: value for name, value in content.get("reduced", {}).items() if name not in kept}
    return content


def names_models(value: Any) -> bool:
    each = value if isinstance(value, list) else [value]
    return bool(each) and all(isinstance(name, str) and name in MODELS for name in each)


def run_as_written(name: str, sizes: str, capsys: pytest.CaptureFixture) -> None:
    """At `reduced` sizes, or with the published `names`, in the working folder of `place`."""
    recipe = read_recipe(RECIPES[name])
    file = f"recipes/papers/{name}{'' if sizes == 'reduced' else '_names'}.yaml"
    root = Path("out", name, sizes)
    argv = [
        "reproduce",
        file,
        "--root",
        str(root),
        *(["--reduced"] if yaml.safe_load(Path(file).read_text()).get("reduced") else []),
    ]
    # Small random blocks lie at the bound between the quick way to their Jacobians and the slow one.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the Jacobians of")
        if sizes == "names" and any("mteb" in step for step in recipe.steps):  # of every layer; else all ten draws
            patch.setattr("mteb.abstasks.classification.AbsTaskClassification.n_experiments", 1)
        code = main(argv)
    let_downloads_end()
    said = capsys.readouterr()
    lines = f"{said.out}\n{said.err}".splitlines()
    assert code == 0, [line[:400] for line in lines if any(word in line for word in TROUBLE)]
    for path in root.rglob("measurements.jsonl"):
        found = records.read(path)
        assert [m.error for m in found] == [None] * len(found)
        assert found
    if recipe.published:
        table = pd.read_csv(root / "comparison.csv")
        missing = table[table["verdict"] == "not measured"]
        notes = "".join(f"{row.what}: {row.note}\n" for row in missing.itertuples())
        if sizes == "names":
            assert not re.search(r"\d rows of \S+ fit", notes)
