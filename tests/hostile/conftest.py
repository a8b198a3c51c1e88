"""Fixtures of the tests with hostile files: a canary file that executed code would write, and a downloaded folder."""

from pathlib import Path

import pytest

from tests.cli.conftest import corpus  # noqa: F401 - a fixture


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A path that exists only if hostile code was executed."""
    return tmp_path / "canary" / "ran.txt"


@pytest.fixture
def payload(canary: Path) -> str:
    """Python code that writes the canary."""
    canary.parent.mkdir()
    return f"import pathlib; pathlib.Path({str(canary)!r}).write_text('ran')\n"


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A downloaded folder, which is the working directory."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
