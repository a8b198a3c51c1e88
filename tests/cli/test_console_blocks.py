"""The `console` blocks of pages and the headers of recipes: their commands run, on runs with the names they use.

The original runs take hours or a cluster. So for a training only the options are read: of each `fit`, and of the first
and last run of each grid. Published series and figures have tests of their own, with a stand-in Hub.
"""

import glob
import json
import shlex
from pathlib import Path

import pytest

from lit_layers import records
from lit_layers.cli.main import main
from tests.support.documented_commands import ROOT, documented_commands
from tests.support.grid_loops import LOOPS, Loop
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn

GRIDS = dict.fromkeys(("grid", "four_papers", "four_papers_mechanism"), "shuffle_tokens")
GRIDS |= {"four_papers_images": "shuffle_labels"}
RUNS = {name: {} for name in ("run1", "run2", "quickstart", "seed1", "seed2", "seed3", "study")} | {
    f"{folder}/{option}={on},seed={seed}": {"data": {option: on}}
    for folder, option in GRIDS.items()
    for on in (False, True)
    for seed in (1, 2)
}


COMMANDS = documented_commands()
# Tested by test_published_series and tests/test_wandb_mirror.py.
SKIPPED = ("llm_suite", "--workspace")
PAGES_OF_RUNS = [
    each for each in COMMANDS if each.startswith(("report", "emerge")) and not any(word in each for word in SKIPPED)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the recipes, and with runs of the names that the pages use."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("recipes", "wandb_configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "mine.yaml").write_text((ROOT / "recipes" / "quickstart" / "gpt2.yaml").read_text())
    (folder / "my_package.py").touch()
    for seed, (name, config) in enumerate(RUNS.items()):
        run = folder / "checkpoints" / name
        make_run(run, run=run.name, seed=seed, analyses=("coupling", "lens"))
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"config": config}))
    return folder


@pytest.fixture
def workdir(folder, monkeypatch) -> Path:
    """The working directory. Commands write next to the runs and do not change them."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[] if each == "report checkpoints/study" else [pytest.mark.nightly])
        for each in PAGES_OF_RUNS
    ],
)
def test_pages_of_runs_are_written_by_the_documented_command(command, workdir, monkeypatch):
    leave_undrawn(monkeypatch)
    measured = records.read(workdir / "checkpoints" / "quickstart" / "measurements.jsonl")
    settings = {m.provenance["config_hash"] for m in measured}
    words = [each for word in shlex.split(command) for each in (sorted(glob.glob(word)) or [word])]
    words = [sorted(settings)[0] if word == "1a2b3c4d" else word for word in words]
    out = words[words.index("--root") + 1] if "--root" in words else ""
    page = {"emerge": Path(out, "emergence.html"), "report": Path(out or "runs.html")}[words[0]]
    if words[0] == "report" and words[1] in ("checkpoints/quickstart", "checkpoints/study"):  # a page of a single run
        page = Path(words[1], "report.html")
    page.unlink(missing_ok=True)
    assert main(words) == 0
    assert page.stat().st_size > 10_000


@pytest.mark.nightly  # two seconds per command
@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("fit")])
def test_options_of_every_documented_training_are_valid(command, workdir, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(command), "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("script", LOOPS, ids=lambda path: path.stem)
def test_options_of_the_first_and_last_run_of_a_grid_are_valid(script, workdir, tmp_path, capsys):
    loop = Loop(script, tmp_path)
    assert loop.run() == 0
    first, *_, last = loop.commands()
    for command in (first, last):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--print_config"])
        assert ended.value.code == 0, capsys.readouterr().err
