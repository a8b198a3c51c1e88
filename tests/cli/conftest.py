"""Text for the commands: real source code, small enough to tokenize in a blink."""

from pathlib import Path

import pytest

from lit_layers.data import prepare

PACKAGE = Path(__file__).parents[2] / "lit_layers"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its token shards."""
    text, shards = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("prepared") / "shards"
    for path in sorted(PACKAGE.rglob("*.py")):
        (text / f"{path.parent.name}_{path.stem}.txt").write_text(path.read_text())
    prepare(str(text), "bpe:300", shards, validation=0.3, workers=1, progress=False)
    return shards
