"""Numbers of other settings are stored, reported and selectable by name, but in no curve by default."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lit_layers import identity, plots, records
from lit_layers.analyses import Coupling
from lit_layers.cli.main import main
from lit_layers.correlate.model_table import read_run_models
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record
from lit_layers.report import WandbMirror, write_report
from lit_layers.training import EmergenceCallback
from tests.support.browser import CHROMIUM, dom_after
from tests.support.charts import figure_data, page_figures
from tests.support.labelled_texts import labelled, saved_gpt2
from tests.support.random_text import RandomText
from tests.support.read_wandb import read_finished
from tests.support.runs import make_models, make_run, measurement
from tests.support.tiny_training import fit
from tests.support.undrawn import leave_undrawn
from tests.tasks.tiny_tasks import write_tiny_data

STEPS = (0, 1, 2, 4)
OWN, OTHER = "000000000000000e.00ff00ff00ff00ff", "aaaa0000aaaa0000.bbbb1111bbbb1111"


def other(step: int | None, analysis: str = "representation", *, settings: str = OTHER, **changes: Any) -> Measurement:
    """Return measurements with another config and other data, with values that differ from the run's."""
    config, _, data = settings.partition(".")
    found = measurement("quickstart", step or 0, analysis, layers=2, seed=9)
    shifted = [replace(record, value=float(record.value) + 1000) for record in found.records]
    provenance = {**found.provenance, "config_hash": config, "data_hash": data or None}
    return replace(found, **{"step": step, "records": shifted, "provenance": provenance, **changes})


def add(root: Path, *measurements: Measurement) -> None:
    for one in measurements:
        records.append(root / "measurements.jsonl", one)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if "browser" not in request.node.name:
        leave_undrawn(monkeypatch)
    return make_run(tmp_path / "run", steps=STEPS, layers=2, analyses=("trajectory", "coupling", "representation"))


def rows(frame: Any) -> list[tuple]:
    return frame[["step", "analysis", "metric", "layer", "value"]].fillna(-1).values.tolist()


def figures(page: Path) -> list[dict[str, Any]]:
    return figure_data(page.read_text())


def test_tables_have_other_settings_only_on_request(run: Path) -> None:
    file, before = run / "measurements.jsonl", rows(records.frame(run / "measurements.jsonl"))
    add(run, *(other(step) for step in (0, 1)))
    assert rows(records.frame(file)) == before
    for asked in ("last", OTHER, "aaaa", "aaaa.bbbb", ["last"]):
        table = records.frame(file, settings=asked)
        assert set(table["settings"][table["analysis"] == "representation"]) == {OTHER}, asked
        assert set(table["step"][table["analysis"] == "representation"]) == {0, 1}
        assert set(table["step"][table["analysis"] == "trajectory"]) == {*STEPS}, "others keep theirs"
    every = records.frame(file, settings="all")
    assert set(every["settings"][every["analysis"] == "representation"]) == {OWN, OTHER}
    with pytest.raises(ValueError, match=f"in more than one settings: {OWN}, {OTHER}; choose one"):
        plots.emergence_curves(every, "prompt_entropy")
    for means in (plots.add_task_means, plots.add_task_medians):
        with pytest.raises(ValueError, match="analysis 'representation' is of more than one settings; choose one"):
            means(every)
    for wrong in ("cccc", "aaaa.cccc", ""):
        with pytest.raises(InputError, match=r"nothing was measured with .*: say last or one of 0000000e|one of 0000"):
            records.frame(file, settings=wrong)


CHOSEN = (
    ([(0, "a"), (1, "a"), (0, "b")], "a"),  # the most steps
    ([(0, "b"), (0, "a"), (1, "a")], "a"),
    ([(0, "a"), (1, "a"), (0, "b"), (1, "b")], "a"),  # of equally many the first
    ([(0, "a"), (0, "a"), (0, "b"), (1, "b")], "b"),  # a step that was measured twice is one
    ([(0, "a.1"), (1, "a.1"), (2, "a.2")], "a.1"),  # other data are other settings
    ([(0, "a!"), (1, "a!"), (2, "a!"), (0, "b")], "b"),  # a failure is no number
    ([(None, "a"), (None, "b")], "b"),  # a model without steps: the last
    ([(None, "b"), (None, "a"), (None, "b")], "b"),
    ([(0, ""), (1, ""), (0, "b")], "unknown"),  # lines without hashes
)


def test_the_documented_rule_chooses_the_settings_of_a_curve() -> None:
    for lines, chosen in CHOSEN:
        made = [other(step, settings=name.strip("!"), error="no" if "!" in name else None) for step, name in lines]
        made = [replace(m, provenance={n: v for n, v in m.provenance.items() if v}) for m in made]
        found = identity.shown(made)
        assert {identity.settings_of(m) for m in found} == {chosen}, lines
        assert len({(m.run, m.step, m.analysis) for m in found}) == len(found), lines
        rest = identity.split_shown(made)[1]
        assert {id(m) for m in [*found, *rest]} == {id(m) for m in identity.latest(made)}, lines


