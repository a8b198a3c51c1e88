"""The tables and the figures of docs/studies/four_papers.md, from the study's measurements.

    python benchmarks/four_papers.py                     writes them from four_papers.parquet: four CPU minutes
    python benchmarks/four_papers.py --check             exits with 1 where they differ
    python benchmarks/four_papers.py --pack ROOT ROOT    first packs the runs of text and of images
    python benchmarks/four_papers.py --pack-mechanism ROOT   and those of mechanism
    python benchmarks/four_papers.py --run ROOT          only writes the numbers of one run as its folder

What is packed is one long table of values and standard errors in single precision, which `lit-layers emerge` also reads
(`--where`, `--metrics`); of pairs of layers it holds what the prediction of single blocks needs.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

import four_papers_mechanism

from lit_layers import records
from lit_layers.clock import (
    BlockTable,
    Clock,
    StepCurve,
    agreement_table,
    block_tables,
    curves_in,
    early_parts,
    forecast_models,
    layer_curves,
    measure_times,
    over_seeds,
    prediction_table,
)
from lit_layers.clock.block_prediction import prediction_charts
from lit_layers.clock.layer_statistics import MONOTONICITY
from lit_layers.clock.model_forecasts import error_rows
from lit_layers.figures.chart import Panels
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record
from lit_layers.report.emergence_charts import time_text, timeline
from lit_layers.report.side_by_side import Line, difference
from lit_layers.report.side_by_side import over_training as chart_over_training

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "four_papers.md"
DATA = PAGE.with_suffix(".parquet")
SAMPLE = "GPT-2, seed 0"
IMAGES = PAGE.parents[1] / "images"
TIMELINE = IMAGES / "four_papers_timeline.png"
COUPLING, BLOCKS = IMAGES / "four_papers_coupling.png", IMAGES / "four_papers_blocks.png"
TABLE = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
COLUMNS = ("metric", "layer", "other_layer", "value", "stderr")
NORMAL_95 = 1.959964
OF_BLOCKS = {"step_norm", "state_norm"}
FOLDER = re.compile(r"shuffle_(?P<what>tokens|labels)=(?P<shuffled>True|False),seed_everything=(?P<seed>\d+)")
MODELS = {"tokens": "GPT-2", "labels": "ViT"}
GROUPS = ("GPT-2", "GPT-2, shuffled tokens", "ViT", "ViT, shuffled labels")
RISING_STEPS = (0, 8, 64, 192)
BLOCK_STEPS = (0, 1, 4, 16, 32, 64, 128, 192, 384, 576, 960, 2048)
BLOCK_LINES = (("skip_one", "coupling, k = 12"), ("skip_one", "influence"), ("repeat_one", "influence"))
FORECAST = {"GPT-2": "lens/logit_lens_loss", "ViT": "lens/logit_lens_loss"}
Table = Iterator[list[str]]


@dataclass(frozen=True)
class Asked:
    """A number of the tables: what it is called there and which record it is; without `layer` of the last one."""

    title: str
    metric: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    layered: bool = False
    layer: int | None = None


ASKED = (
    Asked("line-shape score", "line_shape_score"),
    Asked("expodistance", "expodistance"),
    Asked("linearized rollout", "linearized_rollout"),
    Asked("coupling, k = 4", "coupling", {"k": 4}),
    Asked("coupling, k = 12", "coupling", {"k": 12}),
    Asked("coupling, k = 32", "coupling", {"k": 32}),
    Asked("prompt entropy", "prompt_entropy", {"normalization": "raw", "drop_first": 0}),
    Asked("dataset entropy", "dataset_entropy", {"normalization": "raw"}),
    Asked("token curvature", "token_curvature"),
    Asked("loss of the readout, last layer", "logit_lens_loss", layered=True),
    Asked("loss of the readout, middle layer", "logit_lens_loss", layered=True, layer=6),
    Asked("probe accuracy, last layer", "accuracy", layered=True),
    Asked("probe accuracy, middle layer", "accuracy", layered=True, layer=6),
)
RISING = (
    Asked("probe accuracy", MONOTONICITY, {"of": "accuracy"}),
    Asked("loss of the readout (improves)", MONOTONICITY, {"of": "logit_lens_loss"}),
    Asked("prompt entropy", MONOTONICITY, {"of": "prompt_entropy", "normalization": "raw", "drop_first": 0}),
    Asked("norm of the states", MONOTONICITY, {"of": "state_norm"}),
    Asked("loss without the block (improves)", MONOTONICITY, {"of": "variant_loss", "variant": "skip_one"}),
)


# ------------------------------------------------------------------------------------------------ packed and unpacked


def pack(roots: Iterable[Path], out: Path) -> None:
    """Writes the measurements of the study's runs as one table; what has not come to its end is left out."""
    frames: dict[str, pd.DataFrame] = {}
    for folder in sorted(path.parent for root in roots for path in root.glob("*/measurements.jsonl")):
        if (match := FOLDER.fullmatch(folder.name)) is None:
            raise SystemExit(f"{folder}: expected a run of the study")
        shuffled = f", shuffled {match['what']}" if match["shuffled"] == "True" else ""
        rows = [
            {"step": m.step, "tokens": m.tokens, "analysis": m.analysis}
            | {name: getattr(record, name) for name in COLUMNS}
            | record.tags
            for m in records.read(folder / "measurements.jsonl")
            for record in m.records
            if _is_kept(record)
        ]
        run = f"{MODELS[match['what']]}{shuffled}, seed {match['seed']}"
        frames[run] = pd.DataFrame(rows).assign(run=run)
    for model in MODELS.values():
        steps = {run: frame["step"].nunique() for run, frame in frames.items() if run.startswith(model)}
        for run in [run for run, number in steps.items() if number < max(steps.values())]:
            print(f"left out: {run} has {steps[run]} of {max(steps.values())} checkpoints")
            del frames[run]
    table = pd.concat(frames.values(), ignore_index=True)
    table["tokens"] = pd.to_numeric(table["tokens"])  # images have none
    whole = [name for name in table if pd.api.types.is_numeric_dtype(table[name]) and name not in ("value", "stderr")]
    table = table.astype(dict.fromkeys(whole, "Int32") | {"value": "float32", "stderr": "float32"})
    table[["run", *(name for name in table if name != "run")]].to_parquet(out, compression="zstd", index=False)


