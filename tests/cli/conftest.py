"""Text for the commands: real source code, small enough to tokenize in a blink."""

from pathlib import Path

import pytest

from lit_layers.data import prepare

PACKAGE = Path(__file__).parents[2] / "lit_layers"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its token shards."""
    text, shards = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("prepared") / "shards"
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        (text / f"{path.stem}.txt").write_text(path.read_text())
    prepare(str(text), "bpe:300", shards, validation=0.3, workers=1, progress=False)
    return shards


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training ends without drawing its page, which takes as long as a tiny run; for what looks at the rest."""
    monkeypatch.setattr("lit_layers.cli.fit.write_report", lambda root: root / "report.html")
