"""Figures of models with changed block orders: numbers of the records, medians and best loops."""

import itertools
import math
import random
import statistics

import pandas as pd
import pytest

from lit_layers import plots, records
from lit_layers.errors import InputError
from lit_layers.records import Record
from tests.support.charts import drawn, line, names, values
from tests.support.written import measured

MIDDLES = [1, 3, 5]
MEDIAN = "intervene/median_over_tasks"


def table(*measurements: tuple[str, int | None, list[Record]], run: str = "r", **provenance: str) -> pd.DataFrame:
    return records.frame(
        measured(analysis, own, run=run, step=step, provenance=provenance if step == 8 else {})
        for analysis, step, own in measurements
    )


def record(metric: str, value: float, variant: str, *, layer: int | None = None, **rest) -> Record:
    interval = {name: rest.pop(name) for name in ("low", "high", "stderr") if name in rest}
    return Record(metric=metric, value=value, layer=layer, tags={"variant": variant, **rest}, **interval)


def variant_frame(metric: str, values: dict[str, list[float]], *, loops: dict[int, list[float]] | None = None, **tags):
    rows = [record(metric, 2.0, "baseline", **tags)]
    for name, row in values.items():
        rows += [record(metric, v, name, middle=m, **tags) for m, v in zip(MIDDLES, row, strict=True)]
    for k, row in (loops or {}).items():
        rows += [
            record(metric, v, "looped_parallel", middle=m, loops=k, **tags)
            for m, v in zip(MIDDLES, row, strict=True)
            if math.isfinite(v)
        ]
    return rows


LOOPS = {2: [3.0, 2.5, 4.0], 4: [3.5, 2.2, 4.0], 6: [4.0, 2.9, 3.7]}


# ------------------------------------------------------------------------------------------------ over the middle


def test_each_variant_is_a_line_over_the_middle_blocks_without_single_orders():
    rows = variant_frame("variant_loss", {"skip": [2.5, 3, 4], "random": [2, 2.4, 3]}, loops=LOOPS)
    rows += [record("variant_loss", 9.0, "random", middle=3, seed=s, schedule=f"1 {s}") for s in range(5)]
    fig = plots.variant_curves(table(("interventions", None, rows)), "variant_loss")
    assert drawn(fig, "Skip") == dict(zip(MIDDLES, [2.5, 3, 4], strict=True))
    assert values(fig, "Random order") == [2, 2.4, 3]
    assert values(fig, "Looped parallel, k = 2") == [3.0, 2.5, 4.0], "2 and 4 are as near to 3: the fewer"
    assert values(fig, "Full model") == [2, 2]


def test_intervals_come_from_the_record():
    rows = variant_frame("task_score", {"skip": [0.5, 0.4, 0.3]})
    rows += [record("task_score", 0.5, "random", middle=1, low=0.4, high=0.7)]
    rows += [record("task_score", 0.4, "random", middle=3, low=0.3, high=0.45)]
    fig = plots.variant_curves(table(("intervene/lambada", None, rows)), "task_score")
    (band,) = [one for one in fig.series if one.interval == "band" and one.has_interval]
    assert band.name == "Random order"
    assert band.low == pytest.approx([0.4, 0.3])
    assert band.high == pytest.approx([0.7, 0.45])


def test_guessing_is_a_line_where_it_is_known():
    rows = variant_frame("task_score", {"skip": [0.5, 0.4, 0.3]}, task="winogrande")
    rows += [record("normalized_score", 0.7, "skip", middle=1)]
    guess = Record(metric="random_score", value=0.5, tags={"task": "winogrande"})
    frame = table(("intervene/winogrande", None, [*rows, guess]))
    assert values(plots.variant_curves(frame, "task_score"), "Guessing") == [0.5, 0.5]
    assert {*values(plots.variant_curves(frame, "normalized_score"), "Guessing")} == {0}
    without = table(("intervene/winogrande", None, rows))
    assert "Guessing" not in names(plots.variant_curves(without, "task_score"))


def test_a_slider_goes_over_the_checkpoints_and_the_last_is_shown():
    steps = {1: [4.0, 5.0, 6.0], 8: [2.5, 3.0, 4.0]}
    measured = [("interventions", s, variant_frame("variant_loss", {"skip": row})) for s, row in steps.items()]
    fig = plots.variant_curves(table(*measured), "variant_loss")
    assert fig.frames == [1, 8]
    assert [values(fig, "Skip", number) for number in (0, 1)] == [*steps.values()]
    assert [row["y"] for row in fig.spec()["data"]["values"]][:3] == steps[8], "a picture shows the last"
    low, high = fig.y.ends
    assert low < 2
    assert high > 6