def _is_kept(record: Record) -> bool:
    if {*records.PLACES, "reference", "head"} & record.tags.keys() or record.metric == records.FAILED:
        return False
    if record.other_layer is not None:
        neighbours = record.layer is not None and record.other_layer == record.layer + 1
        return record.metric == "coupling_pair" or (
            record.metric == "layer_cosine" and neighbours and record.tags["mode"] == "token"
        )
    return record.metric in OF_BLOCKS or not (look_up(record.metric).secondary or look_up(record.metric).unlisted)


def unpack(path: Path, run: str | None = None) -> dict[str, list[Measurement]]:
    """Returns the measurements of each run of a packed table, or of one of them alone."""
    table: Any = pd.read_parquet(path, filters=None if run is None else [("run", "==", run)])
    names = [name for name in table if name not in ("run", "step", "tokens", "analysis", *COLUMNS)]
    runs: dict[str, list[Measurement]] = {}
    for (name, step, analysis), part in table.groupby(["run", "step", "analysis"], sort=False):
        found = []
        for row in part.drop(columns=["run", "step", "analysis"]).to_dict("records"):
            tags = {name: _plain(row[name]) for name in names if not pd.isna(row[name])}
            ends: dict[str, Any] = {name: None if pd.isna(row[name]) else _plain(row[name]) for name in COLUMNS}
            found.append(Record(**ends, tags=tags))
        at: Any = {"run": name, "step": int(step), "tokens": _plain(part["tokens"].iloc[0]), "seconds": 0.0}
        runs.setdefault(name, []).append(Measurement(**at, analysis=analysis, records=found, provenance={}))
    return runs


