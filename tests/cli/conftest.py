"""Text for the commands: real source code, small enough to tokenize in a blink."""

import sysconfig
from pathlib import Path

import pytest

from lit_layers.data import prepare

PACKAGE = Path(__file__).parents[2] / "lit_layers"
SOURCES = (
    "abc bdb bisect calendar cmd code codecs codeop copy copyreg csv dis filecmp fnmatch getopt glob heapq keyword"
)
SOURCES += " linecache netrc numbers opcode operator pprint queue reprlib sched shelve shlex shutil signal stat string"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its token shards."""
    text, shards = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("prepared") / "shards"
    for name in SOURCES.split():
        (text / f"{name}.txt").write_text((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text())
    prepare(str(text), "bpe:300", shards, validation=0.3, progress=False)
    return shards


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training ends without drawing its page, which takes as long as a tiny run; for what looks at the rest."""
    monkeypatch.setattr("lit_layers.cli.verbs.fit.write_report", lambda root: root / "report.html")
