"""Text for the commands (short source files that are tokenized quickly) and a run that was trained on it."""

import contextlib
import io
import sysconfig
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.main import main
from lit_layers.data import prepare

PACKAGE = Path(__file__).parents[2] / "lit_layers"
SOURCES = (
    "abc bdb bisect calendar cmd code codecs codeop copy copyreg csv dis filecmp fnmatch getopt glob heapq keyword"
)
SOURCES += " linecache netrc numbers opcode operator pprint queue reprlib sched shelve shlex shutil signal stat string"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of the text."""
    text, shards = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("prepared") / "shards"
    for name in SOURCES.split():
        (text / f"{name}.txt").write_text((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text())
    prepare(str(text), "bpe:300", shards, validation=0.3, progress=False)
    return shards


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, str]:
    """A finished run of the recipe of test_fit, and its printed output. Tests that change the run copy it first."""
    from tests.cli.test_fit import RECIPE

    folder = tmp_path_factory.mktemp("trained")
    recipe = {**RECIPE, "corpus": str(corpus), "root": str(folder / "run"), "resume_every": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["fit", "--config", str(folder / "recipe.yaml")]) == 0
    return folder / "run", printed.getvalue().replace("\n", "")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training end without drawing its page, which takes as long as a tiny run. For tests of everything else."""
    monkeypatch.setattr("lit_layers.cli.verbs.fit.write_report", lambda root: root / "report.html")