def with_intervals(measurement: Measurement) -> Measurement:
    """The measurement as a page draws it: with 95% intervals, and without the cosines of neighbouring layers alone."""
    shown = []
    for record in measurement.records:
        if record.metric != "layer_cosine":
            half = None if record.stderr is None else NORMAL_95 * record.stderr
            ends = {} if half is None else {"low": record.value - half, "high": record.value + half}
            shown.append(replace(record, **ends))
    return replace(measurement, records=shown)


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Study:
    """Of each group, a model on data or on shuffled data, the curves of each run and what predicts its blocks' harm."""

    curves: Mapping[str, Mapping[str, list[StepCurve]]]
    blocks: Mapping[str, pd.DataFrame]

    @classmethod
    def of(cls, runs: Mapping[str, list[Measurement]]) -> "Study":
        curves: dict[str, dict[str, list[StepCurve]]] = {group: {} for group in GROUPS}
        blocks: dict[str, list[BlockTable]] = {group: [] for group in GROUPS}
        for run, measurements in runs.items():
            group = run.rpartition(", seed")[0]
            curves[group][run] = curves_in(run, measurements)
            with tempfile.TemporaryDirectory() as folder:
                for measurement in measurements:
                    records.append(Path(folder) / "measurements.jsonl", measurement)
                (Path(folder) / "run.json").write_text(json.dumps({"run": run}))
                blocks[group] += block_tables(folder)
        predicted = {group: prediction_table(tables, pooled=True) for group, tables in blocks.items()}
        pooled = {group: table[~table["run"].isin([*curves[group]])] for group, table in predicted.items()}
        if lacking := [group for group, table in pooled.items() if table.empty]:
            raise SystemExit(f"{DATA.name}: no two seeds of {lacking[0]} have the changes of single blocks")
        return cls(curves, pooled)

    def seeds_of(self, group: str, asked: Asked) -> list[StepCurve]:
        found = [_find(curves, asked) for curves in self.curves[group].values()]
        return [curve for curve in found if curve is not None]


def _find(curves: Sequence[StepCurve], asked: Asked) -> StepCurve | None:
    tags = {name: str(tag) for name, tag in asked.tags.items()}
    found = [
        curve
        for curve in curves
        if curve.metric == asked.metric
        and tags.items() <= {name: str(tag) for name, tag in curve.tags.items()}.items()
        and curve.tags.get("statistic") is None
        and curve.tags.get("pooling") in (None, "cls")
        and ("of" in curve.tags) == ("of" in tags)
        and (curve.layer is not None) == asked.layered
        and asked.layer in (None, curve.layer)
    ]
    return max(found, key=lambda curve: curve.layer or 0, default=None)


def when(study: Study) -> Table:
    """Half-way points over seeds."""
    yield ["half-way at step", *(f"{group} ({len(runs)} seeds)" for group, runs in study.curves.items())]
    for asked in ASKED:
        merged = [over_seeds(study.seeds_of(group, asked), group) for group in study.curves]
        times = [measure_times(curves).times[0] if curves else None for curves in merged]
        yield [
            asked.title,
            *("not measured" if found is None else time_text(found.halfway) or "does not emerge" for found in times),
        ]


def last_values(study: Study) -> Table:
    """Means over seeds at the last checkpoint, and what structure makes of them."""
    yield ["at the last checkpoint", "data", "shuffled", "difference"]
    for model in MODELS.values():
        data, shuffled = [group for group in study.curves if group.startswith(model)]
        for asked in ASKED:
            lines = [Line.of(group, study.seeds_of(group, asked)) for group in (data, shuffled)]
            lines.append(difference(*lines))
            yield [f"{model}: {asked.title}", *(_interval(line, -1, ".3g") for line in lines)]


def over_layers(study: Study) -> Table:
    """Spearman's rho of a number and its layer, over seeds, from the untrained weights on."""
    yield ["rho of value and layer", *(f"step {step}" for step in RISING_STEPS), "last step"]
    for group, runs in study.curves.items():
        rises = {run: [*curves, *(each.curve for each in layer_curves(curves))] for run, curves in runs.items()}
        for asked in RISING:
            seeds = [curve for curves in rises.values() if (curve := _find(curves, asked)) is not None]
            line = Line.of(group, seeds)
            at = [*line.at.tolist()]
            places = [at.index(step) for step in RISING_STEPS]
            yield [f"{group}: {asked.title}", *(_interval(line, place, ".2f") for place in (*places, -1))]