def test_an_early_failure_counts_until_any_settings_are_measured() -> None:
    early = other(1, records=[], error="no such layer", provenance={})
    assert identity.latest([other(0), early]) == [other(0), early]
    assert identity.shown([other(0), early]) == [other(0), early], "it is told of in any settings"
    assert identity.latest([early, other(1)]) == [other(1)]


def test_a_page_keeps_its_curves_and_lists_other_settings(run: Path, tmp_path: Path, capsys) -> None:
    before = figures(write_report(run))
    add(run, *(other(step) for step in (0, 1)))
    assert main(["report", str(run), "--export", str(tmp_path / "all.csv")]) == 0
    assert figures(run / "report.html") == before
    assert "1000." not in (tmp_path / "all.csv").read_text()
    told = "representation: 00000000.00ff00ff is shown, not aaaa0000.bbbb1111 at steps 0, 1"
    assert f"other settings: {told}; --settings NAME draws them" in capsys.readouterr().err
    assert told in (run / "report.html").read_text()
    assert f"lit-layers report {run} --settings NAME" in (run / "report.html").read_text()
    asked = tmp_path / "asked.html"
    assert main(["report", str(run), "--settings", "aaaa", "--root", str(asked)]) == 0
    assert "aaaa0000.bbbb1111 is shown, not 00000000.00ff00ff at steps 0, 1, 2, 4" in asked.read_text()
    assert figures(asked) != before
    for wrong, sentence in (("cccc", "nothing was measured with 'cccc'"), ("all", "a curve shows one of them")):
        assert main(["report", str(run), "--settings", wrong]) == 2
        assert sentence in capsys.readouterr().err


def test_models_compared_on_a_page_list_their_other_settings(tmp_path: Path, monkeypatch) -> None:
    leave_undrawn(monkeypatch)
    root = make_models(tmp_path / "models", models={"a/one": 2, "b/two": 2}, analyses=("trajectory", "representation"))
    before = (root / "measurements.jsonl").read_bytes()
    add(root, replace(other(None), run="a/one"))
    assert "representation of one: aaaa0000.bbbb1111 is shown, not 00000000.00000" in write_report(root).read_text()
    (root / "measurements.jsonl").write_bytes(before)
    assert "is shown, not" not in write_report(root).read_text()


def test_other_settings_have_their_own_logged_names_and_studies_read_the_settings_of_curves(run: Path) -> None:
    add(run, *(other(step) for step in (0, 1)))
    measured = records.read(run / "measurements.jsonl")
    plain = identity.plain_settings(measured)
    names = [identity.logged_name(m, plain) for m in measured]
    assert names[-2:] == ["representation@aaaa0000.bbbb1111"] * 2
    assert set(names[:-2]) == {"trajectory", "coupling", "representation"}
    assert identity.plain_settings([*measured, *map(other, range(9))]) == plain, "whatever comes later"
    assert identity.logged_name(other(3, "lens"), plain) == "lens"
    assert identity.logged_name(other(4, "lens", settings="c"), plain) == "lens@c"
    (model,) = read_run_models([run])
    assert {identity.settings_of(m) for m in model.measurements if m.analysis == "representation"} == {OWN}


