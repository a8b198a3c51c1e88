"""SIGTERM to commands that read results and choose, as they write: they end, and nothing that was there is lost."""

import shutil
import sys
import time
from pathlib import Path

import pytest

from lit_layers.cli import stopping
from lit_layers.cli.main import main
from lit_layers.files import durable
from tests.cli.test_full_disk import CASES, files, home  # noqa: F401
from tests.cli.test_stopping import FOR_EVER, in_foreign_code, terminate
from tests.support.forked import run_forked

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals"),
]


@pytest.mark.parametrize(
    "name", ["select", "correlate", "emerge", "compact", "publish", "report", "prepare", "reproduce"]
)
@pytest.mark.parametrize("signals", [(0.1,), (0.1, 1.5)], ids=["one", "two"])
@pytest.mark.parametrize("writes", [1, 3], ids=["first file", "third file"])
def test_a_command_ends_as_it_writes_and_loses_nothing(name, signals, writes, home, tmp_path):  # noqa: F811
    """One signal while it waits, as on a slow disk; two while it is deaf, as in a long call of a library."""
    case, folder, undisturbed = CASES[name], tmp_path / "disturbed", tmp_path / "undisturbed"
    for each in (folder, undisturbed):
        each.mkdir()
        for kept in case.inputs:
            shutil.copytree(home / kept, each / kept)
    given, calls = files(folder), []

    def slow(path: Path) -> None:
        calls.append(path)
        if len(calls) == writes:
            terminate(*signals)
            time.sleep(FOR_EVER) if len(signals) == 1 else in_foreign_code()

    def slowly() -> int:  # in the fork alone: what it imports is imported here, too
        durable.sync, stopping._ONE, stopping.LIMIT = slow, 0.2, FOR_EVER
        return main(case.argv(home, folder))

    code = run_forked(slowly)
    assert code == (143 if writes <= {"compact": 1, "report": 2}.get(name, 3) else 0)  # so many files are written
    left = files(folder)
    assert {place: left[place] for place in given} == given
    assert run_forked(lambda: main(case.argv(home, undisturbed))) == 0
    expected = files(undisturbed)
    tables = [place for place in left if place in expected and place.endswith((".csv", ".parquet"))]
    assert all(left[place] == expected[place] for place in tables), "a table is whole or not there"
    if len(signals) == 1 and name != "prepare":  # which knows that of its progress by name
        drafts = [place for place in left if ".draft" in place or place.rpartition(".")[2].isdigit()]
        assert not drafts
    assert run_forked(lambda: main(case.to_go_on(home, folder))) == 0
    assert files(folder).keys() >= expected.keys()