def _interval(line: Line, place: int, form: str) -> str:
    return f"{line.values[place]:{form}} [{line.low[place]:{form}}, {line.high[place]:{form}}]"


def agreement(study: Study) -> Table:
    """Spearman's correlation of half-way points between runs."""
    yield ["runs", "pairs", "median Spearman", "lowest", "highest", "curves in common"]
    clocks = {}
    for group, runs in study.curves.items():
        found = [(run, _find(curves, asked)) for run, curves in runs.items() for asked in ASKED]
        clocks[group] = measure_times([_renamed(run, curve) for run, curve in found if curve is not None])
        yield [f"{group}: seed against seed", *_spread(agreement_table(clocks[group]))]
    for a, b in ((GROUPS[0], GROUPS[1]), (GROUPS[2], GROUPS[3]), (GROUPS[0], GROUPS[2])):
        both = Clock(clocks[a].curves + clocks[b].curves, clocks[a].times + clocks[b].times)
        table = agreement_table(both)
        pairs = zip(table["run_a"], table["run_b"], strict=True)
        mixed = [x.startswith(f"{a}, seed") != y.startswith(f"{a}, seed") for x, y in pairs]
        yield [f"{a} against {b}", *_spread(table[mixed])]


def _renamed(run: str, curve: StepCurve) -> StepCurve:
    """With one name for a number of text and of images."""
    kept = {name: tag for name, tag in curve.tags.items() if name in ("k", "normalization", "drop_first")}
    parts = {"metric": curve.metric, "layer": curve.layer, "tags": kept, "at": curve.at, "values": curve.values}
    return StepCurve(run=run, analysis="", stderr=curve.stderr, **parts)


def _spread(table: pd.DataFrame) -> list[str]:
    rho: Any = table["spearman"]
    few, many = table["n"].min(), table["n"].max()
    common = f"{few}" if few == many else f"{few} to {many}"
    return [str(len(table)), *(f"{number:.2f}" for number in (rho.median(), rho.min(), rho.max())), common]


def spared(study: Study, given: str) -> Table:
    """What the harm of changing a block goes with, pooled over seeds: the mean over the trained checkpoints."""
    yield ["changing a block by", "predictor", *study.blocks]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for group, table in study.blocks.items():
        rows: Any = table[table["step"].isna() & (table["given"] == given)]
        for row in rows.to_dict("records"):
            p = "p < 0.001" if row["p_value"] < 1e-3 else f"p {row['p_value']:.2g}"
            interval = "" if np.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
            cells.setdefault((row["harm"], row["predictor"]), {})[group] = f"{row['rho']:.2f}{interval}, {p}"
    for (harm, predictor), found in cells.items():
        yield [harm, predictor, *(found.get(group, "not measured") for group in study.blocks)]


def over_training(study: Study) -> Table:
    """The correlation of a block's harm with what may predict it at some checkpoints, pooled over seeds."""
    yield ["step", *map(str, BLOCK_STEPS)]
    for group, table in study.blocks.items():
        for harm, predictor in BLOCK_LINES:
            chosen = (table["harm"] == harm) & (table["predictor"] == predictor) & (table["given"] == "")
            line: Any = table[chosen & table["step"].notna()].set_index("step")
            cells = [line.loc[step] if step in line.index else None for step in BLOCK_STEPS]
            marked = ["" if c is None else f"{c['rho']:.2f}{'*' if c['p_value'] < 0.05 else ''}" for c in cells]
            yield [f"{group}: {harm}, {predictor}", *marked]


def forecasts(study: Study) -> Table:
    """Errors of forecasts from the first tenth of training, seed by seed held out."""
    yield ["of, forecast by", "mean error", "of the baseline's", "of the loss's", "80% intervals that hold", "width"]
    for group, loss in FORECAST.items():
        curves = [curve for asked in ASKED for curve in study.seeds_of(group, asked)]
        found = forecast_models(early_parts(curves, 0.1, loss=loss), measure_times(curves))
        for heading, rows in error_rows(found):
            yield from ([f"{group}: {heading.split(',')[0]}, {name}", *cells] for name, *cells in rows)


