"""Models with changed block orders: page, tables of results, pictures, W&B."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from lit_layers import plots, records
from lit_layers.records import Record
from lit_layers.report import write_report
from lit_layers.report.logged_numbers import curves_of
from lit_layers.report.rendering import write_pictures
from lit_layers.report.sections import intervention_sections
from tests.support import variant_results
from tests.support.charts import blocks
from tests.support.undrawn import leave_undrawn
from tests.support.written import measured, write


def sections(page: Path) -> dict[str, dict[str, list[str]]]:
    """Return the titles of sections and of their blocks, with the blocks' choices."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in re.findall(r'<section id="section-\d+">(.*?)</section>', page.read_text(), re.S):
        articles = re.findall(r"<h3>(.*?)(?:<span|</h3>)(.*?)</article>", part, re.S)
        (title, *_) = re.findall(r"<h2>(.*?)</h2>", part)
        found[title] = {html.unescape(name): re.findall(r"<option[^>]*>(.*?)<", each) for name, each in articles}
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("painters") / "run"
    return variant_results.write(root, steps=(0, 512), blocks=4, seeds=3, custom=("1 (2,3) 4",))


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_report(run)


def test_a_section_has_few_blocks_whatever_was_measured(page: Path) -> None:
    found = sections(page)
    kinds = ("Tasks", "GLUE", "Fine-tuning", "Speed")
    assert {"Layer similarity", "Interventions", *(f"{kind} under intervention" for kind in kinds)} == found.keys()
    assert {*found["Interventions"]} == {"Middle blocks changed", "Number of loops", "Single blocks"}
    assert found["Interventions"]["Middle blocks changed"] == ["Loss", "Accuracy", "Divergence from the full model"]
    tasks = found["Tasks under intervention"]["Middle blocks changed"]
    assert tasks[0] == "Median over tasks: normalized score"
    assert len(tasks) == 1 + 2 * len(variant_results.TASKS)
    assert "Median over tasks lambada, arc_challenge, winogrande." in page.read_text()
    assert all(len(choices) <= 24 for blocks in found.values() for choices in blocks.values())


def test_the_page_shows_the_numbers_of_the_records(run: Path, page: Path) -> None:
    (last,) = [m for m in records.read(run / "measurements.jsonl") if (m.analysis, m.step) == ("interventions", 512)]
    expected = {
        r.tags["middle"]: r.value
        for r in last.records
        if r.metric == "variant_accuracy" and r.tags["variant"] == "random" and "seed" not in r.tags
    }
    _, ((_, accuracy, _),) = blocks(page)["Middle blocks changed"]
    assert accuracy.line("Random order", 1) == pytest.approx(expected, rel=1e-4)
    assert accuracy.frames == [0, 512]
    choices, (maps,) = blocks(page)["Cosine of layers (cosine)"]
    assert len({json.dumps(one.z) for one in maps if one.is_map}) == len(maps) == 2, "each mode has its own map"
    assert choices == ["token by token", "of flattened prompts"]
    assert blocks(page)["Stages of a model"][0] == ["Beginning layers", "Middle layers", "Ending layers"]


def test_tables_of_results_have_a_few_variants_and_no_single_order(run: Path) -> None:
    frame = plots.add_task_medians(records.frame(run / "measurements.jsonl")).frame
    table = plots.change_table(frame)
    own = table[(table["analysis"] == "interventions") & (table["metric"] == "variant_loss")]
    whole = ("middle repeated", "skip", "parallel", "reverse", "random order", "looped parallel")
    assert {name.split(",")[0] for name in own["variant"]} == {"full model", *whole}
    assert len(own) == 1 + len(whole)
    medians = table[table["metric"] == "normalized_score"]
    assert set(medians["analysis"]) == {"intervene/median_over_tasks"}
    assert "kl_to_full" not in set(table["metric"])


