"""The study of four papers: its tables follow from its measurements, and some of them by other code."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "studies" / "four_papers.md"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?")


@pytest.fixture(scope="module")
def measured():
    return pd.read_parquet(PAGE.with_suffix(".parquet"))


def written(name: str) -> str:
    """Return a table as it stands on the page."""
    return PAGE.read_text(encoding="utf-8").split(f"<!-- table: {name} -->\n")[1].split("<!-- end of table -->")[0]


def table(name: str) -> pd.DataFrame:
    """Return a table of the page, its first column the index."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in written(name).strip().splitlines()
    ]
    return pd.DataFrame(rows, columns=head)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def last(measured: pd.DataFrame, group: str, metric: str, **tags) -> np.ndarray:
    """The value of each seed at its last checkpoint."""
    chosen = measured[measured["run"].str.fullmatch(rf"{group}, seed \d+") & (measured["metric"] == metric)]
    for name, tag in tags.items():
        chosen = chosen[chosen[name] == tag]
    chosen = chosen[chosen["step"] == chosen["step"].max()]
    assert not chosen["run"].duplicated().any()
    return chosen["value"].to_numpy(dtype=np.float64)


@pytest.mark.parametrize(
    ("title", "metric", "tags"),
    [
        ("coupling, k = 12", "coupling", {"k": 12}),
        ("loss of the readout, last layer", "logit_lens_loss", {"layer": 12}),
    ],
)
def test_values_at_the_end_are_means_over_seeds_with_students_interval(measured, title, metric, tags):
    line = table("last values").set_index("at the last checkpoint").loc[f"GPT-2: {title}"]
    data, shuffled = (last(measured, group, metric, **tags) for group in ("GPT-2", "GPT-2, shuffled tokens"))
    for column, seeds in (("data", data), ("shuffled", shuffled)):
        assert numbers(line[column]) == pytest.approx(mean_and_ends(seeds), rel=6e-3)  # three digits stand there
    assert numbers(line["difference"]) == pytest.approx(difference_and_ends(data, shuffled), rel=6e-3)


def mean_and_ends(seeds) -> list[float]:
    return [seeds.mean(), *stats.t.interval(0.95, len(seeds) - 1, seeds.mean(), stats.sem(seeds))]


def difference_and_ends(one, other) -> list[float]:
    ends = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    return [one.mean() - other.mean(), *ends]


def test_the_measurements_are_small_and_whole(measured):
    assert sum(path.stat().st_size for path in PAGE.parent.glob("*.parquet")) < 20e6
    steps = measured.groupby("run")["step"].nunique()
    assert (steps[steps.index.str.startswith("GPT-2")] == 20).all()
    assert (steps[steps.index.str.startswith("ViT")] == 18).all()


def printed(name: str) -> str:
    """Return what a script of the study prints."""
    script = PAGE.with_name(f"{name}.py")
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def assert_same_tables(again: str, page: str) -> None:
    """As numbers: another CPU may draw another curve, or round a last digit to the other side."""
    words = [NUMBER.sub("#", text).replace("p < #", "p #") for text in (again, page)]  # around p = 0.001
    assert words[0] == words[1]
    assert numbers(again) == pytest.approx(numbers(page), rel=0.05, abs=0.02)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_pages_tables_are_drawn_from_its_measurements(monkeypatch):
    for script, names in (
        ("forecasts", ["forecasts"]),
        ("block_prediction", ["blocks", "blocks given depth", "over training"]),
        ("lead_lags", ["lead lags"]),
    ):
        rows = [line for line in printed(script).splitlines() if line.startswith("|")]
        assert_same_tables("\n".join(rows) + "\n", "".join(map(written, names)))
    monkeypatch.syspath_prepend(str(PAGE.parent))
    import four_papers as study
    import mechanism

    tables = study.tables_of(study.curves_by_group(study.unpack(study.DATA)))
    tables |= mechanism.mechanism_tables(*study.mechanism_of(study.OF_MECHANISM))
    for name, rows in tables.items():
        assert_same_tables(study.as_markdown(rows), written(name))