@pytest.mark.soak
@pytest.mark.slow
def test_loggers_and_wandb_receive_other_settings_under_separate_names(tmp_path: Path) -> None:
    """The run continues with another k from step 2, under the same name."""
    logged: dict[str, list[int]] = {}

    class Noting(DummyLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            for name in metrics:
                logged.setdefault(name, []).append(step or 0)

    root = tmp_path / "run"
    for k, steps in ((2, [0, 1]), (3, [1, 2])):
        analyses = [Coupling(batches=RandomText(), k=(k,))]
        callback = EmergenceCallback(analyses, steps, root, if_exists="resume")  # with the weights of step 0
        fit(root, [callback], steps=steps[-1], logger=Noting())
    own, changed = (records.read(root / "measurements.jsonl")[n] for n in (0, -1))
    name = f"coupling@{identity.short(identity.settings_of(changed))}"
    assert identity.settings_of(own) != identity.settings_of(changed)
    assert logged["coupling/coupling/k=2"] == [0, 1]
    assert logged[f"{name}/coupling/k=3"] == [0, 1, 2], "the first step always belongs to a schedule"
    assert "coupling/coupling/k=3" not in logged
    pytest.importorskip("wandb")
    mirror = WandbMirror(mode="offline")
    mirror.open(root, run_id="a1b2c3d4", config={})
    mirror.finish()
    run = read_finished(root)["a1b2c3d4"]
    assert [step for step, _ in run.curve("coupling/coupling/k=2")] == [0], "step 1 is on a branch that was left"
    assert [step for step, _ in run.curve(f"{name}/coupling/k=3")] == [0, 1, 2]
    table = run.tables["emergence"]
    column = table["columns"].index("settings")
    assert {row[column] for row in table["data"]} == {identity.settings_of(m) for m in (own, changed)}


# ------------------------------------------------------------------------------------------------ figures that fail


def test_one_step_gives_no_surface_and_a_figure_that_fails_is_replaced_by_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after an option was changed for one step only: its variant exists at no other step."""
    records_of = [Record(metric="prompt_entropy", value=1.0 + n, layer=n, tags={"alpha": 2.0}) for n in range(3)]
    lines = records.read(run / "measurements.jsonl")
    last = next(m for m in reversed(lines) if m.analysis == "representation")
    add(run, replace(last, records=[*last.records, *records_of]))
    frame = records.frame(run / "measurements.jsonl")
    with pytest.raises(ValueError, match="has no values per layer of at least two steps"):
        plots.layer_surface(frame, "prompt_entropy", tags={"alpha": 2.0})
    page = write_report(run)
    surfaces = [each for each in figures(page) if any("z" in row for row in each.get("rows", ()))]
    assert len(surfaces) > 4
    before = page_figures(page)
    assert not any(each.problem for each in before)

    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("<b>no</b> pairs\nat all")

    monkeypatch.setattr(plots, "layer_matrix", refuse)
    after = page_figures(write_report(run))
    sentence = "This figure could not be drawn: ZeroDivisionError: <b>no</b> pairs at all"
    problems = [number for number, each in enumerate(after) if each.problem]
    assert problems, "it has pairs of layers"
    assert {after[number].problem for number in problems} == {sentence}
    assert [(each.spec, each.points) for number, each in enumerate(after) if number not in problems] == [
        (each.spec, each.points) for number, each in enumerate(before) if number not in problems
    ]
    assert "ZeroDivisionError: &lt;b&gt;no&lt;/b&gt; pairs at all</div>" in page.read_text()


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_sentence_instead_of_the_figure(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = plots.layer_matrix

    def refuse(*rows: Any, tags: dict[str, Any], **options: Any) -> Any:
        if tags["k"] == 4:
            raise ZeroDivisionError("no pairs at all")
        return draw(*rows, tags=tags, **options)

    monkeypatch.setattr(plots, "layer_matrix", refuse)
    script = """
      document.querySelectorAll("details").forEach((part) => (part.open = true));
      const plots = [...document.querySelectorAll(".plot")];
      for (let i = 0; i < 600 && !plots.every((plot) => plot.dataset.state); i++)
        await new Promise((r) => setTimeout(r, 100));
      const bad = plots.find((plot) => plot.classList.contains("failed"));
      document.body.dataset.told = bad.textContent;
    """
    dom = dom_after(write_report(run), script, tmp_path / "profile")
    sentence = "This figure could not be drawn: ZeroDivisionError: no pairs at all"
    assert f'data-told="{sentence}"' in dom


# ------------------------------------------------------------------------------------------------ two models, one root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    saved_gpt2(home / "one", n_layer=3)
    saved_gpt2(home / "two", n_layer=2)
    write_tiny_data(home / "data")
    return home


def test_every_command_refuses_a_second_model_in_one_root(models: Path, tmp_path: Path, capsys) -> None:
    text, root = tmp_path / "text.jsonl", tmp_path / "root"
    text.write_text("\n".join(json.dumps({"text": each}) for each, _ in labelled(1500)))
    options = {"corpus": str(text), "tokenizer": "${tokenizer}", "num_sequences": 2, "num_tokens": 8}
    batches = {"class_path": "lit_layers.data.EvalText", "init_args": options}
    analysis = {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": batches}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"analyses": [analysis]}))
    where = ["--root", str(root), "--device", "cpu"]
    say = {
        "analyze": ["--config", str(tmp_path / "recipe.yaml"), *where],
        "intervene": ["--corpus", str(text), "--num_sequences", "2", "--num_tokens", "8", *where],
        "mteb": ["--tasks", "STSBenchmark", "--folder", str(models / "data"), *where],
    }
    assert main(["analyze", str(models / "one"), *say["analyze"]]) == 0
    before = (root / "measurements.jsonl").read_bytes()
    capsys.readouterr()
    for verb, words in say.items():
        assert main([verb, str(models / "two"), *words]) == 2
        said = capsys.readouterr().err
        assert f"root: {root} holds measurements of {models / 'one'}, and {models / 'two'} would take their" in said
        assert (root / "measurements.jsonl").read_bytes() == before
    shutil.copytree(models / "one", tmp_path / "moved")
    again = main(["analyze", str(tmp_path / "moved"), *say["analyze"]])
    assert again == 0, "the same weights are the same model"
