"""What hostile artefacts have in common: a canary that whatever runs would write, and a folder somebody downloads."""

from pathlib import Path

import pytest

from tests.cli.conftest import corpus  # noqa: F401 - a fixture


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that is there only if something ran."""
    return tmp_path / "canary" / "ran.txt"


@pytest.fixture
def payload(canary: Path) -> str:
    """Python that writes it."""
    canary.parent.mkdir()
    return f"import pathlib; pathlib.Path({str(canary)!r}).write_text('ran')\n"


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who has gone into it."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