def test_models_without_steps_have_the_figures_and_several_stand_side_by_side(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": (None,), "seeds": 2, "analyses": ("interventions",)}
    for name, depth in (("hub/small", 4), ("hub/large", 6)):
        variant_results.write(tmp_path / "both", run=name, blocks=depth, **options)
    found = sections(write_report(tmp_path / "both"))
    assert next(iter(found["Interventions"])) == "Models side by side"
    assert found["Interventions"]["Middle blocks changed"] == ["small, Loss", "large, Loss"]
    assert "Loss: skip" in found["Interventions"]["Models side by side"]
    _, ((first, *_), *_) = blocks(tmp_path / "both" / "report.html")["Models side by side"]
    assert first.legend == ["small", "large"]


def test_other_metrics_of_such_an_analysis_keep_their_figures_and_many_variants_a_choice_each(tmp_path: Path) -> None:
    own = [Record(metric="my_number", value=float(layer), layer=layer) for layer in range(3)]
    many = [Record(metric="my_number", value=float(m), tags={"middle": m}) for m in range(9)]
    for step in (1, 2):
        write(tmp_path, "interventions", own, step=step)
        write(tmp_path, "mine", many, step=step)
    found = sections(write_report(tmp_path))
    assert "My number" in found["Interventions"]
    assert len(found["Mine"]["My number"]) == 9


def test_the_pictures_of_a_run_include_those_of_its_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_undrawn(monkeypatch)
    root = variant_results.write(tmp_path / "run", steps=(8,), blocks=4, analyses=("finetune",))
    names = {
        f"intervene_finetune_middle_blocks_changed_{name}_{when}_fine-tuning"
        for name in ("task_score", "task_score_normalized_by_length")
        for when in ("before", "after")
    }
    assert {path.stem for path in write_pictures(root, tmp_path / "out")} == names


def test_wandb_gets_a_curve_per_variant_but_no_single_orders_and_one_number_of_loops() -> None:
    own = variant_results.interventions(8, blocks=6, seeds=4)
    points = {name: each.value for name, each in curves_of([measured("interventions", own, step=8)], {}, "all").items()}
    assert not [name for name in points if "seed=" in name or "schedule=" in name]
    assert {name for name in points if "loops=" in name and "variant_loss" in name} == {
        f"interventions/variant_loss/loops=3/middle={m}/variant=looped_parallel" for m in (1, 3, 5)
    }
    mean = next(r for r in own if r.tags.get("num_seeds") == 4 and r.metric == "variant_loss" and r.tags["middle"] == 3)
    assert points["interventions/variant_loss/middle=3/variant=random"] == mean.value
    assert points["interventions/kl_to_full/variant=baseline"] == 0


def test_the_page_shows_differences_from_the_full_model_with_their_intervals(tmp_path: Path) -> None:
    for step, shift in ((1, 0.0), (8, 1.0)):
        found = [Record(metric="variant_loss", value=3.0, tags={"variant": "baseline"})]
        for layer in (1, 2):
            value, tags = shift + layer / 4, {"variant": "skip_one"}
            ends = {"low": value - 0.1, "high": value + 0.1}
            found += [Record(metric="variant_loss", value=3.5, layer=layer, tags=tags)]
            found += [Record(metric="variant_loss_difference", value=value, layer=layer, tags=tags, **ends)]
        write(tmp_path, "interventions", found, step=step)
    table = write_report(tmp_path).read_text().split("What each order changes")[1].split("</table>")[0]
    assert "Loss less the full model&#39;s (nats)" in table
    assert re.findall(r"<td>(.*?)</td><td[^>]*>(.*?)<small>(.*?)</small>", table) == [
        ("skip one block, block 1", "1.250", "1.150 to 1.350"),
        ("skip one block, block 2", "1.500", "1.400 to 1.600"),
    ]


def test_variants_that_failed_break_no_page_and_have_no_curve(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    task = {"task": "arc"}
    found = [Record(metric="random_score", value=0.25, tags=task)]
    for tags, score in (({"variant": "baseline"}, 0.6), ({"variant": "skip", "middle": 3}, 0.5)):
        found.append(Record(metric="task_score", value=score, stderr=0.02, n=100, tags=tags | task))
    for name in ("reverse", "parallel"):
        tags = {"variant": name, "middle": 3, "error": f"RuntimeError: {name}"}
        found.append(Record(metric="failed", value=1.0, tags=tags | task))
    for step in (1, 2):
        write(tmp_path, "intervene/arc", found, step=step)
    assert write_report(tmp_path).is_file()
    drawn = str(intervention_sections(records.frame(tmp_path / "measurements.jsonl"), {}))
    assert ("Failed" in drawn, "Skip" in drawn) == (False, True)
    names = [path.name for path in write_pictures(tmp_path, tmp_path / "pictures")]
    assert names
    assert not any("failed" in name for name in names)
