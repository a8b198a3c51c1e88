"""SIGTERM to commands that read results and choose, as they write: they end, and nothing that was there is lost."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from lit_layers.files import durable
from tests.cli.test_full_disk import argv, files, home, inputs, to_go_on  # noqa: F401
from tests.cli.test_stopping import FOR_EVER, terminate
from tests.support.forked import run_forked

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def expected(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:  # noqa: F811
    """What a command leaves that nobody disturbs, by its name; each runs once."""

    @functools.cache
    def of(name: str) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("undisturbed")
        inputs(name, home, folder)
        assert run_forked(lambda: main(argv(name, home, folder))) == 0
        return files(folder)

    return of


@pytest.mark.parametrize("name", ["select", "correlate", "emerge", "report", "prepare", "reproduce"])
def test_a_command_ends_as_it_writes_and_loses_nothing(name, home, expected, tmp_path):  # noqa: F811
    for writes in (1, 3):
        end_at(writes, name, home, expected, tmp_path / str(writes))


def end_at(writes: int, name: str, home: Path, expected, folder: Path) -> None:  # noqa: F811
    """The signal comes while the command waits at a file, the first or the third, as on a slow disk."""
    folder.mkdir()
    inputs(name, home, folder)
    given, calls = files(folder), []

    def slow(path: Path) -> None:
        calls.append(path)
        if len(calls) == writes:
            terminate(0.1)
            time.sleep(FOR_EVER)

    def slowly() -> int:  # in the fork alone: what it imports is imported here, too
        durable.sync = slow
        return main(argv(name, home, folder))

    code = run_forked(slowly)
    assert code == (143 if writes <= {"prepare": 2}.get(name, 3) else 0)  # so many files are written
    left = files(folder)
    assert {place: left[place] for place in given} == given
    whole = expected(name)
    tables = [place for place in left if place in whole and place.endswith((".csv", ".parquet"))]
    assert all(left[place] == whole[place] for place in tables), "a table is whole or not there"
    if name != "prepare":  # which knows that of its progress by name
        drafts = [place for place in left if ".draft" in place]
        assert not drafts
    assert run_forked(lambda: main(to_go_on(name, home, folder))) == 0
    assert files(folder).keys() >= whole.keys()