def test_figures_refuse_what_they_cannot_show():
    def table_of(step: int | None, rows: list[Record], **provenance: str) -> pd.DataFrame:
        return table(("interventions", step, rows), **provenance)

    blocks = table_of(None, [record("loss", 1.0, "baseline"), record("loss", 2.0, "skip_one", layer=1)])
    skipped = variant_frame("loss", {"skip": [1.0, 2.0, 3.0]})
    middle, suspect = table_of(1, skipped), table_of(8, skipped, audit="suspect: equal to the final step")
    seeds = table_of(1, [record("loss", 1.0, "random", middle=3, seed=0, schedule="1 2")])
    two_ways = [
        row for when in ("before", "after") for row in variant_frame("loss", {"skip": [1.0, 2.0, 3.0]}, when=when)
    ]
    curves = plots.variant_curves
    for draw, frame, metric, options, sentence in (
        (curves, blocks, "loss", {}, "no values of variants of the middle"),
        (plots.loop_map, blocks, "loss", {}, "no values of looped_parallel"),
        (curves, middle, "loss", {"blocks": True}, "no values of single blocks"),
        (curves, middle, "nothing", {}, "no rows of metric 'nothing'"),
        (plots.models_by_middle, middle, "loss", {"variant": "reverse"}, "no values of the variant 'reverse'"),
        (curves, seeds, "loss", {}, "but single random orders"),
        (curves, table_of(1, two_ways), "loss", {}, "choose one by tags: before fine-tuning; after fine-tuning"),
        (curves, suspect, "loss", {}, "suspect step 8"),
    ):
        with pytest.raises((ValueError, InputError), match=sentence):
            draw(frame, metric, **options)
    assert values(curves(table_of(1, two_ways), "loss", tags={"when": "after"}), "Skip") == [1, 2, 3]


# ------------------------------------------------------------------------------------------------ loops and blocks


@pytest.mark.parametrize("metric", ["variant_loss", "variant_accuracy"])
def test_the_map_of_loops_marks_the_best_of_each_middle(metric: str):
    rng, higher = random.Random(3), metric == "variant_accuracy"
    scored = {(k, m): round(rng.random(), 2) for k in (1, 2, 3, 5) for m in MIDDLES}
    del scored[5, 1], scored[3, 3]
    scored[2, 5] = scored[3, 5] = 2.0 if higher else -1.0  # the smallest among equals
    rows = variant_frame(metric, {"skip": [9.0, 9.0, 9.0]})
    for (k, m), value in scored.items():
        name, loops = ("parallel", {}) if k == 1 else ("looped_parallel", {"loops": k})
        rows.append(record(metric, value, name, middle=m, **loops))
    fig = plots.loop_map(table(("interventions", None, rows)), metric)
    (table_,), (marks,) = fig.cells.values, fig.series
    for (row, k), (column, m) in itertools.product(enumerate((1, 2, 3, 5)), enumerate(MIDDLES)):
        assert table_[row][column] == scored.get((k, m)), "what was not measured is blank"
    choose = max if higher else min
    best = {m: choose((k for k in (1, 2, 3, 5) if (k, m) in scored), key=lambda k: scored[k, m]) for m in MIDDLES}
    assert dict(zip(marks.x, marks.y, strict=True)) == best
    assert best[5] == 2
    reverse = {"name": "viridis", "extent": [1, 0]}
    assert fig.cells.scheme == ("viridis" if higher else reverse), "bright is better"


def test_single_blocks_are_lines_over_the_blocks():
    rows = [record("variant_loss", 1.0, "baseline")]
    rows += [record("variant_loss", 10.0 - n, "skip_one", layer=n) for n in (3, 1, 2)]
    rows += [record("variant_loss", 5.0 + n, "switch", layer=n) for n in (1, 2)]
    fig = plots.variant_curves(table(("interventions", None, rows)), "variant_loss", blocks=True)
    assert drawn(fig, "Skip one block") == {1: 9, 2: 8, 3: 7}
    assert values(fig, "Switch with the next") == [6, 7]
    assert values(fig, "Full model") == [1, 1]


# ------------------------------------------------------------------------------------------------ over tasks


def scores(step: int | None, values: dict[str, list[float]], *, also: dict[str, int] | None = None) -> list:
    found = []
    for name, row in values.items():
        rows = [record("normalized_score", 1.0, "baseline", task=name)]
        rows += [record("normalized_score", v, "skip", middle=m, task=name) for m, v in zip(MIDDLES, row, strict=False)]
        rows += [record("normalized_score", 7.0, "random", middle=3, seed=0, schedule="1", task=name)]
        found.append((f"intervene/{name}", step, rows))
    return found


def test_the_median_is_over_the_tasks_that_have_every_variant():
    values = {"a": [0.9, 0.5, 0.2], "b": [0.8, 0.7, 0.1], "c": [1.1, 0.1, -0.2], "d": [0.95, 0.55, 0.3]}
    found = plots.add_task_medians(table(*scores(None, {**values, "e": [5.0, 5.0]})))
    own = found.frame[found.frame["analysis"] == MEDIAN]
    skipped = own[own["variant"] == "skip"].sort_values("middle")
    assert list(skipped["value"]) == pytest.approx([statistics.median(v[n] for v in values.values()) for n in range(3)])
    assert set(own["n"]) == {4}
    assert own["seed"].isna().all()
    assert found.notes[MEDIAN] == ("Median over tasks a, b, c, d. Not included, because some variants are missing: e.")
    fig = plots.variant_curves(found.frame, "normalized_score", analysis=MEDIAN)
    assert list(line(fig, "Skip").y) == pytest.approx([0.925, 0.525, 0.15])


