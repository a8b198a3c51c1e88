import hashlib
import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("jinja2")

from lit_layers import records, run_data
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.figures import vega
from lit_layers.metrics import METRICS, look_up, reading
from lit_layers.records import Record
from lit_layers.report import write_report
from lit_layers.report.template import Figures, block, number_figures
from lit_layers.report.wandb_mirror import id_of_run
from tests.support.browser import CHROMIUM, dom_after
from tests.support.charts import PageFigure, blocks, page_figures, svg_texts, visible_text
from tests.support.forked import run_forked
from tests.support.layer_results import layer_results, write_layer_results
from tests.support.read_wandb import read_finished
from tests.support.runs import MODELS, make_models, make_run, make_series, measurement
from tests.support.written import write

STEPS = (0, 1, 8, 64, 400)  # too few for emergence times, which take seconds and are tested in tests/test_emerge.py


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    failing = ((64, "coupling", "RuntimeError: no SVD"),)
    return make_run(tmp_path_factory.mktemp("full") / "run", steps=STEPS, failing=failing)


@pytest.fixture(scope="module")
def page(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(full, tmp_path_factory.mktemp("page") / "page.html")


def test_the_page_is_one_file_that_asks_the_network_for_nothing(page: Path) -> None:
    text = page.read_text()
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    assert page.stat().st_size < 1.6e6
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'; [^\"]*\"", text)
    markup = re.sub(r"<script\b.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"(?:https?:)?//[\w.]+", markup)
    assert not re.findall(r"<(?:link|iframe|object|embed|base)\b|@import|\bsrc=|url\(", markup)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', markup))


def test_the_page_shows_run_results_failures_cost_and_provenance(full: Path, page: Path) -> None:
    text = visible_text(page)
    assert re.search(r"Steps [\d,]+ Tokens", text), "a run that has ended has no steps to go"
    for expected in (
        "quickstart", "GPT2LMHeadModel", "1.47M", "819k", "3 min 08 s", "2026-03-01 12:00",
        "1 measurement failed", "RuntimeError: no SVD",
        "Line shape score 2.287 2.208 to 2.365 1.340 1.261 to 1.418 \N{MINUS SIGN}0.947",
        "Coupling k = 12",
        "Logit-lens loss nats layer 6",
        "All analyses", "Saving checkpoints 3.1 s 1.7%",
        "versions.torch 2.15.0", "bpe:2048", "0000000000000190",
    ):  # fmt: skip
        assert expected in text, expected
    measured = records.read(full / "measurements.jsonl")
    everything = sum(m.seconds for m in measured)
    lens = sum(m.seconds for m in measured if m.analysis == "lens")
    assert re.search(rf"Lens {len(STEPS)} 0\.5 s {lens:.1f} s {lens / 187.5:.1%}", text)
    assert f"All analyses {everything:.0f} s {everything / 187.5:.1%}" in text


def test_every_figure_is_on_the_page_and_a_map_has_a_frame_per_measured_step(page: Path) -> None:
    drawn, found = page_figures(page), blocks(page)
    titles = {"Line shape score", "Prompt entropy (nats)", "Probe accuracy (share)", "Coupling of pairs"}
    assert titles | {"Singular values", "Loss (nats)", "Learning rate", "Logit-lens loss (nats)"} <= found.keys()
    number_figures = re.findall(r'data-figures="([\d ]+)"', page.read_text())
    assert {int(number) for numbers in number_figures for number in numbers.split()} == set(range(len(drawn)))
    maps = [figure for figure in drawn if figure.is_map]
    surfaces = [figure for figure in maps if figure.steps]
    assert {len(figure.z[0][0]) for figure in surfaces} == {len(STEPS)}
    others = [figure for figure in maps if figure not in surfaces]
    assert {len(figure.frames) for figure in others} == {len(STEPS) - 1}, "the failed step has none"
    choices, places = found["Line shape score"]
    assert (choices, places[0][0].legend) == ([], ["Whole model"]), "a median of the whole model alone is no choice"
    choices, places = found["Probe accuracy (share)"]
    assert (choices, "random labels" in places[1][0].dashed) == ([], True)
    assert found["Prompt entropy (nats)"][0][0] == "raw, all tokens", "the plainest first"


def drawer(page: Path, title: str) -> str:
    """Return the text "How to read this" of a metric."""
    block = page.read_text().split(f"<h3>{title}")[1].split("</article>")[0]
    (text,) = re.findall(r'<details class="reading">(.*?)</details>', block, re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


def test_each_metric_says_how_it_is_read_and_where_it_was_published(page: Path) -> None:
    text = drawer(page, "Coupling of pairs")
    assert "m = |U2' J1 V2 - diag(s1)|_F / |s1|_p" in text.replace("`", "")
    assert "Range at most 1 " in text
    assert "How to read this How far" in text  # the docstring begins with Return
    assert text.count("eq. 6") == 1
    assert "lit_layers.functional.coupling.miscoupling" in text
    assert "Compare with Random bases: 0" in drawer(page, "Excess coupling")
    assert "Better higher" in drawer(page, "Probe accuracy")
    assert "Raises" not in text
    assert "`" not in drawer(page, "Expodistance"), "names in what it is taken from are set as code too"
    assert reading("a_metric_of_my_own") is None
    of_functions = {metric: reading(metric) for metric, row in METRICS.items() if row.function}
    assert not [metric for metric, known in of_functions.items() if known is None or not known.definition.paragraphs]


def test_diagnostics_come_last_in_their_section_and_are_folded(page: Path, tmp_path: Path) -> None:
    shown, folded = sections_of(page)["Coupling"].split('<details class="diagnostics">')
    assert ("<h3>Smallest singular gap" in folded, "<h3>Smallest singular gap" in shown) == (True, False)
    assert "Coupling of pairs" in titles_of(shown)
    write(tmp_path, "trajectory", [Record(metric="growth_rate", value=0.5, layer=layer) for layer in (1, 2)], step=0)
    text = write_report(tmp_path).read_text()
    assert "<h3>Growth rate of the norm" in text
    assert '<details class="diagnostics">' not in text, "a section of diagnostics alone folds nothing"


def test_results_name_their_steps_and_one_checkpoint_has_one_column(tmp_path: Path, page: Path) -> None:
    assert "Metric First Last Change" in visible_text(page)
    values = {0: {"expodistance": 2.0}, 4: {"line_shape_score": 1.5, "expodistance": 3}, 9: {"line_shape_score": 1.25}}
    for step, of_step in values.items():
        found = [Record(metric=metric, value=value) for metric, value in of_step.items()]
        for name in ("run", "one") if step == 9 else ("run",):
            write(tmp_path / name, "trajectory", found, step=step)
    text = visible_text(write_report(tmp_path / "run"))
    assert "Trajectory step 0 → 9 Expodistance step 0 → 4 2.000 3.000 +1.000 Line shape score step 4 → 9 1.500" in text
    assert "if it has one. Metric Value Trajectory step 9" in visible_text(write_report(tmp_path / "one"))


def test_a_variant_without_a_reference_level_is_drawn_like_the_others(tmp_path: Path) -> None:
    """For example `ngram_divergence` of unigrams, which has no reference level."""
    found = [
        Record(metric=f"{of}ngram_divergence", value=1.0 + n + layer, layer=layer, tags={"order": n})
        for of, n in (("", 1), ("", 2), ("random_", 2))
        for layer in (0, 1)
    ]
    for step in (0, 1):
        write(tmp_path, "trajectory", found, step=step)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert ("Divergence from n-grams" in page, 'class="plot failed"' in page) == (True, False)


def test_tables_over_tokens_and_directions_have_a_choice_of_layers_and_a_frame_a_step(tmp_path: Path) -> None:
    analyses = ("coupling", "token_coupling", "coupling_matrices", "cross_token_influence")
    page = write_report(make_run(tmp_path / "run", steps=(0, 1, 8), layers=3, analyses=analyses, scalars=False))
    found = blocks(page)
    choices, (figures,) = found["Coupling of pairs of tokens"]
    assert choices == ["layer 1", "layer 2", "layer 3"]
    assert [len(figure.frames) for figure in figures] == [3, 3, 3]
    *_, last = [m for m in records.read(tmp_path / "run" / "measurements.jsonl") if m.analysis == "token_coupling"]
    values = {
        (r.tags["token"], r.tags["other_token"]): r.value
        for r in last.records
        if r.metric == "token_coupling_pair" and r.layer == 3
    }
    shown = figures[2].z[2]
    assert (shown[1][7], shown[7][1]) == pytest.approx((values[14, 100], values[100, 14]), rel=1e-2)
    choices, ((first, *_),) = found["One block in the other's directions"]
    pairs = [(1, 3), (3, 1), (1, 1)]
    assert choices == [f"block {one} in the directions of block {two}" for one, two in pairs]
    assert len(first.z[0]) == 30
    _, (matrices,) = found["Coupling of pairs"]
    assert [(figure.is_map, len(figure.frames)) for figure in matrices] == [(True, 3)] * 2
    distances = found["Influence of earlier tokens (Frobenius norm)"][1][0][0]
    assert distances.spec["encoding"]["x"]["axis"]["title"] == "Distance from the last token"


def test_any_part_of_a_run_is_enough_for_a_page(tmp_path: Path) -> None:
    failing = tuple((step, "lens", "no") for step in (0, 1, 8))
    for number, (change, expected) in enumerate(
        (
            ({"steps": (0,)}, "Results"),
            ({"scalars": False, "analyses": ("trajectory",)}, "Line shape score"),
            ({"analyses": ()}, "Training"),
            ({"failing": failing, "analyses": ("lens",)}, "3 measurements failed"),
        )
    ):
        options: dict[str, Any] = {"steps": (0, 1, 8), "layers": 2, **change}
        root = make_run(tmp_path / str(number), **options)
        (root / "run.json").unlink()
        for file in root.glob("*.jsonl"):
            with file.open("a") as torn:
                torn.write('{"run": "quicks')
        assert expected in visible_text(write_report(root)), expected


def test_measurements_of_other_runs_or_without_a_step_are_counted_and_a_retried_one_is_no_failure(tmp_path):
    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",), failing=((1, "lens", "no"),))
    own = measurement("quickstart", 1, "lens")
    for line in (measurement("other", 1, "lens"), replace(own, step=None), own):
        records.append(root / "measurements.jsonl", line)
    text = visible_text(write_report(root))
    assert "other runs in this folder are not drawn: other" in text
    assert "1 measurement without a step is not drawn" in text
    assert run_data.read_run(root).failures == []
    assert not [word for word in ("failed", "suspect") if word in text]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with too few checkpoints for emergence times once the suspect ones are left out."""
    root = tmp_path_factory.mktemp("series") / "pythia"
    return make_series(root, steps=(0, 512, 1000, 2000, 3000, 143000), suspect=(1000, 2000))


def test_a_metric_with_only_random_draws_has_a_sentence_instead_of_a_figure(tmp_path: Path) -> None:
    draws = [Record(metric="accuracy", value=0.5, layer=n, tags={"seed": seed}) for n in (0, 1) for seed in (0, 1)]
    for step in (0, 1):
        write(tmp_path, "drawn", draws, step=step)
    assert "No figure shows these numbers" in write_report(tmp_path).read_text()


def test_the_provenance_of_a_series_is_one_table_by_step_with_full_hashes_on_hover(
    series: Path, tmp_path: Path
) -> None:
    found = run_data.provenance(run_data.read_run(series))
    assert found["shared"]["checkpoint"] == found["shared"]["series"] == "EleutherAI/pythia-70m"
    assert found["analyses"] == {name: {"config_hash": f"{len(name):016x}"} for name in ("trajectory", "lens")}
    columns = ["step", "weights_hash", "audit", "revision", "commit", "weight_files"]
    assert found["checkpoints"]["columns"] == columns
    page = write_report(series, tmp_path / "page.html")
    assert "Step Weights hash Audit Revision Commit Weight files" in visible_text(page)
    rows = re.findall(r"<tr(?: class=\"(\w+)\")?><td class=\"number\">([\d,]+)</td>(<td.*?)</tr>", page.read_text())
    assert len(rows) == len(found["checkpoints"]["rows"]) == 6
    assert [step for kind, step, _ in rows if kind == "suspect"] == ["1,000", "2,000"]
    commit = hashlib.sha1(b"512").hexdigest()
    assert f'<td title="{commit}">{commit[:12]}</td>' in rows[1][2]


def test_provenance_that_differs_by_step_is_in_the_table_and_by_analysis_is_not(tmp_path):
    root = make_run(tmp_path / "run", steps=(0, 1, 8), analyses=("lens", "trajectory"), scalars=False)
    lines = []
    for m in records.read(root / "measurements.jsonl"):
        own: dict[str, Any] = {"device": "cpu" if m.step == 0 else "H200", "data_hash": f"of {m.analysis}"}
        if m.step == 8 and m.analysis == "lens":
            own["versions"] = {"torch": "2.16.0"}
        lines.append(replace(m, provenance=m.provenance | own))
    found = run_data.provenance(replace(run_data.read_run(root), measurements=lines))
    assert found["checkpoints"]["columns"] == ["step", "weights_hash", "device"]
    assert [row[2] for row in found["checkpoints"]["rows"]] == ["cpu", "H200", "H200"]
    lens = found["analyses"]["lens"]
    assert lens["data_hash"] == "of lens"
    assert re.fullmatch("torch 2.15.0.*torch 2.16.0", lens["versions"])


def test_suspect_checkpoints_are_left_out_by_default_and_page_and_command_report_it(
    series: Path, tmp_path: Path, capsys
) -> None:
    def drawn(page: Path) -> set[int]:
        return {step for figure in page_figures(page) for step in figure.steps}

    page, numbers = tmp_path / "page.html", tmp_path / "numbers.csv"
    assert main(["report", str(series), "--root", str(page), "--export", str(numbers)]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "left out as suspect (equal to the final step): steps 1,000, 2,000; --allow_suspect draws them\n"
    )
    assert said.out.splitlines() == [str(numbers), str(page)]
    assert drawn(page) == {0, 512, 3000, 143000}
    text = visible_text(page)
    assert "2 suspect checkpoints left out" in text
    assert "steps 1,000, 2,000: equal to the final step" in text
    assert f"lit-layers report {series} --allow_suspect" in text
    table = pd.read_csv(numbers)
    assert len(table) == len(records.frame(series / "measurements.jsonl")), "a table leaves nothing out"
    assert set(table[table["audit"].str.startswith("suspect")]["step"]) == {1000, 2000}
    page = tmp_path / "page.v2.html"
    assert main(["report", str(series), "--root", str(tmp_path / "page.v2"), "--allow_suspect"]) == 0
    assert capsys.readouterr() == (f"{page}\n", "")
    assert {1000, 2000} <= drawn(page)
    assert "2 suspect checkpoints drawn" in visible_text(page)
    assert "left out" not in visible_text(page)
    text = visible_text(write_report(make_series(tmp_path / "run", steps=(1, 2), suspect=(1, 2))))
    assert "2 suspect checkpoints left out" in text
    assert "Results" not in text, "a series that is suspect as a whole has no curves"


ALL = ("trajectory", "coupling", "representation", "next_token_probe", "lens", "cross_token_influence")
DEPTHS = {name: depth for name, depth in zip(MODELS, (2, None, 3, 2), strict=True) if depth is not None}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models") / "sizes", models=DEPTHS, analyses=ALL)


@pytest.fixture(scope="module")
def comparison(compared: Path) -> Path:
    return write_report(compared)


NAMES = [name.rpartition("/")[2] for name in DEPTHS]


def test_models_without_steps_are_compared_with_a_line_each(compared: Path, comparison: Path) -> None:
    choices, ((loss,),) = blocks(comparison)["Logit-lens loss (nats)"]
    assert (choices, loss.names) == ([], NAMES)
    measured = [m for m in records.read(compared / "measurements.jsonl") if m.analysis == "lens"]
    for name, m in zip(NAMES, measured, strict=True):
        values = {r.layer or 0: r.value for r in m.records if r.metric == "logit_lens_loss"}
        depth, line = max(values), loss.line(name)
        assert [*line] == pytest.approx([100 * layer / depth for layer in values], abs=1e-4)
        assert [*line.values()] == pytest.approx([*values.values()], rel=1e-4)
        assert f"layer 2 of {depth}" in [row.get("t") for row in loss.points]
    assert not [words for words in ("Steps", "not drawn") if words in visible_text(comparison)]


def test_every_metric_of_models_is_a_figure_or_a_row(compared: Path, comparison: Path) -> None:
    text, found = visible_text(comparison), blocks(comparison)
    for metric in {record.metric for m in records.read(compared / "measurements.jsonl") for record in m.records}:
        if not metric.startswith("random_"):
            assert look_up(metric).unit_title in found or f" {look_up(metric).title} " in text, metric
    assert num_placed(found) == len(page_figures(comparison)), "each figure has its place"


def num_placed(found: dict[str, tuple[list[str], list[list[PageFigure]]]]) -> int:
    return sum(len(place) for _, places in found.values() for place in places)


def test_pictures_of_one_model_are_chosen_by_its_name(comparison: Path) -> None:
    found = blocks(comparison)
    choices, (matrices,) = found["Coupling of pairs"]
    assert choices == [f"{name}, k = {k}" for name in NAMES for k in (4, 12)]
    assert [len(figure.z[0]) for figure in matrices[::2]] == [*DEPTHS.values()]
    choices, (profiles, distances) = found["Influence of earlier tokens (Frobenius norm)"]
    assert choices == NAMES
    assert all(figure.names == NAMES for figure in profiles)
    assert [len(figure.names) for figure in distances] == [*DEPTHS.values()]
    assert not [figure for figure in page_figures(comparison) if figure.frames]


def test_results_and_provenance_of_models_stand_side_by_side(compared: Path, comparison: Path) -> None:
    text = visible_text(comparison)
    assert f"Metric {' '.join(NAMES)}" in text
    cells = [
        f"{r.value:.3f} {r.low:.3f} to {r.high:.3f}"
        for m in records.read(compared / "measurements.jsonl")
        for r in m.records
        if (r.metric, r.layer, r.tags) == ("line_shape_score", None, {})
    ]
    assert f"Line shape score {' '.join(cells)}" in text
    for expected in (
        "Effective rank last layer",
        "Models 3 Device cpu",
        "Model Weights hash Tokenizer hash Checkpoint Revision Commit Weight files",
        "gpt2 0000000000000002 0000000000000000 openai-community/gpt2 main 000000000000 model",
        "tiny 0000000000000003 0000000000000001 models/tiny \u2013 \u2013 model",
        "data_hash 00000000000000a0, 00000000000000a1",
    ):
        assert expected in text, expected
    found = run_data.provenance(run_data.read_run(compared))
    assert [row[0] for row in found["checkpoints"]["rows"]] == NAMES


def test_a_suspect_model_and_a_failed_measurement_are_named(tmp_path: Path, capsys) -> None:
    root = make_models(tmp_path / "sizes", analyses=("lens",), suspect=("openai-community/gpt2", "models/tiny"))
    bad = replace(records.read(root / "measurements.jsonl")[1], analysis="coupling", error="RuntimeError: no SVD")
    records.append(root / "measurements.jsonl", bad)
    assert main(["report", str(root)]) == 0
    assert capsys.readouterr().err == (
        "left out as suspect (identical weights): models gpt2, tiny; --allow_suspect draws them\n"
    )
    text = visible_text(root / "report.html")
    assert "2 suspect models left out" in text
    assert "Model Analysis Error pythia-160m coupling RuntimeError: no SVD" in text
    assert "Metric pythia-70m pythia-160m Lens" in text
    lines = {name for figure in page_figures(root / "report.html") for name in figure.names}
    assert lines == {"pythia-70m", "pythia-160m"}


def test_a_model_of_one_block_among_others_leaves_no_figure_empty(tmp_path: Path) -> None:
    page = write_report(make_models(tmp_path / "run", models={"a/one": 1, "a/two": 2}, analyses=("coupling",)))
    choices, places = blocks(page)["Coupling of pairs"]
    assert (len(choices), [len(place) for place in places]) == (4, [4])
    assert num_placed(blocks(page)) == len(page_figures(page))


def test_invalid_or_unwritable_runs_are_refused_and_the_old_page_stays(tmp_path, monkeypatch):
    """The command's sentences are tested in tests/cli/test_refusals.py."""
    root = make_run(tmp_path / "run", steps=(0,), analyses=("lens",))
    old = write_report(root).read_bytes()
    files = {path.name for path in root.iterdir()}

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        with pytest.raises(InputError, match=r"cannot write .*report\.html: no space left on device"):
            write_report(root)
    assert {path.name for path in root.iterdir()} == files
    for places, sentence in (
        ((tmp_path / "none",), r"expected a run's folder .*: no such folder"),
        ((tmp_path,), r"expected a run's folder .*: it has neither"),
        ((root, tmp_path / "nowhere" / "page.html"), r"cannot write .*page\.html: no such file or directory"),
    ):
        with pytest.raises(InputError, match=sentence):
            write_report(*places)
    for name in ("run.json", "measurements.jsonl"):
        (root / name).write_text("{\n{")
        with pytest.raises(InputError, match=rf"{name}(, line 1)?: .*to go on"):
            write_report(root)
        (root / name).unlink()
    assert (root / "report.html").read_bytes() == old


@pytest.mark.soak
@pytest.mark.slow
def test_the_command_brings_wandb_up_to_date_without_suspect_checkpoints(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    root = make_series(tmp_path / "run", steps=(0, 1, 2, 4), analyses=("coupling",), suspect=(1, 2))
    for _ in range(2):
        assert main(["report", str(root), "--wandb", "--allow_suspect"]) == 0
        assert "wandb sync" in capsys.readouterr().out
        read_finished(root)  # waits until W&B's process has written its files
    history = read_finished(root)[id_of_run(root)].history
    assert [row["trainer/global_step"] for row in history if "tokens" in row] == [0, 4], "each once"
    tables = [json.loads(path.read_text()) for path in (root / "wandb").rglob("media/table/*.table.json")]
    rows = 2 * len(measurement("r", 0, "coupling", layers=2).records)
    assert {len(table["data"]) for table in tables} == {rows}


def sections_of(page: Path) -> dict[str, str]:
    """Return the sections of a page by heading."""
    parts = re.findall(r"<section[^>]*>\s*<h2>(.*?)</h2>(.*?)</section>", page.read_text(), re.S)
    return dict(parts)


def titles_of(section: str) -> list[str]:
    return re.findall(r"<h3>(.*?)(?:<span|</h3>)", section)


def options_of(section: str, title: str) -> list[str]:
    """Return the options of a block's menu."""
    block = section[section.index(f"<h3>{title}") :].split("</article>")[0]
    return re.findall(r"<option[^>]*>(.*?)</option>", block)


@pytest.fixture(scope="module")
def layerwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layer_results(tmp_path_factory.mktemp("layerwise") / "run")


@pytest.fixture(scope="module")
def layerwise_page(layerwise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(layerwise, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def layerwise_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models") / "run"
    for name, layers in (("lab/small", 3), ("lab/large", 4)):
        write_layer_results(root, steps=(None,), run=name, layers=layers)
    return root


SINGLED_OUT = "Layers that a probe&#39;s scores single out"


def test_metrics_of_one_kind_share_a_block_from_which_a_reader_chooses(layerwise_page: Path) -> None:
    found = {title: choices for title, (choices, _) in blocks(layerwise_page).items()}
    rises = "How a probe's score rises over the layers"
    assert found[rises] == [
        f"Monotonicity, {name}" for name in ("rank correlation", "increasing steps", "largest drop")
    ]
    assert {html.unescape(SINGLED_OUT), "The next token by least squares"} <= found.keys()
    assert found["Word pairs of one relation"][:2] == ["Concept alignment", "Excess concept alignment"]
    assert found["The law of the prediction residual over the layers"][0] == "Residual ratio"
    sections = [part for part in sections_of(layerwise_page).values() if 'class="plot"' in part]
    assert sum('class="lead"' in part for part in sections) == len(sections) - 1 == 5, "all but a glance at the whole"


def test_the_page_draws_the_controls_of_a_probe_as_dashed_lines_and_no_choice(layerwise_page: Path) -> None:
    part = sections_of(layerwise_page)["Probe: topics"]
    assert options_of(part, "Probe accuracy") == ["test rows", "training rows", "validation rows"]
    drawn = page_figures(layerwise_page)
    curves, profile = (drawn[int(numbers.split()[0])] for numbers in re.findall(r'data-figures="([\d ]+)"', part)[:2])
    assert profile.dashed == {"majority class", "random labels"}
    bands = [row["s"] for row in profile.series if row["e"] == "band"]
    assert bands == ["step 0", "step 64"], "intervals: first and last checkpoint"
    assert [*curves.line("layer 4").values()][-2:] == pytest.approx([0.708, 0.764])


def test_layers_are_whole_numbers_in_the_results_and_secondary_scores_are_left_to_the_figures(layerwise_page):
    text = visible_text(layerwise_page)
    assert "Plateau layer test rows, of accuracy 3 2 to 4 3 2 to 4 0" in text
    results = text[text.index("Results Each") : text.index("Probe: topics How")]
    assert not [name for name in ("macro F1", "Largest drop", "Held-out", "noun - form") if name in results]
    assert "Residual ratio per block 0.800 0.790 to 0.820" in results


def test_a_users_own_metrics_keep_their_figures_next_to_those_of_a_probe(tmp_path: Path) -> None:
    found = layer_results("probe/topics", step=8)
    own = [Record(metric="calibration", value=0.1, layer=n, tags={"task": "topics", "split": "test"}) for n in (0, 1)]
    own += [Record(metric="probe_c", value=0.5, layer=layer, tags={"task": "topics"}) for layer in (0, 1)]
    records.append(tmp_path / "measurements.jsonl", replace(found, records=[*found.records, *own]))
    part = sections_of(write_report(tmp_path))["Probe: topics"]
    assert {"Calibration", "Probe regularisation c", "Probe accuracy (share)", SINGLED_OUT} <= {*titles_of(part)}


def test_models_side_by_side_have_their_headlines_profiles_and_maps(layerwise_models: Path, tmp_path: Path) -> None:
    page = write_report(layerwise_models, tmp_path / "page.html")
    text = visible_text(page)
    assert "Best layer test rows, of accuracy 3 3 to 3 4 3 to 4" in text
    assert "Increasing steps" not in text
    found = sections_of(page)
    assert options_of(found["Concept alignment"], "Concept alignment") == ["small", "large"]
    assert [len(figure.columns) for figure in page_figures(page) if figure.is_map] == [4, 5] * 3


def test_pictures_leave_out_suspect_checkpoints_and_a_run_without_numbers_is_refused(tmp_path: Path, capsys):
    bare = make_run(tmp_path / "bare", steps=(0,), analyses=("lens",), scalars=False, failing=((0, "lens", "no"),))
    for step, audit in ((0, "clean"), (8, "suspect: equal to the final step"), (64, "clean")):
        found = layer_results("probe/stars", step=step)
        kept = [record for record in found.records if record.metric == "r_squared"]
        records.append(tmp_path / "measurements.jsonl", replace(found, records=kept, provenance={"audit": audit}))
    assert main(["report", str(tmp_path), "--pictures", str(tmp_path / "p")]) == 0
    (picture,) = (tmp_path / "p").glob("probe_stars_r*_over_training.svg")
    assert {"0", "8", "64"} & {*svg_texts(picture.read_text())} == {"0", "64"}
    (tmp_path / "file").touch()
    for root, folder, sentence in (
        (bare, "q", "has nothing to draw as pictures"),
        (tmp_path, "file", "make the folder"),
    ):
        assert main(["report", str(root), "--pictures", str(tmp_path / folder)]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


DRAWN = """
      const plots = [...document.querySelectorAll(".plot")];
      const drawn = async () => {
        while (plots.some((plot) => plot.dataset.state !== "drawn")) {
          if (plots.some((plot) => plot.dataset.state === "failed")) throw Error("a figure failed");
          await new Promise((later) => setTimeout(later, 100));
        }
      };
      const pictures = () => Promise.all(plots.map((plot) => plot.view.toSVG()));"""


def touched(page: Path, script: str, profile: Path) -> str:
    """Return the page in a browser after all figures are drawn and a script has run."""
    dom = dom_after(page, f'{DRAWN}{script}; document.body.dataset.touched = "yes";', profile)
    assert re.search(r'<p id="script-error"[^>]*hidden', dom)
    assert 'data-touched="yes"' in dom
    for plot in re.split(r'(?=<div class="plot[^>]*data-figures=)', dom)[1:]:
        assert 'data-state="drawn"' in plot
        assert "<canvas" in plot
    return dom


def open_page(test: Any) -> Any:
    marks = pytest.mark.soak, pytest.mark.browser, pytest.mark.slow
    for mark in (*marks, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")):
        test = mark(test)
    return test


@open_page
def test_a_browser_draws_every_figure_and_the_switches_work(tmp_path: Path) -> None:
    extra = ("coupling", "token_coupling", "coupling_matrices", "cross_token_influence")
    others = ("trajectory", "representation", "next_token_probe", "lens")
    page = write_report(make_run(tmp_path / "run", steps=(0, 1, 8), layers=2, analyses=(*extra, *others)))
    # When all is drawn, record the state; then use the page: tokens instead of steps, another variant, a slider.
    script = """
      const folded = [...document.querySelectorAll(".diagnostics .plot")];
      while (plots.some((plot) => !folded.includes(plot) && plot.dataset.state !== "drawn")) {
        await new Promise((later) => setTimeout(later, 100));
      }
      if (!folded.length || folded.some((plot) => plot.dataset.state)) throw Error("what is folded has no width yet");
      document.querySelectorAll("details").forEach((part) => (part.open = true));
      await drawn();
      if (folded.some((plot) => plot.querySelector("canvas").clientWidth < 200)) throw Error("drawn too narrow");
      const having = async (text) => {
        const shown = await pictures();
        if (shown.some((picture) => picture.includes("NaN"))) throw Error("NaN");
        return shown.filter((picture) => picture.includes(text)).length;
      };
      document.body.dataset.before = await having("Optimizer step");
      for (const select of document.querySelectorAll(".metric select")) {
        select.value = "1"; select.dispatchEvent(new Event("change"));
      }
      await drawn();
      for (const slider of document.querySelectorAll(".slider input")) {
        slider.value = 0; slider.dispatchEvent(new Event("input"));
      }
      document.body.dataset.after = await having("Optimizer step")"""
    dom = touched(page, script, tmp_path / "profile")
    counts = {name: int(n) for name, n in re.findall(r'data-(before|after)="(\d+)"', dom)}
    assert counts["before"] == counts["after"] > 20
    assert "<span>Step 0</span>" in dom
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', re.sub(r"<script\b.*?</script>", "", dom, flags=re.S))


@open_page
@pytest.mark.parametrize("kind", ["layerwise", "layerwise_models", "compared"])
def test_a_browser_draws_every_choice_of_probes_categories_and_models(kind, request, tmp_path):
    script = """
      document.querySelectorAll("details").forEach((part) => (part.open = true));
      await drawn();
      for (const select of document.querySelectorAll(".metric select")) {
        for (let index = select.options.length - 1; index >= 0; index--) {
          select.selectedIndex = index; select.dispatchEvent(new Event("change"));
          await drawn();
        }
      }
      for (const slider of document.querySelectorAll(".slider input")) {
        slider.value = 0; slider.dispatchEvent(new Event("input"));
      }
      document.body.dataset.category = (await pictures()).some((picture) => picture.includes("noun - form 20"));
      if (document.documentElement.scrollWidth > window.innerWidth) throw Error("the page is wider than the screen")"""
    page = write_report(request.getfixturevalue(kind), tmp_path / "page.html")
    dom = touched(page, script, tmp_path / "profile")
    assert ('data-category="true"' in dom) == (kind != "compared")


def test_a_report_without_a_renderer_says_so_in_one_sentence(tmp_path, monkeypatch):
    """Training writes the page at its end, and a failure of vl-convert must not fail it."""
    real = subprocess.run

    def dying(*args, **options):
        return real([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)

    def refused(*args, **options):
        raise OSError("no more processes")

    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",), layers=2)
    for run in (refused, dying):
        monkeypatch.setattr(vega.subprocess, "run", run)
        vega.script.cache_clear()
        with pytest.raises(InputError, match="nothing can be drawn: "):
            write_report(root)
        assert not (root / "report.html").exists()
    with pytest.raises(InputError, match="nothing can be drawn: "):
        vega.pictures_of([{}], [".png"])


def drawn(spec: dict[str, Any]) -> str:
    return vega.pictures_of([{"data": {"values": [{"a": 1}]}, "mark": "point"}, spec], [".svg"])[1][0].decode()


def test_a_picture_that_cannot_be_drawn_or_takes_too_long_is_one_sentence(monkeypatch):
    with pytest.raises(InputError, match="nothing can be drawn: ValueError: "):
        drawn({"mark": 5})
    monkeypatch.setattr(vega, "_PATIENCE", 0.001)
    with pytest.raises(InputError, match="nothing can be drawn: vl-convert took more than 0.001 s"):
        drawn({"mark": "point"})


def test_a_forked_process_can_draw():
    def draws() -> int:
        return int(">forked<" not in drawn({"mark": "point", "title": "forked"}))

    assert run_forked(draws) == 0


@open_page
def test_a_browser_without_decompression_says_so(full: Path, tmp_path: Path) -> None:
    page = write_report(full, tmp_path / "page.html")
    page.write_text(
        page.read_text().replace("<script>", "<script>delete window.DecompressionStream;</script><script>", 1)
    )
    dom = dom_after(page, "await new Promise((later) => setTimeout(later, 1000));", tmp_path / "profile")
    assert '<p id="script-error" class="alert">The figures of this page need a browser of 2023 or later.</p>' in dom


def test_captions_follow_the_choice_and_empty_figures_are_hidden():
    def undrawn() -> Any:
        raise ZeroDivisionError

    def no_content() -> Any:
        return SimpleNamespace(height=100, frames=())

    figures: Figures = []
    over, apart = ("Over layers", no_content), ("Difference", undrawn)
    (shown,) = number_figures([block("Loss", "", [("whole", [apart]), ("layers", [over, apart])])], figures)
    first, second = shown["figures"]
    assert (first["captions"], second["captions"]) == (["Difference", "Over layers"], ["", "Difference"])
    assert (first["absent"], second["absent"]) == (False, True)
    problems = [[figures[number].get("problem", "") for number in each["numbers"]] for each in (first, second)]
    could_not = "This figure could not be drawn: "
    assert problems[0][0].startswith(f"{could_not}ZeroDivisionError")
    assert problems[0][1].startswith(f"{could_not}AttributeError"), "a chart that cannot be put down"
    assert (problems[1][0], problems[1][1].startswith(could_not)) == ("", True)
    assert figures[second["numbers"][0]] == {"absent": True}
