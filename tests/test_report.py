import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("jinja2")

from lit_layers import records
from lit_layers.cli import report as command
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record
from lit_layers.report import facts, write_report
from tests.support.browser import CHROMIUM, dom_after
from tests.support.runs import STEPS, make_run, measurement

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def figures(page: Path) -> list[dict[str, Any]]:
    text = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page.read_text(), re.S)
    assert text is not None
    return json.loads(text[1])["figures"]


def shown(page: Path) -> str:
    """The page without its scripts and style."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(), flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full") / "run", failing=((64, "coupling", "RuntimeError: no SVD"),))


@pytest.fixture(scope="module")
def page(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(full, tmp_path_factory.mktemp("page") / "page.html")


def test_the_page_is_one_file_of_reasonable_size_beside_the_run(full: Path) -> None:
    before = {path.name for path in full.iterdir()}
    page = write_report(full)
    assert page == full / "report.html"
    assert {path.name for path in full.iterdir()} - before == {"report.html"}
    assert 4.5e6 < page.stat().st_size < 8e6
    assert page.read_text().count("plotly.js v") == 1


def test_the_page_asks_the_network_for_nothing(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'; [^\"]*\"", text)
    markup = re.sub(r"<script\b.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"(?:https?:)?//[\w.]+", markup)
    assert not re.findall(r"<(?:link|iframe|object|embed|base)\b|@import|\bsrc=|url\(", markup)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', markup))


def test_the_page_tells_run_results_failures_cost_and_provenance(full: Path, page: Path) -> None:
    text = shown(page)
    for expected in (
        "quickstart", "GPT2LMHeadModel", "1.47M", "819k", "3 min 08 s", "1 March 2026",
        "1 measurement failed", "RuntimeError: no SVD",
        "Line shape score 2.287 2.208 to 2.365 1.340 1.261 to 1.418 \N{MINUS SIGN}0.947",
        "Coupling k = 12",
        "Logit-lens loss nats per token layer 6",
        "All analyses", "Saving checkpoints 3.1 s 1.7%",
        "versions.torch 2.15.0", "bpe:2048", "0000000000000190",
    ):  # fmt: skip
        assert expected in text, expected
    measured = records.read(full / "measurements.jsonl")
    everything = sum(m.seconds for m in measured)
    lens = sum(m.seconds for m in measured if m.analysis == "lens")
    assert re.search(rf"Lens {len(STEPS)} 0\.5 s {lens:.1f} s {lens / 187.5:.1%}", text)
    assert f"All analyses {everything:.0f} s {everything / 187.5:.1%}" in text


def test_every_metric_of_every_analysis_has_its_figures(page: Path) -> None:
    text = page.read_text()
    titles = re.findall(r"<h3>(.*?)(?:<span|</h3>)", text)
    assert {
        *(
            "Line shape score",
            "Prompt entropy (nats)",
            "Probe accuracy (share)",
            "Coupling of pairs",
            "Singular values",
        ),
        *("Loss (nats per token)", "Learning rate", "Logit-lens loss (nats per token)"),
    } <= set(titles)
    drawn = figures(page)
    placed = {int(number) for numbers in re.findall(r'data-figures="([\d ]+)"', text) for number in numbers.split()}
    assert placed == set(range(len(drawn)))
    maps = [figure for figure in drawn if figure["data"][0]["type"] == "heatmap"]
    assert [len(figure["frames"]) for figure in maps] == [len(STEPS) - 1] * 2  # the failed step has none
    assert all("x" not in trace for figure in drawn for trace in figure["data"] if isinstance(trace.get("meta"), int))


def test_variants_are_options_with_the_plainest_first(page: Path) -> None:
    text = page.read_text()
    block = text[text.index("<h3>Prompt entropy") :]
    options = re.findall(r"<option[^>]*>(.*?)</option>", block[: block.index("</select>")])
    assert options[0] == "raw, all tokens"
    assert len(options) == 4
    assert 'value="1">median' in text


def test_a_median_of_the_whole_model_alone_is_no_choice_beside_curves_per_layer(page: Path) -> None:
    text = page.read_text()
    block = text[text.index("<h3>Line shape score") :]
    block = block[: block.index("</article>")]
    assert "<select" not in block
    first = int(re.findall(r'data-figures="(\d+)"', block)[0])
    names = [trace.get("name") for trace in figures(page)[first]["data"] if trace.get("showlegend")]
    assert names == ["Whole model"]
    block = text[text.index("<h3>Probe accuracy") :]
    assert re.findall(r"<option[^>]*>(.*?)</option>", block)[:2] == ["true labels", "random labels"]


def test_tables_over_tokens_and_directions_have_a_choice_of_layers_and_a_frame_a_step(tmp_path: Path) -> None:
    analyses = ("coupling", "token_coupling", "coupling_matrices", "cross_token_influence")
    page = write_report(make_run(tmp_path / "run", steps=(0, 1, 8), layers=3, analyses=analyses, scalars=False))
    text, drawn = page.read_text(), figures(page)

    def block(title: str) -> tuple[list[str], list[list[dict[str, Any]]]]:
        part = text[text.index(f"<h3>{title}") :]
        part = part[: part.index("</article>")]
        places = re.findall(r'data-figures="([\d ]+)"', part)
        return re.findall(r"<option[^>]*>(.*?)</option>", part), [[drawn[int(n)] for n in p.split()] for p in places]

    choices, ((one, two, three),) = block("Coupling of pairs of tokens")
    assert choices == ["layer 1", "layer 2", "layer 3"]
    assert [len(figure["frames"]) for figure in (one, two, three)] == [3, 3, 3]
    measured = [m for m in records.read(tmp_path / "run" / "measurements.jsonl") if m.analysis == "token_coupling"]
    for number, layer in ((0, 1), (2, 3)):
        figure = (one, two, three)[number]
        for frame, found in zip(figure["frames"], measured, strict=True):
            values = {
                (r.tags["token"], r.tags["other_token"]): r.value
                for r in found.records
                if r.metric == "token_coupling_pair" and r.layer == layer
            }
            assert frame["data"][0]["z"][1][7] == pytest.approx(values[14, 100], rel=1e-2)
            assert frame["data"][0]["z"][7][1] == pytest.approx(values[100, 14], rel=1e-2)
    choices, ((first, *_),) = block("One block in the other&#39;s directions")
    pairs = [(1, 3), (3, 1), (1, 1)]
    assert choices == [f"block {one} in the directions of block {two}" for one, two in pairs]
    assert len(first["data"][0]["z"]) == 30
    _, (matrices, graphs) = block("Coupling of pairs<")
    assert [figure["data"][0]["type"] for figure in (*matrices, *graphs)] == ["heatmap"] * 2 + ["scatter"] * 2
    assert len(graphs[0]["frames"]) == 3
    _, shapes = block("Influence of earlier tokens")
    assert [len(place) for place in shapes] == [1, 1, 1]
    assert shapes[2][0]["layout"]["xaxis"]["title"]["text"] == "Distance from the last token"
    assert "Coupling over tokens" in shown(page)


def test_text_of_the_run_is_shown_and_never_run(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",), run=NASTY)
    evil = Record(metric=NASTY, value=1.0, layer=1, tags={NASTY: NASTY})
    bad = measurement(NASTY, 1, "lens")
    records.append(root / "measurements.jsonl", Measurement(**{**vars(bad), "analysis": NASTY, "records": [evil]}))
    records.append(root / "measurements.jsonl", Measurement(**{**vars(bad), "analysis": "x", "error": NASTY}))
    text = write_report(root).read_text()
    assert NASTY not in text
    assert "<img" not in text
    assert "</script><script>alert" not in text
    assert text.count("<script") - text[text.index("plotly.js v") :].count("<script") >= 1
    assert html.escape(NASTY).replace("&#x27;", "&#39;") in text
    assert NASTY in shown(root / "report.html") or "alert(1)" in shown(root / "report.html")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": (0,)}, "Results"),
        ({"steps": (16,)}, "Results"),
        ({"scalars": False}, "Line shape score"),
        ({"analyses": ("lens",)}, "Logit-lens loss"),
        ({"analyses": ("coupling",)}, "Coupling of pairs"),
        ({"analyses": ()}, "Training"),
        (
            {"failing": tuple((step, "lens", "no") for step in (0, 1, 8)), "analyses": ("lens",)},
            "3 measurements failed",
        ),
    ],
)
def test_whatever_a_run_has_left_is_enough_for_a_page(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    root = make_run(tmp_path / "run", **{"steps": (0, 1, 8), "layers": 2, **change})
    (root / "run.json").unlink()
    for name in ("measurements.jsonl", "metrics.jsonl"):
        if (root / name).exists():
            with (root / name).open("a") as torn:
                torn.write('{"run": "quicks')
    assert expected in shown(write_report(root))


def test_measurements_of_other_runs_or_without_a_step_are_counted_not_drawn(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",))
    one = measurement("other", 1, "lens")
    records.append(root / "measurements.jsonl", one)
    records.append(root / "measurements.jsonl", Measurement(**{**vars(one), "run": "quickstart", "step": None}))
    text = shown(write_report(root))
    assert "other runs in this folder are not drawn: other" in text
    assert "1 measurement without a step is not drawn" in text


def test_a_retried_measurement_is_no_failure(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",), failing=((1, "lens", "no"),))
    records.append(root / "measurements.jsonl", measurement("quickstart", 1, "lens"))
    assert facts.read_run(root).failures == []
    assert "failed" not in shown(write_report(root))


def test_what_is_no_run_or_corrupt_or_unwritable_is_refused_and_the_old_page_stays(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a run's folder .*: no such folder"):
        write_report(tmp_path / "none")
    with pytest.raises(InputError, match=r"expected a run's folder .*: it has neither"):
        write_report(tmp_path)
    root = make_run(tmp_path / "run", steps=(0,), analyses=("lens",))
    with pytest.raises(InputError, match=r"cannot write .*page\.html: no such file or directory"):
        write_report(root, tmp_path / "nowhere" / "page.html")
    page = write_report(root)
    old = page.read_bytes()
    (root / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is not valid JSON .*delete it to go on"):
        write_report(root)
    (root / "run.json").unlink()
    lines = (root / "measurements.jsonl").read_text()
    (root / "measurements.jsonl").write_text("{\n" + lines)
    with pytest.raises(InputError, match=r"measurements\.jsonl, line 1: "):
        write_report(root)
    assert page.read_bytes() == old


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_run(tmp_path / "run", steps=(0,), analyses=("lens",))
    old = write_report(root).read_bytes()

    def full_disk(self: Path, text: str, **_: object) -> int:
        self.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*report\.html: no space left on device"):
        write_report(root)
    assert (root / "report.html").read_bytes() == old
    assert sorted(path.name for path in root.iterdir()) == [
        "measurements.jsonl",
        "metrics.jsonl",
        "report.html",
        "run.json",
    ]


def test_the_command_prints_where_the_page_and_the_table_are(full: Path, tmp_path: Path, capsys) -> None:
    page, table = tmp_path / "p.html", tmp_path / "t.parquet"
    assert command.main([str(full), "--out", str(page), "--export", str(table)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(table), str(page)]
    assert page.stat().st_size > 4e6
    assert table.stat().st_size > 1e4


def test_the_command_prints_provenance(full: Path, capsys) -> None:
    assert command.main([str(full), "--provenance"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"[run]", "id = a1b2c3d4", "[all measurements]", "versions.torch = 2.15.0", "[lens]"} <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ROOT/none"], "expected a run's folder"),
        (["ROOT", "--export", "x.xlsx"], "expected a file that ends in .parquet or .csv"),
        (["ROOT", "--exprot", "x.csv"], "unrecognized arguments: --exprot"),
        ([], "the following arguments are required: root"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(full: Path, capsys, arguments: list[str], sentence: str) -> None:
    assert main(["report", *[argument.replace("ROOT", str(full)) for argument in arguments]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lit-layers report: error: {sentence}")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_the_command_brings_wandb_up_to_date(tmp_path: Path, capsys) -> None:
    pytest.importorskip("wandb")
    from lit_layers.report.wandb_files import mirrored, run_files

    root = make_run(tmp_path / "run", steps=(0, 1), analyses=("lens",), layers=2)
    about = json.loads((root / "run.json").read_text())
    about["config"]["wandb"] = {"class_path": "lit_layers.report.WandbMirror", "init_args": {"mode": "offline"}}
    (root / "run.json").write_text(json.dumps(about))
    for _ in range(2):
        assert command.main([str(root), "--wandb"]) == 0
        assert "wandb sync" in capsys.readouterr().out
    known = mirrored(run_files(root, "a1b2c3d4"))
    assert "lens/kl_to_final/layer_01" in known.names[1]
    assert known.last_row == 2  # two steps and the table, once


def test_without_plotly_the_report_says_what_to_install(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("lit_layers.report.", "lit_layers.plots", "plotly"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("lit_layers.report.facts")
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match="a report needs plotly.*: pip install plotly jinja2, then run `lit-layers"):
        write_report(full)


@pytest.mark.slow
def test_importing_the_report_needs_neither_plotly_nor_wandb_nor_torch() -> None:
    code = (
        "import sys; sys.modules['plotly'] = sys.modules['wandb'] = sys.modules['jinja2'] = None;"
        "import lit_layers.report; assert not {'torch', 'lightning'} & sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def _plots(dom: str) -> list[str]:
    return re.findall(r'<div class="plot[^>]*data-figures=.*?(?=<div class="plot[^>]*data-figures=|<footer)', dom, re.S)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_a_browser_draws_every_figure_and_the_switches_work(tmp_path: Path) -> None:
    extra = ("coupling", "token_coupling", "coupling_matrices", "cross_token_influence")
    others = ("trajectory", "representation", "next_token_probe", "lens")
    page = write_report(make_run(tmp_path / "run", steps=(0, 1, 8), layers=2, analyses=(*extra, *others)))
    # When all is drawn, what there is is noted; then the page is touched: tokens for steps, another variant, a slider.
    script = """
      const plots = [...document.querySelectorAll(".plot")];
      const drawn = async () => {
        while (plots.some((plot) => plot.dataset.state !== "drawn")) {
          if (plots.some((plot) => plot.dataset.state === "failed")) throw Error("a figure failed");
          await new Promise((later) => setTimeout(later, 100));
        }
      };
      await drawn();
      const titles = [...document.querySelectorAll(".xtitle")].map((title) => title.textContent);
      document.body.dataset.before = titles.filter((title) => title === "Optimizer step").length;
      document.querySelector("input[value=tokens]").click();
      for (const select of document.querySelectorAll(".metric select")) {
        select.value = "1"; select.dispatchEvent(new Event("change"));
      }
      await drawn();
      for (const plot of plots) {
        if (plot.layout.sliders) await Plotly.animate(plot, ["0"], { mode: "immediate", frame: { duration: 0 } });
        for (const trace of plot.data) if ([].concat(trace.x || []).some(Number.isNaN)) throw Error("NaN");
      }
      document.body.dataset.touched = "yes";"""
    dom = dom_after(page, script, tmp_path / "profile")
    assert re.search(r'<p id="script-error"[^>]*hidden', dom)
    assert 'data-touched="yes"' in dom
    plots = _plots(dom)
    assert len(plots) > 30
    for plot in plots:
        assert 'data-state="drawn"' in plot
        assert 'class="main-svg"' in plot
    titles = re.findall(r'class="xtitle"[^>]*>([^<]*)<', dom)
    assert "Optimizer step" not in titles
    assert re.findall(r'data-before="(\d+)"', dom) == [str(titles.count("Tokens seen"))]
    assert titles.count("Tokens seen") > 20
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', re.sub(r"<script\b.*?</script>", "", dom, flags=re.S))


@pytest.mark.slow
def test_every_command_and_every_line_of_python_in_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    pytest.importorskip("wandb")
    make_run(tmp_path / "checkpoints" / "quickstart", steps=(0, 1, 4), layers=2)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "report.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(commands) == 5
    for line in commands:
        program, *arguments = line.split()
        assert program == "lit-layers"
        assert main(arguments) == 0, capsys.readouterr().err
    assert {"numbers.csv", "numbers.parquet"} <= {path.name for path in tmp_path.iterdir()}
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["coupling"]["value"].notna().all()
    assert len(names["coupling"]) == 3