def medians_of(found) -> dict[tuple[int, int], float]:
    """Return the medians of skipped blocks, by step and middle."""
    own = found.frame[(found.frame["analysis"] == MEDIAN) & (found.frame["variant"] == "skip")]
    return {(int(s), int(m)): v for s, m, v in zip(own["step"], own["middle"], own["value"], strict=True)}


def test_an_undefined_task_gives_no_median():
    early = scores(1, {"a": [math.nan, 0.4, 0.3], "b": [0.8, 0.7, 0.1]})
    late = scores(8, {"a": [0.9, 0.5, 0.2], "b": [0.8, 0.7, 0.1]})
    found = plots.add_task_medians(table(*early, *late))
    at = {(1, 3): 0.55, (1, 5): 0.2, (8, 1): 0.85, (8, 3): 0.6, (8, 5): 0.15}
    assert medians_of(found) == pytest.approx(at)
    note = found.notes[MEDIAN]
    assert "step 1: Median over tasks a, b. 1 of 4 numbers are left out" in note
    assert note.endswith("step 8: Median over tasks a, b.")


def test_each_checkpoint_has_the_median_of_its_own_tasks():
    young = scores(1, {"a": [0.9, 0.4, 0.3]})
    grown = scores(8, {"a": [0.9, 0.5, 0.2], "b": [0.8, 0.7, 0.1], "c": [0.1, 0.2, 0.6]})
    found = plots.add_task_medians(table(*young, *grown))
    assert medians_of(found) == pytest.approx({(8, 1): 0.8, (8, 3): 0.5, (8, 5): 0.2})
    assert found.notes[MEDIAN] == (
        "step 1: No median over tasks: fewer than two have every variant. step 8: Median over tasks a, b, c."
    )


def test_one_task_has_no_median_and_glue_has_a_mean():
    frame = table(*scores(None, {"a": [0.9, 0.5, 0.2]}))
    assert plots.add_task_medians(frame).frame is frame
    glue = [
        (f"intervene/glue/{name}", None, [record("task_score", v, "skip", middle=3, training=kind) for kind, v in row])
        for name, row in {"cola": (("full", 0.6), ("frozen", 0.2)), "rte": (("full", 0.7), ("frozen", 0.5))}.items()
    ]
    found = plots.add_task_medians(table(*glue)).frame
    own = found[found["analysis"] == "intervene/glue/mean_over_tasks"]
    assert dict(zip(own["training"], own["value"], strict=True)) == pytest.approx({"full": 0.65, "frozen": 0.35})


# ------------------------------------------------------------------------------------------------ models


def deep_run(run: str, depth: int, single: str | None = "skip_one"):
    """Return losses 3, 4, 5 of skipping 1, 3 and 5 blocks, and a loss for each single block of a model of `depth`."""
    found = variant_frame("variant_loss", {"skip": [3.0, 4.0, 5.0]})
    last = depth - (single == "switch")
    blocks = [Record(metric="variant_loss", value=1.0, layer=n, tags={"variant": single}) for n in range(1, last + 1)]
    return table(("interventions", None, found + (blocks if single else [])), run=run)


def test_models_of_other_depth_are_drawn_over_the_share_of_their_blocks():
    for single in ("skip_one", "switch"):
        frame = pd.concat([deep_run("small", 8, single), deep_run("large", 10)])
        fig = plots.models_by_middle(frame, "variant_loss", variant="skip")
        lines = {one.name: list(one.x) for one in fig.series if one.legend}
        assert lines == {"small": [100 * m / 8 for m in MIDDLES], "large": [100 * m / 10 for m in MIDDLES]}, single
        assert [list(one.y) for one in fig.series if one.legend] == [[3, 4, 5]] * 2
        assert fig.series[0].texts[0] == "M = 1 of 8"
        assert "per cent" in fig.x.title
    for depths, kind in (((8, 8), "skip_one"), ((8, 10), None)):  # as deep, or of unknown depth
        frame = pd.concat([deep_run(name, depth, kind) for name, depth in zip(("a", "b"), depths, strict=True)])
        fig = plots.models_by_middle(frame, "variant_loss", variant="skip")
        assert [*fig.series[0].x] == MIDDLES, kind
        assert "(M)" in fig.x.title


# ------------------------------------------------------------------------------------------------ similarity, pictures


def test_similarities_are_coloured_from_the_smallest_of_all_checkpoints_to_1():
    measured = []
    for step, apart in ((1, 0.3), (8, 0.8)):
        cells = {(0, 0): 1.0, (0, 1): apart, (1, 0): apart, (1, 1): 1.0}
        found = [Record(metric="layer_cosine", value=v, layer=i, other_layer=j) for (i, j), v in cells.items()]
        measured.append(("layer_similarity", step, found))
    assert plots.layer_matrix(table(*measured), "layer_cosine").cells.ends == (0.3, 1.0)