def tables_of(study: Study) -> dict[str, list[list[str]]]:
    """Every table of the page, by its name there."""
    return {
        "when": [*when(study)],
        "last values": [*last_values(study)],
        "over layers": [*over_layers(study)],
        "agreement": [*agreement(study)],
        "blocks": [*spared(study, "")],
        "blocks given depth": [*spared(study, "depth")],
        "over training": [*over_training(study)],
        "forecasts": [*forecasts(study)],
    }


def mechanism_of(path: Path) -> tuple[four_papers_mechanism.Mechanism, four_papers_mechanism.Mechanism]:
    """Returns the study of mechanism and its control on shuffled tokens, of the runs of a packed table."""
    runs = {run: curves_in(run, each) for run, each in unpack(path).items()}
    groups = [{run: runs[run] for run in runs if run.rpartition(", seed")[0] == group} for group in GROUPS[:2]]
    if lacking := [group for group, found in zip(GROUPS, groups, strict=False) if not found]:
        raise SystemExit(f"{path.name}: no run of {lacking[0]}")
    study, control = (four_papers_mechanism.Mechanism.of(found) for found in groups)
    return study, control


def with_tables(page: str, tables: Mapping[str, list[list[str]]]) -> str:
    """Returns the page with its tables."""

    def written(match: re.Match[str]) -> str:
        head, *rows = tables[match["name"]]
        lines = [head, ["---"] * len(head), *rows]
        return match[1] + "".join(f"| {' | '.join(row)} |\n" for row in lines) + match[3]

    return TABLE.sub(written, page)


def write_timeline(seeds: Sequence[StepCurve], path: Path) -> None:
    """Draws when each number is half-way and at its peak, over the seeds and in each."""
    together = f"{len({curve.run for curve in seeds})} seeds"
    timeline(measure_times([*over_seeds(seeds, together), *seeds])).write(path)


def write_coupling(study: Study, path: Path = COUPLING) -> None:
    """Draws the excess coupling of the text models on data and on shuffled tokens, with bands over seeds."""
    groups, asked = GROUPS[:2], Asked("excess coupling", "excess_coupling", {"k": 12})
    chart_over_training({group: Line.of(group, study.seeds_of(group, asked)) for group in groups}, groups).write(path)


def write_blocks(study: Study, path: Path = BLOCKS) -> None:
    """Draws how the harm of changing a block of the text models goes with what is measured of it, over seeds."""
    table = study.blocks[GROUPS[0]]
    charts = prediction_charts(table, [], table["run"].iloc[0])
    Panels(title="", charts=charts, columns=1, width=640).write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", nargs="+", type=Path, default=[], metavar="ROOT", help="folders of the runs")
    parser.add_argument("--pack-mechanism", type=Path, metavar="ROOT", help="folder of the runs of mechanism")
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where a table differs")
    parser.add_argument("--run", type=Path, metavar="ROOT", help=f"only write {SAMPLE!r} as a run to this new folder")
    options = parser.parse_args()
    if options.run:
        if options.run.exists():
            raise SystemExit(f"--run: {options.run} is there already: name a new folder")
        for measurement in unpack(DATA, SAMPLE)[SAMPLE]:
            records.append(options.run / "measurements.jsonl", with_intervals(measurement))
        return 0
    if options.pack:
        pack(options.pack, DATA)
    if options.pack_mechanism:
        pack([options.pack_mechanism], four_papers_mechanism.DATA)
    page = PAGE.read_text(encoding="utf-8")
    study, mechanism = Study.of(unpack(DATA)), mechanism_of(four_papers_mechanism.DATA)
    drawn = with_tables(page, tables_of(study) | four_papers_mechanism.mechanism_tables(*mechanism))
    if options.check:
        return int(drawn != page)
    PAGE.write_text(drawn, encoding="utf-8")
    write_timeline([curve for asked in ASKED for curve in study.seeds_of(GROUPS[0], asked)], TIMELINE)
    write_coupling(study)
    write_blocks(study)
    four_papers_mechanism.write_mechanism(*mechanism)
    print(PAGE, *sorted(IMAGES.glob("four_papers_*.png")), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
