"""What the benchmarks have in common: medians and quartiles, targets, kept results, and the tables of the docs."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.forked import run_script

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import rounds

    return rounds


def test_a_row_is_the_median_of_the_rounds_with_quartiles_and_says_what_it_missed(rounds: ModuleType) -> None:
    values = np.random.default_rng(0).uniform(0.5, 1.5, 9).tolist()
    row = rounds.Row("ours", values, 1.5)
    np.testing.assert_allclose(row.quartiles, np.quantile(values, [0.25, 0.5, 0.75]), rtol=1e-12)
    assert rounds.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert "missed" in row.cells()["wanted"]
    for wanted, how, missed in (
        ((1.5,), {}, True),
        ((1.5,), {"at_most": True}, False),
        ((0.1,), {}, False),
        ((), {}, False),
    ):
        assert rounds.Row("ours", values, *wanted, **how).missed == missed, (wanted, how)


def test_a_result_is_kept_for_each_machine_and_command_and_becomes_a_table(
    rounds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounds, "RESULTS", tmp_path)
    options = argparse.Namespace(save=True, check=True)
    for command, value, code in ((["--size", "a"], 0.9, 1), (["--size", "b"], 2.0, 0), (["--size", "a"], 1.25, 0)):
        monkeypatch.setattr(sys, "argv", ["speed.py", *command, "--check", "--save"])
        row = rounds.Row("ours over theirs", [value] * 5, 1.0, others={"seconds": "3"})
        assert rounds.finish("speed", [row], options) == code
    assert "MISSED: ours over theirs: 0.900, wanted at least 1.00" in capsys.readouterr().out
    runs = json.loads((tmp_path / "speed.json").read_text())["runs"]
    assert [run["command"] for run in runs] == [f"python benchmarks/speed.py --size {size}" for size in "ba"]
    assert runs[0]["machine"]["processor"]
    (written,) = rounds.with_tables("before\n<!-- results: speed -->\nold\n<!-- end of results -->\nafter")
    assert "| ours over theirs | 3 | **1.25** | 1.25 to 1.25, 5 rounds | at least 1.00 |" in written
    assert not any(old in written for old in ("0.9", "old"))
    assert rounds.with_tables(written) == [written]
    with pytest.raises(ValueError, match="places for"):
        rounds.with_tables("a page without places")
    with pytest.raises(SystemExit, match="at least 5 rounds"):
        rounds.finish("speed", [rounds.Row("ours", [1.0] * 4)], options)


def test_the_tables_of_the_docs_are_those_of_the_kept_results(rounds: ModuleType) -> None:
    texts = [page.read_text() for page in rounds.DOCS]
    assert rounds.with_tables(*texts) == texts, "python benchmarks/rounds.py writes them anew"


@pytest.mark.nightly
def test_each_begins() -> None:
    for script in sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text()):  # or part of one
        done = run_script(script, "--help")
        assert done.returncode == 0, done.stderr
        assert "--" in done.stdout, script
