"""The recipes of the papers run as they are written, with smaller sizes, on a stand-in Hub.

The Hub (`tests.support.papers_world`) has repositories with the published names and numbers of blocks, tiny weights and
data sets with few rows. The grid of vision transformers for the correlation is invented.
"""

import functools
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.papers import read_recipe
from lit_layers.tasks import mteb_scores
from tests.cli.test_task_commands import write_grid
from tests.support.paper_tables import ROOT, recipe_paths
from tests.support.papers_world import cached, replace_wikitext, wikitext_files, write_data, write_hub
from tests.support.series_hub import let_downloads_end, served

pytestmark = pytest.mark.timeout(0)
RECIPES = {f"{path.parent.name}/{path.stem}": path for path in recipe_paths()}
# Upper limits for recipes that train.
LIMITS = {"max_steps": 2, "steps": 2, "num_train": 24, "num_validation": 12, "num_validation_sequences": 8}
LIMITS |= {"num_tokens": 24, "batch_size": 4, "limit": 24}
FEW_ROWS = 1_000  # MTEB draws 8 rows of each of the 77 classes of Banking77
ONE_PER_PAPER = ("coupling/fig4", "monotonicity/fig3", "layers/fig4", "painters/fig2")  # run by CI, the others nightly
FEW_TEXTS = 40  # per task, for metrics: DiME of 1,000 texts takes six seconds per layer
TROUBLE = ("error", "failed", "exit code", "select:")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Path]:
    """A working directory with the recipes, the stand-in Hub, WikiText and the data."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for path in [*folder.glob("recipes/glue/*.yaml"), *folder.glob("recipes/finetune/*.yaml")]:
        text = path.read_text()
        for name, most in LIMITS.items():
            text = re.sub(rf"^{name}: (\d+|null)(?= *(#|$))", f"{name}: {most}", text, flags=re.MULTILINE)
        if "num_epochs:" in text and "num_train:" not in text:
            text += f"num_train: {LIMITS['num_train']}\n"
        path.write_text(re.sub("16-mixed", "32-true", text))
    world = shared_cache.with_name("papers")
    hub, files = cached(world / "hub", write_hub), wikitext_files(folder / "wikitext")
    with pytest.MonkeyPatch.context() as patch, served(hub, folder / "home" / "hub", patch):
        replace_wikitext(patch, files)
        patch.setattr(mteb_scores, "NUM_METRIC_TEXTS", FEW_TEXTS)
        patch.setenv("LIT_LAYERS_BENCHMARKS", str(cached(world / "few", functools.partial(write_data, rows=FEW_ROWS))))
        patch.chdir(folder)
        write_grid(folder / "checkpoints" / "digits_grid", k=12)
        yield folder


def cases() -> list[Any]:
    """Return one test case per recipe that measures something."""
    return [
        pytest.param(name, marks=pytest.mark.soak if name in ONE_PER_PAPER else pytest.mark.nightly)
        for name, path in RECIPES.items()
        if read_recipe(path).steps
    ]


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize("name", cases())
def test_a_recipe_runs_as_it_is_written(name: str, capsys: pytest.CaptureFixture) -> None:
    recipe, root = read_recipe(RECIPES[name]), Path("out", name)
    argv = ["reproduce", f"recipes/papers/{name}.yaml", "--root", str(root)]
    # Small random blocks are close to the limit between the fast and the slow method for Jacobians.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the Jacobians of")
        code = main([*argv, *(["--reduced"] if recipe.reduced else [])])
    let_downloads_end()
    output = capsys.readouterr()
    lines = f"{output.out}\n{output.err}".splitlines()
    assert code == 0, [line[:400] for line in lines if any(word in line for word in TROUBLE)]
    for path in root.rglob("measurements.jsonl"):
        found = records.read(path)
        assert [m.error for m in found] == [None] * len(found)
        assert found
    assert (root / "comparison.csv").exists() or not recipe.published
