"""`lit-layers correlate`: its output, files, page and pictures, and errors for wrong input."""

import contextlib
import html
import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from lit_layers.cli.main import main
from lit_layers.figures.vega import script
from tests.support.charts import page_figures, visible_text
from tests.support.runs import make_models
from tests.support.undrawn import leave_undrawn

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
QUICK = ["--resamples", "100"]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, str]:
    """The folder that the command writes for the published table, and its printed output."""
    folder = tmp_path_factory.mktemp("published") / "correlation"
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as printed:
        patched.setenv("COLUMNS", "120")
        assert main(["correlate", "--data", "published", "--root", str(folder), *QUICK]) == 0
    return folder, printed.getvalue()


@pytest.fixture
def study(tmp_path) -> Path:
    make_models(tmp_path / "models", models={f"org/m{n}": 4 + n for n in range(6)}, analyses=("coupling",))
    rows = [f"m{n},{30 + n * (7 - n)},{256 + 64 * n},{'ab'[n % 2]}" for n in range(6)]
    (tmp_path / "scores.csv").write_text("\n".join(["model,arc,width,family", *rows]))
    return tmp_path


def test_the_published_table_is_printed_with_its_warnings_and_saved_as_json_and_csv(published):
    out, output = published
    assert "Published coupling against leaderboard score, 28 models: R² = 0.800, p = 1.4e-10" in output
    assert "warning: Published coupling follows coupling by width alone, R² = 0.93; beyond it r = 0.568" in output
    assert output.splitlines()[-1] == str(out / "models.csv")
    found = json.loads((out / "correlation.json").read_text())
    assert (found["metric"], found["score"], found["n"]) == ("coupling", "score", 28)
    table = pd.read_csv(out / "correlation.csv").set_index("name")
    for row in found["rows"]:
        assert [*table.loc[row["name"], ["value", "low"]]] == pytest.approx([row["value"], row["low"]])
    assert len(pd.read_csv(out / "models.csv")) == 28


def test_the_page_shows_every_model_the_line_and_the_warnings(published):
    out = published[0]
    page = out / "correlation.html"
    text = visible_text(page)
    for words in ("Read with care", "With something else held fixed", "Within groups", "arXiv 2407.07810"):
        assert words in text
    first = page_figures(page)[0]
    table = pd.read_csv(out / "models.csv").set_index("model")
    points = [(row["x"], row["y"], row.get("t")) for row in first.points]
    drawn = {about.split("\n")[0]: (x, y) for x, y, about in points if about}
    assert drawn == {name: (row["coupling"], row["score"]) for name, row in table.iterrows()}
    line = [*first.line("Least squares").items()]
    slope = (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0])
    expected = table["coupling"].cov(table["score"]) / table["coupling"].var()
    assert slope == pytest.approx(expected, rel=1e-3)
    assert "://" not in re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.S)


def test_a_page_of_models_and_a_file_of_scores_lists_the_models_left_out(study, capsys, monkeypatch):
    leave_undrawn(monkeypatch)
    monkeypatch.chdir(study)
    command = ["correlate", "models", "--metric", "coupling/coupling[k=12]", "--score", "scores.csv:arc"]
    assert main([*command, "--group", "family", "--given", "width,depth", *QUICK]) == 0
    output = capsys.readouterr().out
    assert "Coupling, k = 12 against arc, 6 models: R² = " in output
    assert "Only 6 models" in output
    text = visible_text(study / "correlation" / "correlation.html")
    assert "Excess coupling: the baseline taken off" in text
    assert "Within equal family" in text
    assert {path.name for path in (study / "correlation").iterdir()} >= {"correlation.html", "scatter.png"}
    lines = Path("scores.csv").read_text().splitlines()
    Path("scores.csv").write_text("\n".join([line for line in lines if not line.startswith("m2")]))
    assert main([*command, *QUICK]) == 0
    assert "left out: org/m2: no arc" in capsys.readouterr().out
    assert "1 model left out org/m2: no arc" in visible_text(study / "correlation" / "correlation.html")


def test_names_from_files_are_shown_and_never_executed(tmp_path):
    rows = [f'"{NASTY}{n}",{n},{n * n % 5},"{NASTY}"' for n in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["model,m,acc,kind", *rows]))
    out = tmp_path / "out"
    file = str(tmp_path / "t.csv")
    command = ["correlate", file, "--metric", "m", "--score", "acc", "--group", "kind", "--root", str(out)]
    assert main([*command, *QUICK]) == 0
    text = (out / "correlation.html").read_text()
    assert NASTY not in text
    assert "<img" not in text.replace(script(), "")
    assert html.escape(NASTY, quote=False) in text
    assert visible_text(out / "correlation.html").count(NASTY) == 1, "the model that counts most"
